"""A key-value cache of pages: a free list, a table of pages per sequence, pages that several sequences share.

Pages hold TOKENS tokens of one layer; the same page number is used in every layer. A page is shared by counting references (a fork, a
prompt prefix found again by its hash), copied when one of its holders writes into it, and free again when nobody holds it.
The pool grows as it is needed; nothing is reserved. Whole prompt pages stay in an index, least recently used first to go.

Source: Kwon et al. 2023, "PagedAttention".
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.infer.attention import Look, Pages, State

TOKENS = 16


@dataclass
class Held:
    """One sequence in the cache: its pages, in order, and how many tokens they hold. extra: what a kind of cache keeps beside them."""

    pages: list[int] = field(default_factory=list)
    length: int = 0
    extra: Any = None


@dataclass(frozen=True)
class Segment:
    """Rows of one sequence in a packed step: its next `count` tokens, the first at position `start`."""

    held: Held
    start: int
    count: int

    @cached_property
    def table(self) -> Any:
        """The sequence's pages, int64, once for all layers."""
        return np.array(self.held.pages, np.int64)


class Pool:
    """Pages of all layers, with their reference counts; grows by a quarter, at least by LEAST pages."""

    LEAST = 16

    def __init__(self, layers: int, make: Callable[[int], Pages]) -> None:
        """make(count) returns one layer's pages for so many."""
        self.make, self.layers = make, [make(0) for _ in range(layers)]
        self.references: list[int] = []
        self.free: list[int] = []

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return len(self.references) - len(self.free)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that somebody holds."""
        if not self.references:
            return 0
        return self.used * sum(part.nbytes for pages in self.layers for part in pages.parts()) // len(self.references)

    def take(self) -> int:
        """Return a page of one's own."""
        if not self.free:
            count = len(self.references)
            more = max(self.LEAST, count // 4)
            for index, pages in enumerate(self.layers):
                grown = self.make(count + more)
                for old, new in zip(pages.parts(), grown.parts(), strict=True):
                    new[:count] = old
                self.layers[index] = grown
            self.references += [0] * more
            self.free += range(count + more - 1, count - 1, -1)
        page = self.free.pop()
        self.references[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Count one more holder."""
        self.references[page] += 1

    def drop(self, page: int) -> None:
        """Count one holder less; a page without one is free."""
        self.references[page] -= 1
        if not self.references[page]:
            self.free.append(page)

    def copy(self, page: int) -> int:
        """Return a page of one's own with the content of a shared one, which is dropped."""
        own = self.take()
        for pages in self.layers:
            for part in pages.parts():
                part[own] = part[page]
        self.drop(page)
        return own


class PagedCache:
    """Float pages of 16 tokens. attend: the operation of `infer.attention.attend_reference`; whole: attention over gathered keys and values
    instead (`infer.attention.pick_attention`), or None; most: pages that the prefix index may keep."""

    tokens = TOKENS
    crosses_badly = False  # whether a rollback over a page's end loses what the page was made from

    def __init__(self, layers: int, heads: int, size: int, attend: Callable[..., None], whole: Callable[..., Tensor] | None = None,
                 most: int = 4096) -> None:  # fmt: skip
        self.heads, self.size, self.count, self.operation, self.whole, self.most = heads, size, layers, attend, whole, most
        self.step: Callable[..., Tensor] | None = None  # a kernel that writes and attends at once
        self.pool = Pool(layers, self._make)
        self.index: OrderedDict[bytes, int] = OrderedDict()  # hash of all tokens up to a page's end -> the page
        self.hits = 0

    def _make(self, count: int) -> Pages:
        return Pages(torch.zeros(count, self.heads, self.size, self.tokens), torch.zeros(count, self.heads, self.tokens, self.size))

    def open(self, ids: Sequence[int] = ()) -> Held:
        """Return a new sequence; whole pages of its prompt that are in the index are in it already (never its last token)."""
        held = Held()
        for key in self._hashes(ids[:-1] if ids else ids):
            page = self.index.get(key)
            if page is None:
                break
            self.index.move_to_end(key)
            self.pool.hold(page)
            held.pages.append(page)
            held.length += self.tokens
            self.hits += self.tokens
        return held

    def _hashes(self, ids: Sequence[int]) -> list[bytes]:
        digest, keys = hashlib.sha256(), []
        for start in range(0, len(ids) - self.tokens + 1, self.tokens):
            digest.update(torch.tensor(ids[start : start + self.tokens]).numpy().tobytes())
            keys.append(digest.copy().digest())
        return keys

    def remember(self, held: Held, ids: Sequence[int]) -> None:
        """Put the whole pages of a prompt that has been computed into the index."""
        for key, page in zip(self._hashes(ids[: held.length]), held.pages, strict=False):
            if key not in self.index:
                self.pool.hold(page)
                self.index[key] = page
        while len(self.index) > self.most:
            self.pool.drop(self.index.popitem(last=False)[1])

    def fork(self, held: Held) -> Held:
        """Return a second sequence with the same tokens, sharing all pages."""
        for page in held.pages:
            self.pool.hold(page)
        return Held(list(held.pages), held.length)

    def extend(self, held: Held, count: int) -> Segment:
        """Make room for `count` more tokens, in pages of the sequence's own, and return their segment; `commit` counts them."""
        at = held.length // self.tokens
        if at < len(held.pages) and self.pool.references[held.pages[at]] > 1:
            held.pages[at] = self.pool.copy(held.pages[at])
        while len(held.pages) * self.tokens < held.length + count:
            held.pages.append(self.pool.take())
        return Segment(held, held.length, count)

    def commit(self, segment: Segment) -> None:
        """Count a segment's tokens: every layer has written them."""
        segment.held.length = segment.start + segment.count

    def truncate(self, held: Held, length: int) -> None:
        """Forget the tokens from `length` on; pages without a token are dropped."""
        keep = -(-length // self.tokens)
        for page in held.pages[keep:]:
            self.pool.drop(page)
        del held.pages[keep:]
        held.length = length

    def close(self, held: Held) -> None:
        """Let go of a sequence."""
        self.truncate(held, 0)

    def clear(self) -> None:
        """Empty the prefix index."""
        while self.index:
            self.pool.drop(self.index.popitem()[1])

    def attend(self, layer: int, segment: Segment, q: Tensor, k: Tensor, v: Tensor, look: Look) -> Tensor:  # fmt: skip
        """Write a segment's keys and values, float32 [heads, rows, size], and return its rows' attention output, alike."""
        pages, held = self.pool.layers[layer], segment.held
        if self.step is not None and self.whole is None:
            return self.step(q, k, v, pages, segment.table, segment.start, look)
        done = 0
        while done < segment.count:
            at = segment.start + done
            page, first = held.pages[at // self.tokens], at % self.tokens
            some = min(self.tokens - first, segment.count - done)
            pages.keys[page, :, :, first : first + some] = k[:, done : done + some].transpose(1, 2)
            pages.values[page, :, first : first + some] = v[:, done : done + some]
            done += some
        table, end = torch.from_numpy(segment.table), segment.start + segment.count
        if self.whole is not None:
            keys = pages.keys[table].permute(1, 0, 3, 2).reshape(self.heads, -1, self.size)[:, :end]
            values = pages.values[table].transpose(0, 1).reshape(self.heads, -1, self.size)[:, :end]
            return self.whole(q, keys, values, segment.start, look)
        return self.run(q, pages, table, (0, end), segment.start, look)

    def run(self, q: Tensor, pages: Pages, table: Tensor, span: tuple[int, int], position: int, look: Look) -> Tensor:  # fmt: skip
        """Return the attention output of rows over pages, float32 [heads, rows, size]."""
        state = State.fresh(q.shape[0], q.shape[1], self.size)
        self.operation(q, pages, table, span, position, look, state)
        return state.result()

    @classmethod
    def bytes_for(cls, layers: int, heads: int, size: int, tokens: int) -> int:
        """Return the bytes that so many tokens of one sequence take."""
        return -(-tokens // cls.tokens) * cls.tokens * layers * heads * size * 2 * 4
