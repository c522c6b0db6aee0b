"""`quantkit gptq`, `quantkit awq` and `quantkit rtn`: from a model to a verified artifact."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from quantkit import __version__, artifact, corpus, forecast, manifest, memory, perplexity
from quantkit.backends import Backend
from quantkit.backends.cuda.launch import missing_device
from quantkit.calibrate import Recording, record
from quantkit.commands._data import draw_tokens
from quantkit.commands._options import RunOptions
from quantkit.commands._proof import finish, origin, versions
from quantkit.commands._remarks import remarks_on
from quantkit.document import print_json
from quantkit.errors import BackendError, PlanError, StrictError, UsageError, name_list
from quantkit.forecast import Load
from quantkit.formats import FORMATS
from quantkit.journal import Journal
from quantkit.loader import Loader, head_size, pick_device
from quantkit.lock import hold
from quantkit.methods import METHODS
from quantkit.pipeline import Passes, outputs_only, quantize_blocks, without_data
from quantkit.plan import Plan, describe_codec, make_plan
from quantkit.report import Eye, mib
from quantkit.schedules import SCHEDULES
from quantkit.source import BUILT_IN, Source, built_in_notice, resolve
from quantkit.streams import Lane, quantize_streams

LIBRARIES = 480 << 20  # torch, transformers and numba, loaded
EVAL_WINDOWS = 8
SCALERS = ("awq", "smoothquant")
FORMAT_OF = {
    "affine": "gptq", "fp8": "compressed-tensors", "mxfp4": "compressed-tensors", "nvfp4": "compressed-tensors",
    "nf4": "bitsandbytes", "fp4": "bitsandbytes", "llm-int8": "bitsandbytes",
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What every step of a run looks at: the request, what was made of it, and who is told."""

    method: str
    options: Any
    asked: RunOptions
    form: Any
    dtype: str
    loader: Loader
    plan: Plan
    output: Path
    partial: Path
    eye: Eye


@dataclass
class Start:
    """Where a job begins: its data, schedule, settings and journal; before: the source's perplexity, if it was asked for."""

    tokens: corpus.Tokens | None
    load: Load
    schedule: str
    settings: dict[str, Any]
    journal: Journal
    passes: Passes
    backend: Backend
    before: float | None
    resumed: int | None


def run(method: str, model: str, options: Any, asked: RunOptions, source: Source | None = None) -> dict[str, Any]:
    """Do the whole run, print its report, and its JSON document if asked for; return that. source: the model, if it is open already."""
    began = time.perf_counter()
    torch.set_num_threads(asked.threads or torch.get_num_threads())
    pick_format(method, options, asked.format)
    source = source or resolve(model, asked.revision, asked.offline, asked.trust_remote_code)
    with Eye(asked.quiet, asked.log_file) as eye:
        job, document = prepare(method, model, options, asked, source, eye)
        if not asked.dry_run:
            with hold(job.partial):
                document |= _quantize(job)
            document["seconds"] = round(time.perf_counter() - began, 2)
            document["peak_memory"] = memory.peak()
            eye.totals({"time": f"{document['seconds']:.1f} s, peak memory {mib(document['peak_memory'])}", "output": str(job.output)})
    if asked.json:
        print_json(document)
    return document


def prepare(method: str, model: str, options: Any, asked: RunOptions, source: Source, eye: Eye,
            loader: Loader | None = None) -> tuple[Job, dict[str, Any]]:  # fmt: skip
    """Return the job of a run, its plan printed, and the beginning of its document; what can be refused is refused here."""
    form = pick_format(method, options, asked.format)
    output = Path(asked.output or f"{source.name}-{method}{_suffix(options, form)}")
    if (scheme := source.scheme) and not asked.allow_requantize and model not in BUILT_IN:
        raise PlanError(
            f"{model} is already quantized ({scheme}). Start from the original, or turn it into a plain "
            f"checkpoint first (quantkit to-hf {model} DIR), or insist with --allow-requantize."
        )
    partial = artifact.prepare_output(output, source, asked.force or asked.dry_run)
    if loader is None:
        if not asked.dry_run:
            source.require_finite()
        for text in [*source.notices, *artifact.check_side_files(source), *built_in_notice(model, source)]:
            eye.notice(text)
        loader = Loader(source, device_of(asked))
        for text in loader.notices("carried over as they are"):
            eye.notice(text)
    dtype = settle_dtype(asked, source)
    plan = make_plan(loader, "scale" if form.name == "hf" else method, options, form, dtype, asked.strict)
    eye.plan(plan, source.name, form.name)
    document: dict[str, Any] = {"command": method, "model": model, "output": str(output), "plan": _plan_document(plan)}
    return Job(method, options, asked, form, dtype, loader, plan, output, partial, eye), document


