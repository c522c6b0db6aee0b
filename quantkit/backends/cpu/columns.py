"""GPTQ's column loop on the CPU: one span of columns, rows in parallel, candidate grids as SIMD lanes.

Twin of `quantkit.methods.gptq.columns_reference`: the same float32 operations in the same order, so the same codes.
Without fastmath LLVM may not reorder a sum, so sums run over columns and the vector lanes over candidates or over
the columns still to come, where every element is independent. Threads are a pool over fixed chunks of rows; no
result depends on how many there are.

Cost of a span of n columns, per row: n^2/2 multiply-subtracts for the loop, and for each of the group's candidates
kept, n*group/2 more; the span and its factor stay in the first-level cache.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

CHUNK_ROWS = 64


@njit(nogil=True, cache=True, fastmath=False)  # type: ignore[untyped-decorator]
def _round_scale(values: Any, bits: Any, mantissa: int, least: float) -> None:
    """Round positive float32 `values` half-even to a format with `mantissa` bits; `bits` views them as int32."""
    for k in range(values.size):
        values[k] = max(values[k], np.float32(least))
    if mantissa < 23:
        drop = 23 - mantissa
        for k in range(values.size):
            bits[k] = ((bits[k] + (1 << (drop - 1)) - 1 + ((bits[k] >> drop) & 1)) >> drop) << drop


@njit(nogil=True, cache=True, fastmath=False)  # type: ignore[untyped-decorator]
def _candidates(row: Any, shrinks: Any, zeros: Any, middle: int, high: int, mantissa: int, least: float, scale: Any, zero: Any) -> None:
    """Fill scale and zero, float32 [candidates], for one group of one row; `middle` 0 means asymmetric."""
    low, top = np.float32(0.0), np.float32(0.0)
    for j in range(row.size):
        low, top = min(low, row[j]), max(top, row[j])
    if middle:
        top = max(-low, top)
        low = -top
    for k in range(scale.size):
        scale[k] = (top * shrinks[k] - low * shrinks[k]) / np.float32(high)
    _round_scale(scale, scale.view(np.int32), mantissa, least)
    for k in range(scale.size):
        if middle:
            zero[k] = np.float32(middle)
        else:
            zero[k] = min(max(np.rint(-(low * shrinks[k]) / scale[k]) + zeros[k], np.float32(0.0)), np.float32(high))


@njit(nogil=True, cache=True, fastmath=False)  # type: ignore[untyped-decorator]
def _diagonal_errors(row: Any, importance: Any, scale: Any, zero: Any, high: int, error: Any) -> None:
    """Fill error, float32 [candidates]: the importance-weighted squared rounding error of the group."""
    top = np.float32(high)
    error[:] = np.float32(0.0)
    for j in range(row.size):
        w, weight = row[j], importance[j]
        for k in range(scale.size):
            q = min(max(np.rint(w / scale[k]) + zero[k], np.float32(0.0)), top)
            d = scale[k] * (q - zero[k]) - w
            error[k] += weight * (d * d)


@njit(nogil=True, cache=True, fastmath=False)  # type: ignore[untyped-decorator]
def _simulated_errors(row: Any, factor: Any, scale: Any, zero: Any, high: int, work: Any, step: Any, error: Any) -> None:
    """Fill error, float32 [kept]: the loss of the column loop inside the group, for each candidate grid."""
    top = np.float32(high)
    columns, kept = row.size, scale.size
    error[:] = np.float32(0.0)
    for j in range(columns):
        for k in range(kept):
            work[j, k] = row[j]
    for c in range(columns):
        pivot = factor[c, c]
        for k in range(kept):
            w = work[c, k]
            q = min(max(np.rint(w / scale[k]) + zero[k], np.float32(0.0)), top)
            e = (w - scale[k] * (q - zero[k])) / pivot
            step[k] = e
            error[k] += e * e
        for j in range(c + 1, columns):
            u = factor[c, j]
            for k in range(kept):
                work[j, k] -= step[k] * u


@njit(nogil=True, cache=True, fastmath=False)  # type: ignore[untyped-decorator]
def _least(error: Any, order: Any, kept: int) -> None:
    """Put the indices of the `kept` least errors first, the earlier of equals first, by selection."""
    for k in range(order.size):
        order[k] = k
    for place in range(kept):
        best = place
        for k in range(place + 1, order.size):
            if error[order[k]] < error[order[best]]:
                best = k
        chosen = order[best]
        for k in range(best, place, -1):
            order[k] = order[k - 1]
        order[place] = chosen


@njit(nogil=True, cache=True, fastmath=False)  # type: ignore[untyped-decorator]
def _rows(weight: Any, factor: Any, importance: Any, group: int, grids: Any, shrinks: Any, zeros: Any, kept: int, middle: int,
          high: int, mantissa: int, least: float, start: int, stop: int) -> None:
    """Solve rows start..stop of a span in place; `grids` is (scale, zero, codes, errors), filled in."""
    scale, zero, codes, errors = grids
    count, columns = shrinks.size, weight.shape[1]
    cand_scale, cand_zero = np.empty(count, np.float32), np.empty(count, np.float32)
    cand_error, order = np.empty(count, np.float32), np.empty(count, np.int64)
    kept_scale, kept_zero = np.empty(kept, np.float32), np.empty(kept, np.float32)
    kept_error, step = np.empty(kept, np.float32), np.empty(kept, np.float32)
    work = np.empty((group, kept), np.float32)
    top = np.float32(high)
    for r in range(start, stop):
        row = weight[r]
        for g in range(columns // group):
            a = g * group
            if count:
                part = row[a : a + group]
                _candidates(part, shrinks, zeros, middle, high, mantissa, least, cand_scale, cand_zero)
                _diagonal_errors(part, importance[a : a + group], cand_scale, cand_zero, high, cand_error)
                _least(cand_error, order, kept)
                for k in range(kept):
                    kept_scale[k], kept_zero[k] = cand_scale[order[k]], cand_zero[order[k]]
                best = 0
                if kept > 1:
                    inner = factor[a : a + group, a : a + group]
                    _simulated_errors(part, inner, kept_scale, kept_zero, high, work, step, kept_error)
                    for k in range(1, kept):
                        if kept_error[k] < kept_error[best]:
                            best = k
                scale[r, g], zero[r, g] = kept_scale[best], kept_zero[best]
            s, z = scale[r, g], zero[r, g]
            for c in range(a, a + group):
                w = row[c]
                q = min(max(np.rint(w / s) + z, np.float32(0.0)), top)
                codes[r, c] = np.uint8(q)
                e = (w - s * (q - z)) / factor[c, c]
                errors[r, c] = e
                for j in range(c + 1, columns):
                    row[j] -= e * factor[c, j]


def gptq_columns(threads: int) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return the kernel for `threads` threads; its arguments and results are those of `columns_reference`."""

    def run(weight: Tensor, factor: Tensor, importance: Tensor, codec: Any, group: int, search: Any, grid: Any = None) -> Any:
        rows, columns = weight.shape
        work = np.ascontiguousarray(weight.numpy())
        if grid is None:
            scale, zero = (np.empty((rows, columns // group), np.float32) for _ in range(2))
            shrinks, zeros = search.shrinks.numpy(), search.zeros.numpy()
        else:
            scale, zero = (np.ascontiguousarray(part.numpy()) for part in grid)
            shrinks = zeros = np.empty(0, np.float32)
        codes, errors = np.empty((rows, columns), np.uint8), np.empty((rows, columns), np.float32)
        from quantkit.codecs.affine import MIN_SCALE

        mantissa = {"float16": 10, "bfloat16": 7, "float32": 23}[codec.scale_dtype]
        fixed = (
            np.ascontiguousarray(factor.numpy()), np.ascontiguousarray(importance.numpy()), group,
            (scale, zero, codes, errors), shrinks, zeros, min(search.kept, max(shrinks.size, 1)),
            codec.middle if codec.symmetric else 0, codec.high, mantissa, MIN_SCALE,
        )  # fmt: skip
        starts = range(0, rows, CHUNK_ROWS)

        def chunk(start: int) -> None:
            _rows(work, *fixed, start, min(start + CHUNK_ROWS, rows))

        if threads == 1 or len(starts) == 1:
            for start in starts:
                chunk(start)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(chunk, starts))
        return tuple(torch.from_numpy(part) for part in (codes, errors, scale, zero))

    return run
