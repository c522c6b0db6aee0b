"""Fields of 2, 3, 4 or 8 bits in 32-bit words, packed along the first dimension as one little-endian bit stream.

4 bits, one word, eight fields a..h:   hhhhggggffffeeeeddddccccbbbbaaaa
3 bits, three words, 32 fields:        kkjjjiiihhhgggfffeeedddcccbbbaaa | vuuuttt...lllk | ...
Widths that divide 32 need no field to cross a word; 3 bits repeat every three words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.backends import kernels
from quantkit.errors import PlanError

IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)


def fields_per_period(bits: int) -> int:
    """Return how many fields fill a whole number of words: what the first dimension must be a multiple of."""
    return math.lcm(bits, 32) // bits


def pack(values: Tensor, bits: int, order: Sequence[int] = IN_ORDER, last: bool = False) -> Tensor:
    """Return int32 [n * bits / 32, m] that hold uint8 [n, m], of any strides; n must be a multiple of `fields_per_period(bits)`.

    order: the value that each field of a run of eight holds. last: the words as [m, n * bits / 32] instead.
    """
    if values.dim() != 2 or values.dtype != torch.uint8:
        raise PlanError(f"Fields are a matrix of bytes, not {values.dtype} {list(values.shape)}.")
    if values.shape[0] % fields_per_period(bits) or (values.shape[0] % 8 and tuple(order) != IN_ORDER):
        raise PlanError(f"{values.shape[0]} fields of {bits} bits do not fill whole words.")
    return kernels(values.device).op("pack_fields", pack_reference)(values, bits, order, last)  # type: ignore[no-any-return]


def unpack(words: Tensor, bits: int, order: Sequence[int] = IN_ORDER, last: bool = False) -> Tensor:
    """Return uint8 [n, m] from int32 [n * bits / 32, m], of any strides; the inverse of `pack`. last: as [m, n] instead."""
    if words.dim() != 2 or words.dtype != torch.int32:  # a kernel believes it
        raise PlanError(f"Packed words are a matrix of 32-bit integers, not {words.dtype} {list(words.shape)}.")
    if words.shape[0] * 32 % bits or (words.shape[0] * 32 // bits % 8 and tuple(order) != IN_ORDER):
        raise PlanError(f"{words.shape[0]} words do not hold whole fields of {bits} bits.")
    return kernels(words.device).op("unpack_fields", unpack_reference)(words, bits, order, last)  # type: ignore[no-any-return]


def pack_reference(values: Tensor, bits: int, order: Sequence[int], last: bool) -> Tensor:
    """Do what `pack` says in PyTorch."""
    if tuple(order) != IN_ORDER:
        values = _reordered(values, order)
    fields = _in_periods(values, fields_per_period(bits))
    if bits == 3:
        words = _from_words(_pack3(fields))
    else:
        per_byte = 8 // bits
        bytes_ = torch.zeros(*fields.shape[:2], fields.shape[2] // per_byte, dtype=torch.uint8, device=values.device)
        for k in range(per_byte):
            bytes_ |= (fields[:, :, k::per_byte] & ((1 << bits) - 1)) << (bits * k)
        words = _from_words(bytes_.view(torch.int32))
    return words.T.contiguous() if last else words


def unpack_reference(words: Tensor, bits: int, order: Sequence[int], last: bool) -> Tensor:
    """Do what `unpack` says in PyTorch."""
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
    values = _from_words(fields)
    if tuple(order) != IN_ORDER:
        values = _reordered(values, [list(order).index(place) for place in range(8)])
    return values.T.contiguous() if last else values


def _reordered(values: Tensor, order: Sequence[int]) -> Tensor:
    """Return uint8 [n, m] with each run of eight rows in another order."""
    return values.reshape(-1, 8, values.shape[1])[:, list(order)].reshape(values.shape)


def _in_periods(values: Tensor, length: int) -> Tensor:
    """Return [n, m] as contiguous [n / length, m, length]: each column's period side by side."""
    return values.reshape(-1, length, values.shape[1]).transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _from_words(periods: Tensor) -> Tensor:
    """Return [periods, m, length] as contiguous [periods * length, m]; the inverse of `_in_periods`."""
    return periods.transpose(1, 2).reshape(-1, periods.shape[1])


def _pack3(fields: Tensor) -> Tensor:
    """Return int32 [periods, m, 3] from 32 fields each; two fields cross a word."""
    wide = fields.to(torch.int64) & 7
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
