"""Several outputs of a recipe at once: side by side, each on its own stream of activations, or all on the float stream.

A block's work seldom fills all cores: two outputs in two threads finish sooner than one after the other, and each is byte for byte
what its own command makes. Only loops over blocks run beside each other; writing and proving follow one by one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from quantkit import forecast, manifest, memory, recipe
from quantkit.commands import quantize
from quantkit.commands._data import draw_tokens
from quantkit.commands._options import ExportOptions, RecipeOptions, RunOptions
from quantkit.commands.quantize import Job, Start
from quantkit.errors import Interrupted, PlanError
from quantkit.lock import hold
from quantkit.methods import options_of
from quantkit.recipe import Output
from quantkit.report import Eye
from quantkit.source import Source
from quantkit.streams import quantize_streams

AT_A_TIME = 2
DATA = ("calibration", "column", "samples", "seq_len", "seed", "batch")
HANDED_ON = (
    "offline", "revision", "trust_remote_code", "force", "restart", "dry_run", "quiet", "threads", "device", "allow_requantize", "log_file",
)  # fmt: skip


@dataclass(frozen=True)
class Made:
    """One output as it came out: where it is, and its command's document."""

    output: Output
    path: Path
    document: dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """What all outputs of a recipe have in common."""

    source: Source
    model: str
    folder: Path
    asked: RecipeOptions


class Beside(Eye):
    """The view of a run beside others: plain lines with its name, and an end when another one failed."""

    def __init__(self, asked: RecipeOptions, label: str, stop: threading.Event) -> None:
        super().__init__(asked.quiet, asked.log_file, label)
        self.stop = stop

    def block(self, index: int, total: int) -> None:
        """Advance to a block."""
        if self.stop.is_set():
            raise Interrupted("another output of the recipe failed; the same command goes on from here")
        super().block(index, total)


def options_of_output(one: Output) -> Any:
    """Return the options of an output's method."""
    return recipe.build(options_of(one.command), one.given)


def more_of(one: Output, source: Source, folder: Path, asked: RecipeOptions) -> tuple[Path, dict[str, Any]]:
    """Return where an output goes, and the options that the command line gives it."""
    path = folder / one.name.replace("{model}", source.name)
    more = {key: getattr(asked, key) for key in HANDED_ON} | {"output": str(path), "json": False}
    return path, more | ({"calibration": asked.calibration} if asked.calibration else {})


def finished(one: Output, ask: Ask) -> Made | None:
    """Return an output that is there already, as this recipe makes it from this source."""
    path, more = more_of(one, ask.source, ask.folder, ask.asked)
    where = manifest.path_of(path)
    if ask.asked.force or ask.asked.restart or not path.exists() or not where.exists():
        return None
    made, more = manifest.read(where), more | ({"float_stream": True} if ask.asked.share_activations else {})
    if one.command == "export-gguf":
        wanted = manifest.request(one.command, ask.source.asked, recipe.build(ExportOptions, one.given, **more))
    else:
        if not _takes_data(one):
            more.pop("float_stream", None)
        wanted = manifest.request(one.command, ask.source.asked, options_of_output(one), recipe.build(RunOptions, one.given, **more))
    asked, held = ({key: value for key, value in run["options"].items() if key not in manifest.CHOSEN} for run in (wanted, made["run"]))
    same = asked == held and wanted["command"] == made["run"]["command"] and made["source"]["sha256"] == ask.source.fingerprint()
    return Made(one, path, {"command": one.command, "output": str(path), "made_before": True}) if same else None


def make_together(outputs: Sequence[Output | None], ask: Ask) -> dict[int, Made]:
    """Make those outputs, by their number, that gain by it; the others are left to be made one by one, None is made already."""
    found = {number: one for number, one in enumerate(outputs) if one is not None and _takes_data(one)}
    if ask.asked.share_activations:
        _require_same_data(list(found.values()))
        return dict(zip(found, _on_one_stream(list(found.values()), ask), strict=True)) if found else {}
    if len(found) < 2 or ask.asked.dry_run or ask.asked.one_by_one:
        return {}
    numbers = list(found)
    made: dict[int, Made] = {}
    for first in range(0, len(numbers) - len(numbers) % AT_A_TIME, AT_A_TIME):
        some = numbers[first : first + AT_A_TIME]
        made |= dict(zip(some, _side_by_side([found[n] for n in some], ask), strict=False))
    return made


def _takes_data(one: Output) -> bool:
    return one.command != "export-gguf" and quantize.needs_data(one.command, options_of_output(one))


