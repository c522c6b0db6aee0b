"""`quantkit eval-ppl`: perplexity of an artifact, and of a reference on the same windows. A first version."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import torch

from quantkit import perplexity
from quantkit.commands._options import EvalOptions
from quantkit.errors import UsageError
from quantkit.loader import Loader, pick_device
from quantkit.report import Eye, print_json
from quantkit.source import Source, resolve


def eval_ppl(model: str, asked: EvalOptions) -> None:
    """Measure `model`, and the reference if there is one, and print both."""
    if asked.window < 2 or asked.windows < 0:
        raise UsageError(f"--window {asked.window} --windows {asked.windows} cannot be: at least 2 tokens, 0 for all windows.")
    torch.set_num_threads(asked.threads or torch.get_num_threads())
    source = resolve(model, asked.revision, asked.offline, asked.trust_remote_code)
    text = perplexity.held_out(source.tokenizer(), asked.data, asked.window, asked.windows, asked.offline)
    with Eye() as eye:
        result = _measure(source, text, asked, eye)
        document: dict[str, Any] = {"command": "eval-ppl", "model": model, "data": asked.data, "protocol": "windows", **result}
        rule = "the tokenizer's beginning token first" if result["bos"] else "no beginning token"
        eye.totals({
            "perplexity": f"{result['perplexity']:.4f} +- {result['error']:.4f}",
            "measured on": f"{len(text.rows)} windows of {asked.window} tokens, {result['scored']} scored, {text.dropped} left, {rule}",
        })  # fmt: skip
        if asked.reference:
            base = resolve(asked.reference, None, asked.offline, asked.trust_remote_code)
            other = _measure(base, text, asked, eye)
            document["reference"] = {"model": asked.reference, **other}
            document |= compare(result["losses"], other["losses"])
            eye.totals({
                "reference": f"{other['perplexity']:.4f} +- {other['error']:.4f} ({asked.reference})",
                "ratio": f"{document['ratio']:.5f} +- {document['ratio_error']:.5f} (paired by window)",
            })  # fmt: skip
    if asked.json:
        print_json(document)


def _measure(source: Source, text: perplexity.HeldOut, asked: EvalOptions, eye: Eye) -> dict[str, Any]:
    loader = Loader(source, pick_device(asked.device))
    eye.phase(f"measuring {source.name}" + (f" ({source.quantized})" if source.quantized else ""))
    return asdict(perplexity.measure(loader, text, eye.block))


def compare(losses: tuple[float, ...], base: tuple[float, ...]) -> dict[str, float]:
    """Return ratio and difference of the perplexities, the ratio with its standard error over paired windows."""
    deltas = [a - b for a, b in zip(losses, base, strict=True)]
    mean = sum(deltas) / len(deltas)
    spread = sum((d - mean) ** 2 for d in deltas) / max(len(deltas) - 1, 1) / len(deltas)
    ratio = math.exp(mean)
    delta = math.exp(sum(losses) / len(losses)) - math.exp(sum(base) / len(base))
    return {"ratio": ratio, "ratio_error": ratio * math.sqrt(spread), "delta": delta}
