"""Rounding to nearest on searched grids, shared by the methods: rtn is it, the others fall back to it or begin with it.

A group's grid is the candidate with the least error. Without statistics that is the squared error of the weights; with
the energy of the input columns each weight counts by it; with the Hessian's tile of the group, e H eT is the group's share of the
output error, over every calibration token (what AWQ's clip search estimates from some). A backend may hold a faster twin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.codecs.affine import Affine
from quantkit.tensors import HESSIAN_TILE, LayerStats, QuantTensor

KEPT = 4


@dataclass(frozen=True)
class Search:
    """The candidate grids of a group: shrink factors (negative ones turn the grid round) and zero point offsets,
    float32 [candidates], and how many of the best by weighted rounding error are tried by the exact one."""

    shrinks: Tensor
    zeros: Tensor
    kept: int


def make_search(symmetric: bool, wanted: bool, signed: bool, kept: int = KEPT) -> Search:
    """Return the candidates for a grid; unwanted means one, spanning the weights."""
    if not wanted:
        return Search(torch.ones(1), torch.zeros(1), 1)
    if symmetric:
        shrinks = torch.arange(56, 107, 2, dtype=torch.float32) / 100
        shrinks = torch.cat([shrinks, -shrinks]) if signed else shrinks
        return Search(shrinks, torch.zeros_like(shrinks), kept)
    shrinks = torch.arange(56, 107, 3, dtype=torch.float32) / 100
    offsets = torch.tensor([-1.0, 0.0, 1.0])
    return Search(shrinks.repeat_interleave(3), offsets.repeat(len(shrinks)), kept)


def candidates(weight: Tensor, codec: Affine, search: Search) -> tuple[Tensor, Tensor]:
    """Return scale and zero, float32 [out, candidates], of the grids to try for one group, float32 [out, n]."""
    low, high = codec.range_of(weight)
    shrinks, offsets = search.shrinks.to(weight.device), search.zeros.to(weight.device)
    scale = codec.round_scale((high[:, None] * shrinks - low[:, None] * shrinks) / codec.high)
    if codec.symmetric:
        return scale, torch.full_like(scale, codec.middle)
    middle = (low + high)[:, None] / 2  # a shrunk range keeps its middle
    return scale, ((codec.high / 2 - middle / scale).round() + offsets).clamp(0, codec.high)


def keep_best(weight: Tensor, importance: Tensor, codec: Affine, grids: tuple[Tensor, Tensor], kept: int) -> tuple[Tensor, Tensor]:
    """Return the `kept` grids, float32 [out, kept] each, with the least rounding error weighted by importance, float32 [n]."""
    scale, zero = grids
    error, inverse = torch.zeros_like(scale), 1.0 / scale
    for j in range(weight.shape[1]):
        value = weight[:, j, None]
        code = ((value * inverse).round() + zero).clamp(0, codec.high)
        error += importance[j] * (scale * (code - zero) - value).square()
    best = torch.argsort(error, dim=1, stable=True)[:, :kept]
    return scale.gather(1, best), zero.gather(1, best)


def round_reference(weight: Tensor, codec: Affine, search: Search, energy: Tensor, tiles: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Round a weight, float32 [out, in], in PyTorch.

    energy: float32 [in], importance of the columns; tiles: float32 [groups, n, n], the Hessian inside each group, or None.
    Returns codes uint8 [out, in], scale and zero float32 [out, groups].
    """
    width = codec.width(weight.shape[1])
    codes, scales, zeros = [], [], []
    for start in range(0, weight.shape[1], width):
        part = weight[:, start : start + width].contiguous()
        kept = search.kept if tiles is not None else 1
        scale, zero = keep_best(part, energy[start : start + width], codec, candidates(part, codec, search), kept)
        if scale.shape[1] > 1:
            assert tiles is not None
            best = _output_error(part, tiles[start // width], codec, scale, zero).argmin(1, keepdim=True)
            scale, zero = scale.gather(1, best), zero.gather(1, best)
        codes.append(codec.encode(part, scale[:, :1], zero[:, :1]))
        scales.append(scale[:, 0])
        zeros.append(zero[:, 0])
    return torch.cat(codes, 1), torch.stack(scales, 1), torch.stack(zeros, 1)


def _output_error(weight: Tensor, tile: Tensor, codec: Affine, scale: Tensor, zero: Tensor) -> Tensor:
    """Return e H eT, float32 [out, candidates], of rounding one group on each grid."""
    total, inverse = torch.zeros_like(scale), 1.0 / scale
    mixed = torch.zeros(*scale.shape, weight.shape[1], device=weight.device)  # sums of e_k H_kj over the columns k done
    for j in range(weight.shape[1]):
        value = weight[:, j, None]
        code = ((value * inverse).round() + zero).clamp(0, codec.high)
        error = scale * (code - zero) - value
        total += error * (tile[j, j] * error + 2.0 * mixed[:, :, j])
        mixed += error[:, :, None] * tile[j]
    return total


def round_weight(weight: Tensor, codec: Affine, search: Search, stats: LayerStats | None = None,
                 kernel: Callable[..., Any] = round_reference) -> QuantTensor:  # fmt: skip
    """Return a weight, float32 [out, in], rounded to nearest group by group, on the grids that `stats` say are best."""
    width = codec.width(weight.shape[1])
    codec.groups(weight.shape[1])
    energy, tiles = torch.ones(weight.shape[1], device=weight.device), None
    if stats is not None and stats.tokens and not stats.nonfinite:
        energy = stats.energy()
        tiles = stats.diagonal_tiles(width) if HESSIAN_TILE % width == 0 and search.kept > 1 else None
    codes, scale, zero = kernel(weight, codec, search, energy, tiles)
    return QuantTensor(codes, {"scale": scale, "zero": zero.to(torch.uint8)}, codec)
