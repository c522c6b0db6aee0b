"""ggml's K types: super-blocks of 256 with a few bits for the scale of each sub-block, and one or two f16 over them.

    Q2_K  s*16 q*64 dd mm          s: low nibble scale, high nibble minimum of a sub-block of 16
    Q3_K  h*32 q*64 s*12 dd        h: byte i%32, bit i/32 is the third bit of code i; six-bit scales, stored + 32
    Q4_K  dd mm s*12 q*128         eight pairs of six-bit scale and minimum, sub-blocks of 32
    Q5_K  dd mm s*12 h*32 q*128    h: byte l, bit 2g for code 64g+l, bit 2g+1 for code 64g+32+l
    Q6_K  l*128 h*64 s*16 dd       signed byte scales of sub-blocks of 16

Each sub-block is searched on its own, then its scale is rounded on the super-block's grid, then every code is chosen
again on the grid that is really stored (a sub-block whose stored scale is 0 keeps the codes of its search).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.codecs import _search
from quantkit.codecs._ggml import BlockCodec, K, Parts, as_half, halves, join, pack_quarters, read_half, unpack_quarters

SPAN = (-0.9, 0.05, 36)


def _sub_blocks(x: Tensor, width: int) -> Tensor:
    """Return [width, subs * N] of blocks [256, N]: sub-block s of all N blocks, then the next."""
    return x.reshape(K // width, width, -1).transpose(0, 1).reshape(width, -1)


def _whole(x: Tensor, subs: int) -> Tensor:
    """Undo `_sub_blocks`: [256, N]."""
    return x.reshape(x.shape[0], subs, -1).transpose(0, 1).reshape(K, -1)


def _sum_square(x: Tensor) -> Tensor:
    return _search.ordered_sum(x * x)


def _importance_weight(x: Tensor, importance: Tensor, share: float) -> Tensor:
    """Return importance * sqrt(floor + x^2), the floor being `share` of the super-block's sum of squares; [256, N]."""
    return importance * _search.root(_sum_square(x) * share / K + x * x)


def _levels_of(values: Tensor, high: int) -> tuple[Tensor, Tensor]:
    """Round values >= 0 [subs, N] to codes 0..high of a common scale; return (scale [N], codes)."""
    top = values.amax(0)
    top = torch.where(top > 0, top, 0.0)
    codes = _search.nearest(_search.safe_divide(float(high), top) * values).remainder(256).clamp_max(high)
    return top / high, codes


