"""Linear layers on packed integers, with activations as 16-bit integers: products of bytes, where the processor has them (AVX-512 VNNI).

A row of x becomes, group by group, integers of 16 bits with one scale: x = f (256 high + low), each half a signed byte. A weight's codes,
unsigned bytes unpacked on the way, are multiplied with both halves and summed exactly in 32 bits; only then come the scales. The
error is 2^-16 of a group's largest input. Twin of backends/cpu/linear.py, for 4 and 8 bits.

Codes are taken 64 bytes at a time, a block: 128 columns of 4 bits, 64 of 8. A register of 16 sums belongs to the groups of a block in turn;
16 groups' scales are one register too. Sums start at -z sum x where the zero point is known before the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic, models, register_model

from quantkit.backends.cpu._jit import inlined, jit
from quantkit.backends.cpu._vector import LANES, fill, load_at, size, store_at, where

WIDE = 16
BLOCK_BYTES = 64
ROOM = 128  # bytes that may be read beyond the last row
HIGHEST = np.float32(32512.0)  # 127 * 256: both halves are signed bytes
AHEAD = 4096
BLOCK_COLUMNS = {4: 128, 8: 64}
TINY, ZERO, MAGIC = np.float32(1e-30), np.float32(0.0), np.float32(12582912.0)  # 1.5 * 2^23: adding it rounds half to even
NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512vnni")
I8, I16, I32, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
FLOATS16, INTS16 = ir.VectorType(FLOAT, WIDE), ir.VectorType(I32, WIDE)


class _Wide(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="quantkit_wide")


WIDES = _Wide()


@register_model(_Wide)
class _WideModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, FLOATS16)


def suits(planes: Any) -> bool:
    """Tell whether these kernels are for such a weight, on this processor."""
    if planes.bits not in BLOCK_COLUMNS or config.CPU_NAME not in (None, "", "host"):
        return False
    per_block = BLOCK_COLUMNS[planes.bits] // planes.group
    return per_block in (1, 2, 4) and per_block * planes.group == BLOCK_COLUMNS[planes.bits] and _has_them()


def has_room(planes: Any) -> bool:
    """Tell whether bytes behind the last row may be read: a block, or 16 scales, may reach beyond it."""
    parts = [part for part in (planes.packed, planes.scale, planes.zero, planes.offset) if part is not None]
    return all(part.untyped_storage().nbytes() - part.storage_offset() * part.itemsize >= part.nbytes + ROOM for part in parts)


def _has_them() -> bool:
    features = llvmlite.binding.get_host_cpu_features()
    return all(features.get(name, False) for name in NEEDED)


def _address(context: Any, builder: Any, kind: Any, array: Any, offset: Any, vector: Any) -> Any:
    data = cgutils.create_struct_proxy(kind)(context, builder, value=array).data
    return builder.bitcast(builder.gep(data, [offset]), vector.as_pointer())


def _all(vector: Any, value: int) -> Any:
    return ir.Constant(vector, [value] * vector.count)


@intrinsic  # type: ignore[untyped-decorator]
def nothing(typing: Any) -> Any:
    """Return 16 zeros."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return ir.Constant(FLOATS16, [0.0] * WIDE)

    return WIDES(), build


@intrinsic  # type: ignore[untyped-decorator]
def scales_at(typing: Any, halves: Any, at: Any, factors: Any, k: Any) -> Any:
    """Return 16 scales, float16 numbers from halves[at] on, times factors[k] and on."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        half = builder.load(_address(context, builder, sig.args[0], args[0], args[1], ir.VectorType(ir.HalfType(), WIDE)), align=2)
        factor = builder.load(_address(context, builder, sig.args[2], args[2], args[3], FLOATS16), align=4)
        return builder.fmul(builder.fpext(half, FLOATS16), factor)

    return WIDES(halves, types.intp, factors, types.intp), build


@intrinsic  # type: ignore[untyped-decorator]
def add_zeros(typing: Any, total: Any, scales: Any, zeros: Any, at: Any, sums: Any, k: Any) -> Any:
    """Return total + scales * zeros[at : at + 16] * sums[k : k + 16]."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bytes_ = builder.load(_address(context, builder, sig.args[2], args[2], args[3], ir.VectorType(I8, WIDE)), align=1)
        zero = builder.uitofp(bytes_, FLOATS16)
        some = builder.load(_address(context, builder, sig.args[4], args[4], args[5], FLOATS16), align=4)
        return builder.fadd(args[0], builder.fmul(args[1], builder.fmul(zero, some)))

    return WIDES(WIDES, WIDES, zeros, types.intp, sums, types.intp), build


