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
from quantkit.backends.cpu._vector import half_at

CHUNK_ROWS = 16


@jit
def _rows(
    q: Any, keys: Any, values: Any, key_scale: Any, value_scale: Any, table: Any, begin: int, end: int, position: int, window: int,
    scale: Any, softcap: Any, most: Any, total: Any, out: Any, first: int, last: int,
) -> None:  # fmt: skip
    """Add the tokens begin..end, which the pages of `table` hold from token 0 on, to the running softmax of rows first..last.

    q: float32 [heads, rows, size]; row t is token position + t and sees tokens up to itself, `window` of them if that is not 0.
    most, total: float32 [heads, rows]; out: float32 [heads, rows, size]. Integer pages have float16 scales, flat: keys
    [page, head, size], values [page, head, tokens].
    """
    heads, size, kv_heads, tokens = q.shape[0], q.shape[2], keys.shape[1], keys.shape[3]
    repeat = heads // kv_heads
    scores, scaled = np.empty(tokens, np.float32), np.empty(size, np.float32)
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
                for j in range(tokens):
                    scores[j] = np.float32(0.0)
                for d in range(size):
                    x = scaled[d]
                    for j in range(tokens):
                        scores[j] += x * np.float32(key[d, j])
                top = most[h, t]
                for j in range(a, b):
                    if softcap > np.float32(0.0):
                        scores[j] = softcap * np.float32(math.tanh(scores[j] / softcap))
                    top = max(top, scores[j])
                if top > most[h, t]:
                    shrink = np.float32(math.exp(most[h, t] - top))
                    most[h, t] = top
                    total[h, t] *= shrink
                    for d in range(size):
                        out[h, t, d] *= shrink
                for j in range(a, b):
                    weight = np.float32(math.exp(scores[j] - top))
                    total[h, t] += weight
                    if value_scale.size:
                        weight *= half_at(value_scale, (page * kv_heads + kv) * tokens + j)
                    for d in range(size):
                        out[h, t, d] += weight * np.float32(value[j, d])


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


def paged_step(threads: int) -> Callable[..., Tensor]:
    """Return the kernel of a whole step over float pages: write, attend, divide; arguments as in `PagedCache.attend`."""
    none = np.empty(0, np.uint16)

    def run(q: Tensor, k: Tensor, v: Tensor, pages: Any, table: Any, start: int, look: Any) -> Tensor:
        keys, values, rows = pages.keys.numpy(), pages.values.numpy(), q.numpy()
        _write(keys, values, table, start, k.numpy(), v.numpy())
        heads, count, size = rows.shape
        most, total = np.full((heads, count), -np.inf, np.float32), np.zeros((heads, count), np.float32)
        out = np.zeros((heads, count, size), np.float32)
        fixed = (
            rows, keys, values, none, none, table, 0, start + count, start, look.window, np.float32(look.scale),
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
        none = np.empty(0, np.uint16)
        halves = (pages.key_scale, pages.value_scale)
        scales = [none if part is None else part.view(torch.int16).numpy().view(np.uint16).reshape(-1) for part in halves]
        fixed = (
            np.ascontiguousarray(q.numpy()), pages.keys.numpy(), pages.values.numpy(), *scales, table.numpy(), *span, position, look.window,
            np.float32(look.scale), np.float32(look.softcap), state.most.numpy(), state.total.numpy(), state.out.numpy(),
        )  # fmt: skip
        rows = q.shape[1]
        in_chunks(threads, lambda at: _rows(*fixed, at, min(at + CHUNK_ROWS, rows)), range(0, rows, CHUNK_ROWS))

    return run
