"""Drafts for speculative decoding: tokens that one pass of the target checks together.

Prompt look-up: the last few tokens are searched in the text so far, and what followed them then is the draft. A draft model: a smaller one
with the same vocabulary, its own cache, its own draws. How long a draft is follows from how many of the last ones stood.

Source: Leviathan et al. 2023 (the acceptance rule is in `sampling.accept`); Saxena 2023, "Prompt Lookup Decoding".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.infer.cache import Held, PagedCache
from quantkit.infer.model import Runner
from quantkit.infer.sampling import Sampling

LONGEST = 8
NGRAMS = (4, 3, 2)
SMOOTH = 0.8


@dataclass
class Drafted:
    """Proposed tokens, and what each was drawn from (None: it was certain)."""

    tokens: list[int]
    shares: list[Tensor | None]


@dataclass
class Length:
    """How many tokens to draft: as many as are likely to stand together, from the share that stood lately."""

    share: float = 0.7
    drafted: int = 0
    tried: int = 0
    accepted: int = 0
    rounds: int = 0

    def next(self) -> int:
        """Return a length: the expected run of accepted tokens and one more, at most LONGEST."""
        run = self.share / max(1 - self.share, 0.05)
        return max(1, min(LONGEST, round(run) + 1))

    def learn(self, drafted: int, accepted: int) -> None:
        """Remember how a draft went."""
        self.drafted, self.accepted, self.rounds = self.drafted + drafted, self.accepted + accepted, self.rounds + 1
        tried = min(accepted + 1, drafted)  # tokens after the first refused one were not tried
        self.tried += tried
        self.share = SMOOTH * self.share + (1 - SMOOTH) * (accepted / max(tried, 1))

    @property
    def rate(self) -> float:
        """Return the share of tried tokens that stood, as the formula (1 - a^(k+1)) / (1 - a) has it."""
        return self.accepted / max(self.tried, 1)


class Lookup:
    """Drafts from the text itself."""

    def draft(self, ids: Sequence[int], count: int, sampling: Sampling, generator: torch.Generator) -> Drafted:
        """Return up to `count` tokens that followed the last occurrence of the text's end."""
        for size in NGRAMS:
            if len(ids) <= size:
                continue
            end = list(ids[-size:])
            for at in range(len(ids) - size - 1, -1, -1):
                if list(ids[at : at + size]) == end:
                    found = list(ids[at + size : at + size + count])
                    return Drafted(found, [None] * len(found))
        return Drafted([], [])

    def see(self, state: Tensor) -> None:
        """The text is enough."""

    def forget(self) -> None:
        """Nothing is kept."""


@dataclass
class DraftModel:
    """Drafts from a smaller model."""

    runner: Runner
    cache: PagedCache
    held: Held = field(default_factory=Held)
    ids: list[int] = field(default_factory=list)

    def draft(self, ids: Sequence[int], count: int, sampling: Sampling, generator: torch.Generator) -> Drafted:
        """Return `count` tokens drawn from the small model."""
        same = 0
        while same < min(len(self.ids), len(ids) - 1, self.held.length) and self.ids[same] == ids[same]:
            same += 1
        self.cache.truncate(self.held, same)
        rest, drafted = list(ids[same:]), Drafted([], [])
        for _ in range(count):
            segment = self.cache.extend(self.held, len(rest))
            logits = self.runner.step(rest, [segment], self.cache, [len(rest) - 1])[0]
            share = sampling.probabilities(logits, [*ids, *drafted.tokens])
            token = sampling.draw(share, generator)
            drafted.tokens.append(token)
            drafted.shares.append(None if sampling.temperature == 0 else share)
            rest = [token]
        self.ids = [*ids, *drafted.tokens]
        return drafted

    def see(self, state: Tensor) -> None:
        """The text is enough."""

    def forget(self) -> None:
        """Let go of the sequence."""
        self.cache.close(self.held)
        self.held, self.ids = Held(), []
