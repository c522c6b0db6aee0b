"""Fields of 2, 3, 4 or 8 bits into words and back on the CPU, one pass over any strides.

Twins of `quantkit.formats._bits.pack_reference` and `unpack_reference`. Columns are taken in tiles, so that a tile's cache lines serve
several words whichever axis is contiguous; tiles run on a pool of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.backends.cpu._encode import in_chunks
from quantkit.backends.cpu._jit import jit

TILE = 64  # columns
SPAN = 1 << 10  # values of a column in one chunk: a multiple of 32, of which a line of bytes holds 64


@jit
def _pack(values: Any, words: Any, order: Any, bits: int, first: int, last: int, left: int, right: int) -> None:
    """Fill words of the fields first..last (multiples of 32, or the end) of columns left..right."""
    mask = np.uint32((1 << bits) - 1)
    for n in range(first, last, 32):
        count = min(32, last - n)
        base = n // 32 * bits
        for m in range(left, right):
            held, fill, w = np.uint64(0), 0, base
            for k in range(count):
                value = np.uint64(np.uint32(values[n + (k & ~7) + order[k & 7], m]) & mask)
                held |= value << np.uint64(fill)
                fill += bits
                if fill >= 32:
                    words[w, m] = np.uint32(held & np.uint64(0xFFFFFFFF))
                    held >>= np.uint64(32)
                    fill -= 32
                    w += 1


@jit
def _pack_four(values: Any, words: Any, order: Any, first: int, last: int, left: int, right: int) -> None:
    """`_pack` for 4 bits: a word is a run of eight."""
    a, b, c, d, e, f, g, h = order
    for n in range(first, last, 8):
        for m in range(left, right):
            low = (values[n + a, m] & 15) | (values[n + b, m] & 15) << 4 | (values[n + c, m] & 15) << 8 | (values[n + d, m] & 15) << 12
            high = (values[n + e, m] & 15) | (values[n + f, m] & 15) << 4 | (values[n + g, m] & 15) << 8 | (values[n + h, m] & 15) << 12
            words[n // 8, m] = np.uint32(low | high << 16)


@jit
def _unpack(words: Any, values: Any, order: Any, bits: int, first: int, last: int, left: int, right: int) -> None:
    """Fill the values first..last of columns left..right."""
    mask = np.uint64((1 << bits) - 1)
    for n in range(first, last, 32):
        count = min(32, last - n)
        base = n // 32 * bits
        for m in range(left, right):
            held, fill, w = np.uint64(0), 0, base
            for k in range(count):
                if fill < bits:
                    held |= np.uint64(words[w, m]) << np.uint64(fill)
                    fill += 32
                    w += 1
                values[n + (k & ~7) + order[k & 7], m] = np.uint8(held & mask)
                held >>= np.uint64(bits)
                fill -= bits


@jit
def _unpack_four(words: Any, values: Any, order: Any, first: int, last: int, left: int, right: int) -> None:
    """`_unpack` for 4 bits."""
    a, b, c, d, e, f, g, h = order
    for n in range(first, last, 8):
        for m in range(left, right):
            word = words[n // 8, m]
            values[n + a, m], values[n + b, m] = np.uint8(word & 15), np.uint8(word >> 4 & 15)
            values[n + c, m], values[n + d, m] = np.uint8(word >> 8 & 15), np.uint8(word >> 12 & 15)
            values[n + e, m], values[n + f, m] = np.uint8(word >> 16 & 15), np.uint8(word >> 20 & 15)
            values[n + g, m], values[n + h, m] = np.uint8(word >> 24 & 15), np.uint8(word >> 28)


def _run(threads: int, four: Any, other: Any, source: Any, target: Any, bits: int, order: Sequence[int], n: int, m: int) -> None:
    tiles = [(a, min(a + SPAN, n), b, min(b + TILE, m)) for b in range(0, m, TILE) for a in range(0, n, SPAN)]
    if bits == 4:
        places = tuple(int(place) for place in order)
        in_chunks(threads, lambda tile: four(source, target, places, *tile), tiles)
    else:
        in_chunks(threads, lambda tile: other(source, target, np.array(order), bits, *tile), tiles)


def pack_fields(threads: int) -> Callable[..., Tensor]:
    """Return the kernel for `threads` threads; its arguments and results are those of `pack_reference`."""

    def run(values: Tensor, bits: int, order: Sequence[int], last: bool) -> Tensor:
        n, m = values.shape
        words = np.empty((m, n * bits // 32) if last else (n * bits // 32, m), np.uint32)
        _run(threads, _pack_four, _pack, values.numpy(), words.T if last else words, bits, order, n, m)
        return torch.from_numpy(words.view(np.int32))

    return run


def unpack_fields(threads: int) -> Callable[..., Tensor]:
    """Return the kernel for `threads` threads; its arguments and results are those of `unpack_reference`."""

    def run(words: Tensor, bits: int, order: Sequence[int], last: bool) -> Tensor:
        n, m = words.shape[0] * 32 // bits, words.shape[1]
        values = np.empty((m, n) if last else (n, m), np.uint8)
        _run(threads, _unpack_four, _unpack, words.numpy().view(np.uint32), values.T if last else values, bits, order, n, m)
        return torch.from_numpy(values)

    return run
