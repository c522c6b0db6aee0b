"""ggml's plain blocks of 32: Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0, one scale (and minimum) each.

    Q4_0  dd qqqqqqqqqqqqqqqq              d f16; byte j: code j low, code j+16 high nibble
    Q4_1  dd mm qqqqqqqqqqqqqqqq
    Q5_0  dd hhhh qqqqqqqqqqqqqqqq         bit j of h, a little-endian word: the fifth bit of code j
    Q5_1  dd mm hhhh qqqqqqqqqqqqqqqq
    Q8_0  dd + 32 signed bytes

Without importance the scale comes from the extreme; with it, from a search.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.codecs import _search
from quantkit.codecs._ggml import BlockCodec, Parts, halves, join, mean_square, pair_nibbles, read_half, split_nibbles

SPAN = (-0.9, 0.05, 36)


@dataclass(frozen=True)
class Rounded(BlockCodec):
    """Codes of `bits` bits; with a minimum, value = d * code + m, else d * (code - 2^(bits-1))."""

    name: str
    type_id: int
    size: int
    bits: int
    minimum: bool
    block = 32

    def blocks(self, x: Tensor, importance: Tensor | None, per_row: int) -> Tensor:
        """Return uint8 [N, size]."""
        half, high = 1 << (self.bits - 1), (1 << self.bits) - 1
        low = torch.zeros_like(x[0])
        if importance is not None:
            weight = importance * _search.root(mean_square(x, per_row) + x * x)
            if self.minimum:
                scale, low, codes = _search.affine(x, weight, high, SPAN)
                low = -low
            else:
                scale, codes = _search.symmetric(x, weight, half)
        elif self.minimum:
            low = _search.lowest(x)
            scale = (-_search.lowest(-x) - low) / high
            codes = _truncate((x - low) * _search.safe_divide(1.0, scale) + 0.5).clamp_max(high)
        else:
            scale = _search.signed_absmax(x) / -half
            codes = _truncate(x * _search.safe_divide(1.0, scale) + (half + 0.5)).clamp_max(high)
        return self._pack(scale, low, codes.T.to(torch.uint8))

    def _pack(self, scale: Tensor, low: Tensor, codes: Tensor) -> Tensor:
        fields = [halves(scale)] + ([halves(low)] if self.minimum else [])
        if self.bits == 5:
            fields.append(((codes.reshape(-1, 4, 8) >> 4) << torch.arange(8, device=codes.device)).sum(2).to(torch.uint8))
        return join(*fields, pair_nibbles(codes & 15))

    def parts(self, data: Tensor) -> Parts:
        """Return codes of 4 or 5 bits, a scale, and the minimum if there is one."""
        codes = split_nibbles(data[:, -16:])
        if self.bits == 5:
            fifth = (data[:, -20:-16, None] >> torch.arange(8, device=data.device)) & 1
            codes = codes | (fifth.reshape(-1, 32).to(torch.uint8) << 4)
        if self.minimum:
            return Parts(self.bits, codes, read_half(data, 0), read_half(data, 2), 0)
        return Parts(self.bits, codes, read_half(data, 0), None, 1 << (self.bits - 1))

    def values(self, data: Tensor) -> Tensor:
        """Return float32 [N, 32]."""
        _, codes, scale, offset, middle = self.parts(data)
        value = (codes.to(torch.float32) - middle) * scale
        return value if offset is None else value + offset


def _truncate(value: Tensor) -> Tensor:
    """Round toward 0; what no integer can hold becomes 0 (blocks of subnormal weights, whose stored scale is 0)."""
    return torch.where(value.abs() < 2.0**31, value.trunc(), 0.0)


class Bytes(BlockCodec):
    """Q8_0: value = d * signed byte, rounded half away from zero; importance changes nothing."""

    name, type_id, block, size, weighted = "Q8_0", 8, 32, 34, False

    def blocks(self, x: Tensor, importance: Tensor | None, per_row: int) -> Tensor:
        """Return uint8 [N, 34]."""
        scale = x.abs().amax(0) / 127
        scaled = x * _search.safe_divide(1.0, scale)
        whole = scaled.trunc()
        codes = whole + torch.where((scaled - whole).abs() >= 0.5, scaled.sign(), 0.0)
        return join(halves(scale), codes.T.to(torch.int8).contiguous().view(torch.uint8))

    def parts(self, data: Tensor) -> Parts:
        """Return codes of 8 bits, moved to 0..255, and a scale."""
        codes = data[:, 2:] ^ 128  # adding 128 to a signed byte
        return Parts(8, codes, read_half(data, 0), None, 128)

    def values(self, data: Tensor) -> Tensor:
        """Return float32 [N, 32]."""
        return data[:, 2:].contiguous().view(torch.int8).to(torch.float32) * read_half(data, 0)


def from_codes(kind: str, codes: Tensor, scale: Tensor) -> Tensor:
    """Return the blocks, uint8 [rows, bytes], that hold these numbers exactly.

    kind: Q4_0 or Q8_0; codes: uint8 [rows, columns], unsigned (8 and 128 stand for 0); scale: float16 values [rows, columns / 32].
    """
    flat = codes.reshape(-1, 32)
    stored = pair_nibbles(flat) if kind == "Q4_0" else (flat.to(torch.int16) - 128).to(torch.int8).view(torch.uint8)
    return join(halves(scale.reshape(-1)), stored).reshape(len(codes), -1)


def to_codes(kind: str, data: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `from_codes`: codes uint8 [rows, columns] and scale float32 [rows, columns / 32]."""
    blocks = data.reshape(-1, 18 if kind == "Q4_0" else 34)
    stored = blocks[:, 2:].contiguous()
    codes = split_nibbles(stored) if kind == "Q4_0" else (stored.view(torch.int8).to(torch.int16) + 128).to(torch.uint8)
    return codes.reshape(len(data), -1), read_half(blocks, 0).reshape(len(data), -1)


Q4_0 = Rounded("Q4_0", 2, 18, 4, minimum=False)
Q4_1 = Rounded("Q4_1", 3, 20, 4, minimum=True)
Q5_0 = Rounded("Q5_0", 6, 22, 5, minimum=False)
Q5_1 = Rounded("Q5_1", 7, 24, 5, minimum=True)
Q8_0 = Bytes()
