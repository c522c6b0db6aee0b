"""`quantkit report`: one page about an artifact, from itself, its manifest, its run's log, and a measurement beside the source."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from quantkit import artifact_page, inventory, manifest
from quantkit.artifact_page import Facts, Module
from quantkit.commands._gates import Yardstick
from quantkit.commands._options import ReportOptions
from quantkit.commands.verify import find_source
from quantkit.document import print_json
from quantkit.errors import SourceError, UsageError
from quantkit.foreign import foreign, parse_json
from quantkit.inventory import Item
from quantkit.loader import Loader, pick_device
from quantkit.plan import stored_bytes
from quantkit.report import Eye, mib
from quantkit.source import Source, resolve

SOLVED = "Of the outputs, on the calibration data: |x (W - Q)|² / |x W|², as the solver left it; experts of a layer averaged."
ROUNDED = "Of the weights: |W - Q| / |W| in the Frobenius norm, beside the source; experts of a layer averaged."


def report(name: str, asked: ReportOptions) -> None:
    """Gather what there is to say, print its outline, and write the page if asked for."""
    torch.set_num_threads(asked.threads or torch.get_num_threads())
    path = Path(name).expanduser()
    source = resolve(name, None, asked.offline, asked.trust_remote_code)
    made = manifest.read(where) if (where := manifest.path_of(path)).exists() else {}
    target = Path(asked.output or f"{path.name.removesuffix('.gguf')}-report.html")
    if asked.html and target.exists() and not asked.force:
        raise UsageError(f"{target} exists already; --force replaces it.")
    with Eye() as eye:
        log = read_log(Path(asked.log)) if asked.log else {}
        reference = _reference(path, made, asked, eye)
        facts, document = _facts(source, made, reference, log, eye)
        if reference is not None and asked.measure:
            document["measured"] = _measure(source, reference, asked, facts, eye)
        for label, text in facts.tiles.items():
            eye.totals({label: text})
        if measured := facts.lines.get("measured on"):
            eye.totals({"measured on": measured})
        if asked.html:
            target.write_text(artifact_page.page(facts), encoding="utf-8")
            eye.totals({"report": str(target)})
    if asked.json:
        print_json({"command": "report", "artifact": name, **document, "html": str(target) if asked.html else None})


def read_log(path: Path) -> dict[str, Any]:
    """Return what a --log-file says of the last run in it: seconds by module, the totals' lines, the peak memory in bytes.

    A run that was resumed has its modules in several pieces; each module counts as it was solved last.
    """
    seconds: dict[str, float] = {}
    lines: dict[str, str] = {}
    peak = 0
    for number, raw in enumerate(path.read_bytes().splitlines(), 1):
        event = parse_json(raw, f"{path}:{number}")
        with foreign(f"{path}:{number} is no event of a --log-file"):
            peak = max(peak, int(event["peak_memory"]))
            if event["event"] == "module":
                seconds[str(event["module"])] = float(event["seconds"])
            elif event["event"] == "totals":
                lines |= {str(key): str(value) for key, value in event["lines"].items()}
    return {"seconds": seconds, "lines": lines, "peak": peak}


def _reference(path: Path, made: dict[str, Any], asked: ReportOptions, eye: Eye) -> Source | None:
    """Return the source to compare with: the one asked for, or the manifest's if it is here."""
    name = asked.reference
    if name is None and not made:
        return None
    try:
        return resolve(name or find_source(made, path), None, asked.offline, asked.trust_remote_code)
    except (UsageError, SourceError) as error:
        if asked.reference:
            raise
        eye.notice(f"nothing is measured beside the source: {error}")
        return None


