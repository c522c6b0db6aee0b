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
    fields = _in_periods(values, fields_per_period(bits))
    if bits == 3:
        return _from_words(_pack3(fields))
    per_byte = 8 // bits
    bytes_ = torch.zeros(*fields.shape[:2], fields.shape[2] // per_byte, dtype=torch.uint8, device=values.device)
    for k in range(per_byte):
        bytes_ |= fields[:, :, k::per_byte] << (bits * k)
    return _from_words(bytes_.view(torch.int32))


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return uint8 [n, m] from int32 [n * bits / 32, m]; the inverse of `pack`."""
    count = fields_per_period(bits)
    periods = _in_periods(words, count * bits // 32)
    fields = torch.empty(*periods.shape[:2], count, dtype=torch.uint8, device=words.device)
    if bits == 3:
        _unpack3(periods, fields)
    else:
        per_byte, mask = 8 // bits, (1 << bits) - 1
        bytes_ = periods.view(torch.uint8)
        for k in range(per_byte):
            fields[:, :, k::per_byte] = (bytes_ >> (bits * k)) & mask
    return _from_words(fields)


def _in_periods(values: Tensor, length: int) -> Tensor:
    """Return [n, m] as contiguous [n / length, m, length]: each column's period side by side."""
    return values.reshape(-1, length, values.shape[1]).transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _from_words(periods: Tensor) -> Tensor:
    """Return [periods, m, length] as contiguous [periods * length, m]; the inverse of `_in_periods`."""
    return periods.transpose(1, 2).reshape(-1, periods.shape[1])


def _pack3(fields: Tensor) -> Tensor:
    """Return int32 [periods, m, 3] from 32 fields each; two fields cross a word."""
    wide = fields.to(torch.int64)
    words = torch.zeros(*fields.shape[:2], 3, dtype=torch.int64, device=fields.device)
    for k in range(32):
        word, shift = divmod(3 * k, 32)
        words[:, :, word] |= (wide[:, :, k] << shift) & 0xFFFFFFFF
        if shift > 29:
            words[:, :, word + 1] |= wide[:, :, k] >> (32 - shift)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _unpack3(periods: Tensor, fields: Tensor) -> None:
    """Fill uint8 [periods, m, 32] from int32 [periods, m, 3]."""
    words = periods.to(torch.int64) & 0xFFFFFFFF
    for k in range(32):
        word, shift = divmod(3 * k, 32)
        value = words[:, :, word] >> shift
        if shift > 29:
            value = value | (words[:, :, word + 1] << (32 - shift))
        fields[:, :, k] = (value & 7).to(torch.uint8)
