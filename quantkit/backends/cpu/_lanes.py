"""The searches of `quantkit.codecs._search` in Numba: LANES blocks side by side, one vector per element.

Arrays are float32 [n, LANES]. A lane is one block, so no sum is reordered and the bytes are the reference's. Lanes
without a block hold zeros. A block is odd when its largest magnitude is so small or so large that a step between
levels overflows; it is marked, and the caller encodes it again with the reference.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.backends.cpu._jit import jit
from quantkit.backends.cpu._vector import LANES, SQUARE, anywhere, clip, fill, load, size, store, transpose, where

MAGIC = np.float32(12582912.0)
ZERO, ONE, TENTH = np.float32(0.0), np.float32(1.0), np.float32(0.1)
EPSILON = np.float32(1e-15)
SMALLEST, LARGEST = np.float32(1e-28), np.float32(1e28)
SWEEPS = 5


@jit
def load_units(source: Any, first: int, count: int, x: Any) -> None:
    """Fill x [block, LANES] with `count` units of source [units, block] from unit `first`, zeros beyond."""
    block = x.shape[0]
    if count == LANES:
        for j in range(0, block, SQUARE):
            for i in range(0, LANES, SQUARE):
                transpose(source, (first + i) * block + j, block, x, j * LANES + i, LANES)
        return
    for i in range(count):
        for j in range(x.shape[0]):
            x[j, i] = source[first + i, j]
    for i in range(count, LANES):
        for j in range(x.shape[0]):
            x[j, i] = ZERO


@jit
def load_importance(importance: Any, first: int, count: int, w: Any) -> None:
    """Fill w [block, LANES] with the importance [units of a row, block] of units first..first+count, ones beyond."""
    period = importance.shape[0]
    for i in range(count):
        unit = (first + i) % period
        for j in range(w.shape[0]):
            w[j, i] = importance[unit, j]
    for i in range(count, LANES):
        for j in range(w.shape[0]):
            w[j, i] = ONE


@jit
def store_units(codes: Any, first: int, count: int, out: Any, at: int) -> None:
    """Write codes, uint8 [n, LANES], at byte `at` of each block of out [units, size] from unit `first`; 16 divides n."""
    size = out.shape[1]
    for k in range(0, codes.shape[0], SQUARE):
        if count == LANES:
            for i in range(0, LANES, SQUARE):
                transpose(codes, k * LANES + i, LANES, out, (first + i) * size + at + k, size)
        else:
            for i in range(count):
                for j in range(k, k + SQUARE):
                    out[first + i, at + j] = codes[j, i]


@jit
def store_halves(half: Any, first: int, count: int, out: Any, at: int) -> None:
    """Write float16 bits, uint16 [LANES], at byte `at` of each block."""
    for i in range(count):
        out[first + i, at], out[first + i, at + 1] = half[i] & 255, half[i] >> 8


@jit
def mark_odd(x: Any, width: int, first: int, count: int, odd: Any) -> None:
    """Set odd[first + i] if a sub-block of `width` of lane i is not in the range of ordinary numbers."""
    zero, least, most = fill(ZERO), fill(SMALLEST), fill(LARGEST)
    flags = np.empty((1, LANES), np.float32)
    found = zero
    for s in range(0, x.shape[0], width):
        top = zero
        for j in range(s, s + width):
            v = size(load(x, j))
            top = where(v > top, v, top)
        found = where(((top > zero) & (top < least)) | (top > most), fill(ONE), found)
    if anywhere(found > zero):
        store(flags, 0, found)
        for i in range(count):
            if flags[0, i] > ZERO:
                odd[first + i] = 1


@jit
def begin(source: Any, importance: Any, start: int, last: int, width: int, x: Any, w: Any, odd: Any) -> int:
    """Load the tile that begins at unit `start`, its importance too if there is any, and mark odd blocks; return its units."""
    count = min(LANES, last - start)
    load_units(source, start, count, x)
    mark_odd(x, width, start, count, odd)
    if importance.shape[0]:
        load_importance(importance, start, count, w)
    return count


@jit
def nearest(value: Any) -> Any:
    """Round a vector half-even."""
    return (value + fill(MAGIC)) - fill(MAGIC)


@jit
def signed_absmax(x: Any) -> Any:
    """Return each lane's element of largest magnitude with its sign, the first of equals."""
    extreme = fill(ZERO)
    for j in range(x.shape[0]):
        v = load(x, j)
        extreme = where(size(v) > size(extreme), v, extreme)
    return extreme


@jit
def squares(x: Any) -> Any:
    """Return each lane's sum of squares."""
    total = fill(ZERO)
    for j in range(x.shape[0]):
        v = load(x, j)
        total = total + v * v
    return total


