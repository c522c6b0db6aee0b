"""Pages of 8 bits: keys per channel over a page of 64 tokens, values per token; the last, unfinished page stays in float32.

A bias on keys, as in Qwen 2, is some hundred times the rest in a few channels of a head, and the rotary embedding turns it, so that no
offset takes it away (nor does bfloat16 hold it well enough: the tail is float32). The channels of a head with the largest scales therefore
hold 16 bits: a second byte, 1/256 of the first.

A row always sees the tokens of its own page as they were and those of earlier pages rounded, whether it comes alone or in a
chunk: a chunk is cut where a page ends. So a prompt in one piece and token by token give the same numbers.

Source: Liu et al. 2024, "KIVI" (keys per channel, values per token, a residual in full precision).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.infer.attention import Look, Pages, State, whole_keys
from quantkit.infer.cache import Held, PagedCache, Segment

UNIT = 64  # four pages of 16 with one scale
HIGH = 127.0
LEAST = 2.0**-24  # the smallest scale that float16 holds
SECOND = 256.0  # steps of the second byte in one of the first


def wide_channels(size: int) -> int:
    """Return how many channels of a head hold 16 bits: a rotary pair for each 64."""
    return 2 * max(size // 64, 1)


class Int8Cache(PagedCache):
    """Integer pages of 64 tokens and a tail of at most 64 per sequence: `Held.extra`, float32 [2, layers, heads, 64, size]."""

    tokens = UNIT
    crosses_badly = True

    def _make(self, count: int) -> Pages:
        keys = torch.zeros(count, self.heads, self.size, self.tokens, dtype=torch.int8)
        values = torch.zeros(count, self.heads, self.tokens, self.size, dtype=torch.int8)
        scales = (torch.zeros(count, self.heads, width, dtype=torch.float16) for width in (self.size, self.tokens))
        wide = wide_channels(self.size)
        second = torch.zeros(count, self.heads, wide, self.tokens, dtype=torch.int8)
        key_scale, value_scale = scales
        return Pages(keys, values, key_scale, value_scale, second, torch.zeros(count, self.heads, wide, dtype=torch.int16))

    def _tail(self, held: Held) -> Tensor:
        if held.extra is None:
            held.extra = torch.zeros(2, self.count, self.heads, self.tokens, self.size, dtype=torch.float32)
        tail: Tensor = held.extra
        return tail

    def fork(self, held: Held) -> Held:
        """Return a second sequence with the same tokens, sharing the finished pages."""
        other = super().fork(held)
        other.extra = None if held.extra is None else held.extra.clone()
        return other

    def extend(self, held: Held, count: int) -> Segment:
        """Make room for `count` more tokens; a page is needed for each whole 64."""
        self._tail(held)
        while len(held.pages) < (held.length + count) // self.tokens:
            held.pages.append(self.pool.take())
        return Segment(held, held.length, count)

    def commit(self, segment: Segment) -> None:
        """Count a segment's tokens; a tail whose page is finished in every layer is let go."""
        super().commit(segment)
        if segment.held.length % self.tokens == 0:
            segment.held.extra = None

    def truncate(self, held: Held, length: int) -> None:
        """Forget the tokens from `length` on; inside a finished page they come back as it holds them."""
        keep = length // self.tokens
        if length % self.tokens and held.length // self.tokens > keep:
            for layer, pages in enumerate(self.pool.layers):
                keys, values = _decode(pages, held.pages[keep])
                self._tail(held)[0, layer], self._tail(held)[1, layer] = keys.transpose(1, 2), values
        for page in held.pages[keep:]:
            self.pool.drop(page)
        del held.pages[keep:]
        held.length = length

    def attend(self, layer: int, segment: Segment, q: Tensor, k: Tensor, v: Tensor, look: Look) -> Tensor:  # fmt: skip
        """Write a segment's keys and values and return its rows' attention output, float32 [heads, rows, size]."""
        pages, tail = self.pool.layers[layer], self._tail(segment.held)[:, layer]
        table, parts, done = torch.from_numpy(segment.table), [], 0
        while done < segment.count:
            at = segment.start + done
            first = at % self.tokens
            some = min(self.tokens - first, segment.count - done)
            rows = slice(done, done + some)
            tail[0, :, first : first + some], tail[1, :, first : first + some] = k[:, rows], v[:, rows]
            state = State.fresh(q.shape[0], some, self.size)
            if at >= self.tokens and self.whole is None:
                self.operation(q[:, rows], pages, table, (0, at - first), at, look, state)
            own = Pages(tail[0].float().transpose(1, 2)[None].contiguous(), tail[1].float()[None])
            if self.whole is None:
                self.operation(q[:, rows], own, torch.zeros(1, dtype=torch.int64), (0, first + some), first, look, state)
            if self.whole is not None:
                parts.append(self._whole(pages, table[: at // self.tokens], own, q[:, rows], at, look))
            else:
                parts.append(state.result())
            done += some
            if first + some == self.tokens:
                _encode(pages, segment.held.pages[at // self.tokens], tail)
        return torch.cat(parts, 1)

    def _whole(self, pages: Pages, table: Tensor, own: Pages, q: Tensor, at: int, look: Look) -> Tensor:
        """Gather finished pages and the tail for attention that wants them in one piece."""
        assert self.whole is not None
        keys, values = [], []
        for page in table.tolist():
            key, value = _decode(pages, page)
            keys.append(key.transpose(1, 2))
            values.append(value)
        some = at % self.tokens + q.shape[1]
        keys.append(own.keys[0].transpose(1, 2)[:, :some])
        values.append(own.values[0][:, :some])
        return self.whole(q, torch.cat(keys, 1), torch.cat(values, 1), at, look)

    @classmethod
    def bytes_for(cls, layers: int, heads: int, size: int, tokens: int) -> int:
        """Return the bytes that so many tokens of one sequence take."""
        page = heads * (2 * size * cls.tokens + 2 * size + 2 * cls.tokens + wide_channels(size) * (cls.tokens + 2))
        return layers * (tokens // cls.tokens * page + (heads * size * cls.tokens * 2 * 4 if tokens % cls.tokens else 0))


def _encode(pages: Pages, page: int, tail: Tensor) -> None:
    """Round a full tail, float [2, heads, tokens, size], into a page."""
    assert pages.key_scale is not None and pages.value_scale is not None
    keys, values = tail[0].float().transpose(1, 2), tail[1].float()
    for part, target, scales, axis in ((keys, pages.keys, pages.key_scale, 2), (values, pages.values, pages.value_scale, 2)):
        scale = (part.abs().amax(axis) / HIGH).clamp_min(LEAST).to(torch.float16)
        target[page] = (part / scale.float()[..., None]).round().clamp(-HIGH, HIGH).to(torch.int8)
        scales[page] = scale
    if pages.key_second is not None and pages.key_wide is not None:
        steps = pages.key_scale[page].float()
        wide = steps.topk(pages.key_wide.shape[2], 1).indices
        left = keys.gather(1, _along(wide, keys)) / steps.gather(1, wide)[..., None] - pages.keys[page].gather(1, _along(wide, keys))
        pages.key_second[page] = (SECOND * left).round().clamp(-HIGH - 1, HIGH).to(torch.int8)
        pages.key_wide[page] = wide.to(torch.int16)


def _along(wide: Tensor, keys: Tensor) -> Tensor:
    """Return channels, int64 [heads, wide], as an index of keys, [heads, size, tokens]."""
    return wide[..., None].expand(-1, -1, keys.shape[2])


def _decode(pages: Pages, page: int) -> tuple[Tensor, Tensor]:
    """Return a page's keys, float32 [heads, size, tokens], and values, [heads, tokens, size]."""
    assert pages.key_scale is not None and pages.value_scale is not None
    return whole_keys(pages, page), pages.values[page].float() * pages.value_scale[page].float()[..., None]
