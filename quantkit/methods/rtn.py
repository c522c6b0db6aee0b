"""Rounding to nearest: each weight to the closest value of its group's grid, without data.

With the scale search the grid of each group is the one with the least squared error. It is the yardstick for every
other method and the fallback for weights that calibration could not reach.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quantkit.backends import Backend
from quantkit.codecs.affine import Affine
from quantkit.methods._options import RtnOptions
from quantkit.methods._rounding import round_weight
from quantkit.tensors import Note, QuantTensor


class RTN:
    """The solver; it needs no statistics, so the pipeline runs no calibration for it."""

    def __init__(self, options: RtnOptions, backend: Backend) -> None:
        self.options = options

    def solve(self, weight: Tensor, factor: Any, codec: Affine) -> tuple[QuantTensor, Any]:
        """Return codes for a weight, float32 [out, in], and how it went."""
        result = round_weight(weight, codec, self.options.scale_search)
        error = float((result.dequantize() - weight).square().sum() / weight.square().sum().clamp_min(1e-30))
        return result, Note(error, 0.0, 0, 0)
