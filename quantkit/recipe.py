"""Recipes: a run written down in TOML, so that a job repeats it: data, passes, rules, several outputs, gates.

    [data]                      # calibration for every output that needs some
    calibration = "bundled"
    [[rules]]                   # per module, the first match wins
    match = "down_proj"
    bits = 8
    [[outputs]]
    name = "{model}-gptq"
    passes = [{ method = "awq" }, { method = "gptq", damp = 0.05 }]
    [[outputs]]
    format = "gguf"
    type = "Q4_K_M"
    [gates]
    max_kl = 0.1

A recipe is checked as a whole before anything is read: an unknown key or an impossible value is shown with its line. Every output is
what one command makes; its keys are that command's flags. Recipes with only [types] are mixtures of GGUF types (see `mixture`).
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.commands._options import DataOptions, ExportOptions, GateOptions, RunOptions
from quantkit.errors import UsageError, name_list
from quantkit.foreign import reason
from quantkit.methods import options_of
from quantkit.registry import data_folder

SCALERS = ("awq", "smoothquant")
SOLVERS = ("gptq", "rtn")
TOP = ("summary", "model", "data", "passes", "rules", "outputs", "gates", "types")
GATES = (*(field.name for field in dataclasses.fields(GateOptions)), "data", "windows")
MODEL = ("types", "max_parameters")
RULE = ("match", "bits", "group", "sym", "keep")
# What a recipe does not say, because it belongs to the machine or to the moment.
OUTSIDE = frozenset({"json", "force", "dry_run", "restart", "quiet", "output", "eval", "cache", "offline", "revision", "trust_remote_code"})
PATHS = ("calibration", "data", "imatrix", "type")


@dataclass(frozen=True)
class Output:
    """One artifact: its name (with {model}), the command that makes it, and that command's options as given."""

    name: str
    command: str
    given: dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """A checked recipe. gates: limits and what they are measured on; model: which models it is for."""

    path: Path
    summary: str
    outputs: tuple[Output, ...]
    gates: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)


class _Text:
    """A recipe's lines, to show the one that is wrong."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.lines = path, text.splitlines()

    def error(self, why: str, key: str = "", table: str = "", number: int = 0) -> UsageError:
        """Return an error that shows the line of `key` in the `number`th table of that name."""
        at = self._find(key, table, number)
        shown = f", line {at + 1}:\n    {self.lines[at].strip()}\n" if at is not None else ": "
        return UsageError(f"{self.path}{shown}{why}")

    def _find(self, key: str, table: str, number: int) -> int | None:
        begin, seen = 0 if not table else None, -1
        for index, line in enumerate(self.lines):
            if head := re.match(r"\s*\[\[?\s*([\w.]+)\s*\]\]?", line):
                seen += head[1] == table
                begin = index if head[1] == table and seen == number else None if table or begin is None else begin
            if begin is not None and key and re.search(rf"(^|[\s{{,]){re.escape(key)}\s*=", line.split("#")[0]):
                return index
            if begin == index and not key:
                return index
        return None


def find(name: str) -> Path:
    """Return the path of a recipe: a file, or one of those that ship; a UsageError lists them."""
    path = Path(name).expanduser()
    if path.suffix == ".toml" and path.is_file():
        return path
    shipped = data_folder("recipes") / f"{name.removesuffix('.toml')}.toml"
    if "/" not in name and shipped.is_file():
        return shipped
    names = [recipe.stem for recipe, _, mixture in listed() if not mixture]
    raise UsageError(f"There is no recipe '{name}'. Name a .toml file, or one that ships: {', '.join(names)}.")


def listed() -> list[tuple[Path, str, bool]]:
    """Return the recipes that ship, with a line about each and whether it is a mixture of GGUF types: runs first, then mixtures."""
    paths = sorted(data_folder("recipes").glob("*.toml"), key=lambda path: (_is_mixture(path), path.name))
    return [(path, _summary(path), _is_mixture(path)) for path in paths]


def _is_mixture(path: Path) -> bool:
    return "types" in tomllib.loads(path.read_text(encoding="utf-8"))


def _summary(path: Path) -> str:
    """Return a recipe's summary, or what the first comment of a mixture says."""
    text = path.read_text(encoding="utf-8")
    return str(tomllib.loads(text).get("summary") or text.splitlines()[0].partition(": ")[2])


