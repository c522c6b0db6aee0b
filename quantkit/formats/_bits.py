"""Fields of 2, 3, 4 or 8 bits in 32-bit words, packed along the first dimension as one little-endian bit stream.

4 bits, one word, eight fields a..h:   hhhhggggffffeeeeddddccccbbbbaaaa
3 bits, three words, 32 fields:        kkjjjiiihhhgggfffeeedddcccbbbaaa | vuuuttt...lllk | ...
Widths that divide 32 need no field to cross a word; 3 bits repeat every three words.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def fields_per_period(bits: int) -> int:
    """Return how many fields fill a whole number of words: what the first dimension must be a multiple of."""
    return math.lcm(bits, 32) // bits


def pack(values: Tensor, bits: int) -> Tensor:
    """Return int32 [n * bits / 32, m] that hold uint8 [n, m]; n must be a multiple of `fields_per_period(bits)`."""
    count = fields_per_period(bits)
    words = count * bits // 32
    fields = values.reshape(-1, count, values.shape[1])
    result = torch.zeros(fields.shape[0], words, values.shape[1], dtype=torch.int64, device=values.device)
    for k in range(count):
        word, shift = divmod(k * bits, 32)
        field = fields[:, k].to(torch.int64) << shift
        result[:, word] |= field & 0xFFFFFFFF
        if shift + bits > 32:
            result[:, word + 1] |= field >> 32
    return _to_int32(result).reshape(-1, values.shape[1])


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return uint8 [n, m] from int32 [n * bits / 32, m]; the inverse of `pack`."""
    count = fields_per_period(bits)
    per = count * bits // 32
    source = (words.to(torch.int64) & 0xFFFFFFFF).reshape(-1, per, words.shape[1])
    result = torch.empty(source.shape[0], count, words.shape[1], dtype=torch.uint8, device=words.device)
    mask = (1 << bits) - 1
    for k in range(count):
        word, shift = divmod(k * bits, 32)
        field = source[:, word] >> shift
        if shift + bits > 32:
            field = field | (source[:, word + 1] << (32 - shift))
        result[:, k] = (field & mask).to(torch.uint8)
    return result.reshape(-1, words.shape[1])


def _to_int32(words: Tensor) -> Tensor:
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
