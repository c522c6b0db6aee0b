"""Rounding to nearest: each weight to the closest value of its group's grid, without data or with what a calibration saw.

Without statistics the grid of each group is the one with the least squared error; with them, the one with the least output
error. It is the yardstick for every other method, the fallback for weights that calibration could not reach, and what
follows AWQ's scaling.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quantkit.backends import Backend
from quantkit.codecs.affine import Affine
from quantkit.methods._options import WeightOptions
from quantkit.methods._rounding import make_search, round_reference, round_weight
from quantkit.tensors import LayerStats, Note, QuantTensor


class RTN:
    """The solver."""

    def __init__(self, options: WeightOptions, backend: Backend) -> None:
        self.options = options
        self.round = backend.op("round_affine", round_reference)

    def prepare(self, stats: LayerStats, codec: Any) -> LayerStats:
        """Return what is wanted of an input's statistics: all of it."""
        return stats

    def share(self, weights: list[Tensor], codec: Any) -> Any:
        """Return what weights that a runtime may fuse must have in common, or None."""
        return None if isinstance(codec, Affine) else codec.share(weights)

    def solve(self, weight: Tensor, factor: LayerStats | None, codec: Any, shared: Any = None) -> tuple[QuantTensor, Note]:
        """Return codes for a weight, float32 [out, in], and how it went; factor: its input's statistics, or None."""
        if isinstance(codec, Affine):
            search = make_search(codec.symmetric, self.options.scale_search, self.options.signed)
            result = round_weight(weight, codec, search, factor, self.round)
        else:
            result = codec.round(weight, self.options.scale_search, shared)
        error = result.dequantize() - weight
        if factor is None or not factor.tokens or factor.nonfinite:
            reason = "" if factor is None else "no finite input reached it: rounded without statistics"
            share = error.square().sum() / weight.square().sum().clamp_min(1e-30)
            return result, Note(float(share), 0.0, factor.tokens if factor else 0, 0, reason)
        energy = factor.energy()
        share = (error.square() @ energy).sum() / (weight.square() @ energy).sum().clamp_min(1e-30)
        return result, Note(float(share), 0.0, factor.tokens, int((energy <= 0).sum()))
