"""`quantkit run` and `quantkit recipes`: every output of a recipe from one source, verified, then held to its gates."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit import memory, recipe
from quantkit.commands import export, quantize
from quantkit.commands._data import draw_tokens
from quantkit.commands._gates import Yardstick, judge
from quantkit.commands._options import ExportOptions, GateOptions, RecipeOptions, RunOptions
from quantkit.commands.quantize import Job
from quantkit.errors import GateMissed, PlanError
from quantkit.loader import Loader, pick_device
from quantkit.lock import hold
from quantkit.methods import options_of
from quantkit.recipe import Output, Recipe
from quantkit.report import Eye, print_json
from quantkit.source import Source, resolve
from quantkit.streams import quantize_streams

WINDOWS = 8
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


def run(name: str, model: str, asked: RecipeOptions) -> None:
    """Make every output of a recipe, in its order, and measure them against the source where it has gates."""
    began = time.perf_counter()
    found = recipe.load(recipe.find(name))
    torch.set_num_threads(asked.threads or torch.get_num_threads())
    source = resolve(model, asked.revision, asked.offline, asked.trust_remote_code)
    _require_model(found, source)
    folder = Path(asked.output or ".")
    if not folder.is_dir():
        folder.mkdir(parents=True)
    together = _together(found.outputs) if asked.share_activations else []
    shared = dict(zip(map(id, together), _make_together(together, source, model, folder, asked) if together else [], strict=True))
    made = [
        shared.get(id(one)) or _make(one, source, model, folder, asked, f"{number} of {len(found.outputs)}")
        for number, one in enumerate(found.outputs, 1)
    ]
    document: dict[str, Any] = {"command": "run", "recipe": found.path.name, "model": model, "outputs": [one.document for one in made]}
    missed: list[str] = []
    if found.gates and not asked.dry_run:
        with Eye(asked.quiet, asked.log_file) as eye:
            document["measured"], missed = _measure(found, source, made, asked, eye)
    document |= {"gates_missed": missed, "seconds": round(time.perf_counter() - began, 2), "peak_memory": memory.peak()}
    if asked.json:
        print_json(document)
    if missed:
        raise GateMissed("; ".join(missed))


def _require_model(found: Recipe, source: Source) -> None:
    """Refuse a model that the recipe is not for."""
    kind, types = str(source.config().model_type), found.model.get("types")
    if types and kind not in types:
        raise PlanError(f"{found.path.name} is for {', '.join(types)}; {source.name} is {kind}. Change [model] if it fits all the same.")
    most = found.model.get("max_parameters")
    count = sum(math.prod(source.store.info(tensor).shape) for tensor in source.store.names())
    if most and count > most:
        raise PlanError(f"{found.path.name} is for at most {most:.3g} parameters; {source.name} has {count:.3g}.")


def _together(outputs: Sequence[Output]) -> list[Output]:
    """Return the outputs that can be quantized on one stream of activations; a PlanError if their data are not the same."""
    found = [one for one in outputs if one.command != "export-gguf" and quantize.needs_data(one.command, _options_of(one))]
    for one in found[1:]:
        if differ := [key for key in DATA if one.given.get(key) != found[0].given.get(key)]:
            raise PlanError(
                f"--share-activations: {found[0].name} and {one.name} have other {', '.join(differ)}; outputs share one stream only on the "
                "same data. Put these keys into [data]."
            )
    return found


def _options_of(one: Output) -> Any:
    return recipe.build(options_of(one.command), one.given)


def _more(one: Output, source: Source, folder: Path, asked: RecipeOptions) -> tuple[Path, dict[str, Any]]:
    """Return where an output goes, and the options that the command line gives it."""
    path = folder / one.name.replace("{model}", source.name)
    more = {key: getattr(asked, key) for key in HANDED_ON} | {"output": str(path), "json": False}
    return path, more | ({"calibration": asked.calibration} if asked.calibration else {})


def _make_together(outputs: list[Output], source: Source, model: str, folder: Path, asked: RecipeOptions) -> list[Made]:
    """Quantize several outputs on the float stream, each block loaded and replayed once for all of them."""
    began = time.perf_counter()
    with Eye(asked.quiet, asked.log_file) as eye, ExitStack() as held:
        jobs: list[tuple[Job, dict[str, Any]]] = []
        for one in outputs:
            path, more = _more(one, source, folder, asked)
            given = recipe.build(RunOptions, one.given, **more, float_stream=True)
            loader = jobs[0][0].loader if jobs else None
            eye.phase(f"together: {one.command} -> {path}")
            jobs.append(quantize.prepare(one.command, model, _options_of(one), given, source, eye, loader))
        if asked.dry_run:
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
        made = []
        for one, (job, document), start in zip(outputs, jobs, starts, strict=True):
            document |= quantize.conclude(job, start)
            document |= {"seconds": round(time.perf_counter() - began, 2), "peak_memory": memory.peak()}
            eye.totals({"output": str(job.output)})
            made.append(Made(one, job.output, document))
    memory.trim()
    return made


def _make(one: Output, source: Source, model: str, folder: Path, asked: RecipeOptions, number: str) -> Made:
    path, more = _more(one, source, folder, asked)
    with Eye(asked.quiet, asked.log_file) as eye:
        eye.phase(f"output {number}: {one.command} -> {path}")
    if one.command == "export-gguf":
        document = export.export_gguf(model, recipe.build(ExportOptions, one.given, **more), source)
    else:
        document = quantize.run(one.command, model, _options_of(one), recipe.build(RunOptions, one.given, **more), source)
    memory.trim()
    return Made(one, path, document)


def _measure(found: Recipe, source: Source, made: list[Made], asked: RecipeOptions, eye: Eye) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what each output measures beside the source, and the lines of the gates that are missed."""
    limits = GateOptions(**{key: value for key, value in found.gates.items() if key not in ("data", "windows")})
    data, windows = str(found.gates.get("data", "bundled")), int(found.gates.get("windows", WINDOWS))
    device = pick_device(asked.device)
    eye.phase(f"measuring {source.name} on {data}")
    yardstick = Yardstick(Loader(source, device), data, windows, asked.offline)
    results, missed = [], []
    for one in made:
        eye.phase(f"measuring {one.path.name}")
        row = yardstick.measure(Loader(resolve(str(one.path), None, asked.offline, asked.trust_remote_code), device), one.path.name)
        missed += judge(row, limits)
        results.append(row)
        before, after = yardstick.plain.perplexity, row["perplexity"]
        eye.totals({one.path.name: f"perplexity {before:.4f} -> {after:.4f}, mean KL {row['kl_mean']:.5f}"})
    return results, missed


def recipes(asked: Any) -> None:
    """List the recipes that ship."""
    rows = [{"name": path.stem, "summary": summary} for path, summary in recipe.listed()]
    if asked.json:
        print_json({"command": "recipes", "recipes": rows})
        return
    for row in rows:
        print(f"{row['name']:<22} {row['summary']}")
