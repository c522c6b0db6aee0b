"""ggml's K types on the CPU: twins of `quantkit.codecs.k_quants`, super-blocks as SIMD lanes.

A tile is LANES super-blocks, [256, LANES]; sub-block s of all of them is one call of a search, so the scales that come
out, [subs, LANES], are laid out for the search over them.
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
from quantkit.codecs import k_quants as codecs
from quantkit.codecs._ggml import K

SPAN = np.array(codecs.SPAN, np.float32)


@jit
def _floored(x: Any, w: Any, share: Any) -> None:
    """Turn importance w [256, LANES] into search weights: w * sqrt(share / 256 of the sum of squares + x^2)."""
    floor = lanes.squares(x) * fill(share) / fill(np.float32(K))
    for j in range(K):
        v = load(x, j)
        store(w, j, load(w, j) * root(floor + v * v))


@jit
def _own_weights(x: Any, w: Any, absolute: bool) -> None:
    """Fill w [n, LANES] with |x|, and unless `absolute` plus the sub-block's root mean square."""
    floor = fill(ZERO) if absolute else root(lanes.squares(x) / fill(np.float32(x.shape[0])))
    for j in range(x.shape[0]):
        store(w, j, floor + size(load(x, j)))


@jit
def _totals(w: Any, sub: int, totals: Any) -> None:
    """Fill totals [subs, LANES] with the sums of each sub-block's weights."""
    for s in range(totals.shape[0]):
        total = fill(ZERO)
        for j in range(s * sub, (s + 1) * sub):
            total = total + load(w, j)
        store(totals, s, total)


@jit
def _levels_of(values: Any, high: int, codes: Any, scale: Any, row: int) -> None:
    """Fill codes [subs, LANES] and row `row` of scale: values >= 0 on the grid that spans them."""
    zero, limit, top = fill(ZERO), fill(np.float32(high)), fill(ZERO)
    for s in range(values.shape[0]):
        v = load(values, s)
        top = where(v > top, v, top)
    live = top > zero
    step = where(live, limit / where(live, top, fill(ONE)), zero)
    for s in range(values.shape[0]):
        value = lanes.nearest(step * load(values, s))
        value = where(value < zero, value + fill(np.float32(256.0)), value)  # a byte, then cut
        store(codes, s, where(value < limit, value, limit))
    store(scale, row, top / limit)


@jit
def _recode(x: Any, step: Any, offset: Any, kept: Any, high: int, codes: Any, first: int) -> None:
    """Fill codes uint8 [256, LANES] from row `first`: x on the stored grid, (x + offset) / step.

    Where step is 0 they are `kept`'s: rows 2 and 3 of what `affine` found, step and low.
    """
    low, top, live = fill(ZERO), fill(np.float32(high)), step != fill(ZERO)
    safe, chosen, base = where(live, step, fill(ONE)), load(kept, 2), load(kept, 3)
    for j in range(x.shape[0]):
        v = load(x, j)
        store_bytes(codes, first + j, clip(lanes.nearest(where(live, (v + offset) / safe, chosen * (v - base))), low, top))


@jit
def _recode_signed(x: Any, step: Any, level: Any, high: int, codes: Any, first: int) -> None:
    """Fill codes uint8 [256, LANES] from row `first`: x / step within -high..high-1, plus high; where step is 0, level's."""
    low, top, live = fill(np.float32(-high)), fill(np.float32(high - 1)), step != fill(ZERO)
    safe = where(live, step, fill(ONE))
    for j in range(x.shape[0]):
        value = where(live, clip(lanes.nearest(load(x, j) / safe), low, top), load(level, j))
        store_bytes(codes, first + j, value - low)


@jit
def _store(codes: Any, i: int, bits: int, low_at: int, high_at: int, out: Any) -> None:
    """Write the 256 codes of lane i into a block: nibbles at low_at, the fifth bits at high_at (Q4_K, Q5_K)."""
    for g in range(4):
        for k in range(32):
            out[low_at + 32 * g + k] = (codes[64 * g + k, i] & 15) | ((codes[64 * g + 32 + k, i] & 15) << 4)
    if bits == 5:
        for k in range(32):
            byte = 0
            for s in range(8):
                byte |= (codes[32 * s + k, i] >> 4) << s
            out[high_at + k] = byte


@jit
def _store_quarters(codes: Any, i: int, shift: int, at: int, out: Any) -> None:
    """Write two bits, from `shift` up, of each of the 256 codes of lane i."""
    for g in range(2):
        for k in range(32):
            j = 128 * g + k
            byte = ((codes[j, i] >> shift) & 3) | (((codes[j + 32, i] >> shift) & 3) << 2)
            out[at + 32 * g + k] = byte | (((codes[j + 64, i] >> shift) & 3) << 4) | (((codes[j + 96, i] >> shift) & 3) << 6)


