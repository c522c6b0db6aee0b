"""llama.cpp through cyllama: token ids and logits of a GGUF file. Tests skip where it is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch


class Runtime:
    """One loaded file."""

    def __init__(self, path: Path, context: int = 512) -> None:
        llama = pytest.importorskip("cyllama.llama.llama_cpp")

        class Model(llama.LlamaModel):  # type: ignore[misc, name-defined]
            @property
            def n_vocab(self) -> int:
                return int(self.get_vocab().n_vocab)

        self.llama = llama
        self.model = Model(str(path), verbose=False)
        params = llama.LlamaContextParams()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = context, context, context, 2, 2
        self.context = llama.LlamaContext(self.model, params, verbose=False)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, special tokens recognised, nothing added."""
        return list(self.model.get_vocab().tokenize(text, False, True))

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Return float32 [tokens, vocabulary]."""
        batch: Any = self.llama.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1, verbose=False)
        batch.add_sequence(ids, 0, True)
        self.context.decode(batch)
        return torch.tensor([list(self.context.get_logits_ith(i)) for i in range(len(ids))])
