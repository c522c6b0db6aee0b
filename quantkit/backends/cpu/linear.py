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
y = sum over groups of s (sum of q x - z sum of x), or of s sum of q x + o sum of x. Sums of a group are kept in 32 lanes, which begin at
their share of -z sum of x, and are added up once a row, always in the same order, whatever the number of rows of x: a row's result does not
depend on the others (batch invariance). Where the processor multiplies bytes, 4 and 8 bits are computed by backends/cpu/integer.py.

Bytes moved for one row of x: the packed weight, once; up to BLOCK rows of x share each unpacked code.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.backends.cpu import integer
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
def _wide(numbers: Any, g: int, span: Any) -> Any:
    """Return a group's number as lanes, or those of two groups of 16 (len(span) 0)."""
    if len(span) == 0:
        return pair(numbers[g], numbers[g + 1])
    return fill(numbers[g])


@jit
def _scale(halves: Any, g: int, span: Any) -> Any:
    """Return a group's float16 scale as lanes, or those of two groups of 16."""
    if len(span) == 0:
        return pair(half_at(halves, g), half_at(halves, g + 1))
    return fill(half_at(halves, g))


@jit
def _begin(mode: int, sums: Any, at: int, zeros: Any, g: int, span: Any) -> Any:
    """Return where a group's lanes begin: at the share of -z sum x that each of them has, or at 0 if the shift is an offset."""
    if mode == 0:
        return _wide(sums, at, span)
    if mode == 2:
        return fill(ZERO)
    if len(span) == 0:
        return pair(sums[at] * np.float32(zeros[g]), sums[at + 1] * np.float32(zeros[g + 1]))
    return fill(sums[at] * np.float32(zeros[g]))


@jit
def _offsets(mode: int, moves: Any, g: int, sums: Any, at: int, width: int) -> Any:
    """Return what the offsets of a run's groups add: o sum x."""
    if mode != 2:
        return ZERO
    if width == 2:
        return half_at(moves, g) * sums[at] + half_at(moves, g + 1) * sums[at + 1]
    return half_at(moves, g) * sums[at]


@jit
def one(
    x: Any, pitch: int, sums: Any, weight: Any, kind: Any, span: Any, times: int, first: int, last: int, m: int, out: Any, step_out: int
) -> None:
    """Fill columns first..last of row m of out for row m of x, both flat, rows `pitch` and `step_out` numbers apart.

    weight: (packed, scales, zeros, offsets, mode); sums: as `sum_groups` leaves them. A group is len(span) runs of 32 columns, `times`
    times over; the compiler unrolls the first.
    """
    packed, scales, zeros, offsets, mode = weight
    groups, bytes_, step, runs = scales.shape[1], packed.shape[1], 4 * len(kind), max(len(span), 1)
    many, codes = sums.reshape(-1), packed.reshape(-1)
    halves, nothings, moves = scales.reshape(-1), zeros.reshape(-1), offsets.reshape(-1)
    width = 2 if len(span) == 0 else 1
    for row in range(first, last):
        at, column, g, u = row * bytes_, m * pitch, row * groups, m * groups
        sum0, rest0 = fill(ZERO), ZERO
        while g < (row + 1) * groups:
            part0 = _begin(mode, many, u, nothings, g, span)
            for _ in range(times):
                for _ in range(runs):
                    part0 = multiply_add(_codes(codes, at, kind), load_at(x, column), part0)
                    at += step
                    column += LANES
            sum0 = multiply_add(_scale(halves, g, span), part0, sum0)
            rest0 += _offsets(mode, moves, g, many, u, width)
            g += width
            u += width
        out[m * step_out + row] = total(sum0) + rest0


