"""Linear layers on packed integers: y = x WT without a float copy of W.

A weight is bit planes of its codes, 32 neighbouring columns at a time:

    bits   planes (bytes for 32 columns)
    2      fields of 2 bits (8), in the order of columns
    3      fields of 2 bits (8), then fields of the third bit (4)
    4      16 bytes: column j in the low, column j + 16 in the high nibble
    5      as 4, then the fifth bits (4)
    6      as 4, then fields of the upper 2 bits (8)
    8      32 bytes
    16     32 bfloat16 numbers (64): no integers at all

and per group of columns a scale s (float16) and either a zero point z (one byte, or one number for all) or an offset o (float16):
y = sum over groups of s (sum of q x - z sum of x), or of s sum of q x + o sum of x. Sums of a group are kept in 32 lanes and added up once
a row, always in the same order, whatever the number of rows of x: a row's result does not depend on the others (batch invariance).

Bytes moved for one row of x: the packed weight, once; up to BLOCK rows of x share each unpacked code.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.backends.cpu._jit import jit
from quantkit.backends.cpu._vector import (
    LANES,
    fill,
    half_at,
    load_at,
    load_brains,
    load_bytes,
    load_nibbles,
    load_ones,
    load_twos,
    multiply_add,
    pair,
    total,
)  # fmt: skip

BLOCK = 4
ALONE = 3 << 18  # packed bytes times rows of x below which one thread is faster than asking a second one
ZERO = np.float32(0.0)
FOUR, SIXTEEN = np.float32(4.0), np.float32(16.0)
CONSTANT, ZEROS, OFFSETS = 0, 1, 2  # what a group's shift is


@jit
def _codes(packed: Any, at: int, kind: Any) -> Any:
    """Return the codes of 32 columns whose planes begin at byte `at`; len(kind), which the compiler knows, is their width."""
    if len(kind) == 4:
        return load_nibbles(packed, at)
    if len(kind) == 8:
        return load_bytes(packed, at)
    if len(kind) == 16:
        return load_brains(packed, at)
    if len(kind) == 2:
        return load_twos(packed, at)
    if len(kind) == 3:
        return multiply_add(fill(FOUR), load_ones(packed, at + 8), load_twos(packed, at))
    if len(kind) == 5:
        return multiply_add(fill(SIXTEEN), load_ones(packed, at + 16), load_nibbles(packed, at))
    return multiply_add(fill(SIXTEEN), load_twos(packed, at + 16), load_nibbles(packed, at))


@jit
def _scale(scales: Any, at: int, halves: int) -> Any:
    """Return the scale of 32 columns' group as lanes, or of their two groups of 16."""
    if halves == 2:
        return pair(half_at(scales, at), half_at(scales, at + 1))
    return fill(half_at(scales, at))


@jit
def _shift(mode: int, shifts: Any, offsets: Any, constant: Any, scales: Any, at: int) -> Any:
    """Return what multiplies a group's sum of x: -s z, or the offset."""
    if mode == 0:
        return -half_at(scales, at) * constant
    if mode == 1:
        return -half_at(scales, at) * np.float32(shifts[at])
    return half_at(offsets, at)


