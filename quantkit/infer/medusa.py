"""Medusa heads: small heads beside the model's own, each of which guesses one token further ahead from the same last state.

File `medusa_lm_head.safetensors` beside the weights: `{head}.{layer}.linear.weight` and `.bias` of residual layers x + SiLU(W x + b), then
`{head}.{layers}.weight`, [vocabulary, hidden]. The guesses are checked by one pass of the model like any draft; of the tree of
candidates only the likeliest path is tried.

Source: Cai et al. 2024, "Medusa"; the layout is that of its published checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from quantkit.errors import SourceError
from quantkit.formats import _safetensors as st
from quantkit.formats.store import MEDUSA
from quantkit.infer.linear import LANES, planes_of_floats, planes_reference
from quantkit.infer.sampling import Sampling
from quantkit.infer.speculative import Drafted

NAME = re.compile(r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")


class MedusaHeads:
    """The heads of one model: shared by all its sequences. nbytes: what they take in memory."""

    def __init__(self, folder: Path, width: int, vocabulary: int, make: Callable[..., Any] | None = None) -> None:
        """Read the heads; a SourceError if there are none, or none for this width and vocabulary. make: a kernel for products."""
        path = folder / MEDUSA
        if not path.is_file():
            raise SourceError(f"{folder} holds no {MEDUSA}: --speculative medusa needs a checkpoint with Medusa heads.")
        parts: dict[int, dict[int, dict[str, Tensor]]] = {}
        for name, entry in st.read_header(path).items():
            if not (found := NAME.fullmatch(name)):
                raise SourceError(f"{path} holds '{name}', which is no part of a Medusa head.")
            parts.setdefault(int(found[1]), {}).setdefault(int(found[2]), {})[found[3]] = st.read_tensor(path, entry)
        self.heads: list[tuple[list[tuple[Tensor, Tensor]], Callable[[Tensor], Tensor]]] = []
        self.nbytes = 0
        for index in range(len(parts)):
            self.heads.append(self._head(path, parts.get(index, {}), (width, vocabulary), make))

    def _head(self, path: Path, layers: dict[int, dict[str, Tensor]], sizes: tuple[int, int], make: Callable[..., Any] | None) -> Any:
        width, vocabulary = sizes
        *inner, last = (layers[i] for i in range(len(layers))) if sorted(layers) == list(range(len(layers))) and layers else ({},)
        square = all(
            {k: tuple(v.shape) for k, v in one.items()} == {"linear.weight": (width, width), "linear.bias": (width,)} for one in inner
        )
        if not square or {k: tuple(v.shape) for k, v in last.items()} != {"weight": (vocabulary, width)}:
            raise SourceError(f"{path} has no heads for a hidden size of {width} and {vocabulary} tokens: it belongs to another model.")
        weight = last["weight"]
        self.nbytes += sum(part.nbytes for one in layers.values() for part in one.values())
        residual = [(one["linear.weight"].to(torch.float32), one["linear.bias"].to(torch.float32)) for one in inner]
        if width % LANES == 0:
            return residual, (make or planes_reference)(planes_of_floats(weight))
        return residual, lambda x: linear(x, weight.to(torch.float32))

    def guess(self, state: Tensor, count: int) -> list[Tensor]:
        """Return the logits, float32 [vocabulary], of the first `count` heads for the state, [hidden], that gave the last token."""
        found = []
        for residual, output in self.heads[:count]:
            x = state[None].to(torch.float32)
            for weight, bias in residual:
                x = x + silu(linear(x, weight, bias))
            found.append(output(x.contiguous())[0])
        return found


class Medusa:
    """Drafts for one sequence from its model's heads."""

    def __init__(self, heads: MedusaHeads) -> None:
        self.heads = heads
        self.state: Tensor | None = None

    def see(self, state: Tensor) -> None:
        """Take the state, float32 [hidden], that the last token was drawn from."""
        self.state = state

    def draft(self, ids: Sequence[int], count: int, sampling: Sampling, generator: torch.Generator) -> Drafted:
        """Return up to `count` tokens, one of each head."""
        drafted = Drafted([], [])
        for logits in self.heads.guess(self.state, count) if self.state is not None else ():
            share = sampling.probabilities(logits, [*ids, *drafted.tokens])
            drafted.tokens.append(sampling.draw(share, generator))
            drafted.shares.append(None if sampling.temperature == 0 else share)
        return drafted

    def forget(self) -> None:
        """The sequence is over."""
        self.state = None
