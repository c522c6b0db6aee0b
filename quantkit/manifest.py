"""The manifest of an artifact: how it was made and what it must hold, so that it can be proven and made again.

`quantkit.json` in a folder; beside a GGUF file `NAME.quantkit.json`. It holds no time, so the same run gives the same bytes: the
request as it was given (`run`), what decides the bytes, every module as its solver left it, every tensor and every file with its
SHA-256. A damaged file is found by its own checksum, a damaged tensor in it by that tensor's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantkit.errors import SourceError
from quantkit.foreign import read_json
from quantkit.formats import _gguf, _safetensors
from quantkit.formats._safetensors import TensorInfo
from quantkit.formats.store import MEDUSA

NAME = "quantkit.json"
VERSION = 1
WEIGHTS = (".safetensors", ".gguf")
PIECE = re.compile(r"-\d{5}-of-\d{5}$")
CHUNK = 1 << 22
# Options that choose where, how loudly or how often, and no byte of the result.
APART = frozenset({
    "output", "force", "json", "quiet", "dry_run", "restart", "resume_states", "eval", "cache", "max_memory", "log_file", "time_budget",
    "backend",
})  # fmt: skip
# Options that a run may choose itself: `run` has what it chose, the command for people leaves them out.
CHOSEN = frozenset({"device", "threads", "schedule", "batch"})
PATHS = ("calibration", "imatrix", "type")
NEGATIVE = {"sym": "--asym"}


def path_of(artifact: Path) -> Path:
    """Return where the manifest of a folder or GGUF file is; the pieces of a split file share one."""
    if artifact.suffix == ".gguf":
        return artifact.with_name(PIECE.sub("", artifact.stem) + "." + NAME)
    return artifact / NAME


def read(path: Path) -> dict[str, Any]:
    """Return a manifest; a SourceError if it is none, or of another version."""
    found = read_json(path)
    if found.get("version") != VERSION:
        raise SourceError(f"{path} is a manifest of version {found.get('version')!r}; this quantkit reads version {VERSION}.")
    for key, kind in (("run", dict), ("files", dict), ("tensors", dict), ("modules", list)):
        if not isinstance(found.get(key), kind):
            raise SourceError(f"{path} has no '{key}': it is no manifest of quantkit, or damaged.")
    return found


def request(command: str, model: str, *options: Any, **fixed: Any) -> dict[str, Any]:
    """Return a request as plain values: the command, its model, every option that decides bytes; `fixed` are what a run chose itself."""
    given = {field.name: getattr(option, field.name) for option in options for field in dataclasses.fields(option)}
    kept = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items() if name not in APART}
    return {"command": command, "model": model, "options": {**kept, **fixed}}


def command_line(name: str, command: str, *options: Any) -> str:
    """Return the command of a request: `name` for the model, and the flags that are not at their defaults; paths by their last part."""
    words = ["quantkit", command, name]
    for option in options:
        for field in dataclasses.fields(option):
            value = getattr(option, field.name)
            if field.name not in APART | CHOSEN and value != field.default:
                words += _flag(field.name, value)
    return shlex.join(words)


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else NEGATIVE.get(name, flag.replace("--", "--no-", 1))]
    if isinstance(value, tuple):
        return [word for item in value for word in (flag, str(item))]
    return [flag, Path(value).name if name in PATHS else str(value)]


def describe(folder: Path, planned: dict[str, TensorInfo]) -> dict[str, Any]:
    """Return the entries `tensors` and `files` of a written folder; planned: dtype and shape of every tensor that must be there."""
    files: dict[str, str] = {}
    found: dict[str, str] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        relative = str(path.relative_to(folder))
        if relative.startswith("journal/") or relative.endswith(NAME):
            continue
        files[relative], tensors = digests(path)
        found |= tensors
    rows = {name: {"dtype": info.dtype, "shape": list(info.shape), "sha256": found.get(name, "")} for name, info in planned.items()}
    return {"tensors": rows, "files": files}


def digests(path: Path) -> tuple[str, dict[str, str]]:
    """Return the SHA-256 of a file and, if it holds weights, of every tensor's bytes in it, in one reading."""
    whole, tensors, at = hashlib.sha256(), {}, 0
    with path.open("rb") as file:
        for name, start, stop in _ranges(path):
            at = _feed(file, start - at, [whole], at)
            part = hashlib.sha256()
            at = _feed(file, stop - at, [whole, part], at)
            tensors[name] = part.hexdigest()
        while piece := file.read(CHUNK):
            whole.update(piece)
    return whole.hexdigest(), tensors


def _feed(file: Any, count: int, sums: list[Any], at: int) -> int:
    while count:
        piece = file.read(min(count, CHUNK))
        if not piece:
            raise SourceError(f"{file.name} ended while it was read.")
        for each in sums:
            each.update(piece)
        count, at = count - len(piece), at + len(piece)
    return at


def _ranges(path: Path) -> Iterator[tuple[str, int, int]]:
    if path.suffix == ".gguf":
        held = sorted(_gguf.read_header(path).tensors.values(), key=lambda entry: entry.start)
        yield from ((entry.name, entry.start, entry.start + entry.nbytes) for entry in held)
    elif path.suffix == ".safetensors" and path.name != MEDUSA:  # carried as a whole
        yield from ((name, entry.start, entry.stop) for name, entry in _safetensors.read_header(path).items())


def write(path: Path, body: dict[str, Any]) -> None:
    """Write a manifest."""
    path.write_text(
        json.dumps({"version": VERSION, **body}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", errors="surrogateescape"
    )
