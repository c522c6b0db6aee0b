"""The house rules: imports go one way, sizes keep their budgets, README and help texts are true."""

from __future__ import annotations

import ast
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "quantkit"
FILES = sorted(PACKAGE.rglob("*.py"))
LAYERS = [
    {"errors", "document", "findings", "foreign", "lock", "registry", "tensors", "memory"},
    {"codecs"},
    {"backends"},
    {"methods", "families"},
    {"formats", "source", "loader", "corpus", "mixture"},
    {"selfwritten", "plan", "importance", "recipe"},
    {"calibrate", "schedules", "journal", "folds", "infer"},
    {
        "artifact",
        "pipeline",
        "manifest",
        "trial",
        "verify",
        "perplexity",
        "energy",
        "export",
        "inventory",
        "repack",
        "forecast",
        "stopwatch",
        "streams",
    },
    {"report", "report_page", "artifact_page", "junit"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
PLUGINS = ("codecs", "methods")
# The command line's options are plain data that both may read.
PLAIN = {"quantkit.commands._options", "quantkit.methods._options"}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
MAX_FILE, MAX_FUNCTION, MAX_CLASS, MAX_PARAMETERS = 400, 60, 250, 8


def part(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path: Path) -> list[tuple[str, int, bool]]:
    """Return (module, line, inside a function) of every import of ours."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {id(n) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.Lambda)) for n in ast.walk(f) if n is not f}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quantkit"):
            names = [f"quantkit.{a.name}" for a in node.names] if node.module == "quantkit" else [node.module or ""]
            found += [(name, node.lineno, id(node) in inner) for name in names]
        elif isinstance(node, ast.Import):
            found += [(a.name, node.lineno, id(node) in inner) for a in node.names if a.name.startswith("quantkit")]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    here = part(path)
    if here == "__init__":
        return
    for module, line, inside in imports(path):
        there = module.split(".")[1] if "." in module else ""
        if there.startswith("__") or module in PLAIN or not there or inside:
            continue
        assert RANK[there] <= RANK[here], f"{path.name}:{line} imports {module}, which is further up"
        sibling = here == there and here in PLUGINS and path.name != "__init__.py"
        assert not sibling or module.split(".")[-1].startswith("_") or module == f"quantkit.{here}", f"{path.name}:{line}: siblings"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_budgets(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= (MAX_FUNCTION if isinstance(node, ast.FunctionDef) else MAX_CLASS), (
                f"{path.name}: {node.name} has {length} lines"
            )
        if isinstance(node, ast.FunctionDef) and path.parent.name != "cpu":  # compiled kernels take their arrays one by one
            names = [argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]]
            assert len([n for n in names if n != "self"]) <= MAX_PARAMETERS, f"{path.name}: {node.name} takes {len(names)}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_public_things_have_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{path} has no docstring"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"


def test_no_forbidden_names_and_no_code_among_data() -> None:
    assert not [p for p in FILES if p.stem in ("utils", "base", "common", "helpers")]
    for folder in ("kernels", "calibration", "recipes"):
        assert not list((ROOT / folder).rglob("*.py"))


def test_environment_is_read_only_by_the_command_line() -> None:
    for path in FILES:
        if path.name != "cli.py":
            assert not re.search(r"os\.(environ|getenv)", path.read_text(encoding="utf-8")), path


def test_contributing_shows_the_tree() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = next(part for part in text.split("```") if part.strip().startswith("quantkit/\n"))
    shown = set(re.findall(r"^  (\w+(?:\.py|/))", block, re.MULTILINE))
    real = {p.name for p in PACKAGE.glob("*.py") if not p.name.startswith("__")}
    real |= {p.name + "/" for p in PACKAGE.iterdir() if p.is_dir() and not p.name.startswith("__")}
    assert shown == real


def test_pages_name_real_commands_and_flags() -> None:
    readme = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    helps = {
        name: run_help(name)
        for name in (
            "gptq",
            "rtn",
            "to-hf",
            "eval-ppl",
            "generate",
            "export-gguf",
            "imatrix",
            "inspect",
            "diff",
            "convert",
            "awq",
            "smoothquant",
            "bench",
            "verify",
            "run",
            "recipes",
            "reproduce",
            "plan",
            "report",
            "doctor",
        )
    }
    helps["plan"] += helps["awq"]  # it takes the flags of the run that it plans
    for line in readme.splitlines():
        if match := re.match(r"quantkit ([a-z-]+) ", line):
            for flag in re.findall(r"--[a-z-]+", line.split("#")[0]):
                assert flag in helps[match[1]], f"{flag} is no flag of {match[1]}"
    for flag in set(re.findall(r"`(--[a-z-]+)", readme)):
        assert any(flag in text for text in helps.values()) or flag == "--help", flag


def test_the_page_of_commands_is_what_the_code_says() -> None:
    done = subprocess.run([sys.executable, "-c", "import commands; print(commands.text(), end='')"], cwd=ROOT / "docs", capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'docs'}"}, check=True)  # fmt: skip
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert done.stdout == page, "run python docs/commands.py"


def run_help(*words: str) -> str:
    command = [sys.executable, "-m", "quantkit", *words, "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("words", [(), ("gptq",)])
def test_help_is_fast_and_imports_no_torch(words: tuple[str, ...]) -> None:
    run_help(*words)
    spent = []
    for _ in range(5):  # processor time: a busy machine makes the clock lie
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run_help(*words)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.3
    code = "import sys; import quantkit.cli; assert not {'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_project_speaks_of_itself_alone() -> None:
    words = re.compile(r"\.\./shared|/work/|sandbox", re.IGNORECASE)
    for path in [*FILES, *PAGES, ROOT / "CHANGELOG.md", ROOT / "Makefile", ROOT / "pyproject.toml"]:
        assert not words.search(path.read_text(encoding="utf-8")), path