@jit
def _store_header(scales: Any, lows: Any, i: int, bits: int, half: Any, out: Any) -> None:
    """Write lane i's f16 scale and minimum, half [2, LANES], and the packed sub-block scales and minima."""
    at = 80 if bits == 2 else 0
    for k in range(2):
        out[at + 2 * k], out[at + 2 * k + 1] = half[k, i] & 255, half[k, i] >> 8
    if bits == 2:
        for s in range(16):
            out[s] = np.uint8(scales[s, i]) | (np.uint8(lows[s, i]) << 4)
        return
    for s in range(4):
        a, b, c, d = np.uint8(scales[s, i]), np.uint8(scales[s + 4, i]), np.uint8(lows[s, i]), np.uint8(lows[s + 4, i])
        out[4 + s] = a | ((b >> 4) << 6)
        out[8 + s] = c | ((d >> 4) << 6)
        out[12 + s] = (b & 15) | ((d & 15) << 4)


@jit
def minimum(source: Any, importance: Any, first: int, last: int, out: Any, odd: Any, kind: Any, span: Any, share: Any) -> None:
    """Encode Q2_K, Q4_K or Q5_K; kind = (bits, sub, top)."""
    bits, sub, top = kind
    subs, high, weighted = K // sub, (1 << bits) - 1, importance.shape[0] > 0
    x, w, level = np.empty((K, LANES), np.float32), np.empty((K, LANES), np.float32), np.empty((sub, LANES), np.float32)
    found, totals = np.empty((subs, 4, LANES), np.float32), np.empty((subs, LANES), np.float32)
    values, grid = np.empty((2, subs, LANES), np.float32), np.empty((2, subs, LANES), np.float32)
    scale, half = np.empty((2, LANES), np.float32), np.empty((2, LANES), np.uint16)
    codes = np.empty((K, LANES), np.uint8)
    for start in range(first, last, LANES):
        count = lanes.begin(source, importance, start, last, sub, x, w, odd)
        if weighted:
            _floored(x, w, share)
            _totals(w, sub, totals)
        for s in range(subs):
            part, weight = x[s * sub : (s + 1) * sub], w[s * sub : (s + 1) * sub]
            if not weighted:
                _own_weights(part, weight, bits == 2)
            lanes.affine(part, weight, high, span, bits == 2 and not weighted, level, found[s])
            store(values[0], s, load(found[s], 0))
            store(values[1], s, fill(ZERO) - load(found[s], 1))
        for k in range(2):
            if weighted:
                lanes.positive(values[k], totals, top, grid[k], scale, k)
            else:
                _levels_of(values[k], top, grid[k], scale, k)
            lanes.to_half(scale[k], scale[k].view(np.int32), half[k])
        for s in range(subs):
            step, offset = load(scale, 0) * load(grid[0], s), load(scale, 1) * load(grid[1], s)
            _recode(x[s * sub : (s + 1) * sub], step, offset, found[s], high, codes, s * sub)
        for i in range(count):
            block = out[start + i]
            _store_header(grid[0], grid[1], i, bits, half, block)
            if bits == 2:
                _store_quarters(codes, i, 0, 16, block)
            else:
                _store(codes, i, bits, block.size - 128, 16, block)


def _minimum(codec: Any) -> Callable[[int], Callable[..., Tensor]]:
    kind = (codec.bits, codec.sub, codec.top)
    spans = (np.array(codec.span, np.float32), SPAN)

    def make(threads: int) -> Callable[..., Tensor]:
        def kernel(source: Any, importance: Any, *rest: Any) -> None:
            minimum(source, importance, *rest, kind, spans[len(importance) > 0], np.float32(codec.share))

        return encoder(codec, kernel, threads)

    return make


@jit
def _apply(x: Any, chosen: Any, row: int, high: int, level: Any) -> None:
    """Fill level [n, LANES] with chosen[row] * x rounded within -high..high-1; `high` less than that where chosen is 0."""
    low, top, step = fill(np.float32(-high)), fill(np.float32(high - 1)), load(chosen, row)
    live = step != fill(ZERO)
    for j in range(x.shape[0]):
        store(level, j, where(live, clip(lanes.nearest(step * load(x, j)), low, top), low))


@jit
def _signed_scales(values: Any, least: int, most: int, stored: Any, scale: Any) -> Any:
    """Fill stored [subs, LANES] and row 0 of scale: values on the grid whose extreme is `least`; return which lanes live."""
    zero, extreme = fill(ZERO), lanes.signed_absmax(values)
    live = size(extreme) >= fill(lanes.EPSILON)
    step = where(live, fill(np.float32(least)) / where(live, extreme, fill(ONE)), zero)
    for s in range(values.shape[0]):
        store(stored, s, clip(lanes.nearest(step * load(values, s)), fill(np.float32(least)), fill(np.float32(most))))
    store(scale, 0, where(live, fill(ONE) / where(live, step, fill(ONE)), zero))
    return live


