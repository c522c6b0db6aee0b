"""Perplexity and divergence of any source, streamed block by block: a model larger than memory can be measured.

Every protocol cuts the text into windows and says which tokens of each are scored; the rest is one procedure. The final
norm, head and soft-capping are the model's own code: its forward is run with the blocks' results put in their place.

- windows: non-overlapping, every token but a window's first.
- stride: windows begin every `stride` tokens; each token is scored once, with as much before it as fits.
- llama.cpp: non-overlapping, the second half of each (its tokens n/2+1 .. n-1), the beginning token first if the
  tokenizer adds it, in place of the window's own first token; what llama-perplexity does.

Source: Hugging Face's perplexity guide (stride); llama.cpp, tools/perplexity/perplexity.cpp (the third).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.calibrate import intercept, record, run_block
from quantkit.corpus import HELD_OUT, bos_prefix, documents, encode, pack_windows
from quantkit.errors import CalibrationError
from quantkit.loader import Loader

WINDOW = 1024
PROTOCOLS = {"windows": WINDOW, "stride": WINDOW, "llama.cpp": 512}
HEAD_ROWS = 256
BATCH_TOKENS = 1024
Step = Callable[[int, int], None]


@dataclass(frozen=True)
class Window:
    """Tokens, int64 [length], of which those from `start` on are scored."""

    ids: Tensor
    start: int

    @property
    def scored(self) -> int:
        """Tokens scored."""
        return len(self.ids) - self.start


@dataclass(frozen=True)
class Text:
    """What is scored, and how it was cut. bos: whether the tokenizer's beginning token comes first."""

    windows: list[Window]
    protocol: str
    window: int
    dropped: int
    bos: bool

    def batches(self) -> list[list[Window]]:
        """Return neighbouring windows of one length together, about a thousand tokens at a time."""
        batches: list[list[Window]] = []
        for window in self.windows:
            last = batches[-1] if batches else []
            if last and len(last[0].ids) == len(window.ids) and (len(last) + 1) * len(window.ids) <= BATCH_TOKENS:
                last.append(window)
            else:
                batches.append([window])
        return batches


@dataclass(frozen=True)
class Divergence:
    """How far a model's distributions are from the reference's, over all scored tokens.

    kl_*: Kullback-Leibler divergence from the reference in nats. top1: share of tokens whose most likely next token is
    the reference's. rms_dp: root mean square of the change in probability of the token that came.
    """

    kl_mean: float
    kl_error: float
    kl_median: float
    kl_99: float
    kl_999: float
    kl_max: float
    top1: float
    rms_dp: float


@dataclass(frozen=True)
class Perplexity:
    """A measurement: perplexity, its standard error over windows, and how it was taken."""

    perplexity: float
    error: float
    protocol: str
    window: int
    windows: int
    scored: int
    dropped: int
    bos: bool
    losses: tuple[float, ...]
    divergence: Divergence | None = None

    def document(self) -> dict[str, Any]:
        """Return everything as plain values, the divergence's beside the rest."""
        values = asdict(self)
        return values | (values.pop("divergence") or {})


class Scorer(Protocol):
    """Something that gives a text's logits, one window after another, between `open` and `close`."""

    def open(self) -> None:
        """Get ready."""

    def close(self) -> None:
        """Let go of what `open` took."""

    def scores(self, number: int, row: int, window: Window) -> Tensor:
        """Return the logits, [scored, vocabulary], that a window's scored tokens are judged by; it is row `row` of batch `number`."""


@dataclass
class Streamed:
    """A model by its loader and the states that leave its last block, per batch of the text: `final_states`."""

    loader: Loader
    states: list[Tensor]

    def open(self) -> None:
        """Read what lies behind the blocks."""
        self.loader.materialize(self.loader.outer_names(head=True))

    def close(self) -> None:
        """Drop it again."""
        self.loader.release(self.loader.outer_names(head=True))

    def scores(self, number: int, row: int, window: Window) -> Tensor:
        """Return the model's own logits, [scored, vocabulary]."""
        found = logits(self.loader, window.ids[None], self.states[number][row : row + 1])
        return found[0, window.start - 1 : len(window.ids) - 1]


