"""A short run of an artifact in the dtypes that runtimes use: where it overflows, and whether its output depends on its input.

One forward pass over a few tokens, block by block, side by side in float32, bfloat16 and float16: as many predictions as there are
tokens, in the memory of one block. It says nothing of quality; `eval-ppl` does.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.calibrate import Call, record, run_block
from quantkit.loader import Loader
from quantkit.perplexity import logits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKENS = 24


@dataclass(frozen=True)
class Outcome:
    """How one dtype went. where: the first block, or the head, whose output is not finite; empty if all is.

    peak: largest magnitude that entered or left a block. still: whether every token got the same prediction scores.
    """

    dtype: str
    where: str
    peak: float
    still: bool


@torch.no_grad()
def run(loader: Loader, ids: Tensor) -> list[Outcome]:
    """Return an outcome per dtype for token ids, int64 [1, tokens]."""
    recording = record(loader, [ids])
    states = {dtype: recording.states[0].to(loader.device, dtype) for dtype in DTYPES}
    where, peak = dict.fromkeys(DTYPES, ""), dict.fromkeys(DTYPES, 0.0)
    for index in range(len(loader.blocks)):
        loader.materialize(loader.block_names(index))
        for dtype in DTYPES:
            if where[dtype]:
                continue
            peak[dtype] = max(peak[dtype], float(states[dtype].abs().max()))
            block = loader.blocks[index]
            block = block if dtype == torch.float32 else copy.deepcopy(block).to(dtype)
            states[dtype] = run_block(block, states[dtype], _cast(recording.calls[0][index], dtype))
            if not torch.isfinite(states[dtype].sum(dtype=torch.float32)):
                where[dtype] = loader.block_name(index)
        loader.release(loader.block_names(index))
    loader.materialize(loader.outer_names(head=True))
    found = []
    for dtype in DTYPES:
        still = False
        if not where[dtype]:
            scores = logits(loader, ids, states[dtype].float())[0]
            limit = torch.finfo(dtype).max
            if not bool(torch.isfinite(scores).all()) or float(scores.abs().max()) > limit:
                where[dtype] = "the head"
            still = len(scores) > 1 and bool((scores[1:] - scores[:1]).abs().max() <= 1e-6 * scores.abs().max())
        found.append(Outcome(str(dtype).removeprefix("torch."), where[dtype], peak[dtype], still))
    loader.release(loader.outer_names(head=True))
    return found


def _cast(call: Call, dtype: torch.dtype) -> Call:
    """Return a block's arguments in a dtype, as a model loaded in it would have them: a mask's least value stays its least."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
        if isinstance(value, (tuple, list)):
            return type(value)(cast(item) for item in value)
        return {key: cast(item) for key, item in value.items()} if isinstance(value, dict) else value

    return call if dtype == torch.float32 else Call(cast(call.args), cast(call.kwargs))
