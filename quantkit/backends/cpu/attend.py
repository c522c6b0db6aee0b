"""Attention over pages on the CPU, each query row by itself: the same numbers whatever else is in the batch.

Keys lie as [page, key-value head, head size, tokens], so that a page's scores are vectors of tokens; values as [page, key-value head,
tokens, head size], so that outputs are vectors of the head. Scores of one page at a time, softmax online: no score matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.backends.cpu._encode import in_chunks
from quantkit.backends.cpu._jit import jit
from quantkit.backends.cpu._math import exp
from quantkit.backends.cpu._vector import LANES, fill, half_at, load_at, multiply_add, pair, store_at

CHUNK_ROWS = 16


@jit
def score_page(q: Any, key: Any, scores: Any) -> None:
    """Fill scores, float32 [tokens], with the products of q, [size], and a page's keys of one head, [size, tokens]."""
    for j in range(scores.size):
        scores[j] = np.float32(0.0)
    for d in range(q.size):
        x = q[d]
        for j in range(scores.size):
            scores[j] += x * np.float32(key[d, j])


@jit
def fold_page(scores: Any, first: int, last: int, softcap: Any, value: Any, weights: Any, most: Any, total: Any, out: Any) -> Any:
    """Add a page's tokens first..last to a running softmax, and return its largest score and its sum.

    scores, [tokens], are overwritten; value: [tokens, size], each token's times weights[token]; out: [size].
    """
    top = most
    for j in range(first, last):
        if softcap > np.float32(0.0):
            scores[j] = softcap * np.float32(math.tanh(scores[j] / softcap))
        top = max(top, scores[j])
    if top > most:
        shrink = np.float32(math.exp(most - top))
        total *= shrink
        for d in range(out.size):
            out[d] *= shrink
    for j in range(first, last):
        scores[j] = np.float32(math.exp(scores[j] - top))
    for j in range(first, last):
        total += scores[j]
        weight = scores[j] * weights[j]
        for d in range(out.size):
            out[d] += weight * np.float32(value[j, d])
    return top, total


@jit
def score_16(q: Any, keys: Any, part: int, scores: Any, size: int) -> None:
    """Fill scores[:16] with the products of q, [size], and 16 tokens' keys, [size, 16], from keys[part] on; two rows make a vector."""
    found, d = fill(np.float32(0.0)), 0
    while d + 2 <= size:
        found = multiply_add(pair(q[d], q[d + 1]), load_at(keys, part + 16 * d), found)
        d += 2
    store_at(scores, 0, found)
    for j in range(16):
        scores[j] += scores[16 + j]
        if d < size:
            scores[j] += q[d] * keys[part + 16 * d + j]


@jit
def fold_16(scores: Any, first: int, last: int, softcap: Any, values: Any, part: int, most: Any, whole: Any, out: Any, size: int) -> Any:
    """As `fold_page`, for 16 tokens' values, [16, size], which begin at values[part]."""
    top = most
    for j in range(first, last):
        if softcap > np.float32(0.0):
            scores[j] = softcap * np.float32(math.tanh(scores[j] / softcap))
        top = max(top, scores[j])
    scores[16] = most if top > most else top
    store_at(scores, 0, exp(load_at(scores, 0) - fill(top)))
    shrink = scores[16]
    whole *= shrink
    for j in range(first, last):
        whole += scores[j]
    d, again = 0, fill(shrink)
    while d + LANES <= size:
        found = again * load_at(out, d)
        for j in range(first, last):
            found = multiply_add(fill(scores[j]), load_at(values, part + j * size + d), found)
        store_at(out, d, found)
        d += LANES
    while d < size:
        some = shrink * out[d]
        for j in range(first, last):
            some += scores[j] * values[part + j * size + d]
        out[d] = some
        d += 1
    return top, whole


