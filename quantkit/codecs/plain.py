"""Floats as they are: F32, F16 and BF16 rows of a GGUF file, rounded half-even."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.codecs._ggml import BlockCodec


class Float(BlockCodec):
    """One element a block. A value that the dtype cannot hold becomes infinite: who calls it looks."""

    block = 1
    weighted = False

    def __init__(self, name: str, type_id: int, dtype: torch.dtype) -> None:
        self.name, self.type_id, self.dtype, self.size = name, type_id, dtype, dtype.itemsize

    def blocks(self, x: Tensor, importance: Tensor | None, per_row: int) -> Tensor:
        """Return the elements' bytes, uint8 [N, size]."""
        return x.reshape(-1, 1).to(self.dtype).view(torch.uint8)

    def values(self, data: Tensor) -> Tensor:
        """Return float32 [N, 1]."""
        return data.contiguous().view(self.dtype).to(torch.float32)


F32 = Float("F32", 0, torch.float32)
F16 = Float("F16", 1, torch.float16)
BF16 = Float("BF16", 30, torch.bfloat16)
