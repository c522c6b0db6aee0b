"""What codecs share: the dtypes of scales, codes for sorted levels with ties to even ones, the search of a group's scale, nibbles."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SCALE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0


def round_e2m1(x: Tensor) -> Tensor:
    """Return the 4-bit float nearest to each value, uint8 codes (bit 3: sign), ties to the even code; beyond 6 it is 6."""
    levels = torch.tensor(E2M1, device=x.device)
    middle = (levels[:-1] + levels[1:]) / 2
    middle[1::2] = torch.nextafter(middle[1::2], torch.zeros_like(middle[1::2]))  # these ties go up, to the even code
    codes = torch.bucketize(x.abs(), middle, right=False).to(torch.uint8)
    return codes | (torch.signbit(x).to(torch.uint8) << 3)


def values_e2m1(codes: Tensor) -> Tensor:
    """Return float32 values of 4-bit float codes."""
    table = torch.tensor([*E2M1, *(-level for level in E2M1)], device=codes.device)
    return table[codes.long()]


def best_scale(groups: Tensor, scales: list[Tensor], rounded: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return, for groups [n, width], the one of the scales [n] each whose rounded(groups, scale) has the least squared error."""
    best, least = scales[0], torch.full_like(scales[0], torch.inf)
    for scale in scales:
        error = (rounded(groups, scale) - groups).square().sum(1)
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best


def largest(weights: list[Tensor]) -> Tensor:
    """Return the largest magnitude of several weights, float32 [1]."""
    return torch.stack([weight.abs().amax() for weight in weights]).amax().reshape(1)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Return uint8 [..., n/2]: element 2k in the low nibble of byte k, element 2k + 1 in the high one."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(data: Tensor) -> Tensor:
    """Undo `pack_nibbles`: uint8 [..., n]."""
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)