def _require_same_data(outputs: list[Output]) -> None:
    for one in outputs[1:]:
        if differ := [key for key in DATA if one.given.get(key) != outputs[0].given.get(key)]:
            raise PlanError(
                f"--share-activations: {outputs[0].name} and {one.name} have other {', '.join(differ)}, but one stream is of one text. "
                "Put these keys into [data]."
            )


def _prepare(one: Output, ask: Ask, eye: Eye, loader: Any = None, **fixed: Any) -> tuple[Job, dict[str, Any]]:
    path, more = more_of(one, ask.source, ask.folder, ask.asked)
    eye.phase(f"{one.command} -> {path}")
    given = recipe.build(RunOptions, one.given, **more, **fixed)
    return quantize.prepare(one.command, ask.model, options_of_output(one), given, ask.source, eye, loader)


def _conclude(outputs: list[Output], jobs: list[tuple[Job, dict[str, Any]]], starts: list[Start], began: float) -> Iterator[Made]:
    for one, (job, document), start in zip(outputs, jobs, starts, strict=True):
        document |= quantize.conclude(job, start)
        document |= {"seconds": round(time.perf_counter() - began, 2), "peak_memory": memory.peak()}
        job.eye.totals({"output": str(job.output)})
        memory.trim()
        yield Made(one, job.output, document)


def _on_one_stream(outputs: list[Output], ask: Ask) -> list[Made]:
    """Quantize outputs on the float stream, each block loaded and replayed once for all of them."""
    began = time.perf_counter()
    with Eye(ask.asked.quiet, ask.asked.log_file) as eye, ExitStack() as held:
        jobs: list[tuple[Job, dict[str, Any]]] = []
        for one in outputs:
            jobs.append(_prepare(one, ask, eye, jobs[0][0].loader if jobs else None, float_stream=True))
        if ask.asked.dry_run:
            return [Made(one, job.output, document) for one, (job, document) in zip(outputs, jobs, strict=True)]
        first = jobs[0][0]
        tokens = draw_tokens(first.loader, first.asked, eye)
        for job, _ in jobs:
            held.enter_context(hold(job.partial))
        starts = [quantize.begin(job, tokens) for job, _ in jobs]
        if any(start.journal.done < len(first.loader.blocks) for start in starts):
            recording = quantize.record_for(first, starts[0])
            eye.phase(f"quantizing {len(first.loader.blocks)} blocks for {len(jobs)} outputs on {first.loader.device}")
            lanes = [quantize.lane_of(job, start) for (job, _), start in zip(jobs, starts, strict=True)]
            quantize_streams(first.loader, lanes, recording, eye)
            del recording, lanes
        return list(_conclude(outputs, jobs, starts, began))


def _side_by_side(outputs: list[Output], ask: Ask) -> list[Made]:
    """Quantize outputs in threads, each on its own stream; none if they would not fit the memory or share a device."""
    began, stop = time.perf_counter(), threading.Event()
    with ExitStack() as held:
        jobs = [_prepare(one, ask, Beside(ask.asked, Path(one.name).name.replace("{model}", ask.source.name), stop)) for one in outputs]
        if jobs[0][0].loader.device.type != "cpu" or not _fit(jobs):
            return []
        for job, _ in jobs:
            held.enter_context(hold(job.partial))
        starts = [quantize.begin(job, draw_tokens(job.loader, job.asked, job.eye)) for job, _ in jobs]
        failed: list[BaseException] = []

        def work(job: Job, start: Start) -> None:
            try:
                torch.set_num_threads(start.settings["threads"])
                quantize.run_blocks(job, start)
            except BaseException as error:  # raised again below, in the thread that can end the process
                failed.append(error)
                stop.set()

        threads = [threading.Thread(target=work, args=(job, start), daemon=True) for (job, _), start in zip(jobs, starts, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)  # in short waits, so that an interrupt is seen
        if failed:
            raise failed[0]
        return list(_conclude(outputs, jobs, starts, began))


def _fit(jobs: list[tuple[Job, dict[str, Any]]]) -> bool:
    """Tell whether all loops over blocks fit the free memory at the same time, in one pass each."""
    total = quantize.LIBRARIES
    for job, _ in jobs:
        load = quantize.load_of(job.loader, job.method, job.options, job.asked, job.asked.samples, job.asked.seq_len)
        total += forecast.blocks_room(job.loader, load, "one-pass", 0, quantize.is_whole(job.method, job.options)).total
    return bool(total < 0.8 * psutil.virtual_memory().available)
