"""The searches behind ggml's block types: a scale (and a minimum) for a few neighbouring weights.

Tensors are float32 [n, N]: n elements of N blocks side by side, so each step is one operation over all blocks and
every sum runs over the elements in their order. That order is the format's: another one changes near ties, and with
them bytes. Comparisons that accept a candidate are strict, the first of equals stays.

Source: the search procedures of ggml's quantizer (ggml-quants.c), which its files' readers never see: any search
writes valid blocks, this one writes llama-quantize's.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

EPSILON = 1e-15
SWEEPS = 5


def nearest(value: Tensor) -> Tensor:
    """Return float32 values rounded half-even, as ggml does: by adding 1.5 * 2^23 and keeping the low 23 bits.

    Beyond +-4194303 the bits wrap, and infinity becomes the lowest value; a block of subnormal weights gets there.
    """
    return (((value + 12582912.0).view(torch.int32) & 0x7FFFFF) - 0x400000).to(torch.float32)


def lowest(x: Tensor) -> Tensor:
    """Return the least element, the first of equals (0 and -0 are equal, and end up in different bytes); [N]."""
    best = x[0]
    for value in x[1:]:
        best = torch.where(value < best, value, best)
    return best


def ordered_sum(terms: Tensor) -> Tensor:
    """Return the float32 sum over dimension 0, one element after the other; [N]."""
    total = torch.zeros_like(terms[0])
    for term in terms:
        total = total + term
    return total


def signed_absmax(x: Tensor) -> Tensor:
    """Return the element of largest magnitude with its sign, the first of equals; [N]."""
    best, size = torch.zeros_like(x[0]), torch.zeros_like(x[0])
    for value in x:
        better = value.abs() > size
        size = torch.where(better, value.abs(), size)
        best = torch.where(better, value, best)
    return best


def divide(a: Tensor | float, b: Tensor) -> Tensor:
    """Return a / b rounded once: for a number a, torch multiplies by the reciprocal instead, which is not that."""
    return (a if isinstance(a, Tensor) else torch.full_like(b, a)) / b


def safe_divide(a: Tensor | float, b: Tensor) -> Tensor:
    """Return a / b rounded once, and 0 where b is 0."""
    return torch.where(b == 0, 0.0, divide(a, torch.where(b == 0, 1.0, b)))


def root(value: Tensor) -> Tensor:
    """Return the float32 square root rounded once, which torch's own is not on every machine."""
    return value.to(torch.float64).sqrt().to(torch.float32)


def symmetric(x: Tensor, weight: Tensor, high: int) -> tuple[Tensor, Tensor]:
    """Return (scale [N], codes 0..2*high-1 [n, N]) for values scale * (code - high): 19 steps around high / extreme."""
    extreme = signed_absmax(x)
    dead = extreme.abs() < EPSILON
    extreme = torch.where(dead, 1.0, extreme)
    wx = weight * x

    def sums(step: Tensor) -> tuple[Tensor, Tensor]:
        level = nearest(step * x).clamp(-high, high - 1)
        return ordered_sum(wx * level), ordered_sum((weight * level) * level)

    chosen = divide(float(-high), extreme)
    along, energy = sums(chosen)
    scale = safe_divide(along, energy)
    best = scale * along
    for k in range(-9, 10):
        if k == 0:
            continue
        step = divide(-(high + torch.tensor(0.1) * k), extreme)
        along, energy = sums(step)
        better = (energy > 0) & (along * along > best * energy)
        chosen = torch.where(better, step, chosen)
        scale = torch.where(better, safe_divide(along, energy), scale)
        best = torch.where(better, scale * along, best)
    codes = nearest(chosen * x).clamp(-high, high - 1) + high
    return torch.where(dead, 0.0, scale), torch.where(dead, 0.0, codes)


def _move(
    level: Tensor, x: Tensor, weight: Tensor, limits: tuple[int | None, int], least: float = -torch.inf
) -> tuple[Tensor, Tensor, Tensor]:
    """Move single levels [n, N] within `limits` in up to five sweeps; return them and the sums of (w x) l and (w l) l.

    least: what the second sum must exceed without an element's own part for the element to be tried.
    """
    levels = list(level)
    along = ordered_sum(torch.stack([(w * v) * value for w, v, value in zip(weight, x, levels, strict=True)]))
    energy = ordered_sum(torch.stack([(w * value) * value for w, value in zip(weight, levels, strict=True)]))
    for _ in range(SWEEPS):
        moved = False
        for j, (w, v) in enumerate(zip(weight, x, strict=True)):
            a, b = along - (w * v) * levels[j], energy - (w * levels[j]) * levels[j]
            new = nearest(safe_divide(v * b, torch.where(a > 0, a, 0.0))).clamp(*limits)
            c, d = a + (w * v) * new, b + (w * new) * new
            free = (a > 0) & (b > least) & (new != levels[j])
            better = free & (d > 0) & ((c * c) * energy > (along * along) * d)
            levels[j] = torch.where(better, new, levels[j])
            along, energy = torch.where(better, c, along), torch.where(better, d, energy)
            moved |= bool(better.any())
        if not moved:
            break
    return torch.stack(levels), along, energy


