"""A text's logits from the inference loop: what a key-value cache costs in perplexity."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantkit.infer.model import Runner


class Cached:
    """Windows go through the cache in chunks, as prompts do: a chunk reads what earlier ones left there."""

    def __init__(self, runner: Runner, kind: str, chunk: int) -> None:
        self.runner, self.kind, self.chunk = runner, kind, chunk

    def open(self) -> None:
        """The runner is ready."""

    def close(self) -> None:
        """Nothing was taken."""

    def scores(self, number: int, row: int, window: Any) -> Tensor:
        """Return the logits, float32 [scored, vocabulary], that a window's tokens from `window.start` on are judged by."""
        cache, ids = self.runner.cache(self.kind), window.ids.tolist()
        held, parts = cache.open(), []
        for at in range(0, len(ids) - 1, self.chunk):
            part = ids[at : min(at + self.chunk, len(ids) - 1)]
            wanted = list(range(max(window.start - 1 - at, 0), len(part)))
            found = self.runner.step(part, [cache.extend(held, len(part))], cache, wanted or [0])
            parts += [found] if wanted else []
        return torch.cat(parts)