@jit
def four(
    x: Any, pitch: int, sums: Any, weight: Any, kind: Any, span: Any, times: int, first: int, last: int, m: int, out: Any, step_out: int
) -> None:
    """Fill rows m to m + 3 of out: each as `one` does it."""
    packed, scales, zeros, offsets, mode = weight
    groups, bytes_, step, runs = scales.shape[1], packed.shape[1], 4 * len(kind), max(len(span), 1)
    many, codes = sums.reshape(-1), packed.reshape(-1)
    halves, nothings, moves = scales.reshape(-1), zeros.reshape(-1), offsets.reshape(-1)
    width = 2 if len(span) == 0 else 1
    for row in range(first, last):
        at, column, g, u = row * bytes_, m * pitch, row * groups, m * groups
        sum0, sum1, sum2, sum3 = fill(ZERO), fill(ZERO), fill(ZERO), fill(ZERO)
        rest0, rest1, rest2, rest3 = ZERO, ZERO, ZERO, ZERO
        while g < (row + 1) * groups:
            part0, part1 = _begin(mode, many, u, nothings, g, span), _begin(mode, many, u + groups, nothings, g, span)
            part2, part3 = _begin(mode, many, u + 2 * groups, nothings, g, span), _begin(mode, many, u + 3 * groups, nothings, g, span)
            for _ in range(times):
                for _ in range(runs):
                    q = _codes(codes, at, kind)
                    part0 = multiply_add(q, load_at(x, column), part0)
                    part1 = multiply_add(q, load_at(x, column + pitch), part1)
                    part2 = multiply_add(q, load_at(x, column + 2 * pitch), part2)
                    part3 = multiply_add(q, load_at(x, column + 3 * pitch), part3)
                    at += step
                    column += LANES
            wide = _scale(halves, g, span)
            sum0, sum1 = multiply_add(wide, part0, sum0), multiply_add(wide, part1, sum1)
            sum2, sum3 = multiply_add(wide, part2, sum2), multiply_add(wide, part3, sum3)
            rest0 += _offsets(mode, moves, g, many, u, width)
            rest1 += _offsets(mode, moves, g, many, u + groups, width)
            rest2 += _offsets(mode, moves, g, many, u + 2 * groups, width)
            rest3 += _offsets(mode, moves, g, many, u + 3 * groups, width)
            g += width
            u += width
        to = m * step_out + row
        out[to], out[to + step_out] = total(sum0) + rest0, total(sum1) + rest1
        out[to + 2 * step_out], out[to + 3 * step_out] = total(sum2) + rest2, total(sum3) + rest3


