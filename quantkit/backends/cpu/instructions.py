"""The kernels of a recorded step (backends/cpu/program.py), each called by its address.

Every one takes (numbers of the instruction, arena, bytes of a pitch, rows, thread, threads, what changes from step to step), all int64. A
row of the batch has a pitch of the arena for itself; an operand is (0, byte offset in the pitch) or (1, address of a constant). Kernels
of one row share the rows out among the threads, products the output columns, attention the heads. Whatever the number of
rows, a row's numbers are those it has alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from quantkit.backends.cpu import integer
from quantkit.backends.cpu._jit import jit
from quantkit.backends.cpu._math import exp
from quantkit.backends.cpu._vector import LANES, fill, load_at, multiply_add, store_at, total
from quantkit.backends.cpu.attend import fold_16, score_16
from quantkit.backends.cpu.linear import BLOCK, CONSTANT, OFFSETS, TILE_ROWS, ZEROS, four, one, sum_groups

WIDTH = 40  # numbers of an instruction
MANY = 1 << 40  # elements of a view whose end nobody asks for
UNARY = (
    "copy", "neg", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh", "exp", "rsqrt", "sqrt", "relu", "square", "cube", "reciprocal", "add",
    "mul",
)  # fmt: skip
BINARY = ("add", "sub", "mul", "div")


@intrinsic  # type: ignore[untyped-decorator]
def pointer(typing: Any, address: Any) -> Any:
    """Return an address as a pointer."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), build


@jit
def _floats(address: int, count: int) -> Any:
    return carray(pointer(address), (count,), np.float32)


@jit
def _place(a: Any, at: int, arena: int, pitch: int, row: int) -> Any:
    """Return the address of the operand that a[at], a[at + 1] describe, for a row of the batch."""
    return a[at + 1] if a[at] else arena + a[at + 1] + row * pitch


@jit
def _share_of(rows: int, thread: int, threads: int) -> Any:
    return rows * thread // threads, rows * (thread + 1) // threads


@jit
def _curved(code: int, v: Any) -> Any:
    """Return SiLU (2), GELU by its tanh formula (4), the logistic function (5) or e to the power (7) of lanes."""
    one_ = fill(np.float32(1.0))
    if code == 7:
        return exp(v)
    u = v
    if code == 4:  # half of 1 + tanh is the logistic function of twice the argument
        u = fill(np.float32(1.59576912)) * multiply_add(fill(np.float32(0.044715)) * v * v, v, v)
    share = one_ / (one_ + exp(fill(np.float32(0.0)) - u))
    return share if code == 5 else v * share


@jit
def _curve(code: int, x: Any, sx: int, out: Any, so: int, count: int) -> None:
    """Fill out from x by `_curved`."""
    i, some = 0, np.zeros(LANES, np.float32)
    while i < count:
        rest = min(LANES, count - i)
        if rest == LANES and sx == 1 and so == 1:
            store_at(out, i, _curved(code, load_at(x, i)))
        else:
            for k in range(rest):
                some[k] = x[(i + k) * sx]
            store_at(some, 0, _curved(code, load_at(some, 0)))
            for k in range(rest):
                out[(i + k) * so] = some[k]
        i += LANES


@jit
def _map(code: int, x: Any, sx: int, number: Any, out: Any, so: int, count: int) -> None:
    """Fill out from x element by element; code: an index of UNARY."""
    if code == 0:
        for i in range(count):
            out[i * so] = x[i * sx]
    elif code == 1:
        for i in range(count):
            out[i * so] = -x[i * sx]
    elif code == 2 or code == 4 or code == 5 or code == 7:
        _curve(code, x, sx, out, so, count)
    elif code == 3:
        for i in range(count):
            out[i * so] = np.float32(0.5) * x[i * sx] * (np.float32(1.0) + np.float32(math.erf(x[i * sx] * np.float32(0.70710678))))
    elif code == 6:
        for i in range(count):
            out[i * so] = np.float32(math.tanh(x[i * sx]))
    elif code == 8:
        for i in range(count):
            out[i * so] = np.float32(1.0) / np.sqrt(x[i * sx])
    elif code == 9:
        for i in range(count):
            out[i * so] = np.sqrt(x[i * sx])
    elif code == 10:
        for i in range(count):
            out[i * so] = max(x[i * sx], np.float32(0.0))
    elif code == 11:
        for i in range(count):
            out[i * so] = x[i * sx] * x[i * sx]
    elif code == 12:
        for i in range(count):
            out[i * so] = x[i * sx] * x[i * sx] * x[i * sx]
    elif code == 13:
        for i in range(count):
            out[i * so] = np.float32(1.0) / x[i * sx]
    elif code == 14:
        for i in range(count):
            out[i * so] = x[i * sx] + number
    else:
        for i in range(count):
            out[i * so] = x[i * sx] * number


