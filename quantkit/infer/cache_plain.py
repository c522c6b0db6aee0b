"""A key-value cache without pages, which the others are compared with: one stretch of memory per sequence and layer, doubled when full."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.infer.attention import Look, Pages
from quantkit.infer.cache import Held, PagedCache, Segment

FIRST = 64


class PlainCache(PagedCache):
    """`Held.extra`: float32 [2, layers, heads, room, size]. Nothing is shared, no prefix is found again."""

    def open(self, ids: Sequence[int] = ()) -> Held:
        """Return a new, empty sequence."""
        return Held()

    def remember(self, held: Held, ids: Sequence[int]) -> None:
        """Nothing is remembered."""

    def fork(self, held: Held) -> Held:
        """Return a copy."""
        return Held([], held.length, None if held.extra is None else held.extra.clone())

    def extend(self, held: Held, count: int) -> Segment:
        """Make room for `count` more tokens."""
        need, room = held.length + count, 0 if held.extra is None else held.extra.shape[3]
        if need > room:
            grown = torch.zeros(2, self.count, self.heads, max(need, 2 * room, FIRST), self.size)
            if held.extra is not None:
                grown[:, :, :, : held.length] = held.extra[:, :, :, : held.length]
            held.extra = grown
        return Segment(held, held.length, count)

    def truncate(self, held: Held, length: int) -> None:
        """Forget the tokens from `length` on."""
        held.length = length
        if not length:
            held.extra = None

    def attend(self, layer: int, segment: Segment, q: Tensor, k: Tensor, v: Tensor, look: Look) -> Tensor:  # fmt: skip
        """Write a segment's keys and values and return its rows' attention output, float32 [heads, rows, size]."""
        store, end = segment.held.extra[:, layer], segment.start + segment.count
        store[0, :, segment.start : end], store[1, :, segment.start : end] = k, v
        if self.whole is not None:
            return self.whole(q, store[0, :, :end], store[1, :, :end], segment.start, look)
        pages = Pages(store[0, :, :end].transpose(1, 2)[None].contiguous(), store[1, None, :, :end].contiguous())
        return self.run(q, pages, torch.zeros(1, dtype=torch.int64), (0, end), segment.start, look)

    @classmethod
    def bytes_for(cls, layers: int, heads: int, size: int, tokens: int) -> int:
        """Return the bytes that so many tokens of one sequence take at least."""
        return tokens * layers * heads * size * 2 * 4
