"""Rounding to nearest: each weight to the closest value of its group's grid, without data.

With the scale search the grid of each group is the one with the least squared error. It is the yardstick for every
other method and the fallback for weights that calibration could not reach.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantkit.backends import Backend
from quantkit.codecs.affine import Affine
from quantkit.methods._options import RtnOptions
from quantkit.tensors import QuantTensor

SHRINKS = torch.arange(55, 106, 2, dtype=torch.float32) / 100


def round_weight(weight: Tensor, codec: Affine, search: bool) -> QuantTensor:
    """Return a weight, float32 [out, in], rounded to nearest group by group."""
    rows, columns = weight.shape
    count, width = codec.groups(columns), codec.width(columns)
    flat = weight.reshape(rows * count, width)
    scale, zero = codec.fit(flat, None, SHRINKS if search else None)
    codes = codec.encode(flat, scale[:, None], zero[:, None])
    params = {"scale": scale.view(rows, count), "zero": zero.view(rows, count).to(torch.uint8)}
    return QuantTensor(codes.view(rows, columns), params, codec)


class RTN:
    """The solver; it needs no statistics, so the pipeline runs no calibration for it."""

    def __init__(self, options: RtnOptions, backend: Backend) -> None:
        self.options = options

    def solve(self, weight: Tensor, factor: Any, codec: Affine) -> tuple[QuantTensor, Any]:
        """Return codes for a weight, float32 [out, in], and how it went."""
        from quantkit.methods.gptq import Note

        result = round_weight(weight, codec, self.options.scale_search)
        error = float((result.dequantize() - weight).square().sum() / weight.square().sum().clamp_min(1e-30))
        return result, Note(error, 0.0, 0, 0)