@jit
def _map_two(code: int, x: Any, sx: int, y: Any, sy: int, out: Any, so: int, count: int) -> None:
    """Fill out from x and y element by element; code: an index of BINARY."""
    if code == 0:
        for i in range(count):
            out[i * so] = x[i * sx] + y[i * sy]
    elif code == 1:
        for i in range(count):
            out[i * so] = x[i * sx] - y[i * sy]
    elif code == 2:
        for i in range(count):
            out[i * so] = x[i * sx] * y[i * sy]
    else:
        for i in range(count):
            out[i * so] = x[i * sx] / y[i * sy]


def unary(args: int, arena: int, pitch: int, rows: int, thread: int, threads: int, live: int) -> None:
    """a: code, 4 sizes, out (2), its 4 strides, x (2), its 4 strides, number (bits of a float64)."""
    a = carray(pointer(args), (WIDTH,), np.int64)
    number = np.float32(carray(pointer(args + 8 * 17), (1,), np.float64)[0])
    first, last = _share_of(rows, thread, threads)
    so, sx, count = a[10], a[16], a[4]
    for row in range(first, last):
        out, x = _place(a, 5, arena, pitch, row), _place(a, 11, arena, pitch, row)
        for i in range(a[1]):
            for j in range(a[2]):
                for k in range(a[3]):
                    o = _floats(out + 4 * (i * a[7] + j * a[8] + k * a[9]), MANY)
                    p = _floats(x + 4 * (i * a[13] + j * a[14] + k * a[15]), MANY)
                    if so == 1 and sx == 1:
                        _map(a[0], p, 1, number, o, 1, count)
                    else:
                        _map(a[0], p, sx, number, o, so, count)


def binary(args: int, arena: int, pitch: int, rows: int, thread: int, threads: int, live: int) -> None:
    """a: code, 4 sizes, out (2), its 4 strides, x (2), its 4 strides, y (2), its 4 strides."""
    a = carray(pointer(args), (WIDTH,), np.int64)
    first, last = _share_of(rows, thread, threads)
    so, sx, sy, count = a[10], a[16], a[22], a[4]
    for row in range(first, last):
        out, x, y = _place(a, 5, arena, pitch, row), _place(a, 11, arena, pitch, row), _place(a, 17, arena, pitch, row)
        for i in range(a[1]):
            for j in range(a[2]):
                for k in range(a[3]):
                    o = _floats(out + 4 * (i * a[7] + j * a[8] + k * a[9]), MANY)
                    p = _floats(x + 4 * (i * a[13] + j * a[14] + k * a[15]), MANY)
                    q = _floats(y + 4 * (i * a[19] + j * a[20] + k * a[21]), MANY)
                    if so == 1 and sx == 1 and sy == 1:
                        _map_two(a[0], p, 1, q, 1, o, 1, count)
                    elif so == 1 and sx == 1 and sy == 0:
                        _map_two(a[0], p, 1, q, 0, o, 1, count)
                    else:
                        _map_two(a[0], p, sx, q, sy, o, so, count)


@jit
def _sum(x: Any, count: int) -> Any:
    part, k, rest = fill(np.float32(0.0)), 0, np.float32(0.0)
    while k + LANES <= count:
        part = part + load_at(x, k)
        k += LANES
    while k < count:
        rest += x[k]
        k += 1
    return total(part) + rest


@jit
def _sum_squares(x: Any, middle: Any, count: int) -> Any:
    part, k, rest, wide = fill(np.float32(0.0)), 0, np.float32(0.0), fill(middle)
    while k + LANES <= count:
        apart = load_at(x, k) - wide
        part = multiply_add(apart, apart, part)
        k += LANES
    while k < count:
        rest += (x[k] - middle) * (x[k] - middle)
        k += 1
    return total(part) + rest


def mean(args: int, arena: int, pitch: int, rows: int, thread: int, threads: int, live: int) -> None:
    """a: runs, their length, out (2), x (2), x's stride from run to run."""
    a = carray(pointer(args), (WIDTH,), np.int64)
    first, last = _share_of(rows, thread, threads)
    for row in range(first, last):
        out, x = _floats(_place(a, 2, arena, pitch, row), a[0]), _place(a, 4, arena, pitch, row)
        for i in range(a[0]):
            out[i] = _sum(_floats(x + 4 * i * a[6], MANY), a[1]) / np.float32(a[1])


