"""Rounding to nearest, shared by the methods: rtn is it, the others fall back to it."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.codecs.affine import Affine
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
