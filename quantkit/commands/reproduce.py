"""`quantkit reproduce`: make an artifact again from its manifest, and compare the bytes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from quantkit import manifest
from quantkit.commands import convert, export, quantize
from quantkit.commands._options import ConvertOptions, ExportOptions, ReproduceOptions, RunOptions, ToHfOptions
from quantkit.commands._proof import versions
from quantkit.commands.verify import find_source
from quantkit.document import print_json
from quantkit.errors import SourceError, UsageError, VerifyError, name_list
from quantkit.methods import OPTIONS, options_of
from quantkit.recipe import build
from quantkit.report import Eye
from quantkit.source import Source, resolve


def reproduce(given: str, asked: ReproduceOptions) -> None:
    """Run a manifest's request again in a scratch folder and compare every file; a VerifyError names what differs."""
    where = _manifest_path(Path(given).expanduser())
    made = manifest.read(where)
    model = asked.model or find_source(made, where.parent)
    source = resolve(model, asked.revision, asked.offline)
    if (found := source.fingerprint()) != made["source"]["sha256"]:
        wanted = made["source"]["sha256"]
        raise SourceError(
            f"{model} is not the model that this was made from: its SHA-256 is {found[:12]}…, the manifest has {wanted[:12]}…"
        )
    with tempfile.TemporaryDirectory(dir=asked.scratch or None) as scratch, Eye() as eye:
        for line in _other_versions(made):
            eye.notice(line)
        again = Path(asked.output) if asked.output else Path(scratch) / _name(where)
        _run(made["run"], model, source, again, asked)
        second = manifest.read(manifest.path_of(again))
        differ, tensors = _compare(made, second)
        files, held = len(made["files"]), len(made["tensors"])
        eye.totals({"identical": f"{files - len(differ)} of {files} files, {held - len(tensors)} of {held} tensors"})
    if asked.json:
        print_json({"command": "reproduce", "manifest": str(where), "identical": not differ, "files": len(made["files"]), "differ": differ,
                    "tensors_differ": tensors})  # fmt: skip
    if differ:
        raise VerifyError(f"Not reproduced: {name_list(differ)} differ{'; tensors ' + name_list(tensors) if tensors else ''}.")


def _manifest_path(path: Path) -> Path:
    """Return the manifest that a path means: itself, or that of the artifact it names."""
    if path.is_file() and path.name.endswith(manifest.NAME):
        return path
    found = manifest.path_of(path)
    if not found.is_file():
        raise SourceError(f"There is no manifest at '{path}': name a {manifest.NAME}, or an artifact that has one.")
    return found


def _name(where: Path) -> str:
    """Return the file name that the artifact must have again, or any for a folder."""
    return "again" if where.name == manifest.NAME else where.name.removesuffix("." + manifest.NAME) + ".gguf"


def _other_versions(made: dict[str, Any]) -> list[str]:
    now, then = versions(), made.get("versions", {})
    return [f"{name} was {then[name]}, now {now[name]}: bytes may differ" for name in then if now.get(name) != then[name]]


def _run(run: dict[str, Any], model: str, source: Source, output: Path, asked: ReproduceOptions) -> None:
    command, given = str(run["command"]), dict(run["options"])
    given |= {"threads": asked.threads} if asked.threads and "threads" in given else {}
    given |= {"offline": True} if asked.offline and "offline" in given else {}
    given |= {"calibration": asked.calibration} if asked.calibration else {}
    if "calibration" in given and "/" in str(given["calibration"]) and not Path(str(given["calibration"])).expanduser().is_file():
        raise UsageError(f"The calibration text '{given['calibration']}' is not here. Say where it is with --calibration.")
    if command in OPTIONS:
        quantize.run(command, model, build(options_of(command), given), build(RunOptions, given, output=str(output)), source)
    elif command == "export-gguf":
        export.export_gguf(model, build(ExportOptions, given, output=str(output)), source)
    elif command == "to-hf":
        convert.to_hf(model, output, build(ToHfOptions, given))
    elif command == "convert":
        convert.convert(model, output, build(ConvertOptions, given))
    else:
        raise SourceError(f"The manifest was made by '{command}', which this quantkit does not know.")


def _compare(first: dict[str, Any], second: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the files and the tensors that are not the same in two manifests."""
    files = [name for name in {**first["files"], **second["files"]} if first["files"].get(name) != second["files"].get(name)]
    rows = (first["tensors"], second["tensors"])
    return sorted(files), sorted(name for name in {**rows[0], **rows[1]} if rows[0].get(name) != rows[1].get(name))
