"""Quality gates: limits on what the evaluator measures, the same for every command that has them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

MEASURED = {"max_ppl_delta": "delta", "max_ppl_ratio": "ratio", "max_kl": "kl_mean", "min_top1": "top1"}


@dataclass(frozen=True)
class Gates:
    """Limits; None where there is none. Perplexity: difference and ratio to the reference's; KL: mean; top1: a share."""

    max_ppl_delta: float | None = None
    max_ppl_ratio: float | None = None
    max_kl: float | None = None
    min_top1: float | None = None

    @property
    def given(self) -> list[str]:
        """The flags of the limits that are set."""
        return ["--" + field.name.replace("_", "-") for field in fields(self) if getattr(self, field.name) is not None]


def judge(result: dict[str, Any], gates: Gates) -> list[str]:
    """Return a line for each gate that a result misses, saying by how much."""
    lines = []
    for name, key in MEASURED.items():
        limit = getattr(gates, name)
        if limit is None:
            continue
        least = name.startswith("min")
        short = limit - result[key] if least else result[key] - limit
        if not short <= 0:  # a NaN misses every gate
            flag = "--" + name.replace("_", "-")
            lines.append(f"{result['model']} misses {flag} {limit:g}: {result[key]:.6g}, {short:.3g} too {'low' if least else 'high'}")
    return lines
