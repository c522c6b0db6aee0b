"""ggml's blocks of 32 on the CPU: twins of `quantkit.codecs.rounded`, blocks as SIMD lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from quantkit.backends.cpu import _lanes as lanes
from quantkit.backends.cpu._encode import encoder
from quantkit.backends.cpu._jit import jit
from quantkit.backends.cpu._lanes import ONE, ZERO
from quantkit.backends.cpu._vector import LANES, clip, fill, load, root, size, store, store_bytes, truncate, where
from quantkit.codecs import rounded as codecs

SPAN = np.array(codecs.SPAN, np.float32)
ROWS = 16


@jit
def row_mean_squares(rows: Any, first: int, last: int, out: Any) -> None:
    """Fill out[first:last] with the mean square of those rows, each summed in order; several rows side by side."""
    total = np.empty(ROWS, np.float32)
    for start in range(first, last, ROWS):
        count = min(ROWS, last - start)
        total[:] = ZERO
        for j in range(rows.shape[1]):
            for i in range(count):
                total[i] += rows[start + i, j] * rows[start + i, j]
        for i in range(count):
            out[start + i] = total[i] / np.float32(rows.shape[1])


@jit
def _search(x: Any, w: Any, bits: int, minimum: bool, span: Any, room: Any, fields: Any, codes: Any) -> None:
    """Fill fields [2, LANES], scale and minimum, and codes: the weighted search."""
    level, found = room
    if minimum:
        high = (1 << bits) - 1
        lanes.affine(x, w, high, span, False, level, found)
        store(fields, 0, load(found, 0))
        store(fields, 1, load(found, 1))
        step, base = load(found, 2), load(found, 3)
        for j in range(32):
            value = lanes.nearest(step * (load(x, j) - base))
            store_bytes(codes, j, clip(value, fill(ZERO), fill(np.float32(high))))
        return
    half = 1 << (bits - 1)
    lanes.symmetric(x, w, half, fields, found, 0)
    low, top, step = fill(np.float32(-half)), fill(np.float32(half - 1)), load(found, 0)
    live = step != fill(ZERO)
    for j in range(32):
        store_bytes(codes, j, where(live, clip(lanes.nearest(step * load(x, j)), low, top) - low, fill(ZERO)))


@jit
def _span(x: Any, bits: int, minimum: bool, fields: Any, codes: Any) -> None:
    """Fill fields [2, LANES] and codes from the extremes."""
    zero, one, high = fill(ZERO), fill(ONE), fill(np.float32((1 << bits) - 1))
    if minimum:
        low = top = load(x, 0)
        for j in range(32):
            v = load(x, j)
            low, top = where(v < low, v, low), where(v > top, v, top)
        scale, shift = (top - low) / high, np.float32(0.5)
    else:
        half = np.float32(1 << (bits - 1))
        low = zero
        scale, shift = lanes.signed_absmax(x) / fill(-half), half + np.float32(0.5)
    store(fields, 0, scale)
    store(fields, 1, low)
    live = scale != zero
    step = where(live, one / where(live, scale, one), zero)
    for j in range(32):
        v = load(x, j)
        value = truncate((v - low) * step + fill(shift)) if minimum else truncate(v * step + fill(shift))
        store_bytes(codes, j, where(value < high, value, high))


@jit
def _store(codes: Any, half: Any, first: int, count: int, bits: int, minimum: bool, out: Any) -> None:
    """Write the lanes' fields and codes, uint8 [32, LANES], as blocks; codes are used up."""
    at = 4 if minimum else 2
    lanes.store_halves(half[0], first, count, out, 0)
    if minimum:
        lanes.store_halves(half[1], first, count, out, 2)
    if bits == 5:
        for b in range(4):
            for i in range(count):
                byte = 0
                for k in range(8):
                    byte |= (codes[8 * b + k, i] >> 4) << k
                out[first + i, at + b] = byte
        at += 4
    for k in range(16):
        for i in range(LANES):
            codes[k, i] = (codes[k, i] & 15) | ((codes[k + 16, i] & 15) << 4)
    lanes.store_units(codes[:16], first, count, out, at)


@jit
def encode(source: Any, importance: Any, first: int, last: int, out: Any, odd: Any, energy: Any, kind: Any, span: Any) -> None:
    """Encode Q4_0, Q4_1, Q5_0 or Q5_1; energy: the mean square of each row, needed with importance; kind = (bits, minimum)."""
    bits, minimum = kind
    weighted, period = importance.shape[0] > 0, max(importance.shape[0], 1)
    x, w, codes = np.empty((32, LANES), np.float32), np.empty((32, LANES), np.float32), np.empty((32, LANES), np.uint8)
    room = (np.empty((32, LANES), np.float32), np.empty((4, LANES), np.float32))
    fields, half, floor = np.zeros((2, LANES), np.float32), np.empty((2, LANES), np.uint16), np.zeros((1, LANES), np.float32)
    for start in range(first, last, LANES):
        count = lanes.begin(source, importance, start, last, 32, x, w, odd)
        if weighted:
            for i in range(count):
                floor[0, i] = energy[(start + i) // period]
            for j in range(32):
                v = load(x, j)
                store(w, j, load(w, j) * root(load(floor, 0) + v * v))
            _search(x, w, bits, minimum, span, room, fields, codes)
        else:
            _span(x, bits, minimum, fields, codes)
        for k in range(2 if minimum else 1):
            lanes.to_half(fields[k], fields[k].view(np.int32), half[k])
        _store(codes, half, start, count, bits, minimum, out)


@jit
def encode_bytes(source: Any, importance: Any, first: int, last: int, out: Any, odd: Any) -> None:
    """Encode Q8_0."""
    x, codes = np.empty((32, LANES), np.float32), np.empty((32, LANES), np.uint8)
    w = x  # importance changes nothing
    scale, half = np.empty((1, LANES), np.float32), np.empty((1, LANES), np.uint16)
    zero, one, middle = fill(ZERO), fill(ONE), fill(np.float32(0.5))
    for start in range(first, last, LANES):
        count = lanes.begin(source, importance, start, last, 32, x, w, odd)
        extreme = size(lanes.signed_absmax(x)) / fill(np.float32(127.0))
        live = extreme != zero
        step = where(live, one / where(live, extreme, one), zero)
        store(scale, 0, extreme)
        lanes.to_half(scale[0], scale[0].view(np.int32), half[0])
        for j in range(32):
            v = load(x, j) * step
            whole = truncate(v)
            away = where(size(v - whole) >= middle, where(v < zero, zero - one, one), zero)
            store_bytes(codes, j, whole + away)
        lanes.store_halves(half[0], start, count, out, 0)
        lanes.store_units(codes, start, count, out, 2)


def _rounded(codec: Any) -> Callable[[int], Callable[..., Tensor]]:
    def kernel(source: Any, importance: Any, *rest: Any) -> None:
        encode(source, importance, *rest, (codec.bits, codec.minimum), SPAN)

    return lambda threads: encoder(codec, kernel, threads, row_mean_squares)


def q8_0(threads: int) -> Callable[..., Tensor]:
    """Return the encoder of Q8_0 for a number of threads."""
    return encoder(codecs.Q8_0, encode_bytes, threads)


q4_0, q4_1, q5_0, q5_1 = _rounded(codecs.Q4_0), _rounded(codecs.Q4_1), _rounded(codecs.Q5_0), _rounded(codecs.Q5_1)
