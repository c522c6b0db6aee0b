"""From logits to a token: temperature, top-k, top-p, min-p, repetition penalty; greedy at temperature 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. top_k 0, top_p 1, min_p 0 and penalty 1 change nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1 or self.penalty <= 0:
            raise UsageError(
                "Sampling needs --temperature and --top-k from 0 on, --top-p in (0, 1], --min-p in [0, 1], --repetition-penalty above 0."
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit is the next token, whatever came before."""
        return self.temperature == 0 and self.penalty == 1

    def probabilities(self, logits: Tensor, seen: Sequence[int] = ()) -> Tensor:
        """Return what the next token is drawn from, float32 [vocabulary], for logits [vocabulary] and the tokens so far."""
        scores = logits.to(torch.float32).clone()
        if self.penalty != 1 and seen:
            known = torch.tensor(sorted(set(seen)))
            scores[known] = torch.where(scores[known] > 0, scores[known] / self.penalty, scores[known] * self.penalty)
        if self.temperature == 0:
            return torch.nn.functional.one_hot(scores.argmax(), len(scores)).to(torch.float32)
        scores = scores / self.temperature
        if 0 < self.top_k < len(scores):
            scores[scores < scores.topk(self.top_k).values[-1]] = -torch.inf
        share = scores.softmax(-1)
        if self.min_p > 0:
            share = torch.where(share >= self.min_p * share.max(), share, 0.0)
        if self.top_p < 1:
            ordered, order = share.sort(descending=True)
            before = ordered.cumsum(0) - ordered
            share = torch.zeros_like(share).scatter(0, order, torch.where(before < self.top_p, ordered, 0.0))
        return share / share.sum()

    def draw(self, share: Tensor, generator: torch.Generator) -> int:
        """Return a token drawn from probabilities, float32 [vocabulary]."""
        if self.temperature == 0:
            return int(share.argmax())
        return int(torch.multinomial(share, 1, generator=generator))


def accept(share: Tensor, draft: int, guess: Tensor | None, sampling: Sampling, generator: torch.Generator) -> tuple[bool, int]:
    """Return whether a drafted token stands, and the token that does: the output has the target's distribution.

    share: the target's probabilities, float32 [vocabulary]; guess: those the draft was drawn from, or None for a certain one.
    Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", algorithm 1.
    """
    if sampling.temperature == 0:
        best = int(share.argmax())
        return best == draft, best
    chance = float(share[draft]) / (1.0 if guess is None else float(guess[draft]))
    if float(torch.rand(1, generator=generator)) < chance:
        return True, draft
    rest = share.clone()
    if guess is None:
        rest[draft] = 0.0
    else:
        rest = (rest - guess).clamp_min(0)
    if float(rest.sum()) <= 0:  # the two distributions are the same up to rounding
        rest = share
    return False, int(torch.multinomial(rest, 1, generator=generator))