def layer_norm(args: int, arena: int, pitch: int, rows: int, thread: int, threads: int, live: int) -> None:
    """a: runs, their length, out (2), x (2), x's stride from run to run, weight, bias (addresses), epsilon (bits of a float64)."""
    a = carray(pointer(args), (WIDTH,), np.int64)
    epsilon = np.float32(carray(pointer(args + 8 * 9), (1,), np.float64)[0])
    first, last = _share_of(rows, thread, threads)
    count = a[1]
    weight, bias = _floats(a[7], count), _floats(a[8], count)
    for row in range(first, last):
        target, source = _place(a, 2, arena, pitch, row), _place(a, 4, arena, pitch, row)
        for i in range(a[0]):
            out, x = _floats(target + 4 * i * count, count), _floats(source + 4 * i * a[6], MANY)
            middle = _sum(x, count) / np.float32(count)
            scale = np.float32(1.0) / np.sqrt(_sum_squares(x, middle, count) / np.float32(count) + epsilon)
            for k in range(count):
                out[k] = (x[k] - middle) * scale * weight[k] + bias[k]


def gather(args: int, arena: int, pitch: int, rows: int, thread: int, threads: int, live: int) -> None:
    """a: length, out (2), x (2), address of the order (int64)."""
    a = carray(pointer(args), (WIDTH,), np.int64)
    order = carray(pointer(a[5]), (a[0],), np.int64)
    first, last = _share_of(rows, thread, threads)
    for row in range(first, last):
        out, x = _floats(_place(a, 1, arena, pitch, row), a[0]), _floats(_place(a, 3, arena, pitch, row), MANY)
        for k in range(a[0]):
            out[k] = x[order[k]]


def zero(args: int, arena: int, pitch: int, rows: int, thread: int, threads: int, live: int) -> None:
    """a: length, out (2)."""
    a = carray(pointer(args), (WIDTH,), np.int64)
    first, last = _share_of(rows, thread, threads)
    for row in range(first, last):
        out = _floats(_place(a, 1, arena, pitch, row), a[0])
        for k in range(a[0]):
            out[k] = np.float32(0.0)


