"""What is measured beside a reference, and the limits on it, the same for every command that has them."""

from __future__ import annotations

import math
from typing import Any

from quantkit import perplexity
from quantkit.commands._options import GateOptions
from quantkit.loader import Loader
from quantkit.perplexity import Streamed

MEASURED = {"--max-ppl-delta": "delta", "--max-ppl-ratio": "ratio", "--max-kl": "kl_mean", "--min-top1": "top1"}


class Yardstick:
    """A reference on some windows of a text, measured once: any number of artifacts are measured beside it."""

    def __init__(self, loader: Loader, data: str, windows: int, offline: bool) -> None:
        self.text = perplexity.cut(loader.source.tokenizer(), data, "windows", perplexity.WINDOW, windows, offline=offline)
        self.base = Streamed(loader, perplexity.final_states(loader, self.text))
        self.plain = perplexity.measure(self.text, self.base)

    def measure(self, loader: Loader, name: str) -> dict[str, Any]:
        """Return an artifact's perplexity and its divergence from the reference as plain values."""
        result = perplexity.measure(self.text, Streamed(loader, perplexity.final_states(loader, self.text)), self.base)
        document = {"model": name, **result.document(), **compare(result.losses, self.plain.losses)}
        del document["losses"]
        return document


def compare(losses: tuple[float, ...], base: tuple[float, ...], scored: list[int] | None = None) -> dict[str, float]:
    """Return ratio and difference of the perplexities, each with its standard error over paired windows."""
    weights = scored or [1] * len(losses)
    deltas = [a - b for a, b in zip(losses, base, strict=True)]

    def mean(values: list[float] | tuple[float, ...]) -> float:
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)

    middle = mean(deltas)
    error = math.sqrt(sum((d - middle) ** 2 for d in deltas) / max(len(deltas) - 1, 1) / len(deltas))
    ratio, other = math.exp(middle), math.exp(mean(base))
    return {"ratio": ratio, "ratio_error": ratio * error, "delta": other * (ratio - 1), "delta_error": other * ratio * error}


def judge(result: dict[str, Any], gates: GateOptions) -> list[str]:
    """Return a line for each gate that a result misses, saying by how much."""
    lines = []
    for flag, limit in gates.limits.items():
        value, least = result[MEASURED[flag]], flag.startswith("--min")
        short = limit - value if least else value - limit
        if not short <= 0:  # a NaN misses every gate
            lines.append(f"{result['model']} misses {flag} {limit:g}: {value:.6g}, {short:.3g} too {'low' if least else 'high'}")
    return lines