@jit
def three(source: Any, importance: Any, first: int, last: int, out: Any, odd: Any) -> None:
    """Encode Q3_K."""
    weighted = importance.shape[0] > 0
    x, w, level = np.empty((K, LANES), np.float32), np.empty((K, LANES), np.float32), np.empty((K, LANES), np.float32)
    values, chosen, totals = np.empty((16, LANES), np.float32), np.empty((16, LANES), np.float32), np.empty((16, LANES), np.float32)
    stored, scale, half = np.empty((16, LANES), np.float32), np.empty((1, LANES), np.float32), np.empty((1, LANES), np.uint16)
    codes, packed = np.empty((K, LANES), np.uint8), np.empty((16, LANES), np.uint8)
    for start in range(first, last, LANES):
        count = lanes.begin(source, importance, start, last, 16, x, w, odd)
        if weighted:
            _floored(x, w, np.float32(2.0))
            _totals(w, 16, totals)
        for s in range(16):
            part, weight, here = x[16 * s : 16 * s + 16], w[16 * s : 16 * s + 16], level[16 * s : 16 * s + 16]
            if weighted:
                lanes.symmetric(part, weight, 4, values, chosen, s)
                _apply(part, chosen, s, 4, here)
            else:
                for j in range(16):
                    store(weight, j, load(part, j) * load(part, j))
                lanes.refined(part, weight, 4, here, values, s)
        if weighted:
            lanes.symmetric(values, totals, 32, scale, chosen, 0)
            _apply(values, chosen, 0, 32, stored)
        else:
            live = _signed_scales(values, -32, 31, stored, scale)
            for s in range(16):
                store(stored, s, where(live, load(stored, s), fill(np.float32(-32.0))))
        lanes.to_half(scale[0], scale[0].view(np.int32), half[0])
        for s in range(16):
            _recode_signed(x[16 * s : 16 * s + 16], load(scale, 0) * load(stored, s), level[16 * s : 16 * s + 16], 4, codes, 16 * s)
            store_bytes(packed, s, load(stored, s) + fill(np.float32(32.0)))
        for i in range(count):
            _store_three(codes, packed, i, half[0, i], out[start + i])


@jit
def _store_three(codes: Any, scales: Any, i: int, half: Any, out: Any) -> None:
    """Write lane i as a Q3_K block."""
    for k in range(32):
        byte = 0
        for s in range(8):
            byte |= (codes[32 * s + k, i] >> 2) << s
        out[k] = byte
    _store_quarters(codes, i, 0, 32, out)
    for s in range(8):
        out[96 + s] = (scales[s, i] & 15) | ((scales[s + 8, i] & 15) << 4)
    for s in range(4):
        byte = (scales[s, i] >> 4) | ((scales[s + 4, i] >> 4) << 2)
        out[104 + s] = byte | ((scales[s + 8, i] >> 4) << 4) | ((scales[s + 12, i] >> 4) << 6)
    out[108], out[109] = half & 255, half >> 8


@jit
def six(source: Any, importance: Any, first: int, last: int, out: Any, odd: Any) -> None:
    """Encode Q6_K."""
    x, w, level = np.empty((K, LANES), np.float32), np.empty((K, LANES), np.float32), np.empty((16, LANES), np.float32)
    values, chosen, stored = np.empty((16, LANES), np.float32), np.empty((16, LANES), np.float32), np.empty((16, LANES), np.float32)
    scale, half = np.empty((1, LANES), np.float32), np.empty((1, LANES), np.uint16)
    codes, packed = np.empty((K, LANES), np.uint8), np.empty((16, LANES), np.uint8)
    for start in range(first, last, LANES):
        count = lanes.begin(source, importance, start, last, 16, x, w, odd)
        if not importance.shape[0]:
            for j in range(K):
                store(w, j, load(x, j) * load(x, j))
        for s in range(16):
            lanes.symmetric(x[16 * s : 16 * s + 16], w[16 * s : 16 * s + 16], 32, values, chosen, s)
        live = _signed_scales(values, -128, 127, stored, scale)
        lanes.to_half(scale[0], scale[0].view(np.int32), half[0])
        for s in range(16):
            part = x[16 * s : 16 * s + 16]
            _apply(part, chosen, s, 32, level)
            for j in range(16):
                store(level, j, where(live, load(level, j), fill(np.float32(-32.0))))
            _recode_signed(part, load(scale, 0) * load(stored, s), level, 32, codes, 16 * s)
            store_bytes(packed, s, load(stored, s))
        for i in range(count):
            _store_six(codes, packed, i, half[0, i], out[start + i])


@jit
def _store_six(codes: Any, scales: Any, i: int, half: Any, out: Any) -> None:
    """Write lane i as a Q6_K block."""
    for g in range(2):
        for k in range(64):
            out[64 * g + k] = (codes[128 * g + k, i] & 15) | ((codes[128 * g + 64 + k, i] & 15) << 4)
    _store_quarters(codes, i, 4, 128, out)
    for s in range(16):
        out[192 + s] = scales[s, i]
    out[208], out[209] = half & 255, half >> 8


def _plain(codec: Any, kernel: Callable[..., None]) -> Callable[[int], Callable[..., Tensor]]:
    return lambda threads: encoder(codec, kernel, threads)


q3_k, q6_k = _plain(codecs.Q3_K, three), _plain(codecs.Q6_K, six)
q2_k, q4_k, q5_k = _minimum(codecs.Q2_K), _minimum(codecs.Q4_K), _minimum(codecs.Q5_K)
