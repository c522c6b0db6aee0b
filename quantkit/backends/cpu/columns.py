"""GPTQ's column loop on the CPU: one span of columns, a tile of rows as SIMD lanes, tiles in parallel.

Twin of `quantkit.methods.gptq.columns_reference`: the same float32 operations in the same order, so the same codes.
Without fastmath LLVM may not reorder a sum; with rows as lanes no sum crosses lanes, so every loop is vectors of
independent elements (`error_model="numpy"`, or each division would be a branch). Threads are a pool over fixed chunks
of rows; no result depends on how many there are.

Cost of a span of n columns, per row: n^2/2 multiply-subtracts for the loop, n per candidate grid, and n*group/2 for
each candidate kept; a tile and its work stay in the first-level cache.
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
def _simulate(part: Any, factor: Any, a: int, scale: Any, zero: Any, high: int, inverse: Any, step: Any, work: Any, loss: Any) -> None:
    """Fill loss, float32 [TILE], of the column loop inside the group that begins at column a."""
    top = np.float32(high)
    columns = part.shape[0]
    for i in range(TILE):
        inverse[i] = np.float32(1.0) / scale[i]
        loss[i] = np.float32(0.0)
    for j in range(columns):
        for i in range(TILE):
            work[j, i] = part[j, i]
    for c in range(columns):
        pivot = factor[a + c, a + c]
        for i in range(TILE):
            q = min(max((work[c, i] * inverse[i] + MAGIC) - MAGIC + zero[i], np.float32(0.0)), top)
            step[i] = (work[c, i] - scale[i] * (q - zero[i])) / pivot
            loss[i] += step[i] * step[i]
        for j in range(c + 1, columns):
            u = factor[a + c, a + j]
            for i in range(TILE):
                work[j, i] -= step[i] * u


@jit
def _choose(
    part: Any, factor: Any, a: int, scale: Any, zero: Any, error: Any, kept: int, high: int, room: Any, best_scale: Any, best_zero: Any
) -> None:
    """Fill best_scale and best_zero, float32 [TILE]: the least simulated loss among the `kept` least errors."""
    inverse, step, work, loss, limit, try_scale, try_zero = room
    for i in range(TILE):
        limit[i] = np.float32(np.inf)
    for _ in range(kept):
        take_least(error, scale, zero, try_scale, try_zero)
        if kept > 1:
            _simulate(part, factor, a, try_scale, try_zero, high, inverse, step, work, loss)
        for i in range(TILE):
            if kept == 1 or loss[i] < limit[i]:
                limit[i], best_scale[i], best_zero[i] = loss[i], try_scale[i], try_zero[i]


@jit
def _columns(work: Any, factor: Any, a: int, group: int, scale: Any, zero: Any, high: int, inverse: Any, codes: Any, errors: Any) -> None:
    """Round columns a..a+group of a tile one by one, spreading each error over the columns of the span still to come."""
    top = np.float32(high)
    for i in range(TILE):
        inverse[i] = np.float32(1.0) / scale[i]
    for c in range(a, a + group):
        pivot = factor[c, c]
        for i in range(TILE):
            q = min(max((work[c, i] * inverse[i] + MAGIC) - MAGIC + zero[i], np.float32(0.0)), top)
            codes[c, i] = q
            errors[c, i] = (work[c, i] - scale[i] * (q - zero[i])) / pivot
        for j in range(c + 1, work.shape[0]):
            u = factor[c, j]
            for i in range(TILE):
                work[j, i] -= errors[c, i] * u


@jit
def _tile(
    weight: Any,
    factor: Any,
    importance: Any,
    group: int,
    grids: Any,
    shrinks: Any,
    zeros: Any,
    kept: int,
    middle: int,
    high: int,
    mantissa: int,
    limits: Any,
    start: int,
    rows: int,
) -> None:
    """Solve `rows` <= TILE rows of a span from row `start`; `grids` is (scale, zero, codes, errors), filled in."""
    scale, zero, codes, errors = grids
    count, columns = shrinks.size, weight.shape[1]
    work, tile_codes = np.zeros((columns, TILE), np.float32), np.zeros((columns, TILE), np.float32)
    tile_errors = np.zeros((columns, TILE), np.float32)
    cand_scale, cand_zero = np.empty((count, TILE), np.float32), np.empty((count, TILE), np.float32)
    cand_error = np.empty((count, TILE), np.float32)
    inverse, step, loss = np.zeros(TILE, np.float32), np.zeros(TILE, np.float32), np.zeros(TILE, np.float32)
    room = (
        inverse,
        step,
        np.zeros((group, TILE), np.float32),
        loss,
        np.zeros(TILE, np.float32),
        np.zeros(TILE, np.float32),
        np.zeros(TILE, np.float32),
    )
    best_scale, best_zero = np.ones(TILE, np.float32), np.zeros(TILE, np.float32)
    for i in range(rows):
        for c in range(columns):
            work[c, i] = weight[start + i, c]
    for g in range(columns // group):
        a = g * group
        if count:
            part = work[a : a + group]
            make_candidates(part, shrinks, zeros, middle, high, mantissa, limits, cand_scale, cand_zero)
            diagonal_errors(part, importance[a : a + group], cand_scale, cand_zero, high, inverse, cand_error)
            _choose(part, factor, a, cand_scale, cand_zero, cand_error, kept, high, room, best_scale, best_zero)
        for i in range(rows):
            if count:
                scale[start + i, g], zero[start + i, g] = best_scale[i], best_zero[i]
            else:
                best_scale[i], best_zero[i] = scale[start + i, g], zero[start + i, g]
        _columns(work, factor, a, group, best_scale, best_zero, high, inverse, tile_codes, tile_errors)
    for i in range(rows):
        for c in range(columns):
            codes[start + i, c] = np.uint8(tile_codes[c, i])
            errors[start + i, c] = tile_errors[c, i]


def gptq_columns(threads: int) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return the kernel for `threads` threads; its arguments and results are those of `columns_reference`."""

    def run(weight: Tensor, factor: Tensor, importance: Tensor, codec: Any, group: int, search: Any, grid: Any = None) -> Any:
        rows, columns = weight.shape
        work = np.ascontiguousarray(weight.numpy())
        if grid is None:
            scale, zero = (np.empty((rows, columns // group), np.float32) for _ in range(2))
            shrinks, zeros = search.shrinks.numpy(), search.zeros.numpy()
        else:
            scale, zero = (np.ascontiguousarray(part.numpy()) for part in (grid.scale, grid.offset))
            shrinks = zeros = np.empty(0, np.float32)
        codes, errors = np.empty((rows, columns), np.uint8), np.empty((rows, columns), np.float32)
        mantissa, limits = grid_limits(codec)
        fixed = (
            np.ascontiguousarray(factor.numpy()), np.ascontiguousarray(importance.numpy()), group,
            (scale, zero, codes, errors), shrinks, zeros, min(search.kept, max(shrinks.size, 1)),
            codec.middle if codec.symmetric else 0, codec.high, mantissa, limits,
        )  # fmt: skip
        starts = range(0, rows, CHUNK_ROWS)

        def chunk(start: int) -> None:
            for first in range(start, min(start + CHUNK_ROWS, rows), TILE):
                _tile(work, *fixed, first, min(TILE, rows - first))

        in_chunks(threads, chunk, starts)
        return tuple(torch.from_numpy(part) for part in (codes, errors, scale, zero))

    return run
