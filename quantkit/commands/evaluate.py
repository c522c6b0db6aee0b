"""`quantkit eval-ppl`: perplexity of artifacts, their divergence from a reference on the same tokens, and gates."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import torch

from quantkit import perplexity, report_page
from quantkit.commands._gates import compare, judge
from quantkit.commands._options import EvalOptions
from quantkit.document import print_json
from quantkit.errors import GateMissed, UsageError
from quantkit.formats import _safetensors as st
from quantkit.infer.decode import CHUNK
from quantkit.infer.model import Runner
from quantkit.infer.scores import Cached
from quantkit.junit import Case, write
from quantkit.loader import Loader, pick_device
from quantkit.perplexity import Scorer, Streamed, Text
from quantkit.report import Eye, mib
from quantkit.source import Source, resolve

FEW = 8192  # scored tokens
SAMPLE = "The year 2024 had 366 days; ça va? 1+1=2.\n\tdef f(x):  return x**2  # 你好 🦙\n"


def eval_ppl(models: list[str], asked: EvalOptions) -> None:
    """Measure every model and the reference on the same windows, print them, and hold them to the gates."""
    window = _check(models, asked)
    torch.set_num_threads(asked.threads or torch.get_num_threads())
    sources = [_open(model, asked) for model in models]
    base_source = _open(asked.reference, asked) if asked.reference else None
    first = base_source or sources[0]
    text = perplexity.cut(first.tokenizer(), asked.data, asked.protocol, window, asked.windows, asked.stride, asked.offline)
    for source in sources:
        _require_same_tokens(first, source)
    with Eye(False, asked.log_file) as eye, tempfile.TemporaryDirectory() as scratch:
        base, reference = _reference(base_source, text, asked, eye, Path(scratch))
        results = [_measure(source, text, asked, eye, base, reference, Path(scratch)) for source in sources]
        _print(eye, text, results, reference)
        document = _document(results, reference, asked)
        if asked.html:
            Path(asked.html).write_text(report_page.page(results, reference, asked.data), encoding="utf-8")
            eye.totals({"report": asked.html})
        missed = [line for result in results for line in judge(result, asked)]
        if asked.limits and not missed:
            eye.totals({"gates met": ", ".join(f"{flag} {limit:g}" for flag, limit in asked.limits.items())})
        if asked.junit:
            _write_junit(results, asked)
    if asked.json:
        print_json({**document, "gates_missed": missed})
    if missed:
        raise GateMissed("; ".join(missed))


def _check(models: list[str], asked: EvalOptions) -> int:
    """Return the window; a UsageError for what cannot be."""
    if asked.protocol not in perplexity.PROTOCOLS:
        raise UsageError(f"--protocol '{asked.protocol}' cannot be. Known: {', '.join(perplexity.PROTOCOLS)}.")
    window = asked.window or perplexity.PROTOCOLS[asked.protocol]
    least = 4 if asked.protocol == "llama.cpp" else 2
    if window < least or asked.windows < 0:
        raise UsageError(f"--window {window} --windows {asked.windows} cannot be: at least {least} tokens, 0 for all windows.")
    if not 0 <= asked.stride <= window:
        raise UsageError(f"--stride {asked.stride} cannot be: 1 to --window {window}.")
    if asked.html and Path(asked.html).exists() and Path(asked.html).suffix not in (".html", ".htm"):
        raise UsageError(f"--html {asked.html} is there already, and no page. Name another file.")
    if asked.save_logits and not asked.reference:
        raise UsageError("--save-logits keeps the reference's: it needs --reference.")
    if (needs := asked.limits) and not asked.reference:
        raise UsageError(f"{', '.join(needs)} needs --reference.")
    if len(set(models)) < len(models):
        raise UsageError("A model is named twice.")
    return window


def _write_junit(results: list[dict[str, Any]], asked: EvalOptions) -> None:
    """Write a test case per model and gate, or per model where there is no gate."""
    cases = []
    for result in results:
        missed = judge(result, asked)
        remark = f"perplexity {result['perplexity']:.4f}" + (f", KL {result['kl_mean']:.5f}" if "kl_mean" in result else "")
        for flag in asked.limits or ["perplexity"]:
            cases.append(Case(f"{result['model']} {flag}", next((line for line in missed if f"misses {flag} " in line), ""), remark))
    write(Path(asked.junit), "quantkit eval-ppl", cases)


def _open(model: str, asked: EvalOptions) -> Source:
    return resolve(model, asked.revision, asked.offline, asked.trust_remote_code)


def _require_same_tokens(first: Source, source: Source) -> None:
    """Refuse to compare models that do not read the same tokens."""
    if source is not first and first.tokenizer()(SAMPLE)["input_ids"] != source.tokenizer()(SAMPLE)["input_ids"]:
        raise UsageError(f"{source.asked} and {first.asked} have different tokenizers: their perplexities cannot be compared.")


def _reference(
    source: Source | None, text: Text, asked: EvalOptions, eye: Eye, scratch: Path
) -> tuple[Streamed | None, dict[str, Any] | None]:
    if source is None:
        return None, None
    loader = Loader(source, pick_device(asked.device))
    eye.phase(f"measuring the reference {source.name}")
    states = _kept_states(loader, text, asked, eye, scratch)
    base = Streamed(loader, states)
    result = perplexity.measure(text, base)
    return base, {"model": source.asked, "bytes": _bytes(source), **result.document()}


def _kept_states(loader: Loader, text: Text, asked: EvalOptions, eye: Eye, scratch: Path) -> list[torch.Tensor]:
    """Return the reference's last states, from the file of --save-logits if it holds them, else computed and kept there.

    The head makes logits of them: a hundred times less to keep than the logits, and exact.
    """
    if not asked.save_logits:
        return perplexity.final_states(loader, text, eye.block, scratch)
    path, digest = Path(asked.save_logits), hashlib.sha256(loader.source.fingerprint().encode())
    for window in text.windows:
        digest.update(window.ids.numpy().tobytes())
    mark = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    if path.exists():
        entries = st.read_header(path)
        if "mark" not in entries or not torch.equal(st.read_tensor(path, entries["mark"]), mark):
            raise UsageError(f"{path} was saved for another reference, text or protocol. Remove it, or name another --save-logits.")
        eye.phase(f"using {path}")
        return [st.read_tensor(path, entries[f"states.{i}"]) for i in range(len(entries) - 1)]
    states = perplexity.final_states(loader, text, eye.block, scratch)
    st.write_file(path, {"mark": mark, **{f"states.{i}": state for i, state in enumerate(states)}})
    return states


def _measure(
    source: Source, text: Text, asked: EvalOptions, eye: Eye, base: Streamed | None, reference: dict[str, Any] | None, scratch: Path
) -> dict[str, Any]:
    loader = Loader(source, pick_device(asked.device))
    for line in [*source.notices, *loader.notices("not used")]:
        eye.notice(line)
    with_cache = f", {asked.kv_cache} cache" if asked.kv_cache != "none" else ""
    eye.phase(f"measuring {source.name}" + (f" ({source.quantized})" if source.quantized else "") + with_cache)
    if asked.kv_cache != "none":
        model: Scorer = Cached(Runner(loader, torch.get_num_threads(), "exact"), asked.kv_cache, CHUNK)
    else:
        model = Streamed(loader, perplexity.final_states(loader, text, eye.block, scratch))
    result = perplexity.measure(text, model, base).document()
    compared = compare(result["losses"], reference["losses"], [window.scored for window in text.windows]) if reference else {}
    return {"model": source.asked, "quantized": source.quantized, "bytes": _bytes(source), **result, **compared}


def _bytes(source: Source) -> int:
    return sum(path.stat().st_size for path in source.store.files())


def _document(results: list[dict[str, Any]], reference: dict[str, Any] | None, asked: EvalOptions) -> dict[str, Any]:
    document: dict[str, Any] = {"command": "eval-ppl", "data": asked.data, "kv_cache": asked.kv_cache}
    document |= results[0] if len(results) == 1 else {"results": results}
    return {**document, "reference": reference} if reference else document


def _print(eye: Eye, text: Text, results: list[dict[str, Any]], reference: dict[str, Any] | None) -> None:
    rule = "the tokenizer's beginning token first" if text.bos else "no beginning token"
    scored = sum(window.scored for window in text.windows)
    ordered = sorted(results, key=lambda r: float(r["perplexity"]))
    if len(results) > 1:
        eye.table(*_rows(ordered, reference is not None))
    for result in ordered if len(results) == 1 else []:
        lines = {}
        lines["perplexity"] = f"{result['perplexity']:.4f} +- {result['error']:.4f}"
        if reference:
            lines["ratio"] = f"{result['ratio']:.5f} +- {result['ratio_error']:.5f} (paired by window)"
            lines["difference"] = f"{result['delta']:+.4f} +- {result['delta_error']:.4f}"
            lines["KL divergence"] = (
                f"mean {result['kl_mean']:.5f} +- {result['kl_error']:.5f}, median {result['kl_median']:.5f}, "
                f"99 % {result['kl_99']:.4f}, 99.9 % {result['kl_999']:.4f}, max {result['kl_max']:.3f}"
            )
            lines["same top token"] = f"{100 * result['top1']:.2f} %, RMS change in probability {100 * result['rms_dp']:.2f} %"
        eye.totals(lines)
    if reference:
        eye.totals({"reference": f"{reference['perplexity']:.4f} +- {reference['error']:.4f} ({reference['model']})"})
    eye.totals({"measured on": f"{len(text.windows)} windows of {text.window} tokens ({text.protocol}), {scored} scored, "
                               f"{text.dropped} left, {rule}; line ends as they are, documents joined by end-of-text"})  # fmt: skip
    if scored < FEW:
        eye.notice(f"{scored} scored tokens are few: the errors are wide. Give a longer --data for a number to rely on")


def _rows(ordered: list[dict[str, Any]], compared: bool) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table of several models."""
    head = ["model", "size", "perplexity", *(["ratio", "mean KL", "99 % KL", "same top"] if compared else [])]
    rows = []
    for r in ordered:
        row = [r["model"], mib(r["bytes"]), f"{r['perplexity']:.4f} +- {r['error']:.4f}"]
        if compared:
            row += [f"{r['ratio']:.5f} +- {r['ratio_error']:.5f}", f"{r['kl_mean']:.5f} +- {r['kl_error']:.5f}"]
            row += [f"{r['kl_99']:.4f}", f"{100 * r['top1']:.2f} %"]
        rows.append(row)
    return head, rows