@intrinsic  # type: ignore[untyped-decorator]
def add_offsets(typing: Any, total: Any, halves: Any, at: Any, sums: Any, k: Any) -> Any:
    """Return total + offsets, float16 numbers from halves[at] on, times sums[k] and on."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        half = builder.load(_address(context, builder, sig.args[1], args[1], args[2], ir.VectorType(ir.HalfType(), WIDE)), align=2)
        some = builder.load(_address(context, builder, sig.args[3], args[3], args[4], FLOATS16), align=4)
        return builder.fadd(args[0], builder.fmul(builder.fpext(half, FLOATS16), some))

    return WIDES(WIDES, halves, types.intp, sums, types.intp), build


@intrinsic  # type: ignore[untyped-decorator]
def add_up(typing: Any, value: Any) -> Any:
    """Return the sum of 16 numbers, pairwise."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value, count = args[0], WIDE
        while count > 1:
            count //= 2
            index = ir.VectorType(I32, count)
            low, high = (builder.shuffle_vector(value, value, ir.Constant(index, list(range(s, s + count)))) for s in (0, count))
            value = builder.fadd(low, high)
        return builder.extract_element(value, ir.Constant(I32, 0))

    return types.float32(WIDES), build


def _dot(builder: Any, start: Any, codes: Any, x: Any) -> Any:
    """Return start + sums of four unsigned bytes times four signed ones."""
    kind = ir.FunctionType(INTS16, [INTS16] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
    return builder.call(function, [start, builder.bitcast(codes, INTS16), builder.bitcast(x, INTS16)])


def _prefetch(builder: Any, place: Any) -> None:
    """Ask for the codes AHEAD bytes further on: what the processor guesses by itself is too late for these few instructions a line."""
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    ahead = builder.gep(place, [ir.Constant(ir.IntType(64), AHEAD)])
    builder.call(ask, [ahead, ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)])


