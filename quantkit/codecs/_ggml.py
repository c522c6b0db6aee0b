"""What ggml's block types share: rows of bytes in, rows of floats out, and the bit layouts they have in common.

A row is cut into blocks of `block` elements, each `size` bytes; rows are independent. `encode` is the reference: plain
PyTorch on any device, vectorised over all blocks of the rows it is given, the same bytes as the faster twins.

Source: ggml-common.h and ggml-quants.c of ggml (layouts), docs/gguf.md (type ids).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.errors import PlanError

K = 256


class Parts(NamedTuple):
    """Blocks as integers: value = scale * (code - middle) + offset.

    codes: uint8 [N, block] of `bits` bits; scale, offset: float32 [N, groups of a block], the offset None for 0.
    """

    bits: int
    codes: Tensor
    scale: Tensor
    offset: Tensor | None
    middle: int


class BlockCodec(ABC):
    """One ggml type. `weighted`: whether importance weights change what it writes."""

    name: str
    type_id: int
    block: int
    size: int
    weighted = True

    @property
    def label(self) -> str:
        """The type's name."""
        return self.name

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row; a PlanError if blocks do not fill it."""
        if columns % self.block:
            raise PlanError(f"{self.name} packs blocks of {self.block}, which do not divide {columns} columns.")
        return columns // self.block * self.size

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight."""
        return 8 * self.size / self.block

    def encode(self, rows: Tensor, importance: Tensor | None = None) -> Tensor:
        """Return uint8 [rows, bytes] for float32 rows [rows, columns]; importance: float32 [columns] or None.

        Source of the weights: an importance matrix holds the mean square of each input column.
        """
        count, columns = rows.shape
        width = self.row_bytes(columns)
        if not count:
            return torch.empty(0, width, dtype=torch.uint8, device=rows.device)
        x = rows.to(torch.float32).reshape(-1, self.block).T.contiguous()
        weight = None
        if importance is not None and self.weighted:
            weight = importance.to(torch.float32).reshape(-1, self.block).T.repeat(1, count)
        return self.blocks(x, weight, columns // self.block).reshape(count, width)

    @abstractmethod
    def blocks(self, x: Tensor, importance: Tensor | None, per_row: int) -> Tensor:
        """Return uint8 [N, size] for N blocks, float32 [block, N]; importance alike; per_row: blocks of a row."""

    def decode(self, data: Tensor) -> Tensor:
        """Return float32 [rows, columns] for uint8 rows [rows, bytes]."""
        count, columns = data.shape[0], data.shape[1] // self.size * self.block
        if not data.numel():
            return torch.empty(count, columns, dtype=torch.float32, device=data.device)
        return self.values(data.reshape(-1, self.size)).reshape(count, columns)

    def parts(self, data: Tensor) -> Parts | None:
        """Return blocks, uint8 [N, size], as integers with scales, or None if they are not that."""
        return None

    @abstractmethod
    def values(self, data: Tensor) -> Tensor:
        """Return float32 [N, block] for uint8 blocks [N, size]."""


def halves(value: Tensor) -> Tensor:
    """Return float32 [N] as float16 bytes, uint8 [N, 2]."""
    return value.to(torch.float16).view(torch.uint8).reshape(-1, 2)


def as_half(value: Tensor) -> Tensor:
    """Return float32 values rounded to float16."""
    return value.to(torch.float16).to(torch.float32)


def read_half(data: Tensor, at: int) -> Tensor:
    """Return float32 [N, 1], the float16 at byte `at` of each block."""
    return data[:, at : at + 2].contiguous().view(torch.float16).to(torch.float32)


def pair_nibbles(codes: Tensor) -> Tensor:
    """Return uint8 [..., n/2]: byte j holds code j (low nibble) and code j + n/2."""
    low, high = codes.to(torch.uint8).chunk(2, dim=-1)
    return low | (high << 4)


def split_nibbles(data: Tensor) -> Tensor:
    """Undo `pair_nibbles`: uint8 [..., n]."""
    return torch.cat([data & 15, data >> 4], dim=-1)


def pack_quarters(codes: Tensor) -> Tensor:
    """Return uint8 [N, 64] of 256 two-bit codes: in each half, byte l holds codes l, l + 32, l + 64, l + 96."""
    parts = codes.to(torch.uint8).reshape(-1, 2, 4, 32)
    return (parts[:, :, 0] | (parts[:, :, 1] << 2) | (parts[:, :, 2] << 4) | (parts[:, :, 3] << 6)).reshape(-1, 64)


def unpack_quarters(data: Tensor) -> Tensor:
    """Undo `pack_quarters`: uint8 [N, 256]."""
    parts = data.reshape(-1, 2, 1, 32)
    return torch.cat([(parts >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2).reshape(-1, K)


def join(*parts: Tensor) -> Tensor:
    """Return the fields of blocks, uint8 [N, ...] each, side by side."""
    return torch.cat([part.reshape(part.shape[0], -1) for part in parts], dim=1)


def mean_square(x: Tensor, per_row: int) -> Tensor:
    """Return the mean square of each block's row, float32 [N], for blocks [block, N]; summed in the row's order."""
    rows = x.T.reshape(-1, per_row * x.shape[0])
    total = torch.zeros_like(rows[:, 0])
    for column in rows.T:
        total = total + column * column
    return (total / rows.shape[1]).repeat_interleave(per_row)
