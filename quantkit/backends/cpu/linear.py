"""Linear layers on packed integers: y = x WT without a float copy of W.

A weight is bit planes of its codes, 32 neighbouring columns at a time:

    bits   planes (bytes for 32 columns)
    2      fields of 2 bits (8), in the order of columns
    3      fields of 2 bits (8), then fields of the third bit (4)
    4      16 bytes: column j in the low, column j + 16 in the high nibble
    5      as 4, then the fifth bits (4)
    6      as 4, then fields of the upper 2 bits (8)
    8      32 bytes

and per group of columns a scale s (float16) and either a zero point z (one byte, or one number for all) or an offset o (float16):
y = sum over groups of s (sum of q x - z sum of x), or of s sum of q x + o sum of x. Sums of a group are kept in 32 lanes and added up once
a row, always in the same order, whatever the number of rows of x: a row's result does not depend on the others (batch invariance).

Bytes moved for one row of x: the packed weight, once; up to BLOCK rows of x share each unpacked code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.backends.cpu._encode import in_chunks
from quantkit.backends.cpu._jit import jit
from quantkit.backends.cpu._vector import LANES, fill, half_at, load_at, load_bytes, load_nibbles, load_ones, load_twos, multiply_add, total

BLOCK = 4
STRIPE = 128  # output rows of a chunk
ALONE = 1 << 19  # packed bytes below which one thread is faster than asking a second one
ZERO = np.float32(0.0)
FOUR, SIXTEEN = np.float32(4.0), np.float32(16.0)


@jit
def _codes(packed: Any, at: int, kind: Any) -> Any:
    """Return the codes of 32 columns whose planes begin at byte `at`, as float32 lanes; len(kind), known to the compiler, is their width."""
    if len(kind) == 4:
        return load_nibbles(packed, at)
    if len(kind) == 8:
        return load_bytes(packed, at)
    if len(kind) == 2:
        return load_twos(packed, at)
    if len(kind) == 3:
        return multiply_add(fill(FOUR), load_ones(packed, at + 8), load_twos(packed, at))
    if len(kind) == 5:
        return multiply_add(fill(SIXTEEN), load_ones(packed, at + 16), load_nibbles(packed, at))
    return multiply_add(fill(SIXTEEN), load_twos(packed, at + 16), load_nibbles(packed, at))


@jit
def _shift(mode: int, shifts: Any, halves: Any, constant: Any, scale: Any, at: int) -> Any:
    """Return what multiplies a group's sum of x: -s z, or the offset."""
    if mode == 0:
        return -scale * constant
    if mode == 1:
        return -scale * np.float32(shifts[at])
    return half_at(halves, at)


@jit
def _sum_groups(x: Any, group: int, sums: Any) -> None:
    """Fill sums[m, g] with the sum of each group of x's columns."""
    flat = x.reshape(-1)
    for m in range(x.shape[0]):
        for g in range(sums.shape[1]):
            part, column = fill(ZERO), m * x.shape[1] + g * group
            for _ in range(group // LANES):
                part = part + load_at(flat, column)
                column += LANES
            sums[m, g] = total(part)


@jit
def _one(x: Any, sums: Any, packed: Any, scales: Any, shifts: Any, halves: Any, constant: Any, mode: int, kind: Any, group: int,
         first: int, last: int, m: int, out: Any) -> None:  # fmt: skip
    """Fill out[m, first:last] for one row of x."""
    columns, groups = x.shape[1], scales.shape[1]
    step, per_group, width = 4 * len(kind), group // LANES, packed.shape[1]
    flat, codes, ss, zs, hs = x.reshape(-1), packed.reshape(-1), scales.reshape(-1), shifts.reshape(-1), halves.reshape(-1)
    for row in range(first, last):
        sum0, extra0 = fill(ZERO), ZERO
        at = row * width
        for g in range(groups):
            part0 = fill(ZERO)
            column = g * group
            for _ in range(per_group):
                q = _codes(codes, at, kind)
                part0 = multiply_add(q, load_at(flat, m * columns + column), part0)
                at += step
                column += LANES
            scale = half_at(ss, row * groups + g)
            shift = _shift(mode, zs, hs, constant, scale, row * groups + g)
            sum0 = multiply_add(fill(scale), part0, sum0)
            extra0 += shift * sums[m, g]
        out[m, row] = total(sum0) + extra0


@jit
def _four(x: Any, sums: Any, packed: Any, scales: Any, shifts: Any, halves: Any, constant: Any, mode: int, kind: Any, group: int,
          first: int, last: int, m: int, out: Any) -> None:  # fmt: skip
    """Fill out[m : m + 4, first:last]: each row of x as `_one` does it."""
    columns, groups = x.shape[1], scales.shape[1]
    step, per_group, width = 4 * len(kind), group // LANES, packed.shape[1]
    flat, codes, ss, zs, hs = x.reshape(-1), packed.reshape(-1), scales.reshape(-1), shifts.reshape(-1), halves.reshape(-1)
    base = m * columns
    for row in range(first, last):
        sum0, sum1, sum2, sum3 = fill(ZERO), fill(ZERO), fill(ZERO), fill(ZERO)
        extra0, extra1, extra2, extra3 = ZERO, ZERO, ZERO, ZERO
        at = row * width
        for g in range(groups):
            part0, part1, part2, part3 = fill(ZERO), fill(ZERO), fill(ZERO), fill(ZERO)
            column = base + g * group
            for _ in range(per_group):
                q = _codes(codes, at, kind)
                part0 = multiply_add(q, load_at(flat, column), part0)
                part1 = multiply_add(q, load_at(flat, column + columns), part1)
                part2 = multiply_add(q, load_at(flat, column + 2 * columns), part2)
                part3 = multiply_add(q, load_at(flat, column + 3 * columns), part3)
                at += step
                column += LANES
            scale = half_at(ss, row * groups + g)
            shift = _shift(mode, zs, hs, constant, scale, row * groups + g)
            wide = fill(scale)
            sum0, sum1 = multiply_add(wide, part0, sum0), multiply_add(wide, part1, sum1)
            sum2, sum3 = multiply_add(wide, part2, sum2), multiply_add(wide, part3, sum3)
            extra0 += shift * sums[m, g]
            extra1 += shift * sums[m + 1, g]
            extra2 += shift * sums[m + 2, g]
            extra3 += shift * sums[m + 3, g]
        out[m, row], out[m + 1, row] = total(sum0) + extra0, total(sum1) + extra1
        out[m + 2, row], out[m + 3, row] = total(sum2) + extra2, total(sum3) + extra3


@jit
def stripe(x: Any, sums: Any, packed: Any, scales: Any, shifts: Any, halves: Any, constant: Any, mode: int, kind: Any, group: int,
           first: int, last: int, out: Any) -> None:  # fmt: skip
    """Fill out[:, first:last]."""
    m = 0
    while m + BLOCK <= x.shape[0]:
        _four(x, sums, packed, scales, shifts, halves, constant, mode, kind, group, first, last, m, out)
        m += BLOCK
    while m < x.shape[0]:
        _one(x, sums, packed, scales, shifts, halves, constant, mode, kind, group, first, last, m, out)
        m += 1