def _block(bits: int, per_block: int) -> Callable[..., Any]:
    """Return the typer of a block's products for codes of so many bits, so many groups in a block."""
    bytes64 = ir.VectorType(I8, BLOCK_BYTES)
    words = ir.VectorType(I16, BLOCK_BYTES // 2)
    pattern = [lane * per_block // WIDE for lane in range(WIDE)]

    def typer(typing: Any, total: Any, codes: Any, at: Any, x: Any, xat: Any, start: Any, sat: Any, scales: Any, first: Any) -> Any:
        def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            total, codes, at, x, xat, start, sat, scales, first = args
            raw = builder.load(_address(context, builder, sig.args[1], codes, at, bytes64), align=1)
            _prefetch(builder, builder.gep(cgutils.create_struct_proxy(sig.args[1])(context, builder, value=codes).data, [at]))
            if bits == 4:
                shifted = builder.bitcast(builder.lshr(builder.bitcast(raw, words), _all(words, 4)), bytes64)
                parts = [builder.and_(value, _all(bytes64, 15)) for value in (raw, shifted)]
            else:
                parts = [raw]
            base = builder.bitcast(
                builder.gep(cgutils.create_struct_proxy(sig.args[3])(context, builder, value=x).data, [xat]), bytes64.as_pointer()
            )
            halves = []
            low_start = builder.load(_address(context, builder, sig.args[5], start, sat, INTS16), align=4)
            for half, begin in ((0, _all(INTS16, 0)), (1, low_start)):
                found = begin
                for number, part in enumerate(parts):
                    place = builder.gep(base, [ir.Constant(ir.IntType(64), half * len(parts) + number)])
                    found = _dot(builder, found, part, builder.load(place, align=1))
                halves.append(found)
            whole = builder.add(builder.shl(halves[0], _all(INTS16, 8)), halves[1])
            splat = builder.insert_element(ir.Constant(INTS16, ir.Undefined), builder.trunc(first, I32), ir.Constant(I32, 0))
            splat = builder.shuffle_vector(splat, splat, _all(INTS16, 0))
            index = builder.add(splat, ir.Constant(INTS16, pattern))
            kind = ir.FunctionType(FLOATS16, [FLOATS16, INTS16])
            pick = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.sf.512")
            scale = builder.call(pick, [scales, index])
            fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(FLOATS16, [FLOATS16] * 3), "llvm.fmuladd.v16f32")
            return builder.call(fma, [builder.sitofp(whole, FLOATS16), scale, total])

        return WIDES(WIDES, codes, types.intp, x, types.intp, start, types.intp, WIDES, types.intp), build

    return typer


four_1, four_2, four_4 = (intrinsic(_block(4, count)) for count in (1, 2, 4))
eight_1, eight_2, eight_4 = (intrinsic(_block(8, count)) for count in (1, 2, 4))


@inlined
def _add_block(
    total: Any, codes: Any, at: int, x: Any, xat: int, start: Any, sat: int, scales: Any, first: int, kind: Any, share: Any
) -> Any:  # fmt: skip
    """Return total + a block's products; len(kind) is the width of a code, len(share) the groups of a block: the compiler knows both."""
    if len(kind) == 4:
        if len(share) == 1:
            return four_1(total, codes, at, x, xat, start, sat, scales, first)
        if len(share) == 2:
            return four_2(total, codes, at, x, xat, start, sat, scales, first)
        return four_4(total, codes, at, x, xat, start, sat, scales, first)
    if len(share) == 1:
        return eight_1(total, codes, at, x, xat, start, sat, scales, first)
    if len(share) == 2:
        return eight_2(total, codes, at, x, xat, start, sat, scales, first)
    return eight_4(total, codes, at, x, xat, start, sat, scales, first)


@jit
def _largest(x: Any, at: int, count: int, some: Any) -> Any:
    """Return the largest magnitude of x[at : at + count]; some: float32 [LANES], scratch."""
    most, k, top = fill(ZERO), 0, ZERO
    while k + LANES <= count:
        found = size(load_at(x, at + k))
        most = where(found > most, found, most)
        k += LANES
    store_at(some, 0, most)
    for j in range(LANES):
        top = max(top, some[j])
    while k < count:
        top = max(top, abs(x[at + k]))
        k += 1
    return top


@jit
def prepare(x: Any, at: int, columns: int, group: int, kind: Any, m: int, ready: Any, mode: int, middle: int) -> None:
    """Put row m of x, which begins at x[at], into `ready`.

    ready: halves, int8 [rows, bytes]; start, int32 [rows, blocks * 16]; factors and sums, float32 [rows, groups in 16s].

    A block of x: for each 64 codes of the weight's block, in their order, the high bytes; then the low ones.
    """
    halves, start, factors, sums = ready
    some = np.empty(LANES, np.float32)
    wide = 128 if len(kind) == 4 else 64
    lanes = WIDE * group // wide
    for g in range(columns // group):
        begin = g * group
        factor = _largest(x, at + begin, group, some) / HIGHEST
        inverse = np.float32(1.0) / factor if factor > TINY else ZERO
        whole: Any = 0
        for run in range(begin, begin + group, WIDE):
            block, inside = run // wide, run % wide
            place = inside if len(kind) == 8 else inside // 32 * WIDE + (64 if inside % 32 else 0)
            place += 2 * wide * block
            for j in range(WIDE):
                value = np.int32((x[at + run + j] * inverse + MAGIC) - MAGIC)
                high = (value + 128) >> 8
                halves[m, place + j] = high
                halves[m, place + wide + j] = value - (high << 8)
                whole += value
        factors[m, g] = factor if factor > TINY else ZERO
        if mode == 0:
            start[m, begin // wide * WIDE + begin % wide // group * lanes] = -middle * whole
        else:
            sums[m, g] = np.float32(-whole) if mode == 1 else factors[m, g] * np.float32(whole)


@jit
def _alone(ready: Any, weight: Any, kind: Any, share: Any, first: int, last: int, m: int, count: int, out: Any, step_out: int) -> None:
    """Fill columns first..last of rows m to m + count - 1 of out, flat, rows `step_out` numbers apart; weight as in `linear.one`."""
    halves, start, factors, sums = ready
    packed, scales, zeros, offsets, mode = weight
    groups, bytes_, per = scales.shape[1], packed.shape[1], len(share)
    blocks, step = start.shape[1] // WIDE, 256 if len(kind) == 4 else 128
    codes, scale, zero, move = packed.reshape(-1), scales.reshape(-1), zeros.reshape(-1), offsets.reshape(-1)
    x, begin, factor, some = halves.reshape(-1), start.reshape(-1), factors.reshape(-1), sums.reshape(-1)
    pitch = factors.shape[1]
    for row in range(first, last):
        at, to = row * bytes_, m * step_out + row
        for r in range(m, m + count):
            total, b, g = nothing(), 0, 0
            while b < blocks:
                these = scales_at(scale, row * groups + g, factor, r * pitch + g)
                if mode == 1:
                    total = add_zeros(total, these, zero, row * groups + g, some, r * pitch + g)
                elif mode == 2:
                    total = add_offsets(total, move, row * groups + g, some, r * pitch + g)
                stop, k = min(b + WIDE // per, blocks), 0
                while b < stop:
                    place = r * blocks + b
                    total = _add_block(total, codes, at + BLOCK_BYTES * b, x, place * step, begin, place * WIDE, these, k, kind, share)
                    b += 1
                    k += per
                g += WIDE
            out[to] = add_up(total)
            to += step_out


@jit
def _four(ready: Any, weight: Any, kind: Any, share: Any, first: int, last: int, m: int, out: Any, step_out: int) -> None:
    """Fill columns first..last of rows m to m + 3 of out: each as `_alone` does it, from the same unpacked blocks."""
    halves, start, factors, sums = ready
    packed, scales, zeros, offsets, mode = weight
    groups, bytes_, per = scales.shape[1], packed.shape[1], len(share)
    blocks, step = start.shape[1] // WIDE, 256 if len(kind) == 4 else 128
    codes, scale, zero, move = packed.reshape(-1), scales.reshape(-1), zeros.reshape(-1), offsets.reshape(-1)
    x, begin, factor, some = halves.reshape(-1), start.reshape(-1), factors.reshape(-1), sums.reshape(-1)
    pitch, xs, ss = factors.shape[1], blocks * step, blocks * WIDE
    for row in range(first, last):
        at, b, g = row * bytes_, 0, 0
        t0, t1, t2, t3 = nothing(), nothing(), nothing(), nothing()
        while b < blocks:
            u, v = row * groups + g, m * pitch + g
            s0 = scales_at(scale, u, factor, v)
            s1 = scales_at(scale, u, factor, v + pitch)
            s2 = scales_at(scale, u, factor, v + 2 * pitch)
            s3 = scales_at(scale, u, factor, v + 3 * pitch)
            if mode == 1:
                t0 = add_zeros(t0, s0, zero, u, some, v)
                t1 = add_zeros(t1, s1, zero, u, some, v + pitch)
                t2 = add_zeros(t2, s2, zero, u, some, v + 2 * pitch)
                t3 = add_zeros(t3, s3, zero, u, some, v + 3 * pitch)
            elif mode == 2:
                t0 = add_offsets(t0, move, u, some, v)
                t1 = add_offsets(t1, move, u, some, v + pitch)
                t2 = add_offsets(t2, move, u, some, v + 2 * pitch)
                t3 = add_offsets(t3, move, u, some, v + 3 * pitch)
            stop, k = min(b + WIDE // per, blocks), 0
            while b < stop:
                p, q = (m * blocks + b) * step, (m * blocks + b) * WIDE
                t0 = _add_block(t0, codes, at + BLOCK_BYTES * b, x, p, begin, q, s0, k, kind, share)
                t1 = _add_block(t1, codes, at + BLOCK_BYTES * b, x, p + xs, begin, q + ss, s1, k, kind, share)
                t2 = _add_block(t2, codes, at + BLOCK_BYTES * b, x, p + 2 * xs, begin, q + 2 * ss, s2, k, kind, share)
                t3 = _add_block(t3, codes, at + BLOCK_BYTES * b, x, p + 3 * xs, begin, q + 3 * ss, s3, k, kind, share)
                b += 1
                k += per
            g += WIDE
        to = m * step_out + row
        out[to] = add_up(t0)
        out[to + step_out] = add_up(t1)
        out[to + 2 * step_out] = add_up(t2)
        out[to + 3 * step_out] = add_up(t3)


@jit
def multiply(ready: Any, weight: Any, kind: Any, share: Any, first: int, last: int, m: int, count: int, out: Any, step_out: int) -> None:
    """Fill columns first..last of rows m to m + count - 1 of out, flat, rows `step_out` numbers apart; weight as in `linear.one`."""
    if count == 4:
        _four(ready, weight, kind, share, first, last, m, out, step_out)
    else:
        _alone(ready, weight, kind, share, first, last, m, count, out, step_out)


def sizes(columns: int, group: int, bits: int) -> tuple[int, int, int]:
    """Return the bytes of a prepared row, its sums' starts, and its groups in 16s."""
    blocks = -(-columns // BLOCK_COLUMNS[bits])
    return blocks * 2 * BLOCK_COLUMNS[bits], blocks * WIDE, -(-columns // group // WIDE) * WIDE
