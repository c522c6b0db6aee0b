"""Attention over pages with an online softmax: memory linear in length, whatever the pages hold.

`attend` is called from transformers' attention interface: the cache's `update` hands the model a `Step` in place of keys and values,
and the function registered here writes them into the cache and reads its pages. Rows of several sequences are packed side by
side, [1, T]; each sequence attends to its own pages. The reference is plain PyTorch; a backend may hold a twin that treats
every row by itself.

Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention"; Kwon et al. 2023,
"PagedAttention".
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import UsageError

NAME = "quantkit_paged"


@dataclass(frozen=True)
class Look:
    """How a layer looks at tokens. window: the last so many, 0 for all; scale: of scores; softcap: their soft limit, 0 for none."""

    window: int
    scale: float
    softcap: float


@dataclass
class Pages:
    """One layer's pages. keys: [page, key-value head, size, tokens]; values: [page, key-value head, tokens, size]; float32, or int8 with
    key_scale, float16 [page, head, size], and value_scale, float16 [page, head, tokens]. The channels of key_wide, int16 [page, head,
    wide], have a second byte in key_second, int8 [page, head, wide, tokens], worth 1/256 of the first."""

    keys: Tensor
    values: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    key_second: Tensor | None = None
    key_wide: Tensor | None = None

    def parts(self) -> list[Tensor]:
        """Return the tensors that there are."""
        every = (self.keys, self.values, self.key_scale, self.value_scale, self.key_second, self.key_wide)
        return [part for part in every if part is not None]


def whole_keys(pages: Pages, page: Tensor | int) -> Tensor:
    """Return a page's keys, float32 [heads, size, tokens], from all its bytes."""
    keys = pages.keys[page].float()
    if pages.key_second is not None and pages.key_wide is not None:
        wide = pages.key_wide[page].long()[..., None].expand(-1, -1, keys.shape[2])
        keys.scatter_add_(1, wide, pages.key_second[page].float() / 256)
    return keys if pages.key_scale is None else keys * pages.key_scale[page].float()[..., None]


@dataclass
class State:
    """A running softmax over rows: largest score and sum of exponentials, float32 [heads, rows]; weighted values, [heads, rows, size]."""

    most: Tensor
    total: Tensor
    out: Tensor

    @classmethod
    def fresh(cls, heads: int, rows: int, size: int) -> State:
        """Return the state before any token."""
        return cls(torch.full((heads, rows), -torch.inf), torch.zeros(heads, rows), torch.zeros(heads, rows, size))

    def result(self) -> Tensor:
        """Return the attention's output, float32 [heads, rows, size]."""
        return self.out / self.total[..., None].clamp_min(1e-38)


def attend_reference(q: Tensor, pages: Pages, table: Tensor, span: tuple[int, int], position: int, look: Look, state: State) -> None:
    """Add the tokens of `span` (begin, end), which the pages of `table` hold from token 0 on, to a running softmax.

    q: float32 [heads, rows, size]; row t is token position + t and sees tokens up to itself. table: int64 [pages]. One page's
    scores exist at a time.
    """
    window, scale, softcap = look.window, look.scale, look.softcap
    heads, rows, _ = q.shape
    repeat, tokens = heads // pages.keys.shape[1], pages.keys.shape[3]
    begin, end = span
    first = max(begin, position - window + 1) if window else begin
    here = position + torch.arange(rows)[:, None]
    for index in range(first // tokens, -(-min(end, position + rows) // tokens)):
        page = table[index]
        key, value = whole_keys(pages, page), pages.values[page].float()
        if pages.value_scale is not None:
            value = value * pages.value_scale[page][..., None]
        scores = (q * scale) @ key.repeat_interleave(repeat, 0)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        token = index * tokens + torch.arange(tokens)
        seen = (token <= here) & (token >= begin) & (token < end)
        if window:
            seen &= token > here - window
        scores = scores.masked_fill(~seen, -torch.inf)
        top = torch.maximum(state.most, scores.amax(-1))
        held = top.clamp_min(torch.finfo(torch.float32).min)  # rows that have seen nothing yet
        shrink = torch.exp(state.most - held)
        weight = torch.exp(scores - held[..., None])
        state.total.mul_(shrink).add_(weight.sum(-1))
        state.out.mul_(shrink[..., None]).add_(weight @ value.repeat_interleave(repeat, 0))
        state.most.copy_(top)


def sdpa(q: Tensor, keys: Tensor, values: Tensor, position: int, look: Look) -> Tensor:
    """PyTorch's attention, which picks its flash kernel: q [heads, rows, size], keys and values [key-value heads, tokens, size]."""
    if look.softcap:
        raise UsageError("--attention sdpa has no soft cap, which this model needs; use --attention tiled.")
    here, token = position + torch.arange(q.shape[1])[:, None], torch.arange(keys.shape[1])
    mask = None
    if q.shape[1] > 1 or look.window:
        mask = (token <= here) & (token > here - look.window) if look.window else token <= here
    repeat = q.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(repeat, 0), values.repeat_interleave(repeat, 0)
    return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=look.scale)


def flash(q: Tensor, keys: Tensor, values: Tensor, position: int, look: Look) -> Tensor:
    """The flash-attn package's attention, on a CUDA device in bfloat16; its causal mask ends where the keys end."""
    from flash_attn import flash_attn_func

    parts = (part.transpose(0, 1)[None].to("cuda", torch.bfloat16) for part in (q, keys, values))
    reach = (look.window - 1, 0) if look.window else (-1, -1)
    out: Tensor = flash_attn_func(*parts, softmax_scale=look.scale, causal=True, window_size=reach, softcap=look.softcap)
    return out[0].transpose(0, 1).to(q.device, torch.float32)


def pick_attention(name: str) -> Callable[..., Tensor] | None:
    """Return attention over gathered keys and values by name, or None for "tiled", which reads pages; a UsageError says what is missing."""
    if name == "tiled":
        return None
    if name == "sdpa":
        return sdpa
    if importlib.util.find_spec("flash_attn") is None or not torch.cuda.is_available():
        raise UsageError("--attention flash-attn needs the package flash-attn and a CUDA device; use tiled or sdpa.")
    return flash


@dataclass
class Step:
    """What a layer's `update` returns in place of keys (and of values): the new ones, float32 [1, heads, T, size], and where they go."""

    layer: int
    keys: Tensor
    values: Tensor
    cache: Any
    segments: list[Any]


def paged_attention(module: Any, query: Tensor, key: Step, value: Any, attention_mask: Any, scaling: float | None = None,
                    **more: Any) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention interface: query float32 [1, heads, T, size]; returns float32 [1, T, heads, size]."""
    size = query.shape[-1]
    scale = size**-0.5 if scaling is None else float(scaling)
    look = Look(int(more.get("sliding_window") or 0), scale, float(more.get("softcap") or 0.0))
    if len(key.segments) == 1:
        out: Tensor = key.cache.attend(key.layer, key.segments[0], query[0], key.keys[0], key.values[0], look)
        return out.transpose(0, 1)[None], None
    parts, at = [], 0
    for segment in key.segments:
        rows = slice(at, at + segment.count)
        new = (key.keys[0, :, rows], key.values[0, :, rows])
        parts.append(key.cache.attend(key.layer, segment, query[0, :, rows], *new, look))
        at += segment.count
    return torch.cat(parts, 1).transpose(0, 1)[None], None


def no_mask(*args: Any, **kwargs: Any) -> None:
    """transformers' mask interface: rows know their positions."""


def register() -> str:
    """Tell transformers of the attention function and its mask, once; return its name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, no_mask)
    return NAME
