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
    load_halves,
    load_nibbles,
    load_ones,
    load_twos,
    multiply_add,
    pair,
    store_at,
    total,
)  # fmt: skip

BLOCK = 4
TILE_ROWS = 64
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
def _spread(halves: Any, at: int, row: Any) -> None:
    """Fill row, float32 [groups], with float16 numbers from `at` on."""
    k = 0
    while k + LANES <= row.size:
        store_at(row, k, load_halves(halves, at + k))
        k += LANES
    while k < row.size:
        row[k] = half_at(halves, at + k)
        k += 1


@jit
def _shift_row(mode: int, scale: Any, shifts: Any, offsets: Any, constant: Any, at: int, row: Any) -> None:
    """Fill row, float32 [groups], with what multiplies each group's sum of x: -s z, or the offset."""
    if mode == 2:
        _spread(offsets, at, row)
        return
    for k in range(row.size):
        row[k] = -scale[k] * (np.float32(shifts[at + k]) if mode == 1 else constant)


@jit
def _dot(a: Any, b: Any, base: int) -> Any:
    """Return the sum of a[k] * b[base + k], always in the same order."""
    part, k, rest = fill(ZERO), 0, ZERO
    while k + LANES <= a.size:
        part = multiply_add(load_at(a, k), load_at(b, base + k), part)
        k += LANES
    while k < a.size:
        rest += a[k] * b[base + k]
        k += 1
    return total(part) + rest


@jit
def _wide(scale: Any, g: int, span: Any) -> Any:
    """Return the scale of 32 columns' group as lanes, or of their two groups of 16 (len(span) 0)."""
    if len(span) == 0:
        return pair(scale[g], scale[g + 1])
    return fill(scale[g])


@jit
def _one(x: Any, sums: Any, weight: Any, kind: Any, span: Any, times: int, first: int, last: int, m: int, out: Any) -> None:
    """Fill out[m, first:last] for one row of x; weight: (packed, scales, shifts, offsets, constant, mode).

    A group is len(span) runs of 32 columns, `times` times over; the compiler unrolls the first.
    """
    packed, scales, shifts, offsets, constant, mode = weight
    groups, bytes_, step, runs = scales.shape[1], packed.shape[1], 4 * len(kind), max(len(span), 1)
    flat, many, codes = x.reshape(-1), sums.reshape(-1), packed.reshape(-1)
    halves, zeros, moves = scales.reshape(-1), shifts.reshape(-1), offsets.reshape(-1)
    scale, shift = np.empty(groups, np.float32), np.empty(groups, np.float32)
    width = 2 if len(span) == 0 else 1
    for row in range(first, last):
        _spread(halves, row * groups, scale)
        _shift_row(mode, scale, zeros, moves, constant, row * groups, shift)
        at, column, g = row * bytes_, m * x.shape[1], 0
        sum0 = fill(ZERO)
        while g < groups:
            part0 = fill(ZERO)
            for _ in range(times):
                for _ in range(runs):
                    part0 = multiply_add(_codes(codes, at, kind), load_at(flat, column), part0)
                    at += step
                    column += LANES
            sum0 = multiply_add(_wide(scale, g, span), part0, sum0)
            g += width
        out[m, row] = total(sum0) + _dot(shift, many, m * groups)


@jit
def _four(x: Any, sums: Any, weight: Any, kind: Any, span: Any, times: int, first: int, last: int, m: int, out: Any) -> None:
    """Fill out[m : m + 4, first:last]: each row of x as `_one` does it."""
    packed, scales, shifts, offsets, constant, mode = weight
    groups, bytes_, step, runs = scales.shape[1], packed.shape[1], 4 * len(kind), max(len(span), 1)
    flat, many, codes, columns = x.reshape(-1), sums.reshape(-1), packed.reshape(-1), x.shape[1]
    halves, zeros, moves = scales.reshape(-1), shifts.reshape(-1), offsets.reshape(-1)
    scale, shift = np.empty(groups, np.float32), np.empty(groups, np.float32)
    width = 2 if len(span) == 0 else 1
    for row in range(first, last):
        _spread(halves, row * groups, scale)
        _shift_row(mode, scale, zeros, moves, constant, row * groups, shift)
        at, column, g = row * bytes_, m * columns, 0
        sum0, sum1, sum2, sum3 = fill(ZERO), fill(ZERO), fill(ZERO), fill(ZERO)
        while g < groups:
            part0, part1, part2, part3 = fill(ZERO), fill(ZERO), fill(ZERO), fill(ZERO)
            for _ in range(times):
                for _ in range(runs):
                    q = _codes(codes, at, kind)
                    part0 = multiply_add(q, load_at(flat, column), part0)
                    part1 = multiply_add(q, load_at(flat, column + columns), part1)
                    part2 = multiply_add(q, load_at(flat, column + 2 * columns), part2)
                    part3 = multiply_add(q, load_at(flat, column + 3 * columns), part3)
                    at += step
                    column += LANES
            wide = _wide(scale, g, span)
            sum0, sum1 = multiply_add(wide, part0, sum0), multiply_add(wide, part1, sum1)
            sum2, sum3 = multiply_add(wide, part2, sum2), multiply_add(wide, part3, sum3)
            g += width
        at = m * groups
        out[m, row], out[m + 1, row] = total(sum0) + _dot(shift, many, at), total(sum1) + _dot(shift, many, at + groups)
        at += 2 * groups
        out[m + 2, row], out[m + 3, row] = total(sum2) + _dot(shift, many, at), total(sum3) + _dot(shift, many, at + groups)


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
def stripe(x: Any, sums: Any, weight: Any, kind: Any, span: Any, times: int, first: int, last: int, out: Any) -> None:
    """Fill out[:, first:last], a tile of rows that stays in the cache for all rows of x at a time."""
    for begin in range(first, last, TILE_ROWS):
        end, m = min(begin + TILE_ROWS, last), 0
        while m + BLOCK <= x.shape[0]:
            _four(x, sums, weight, kind, span, times, begin, end, m, out)
            m += BLOCK
        while m < x.shape[0]:
            _one(x, sums, weight, kind, span, times, begin, end, m, out)
            m += 1


def packed_linear(threads: int) -> Callable[..., Callable[[Tensor], Tensor]]:
    """Return a maker of linears for `threads` threads: make(planes) gives a function of x, float32 [rows, in], to float32 [rows, out]."""
    pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def make(planes: Any) -> Callable[[Tensor], Tensor]:
        packed, kind, group = planes.packed.numpy(), (0,) * planes.bits, planes.group
        runs = group // LANES
        unrolled = runs if runs < 2 else 4 if runs % 4 == 0 else 2 if runs % 2 == 0 else 1
        span, times = (0,) * unrolled, runs // max(unrolled, 1) if runs else 1
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
            fixed = (rows, sums, (packed, scales, shifts, offsets, constant, mode), kind, span, times)
            if pool is None or packed.nbytes * len(rows) < ALONE:
                stripe(*fixed, 0, out, result)
            else:
                other = pool.submit(partial(stripe, *fixed, middle, out, result))
                stripe(*fixed, 0, middle, result)
                other.result()
            return torch.from_numpy(result)

        return run

    return make