@dataclass(frozen=True)
class Minimum(BlockCodec):
    """Q2_K, Q4_K, Q5_K: value = d * scale * code - dmin * minimum."""

    name: str
    type_id: int
    size: int
    bits: int
    sub: int
    top: int
    span: tuple[float, float, int]
    share: float
    block = K

    def blocks(self, x: Tensor, importance: Tensor | None, per_row: int) -> Tensor:
        """Return uint8 [N, size]."""
        subs, high = K // self.sub, (1 << self.bits) - 1
        parts = _sub_blocks(x, self.sub)
        if importance is None:
            # A floor of the sub-block's own size, so that small weights still count; two bits have none to spare.
            weight = parts.abs() if self.bits == 2 else _search.root(_sum_square(parts) / self.sub) + parts.abs()
            scale, low, codes = _search.affine(parts, weight, high, self.span, absolute=self.bits == 2)
            d, scales = _levels_of(scale.reshape(subs, -1), self.top)
            dmin, lows = _levels_of(low.reshape(subs, -1), self.top)
        else:
            weight = _sub_blocks(_importance_weight(x, importance, self.share), self.sub)
            scale, low, codes = _search.affine(parts, weight, high, SPAN)
            total = _search.ordered_sum(weight).reshape(subs, -1)
            d, scales = _search.positive(scale.reshape(subs, -1), total, self.top)
            dmin, lows = _search.positive(low.reshape(subs, -1), total, self.top)
        step = (as_half(d) * scales).reshape(-1)
        offset = (as_half(dmin) * lows).reshape(-1)
        again = _search.nearest((parts + offset) / torch.where(step == 0, 1.0, step)).clamp(0, high)
        codes = _whole(torch.where(step == 0, codes, again), subs)
        return self._pack(halves(d), halves(dmin), scales.T.to(torch.uint8), lows.T.to(torch.uint8), codes.T.to(torch.uint8))

    def _pack(self, d: Tensor, dmin: Tensor, scales: Tensor, lows: Tensor, codes: Tensor) -> Tensor:
        if self.bits == 2:
            return join(scales | (lows << 4), pack_quarters(codes), d, dmin)
        pairs = codes.reshape(-1, 4, 2, 32)
        fields = [d, dmin, _pack_six(scales, lows), (pairs[:, :, 0] & 15) | (pairs[:, :, 1] << 4)]
        if self.bits == 5:
            fifth = (codes.reshape(-1, 8, 32) >> 4) << torch.arange(8, device=codes.device)[:, None]
            fields.insert(3, fifth.sum(1).to(torch.uint8))
        return join(*fields)

    def parts(self, data: Tensor) -> Parts:
        """Return codes of 2, 4 or 5 bits, scales and minima."""
        if self.bits == 2:
            scales, lows, codes = data[:, :16] & 15, data[:, :16] >> 4, unpack_quarters(data[:, 16:80])
            d, dmin = read_half(data, 80), read_half(data, 82)
        else:
            scales, lows = _unpack_six(data[:, 4:16])
            d, dmin = read_half(data, 0), read_half(data, 2)
            nibbles = data[:, -128:].reshape(-1, 4, 1, 32)
            codes = torch.cat([nibbles & 15, nibbles >> 4], dim=2).reshape(-1, K)
            if self.bits == 5:
                fifth = (data[:, 16:48, None] >> torch.arange(8, device=data.device)) & 1
                codes = codes | (fifth.transpose(1, 2).reshape(-1, K).to(torch.uint8) << 4)
        return Parts(self.bits, codes, d * scales, -(dmin * lows), 0)

    def values(self, data: Tensor) -> Tensor:
        """Return float32 [N, 256]."""
        _, codes, step, offset, _ = self.parts(data)
        assert offset is not None
        return (step[:, :, None] * codes.reshape(-1, K // self.sub, self.sub) + offset[:, :, None]).reshape(-1, K)


def _pack_six(scales: Tensor, lows: Tensor) -> Tensor:
    """Pack eight six-bit pairs, uint8 [N, 8] each, into 12 bytes: the upper two bits of pairs 4..7 go on top of 0..3."""
    first = [part[:, :4] | ((part[:, 4:] >> 4) << 6) for part in (scales, lows)]
    return join(*first, (scales[:, 4:] & 15) | ((lows[:, 4:] & 15) << 4))


def _unpack_six(data: Tensor) -> tuple[Tensor, Tensor]:
    first, second, third = data[:, :4], data[:, 4:8], data[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], dim=1)
    return scales, torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], dim=1)


class ThreeBits(BlockCodec):
    """Q3_K: value = d * (scale - 32) * (code - 4)."""

    name, type_id, block, size = "Q3_K", 11, K, 110

    def blocks(self, x: Tensor, importance: Tensor | None, per_row: int) -> Tensor:
        """Return uint8 [N, 110]."""
        parts = _sub_blocks(x, 16)
        if importance is None:
            scale, codes = _search.symmetric_refined(parts, 4)
            scale = scale.reshape(16, -1)
            extreme = _search.signed_absmax(scale)
            step = _search.safe_divide(-32.0, extreme)
            d = _search.safe_divide(1.0, step)
            stored = torch.where(extreme == 0, 0.0, _search.nearest(step * scale).clamp(-32, 31) + 32)
        else:
            weight = _sub_blocks(_importance_weight(x, importance, 2.0), 16)
            scale, codes = _search.symmetric(parts, weight, 4)
            d, stored = _search.symmetric(scale.reshape(16, -1), _search.ordered_sum(weight).reshape(16, -1), 32)
        step = (as_half(d) * (stored - 32)).reshape(-1)
        again = _search.nearest(parts / torch.where(step == 0, 1.0, step)).clamp(-4, 3) + 4
        codes = _whole(torch.where(step == 0, codes, again), 16).T.to(torch.uint8)
        third = ((codes >> 2).reshape(-1, 8, 32) << torch.arange(8, device=x.device)[:, None]).sum(1).to(torch.uint8)
        return join(third, pack_quarters(codes & 3), self._pack_scales(stored.T.to(torch.uint8)), halves(d))

    @staticmethod
    def _pack_scales(stored: Tensor) -> Tensor:
        low = (stored[:, :8] & 15) | ((stored[:, 8:] & 15) << 4)
        high = (stored >> 4).reshape(-1, 4, 4) << (2 * torch.arange(4, device=stored.device))[:, None]
        return join(low, high.sum(1).to(torch.uint8))

    def parts(self, data: Tensor) -> Parts:
        """Return codes of 3 bits and scales."""
        third = (data[:, None, :32] >> torch.arange(8, device=data.device)[:, None]) & 1
        codes = unpack_quarters(data[:, 32:96]) | (third.reshape(-1, K) << 2)
        low = torch.cat([data[:, 96:104] & 15, data[:, 96:104] >> 4], dim=1)
        high = (data[:, None, 104:108] >> (2 * torch.arange(4, device=data.device))[:, None]) & 3
        scales = (low | (high.reshape(-1, 16).to(torch.uint8) << 4)).to(torch.float32) - 32
        return Parts(3, codes, read_half(data, 108) * scales, None, 4)

    def values(self, data: Tensor) -> Tensor:
        """Return float32 [N, 256]."""
        _, codes, step, _, middle = self.parts(data)
        return (step[:, :, None] * (codes.to(torch.float32) - middle).reshape(-1, 16, 16)).reshape(-1, K)


