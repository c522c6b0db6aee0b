"""Fields of 2, 3, 4 or 8 bits into words and back on the CPU.

Twins of `quantkit.formats._bits.pack_reference` and `unpack_reference`. Where a column's values lie side by side, eight of them are one
64-bit number, and three shifts squeeze it into a word (or spread a word into it); where a row's do, each field is one pass of shifts over
the row. Words that are wanted the other way round are transposed in tiles: they are the smaller side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.backends.cpu._encode import in_chunks
from quantkit.backends.cpu._jit import jit

TILE = 16  # of a transposition: a line of words
WIDE = 1024  # columns of a tile of rows: it stays in the first-level cache
IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
U = np.uint64
# Shifts and masks that bring eight fields of 8 bits together, by width: after each step twice as many bits are neighbours.
STEPS = {
    2: ((6, 0x000F000F000F000F), (12, 0x000000FF000000FF), (24, 0x000000000000FFFF)),
    3: ((5, 0x003F003F003F003F), (10, 0x00000FFF00000FFF), (20, 0x0000000000FFFFFF)),
    4: ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0x00000000FFFFFFFF)),
}
FIELDS = {2: 0x0303030303030303, 3: 0x0707070707070707, 4: 0x0F0F0F0F0F0F0F0F}


def _steps(bits: int) -> tuple[Any, ...]:
    """Return the field mask, then shift and mask of each step, as 64-bit numbers."""
    return (U(FIELDS[bits]), *(U(number) for step in STEPS[bits] for number in step))


@jit
def _squeeze(x: Any, steps: Any) -> Any:
    field, s1, m1, s2, m2, s3, m3 = steps
    x &= field
    x = (x | (x >> s1)) & m1
    x = (x | (x >> s2)) & m2
    return (x | (x >> s3)) & m3


@jit
def _spread(x: Any, steps: Any) -> Any:
    field, s1, m1, s2, m2, s3, _ = steps
    x = (x | (x << s3)) & m2
    x = (x | (x << s2)) & m1
    return (x | (x << s1)) & field


@jit
def _pack_along(eights: Any, words: Any, bits: int, steps: Any, first: int, last: int) -> None:
    """Fill rows first..last of words, uint32 [rows, n * bits / 32], from values as uint64 [rows, n / 8]."""
    for r in range(first, last):
        row, out = eights[r], words[r]
        if bits == 4:
            for i in range(out.size):
                out[i] = np.uint32(_squeeze(row[i], steps))
        elif bits == 2:
            for i in range(out.size):
                out[i] = np.uint32(_squeeze(row[2 * i], steps) | (_squeeze(row[2 * i + 1], steps) << U(16)))
        else:
            for i in range(out.size // 3):
                a, b = _squeeze(row[4 * i], steps), _squeeze(row[4 * i + 1], steps)
                c, d = _squeeze(row[4 * i + 2], steps), _squeeze(row[4 * i + 3], steps)
                out[3 * i] = np.uint32((a | (b << U(24))) & U(0xFFFFFFFF))
                out[3 * i + 1] = np.uint32(((b >> U(8)) | (c << U(16))) & U(0xFFFFFFFF))
                out[3 * i + 2] = np.uint32((c >> U(16)) | (d << U(8)))


@jit
def _unpack_along(words: Any, eights: Any, bits: int, steps: Any, first: int, last: int) -> None:
    """Undo `_pack_along`."""
    for r in range(first, last):
        row, out = words[r], eights[r]
        if bits == 4:
            for i in range(row.size):
                out[i] = _spread(U(row[i]), steps)
        elif bits == 2:
            for i in range(row.size):
                out[2 * i] = _spread(U(row[i]) & U(0xFFFF), steps)
                out[2 * i + 1] = _spread(U(row[i]) >> U(16), steps)
        else:
            for i in range(row.size // 3):
                a, b, c = U(row[3 * i]), U(row[3 * i + 1]), U(row[3 * i + 2])
                out[4 * i] = _spread(a & U(0xFFFFFF), steps)
                out[4 * i + 1] = _spread((a >> U(24)) | ((b & U(0xFFFF)) << U(8)), steps)
                out[4 * i + 2] = _spread((b >> U(16)) | ((c & U(0xFF)) << U(16)), steps)
                out[4 * i + 3] = _spread(c >> U(8), steps)


@jit
def _pack_across(values: Any, words: Any, bits: int, order: Any, first: int, last: int, left: int, right: int) -> None:
    """Fill words first..last (whole periods) of columns left..right: values [n, m], words [n * bits / 32, m], both with rows contiguous."""
    mask = np.uint32((1 << bits) - 1)
    for w in range(first, last):
        out = words[w]
        for m in range(left, right):
            out[m] = np.uint32(0)
        k = 32 * w // bits
        while k * bits < 32 * (w + 1):
            row, shift = values[(k & ~7) + order[k & 7]], k * bits - 32 * w
            if shift >= 0:
                for m in range(left, right):
                    out[m] |= (np.uint32(row[m]) & mask) << np.uint32(shift)
            else:
                for m in range(left, right):
                    out[m] |= (np.uint32(row[m]) & mask) >> np.uint32(-shift)
            k += 1


@jit
def _unpack_across(words: Any, values: Any, bits: int, order: Any, first: int, last: int, left: int, right: int) -> None:
    """Undo `_pack_across` for the fields first..last."""
    mask = np.uint32((1 << bits) - 1)
    for k in range(first, last):
        out, w, shift = values[(k & ~7) + order[k & 7]], k * bits // 32, np.uint32(k * bits % 32)
        row = words[w]
        if shift + bits <= 32:
            for m in range(left, right):
                out[m] = np.uint8((row[m] >> shift) & mask)
        else:
            after, rest = words[w + 1], np.uint32(32) - shift
            for m in range(left, right):
                out[m] = np.uint8(((row[m] >> shift) | (after[m] << rest)) & mask)


@jit
def _pack_across4(values: Any, words: Any, order: Any, first: int, last: int, left: int, right: int) -> None:
    """`_pack_across` for 4 bits: pairs of rows become rows of bytes, and four of these a row of words."""
    pairs = np.empty((4, right - left), np.uint8)
    for w in range(first, last):
        for pair in range(4):
            a, b = values[8 * w + order[2 * pair], left:right], values[8 * w + order[2 * pair + 1], left:right]
            both = pairs[pair]
            for m in range(both.size):
                both[m] = (a[m] & np.uint8(15)) | (b[m] << np.uint8(4))
        out, p, q, r, s = words[w, left:right], pairs[0], pairs[1], pairs[2], pairs[3]
        for m in range(out.size):
            out[m] = (
                np.uint32(p[m])
                | (np.uint32(q[m]) << np.uint32(8))
                | (np.uint32(r[m]) << np.uint32(16))
                | (np.uint32(s[m]) << np.uint32(24))
            )


@jit
def _unpack_across4(words: Any, values: Any, order: Any, first: int, last: int, left: int, right: int) -> None:
    """`_unpack_across` for 4 bits, words first..last: a byte of each word at a time, two rows of it."""
    both = np.empty(right - left, np.uint8)
    for w in range(first, last):
        row = words[w, left:right]
        for pair in range(4):
            a, b = values[8 * w + order[2 * pair], left:right], values[8 * w + order[2 * pair + 1], left:right]
            shift = np.uint32(8 * pair)
            for m in range(both.size):
                both[m] = np.uint8(row[m] >> shift)
            for m in range(both.size):
                a[m] = both[m] & np.uint8(15)
            for m in range(both.size):
                b[m] = both[m] >> np.uint8(4)


@jit
def _transpose(source: Any, target: Any, first: int, last: int) -> None:
    """Fill rows first..last of target [m, n] from source [n, m]."""
    for a in range(first, last, TILE):
        for b in range(0, source.shape[0], TILE):
            for i in range(a, min(a + TILE, last)):
                out = target[i]
                for j in range(b, min(b + TILE, source.shape[0])):
                    out[j] = source[j, i]


def _turned(words: Any, threads: int) -> Any:
    """Return a matrix transposed, contiguous."""
    target = np.empty(words.shape[::-1], words.dtype)
    _in_rows(threads, len(target), lambda first, last: _transpose(words, target, first, last), 4 * TILE)
    return target


def _in_rows(threads: int, rows: int, work: Callable[[int, int], None], least: int = 64) -> None:
    """Call work(first, last) on runs of rows."""
    step = max(least, -(-rows // (2 * threads)))
    in_chunks(threads, lambda first: work(first, min(first + step, rows)), range(0, rows, step))


def _contiguous_rows(array: Any) -> bool:
    return bool(array.flags.c_contiguous and array.flags.aligned and array.strides[1] == array.itemsize)


def pack_fields(threads: int) -> Callable[..., Tensor]:
    """Return the kernel for `threads` threads; its arguments and results are those of `pack_reference`."""

    def run(values: Tensor, bits: int, order: Sequence[int], last: bool) -> Tensor:
        n, m = values.shape
        given = values.numpy()
        along = _contiguous_rows(given.T) and given.ctypes.data % 8 == 0 and tuple(order) == IN_ORDER and n % 16 == 0
        if along and bits == 8:
            words = given.T.copy().view(np.uint32) if last else given.T.view(np.uint32)
        elif along:
            words, eights, steps = np.empty((m, n * bits // 32), np.uint32), given.T.view(np.uint64), _steps(bits)
            _in_rows(threads, m, lambda first, stop: _pack_along(eights, words, bits, steps, first, stop))
        else:
            rows, places = np.ascontiguousarray(given), np.array(order)
            words = np.empty((n * bits // 32, m), np.uint32)
            tiles = [(left, min(left + WIDE, m)) for left in range(0, m, WIDE)]
            parts = [half + tile for half in _halves(len(words)) for tile in tiles]
            if bits == 4:
                in_chunks(threads, lambda part: _pack_across4(rows, words, places, *part), parts)
            else:
                in_chunks(threads, lambda part: _pack_across(rows, words, bits, places, *part), parts)
        return torch.from_numpy((words if along == last else _turned(words, threads)).view(np.int32))

    return run


def unpack_fields(threads: int) -> Callable[..., Tensor]:
    """Return the kernel for `threads` threads; its arguments and results are those of `unpack_reference`."""

    def run(words: Tensor, bits: int, order: Sequence[int], last: bool) -> Tensor:
        n, m = words.shape[0] * 32 // bits, words.shape[1]
        given = words.numpy().view(np.uint32)
        along = last and tuple(order) == IN_ORDER and n % 16 == 0
        turned = given.T if along else given
        rows = (
            turned
            if _contiguous_rows(turned)
            else _turned(turned.T, threads)
            if _contiguous_rows(turned.T)
            else np.ascontiguousarray(turned)
        )
        if along and bits == 8:
            return torch.from_numpy(rows.view(np.uint8) if rows is not turned else rows.copy().view(np.uint8))
        if along:
            values, steps = np.empty((m, n // 8), np.uint64), _steps(bits)
            _in_rows(threads, m, lambda first, stop: _unpack_along(rows, values, bits, steps, first, stop))
            return torch.from_numpy(values.view(np.uint8))
        fields, places = np.empty((n, m), np.uint8), np.array(order)
        tiles = [(left, min(left + WIDE, m)) for left in range(0, m, WIDE)]
        if bits == 4:
            parts = [half + tile for half in _halves(n // 8) for tile in tiles]
            in_chunks(threads, lambda part: _unpack_across4(rows, fields, places, *part), parts)
        else:
            parts = [half + tile for half in _halves(n) for tile in tiles]
            in_chunks(threads, lambda part: _unpack_across(rows, fields, bits, places, *part), parts)
        return torch.from_numpy(_turned(fields, threads) if last else fields)

    return run


def _halves(count: int) -> list[tuple[int, int]]:
    """Return two runs of rows, so that narrow matrices keep two threads busy."""
    middle = count // 2
    return [(0, middle), (middle, count)] if middle else [(0, count)]