def _facts(source: Source, made: dict[str, Any], reference: Source | None, log: dict[str, Any], eye: Eye) -> tuple[Facts, dict[str, Any]]:
    eye.phase(f"reading {source.name}")
    found = list(inventory.items(source))
    solved = {note["module"]: note for note in made.get("modules", [])}
    errors = {module: float(note["error"]) for module, note in solved.items()}
    meaning = SOLVED
    if not errors and reference is not None:
        eye.phase(f"comparing its weights with {reference.name}")
        pairs = [d for d in inventory.differences(source, reference) if d.error is not None and d.a is not None and len(d.a.shape) > 1]
        errors, meaning = {d.name.removesuffix(".weight"): float(d.error or 0.0) for d in pairs}, ROUNDED
    place = {module: number for number, module in enumerate(solved)}  # the order of the forward pass, where it is known
    found.sort(key=lambda item: place.get(item.name.removesuffix(".weight"), -1))
    modules = [_module(item, errors, solved, log.get("seconds", {})) for item in found if len(item.shape) > 1]
    weights, nbytes = sum(math.prod(item.shape) for item in found), sum(item.nbytes for item in found)
    facts = Facts(source.name, str(made.get("command", "made elsewhere: no manifest")), modules, error_means=meaning)
    facts.tiles["size"] = mib(nbytes)
    if reference is not None:
        before = sum(stored_bytes(reference.store, name) for name in reference.store.names())
        facts.tiles["size of the source"] = mib(before)
    facts.tiles["bits per weight"] = f"{8 * nbytes / max(weights, 1):.3f}"
    if spent := log.get("lines", {}).get("time"):
        facts.tiles["time"] = spent.split(",")[0]
    if log.get("peak"):
        facts.tiles["peak memory"] = mib(log["peak"])
    facts.lines |= _lines(made, inventory.who_takes_it(source, found))
    fallen = [f"{m.name}: {m.fallback}" for m in modules if m.fallback]
    facts.notes += [*source.notices, *fallen]
    document = {"bytes": nbytes, "bits_per_weight": 8 * nbytes / max(weights, 1), "error_means": meaning}
    return facts, {**document, "modules": [{"module": m.name, "bits": m.bits, "bytes": m.nbytes, "error": m.error} for m in modules]}


def _module(item: Item, errors: dict[str, float], solved: dict[str, Any], seconds: dict[str, float]) -> Module:
    name = item.name.removesuffix(".weight")
    note = solved.get(name, {})
    return Module(
        name, str(note.get("grid") or item.scheme), item.bits, item.nbytes, errors.get(name), seconds.get(name, 0.0),
        str(note.get("fallback") or ""),
    )  # fmt: skip


def _lines(made: dict[str, Any], takers: list[str]) -> dict[str, str]:
    """Return what a manifest says about how the artifact was made, a line each."""
    lines = {}
    if origin := made.get("source"):
        lines["source"] = f"{origin.get('name')}, revision {origin.get('revision') or 'none'}, SHA-256 {origin.get('sha256')}"
    if data := made.get("calibration"):
        count = f"{data.get('samples')} x {data.get('seq_len')} tokens, seed {data.get('seed')}"
        lines["calibration"] = f"{data.get('origin')}: {count}, SHA-256 {data.get('sha256')}"
    if options := made.get("run", {}).get("options"):
        lines["options"] = json.dumps(options, ensure_ascii=False, sort_keys=True)
    if versions := made.get("versions"):
        lines["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    return {**lines, "runtimes": "; ".join(takers)}


def _measure(source: Source, reference: Source, asked: ReportOptions, facts: Facts, eye: Eye) -> dict[str, Any]:
    device = pick_device(asked.device)
    eye.phase(f"measuring {reference.name}, then {source.name}")
    yardstick = Yardstick(Loader(reference, device), asked.data, asked.windows, asked.offline)
    row = yardstick.measure(Loader(source, device), source.name)
    facts.tiles["perplexity"] = f"{row['perplexity']:.3f} ± {row['error']:.3f}"
    facts.tiles["of the source"] = f"{yardstick.plain.perplexity:.3f}"
    facts.tiles["mean KL divergence"] = f"{row['kl_mean']:.5f}"
    facts.tiles["same top token"] = f"{100 * row['top1']:.2f} %"
    facts.lines["measured on"] = f"{asked.data}: {row['windows']} windows of {row['window']} tokens, {row['scored']} scored"
    return row