def cut(tokenizer: Any, spec: str, protocol: str, window: int, limit: int, stride: int = 0, offline: bool = False) -> Text:
    """Return the first `limit` windows of a text, or all for 0; a CalibrationError if it does not fill one.

    "bundled" is the held-out part of the bundled texts, which calibration never sees.
    """
    spec = HELD_OUT if spec == "bundled" else spec
    prefix = bos_prefix(tokenizer)
    stride = stride or window // 2
    enough = 1 << 62 if not limit else limit * window if protocol != "stride" else window + (limit - 1) * stride
    ids, _ = encode(tokenizer, documents(spec, offline=offline), enough)
    if protocol == "stride":
        windows = _sliding(prefix + ids, window, stride)
    elif protocol == "llama.cpp":
        whole = prefix + ids
        rows = [(prefix + whole[at + len(prefix) : at + window]) for at in range(0, len(whole) - window + 1, window)]
        windows = [Window(torch.tensor(row), window // 2 + 1) for row in rows]
    else:
        windows = [Window(row, 1) for row in pack_windows(ids, window, prefix)]
    if not windows:
        raise CalibrationError(f"{spec} gives {len(ids)} tokens, less than one window of {window}. Use a smaller --window.")
    windows = windows[:limit] if limit else windows
    step = stride if protocol == "stride" else window - (len(prefix) if protocol == "windows" else 0)
    used = window + step * (len(windows) - 1) if protocol == "stride" else step * len(windows)
    return Text(windows, protocol, window, max(len(ids) - used, 0), bool(prefix))


def _sliding(ids: list[int], window: int, stride: int) -> list[Window]:
    """Return windows that score each token once; the last one may be short."""
    windows, end = [], 0
    for begin in range(0, len(ids), stride):
        stop = min(begin + window, len(ids))
        if stop - max(end, 1) <= 0:
            break
        windows.append(Window(torch.tensor(ids[begin:stop]), max(1, end - begin)))
        end = stop
        if stop == len(ids):
            break
    return windows


@torch.no_grad()
def final_states(loader: Loader, text: Text, step: Step | None = None, folder: Path | None = None) -> list[Tensor]:
    """Return the hidden states that leave the last block, float32 [batch, tokens, width], per batch of the text.

    With a folder they live in a mapped file there if they are large.
    """
    recording = record(loader, [torch.stack([window.ids for window in batch]) for batch in text.batches()], 0, folder)
    for index in range(len(loader.blocks)):
        if step:
            step(index, len(loader.blocks))
        loader.materialize(loader.block_names(index))
        for batch, state in enumerate(recording.states):
            hidden = run_block(loader.blocks[index], state.to(loader.device), recording.calls[batch][index])
            state.copy_(hidden.cpu())
        recording.rest()
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
def measure(text: Text, model: Scorer, base: Scorer | None = None) -> Perplexity:
    """Return a model's perplexity over a text's windows, and with a base the divergence from it."""
    scorers = [model] if base is None else [model, base]
    for each in scorers:
        each.open()
    losses: list[float] = []
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    for number, batch in enumerate(text.batches()):
        for row, window in enumerate(batch):
            scores = model.scores(number, row, window)
            other = None if base is None else base.scores(number, row, window).to(scores.device)
            total = 0.0
            for part in _parts(scores, other, window.ids[window.start :].to(scores.device)):
                total += float(part[0].sum())
                kept += [part[1:]] if base is not None else []
            losses.append(total / window.scored)
    for each in scorers:
        each.close()
    return _summary(text, losses, _divergence(kept) if kept else None)


def _parts(scores: Tensor, other: Tensor | None, targets: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield (loss, kl, same top token, change in probability) of the tokens, each float32 or bool [rows], some rows at a time."""
    for start in range(0, len(targets), HEAD_ROWS):
        rows = slice(start, start + HEAD_ROWS)
        log_p = scores[rows].double().log_softmax(-1)
        own = log_p.gather(1, targets[rows, None])[:, 0]
        if other is None:
            yield -own, own, own, own
            continue
        log_q = other[rows].double().log_softmax(-1)
        kl = (log_q.exp() * (log_q - log_p)).sum(-1)
        theirs = log_q.gather(1, targets[rows, None])[:, 0]
        yield -own, kl.cpu(), (log_p.argmax(-1) == log_q.argmax(-1)).cpu(), (own.exp() - theirs.exp()).cpu()


def _divergence(kept: list[tuple[Tensor, Tensor, Tensor]]) -> Divergence:
    kl, same, change = (torch.cat(part).double() for part in zip(*kept, strict=True))
    ordered = kl.sort().values
    median, most, nearly_all = (_quantile(ordered, share) for share in (0.5, 0.99, 0.999))
    error = float(kl.std() / math.sqrt(len(kl))) if len(kl) > 1 else 0.0
    rms = float(change.square().mean().sqrt())
    return Divergence(float(kl.mean()), error, median, most, nearly_all, float(ordered[-1]), float(same.mean()), rms)


def _quantile(ordered: Tensor, share: float) -> float:
    """Return a quantile of ascending values, between neighbours in proportion (torch's own takes at most 16 million)."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (ordered[above] - ordered[below]) * (place - below))


def _summary(text: Text, losses: list[float], divergence: Divergence | None) -> Perplexity:
    scored = [window.scored for window in text.windows]
    mean = sum(loss * count for loss, count in zip(losses, scored, strict=True)) / sum(scored)
    spread = sum((loss - mean) ** 2 for loss in losses) / max(len(losses) - 1, 1) / len(losses)
    value = math.exp(min(mean, 700.0))
    error = value * math.sqrt(spread)
    taken = (text.protocol, text.window, len(text.windows), sum(scored), text.dropped, text.bos)
    return Perplexity(value, error, *taken, tuple(losses), divergence)