@jit
def to_half(value: Any, bits: Any, half: Any) -> None:
    """Round value [LANES] to float16 in place, half-even; half: uint16 [LANES], its bits; `bits`: value viewed as int32."""
    for i in range(LANES):
        sign, magnitude = (bits[i] >> 16) & 0x8000, bits[i] & 0x7FFFFFFF
        if magnitude >= 0x38800000:
            h = min((magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13, 0x7C00)
            half[i] = np.uint16(h | sign)
            bits[i] = np.int32(((h << 13) + 0x38000000) | (sign << 16)) if h < 0x7C00 else np.int32(0x7F800000 | (sign << 16))
        else:
            steps = np.int32(np.float32(abs(value[i])) * np.float32(16777216.0) + MAGIC - MAGIC)
            half[i] = np.uint16(steps | sign)
            value[i] = np.float32(steps) * np.float32(5.9604644775390625e-08)
            value[i] = -value[i] if sign else value[i]


@jit
def symmetric(x: Any, w: Any, high: int, scale: Any, chosen: Any, row: int) -> None:
    """Fill row `row` of scale and chosen: codes are chosen * x rounded within -high..high-1, plus high; 0 without a value."""
    zero, low, top = fill(ZERO), fill(np.float32(-high)), fill(np.float32(high - 1))
    extreme = signed_absmax(x)
    live = size(extreme) >= fill(EPSILON)
    safe = where(live, extreme, fill(ONE))
    best_step, best_scale, best = zero, zero, zero
    for attempt in range(19):  # the plain step first, then nine to either side
        number = 0 if attempt == 0 else (attempt - 10 if attempt < 10 else attempt - 9)
        step = fill(-(np.float32(high) + TENTH * np.float32(number))) / safe
        along, energy = zero, zero
        for j in range(x.shape[0]):
            v, weight = load(x, j), load(w, j)
            level = clip(nearest(step * v), low, top)
            along = along + (weight * v) * level
            energy = energy + (weight * level) * level
        usable = energy > zero
        new = where(usable, along / where(usable, energy, fill(ONE)), zero)
        better = usable & (along * along > best * energy)
        if attempt == 0:
            better = low < zero
        best_step, best_scale = where(better, step, best_step), where(better, new, best_scale)
        best = where(better, new * along, best)
    store(scale, row, where(live, best_scale, zero))
    store(chosen, row, where(live, best_step, zero))


@jit
def _sweep(x: Any, w: Any, low: Any, top: Any, level: Any, along: Any, energy: Any, need: Any) -> Any:
    """Move single levels where that fits better, in one pass; return the sums and whether a lane moved.

    need: the least energy that must be left without the element's own part for a move to be tried.
    """
    zero, one, moved = fill(ZERO), fill(ONE), fill(ZERO)
    for j in range(x.shape[0]):
        v, weight, old = load(x, j), load(w, j), load(level, j)
        a, b = along - (weight * v) * old, energy - (weight * old) * old
        free = (a > zero) & (b > need)
        new = clip(nearest(v * b / where(free, a, one)), low, top)
        c, d = a + (weight * v) * new, b + (weight * new) * new
        better = free & (new != old) & (d > zero) & ((c * c) * energy > (along * along) * d)
        store(level, j, where(better, new, old))
        along, energy, moved = where(better, c, along), where(better, d, energy), where(better, one, moved)
    return along, energy, anywhere(moved > zero)


@jit
def _round_all(x: Any, w: Any, step: Any, low: Any, top: Any, level: Any) -> Any:
    """Fill level with step * x rounded within low..top; return the sums of (w x) level and (w level) level."""
    along, energy = fill(ZERO), fill(ZERO)
    for j in range(x.shape[0]):
        v, weight = load(x, j), load(w, j)
        value = clip(nearest(step * v), low, top)
        store(level, j, value)
        along, energy = along + (weight * v) * value, energy + (weight * value) * value
    return along, energy


@jit
def refined(x: Any, w: Any, high: int, level: Any, scale: Any, row: int) -> None:
    """Fill level [n, LANES] (-high..high-1) and row `row` of scale: one rounding, then sweeps that move single codes."""
    zero, low, top = fill(ZERO), fill(np.float32(-high)), fill(np.float32(high - 1))
    extreme = signed_absmax(x)
    live = size(extreme) >= fill(EPSILON)
    step = where(live, low / where(live, extreme, fill(ONE)), zero)
    along, energy = _round_all(x, w, step, low, top, level)
    for _ in range(SWEEPS):
        along, energy, moved = _sweep(x, w, low, top, level, along, energy, fill(np.float32(-np.inf)))
        if not moved:
            break
    for j in range(x.shape[0]):
        store(level, j, where(live, load(level, j), low))
    usable = energy > zero
    store(scale, row, where(usable, along / where(usable, energy, fill(ONE)), zero))


@jit
def positive(x: Any, w: Any, high: int, level: Any, scale: Any, row: int) -> None:
    """Fill level [n, LANES] (0..high) and row `row` of scale for values that are not negative."""
    zero, one, limit, bottom = fill(ZERO), fill(ONE), fill(np.float32(high)), fill(np.float32(-1e30))
    top = zero
    for j in range(x.shape[0]):
        v = load(x, j)
        top = where(v > top, v, top)
    live = top >= fill(EPSILON)
    safe = where(live, top, one)
    chosen, best = zero, zero
    for attempt in range(9):  # the plain step first, then four to either side
        number = 0 if attempt == 0 else (attempt - 5 if attempt < 5 else attempt - 4)
        step = fill(TENTH * np.float32(number) + np.float32(high)) / safe
        back, error = one / step, zero
        for j in range(x.shape[0]):
            v = load(x, j)
            rest = v - back * clip(nearest(step * v), bottom, limit)
            error = error + (load(w, j) * rest) * rest
        better = error < best
        if attempt == 0:
            better = zero < one
        chosen, best = where(better, step, chosen), where(better, error, best)
    along, energy = _round_all(x, w, chosen, bottom, limit, level)
    for _ in range(SWEEPS):
        along, energy, moved = _sweep(x, w, bottom, limit, level, along, energy, zero)
        if not moved:
            break
    usable = live & (energy != zero)
    store(scale, row, where(usable, along / where(usable, energy, one), zero))
    for j in range(x.shape[0]):
        store(level, j, where(live, load(level, j), zero))


@jit
def _loss(x: Any, w: Any, level: Any, scale: Any, low: Any, absolute: bool) -> Any:
    """Return the weighted error, squared or absolute, of scale * level + low."""
    error = fill(ZERO)
    if absolute:
        for j in range(x.shape[0]):
            error = error + load(w, j) * size((scale * load(level, j) + low) - load(x, j))
    else:
        for j in range(x.shape[0]):
            rest = (scale * load(level, j) + low) - load(x, j)
            error = error + load(w, j) * (rest * rest)
    return error


@jit
def _affine_sums(x: Any, w: Any, step: Any, low: Any, limit: Any, level: Any) -> Any:
    """Fill level with step * (x - low) rounded within 0..limit; return the sums of w l, (w l) l and (w l) x."""
    zero = fill(ZERO)
    plain, energy, along = zero, zero, zero
    for j in range(x.shape[0]):
        v = load(x, j)
        value = clip(nearest(step * (v - low)), zero, limit)
        wl = load(w, j) * value
        store(level, j, value)
        plain, energy, along = plain + wl, energy + wl * value, along + wl * v
    return plain, energy, along


@jit
def affine(x: Any, w: Any, high: int, span: Any, absolute: bool, level: Any, found: Any) -> None:
    """Fill found [4, LANES]: scale, low (<= 0), and the winning candidate's step and low: its codes are step (x - low).

    span: float32 [3], the first candidate, the distance between two, and their number less one. level: room, [n, LANES].
    """
    zero, one, limit = fill(ZERO), fill(ONE), fill(np.float32(high))
    low = top = load(x, 0)
    sum_w, sum_x = zero, zero
    for j in range(x.shape[0]):
        v, weight = load(x, j), load(w, j)
        low, top = where(v < low, v, low), where(v > top, v, top)
        sum_w, sum_x = sum_w + weight, sum_x + weight * v
    low = where(low > zero, zero, low)
    live = top > low
    chosen = where(live, limit / where(live, top - low, one), zero)
    scale, base = where(live, one / where(live, chosen, one), zero), low
    _affine_sums(x, w, chosen, low, limit, level)
    best = where(live, _loss(x, w, level, scale, low, absolute), fill(-ONE))
    for k in range(np.int64(span[2]) + 1):
        step = fill((span[0] + span[1] * np.float32(k)) + np.float32(high)) / where(live, top - low, one)
        plain, energy, along = _affine_sums(x, w, step, low, limit, level)
        det = sum_w * energy - plain * plain
        usable = det > zero
        safe = where(usable, det, one)
        new_low = (energy * sum_x - plain * along) / safe
        new = where(new_low > zero, along / energy, (sum_w * along - sum_x * plain) / safe)
        new_low = where(new_low > zero, zero, new_low)
        error = _loss(x, w, level, new, new_low, absolute)
        better = usable & (error < best)
        best, chosen, base = where(better, error, best), where(better, step, chosen), where(better, low, base)
        scale, low = where(better, new, scale), where(better, new_low, low)
    store(found, 0, scale)
    store(found, 1, low)
    store(found, 2, chosen)
    store(found, 3, base)
