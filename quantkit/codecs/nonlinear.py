"""Blocks whose levels are not evenly spaced: IQ4_NL, IQ4_XS (sixteen fitted levels) and MXFP4 (E2M1 floats).

IQ4_NL  dd q*16                    blocks of 32; nibbles as in Q4_0; value = d * LEVELS[code]
IQ4_XS  dd hh l*4 q*128            256 in sub-blocks of 32; six-bit scales, stored + 32: two bits each in h, four in l
MXFP4   e q*16                     blocks of 32; value = E2M1 * 2^(e - 127), code bit 3 the sign
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.codecs import _search
from quantkit.codecs._ggml import BlockCodec, K, halves, join, pair_nibbles, read_half, split_nibbles

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _weight(x: Tensor, importance: Tensor | None, energy: Tensor, count: int) -> Tensor:
    """Return the weights of a search over x; energy: sum of squares over `count` elements, broadcast to x."""
    if importance is None:
        return x * x
    return importance * _search.root(energy * (2.0 / count) + x * x)


class NonLinear32(BlockCodec):
    """IQ4_NL."""

    name, type_id, block, size = "IQ4_NL", 20, 32, 18

    def blocks(self, x: Tensor, importance: Tensor | None, per_row: int) -> Tensor:
        """Return uint8 [N, 18]."""
        scale = _search.on_table(x, _weight(x, importance, _search.ordered_sum(x * x), 32), LEVELS)
        codes = _search.nearest_level(x * _search.safe_divide(1.0, scale), LEVELS)
        return join(halves(scale), pair_nibbles(codes.T))

    def values(self, data: Tensor) -> Tensor:
        """Return float32 [N, 32]."""
        levels = torch.tensor(LEVELS, dtype=torch.float32, device=data.device)
        return levels[split_nibbles(data[:, 2:]).long()] * read_half(data, 0)


class NonLinear256(BlockCodec):
    """IQ4_XS."""

    name, type_id, block, size = "IQ4_XS", 23, K, 136

    def blocks(self, x: Tensor, importance: Tensor | None, per_row: int) -> Tensor:
        """Return uint8 [N, 136]."""
        count = x.shape[1]
        weight = _weight(x, importance, _search.ordered_sum(x * x), K)
        parts, weight = (v.reshape(8, 32, count).transpose(0, 1).reshape(32, -1) for v in (x, weight))
        scale = _search.on_table(parts, weight, LEVELS).reshape(8, count)
        d = -_search.signed_absmax(scale) / 32
        stored = _search.nearest(scale * _search.safe_divide(1.0, d)).clamp(-32, 31)
        step = _search.safe_divide(1.0, (d * stored).reshape(-1))
        codes = _search.nearest_level(parts * step, LEVELS).reshape(32, 8, count).permute(2, 1, 0)
        ls = (stored + 32).T.to(torch.int32)
        low = (ls[:, ::2] & 15) | ((ls[:, 1::2] & 15) << 4)
        high = ((ls >> 4) << (2 * torch.arange(8, device=x.device))).sum(1)
        return join(halves(d), torch.stack([high & 255, high >> 8], 1).to(torch.uint8), low.to(torch.uint8), pair_nibbles(codes))

    def values(self, data: Tensor) -> Tensor:
        """Return float32 [N, 256]."""
        levels = torch.tensor(LEVELS, dtype=torch.float32, device=data.device)
        high = data[:, 2].to(torch.int32) | (data[:, 3].to(torch.int32) << 8)
        low = torch.stack([data[:, 4:8] & 15, data[:, 4:8] >> 4], dim=2).reshape(-1, 8)
        stored = (low | (((high[:, None] >> (2 * torch.arange(8, device=data.device))) & 3) << 4)) - 32
        step = read_half(data, 0) * stored
        return (step[:, :, None] * levels[split_nibbles(data[:, 8:].reshape(-1, 8, 16)).long()]).reshape(-1, K)


class Microscaled(BlockCodec):
    """MXFP4; importance changes nothing.

    Blocks below 2^-125 get the smallest exponent; llama.cpp lets theirs wrap around to a huge one.
    """

    name, type_id, block, size, weighted = "MXFP4", 39, 32, 17, False

    def blocks(self, x: Tensor, importance: Tensor | None, per_row: int) -> Tensor:
        """Return uint8 [N, 17]."""
        extreme = x.abs().amax(0)
        exponent = (torch.frexp(extreme).exponent - 1 - 2 + 127).clamp(0, 254)
        exponent = torch.where(extreme == 0, 0, exponent)
        d = torch.ldexp(torch.ones_like(extreme), exponent - 128)
        table = torch.tensor(E2M1_DOUBLED, dtype=torch.float32, device=x.device)
        best, codes = torch.full_like(x, torch.inf), torch.zeros_like(x)
        for code, level in enumerate(table):
            error = (level * d - x).abs()
            codes = torch.where(error < best, float(code), codes)
            best = torch.minimum(best, error)
        return join(exponent.to(torch.uint8)[:, None], pair_nibbles(codes.T))

    def values(self, data: Tensor) -> Tensor:
        """Return float32 [N, 32]."""
        table = torch.tensor(E2M1_DOUBLED, dtype=torch.float32, device=data.device)
        d = torch.ldexp(torch.ones_like(data[:, :1], dtype=torch.float32), data[:, :1].to(torch.int32) - 128)
        return table[split_nibbles(data[:, 1:]).long()] * d


IQ4_NL = NonLinear32()
IQ4_XS = NonLinear256()
MXFP4 = Microscaled()
