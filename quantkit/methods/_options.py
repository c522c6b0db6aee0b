"""The options of each method: one frozen dataclass makes its flags, help, recipe keys and saved metadata.

This file imports no torch, so that the command line stays fast. A field's metadata holds its help text and, for a
choice, the known values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quantkit.codecs._grid import require_grid
from quantkit.errors import UsageError

ORDERS = ("group", "full", "none")
ACTIVATIONS = ("none", "dynamic", "static")
CODECS = ("affine", "fp8", "nf4", "fp4", "llm-int8", "mxfp4", "nvfp4")
STRATEGIES = ("tensor", "channel", "block")
THEN = ("rtn", "gptq", "none")


def option(default: Any, text: str, *, short: str = "", choices: tuple[str, ...] = ()) -> Any:
    """Return a dataclass field with a help text, an optional short flag and optional known values."""
    return field(default=default, metadata={"help": text, "short": short, "choices": choices})


@dataclass(frozen=True)
class WeightOptions:
    """What any weight-only method asks: the grid, and which modules get it."""

    bits: int = option(4, "Bits per weight: 2, 3, 4 or 8.")
    group_size: int = option(64, "Columns that share a scale: 16, 32, 64, 128, or -1 for the whole row.")
    sym: bool = option(True, "Symmetric grids (fixed zero point) or --asym (a zero point per group).")
    scale_search: bool = option(True, "Search each group's scale instead of spanning its weights.")
    signed: bool = option(True, "Let symmetric scales be negative, so that either side of a group gets the extra level.")
    activations: str = option(
        "none", "Inputs too: 8 bits with a scale per token (dynamic) or measured (static); --bits 8 --group-size -1.", choices=ACTIVATIONS
    )
    include: tuple[str, ...] = option((), "Quantize only modules whose name contains this regular expression (repeatable).")
    exclude: tuple[str, ...] = option((), "Leave modules alone whose name contains this regular expression (repeatable).")
    override: tuple[str, ...] = option((), "REGEX=bits:N,group:N,sym:yes|no: another grid for some modules (repeatable, first match wins).")

    def __post_init__(self) -> None:
        require_grid(self.bits, self.group_size)


@dataclass(frozen=True)
class GptqOptions(WeightOptions):
    """GPTQ's own options."""

    order: str = option(
        "group",
        "Column order. group: by importance inside groups and among them, stored in place; full: by importance, stored with a g_idx; none.",
        choices=ORDERS,
    )
    damp: float = option(0.01, "Damping of the Hessian, as a share of its mean diagonal.")
    correct: float = option(
        0.5, "How much of the error of already quantized inputs each weight makes up for, from 0 to 1; 0 saves a third of the time."
    )
    paired: int = option(64, "How many calibration samples also run through the unquantized model, for --correct.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order not in ORDERS:
            raise UsageError(f"--order {self.order} cannot be. Known: {', '.join(ORDERS)}.")
        if not 0 <= self.damp <= 1:
            raise UsageError(f"--damp {self.damp} cannot be: it is a share of the mean diagonal, from 0 to 1.")
        if not 0 <= self.correct <= 1:
            raise UsageError(f"--correct {self.correct} cannot be: it is a share, from 0 to 1.")


@dataclass(frozen=True)
class RtnOptions(WeightOptions):
    """Rounding's own options: codecs that need no data."""

    codec: str = option("affine", "What weights become; affine takes --bits, --group-size and --sym.", choices=CODECS)
    strategy: str = option("channel", "fp8: what shares a scale.", choices=STRATEGIES)
    double: bool = option(True, "nf4, fp4: store the scales of blocks in 8 bits.")


@dataclass(frozen=True)
class AwqOptions(GptqOptions):
    """AWQ's own options, and those of the solver that follows it."""

    sym: bool = option(False, "Symmetric grids (fixed zero point) or --asym (a zero point per group).")
    then: str = option(
        "rtn", "What follows the scaling: rtn (rounding), gptq (with its options), or none: plain weights, the same function.", choices=THEN
    )
    codec: str = option("affine", "With --then none, what the scales are searched for: affine, or a GGUF type such as Q4_K.")
    search_tokens: int = option(2048, "How many calibration tokens judge the scales.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.then not in THEN:
            raise UsageError(f"--then {self.then} cannot be. Known: {', '.join(THEN)}.")
        if self.codec != "affine" and self.then != "none":
            raise UsageError(f"--codec {self.codec} needs --then none: the weights stay plain, and export-gguf rounds them afterwards.")
        if self.search_tokens < 1:
            raise UsageError(f"--search-tokens {self.search_tokens} cannot be: at least 1.")


@dataclass(frozen=True)
class SmoothQuantOptions(GptqOptions):
    """SmoothQuant's own options, and those of the solver that follows it."""

    bits: int = option(8, "Bits per weight: 2, 3, 4 or 8.")
    group_size: int = option(-1, "Columns that share a scale: 16, 32, 64, 128, or -1 for the whole row.")
    activations: str = option(
        "dynamic",
        "Inputs too: 8 bits with a scale per token (dynamic) or measured (static); --bits 8 --group-size -1.",
        choices=ACTIVATIONS,
    )
    alpha: float = option(-1.0, "How much of the activations' range moves into the weights, from 0 to 1; -1 searches it for each pair.")
    then: str = option("rtn", "What follows the scaling: rtn (rounding) or gptq (with its options).", choices=("rtn", "gptq"))
    search_tokens: int = option(2048, "How many calibration tokens judge the scales.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha != -1 and not 0 <= self.alpha <= 1:
            raise UsageError(f"--alpha {self.alpha} cannot be: it is a share, from 0 to 1, or -1 to search it.")
        if self.search_tokens < 1:
            raise UsageError(f"--search-tokens {self.search_tokens} cannot be: at least 1.")