def _suffix(options: Any, form: Any) -> str:
    codec = getattr(options, "codec", "affine")
    return "" if form.name == "hf" else f"-{options.bits}bit" if codec == "affine" else f"-{codec}"


def pick_format(method: str, options: Any, asked: str) -> Any:
    """Return the format that is asked for, or the usual one; a UsageError if plain weights and a packed format meet."""
    plain = getattr(options, "then", "") == "none"
    usual = "hf" if plain else FORMAT_OF[getattr(options, "codec", "affine")]
    if not plain and options.activations != "none":
        usual = "compressed-tensors"
    elif usual == "gptq" and method == "awq" and options.bits == 4 and not (options.then == "gptq" and options.order == "full"):
        usual = "awq"
    name = usual if asked == "auto" else asked
    if plain != (name == "hf"):
        raise UsageError("--format hf holds plain weights: it goes with --then none, and --then none with it alone.")
    return FORMATS[name]


def device_of(asked: RunOptions) -> torch.device:
    """Return the device of a run; an error if --backend insists on kernels that --device, or this machine, does not have."""
    if asked.backend in ("cpu", "cuda") and not asked.device.startswith(("auto", asked.backend)):
        raise UsageError(f"--backend {asked.backend} computes on its own device, not on --device {asked.device}.")
    if asked.backend == "cuda" and not torch.cuda.is_available():
        raise BackendError(f"--backend cuda: {missing_device()}.")
    return pick_device(asked.backend if asked.backend in ("cpu", "cuda") and asked.device == "auto" else asked.device)


def settle_dtype(asked: RunOptions, source: Source) -> str:
    """Return the dtype of what is carried over: a GGUF file's floats become bfloat16 unless another is asked for."""
    return asked.dtype if asked.dtype != "auto" else "bfloat16" if source.gguf_file else "auto"


def needs_data(method: str, options: Any) -> bool:
    """Tell whether a run needs calibration data."""
    return method != "rtn" or options.activations == "static"


def make_passes(loader: Loader, method: str, options: Any, backend: Backend, schedule: str) -> Passes:
    """Return what is done to each block."""
    then = getattr(options, "then", method)
    scaler = METHODS[method](options, backend, head_size(loader.model.config)) if method in SCALERS else None
    if then == "none":
        return Passes(scaler, None, outputs_only)
    solver = METHODS[then](options, backend)
    if schedule not in SCHEDULES:
        return Passes(scaler, solver, without_data)
    return Passes(scaler, solver, partial(SCHEDULES[schedule], tiles=then == "rtn"))


def _plan_document(plan: Plan) -> dict[str, Any]:
    rows = [
        {"module": r.module, "shape": list(r.shape), "method": r.method, "reason": r.reason, **(describe_codec(r.codec) if r.codec else {})}
        for r in plan.rows
    ]
    return {
        "modules": rows,
        "bytes_before": plan.before,
        "bytes_after": plan.after,
        "bits_per_weight": round(plan.bits_per_weight, 4),
        "runtimes": plan.runtimes,
    }


def _quantize(job: Job) -> dict[str, Any]:
    start = begin(job, draw_tokens(job.loader, job.asked, job.eye) if needs_data(job.method, job.options) else None)
    run_blocks(job, start)
    return conclude(job, start)


def run_blocks(job: Job, start: Start) -> None:
    """Quantize the blocks that are not done yet."""
    waits = start.tokens is not None and start.journal.done < len(job.loader.blocks)
    recording = record_for(job, start) if waits else None
    words = f", {start.schedule}" if start.tokens else ""
    job.eye.phase(f"quantizing {len(job.loader.blocks)} blocks on {job.loader.device}{words}")
    job.eye.budget = job.asked.budget_seconds
    if start.schedule != "float":
        quantize_blocks(job.loader, job.plan, recording, start.passes, job.form, start.journal, job.eye)
    elif recording is not None:
        quantize_streams(job.loader, [lane_of(job, start)], recording, job.eye)