def load(path: Path) -> Recipe:
    """Return a recipe; a UsageError shows the line that is wrong."""
    try:
        content = path.read_text(encoding="utf-8")
        table = tomllib.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no TOML: {reason(error)}.") from None
    text = _Text(path, content)
    _settle_paths(table, path.resolve().parent)
    for key in table:
        if key not in TOP:
            raise text.error(f"Unknown key '{key}'. Known: {', '.join(TOP)}.", key) if not isinstance(table[key], (dict, list)) else (
                text.error(f"Unknown table '{key}'. Known: {', '.join(TOP)}.", "", key))  # fmt: skip
    if "types" in table and "outputs" not in table:
        raise UsageError(f"{path} is a mixture of GGUF types: use it with `quantkit export-gguf --type {path}`.")
    for key, kind in (("model", dict), ("data", dict), ("gates", dict), ("passes", list), ("rules", list), ("outputs", list)):
        if not isinstance(table.get(key, kind()), kind) or (
            kind is list and not all(isinstance(item, dict) for item in table.get(key, []))
        ):
            raise text.error(f"'{key}' must be {'tables, [[' + key + ']]' if kind is list else 'a table, [' + key + ']'}.", key)
    if not table.get("outputs"):
        raise text.error("There is no [[outputs]]: say what to make.")
    _known(text, table.get("data", {}), [f.name for f in dataclasses.fields(DataOptions)], "data")
    _known(text, table.get("gates", {}), GATES, "gates")
    _known(text, table.get("model", {}), MODEL, "model")
    rules = _rules(text, table.get("rules", []))
    outputs = [_output(text, number, one, table, rules) for number, one in enumerate(table["outputs"])]
    names = [output.name for output in outputs]
    if twice := next((i for i, name in enumerate(names) if name in names[:i]), None):
        raise text.error(f"Two outputs are called '{names[twice]}'. Give each a name.", "", "outputs", twice)
    return Recipe(path, str(table.get("summary", "")), tuple(outputs), table.get("gates", {}), table.get("model", {}))


def _settle_paths(table: Any, folder: Path) -> None:
    """Take files that lie beside the recipe from there, wherever the command runs."""
    for value in table.values() if isinstance(table, dict) else table if isinstance(table, list) else ():
        _settle_paths(value, folder)
    for key in PATHS if isinstance(table, dict) else ():
        value = table.get(key)
        if isinstance(value, str) and value and not Path(value).expanduser().is_absolute() and (folder / value).is_file():
            table[key] = str(folder / value)


def _known(text: _Text, given: dict[str, Any], names: Any, table: str, number: int = 0) -> None:
    for key in given:
        if key not in names:
            raise text.error(f"Unknown key '{key}' in {table}. Known: {', '.join(sorted(names))}.", key, table, number)


