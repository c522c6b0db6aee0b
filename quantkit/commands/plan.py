"""`quantkit plan`: what a run will give and take, before any work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from quantkit import corpus, export, forecast, memory, stopwatch
from quantkit.backends import Backend
from quantkit.commands._options import ExportOptions, PlanOptions, RunOptions
from quantkit.commands.export import wishes_of
from quantkit.commands.quantize import (
    LIBRARIES,
    choose_schedule,
    device_of,
    is_whole,
    load_of,
    make_passes,
    needs_data,
    pick_format,
    settle_dtype,
)
from quantkit.document import print_json
from quantkit.errors import UsageError
from quantkit.forecast import Load, Room
from quantkit.formats import gguf_write
from quantkit.importance import load as load_matrix
from quantkit.loader import Loader
from quantkit.mixture import load_policy
from quantkit.plan import Plan, make_plan, stored_bytes
from quantkit.report import Eye, mib
from quantkit.source import Source, resolve

TRIAL_DTYPES, TRIAL_SHARE = 3, 1.5  # verification runs every block in three dtypes; so much of loading it each time
FORMULA = "2 x layers x key-value heads x head size x tokens x bytes; a sliding window holds its window"


@dataclass
class Outlook:
    """What is foreseen: rows of parameters by role, bytes of the output, rooms by phase, scratch disk, seconds by phase, runtimes."""

    parameters: dict[str, list[int]]
    weights: int
    beside: int
    rooms: list[Room]
    scratch: int
    seconds: dict[str, float]
    runtimes: list[str]
    notes: list[str]
    apart: bool = False  # whether the device has memory of its own

    @property
    def peak(self) -> Room:
        """The phase that holds most."""
        return max(self.rooms, key=lambda room: room.total)


def plan(method: str, model: str, options: Any, asked: Any, wanted: PlanOptions) -> dict[str, Any]:
    """Print the outlook of `quantkit METHOD MODEL` with these options and return it as plain values."""
    torch.set_num_threads(asked.threads or torch.get_num_threads())
    lengths, batches = (_numbers(text, flag) for text, flag in ((wanted.lengths, "--lengths"), (wanted.batches, "--batches")))
    source = resolve(model, asked.revision, asked.offline, asked.trust_remote_code)
    with Eye(asked.quiet) as eye:
        for text in source.notices:
            eye.notice(text)
        foresee = _foresee_export if isinstance(asked, ExportOptions) else _foresee_run
        outlook = foresee(source, method, options, asked, wanted.measure, eye)
        cache = [(n, b, forecast.kv_bytes(source.config(), n, b)) for n in lengths for b in batches]
        _print(eye, outlook, cache, source.name)
    document = {"command": "plan", "model": model, "method": method, **_document(outlook, cache)}
    if asked.json:
        print_json(document)
    return document


def _numbers(text: str, flag: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise UsageError(f"{flag} '{text}' is no list of numbers such as 4096,32768.")
    return [int(part) for part in parts]


def _foresee_run(source: Source, method: str, options: Any, asked: RunOptions, measure: bool, eye: Eye) -> Outlook:
    form = pick_format(method, options, asked.format)
    loader = Loader(source, device_of(asked))
    found = make_plan(loader, "scale" if form.name == "hf" else method, options, form, settle_dtype(asked, source), asked.strict)
    data = needs_data(method, options)
    load = load_of(loader, method, options, asked, asked.samples if data else 0, asked.seq_len)
    drawing = stopwatch.since_start()
    if data:
        _draw(source, asked)
    start, drawing = drawing, stopwatch.since_start() - drawing
    bare = psutil.Process().memory_info().rss
    schedule, full = choose_schedule(loader, method, options, asked, load, eye) if data else "none", is_whole(method, options)
    held = max(LIBRARIES, psutil.Process().memory_info().rss)
    rooms = [Room(memory.peak(), 0, "opening"), *forecast.opening_room(loader, load, bare, held)]
    rooms.append(forecast.blocks_room(loader, load, schedule, held, full))
    weights, beside = forecast.folder_bytes(loader, found)
    seconds: dict[str, float] = {}
    if measure:
        eye.phase("measuring one block on this machine")
        seconds = {"start": start, "text": drawing, **_time(loader, found, method, options, asked, load, schedule, start)}
    infos = [(name, source.store.info(name).shape, stored_bytes(source.store, name), _after(found, name)) for name in source.store.names()]
    scratch = forecast.scratch_bytes(loader, found, load, asked.shard_bytes(found.after))
    notes = [f"{row.module}: {row.reason}" for row in found.fallbacks]
    return Outlook(
        forecast.parameters(infos), weights, beside, rooms, scratch, seconds, found.runtimes, notes, loader.device.type == "cuda"
    )


def _draw(source: Source, asked: RunOptions) -> None:
    """Do what a run does for its text where that is quick: nothing is downloaded, and no model writes."""
    tokenizer = source.tokenizer()
    local = asked.calibration == "bundled" or Path(asked.calibration).is_file()
    corpus.draw(tokenizer, asked.calibration if local else "bundled", asked.samples, asked.seq_len, asked.seed, asked.column, True)
    source.drop_tokenizer()
    memory.trim()


def _after(found: Plan, name: str) -> int:
    layout = found.layouts.get(name)
    return sum(info.nbytes for info in layout.values()) if layout else found.kept[name].nbytes


def _time(loader: Loader, found: Plan, method: str, options: Any, asked: RunOptions, load: Load, schedule: str,
          start: float) -> dict[str, float]:  # fmt: skip
    """Return the seconds of a run by phase, measured where that is quick."""
    schedule = "two-pass" if schedule == "float" else schedule  # one block alone is on the float stream in any schedule
    passes = make_passes(loader, method, options, Backend(loader.device, torch.get_num_threads(), asked.plain), schedule)
    recording, recorded = stopwatch.time_recording(loader, load) if load.samples else (None, 0.0)
    one = stopwatch.time_block(loader, found, recording, passes)
    blocks = stopwatch.blocks_seconds(loader, one, -(-load.samples // load.batch) if load.samples else 0)
    rate = stopwatch.disk_rate(Path(asked.output or ".").resolve().parent)
    loading = stopwatch.blocks_seconds(loader, stopwatch.BlockTime(one.loading, 0.0, 0.0), 0)
    checking = loading * found.before / max(sum(_after_read(loader)), 1)
    trial = TRIAL_DTYPES * TRIAL_SHARE * loading
    return {"check": checking, "record": recorded, "blocks": blocks, "write": 2 * found.after / rate,
            "verify": start + trial + 2 * found.after / rate}  # fmt: skip


def _after_read(loader: Loader) -> list[int]:
    names = [loader.names.to_source.get(name) for index in range(len(loader.blocks)) for name in loader.block_names(index)]
    return [loader.source.store.info(name).nbytes for name in names if name]


def _foresee_export(source: Source, method: str, options: Any, asked: ExportOptions, measure: bool, eye: Eye) -> Outlook:
    policy = load_policy(asked.type)
    matrix = load_matrix(Path(asked.imatrix)) if asked.imatrix not in ("", "auto") else None
    found = export.make_plan(source, policy, wishes_of(asked), asked.pre_tokenizer, matrix, asked.strict)
    total = gguf_write.file_bytes(export.make_writer(found, asked.split_bytes))
    bare = psutil.Process().memory_info().rss
    held = max(LIBRARIES, bare)
    seconds = {}
    if measure:
        start = stopwatch.since_start()
        threads = torch.get_num_threads()
        eye.phase("measuring each type on this machine")
        torch.set_num_threads(1)
        encoding, decoding = stopwatch.encode_seconds(found, Backend(torch.device("cpu"), 1, asked.reference), threads)
        torch.set_num_threads(threads)
        rate = stopwatch.disk_rate(Path(asked.output or ".").resolve().parent)
        read = sum(stored_bytes(source.store, name) for name in source.store.names())
        seconds = {
            "start": start,
            "check": read / rate,
            "encode": encoding,
            "write": 2 * total / rate,
            "verify": start + TRIAL_DTYPES * decoding + 2 * total / rate,
        }
    parts = {member: choice for choice in found.choices for member in found.tensors[choice.name].sources}
    infos = []
    for name in source.store.names():
        info = source.store.info(name)
        infos.append(
            (
                name,
                info.shape,
                stored_bytes(source.store, name),
                round(parts[name].nbytes / len(found.tensors[parts[name].name].sources)) if name in parts else 0,
            )
        )
    notes = [*found.notices, *(f"{c.name}: {c.type} for {c.wanted}, {c.reason}" for c in found.fallbacks)]
    rooms = [Room(memory.peak(), 0, "opening"), forecast.checking_room(source.store, bare), forecast.export_room(found, held)]
    return Outlook(forecast.parameters(infos), total, 0, rooms, total, seconds, ["llama.cpp, Ollama: yes"], notes)


def _print(eye: Eye, outlook: Outlook, cache: list[tuple[int, int, dict[str, int]]], name: str) -> None:
    from rich.table import Table

    table = Table("role", "tensors", "parameters", "before", "after", "bits", box=None, header_style="bold", pad_edge=False)
    for role, (tensors, count, before, after) in outlook.parameters.items():
        table.add_row(role, str(tensors), f"{count / 1e6:,.2f} M", mib(before), mib(after), f"{8 * after / max(count, 1):.2f}")
    eye.console.print(f"[bold]{name}[/bold]")
    eye.console.print(table)
    for text in outlook.notes:
        eye.notice(text)
    peak, host = outlook.peak, psutil.virtual_memory()
    eye.totals({"output": f"{mib(outlook.weights)} of weights" + (f", {mib(outlook.beside)} beside them" if outlook.beside else "")})
    where = "" if not outlook.apart else f" (host {mib(peak.host)}, device {mib(peak.device)})"
    eye.totals({"peak memory": f"{mib(peak.total)} while {peak.phase}{where}; {mib(host.available)} are free"})
    eye.totals({"scratch disk": mib(outlook.scratch)})
    if outlook.seconds:
        steps = ", ".join(f"{phase} {seconds:.0f}" for phase, seconds in outlook.seconds.items())
        eye.totals({"time": f"about {_duration(sum(outlook.seconds.values()))} here ({steps} s)"})
    for line in outlook.runtimes:
        eye.totals({"runtimes": line})
    held = Table("cache: tokens", "sequences", *cache[0][2], box=None, header_style="bold", pad_edge=False)
    for tokens, batch, found in cache:
        held.add_row(f"{tokens:,}", str(batch), *(mib(count) for count in found.values()))
    eye.console.print(held)
    eye.console.print(f"[dim]{FORMULA}[/dim]", soft_wrap=True)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 180 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _document(outlook: Outlook, cache: list[tuple[int, int, dict[str, int]]]) -> dict[str, Any]:
    keys = ("tensors", "parameters", "bytes_before", "bytes_after")
    return {
        "roles": {role: dict(zip(keys, row, strict=True)) for role, row in outlook.parameters.items()},
        "bytes": outlook.weights, "bytes_beside": outlook.beside,
        "peak_memory": outlook.peak.total, "phases": [{"phase": r.phase, "host": r.host, "device": r.device} for r in outlook.rooms],
        "scratch_bytes": outlook.scratch, "seconds": round(sum(outlook.seconds.values()), 2), "seconds_by_phase": outlook.seconds,
        "runtimes": outlook.runtimes, "notices": outlook.notes,
        "cache": [{"tokens": tokens, "sequences": batch, **found} for tokens, batch, found in cache],
    }  # fmt: skip