def symmetric_refined(x: Tensor, high: int) -> tuple[Tensor, Tensor]:
    """Return (scale [N], codes 0..2*high-1 [n, N]): one rounding, then up to five sweeps that move single codes."""
    weight = x * x
    extreme = signed_absmax(x)
    dead = extreme.abs() < EPSILON
    step = divide(float(-high), torch.where(dead, 1.0, extreme))
    levels, along, energy = _move(nearest(step * x).clamp(-high, high - 1), x, weight, (-high, high - 1))
    scale = torch.where(energy > 0, safe_divide(along, energy), 0.0)
    return torch.where(dead, 0.0, scale), torch.where(dead, 0.0, levels + high)


def affine(x: Tensor, weight: Tensor, high: int, span: tuple[float, float, int], absolute: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return (scale, minimum >= 0 [N], codes 0..high [n, N]) for values scale * code - minimum.

    span = (first, step, count): count + 1 candidates for the step between levels, each refitted by least squares.
    absolute: compare weighted absolute errors instead of squared ones. A candidate that wins moves the minimum from
    which the next ones are counted.
    """
    low, top = lowest(x), x.amax(0)
    sum_w, sum_x = ordered_sum(weight), ordered_sum(weight * x)
    low = torch.where(low > 0, 0.0, low)
    flat = top <= low

    def loss(scale: Tensor, low: Tensor, level: Tensor) -> Tensor:
        rest = (scale * level + low) - x
        return ordered_sum(weight * (rest.abs() if absolute else rest * rest))

    def levels(step: Tensor, low: Tensor) -> Tensor:
        return nearest(step * (x - low)).clamp(0, high)

    step = safe_divide(float(high), top - low)
    scale = safe_divide(1.0, step)
    codes = levels(step, low)
    best = torch.where(flat, -1.0, loss(scale, low, codes))
    first, width, count = (torch.tensor(v, dtype=torch.float32) for v in span)
    for k in range(int(count) + 1):
        step = safe_divide((first + width * k) + high, top - low)
        level = levels(step, low)
        sum_l, energy = ordered_sum(weight * level), ordered_sum((weight * level) * level)
        along = ordered_sum((weight * level) * x)
        det = sum_w * energy - sum_l * sum_l
        new_scale = safe_divide(sum_w * along - sum_x * sum_l, det)
        new_low = safe_divide(energy * sum_x - sum_l * along, det)
        above = new_low > 0
        new_low = torch.where(above, 0.0, new_low)
        new_scale = torch.where(above, safe_divide(along, energy), new_scale)
        error = loss(new_scale, new_low, level)
        better = (det > 0) & (error < best)
        codes = torch.where(better, level, codes)
        best, scale, low = (torch.where(better, a, b) for a, b in ((error, best), (new_scale, scale), (new_low, low)))
    return torch.where(flat, 0.0, scale), -low, torch.where(flat, 0.0, codes)


def positive(x: Tensor, weight: Tensor, high: int) -> tuple[Tensor, Tensor]:
    """Return (scale [N], codes 0..high [n, N]) of values that are not negative: nine steps, then single moves."""
    top = x.amax(0).clamp_min(0)
    dead = top < EPSILON
    top = torch.where(dead, 1.0, top)

    def loss(step: Tensor) -> Tensor:
        rest = x - divide(1.0, step) * nearest(step * x).clamp_max(high)
        return ordered_sum((weight * rest) * rest)

    chosen = divide(float(high), top)
    best = loss(chosen)
    for k in range(-4, 5):
        if k == 0:
            continue
        step = divide(torch.tensor(0.1) * k + high, top)
        error = loss(step)
        better = error < best
        best, chosen = torch.where(better, error, best), torch.where(better, step, chosen)
    levels, along, energy = _move(nearest(chosen * x).clamp_max(high), x, weight, (None, high), least=0.0)
    return torch.where(dead, 0.0, safe_divide(along, energy)), torch.where(dead, 0.0, levels)


def nearest_level(value: Tensor, table: tuple[int, ...]) -> Tensor:
    """Return the index of the nearest of ascending integer levels, the upper one of a tie; int64, like `value`."""
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(table)], device=value.device)
    return torch.bucketize(value.contiguous(), middles, right=True)


def on_table(x: Tensor, weight: Tensor, table: tuple[int, ...]) -> Tensor:
    """Return the float scale [N] for values scale * table[code]: fifteen steps around table[0] / extreme."""
    levels = torch.tensor(table, dtype=torch.float32, device=x.device)
    extreme = signed_absmax(x)
    dead = extreme.abs() < EPSILON
    extreme = torch.where(dead, 1.0, extreme)

    def sums(step: Tensor) -> tuple[Tensor, Tensor]:
        level = levels[nearest_level(step * x, table)]
        return ordered_sum((weight * level) * x), ordered_sum((weight * level) * level)

    along, energy = sums(divide(1.0, -extreme / table[0]))
    scale = torch.where(energy > 0, safe_divide(along, energy), 0.0)
    best = scale * along
    for k in range(-7, 8):
        along, energy = sums(divide(k + float(table[0]), extreme))
        better = (energy > 0) & (along * along > best * energy)
        scale = torch.where(better, safe_divide(along, energy), scale)
        best = torch.where(better, scale * along, best)
    return torch.where(dead, 0.0, scale)