class SixBits(BlockCodec):
    """Q6_K: value = d * scale * (code - 32)."""

    name, type_id, block, size = "Q6_K", 14, K, 210

    def blocks(self, x: Tensor, importance: Tensor | None, per_row: int) -> Tensor:
        """Return uint8 [N, 210]."""
        parts = _sub_blocks(x, 16)
        weight = parts * parts if importance is None else _sub_blocks(importance, 16)
        scale, codes = _search.symmetric(parts, weight, 32)
        scale = scale.reshape(16, -1)
        extreme = _search.signed_absmax(scale)
        dead = extreme.abs() < _search.EPSILON
        step = _search.divide(-128.0, torch.where(dead, 1.0, extreme))
        d = torch.where(dead, 0.0, _search.divide(1.0, step))
        stored = torch.where(dead, 0.0, _search.nearest(step * scale).clamp_max(127))
        grid = (as_half(d) * stored).reshape(-1)
        again = _search.nearest(parts / torch.where(grid == 0, 1.0, grid)).clamp(-32, 31) + 32
        codes = _whole(torch.where(grid == 0, codes, again), 16)
        codes = torch.where(dead, 0.0, codes).T.to(torch.uint8).reshape(-1, 2, 4, 32)
        low = torch.cat([(codes[:, :, :2] & 15) | (codes[:, :, 2:] << 4)], dim=2)
        signed = stored.T.to(torch.int8).contiguous().view(torch.uint8)
        return join(low, pack_quarters(codes >> 4), signed, halves(d))

    def parts(self, data: Tensor) -> Parts:
        """Return codes of 6 bits and scales."""
        low = data[:, :128].reshape(-1, 2, 2, 32)
        codes = torch.cat([low & 15, low >> 4], dim=2).reshape(-1, K) | (unpack_quarters(data[:, 128:192]) << 4)
        return Parts(6, codes, read_half(data, 208) * data[:, 192:208].contiguous().view(torch.int8), None, 32)

    def values(self, data: Tensor) -> Tensor:
        """Return float32 [N, 256]."""
        _, codes, step, _, middle = self.parts(data)
        return (step[:, :, None] * (codes.to(torch.float32) - middle).reshape(-1, 16, 16)).reshape(-1, K)


Q2_K = Minimum("Q2_K", 10, 84, bits=2, sub=16, top=15, span=(-0.5, 0.1, 15), share=1.0)
Q3_K = ThreeBits()
Q4_K = Minimum("Q4_K", 12, 144, bits=4, sub=32, top=63, span=(-1.0, 0.1, 20), share=2.0)
Q5_K = Minimum("Q5_K", 13, 176, bits=5, sub=32, top=63, span=(-0.5, 0.1, 15), share=2.0)
Q6_K = SixBits()
