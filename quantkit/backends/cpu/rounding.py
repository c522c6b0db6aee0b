"""Rounding on searched grids on the CPU: a tile of rows as SIMD lanes, tiles in parallel.

Twin of `quantkit.methods._rounding.round_reference`: the same float32 operations in the same order, so the same codes. Cost per
row and group of n columns: 4n operations per candidate, n^2 multiply-adds for each one kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.backends.cpu._affine import MAGIC, TILE, diagonal_errors, grid_limits, make_candidates, take_least
from quantkit.backends.cpu._encode import in_chunks
from quantkit.backends.cpu._jit import jit

CHUNK_ROWS = 2 * TILE


@jit
def _output_error(part: Any, tile: Any, scale: Any, zero: Any, high: int, inverse: Any, error: Any, mixed: Any, total: Any) -> None:
    """Fill total, float32 [TILE]: e H eT of rounding the group [columns, TILE] on each lane's grid."""
    top, columns = np.float32(high), part.shape[0]
    for i in range(TILE):
        inverse[i] = np.float32(1.0) / scale[i]
        total[i] = np.float32(0.0)
    for j in range(columns):
        for i in range(TILE):
            mixed[j, i] = np.float32(0.0)
    for j in range(columns):
        own = tile[j, j]
        for i in range(TILE):
            q = min(max((part[j, i] * inverse[i] + MAGIC) - MAGIC + zero[i], np.float32(0.0)), top)
            error[i] = scale[i] * (q - zero[i]) - part[j, i]
            total[i] += error[i] * (own * error[i] + np.float32(2.0) * mixed[j, i])
        for k in range(j + 1, columns):
            h = tile[j, k]
            for i in range(TILE):
                mixed[k, i] += error[i] * h


@jit
def _tile(
    weight: Any, tiles: Any, energy: Any, group: int, results: Any, shrinks: Any, zeros: Any, kept: int, middle: int, high: int,
    mantissa: int, limits: Any, start: int, rows: int,
) -> None:  # fmt: skip
    """Round `rows` <= TILE rows from row `start`; results is (codes, scale, zero), filled in."""
    codes, scale, zero = results
    count, columns = shrinks.size, weight.shape[1]
    part = np.zeros((group, TILE), np.float32)
    mixed = np.zeros((group, TILE), np.float32)
    grid_scale, grid_zero = np.empty((count, TILE), np.float32), np.empty((count, TILE), np.float32)
    grid_error = np.empty((count, TILE), np.float32)
    inverse, error, total = np.zeros(TILE, np.float32), np.zeros(TILE, np.float32), np.zeros(TILE, np.float32)
    best_scale, best_zero, limit = np.ones(TILE, np.float32), np.zeros(TILE, np.float32), np.zeros(TILE, np.float32)
    try_scale, try_zero = np.ones(TILE, np.float32), np.zeros(TILE, np.float32)
    for g in range(columns // group):
        a = g * group
        for i in range(rows):
            for c in range(group):
                part[c, i] = weight[start + i, a + c]
        make_candidates(part, shrinks, zeros, middle, high, mantissa, limits, grid_scale, grid_zero)
        diagonal_errors(part, energy[a : a + group], grid_scale, grid_zero, high, inverse, grid_error)
        for i in range(TILE):
            limit[i] = np.float32(np.inf)
        for _ in range(kept):
            take_least(grid_error, grid_scale, grid_zero, try_scale, try_zero)
            if kept > 1:
                _output_error(part, tiles[g], try_scale, try_zero, high, inverse, error, mixed, total)
            for i in range(TILE):
                if kept == 1 or total[i] < limit[i]:
                    limit[i], best_scale[i], best_zero[i] = total[i], try_scale[i], try_zero[i]
        top = np.float32(high)
        for i in range(TILE):
            inverse[i] = np.float32(1.0) / best_scale[i]
        for i in range(rows):
            scale[start + i, g], zero[start + i, g] = best_scale[i], best_zero[i]
            for c in range(group):
                q = min(max((part[c, i] * inverse[i] + MAGIC) - MAGIC + best_zero[i], np.float32(0.0)), top)
                codes[start + i, a + c] = np.uint8(q)


def round_affine(threads: int) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return the kernel for `threads` threads; its arguments and results are those of `round_reference`."""

    def run(weight: Tensor, codec: Any, search: Any, energy: Tensor, tiles: Tensor | None) -> Any:
        rows, columns = weight.shape
        group = codec.width(columns)
        work = np.ascontiguousarray(weight.numpy())
        shares = np.empty((0, 1, 1), np.float32) if tiles is None else np.ascontiguousarray(tiles.numpy())
        kept = 1 if tiles is None else min(search.kept, len(search.shrinks))
        codes = np.empty((rows, columns), np.uint8)
        scale, zero = (np.empty((rows, columns // group), np.float32) for _ in range(2))
        mantissa, limits = grid_limits(codec)
        fixed = (
            shares, np.ascontiguousarray(energy.numpy()), group, (codes, scale, zero), search.shrinks.numpy(), search.zeros.numpy(),
            kept, codec.middle if codec.symmetric else 0, codec.high, mantissa, limits,
        )  # fmt: skip

        def chunk(start: int) -> None:
            for first in range(start, min(start + CHUNK_ROWS, rows), TILE):
                _tile(work, *fixed, first, min(TILE, rows - first))

        in_chunks(threads, chunk, range(0, rows, CHUNK_ROWS))
        return tuple(torch.from_numpy(part) for part in (codes, scale, zero))

    return run