@jit
def _one(x: Any, sums: Any, packed: Any, scales: Any, shifts: Any, offsets: Any, constant: Any, mode: int, kind: Any, group: int,
         first: int, last: int, m: int, out: Any) -> None:  # fmt: skip
    """Fill out[m, first:last] for one row of x."""
    columns, groups = x.shape[1], sums.shape[1]
    step, span, width = 4 * len(kind), max(group, LANES), packed.shape[1]
    halves = span // group
    flat, codes, ss, zs, os = x.reshape(-1), packed.reshape(-1), scales.reshape(-1), shifts.reshape(-1), offsets.reshape(-1)
    for row in range(first, last):
        sum0, extra0 = fill(ZERO), ZERO
        at, g = row * width, row * groups
        column = m * columns
        for _ in range(columns // span):
            part0 = fill(ZERO)
            for _ in range(span // LANES):
                q = _codes(codes, at, kind)
                part0 = multiply_add(q, load_at(flat, column), part0)
                at += step
                column += LANES
            sum0 = multiply_add(_scale(ss, g, halves), part0, sum0)
            g += halves
        g = row * groups
        for k in range(groups):
            extra0 += _shift(mode, zs, os, constant, ss, g + k) * sums[m, k]
        out[m, row] = total(sum0) + extra0


@jit
def _four(x: Any, sums: Any, packed: Any, scales: Any, shifts: Any, offsets: Any, constant: Any, mode: int, kind: Any, group: int,
          first: int, last: int, m: int, out: Any) -> None:  # fmt: skip
    """Fill out[m : m + 4, first:last]: each row of x as `_one` does it."""
    columns, groups = x.shape[1], sums.shape[1]
    step, span, width = 4 * len(kind), max(group, LANES), packed.shape[1]
    halves = span // group
    flat, codes, ss, zs, os = x.reshape(-1), packed.reshape(-1), scales.reshape(-1), shifts.reshape(-1), offsets.reshape(-1)
    for row in range(first, last):
        sum0, sum1, sum2, sum3 = fill(ZERO), fill(ZERO), fill(ZERO), fill(ZERO)
        extra0, extra1, extra2, extra3 = ZERO, ZERO, ZERO, ZERO
        at, g = row * width, row * groups
        column = m * columns
        for _ in range(columns // span):
            part0, part1, part2, part3 = fill(ZERO), fill(ZERO), fill(ZERO), fill(ZERO)
            for _ in range(span // LANES):
                q = _codes(codes, at, kind)
                part0 = multiply_add(q, load_at(flat, column), part0)
                part1 = multiply_add(q, load_at(flat, column + columns), part1)
                part2 = multiply_add(q, load_at(flat, column + 2 * columns), part2)
                part3 = multiply_add(q, load_at(flat, column + 3 * columns), part3)
                at += step
                column += LANES
            wide = _scale(ss, g, halves)
            sum0, sum1 = multiply_add(wide, part0, sum0), multiply_add(wide, part1, sum1)
            sum2, sum3 = multiply_add(wide, part2, sum2), multiply_add(wide, part3, sum3)
            g += halves
        g = row * groups
        for k in range(groups):
            shift = _shift(mode, zs, os, constant, ss, g + k)
            extra0 += shift * sums[m, k]
            extra1 += shift * sums[m + 1, k]
            extra2 += shift * sums[m + 2, k]
            extra3 += shift * sums[m + 3, k]
        out[m, row], out[m + 1, row] = total(sum0) + extra0, total(sum1) + extra1
        out[m + 2, row], out[m + 3, row] = total(sum2) + extra2, total(sum3) + extra3


@jit
def sum_groups(x: Any, group: int, sums: Any) -> None:
    """Fill sums[m, g] with the sum of each group of x's columns."""
    flat = x.reshape(-1)
    for m in range(x.shape[0]):
        for g in range(sums.shape[1]):
            column = m * x.shape[1] + g * group
            if group < LANES:
                small = ZERO
                for j in range(group):
                    small += flat[column + j]
                sums[m, g] = small
            else:
                part = fill(ZERO)
                for _ in range(group // LANES):
                    part = part + load_at(flat, column)
                    column += LANES
                sums[m, g] = total(part)


@jit
def stripe(x: Any, sums: Any, packed: Any, scales: Any, shifts: Any, offsets: Any, constant: Any, mode: int, kind: Any, group: int,
           first: int, last: int, out: Any) -> None:  # fmt: skip
    """Fill out[:, first:last]."""
    m = 0
    while m + BLOCK <= x.shape[0]:
        _four(x, sums, packed, scales, shifts, offsets, constant, mode, kind, group, first, last, m, out)
        m += BLOCK
    while m < x.shape[0]:
        _one(x, sums, packed, scales, shifts, offsets, constant, mode, kind, group, first, last, m, out)
        m += 1


def packed_linear(threads: int) -> Callable[..., Callable[[Tensor], Tensor]]:
    """Return a maker of linears for `threads` threads: make(planes) gives a function of x, float32 [rows, in], to float32 [rows, out]."""
    pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def make(planes: Any) -> Callable[[Tensor], Tensor]:
        packed, kind, group = planes.packed.numpy(), (0,) * planes.bits, planes.group
        out, groups = packed.shape[0], planes.scale.shape[1]
        scales = planes.scale.view(torch.int16).numpy().view(np.uint16)
        none = torch.zeros(1, 1)
        mode = OFFSETS if planes.offset is not None else ZEROS if planes.zero is not None else CONSTANT
        shifts = (none.to(torch.uint8) if planes.zero is None else planes.zero).numpy()
        offsets = (none.to(torch.float16) if planes.offset is None else planes.offset).view(torch.int16).numpy().view(np.uint16)
        constant, middle = np.float32(planes.middle), out // 2 // BLOCK * BLOCK

        def run(x: Tensor) -> Tensor:
            rows = x.numpy()
            sums, result = np.zeros((len(rows), groups), np.float32), np.empty((len(rows), out), np.float32)
            if mode != CONSTANT or planes.middle:
                sum_groups(rows, group, sums)
            fixed = (rows, sums, packed, scales, shifts, offsets, constant, mode, kind, group)
            if pool is None or packed.nbytes * len(rows) < ALONE:
                stripe(*fixed, 0, out, result)
            else:
                other = pool.submit(partial(stripe, *fixed, middle, out, result))
                stripe(*fixed, 0, middle, result)
                other.result()
            return torch.from_numpy(result)

        return run

    return make