@jit
def sum_groups(x: Any, pitch: int, group: int, factor: Any, sums: Any) -> None:
    """Fill sums[m, g] with `factor` times the sum of each group of columns of row m of x, flat, rows `pitch` numbers apart."""
    for m in range(sums.shape[0]):
        for g in range(sums.shape[1]):
            column = m * pitch + g * group
            if group < LANES:
                small = ZERO
                for j in range(group):
                    small += x[column + j]
                sums[m, g] = factor * small
            else:
                part = fill(ZERO)
                for _ in range(group // LANES):
                    part = part + load_at(x, column)
                    column += LANES
                sums[m, g] = factor * total(part)


@jit
def stripe(x: Any, sums: Any, weight: Any, kind: Any, span: Any, times: int, first: int, last: int, out: Any) -> None:
    """Fill out[:, first:last], a tile of rows that stays in the cache for all rows of x at a time; x, out: [rows, columns]."""
    flat, columns, target, width = x.reshape(-1), x.shape[1], out.reshape(-1), out.shape[1]
    for begin in range(first, last, TILE_ROWS):
        end, m = min(begin + TILE_ROWS, last), 0
        while m + BLOCK <= x.shape[0]:
            four(flat, columns, sums, weight, kind, span, times, begin, end, m, target, width)
            m += BLOCK
        while m < x.shape[0]:
            one(flat, columns, sums, weight, kind, span, times, begin, end, m, target, width)
            m += 1


def factor_of(mode: int, group: int, middle: int) -> float:
    """Return what `sum_groups` multiplies by: each lane begins at its share of -z sum x, where z is known before."""
    return 1.0 if mode == OFFSETS else -(middle if mode == CONSTANT else 1) / min(group, LANES)


def span_of(group: int) -> tuple[int, int]:
    """Return how many runs of 32 columns the compiler unrolls in a group of so many, 0 for half a run, and how many times they come."""
    runs = group // LANES
    unrolled = runs if runs < 2 else 4 if runs % 4 == 0 else 2 if runs % 2 == 0 else 1
    return unrolled, runs // max(unrolled, 1) if runs else 1


@jit
def integer_stripe(
    x: Any, ready: Any, weight: Any, kind: Any, share: Any, group: int, middle: int, first: int, last: int, out: Any
) -> None:
    """As `stripe`, with 16-bit integers of x, which are made in `ready`."""
    flat, columns, target = x.reshape(-1), x.shape[1], out.reshape(-1)
    for m in range(x.shape[0]):
        integer.prepare(flat, m * columns, columns, group, kind, m, ready, weight[4], middle)
    for begin in range(first, last, TILE_ROWS):
        end, m = min(begin + TILE_ROWS, last), 0
        while m < x.shape[0]:
            count = min(BLOCK, x.shape[0] - m)
            integer.multiply(ready, weight, kind, share, begin, end, m, count, target, out.shape[1])
            m += count


def _ready(rows: int, room: tuple[int, int, int]) -> tuple[Any, ...]:
    """Return where `integer.prepare` puts rows."""
    bytes_, starts, groups = room
    return (
        np.zeros((rows, bytes_), np.int8),
        np.zeros((rows, starts), np.int32),
        *(np.zeros((rows, groups), np.float32) for _ in range(2)),
    )


def packed_linear(threads: int) -> Callable[..., Callable[[Tensor], Tensor]]:
    """Return a maker of linears for `threads` threads: make(planes) gives a function of x, float32 [rows, in], to float32 [rows, out]."""
    pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def make(planes: Any) -> Callable[[Tensor], Tensor]:
        packed, kind, group = planes.packed.numpy(), (0,) * planes.bits, planes.group
        unrolled, times = span_of(group)
        span = (0,) * unrolled
        out, groups = packed.shape[0], planes.scale.shape[1]
        scales = planes.scale.view(torch.int16).numpy().view(np.uint16)
        none = torch.zeros(1, 1)
        mode = OFFSETS if planes.offset is not None else ZEROS if planes.zero is not None else CONSTANT
        shifts = (none.to(torch.uint8) if planes.zero is None else planes.zero).numpy()
        offsets = (none.to(torch.float16) if planes.offset is None else planes.offset).view(torch.int16).numpy().view(np.uint16)
        factor, middle = np.float32(factor_of(mode, group, planes.middle)), out // 2 // BLOCK * BLOCK

        weight = (packed, scales, shifts, offsets, mode)
        integers = integer.suits(planes) and integer.has_room(planes)
        share, room = (0,) * max(integer.BLOCK_COLUMNS.get(planes.bits, 0) // group, 1), (0, 0, 0)
        if integers:
            room = integer.sizes(groups * group, group, planes.bits)

        def part(rows: Any, result: Any) -> Callable[[int, int], None]:
            if integers:
                fixed = (weight, kind, share, group, planes.middle)
                return lambda first, last: integer_stripe(rows, _ready(len(rows), room), *fixed, first, last, result)
            sums = np.zeros((len(rows), groups), np.float32)
            if mode != CONSTANT or planes.middle:
                sum_groups(rows.reshape(-1), rows.shape[1], group, factor, sums)
            return lambda first, last: stripe(rows, sums, weight, kind, span, times, first, last, result)

        def run(x: Tensor) -> Tensor:
            rows = x.numpy()
            result = np.empty((len(rows), out), np.float32)
            do = part(rows, result)
            if pool is None or packed.nbytes * len(rows) < ALONE:
                do(0, out)
            else:
                other = pool.submit(do, middle, out)
                do(0, middle)
                other.result()
            return torch.from_numpy(result)

        run.integers = integers  # type: ignore[attr-defined]
        run.planes = planes  # type: ignore[attr-defined]
        return run

    return make
