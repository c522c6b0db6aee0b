"""`quantkit export-gguf` and `quantkit imatrix`: files for llama.cpp and Ollama."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from quantkit import artifact, corpus, export, importance, memory
from quantkit.backends import Backend
from quantkit.calibrate import record
from quantkit.codecs import CODECS, GGML_TYPES
from quantkit.commands._data import draw_tokens
from quantkit.commands._options import DataOptions, ExportOptions, ImatrixOptions
from quantkit.commands._proof import finish, provenance
from quantkit.document import print_json
from quantkit.energy import watch_blocks
from quantkit.errors import PlanError, StrictError, UsageError, name_list, name_ranges
from quantkit.export import ExportPlan
from quantkit.foreign import read_json
from quantkit.formats import gguf_write
from quantkit.importance import Entry, Importance
from quantkit.loader import Loader, pick_device
from quantkit.mixture import Wishes, load_policy, parse_tensor_types
from quantkit.report import Eye, mib
from quantkit.source import BUILT_IN, Source, built_in_notice, resolve


def export_gguf(model: str, asked: ExportOptions, source: Source | None = None) -> dict[str, Any]:
    """Write `model` as a GGUF file and return the JSON document. source: the model, if it is open already."""
    began = time.perf_counter()
    torch.set_num_threads(asked.threads or torch.get_num_threads())
    policy, wishes = load_policy(asked.type), wishes_of(asked)
    source = source or resolve(model, asked.revision, asked.offline, asked.trust_remote_code)
    output = Path(asked.output or f"{source.name}-{policy.name}.gguf")
    artifact.require_apart(output, source)
    gguf_write.check_output(output, asked.force or asked.dry_run)
    refusal = PlanError(
        f"{model} is already quantized ({source.scheme}). Start from the original, or insist with --allow-requantize; "
        "--type F16 or BF16 decodes it; symmetric groups of 32 with 4 or 8 bits go into Q4_0 or Q8_0 as they are."
    )
    again = bool(source.scheme) and not policy.is_float and not asked.allow_requantize and model not in BUILT_IN
    if again and policy.name not in export.EXACT:
        raise refusal
    with Eye(asked.quiet, asked.log_file) as eye:
        matrix = _matrix(source, asked, eye)
        plan = export.make_plan(source, policy, wishes, asked.pre_tokenizer, matrix, asked.strict)
        if again and not export.carries(plan):
            raise refusal
        writer = export.make_writer(plan, asked.split_bytes)
        total = gguf_write.file_bytes(writer)
        for text in [*plan.notices, *built_in_notice(model, source)]:
            eye.notice(text)
        _print_plan(eye, plan, total)
        document: dict[str, Any] = {"command": "export-gguf", "model": model, "type": policy.name, "output": str(output)}
        document |= _plan_document(plan, total)
        if not asked.dry_run:
            source.require_finite()
            document |= _write(plan, writer, output, asked, eye)
            document["seconds"] = round(time.perf_counter() - began, 2)
            document["peak_memory"] = memory.peak()
            eye.totals({"time": f"{document['seconds']:.1f} s, peak memory {mib(document['peak_memory'])}", "output": str(output)})
    if asked.json:
        print_json(document)
    return document


def wishes_of(asked: ExportOptions) -> Wishes:
    """Return what the flags ask of the types; a UsageError for a type that cannot be."""
    kinds = {"--output-type": asked.output_type.upper(), "--embedding-type": asked.embedding_type.upper()}
    for flag, kind in kinds.items():
        if kind and kind not in GGML_TYPES:
            raise UsageError(f"{flag} '{kind}' cannot be. Known: {', '.join(GGML_TYPES)}.")
    return Wishes(parse_tensor_types(asked.tensor_type), kinds["--output-type"], kinds["--embedding-type"], asked.pure, bool(asked.imatrix))


def _matrix(source: Source, asked: ExportOptions, eye: Eye) -> Importance | None:
    if asked.imatrix == "auto":
        return compute(source, asked, "auto", 0, eye)
    return importance.load(Path(asked.imatrix)) if asked.imatrix else None


def _write(plan: ExportPlan, writer: Any, output: Path, asked: ExportOptions, eye: Eye) -> dict[str, Any]:
    backend, threads = Backend(torch.device("cpu"), 1, asked.reference), torch.get_num_threads()
    torch.set_num_threads(1)  # the pool's threads are the parallelism
    eye.phase(f"writing {len(plan.choices)} tensors, compiling kernels on their first use")
    done: list[str] = []

    def step(name: str) -> None:
        done.append(name)
        eye.count(len(done), len(plan.choices))

    proven: dict[str, Any] = {}
    source, matrix = plan.source, plan.importance
    body: dict[str, Any] = {
        **provenance("export-gguf", source, asked, threads=threads),
        "importance": None if matrix is None else {"chunks": matrix.chunks, "chunk": matrix.chunk, "data": matrix.datasets},
        "modules": [],
    }

    def prove(written: list[Path]) -> None:
        torch.set_num_threads(threads)
        # A SentencePiece vocabulary takes half a minute to rebuild from a GGUF file.
        header = getattr(source.store, "header", None)
        kind = plan.vocabulary.model if plan.vocabulary else header.get("tokenizer.ggml.model") if header else ""
        proven.update(finish(written[0], export.planned(plan), body, source, eye, tokens=kind == "gpt2"))

    try:
        paths = export.write(plan, writer, output, backend, threads, step, prove)
    finally:
        torch.set_num_threads(threads)
    if asked.modelfile:
        path = output.resolve().with_name("Modelfile")
        path.write_text(modelfile(plan, paths[0].name), encoding="utf-8")
        paths.append(path)
    return {"files": [str(path) for path in paths], "kernels": backend.reasons, **proven}


def modelfile(plan: ExportPlan, name: str) -> str:
    """Return a Modelfile for Ollama: the file, and the sampling settings of generation_config.json."""
    lines, path = [f"FROM ./{name}"], plan.source.folder / "generation_config.json"
    settings = read_json(path) if path.is_file() and not plan.source.gguf_file else {}
    names = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repeat_penalty"}
    lines += [f"PARAMETER {theirs} {settings[ours]}" for ours, theirs in names.items() if settings.get(ours) is not None]
    return "\n".join(lines) + "\n"


def _print_plan(eye: Eye, plan: ExportPlan, total: int) -> None:
    held: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for choice in plan.choices:
        held[choice.type, choice.wanted] += 1
        sizes[choice.type, choice.wanted] += choice.nbytes
    bits = 8 * plan.data_bytes / plan.parameters
    eye.totals({"file": f"{plan.source.name} as {plan.policy.name}: {mib(total)} exactly ({total} bytes), {bits:.3f} bits per weight"})
    for (kind, wanted), count in sorted(held.items(), key=lambda item: -sizes[item[0]]):
        eye.totals({f"  {count} x {kind}": mib(sizes[kind, wanted]) + (f", where {wanted} does not fit" if wanted else "")})
    if plan.fallbacks:
        extra = sum(choice.nbytes - _ideal(choice) for choice in plan.fallbacks)
        share = sum(math.prod(choice.shape) for choice in plan.fallbacks) / plan.parameters
        kinds: dict[tuple[str, str, int], list[str]] = {}
        for c in plan.fallbacks:
            kinds.setdefault((c.wanted, c.type, c.shape[-1]), []).append(c.name)
        eye.notice(f"{len(plan.fallbacks)} tensors ({share:.0%} of the parameters) took another type because blocks do not divide their "
                   f"rows, {'+' if extra >= 0 else '-'}{mib(abs(extra))}:")  # fmt: skip
        for (wanted, kind, columns), names in kinds.items():
            eye.totals({f"  {kind} for {wanted}": f"{columns} columns, blocks of {CODECS[wanted].block}: {name_ranges(names)}"})


def _ideal(choice: Any) -> float:
    return float(torch.Size(choice.shape).numel() * CODECS[choice.wanted].bits_per_weight / 8)


def _plan_document(plan: ExportPlan, total: int) -> dict[str, Any]:
    tensors = [{**asdict(c), "shape": list(c.shape), "bytes": c.nbytes} for c in plan.choices]
    bits = round(8 * plan.data_bytes / plan.parameters, 4)
    return {"bytes": total, "bits_per_weight": bits, "tensors": tensors, "fallbacks": len(plan.fallbacks), "notices": plan.notices}


def imatrix(model: str, asked: ImatrixOptions) -> None:
    """Compute the importance matrix of `model` and write it, with the sums of others if they are given."""
    began = time.perf_counter()
    torch.set_num_threads(asked.threads or torch.get_num_threads())
    source = resolve(model, asked.revision, asked.offline, asked.trust_remote_code)
    output = Path(asked.output or f"{source.name}-imatrix.gguf")
    artifact.require_apart(output, source)
    gguf_write.check_output(output, asked.force)
    others = [importance.load(Path(path)) for path in asked.merge]
    with Eye(asked.quiet) as eye:
        matrix = compute(source, asked, asked.device, asked.batch, eye)
        for other in others:
            matrix.merge(other)
        unseen = matrix.notices()
        for text in unseen:
            eye.notice(text)
        if unseen and asked.strict:
            raise StrictError(f"--strict: {name_list(unseen)}.")
        importance.save(matrix, output)
        seconds = round(time.perf_counter() - began, 2)
        eye.totals({"entries": str(len(matrix.entries)), "chunks": f"{matrix.chunks} of {matrix.chunk} tokens"})
        eye.totals({"time": f"{seconds:.1f} s, peak memory {mib(memory.peak())}", "output": str(output)})
    if asked.json:
        document = {"command": "imatrix", "model": model, "output": str(output), "entries": len(matrix.entries), "chunks": matrix.chunks}
        print_json({**document, "notices": unseen, "seconds": seconds, "peak_memory": memory.peak()})


def compute(source: Source, asked: DataOptions, device: str, batch: int, eye: Eye) -> Importance:
    """Return the importance matrix of a source over the calibration data, block by block."""
    loader = Loader(source, pick_device(device))
    tokens: corpus.Tokens = draw_tokens(loader, asked, eye)
    length = tokens.rows.shape[1]
    eye.phase(f"importance over {len(tokens.rows)} x {length} tokens ({tokens.origin})")
    recording = record(loader, list(torch.split(tokens.rows, batch or max(1, 2048 // length))))
    names = export.weight_names(source)
    entries: dict[str, Entry] = {}
    for index, found in watch_blocks(loader, recording):
        eye.count(index + 1, len(loader.blocks))
        for module, energy in found.items():
            for name in sorted({name for weight in loader.sources_of(f"{loader.block_name(index)}.{module}") for name in names[weight]}):
                entries[name] = replace(energy)  # an entry of its own: merging rebinds its sums
    return Importance(entries, length, len(tokens.rows), [asked.origin], "computed")