def begin(job: Job, tokens: corpus.Tokens | None) -> Start:
    """Choose the schedule, check the disk, open the journal; what an earlier run left there is said."""
    loader, asked, eye = job.loader, job.asked, job.eye
    load = load_of(loader, job.method, job.options, asked, *tokens.rows.shape) if tokens else Load(0, 0, 0, 0)
    schedule = choose_schedule(loader, job.method, job.options, asked, load, eye) if tokens else "none"
    settings = _settings(job, tokens, schedule, load.batch)
    needed = forecast.scratch_bytes(loader, job.plan, load, asked.shard_bytes(job.plan.after))
    artifact.require_disk(job.partial.parent, needed, "The run")
    before = _evaluate(loader, asked, eye, "before") if asked.eval else None
    journal = Journal(job.partial, settings, asked.restart, asked.resume_states == "store")
    resumed = journal.done if journal.resumed else None
    if resumed is not None:
        eye.notice(f"resuming after block {resumed} of {len(loader.blocks)}")
    loader.source.drop_tokenizer()
    memory.trim()
    backend = Backend(loader.device, torch.get_num_threads(), asked.plain, asked.backend in ("cpu", "cuda"))
    passes = make_passes(loader, job.method, job.options, backend, schedule)
    for text in backend.notices:
        eye.notice(text)
    return Start(tokens, load, schedule, settings, journal, passes, backend, before, resumed)