@jit
def _weight(a: Any, kind: Any) -> Any:
    """Return a product's weight: (packed, scales, zeros, offsets, mode); len(kind) is the width of a code."""
    out_rows, groups, mode = a[0], a[1], a[12]
    packed = carray(pointer(a[8]), (out_rows, groups * a[2] * len(kind) // 8), np.uint8)
    scales = carray(pointer(a[9]), (out_rows, groups), np.uint16)
    zeros = carray(pointer(a[10]), (out_rows if mode == ZEROS else 1, groups if mode == ZEROS else 1), np.uint8)
    offsets = carray(pointer(a[11]), (out_rows if mode == OFFSETS else 1, groups if mode == OFFSETS else 1), np.uint16)
    return packed, scales, zeros, offsets, mode


@jit
def _stretch(out_rows: int, thread: int, threads: int) -> Any:
    """Return the output columns of a thread."""
    first, last = out_rows // BLOCK * thread // threads * BLOCK, out_rows // BLOCK * (thread + 1) // threads * BLOCK
    return first, out_rows if thread == threads - 1 else last


def linear(bits: int, unrolled: int) -> Callable[..., None]:
    """Return the product with planes of so many bits, `unrolled` runs of 32 columns at a time (backends/cpu/linear.py)."""
    kind, span = (0,) * bits, (0,) * unrolled

    def kernel(args: int, arena: int, pitch: int, rows: int, thread: int, threads: int, live: int) -> None:
        """a: out features, groups, width of a group, times, out (2), x (2), packed, scales, zeros, offsets (addresses), mode, zero
        point, factor of the sums (bits of a float64)."""
        a = carray(pointer(args), (WIDTH,), np.int64)
        x, out, step = _floats(_place(a, 6, arena, pitch, 0), MANY), _floats(_place(a, 4, arena, pitch, 0), MANY), pitch // 4
        weight, sums = _weight(a, kind), np.zeros((rows, a[1]), np.float32)
        if a[12] != CONSTANT or a[13] != 0:
            sum_groups(x, step, a[2], np.float32(carray(pointer(args + 8 * 14), (1,), np.float64)[0]), sums)
        first, last = _stretch(a[0], thread, threads)
        for begin in range(first, last, TILE_ROWS):
            end, m = min(begin + TILE_ROWS, last), 0
            while m + BLOCK <= rows:
                four(x, step, sums, weight, kind, span, a[3], begin, end, m, out, step)
                m += BLOCK
            while m < rows:
                one(x, step, sums, weight, kind, span, a[3], begin, end, m, out, step)
                m += 1

    return kernel


def whole(bits: int, per_block: int) -> Callable[..., None]:
    """Return the product with 16-bit integers of x (backends/cpu/integer.py), so many groups in a block of codes."""
    kind, share, columns_of = (0,) * bits, (0,) * per_block, integer.BLOCK_COLUMNS[bits]

    def kernel(args: int, arena: int, pitch: int, rows: int, thread: int, threads: int, live: int) -> None:
        """a: as that of `linear`."""
        a = carray(pointer(args), (WIDTH,), np.int64)
        x, out, step = _floats(_place(a, 6, arena, pitch, 0), MANY), _floats(_place(a, 4, arena, pitch, 0), MANY), pitch // 4
        columns, sixteens = a[1] * a[2], (a[1] + 15) // 16 * 16
        blocks = (columns + columns_of - 1) // columns_of
        ready = (
            np.zeros((rows, 2 * columns_of * blocks), np.int8), np.zeros((rows, 16 * blocks), np.int32),
            np.zeros((rows, sixteens), np.float32), np.zeros((rows, sixteens), np.float32),
        )  # fmt: skip
        for m in range(rows):
            integer.prepare(x, m * step, columns, a[2], kind, m, ready, a[12], a[13])
        weight = _weight(a, kind)
        first, last = _stretch(a[0], thread, threads)
        for begin in range(first, last, TILE_ROWS):
            end, m = min(begin + TILE_ROWS, last), 0
            while m < rows:
                count = min(BLOCK, rows - m)
                integer.multiply(ready, weight, kind, share, begin, end, m, count, out, step)
                m += count

    return kernel


def attend(args: int, arena: int, pitch: int, rows: int, thread: int, threads: int, live: int) -> None:
    """a: layer, heads, key-value heads, head size, window, then offset and stride from head to head of q, k, v, out; scale, soft cap.

    live: segments, tokens of a page, address of the pools [layer, 2] (keys, values), then for each segment its first row, rows, position
    and the address of its pages. Heads that share keys are one thread's: it writes what it reads.
    """
    a = carray(pointer(args), (WIDTH,), np.int64)
    now = carray(pointer(live), (MANY,), np.int64)
    scale, softcap = (
        np.float32(carray(pointer(args + 8 * 13), (2,), np.float64)[0]),
        np.float32(carray(pointer(args + 8 * 13), (2,), np.float64)[1]),
    )
    heads, kv_heads, size, window, tokens = a[1], a[2], a[3], a[4], now[1]
    repeat = heads // kv_heads
    pools = carray(pointer(now[2] + 16 * a[0]), (2,), np.int64)
    keys, values = _floats(pools[0], MANY), _floats(pools[1], MANY)
    scores, scaled = np.empty(2 * tokens, np.float32), np.empty(size, np.float32)
    low_head, high_head = kv_heads * thread // threads, kv_heads * (thread + 1) // threads
    for s in range(now[0]):
        row0, count, start = now[4 + 4 * s], now[5 + 4 * s], now[6 + 4 * s]
        table = carray(pointer(now[7 + 4 * s]), (MANY,), np.int64)
        for kv in range(low_head, high_head):
            for t in range(count):
                page, slot = table[(start + t) // tokens], (start + t) % tokens
                base = arena + (row0 + t) * pitch
                k, v = _floats(base + a[7] + 4 * kv * a[8], size), _floats(base + a[9] + 4 * kv * a[10], size)
                for d in range(size):
                    keys[((page * kv_heads + kv) * size + d) * tokens + slot] = k[d]
                    values[((page * kv_heads + kv) * tokens + slot) * size + d] = v[d]
            for t in range(count):
                here = start + t
                low, base = max(0, here - window + 1) if window else 0, arena + (row0 + t) * pitch
                for h in range(kv * repeat, (kv + 1) * repeat):
                    q, out = _floats(base + a[5] + 4 * h * a[6], size), _floats(base + a[11] + 4 * h * a[12], size)
                    for d in range(size):
                        scaled[d] = q[d] * scale
                        out[d] = np.float32(0.0)
                    top, whole = np.float32(-np.inf), np.float32(0.0)
                    for p in range(low // tokens, here // tokens + 1):
                        page = table[p]
                        begin, end = max(low - p * tokens, 0), min(here + 1 - p * tokens, tokens)
                        part = (page * kv_heads + kv) * size * tokens
                        score_16(scaled, keys, part, scores, size)
                        top, whole = fold_16(scores, begin, end, softcap, values, part, top, whole, out, size)
                    inverse = np.float32(1.0) / whole
                    for d in range(size):
                        out[d] *= inverse


KERNELS: dict[str, Callable[..., None]] = {
    "unary": unary, "binary": binary, "mean": mean, "layer_norm": layer_norm, "gather": gather, "zero": zero, "attend": attend,
}  # fmt: skip
MAKERS: dict[str, Callable[[int, int], Callable[..., None]]] = {"linear": linear, "whole": whole}
