"""Recipes: checked as a whole with the offending line shown; every output is what its own command makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import make_model

from quantkit import recipe
from quantkit.errors import UsageError

Run = Callable[..., Any]

GOOD = """
summary = "two ways"
[data]
calibration = "{text}"
samples = 4
seq_len = 64

[[rules]]
match = "down_proj"
bits = 8
[[rules]]
match = "layers\\\\.1\\\\..*gate"
keep = true

[[outputs]]
name = "{{model}}-a"
passes = [{{ method = "awq", search_tokens = 128 }}, {{ method = "gptq", damp = 0.02 }}]
format = "gptq"
group_size = 32

[[outputs]]
name = "{{model}}.gguf"
format = "gguf"
type = "Q8_0"

[gates]
max_kl = {kl}
windows = 1
"""


@pytest.mark.parametrize("path", [path for path, *_ in recipe.listed()], ids=lambda path: path.stem)
def test_what_ships_is_listed_and_valid(path: Path) -> None:
    import tomllib

    if "types" in tomllib.loads(path.read_text()):
        with pytest.raises(UsageError, match="mixture of GGUF types"):
            recipe.load(path)
    else:
        assert recipe.load(path).outputs and recipe.load(path).summary


def test_a_recipe_makes_what_its_commands_make(run_cli: Run, llama: Path, tmp_path: Path, text_file: Path) -> None:
    (tmp_path / "r.toml").write_text(GOOD.format(text=text_file, kl=100))
    code, document, err = run_cli("run", tmp_path / "r.toml", llama, "-o", tmp_path / "out", "--json", "-q")
    assert code == 0 and document["gates_missed"] == [], err
    assert [one["command"] for one in document["outputs"]] == ["awq", "export-gguf"]
    assert [row["model"] for row in document["measured"]] == ["llama-a", "llama.gguf"]
    kept = [m["module"] for m in document["outputs"][0]["plan"]["modules"] if m["method"] == "keep"]
    assert kept == ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"] or kept == ["model.layers.1.mlp.gate_proj"]
    data = ("--calibration", text_file, "--samples", 4, "--seq-len", 64)
    words = ("--then", "gptq", "--damp", 0.02, "--search-tokens", 128, "--group-size", 32, "--format", "gptq")
    rules = ("--override", "down_proj=bits:8", "--exclude", r"layers\.1\..*gate")
    assert run_cli("awq", llama, "-o", tmp_path / "alone", *data, *words, *rules, "-q")[0] == 0
    assert run_cli("export-gguf", llama, "-o", tmp_path / "llama.gguf", "--type", "Q8_0", "-q")[0] == 0
    for name in sorted(p.name for p in (tmp_path / "alone").iterdir()):
        assert (tmp_path / "alone" / name).read_bytes() == (tmp_path / "out" / "llama-a" / name).read_bytes(), name
    for name in ("llama.gguf", "llama.quantkit.json"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_a_missed_gate_exits_3(run_cli: Run, llama: Path, tmp_path: Path, text_file: Path) -> None:
    (tmp_path / "r.toml").write_text(GOOD.format(text=text_file, kl=0))
    code, document, err = run_cli("run", tmp_path / "r.toml", llama, "-o", tmp_path / "out", "--json", "-q")
    assert code == 3 and len(document["gates_missed"]) == 2 and "llama-a misses --max-kl 0" in err


BAD = {
    "unknown top": ("sumary = 1", "Unknown key 'sumary'", "sumary = 1"),
    "unknown in output": ("group_size = 32", "Unknown key 'group_sizes'", "group_sizes = 32"),
    "wrong kind": ("damp = 0.02", "'damp' is 'much'", 'damp = "much"'),
    "impossible": ("damp = 0.02", "--damp 7 cannot be", "damp = 7"),
    "unknown method": ('method = "awq"', "Unknown method 'awk'", 'method = "awk"'),
    "unknown choice": ('format = "gptq"', "'format' is 'gtpq'. Known: auto", 'format = "gtpq"'),
    "rule without match": ('match = "down_proj"', "Unknown key 'mtach'", 'mtach = "down_proj"'),
    "rule that is no expression": ('match = "down_proj"', "regular expression", 'match = "(("'),
    "unknown gate": ("windows = 1", "Unknown key 'window'", "window = 1"),
    "unknown data": ("samples = 4", "Unknown key 'sample'", "sample = 4"),
}


@pytest.mark.parametrize("kind", BAD)
def test_the_offending_line_is_shown(kind: str, run_cli: Run, llama: Path, tmp_path: Path, text_file: Path) -> None:
    old, why, new = BAD[kind]
    text = GOOD.format(text=text_file, kl=1)
    text = f"{old}\n{text}" if kind == "unknown top" else text.replace(old, new, 1)
    (tmp_path / "r.toml").write_text(text)
    number = next(i for i, line in enumerate(text.splitlines(), 1) if new in line)
    code, _, err = run_cli("run", tmp_path / "r.toml", llama, "-o", tmp_path / "out")
    assert code == 2 and why in err and f"line {number}:" in err and new in err, err
    assert not (tmp_path / "out").exists()


def test_what_a_recipe_is_not_for(run_cli: Run, tmp_path: Path, text_file: Path) -> None:
    model = make_model(tmp_path / "m", "qwen2")
    base = GOOD.format(text=text_file, kl=1)
    for table, why in (
        ('[model]\ntypes = ["llama"]\n', "is for llama; m is qwen2"),
        ("[model]\nmax_parameters = 10\n", "at most 10 parameters"),
    ):
        (tmp_path / "r.toml").write_text(base + table)
        code, _, err = run_cli("run", tmp_path / "r.toml", model)
        assert code == 1 and why in err
    assert run_cli("run", "no-such", model)[0] == 2
    assert run_cli("run", "q4_k_m", model)[0] == 2
    (tmp_path / "r.toml").write_text("not toml")
    assert run_cli("run", tmp_path / "r.toml", model)[0] == 2


def test_recipes_are_listed(run_cli: Run) -> None:
    code, document, _ = run_cli("recipes", "--json")
    assert code == 0 and {"three-ways", "best-4bit", "q4_k_m"} <= {row["name"] for row in document["recipes"]}
    assert json.dumps(document)


def test_what_is_made_already_is_kept_and_the_rest_goes_on(run_cli: Run, llama: Path, tmp_path: Path, text_file: Path) -> None:
    (tmp_path / "r.toml").write_text(GOOD.format(text=text_file, kl=100))
    words = ("run", tmp_path / "r.toml", llama, "-o", tmp_path / "out", "--json")
    assert run_cli(*words, "-q")[0] == 0
    (tmp_path / "out" / "llama.gguf").unlink()
    (tmp_path / "out" / "llama.quantkit.json").unlink()
    before = (tmp_path / "out" / "llama-a" / "model.safetensors").stat().st_mtime_ns
    code, document, err = run_cli(*words)
    assert code == 0 and "llama-a is there already" in err, err
    assert [one.get("made_before", False) for one in document["outputs"]] == [True, False]
    assert (tmp_path / "out" / "llama-a" / "model.safetensors").stat().st_mtime_ns == before
    (tmp_path / "r.toml").write_text(GOOD.format(text=text_file, kl=100).replace("0.02", "0.03"))
    code, _, err = run_cli(*words)
    assert code == 1 and "is not what this recipe makes" in err


def test_every_output_is_planned_before_the_first_is_made(run_cli: Run, llama: Path, tmp_path: Path, text_file: Path) -> None:
    (tmp_path / "r.toml").write_text(GOOD.format(text=text_file, kl=100).replace('"Q8_0"', '"Q4_K_M"\nstrict = true'))
    code, _, err = run_cli("run", tmp_path / "r.toml", llama, "-o", tmp_path / "out")
    assert code == 1 and "--strict" in err and not list((tmp_path / "out").iterdir())


def test_paths_are_the_recipes_own(run_cli: Run, llama: Path, tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "c.txt").write_bytes(text_file.read_bytes())
    (tmp_path / "here" / "r.toml").write_text(GOOD.format(text="c.txt", kl=100))
    monkeypatch.chdir(tmp_path)
    code, document, err = run_cli("run", "here/r.toml", llama, "-o", tmp_path / "out", "--dry-run", "--json")
    assert code == 0 and len(document["outputs"]) == 2, err