def record_for(job: Job, start: Start) -> Recording:
    """Return the recording of a job's data, its states in a file of its journal if they are large."""
    load, tokens = start.load, start.tokens
    assert tokens is not None
    job.eye.phase(f"recording {len(tokens.rows)} x {tokens.rows.shape[1]} tokens ({tokens.origin})")
    batches = list(torch.split(tokens.rows, load.batch))
    recording = record(job.loader, batches, -(-load.paired // load.batch), start.journal.folder)
    memory.trim()
    return recording


def lane_of(job: Job, start: Start) -> Lane:
    """Return a job as one of several on the float stream."""
    return Lane(job.plan, start.passes, job.form, start.journal, not is_whole(job.method, job.options))


def conclude(job: Job, start: Start) -> dict[str, Any]:
    """Write and prove the output of a job whose blocks are all done, and return what to report."""
    plan, asked, eye, journal = job.plan, job.asked, job.eye, start.journal
    notes, scales = journal.notes(), journal.folds()
    fallen = [note["module"] for note in notes if note["fallback"]]
    if fallen and asked.strict:
        raise StrictError(f"--strict: {len(fallen)} modules fell back to rounding: {name_list(fallen)}.")
    remarks = remarks_on(plan, job.options, notes, needs_data(job.method, job.options))
    for text in remarks:
        eye.notice(text)
    document = _finish(job, journal, notes, start.settings)
    if scales:
        eye.scales_table(scales)
    if notes:
        eye.modules_table(notes)
    if document["carried"]:
        eye.totals({"carried over": ", ".join(document["carried"])})
    drawn = start.tokens.notices if start.tokens else []
    document |= {"resumed_from_block": start.resumed, "fallbacks": fallen, "notices": [*drawn, *remarks]}
    document |= {"schedule": start.schedule, "threads": start.settings["threads"], "modules": notes, "kernels": start.backend.reasons}
    document |= {"scales": scales} if scales else {}
    bits = f", {plan.bits_per_weight:.2f} bits per quantized weight" if plan.packed else ""
    eye.totals({"size": f"{mib(plan.before)} -> {mib(plan.after)}{bits}"})
    if start.before is not None:
        reopened = Loader(resolve(str(job.output), trust_remote_code=asked.trust_remote_code), job.loader.device)
        after = _evaluate(reopened, asked, eye, "after")
        document |= {"perplexity_before": start.before, "perplexity_after": after}
        eye.totals({"perplexity": f"{start.before:.3f} -> {after:.3f} on {asked.eval}"})
    return document


def load_of(loader: Loader, method: str, options: Any, asked: RunOptions, samples: int, length: int) -> Load:
    """Return what a run reads of so many samples; none without data."""
    corrects = is_whole(method, options) and options.correct > 0 and not asked.float_stream
    return Load(samples, min(options.paired, samples) if corrects else 0, length, asked.batch or max(1, 2048 // length))


def is_whole(method: str, options: Any) -> bool:
    """Tell whether a run collects whole Hessians, or only their diagonal tiles."""
    return bool(getattr(options, "then", method) == "gptq")


def choose_schedule(loader: Loader, method: str, options: Any, asked: RunOptions, load: Load, eye: Eye) -> str:
    """Return the schedule's name: one pass where what it holds fits the budget; the float stream if it is asked for."""
    if asked.float_stream:
        return "float"
    held, full = max(LIBRARIES, psutil.Process().memory_info().rss), is_whole(method, options)
    one, two = (forecast.blocks_room(loader, load, name, held, full).total for name in ("one-pass", "two-pass"))
    budget = asked.max_memory_bytes or int(psutil.virtual_memory().available * 0.8)
    if two > budget:
        eye.notice(f"about {mib(two)} are needed, more than the {mib(budget)} of the budget; trying all the same")
    if asked.schedule != "auto":
        return asked.schedule
    return "one-pass" if one <= budget else "two-pass"


def _settings(job: Job, tokens: corpus.Tokens | None, schedule: str, batch: int) -> dict[str, Any]:
    """Return everything that decides the output's bytes: what the journal compares and the manifest records."""
    asked, source = job.asked, job.loader.source
    return {
        "method": job.method,
        "options": asdict(job.options),
        "format": job.form.name,
        "dtype": job.dtype,
        "max_shard_size": asked.max_shard_size,
        "source": origin(source),
        "calibration": None
        if tokens is None
        else {
            "origin": asked.origin,
            "samples": len(tokens.rows),
            "seq_len": tokens.rows.shape[1],
            "seed": asked.seed,
            "sha256": tokens.digest(),
        },
        "schedule": schedule,
        "float_stream": asked.float_stream,
        "batch": batch,
        "device": str(job.loader.device),
        "threads": torch.get_num_threads(),
        "reference": asked.plain,
        "versions": versions(),
    }


def _finish(job: Job, journal: Journal, notes: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    loader, plan, asked, form, partial, eye = job.loader, job.plan, job.asked, job.form, job.partial, job.eye
    eye.phase("writing shards")
    zeros_from_one = all(note.get("least_zero", 1) > 0 for note in notes)
    rows = {row.tensor: row for row in plan.packed}
    changed = {name: block for name, block in journal.held().items() if name in plan.kept}

    def settle(weight: str, name: str) -> Any:
        return form.settle(name, rows[weight].codec.bits, zeros_from_one) if weight in rows else None

    reader = artifact.part_reader(journal, {row.tensor: row.block for row in plan.packed} | changed, settle)
    pieces = artifact.pieces_of(loader, plan.kept, plan.layouts | {name: {name: plan.kept[name]} for name in changed}, reader)
    artifact.write_shards(partial, pieces, asked.shard_bytes(plan.after), journal)
    extra = {**settings["options"], "quantizer": f"quantkit:{__version__}", "ignore": plan.ignore}
    config = form.config(plan.rows, extra, zeros_from_one)
    carried, notices = artifact.write_side_files(loader, partial, config, job.dtype)
    for text in notices:
        eye.notice(text)
    if form.side_config:
        artifact.write_json(partial / form.side_config, config)
    command = manifest.command_line(loader.source.name, job.method, job.options, asked)
    summary = f"{len(plan.packed)} linear layers, {plan.bits_per_weight:.2f} bits per weight, format {form.name}."
    if form.name == "hf":
        summary = f"Plain weights: {len(journal.folds())} scales folded into them, the function is the original's."
    card = artifact.model_card(loader.source.name, command, summary, plan.runtimes, _card_table(notes), loader.source.page)
    (partial / "README.md").write_text(card, encoding="utf-8")
    fixed = {key: settings[key] for key in ("schedule", "batch", "device", "threads")}
    fixed["schedule"] = "auto" if settings["schedule"] in ("none", "float") else settings["schedule"]
    run = manifest.request(job.method, loader.source.asked, job.options, asked, **fixed)
    body = {"command": command, "run": run, **settings, "modules": notes, "scales": journal.folds(), "carried": carried}
    document = finish(partial, {piece.name: piece.info for piece in pieces}, body, loader.source, eye)
    journal.remove()
    artifact.publish(partial, job.output)
    return {**document, "bytes_after": plan.after, "bits_per_weight": round(plan.bits_per_weight, 4), "carried": carried}


def _card_table(notes: list[dict[str, Any]]) -> str:
    lines = ["| module | grid | relative output error |", "|---|---|---|"]
    lines += [f"| {n['module']} | {n['grid']} | {n['error']:.6f} |" for n in notes]
    return "\n".join(lines)


def _evaluate(loader: Loader, asked: RunOptions, eye: Eye, when: str) -> float:
    eye.phase(f"measuring perplexity {when}")
    text = perplexity.cut(loader.source.tokenizer(), asked.eval, "windows", perplexity.WINDOW, EVAL_WINDOWS, offline=asked.offline)
    return perplexity.measure(text, perplexity.Streamed(loader, perplexity.final_states(loader, text))).perplexity