def _rules(text: _Text, rules: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the rules as values of --override and --exclude."""
    made: dict[str, list[str]] = {"override": [], "exclude": []}
    for number, rule in enumerate(rules):
        _known(text, rule, RULE, "rules", number)
        try:
            re.compile(rule["match"])
        except (KeyError, TypeError, re.error):
            raise text.error("A rule needs 'match', a regular expression of module names.", "match", "rules", number) from None
        if rule.get("keep"):
            made["exclude"].append(rule["match"])
            continue
        parts = [
            f"{key}:{('yes' if rule[key] else 'no') if key == 'sym' else rule[key]}" for key in ("bits", "group", "sym") if key in rule
        ]
        if not parts:
            raise text.error("A rule says bits, group or sym, or keep = true.", "", "rules", number)
        made["override"].append(f"{rule['match']}={','.join(parts)}")
    return made


def _output(text: _Text, number: int, one: dict[str, Any], table: dict[str, Any], rules: dict[str, list[str]]) -> Output:
    given = {key: value for key, value in one.items() if key not in ("name", "passes")}
    data = table.get("data", {})
    if one.get("format") == "gguf":
        kind = str(given.get("type", "Q4_K_M"))
        needed = data if given.get("imatrix") == "auto" else {}
        given = {**needed, **{key: value for key, value in given.items() if key != "format"}}
        _build(text, number, [ExportOptions], given)
        suffix = Path(kind).stem if kind.endswith(".toml") else kind
        return Output(str(one.get("name", f"{{model}}-{suffix}.gguf")), "export-gguf", given)
    passes = one.get("passes", table.get("passes", []))
    if not passes or not all(isinstance(item, dict) for item in passes):
        raise text.error('An output needs passes (or format = "gguf"): [[passes]] for all, or its own.', "", "outputs", number)
    command, options = _passes(text, number, passes)
    merged = {**data, **options, **given}
    for key, values in rules.items():
        if values:
            merged[key] = [*merged.get(key, []), *values]
    _build(text, number, [options_of(command), RunOptions], merged)
    return Output(str(one.get("name", f"{{model}}-{command}")), command, merged)


def _passes(text: _Text, number: int, passes: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return the command that a list of passes is, and its options: a solver, or a scaler and what follows it."""
    names = [str(item.get("method", "")) for item in passes]
    for name in names:
        if name not in (*SCALERS, *SOLVERS):
            raise _wrong(text, number, f"Unknown method '{name}'. Known: {', '.join((*SCALERS, *SOLVERS))}.", "method")
    scalers, solvers = [n for n in names if n in SCALERS], [n for n in names if n in SOLVERS]
    if len(scalers) > 1 or len(solvers) > 1 or names != [*scalers, *solvers]:
        why = f"Passes are at most one of {', '.join(SCALERS)}, then one of {', '.join(SOLVERS)}; not {name_list(names)}."
        raise text.error(why, "passes", "outputs", number)
    options = {key: value for item in passes for key, value in item.items() if key != "method"}
    if scalers:
        return scalers[0], {**options, "then": solvers[0] if solvers else options.get("then", "rtn")}
    return solvers[0], options


def _build(text: _Text, number: int, classes: list[Any], given: dict[str, Any]) -> None:
    """Make the options once, so that what cannot be is said with its line."""
    fields = {f.name: f for cls in classes for f in dataclasses.fields(cls) if f.name not in OUTSIDE}
    for key, value in given.items():
        if key not in fields:
            raise _wrong(text, number, f"Unknown key '{key}'. Known: {', '.join(sorted(fields))}.", key)
        wanted = fields[key].default
        if not _fits(value, wanted):
            raise _wrong(text, number, f"'{key}' is {value!r}; it must be like {wanted!r}.", key)
        choices = fields[key].metadata.get("choices")
        if choices and value not in choices:
            raise _wrong(text, number, f"'{key}' is {value!r}. Known: {', '.join(choices)}.", key)
    try:
        for cls in classes:
            build(cls, given)
    except UsageError as error:
        key = next((key for key in given if f"--{key.replace('_', '-')} " in f"{error} "), "")
        raise _wrong(text, number, str(error), key) from None


def _wrong(text: _Text, number: int, why: str, key: str) -> UsageError:
    """Return an error at a key of an output, or of the tables that it takes its keys from."""
    for table, index in (("outputs", number), ("passes", 0), ("data", 0), ("", 0)):
        if text._find(key, table, index) is not None:
            return text.error(why, key, table, index)
    return text.error(why, "", "outputs", number)


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, tuple):
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if isinstance(default, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(default, int):
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, str)


def build(cls: Any, given: dict[str, Any], **more: Any) -> Any:
    """Return the options of a class from those of its names that are given."""
    names = {f.name for f in dataclasses.fields(cls)}
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in {**given, **more}.items() if key in names}
    return cls(**values)
