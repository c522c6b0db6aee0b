"""Perplexity of any source, streamed block by block: a model larger than memory can be measured.

Protocol `windows`: the text is tokenized whole, cut into non-overlapping windows of a stated length, every token of
a window but its first is scored; the tail is dropped. The final norm, head and soft-capping are the model's own code:
its forward is run with the blocks' results put in their place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.calibrate import intercept, record, run_block
from quantkit.corpus import HELD_OUT, bos_prefix, documents, encode, pack_windows
from quantkit.errors import CalibrationError
from quantkit.loader import Loader

HEAD_ROWS = 256


@dataclass(frozen=True)
class Perplexity:
    """A measurement: perplexity, its standard error, and how it was taken."""

    perplexity: float
    error: float
    window: int
    windows: int
    scored: int
    dropped: int
    bos: bool
    losses: tuple[float, ...]


@dataclass(frozen=True)
class HeldOut:
    """What is scored: rows, int64 [windows, window]; the tokens left over; whether rows begin with the beginning token."""

    rows: Tensor
    dropped: int
    bos: bool


def held_out(tokenizer: Any, spec: str, window: int, limit: int, offline: bool = False) -> HeldOut:
    """Return the first `limit` windows of a text, or all for 0; a CalibrationError if it does not fill one.

    "bundled" is the held-out part of the bundled texts, which calibration never sees.
    """
    spec = HELD_OUT if spec == "bundled" else spec
    prefix = bos_prefix(tokenizer)
    enough = limit * window if limit else 1 << 62
    ids, _ = encode(tokenizer, documents(spec, offline=offline), enough)
    windows = pack_windows(ids, window, prefix)
    if not len(windows):
        raise CalibrationError(f"{spec} gives {len(ids)} tokens, less than one window of {window}. Use a smaller --window.")
    windows = windows[:limit] if limit else windows
    return HeldOut(windows, len(ids) - len(windows) * (window - len(prefix)), bool(prefix))


@torch.no_grad()
def final_states(loader: Loader, batches: list[Tensor], step: Callable[[int, int], None] | None = None) -> list[Tensor]:
    """Return the hidden states that leave the last block, float32 [batch, tokens, width], for each batch of ids."""
    recording = record(loader, batches)
    for index in range(len(loader.blocks)):
        if step:
            step(index, len(loader.blocks))
        loader.materialize(loader.block_names(index))
        for batch, state in enumerate(recording.states):
            hidden = run_block(loader.blocks[index], state.to(loader.device), recording.calls[batch][index])
            state.copy_(hidden.cpu())
        loader.release(loader.block_names(index))
    return recording.states


@torch.no_grad()
def logits(loader: Loader, ids: Tensor, state: Tensor) -> Tensor:
    """Return the model's own logits, [batch, tokens, vocabulary], for states that left its last block."""
    last = len(loader.blocks) - 1

    def stand_in(index: int, *args: Any, **kwargs: Any) -> Any:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        value = state.to(loader.device) if index == last else hidden
        return (value,) if loader.returns_tuple else value

    with intercept(loader.blocks, stand_in):
        result: Tensor = loader.model(input_ids=ids.to(loader.device), use_cache=False).logits
    return result


@torch.no_grad()
def measure(loader: Loader, text: HeldOut, step: Callable[[int, int], None] | None = None) -> Perplexity:
    """Return the perplexity over the windows of a text."""
    batches = list(torch.split(text.rows, 1))
    states = final_states(loader, batches, step)
    loader.materialize(loader.outer_names(head=True))
    losses = []
    for ids, state in zip(batches, states, strict=True):
        scores = logits(loader, ids, state)[0, :-1]
        targets = ids[0, 1:].to(scores.device)
        total = 0.0
        for start in range(0, len(targets), HEAD_ROWS):
            part = torch.nn.functional.cross_entropy(
                scores[start : start + HEAD_ROWS].float(), targets[start : start + HEAD_ROWS], reduction="sum"
            )
            total += float(part)
        losses.append(total / len(targets))
    loader.release(loader.outer_names(head=True))
    mean = sum(losses) / len(losses)
    spread = sum((loss - mean) ** 2 for loss in losses) / max(len(losses) - 1, 1) / len(losses)
    value = math.exp(min(mean, 700.0))
    count, length = text.rows.shape
    error = value * math.sqrt(spread)
    return Perplexity(value, error, length, count, count * (length - 1), text.dropped, text.bos, tuple(losses))
