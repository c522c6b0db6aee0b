"""IQ4_NL, IQ4_XS and MXFP4 on the CPU: twins of `quantkit.codecs.nonlinear`, blocks as SIMD lanes.

The nearest of sixteen levels is counted, not looked up: one comparison per middle between two levels, in every lane.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from quantkit.backends.cpu import _lanes as lanes
from quantkit.backends.cpu._encode import encoder
from quantkit.backends.cpu._jit import jit
from quantkit.backends.cpu._lanes import ONE, ZERO
from quantkit.backends.cpu._vector import LANES, clip, fill, load, root, size, store, store_bytes, where
from quantkit.codecs import nonlinear as codecs
from quantkit.codecs._ggml import K

LEVELS = np.array(codecs.LEVELS, np.float32)
MIDDLES = ((LEVELS[1:] + LEVELS[:-1]) / 2).astype(np.float32)
STEPS = (LEVELS[1:] - LEVELS[:-1]).astype(np.float32)
SIXTEEN = np.float32(16.0)
E2M1 = np.array(codecs.E2M1_DOUBLED, np.float32)


@jit
def _level(value: Any) -> Any:
    """Return the nearest level of each lane, the upper one of a tie."""
    zero, level = fill(ZERO), fill(LEVELS[0])
    for k in range(15):
        level = level + where(value >= fill(MIDDLES[k]), fill(STEPS[k]), zero)
    return level


@jit
def _code(value: Any) -> Any:
    """Return the index of the nearest level."""
    zero, one, code = fill(ZERO), fill(ONE), fill(ZERO)
    for k in range(15):
        code = code + where(value >= fill(MIDDLES[k]), one, zero)
    return code


@jit
def _on_table(x: Any, w: Any, scale: Any, row: int) -> None:
    """Fill row `row` of scale: the best of sixteen steps."""
    zero, one = fill(ZERO), fill(ONE)
    extreme = lanes.signed_absmax(x)
    live = size(extreme) >= fill(lanes.EPSILON)
    safe = where(live, extreme, one)
    found, best = zero, zero
    for attempt in range(16):
        step = one / ((zero - safe) / fill(LEVELS[0])) if attempt == 0 else fill(np.float32(attempt - 8) + LEVELS[0]) / safe
        along, energy = zero, zero
        for j in range(x.shape[0]):
            v = load(x, j)
            level = _level(step * v)
            wl = load(w, j) * level
            along, energy = along + wl * v, energy + wl * level
        usable = energy > zero
        new = where(usable, along / where(usable, energy, one), zero)
        better = usable & (along * along > best * energy)
        if attempt == 0:
            better = zero < one
        found, best = where(better, new, found), where(better, new * along, best)
    store(scale, row, where(live, found, zero))


@jit
def _weights(x: Any, w: Any, weighted: bool) -> None:
    """Fill w with x^2, or turn the importance in it into w * sqrt(2 mean square + x^2), over all of x [n, LANES]."""
    floor = lanes.squares(x) * fill(np.float32(2.0) / np.float32(x.shape[0])) if weighted else fill(ZERO)
    for j in range(x.shape[0]):
        v = load(x, j)
        store(w, j, load(w, j) * root(floor + v * v) if weighted else v * v)


@jit
def encode_32(source: Any, importance: Any, first: int, last: int, out: Any, odd: Any) -> None:
    """Encode IQ4_NL."""
    x, w, codes = np.empty((32, LANES), np.float32), np.empty((32, LANES), np.float32), np.empty((16, LANES), np.uint8)
    scale, half, zero = np.empty((1, LANES), np.float32), np.empty((1, LANES), np.uint16), fill(ZERO)
    for start in range(first, last, LANES):
        count = lanes.begin(source, importance, start, last, 32, x, w, odd)
        _weights(x, w, importance.shape[0] > 0)
        _on_table(x, w, scale, 0)
        d = load(scale, 0)
        step = where(d != zero, fill(ONE) / where(d != zero, d, fill(ONE)), zero)
        for j in range(16):
            store_bytes(codes, j, _code(load(x, j) * step) + fill(SIXTEEN) * _code(load(x, j + 16) * step))
        lanes.to_half(scale[0], scale[0].view(np.int32), half[0])
        lanes.store_halves(half[0], start, count, out, 0)
        lanes.store_units(codes, start, count, out, 2)


@jit
def encode_256(source: Any, importance: Any, first: int, last: int, out: Any, odd: Any) -> None:
    """Encode IQ4_XS."""
    x, w, codes = np.empty((K, LANES), np.float32), np.empty((K, LANES), np.float32), np.empty((K // 2, LANES), np.uint8)
    scales, stored, scale = np.empty((8, LANES), np.float32), np.empty((8, LANES), np.uint8), np.empty((1, LANES), np.float32)
    half, zero, one = np.empty((1, LANES), np.uint16), fill(ZERO), fill(ONE)
    for start in range(first, last, LANES):
        count = lanes.begin(source, importance, start, last, 32, x, w, odd)
        _weights(x, w, importance.shape[0] > 0)
        for s in range(8):
            _on_table(x[32 * s : 32 * s + 32], w[32 * s : 32 * s + 32], scales, s)
        d = lanes.signed_absmax(scales) / fill(np.float32(-32.0))
        inverse = where(d != zero, one / where(d != zero, d, one), zero)
        for s in range(8):
            ls = clip(lanes.nearest(load(scales, s) * inverse), fill(np.float32(-32.0)), fill(np.float32(31.0)))
            store_bytes(stored, s, ls + fill(np.float32(32.0)))
            grid = d * ls
            step = where(grid != zero, one / where(grid != zero, grid, one), zero)
            for j in range(16):
                low, top = load(x, 32 * s + j), load(x, 32 * s + j + 16)
                store_bytes(codes, 16 * s + j, _code(low * step) + fill(SIXTEEN) * _code(top * step))
        store(scale, 0, d)
        lanes.to_half(scale[0], scale[0].view(np.int32), half[0])
        lanes.store_halves(half[0], start, count, out, 0)
        lanes.store_units(codes, start, count, out, 8)
        for i in range(count):
            high = 0
            for s in range(8):
                high |= (stored[s, i] >> 4) << (2 * s)
            out[start + i, 2], out[start + i, 3] = high & 255, high >> 8
            for s in range(4):
                out[start + i, 4 + s] = (stored[2 * s, i] & 15) | ((stored[2 * s + 1, i] & 15) << 4)


@jit
def _float_code(value: Any, d: Any) -> Any:
    """Return the first code whose E2M1 value times d is nearest."""
    best, code = size(fill(E2M1[0]) * d - value), fill(ZERO)
    for k in range(1, 16):
        error = size(fill(E2M1[k]) * d - value)
        better = error < best
        best, code = where(better, error, best), where(better, fill(np.float32(k)), code)
    return code


@jit
def encode_microscaled(source: Any, importance: Any, first: int, last: int, out: Any, odd: Any) -> None:
    """Encode MXFP4."""
    x, codes = np.empty((32, LANES), np.float32), np.empty((16, LANES), np.uint8)
    w = x  # importance changes nothing
    scale, exponents = np.empty((1, LANES), np.float32), np.empty(LANES, np.int32)
    bits = scale.reshape(-1).view(np.int32)
    for start in range(first, last, LANES):
        count = lanes.begin(source, importance, start, last, 32, x, w, odd)
        store(scale, 0, size(lanes.signed_absmax(x)))
        for i in range(LANES):
            exponents[i] = max((bits[i] >> 23) - 2, 0) if scale[0, i] > ZERO else 0
            bits[i] = max(exponents[i] - 1, 1) << 23  # ordinary blocks need no subnormal scale
        d = load(scale, 0)
        for j in range(16):
            store_bytes(codes, j, _float_code(load(x, j), d) + fill(SIXTEEN) * _float_code(load(x, j + 16), d))
        lanes.store_units(codes, start, count, out, 1)
        for i in range(count):
            out[start + i, 0] = exponents[i]


def _encoder(codec: Any, kernel: Callable[..., None]) -> Callable[[int], Callable[..., Tensor]]:
    return lambda threads: encoder(codec, kernel, threads)


iq4_nl, iq4_xs = _encoder(codecs.IQ4_NL, encode_32), _encoder(codecs.IQ4_XS, encode_256)
mxfp4 = _encoder(codecs.MXFP4, encode_microscaled)
