"""Candidate grids of a group of columns on the CPU, a tile of rows as SIMD lanes: what the affine kernels share.

Twins of `quantkit.methods._rounding.candidates` and `keep_best`: the same float32 operations in the same order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.backends.cpu._jit import jit
from quantkit.codecs.affine import MIN_SCALE

TILE = 32
# Adding and subtracting 1.5 * 2^23 rounds half-even, as vectors do; beyond 2^22 the clamp to a code decides anyway.
MAGIC = np.float32(12582912.0)


@jit
def _round_scale(values: Any, bits: Any, mantissa: int, limits: Any) -> None:
    """Round float32 `values` half-even to a format with `mantissa` bits, keeping signs; `bits` views them as int32."""
    for k in range(values.size):
        size = min(max(abs(values[k]), limits[0]), limits[1])
        values[k] = -size if values[k] < np.float32(0.0) else size
    if mantissa < 23:
        drop = 23 - mantissa
        for k in range(values.size):
            bits[k] = ((bits[k] + (1 << (drop - 1)) - 1 + ((bits[k] >> drop) & 1)) >> drop) << drop


@jit
def make_candidates(part: Any, shrinks: Any, zeros: Any, middle: int, high: int, mantissa: int, limits: Any, scale: Any, zero: Any) -> None:
    """Fill scale and zero, float32 [candidates, TILE], for a group [columns, TILE]; `middle` 0 means asymmetric."""
    low, top = np.zeros(TILE, np.float32), np.zeros(TILE, np.float32)
    for j in range(part.shape[0]):
        for i in range(TILE):
            low[i], top[i] = min(low[i], part[j, i]), max(top[i], part[j, i])
    if middle:
        for i in range(TILE):
            top[i] = max(-low[i], top[i])
            low[i] = -top[i]
    for k in range(scale.shape[0]):
        for i in range(TILE):
            scale[k, i] = (top[i] * shrinks[k] - low[i] * shrinks[k]) / np.float32(high)
    flat = scale.reshape(-1)
    _round_scale(flat, flat.view(np.int32), mantissa, limits)
    for k in range(scale.shape[0]):
        for i in range(TILE):
            if middle:
                zero[k, i] = np.float32(middle)
            else:
                base = np.float32(high) / np.float32(2.0) - (low[i] + top[i]) / np.float32(2.0) / scale[k, i]
                zero[k, i] = min(max((base + MAGIC) - MAGIC + zeros[k], np.float32(0.0)), np.float32(high))


@jit
def diagonal_errors(part: Any, importance: Any, scale: Any, zero: Any, high: int, inverse: Any, error: Any) -> None:
    """Fill error, float32 [candidates, TILE]: the importance-weighted squared rounding error of the group."""
    top = np.float32(high)
    for k in range(scale.shape[0]):
        for i in range(TILE):
            inverse[i] = np.float32(1.0) / scale[k, i]
            error[k, i] = np.float32(0.0)
        for j in range(part.shape[0]):
            weight = importance[j]
            for i in range(TILE):
                q = min(max((part[j, i] * inverse[i] + MAGIC) - MAGIC + zero[k, i], np.float32(0.0)), top)
                d = scale[k, i] * (q - zero[k, i]) - part[j, i]
                error[k, i] += weight * (d * d)


@jit
def take_least(error: Any, scale: Any, zero: Any, best_scale: Any, best_zero: Any) -> None:
    """Move each lane's grid with the least error, of float32 [candidates, TILE], into best_scale and best_zero [TILE]."""
    for i in range(TILE):
        k = 0
        for other in range(1, error.shape[0]):
            if error[other, i] < error[k, i]:
                k = other
        error[k, i] = np.float32(np.inf)
        best_scale[i], best_zero[i] = scale[k, i], zero[k, i]


def grid_limits(codec: Any) -> tuple[int, Any]:
    """Return the mantissa bits of a codec's scales, and the least and the largest one, float32 [2]."""
    mantissa = {"float16": 10, "bfloat16": 7, "float32": 23}[codec.scale_dtype]
    return mantissa, np.array([MIN_SCALE, codec.max_scale], np.float32)