@jit
def _rows(
    q: Any, keys: Any, values: Any, scales: Any, table: Any, begin: int, end: int, position: int, window: int,
    scale: Any, softcap: Any, most: Any, total: Any, out: Any, first: int, last: int,
) -> None:  # fmt: skip
    """Add the tokens begin..end, which the pages of `table` hold from token 0 on, to the running softmax of rows first..last.

    q: float32 [heads, rows, size]; row t is token position + t and sees tokens up to itself, `window` of them if that is not 0.
    most, total: float32 [heads, rows]; out: float32 [heads, rows, size]. scales: for integer pages the float16 scales of keys
    [page, head, size] and of values [page, head, tokens], flat, and the second bytes of keys [page, head, wide, tokens] with their
    channels [page, head, wide]; empty for float pages.
    """
    key_scale, value_scale, second, wide = scales
    heads, size, kv_heads, tokens = q.shape[0], q.shape[2], keys.shape[1], keys.shape[3]
    repeat = heads // kv_heads
    scores, scaled, weights = np.empty(tokens, np.float32), np.empty(size, np.float32), np.ones(tokens, np.float32)
    for t in range(first, last):
        here = position + t
        low = max(begin, here - window + 1) if window else begin
        high = min(end, here + 1)
        if high <= low:
            continue
        for p in range(low // tokens, (high - 1) // tokens + 1):
            page = table[p]
            a, b = max(low - p * tokens, 0), min(high - p * tokens, tokens)
            for h in range(heads):
                kv = h // repeat
                key, value = keys[page, kv], values[page, kv]
                for d in range(size):
                    scaled[d] = q[h, t, d] * scale
                if key_scale.size:
                    for d in range(size):
                        scaled[d] *= half_at(key_scale, (page * kv_heads + kv) * size + d)
                score_page(scaled, key, scores)
                for c in range(wide.shape[2]):
                    x = scaled[wide[page, kv, c]] / np.float32(256.0)
                    for j in range(tokens):
                        scores[j] += x * np.float32(second[page, kv, c, j])
                if value_scale.size:
                    for j in range(tokens):
                        weights[j] = half_at(value_scale, (page * kv_heads + kv) * tokens + j)
                most[h, t], total[h, t] = fold_page(scores, a, b, softcap, value, weights, most[h, t], total[h, t], out[h, t])


@jit
def _write(keys: Any, values: Any, table: Any, start: int, k: Any, v: Any) -> None:
    """Put new keys and values, float32 [heads, rows, size], into their pages from token `start` on."""
    tokens = keys.shape[3]
    for t in range(k.shape[1]):
        page, slot = table[(start + t) // tokens], (start + t) % tokens
        for h in range(k.shape[0]):
            for d in range(k.shape[2]):
                keys[page, h, d, slot] = k[h, t, d]
                values[page, h, slot, d] = v[h, t, d]


@jit
def _divide(out: Any, total: Any) -> None:
    """Divide each row of out, float32 [heads, rows, size], by its sum."""
    for h in range(out.shape[0]):
        for t in range(out.shape[1]):
            inverse = np.float32(1.0) / total[h, t]
            for d in range(out.shape[2]):
                out[h, t, d] *= inverse


def _scales(pages: Any) -> tuple[Any, ...]:
    """Return what `_rows` wants beside integer pages; pages: None for float ones."""
    halves = (None, None) if pages is None else (pages.key_scale, pages.value_scale)
    empty = np.empty(0, np.uint16)
    found = [empty if part is None else part.view(torch.int16).numpy().view(np.uint16).reshape(-1) for part in halves]
    if pages is None or pages.key_second is None:
        return (*found, np.empty((0, 0, 0, 0), np.int8), np.empty((0, 0, 0), np.int16))
    return (*found, pages.key_second.numpy(), pages.key_wide.numpy())


def paged_step(threads: int) -> Callable[..., Tensor]:
    """Return the kernel of a whole step over float pages: write, attend, divide; arguments as in `PagedCache.attend`."""
    none = _scales(None)

    def run(q: Tensor, k: Tensor, v: Tensor, pages: Any, table: Any, start: int, look: Any) -> Tensor:
        keys, values, rows = pages.keys.numpy(), pages.values.numpy(), q.numpy()
        _write(keys, values, table, start, k.numpy(), v.numpy())
        heads, count, size = rows.shape
        most, total = np.full((heads, count), -np.inf, np.float32), np.zeros((heads, count), np.float32)
        out = np.zeros((heads, count, size), np.float32)
        fixed = (
            rows, keys, values, none, table, 0, start + count, start, look.window, np.float32(look.scale),
            np.float32(look.softcap), most, total, out,
        )  # fmt: skip
        if count <= CHUNK_ROWS:
            _rows(*fixed, 0, count)
        else:
            in_chunks(threads, lambda at: _rows(*fixed, at, min(at + CHUNK_ROWS, count)), range(0, count, CHUNK_ROWS))
        _divide(out, total)
        return torch.from_numpy(out)

    return run


def attend(threads: int) -> Callable[..., None]:
    """Return the kernel for `threads` threads; its arguments are those of `quantkit.infer.attention.attend_reference`."""

    def run(q: Tensor, pages: Any, table: Tensor, span: tuple[int, int], position: int, look: Any, state: Any) -> None:  # fmt: skip
        fixed = (
            np.ascontiguousarray(q.numpy()), pages.keys.numpy(), pages.values.numpy(), _scales(pages), table.numpy(), *span, position,
            look.window, np.float32(look.scale), np.float32(look.softcap), state.most.numpy(), state.total.numpy(), state.out.numpy(),
        )  # fmt: skip
        rows = q.shape[1]
        in_chunks(threads, lambda at: _rows(*fixed, at, min(at + CHUNK_ROWS, rows)), range(0, rows, CHUNK_ROWS))

    return run
