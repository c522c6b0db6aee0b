"""The operations of the CUDA backend: arguments and results of the references, one kernel launch each.

An operation that a kernel does not cover (a group wider than a span, more candidates than lanes hold) goes to its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.backends.cuda.launch import Launcher, Wide, launcher
from quantkit.codecs._levels import SCALE_DTYPES
from quantkit.codecs.affine import MIN_SCALE
from quantkit.errors import UsageError

SPAN, CANDIDATES, WARPS, ROWS = 128, 64, 8, 8
TILE_N, TILE_M = 64, 32
K_THREADS = 128
SUBS = {"Q2_K": 16, "Q3_K": 16, "Q4_K": 8, "Q5_K": 8, "Q6_K": 16}
MANTISSA = {"float16": 10, "bfloat16": 7, "float32": 23}


class Ops:
    """The operations on one launcher's device."""

    def __init__(self, on: Launcher) -> None:
        self.on = on

    def pack_fields(self, values: Tensor, bits: int, order: Sequence[int], last: bool) -> Tensor:
        """See `quantkit.formats._bits.pack_reference`."""
        n, m = values.shape
        words = self.on.empty(*((m, n * bits // 32) if last else (n * bits // 32, m)), dtype=torch.int32)
        self._fields("pack_fields", [values, words.T if last else words], n, m, bits, order)
        return words

    def unpack_fields(self, words: Tensor, bits: int, order: Sequence[int], last: bool) -> Tensor:
        """See `quantkit.formats._bits.unpack_reference`."""
        n, m = words.shape[0] * 32 // bits, words.shape[1]
        values = self.on.empty(*((m, n) if last else (n, m)), dtype=torch.uint8)
        self._fields("unpack_fields", [words, values.T if last else values], n, m, bits, order)
        return values

    def _fields(self, kernel: str, ends: list[Tensor], n: int, m: int, bits: int, order: Sequence[int]) -> None:
        """Run a kernel from ends[0] to ends[1], each with its strides."""
        nibbles = sum(place << (4 * field) for field, place in enumerate(order))
        nibbles -= (1 << 32) if nibbles >= 1 << 31 else 0
        arguments = [part for end in ends for part in (end, Wide(end.stride(0)), Wide(end.stride(1)))]
        if n and m:
            self.on.launch("pack", kernel, (-(-n // TILE_N), -(-m // TILE_M)), 256, [*arguments, n, m, bits, nibbles])

    def gptq_columns(
        self, weight: Tensor, factor: Tensor, importance: Tensor, codec: Any, group: int, search: Any, grid: Any = None
    ) -> Any:
        """See `quantkit.methods.gptq.columns_reference`."""
        rows, n = weight.shape
        count = 0 if grid is not None else len(search.shrinks)
        if n > SPAN or count > CANDIDATES:
            raise UsageError(f"gptq_columns: a span of {n} columns with {count} candidates; at most {SPAN} and {CANDIDATES}.")
        if grid is None:
            scale, zero = (self.on.empty(rows, n // group, dtype=torch.float32) for _ in range(2))
        else:
            scale, zero = grid.scale.contiguous(), grid.offset.to(torch.float32).contiguous()
        codes, errors = self.on.empty(rows, n, dtype=torch.uint8), self.on.empty(rows, n, dtype=torch.float32)
        tensors = [weight.contiguous(), factor.contiguous(), importance.contiguous(), scale, zero, codes, errors]
        sizes = [rows, n, group, count, min(search.kept, max(count, 1))]
        tensors += self._candidates(search)
        self.on.launch("columns", "gptq_columns", (-(-rows // WARPS), 1), 256, [*tensors, *sizes, *self._limits(codec)])
        return codes, errors, scale, zero

    def round_affine(self, weight: Tensor, codec: Any, search: Any, energy: Tensor, tiles: Tensor | None) -> Any:
        """See `quantkit.methods._rounding.round_reference`."""
        rows, columns = weight.shape
        group, count = codec.width(columns), len(search.shrinks)
        if group > SPAN or count > CANDIDATES:
            from quantkit.methods._rounding import round_reference

            return round_reference(weight, codec, search, energy, tiles)
        scale, zero = (self.on.empty(rows, columns // group, dtype=torch.float32) for _ in range(2))
        codes = self.on.empty(rows, columns, dtype=torch.uint8)
        tensors = [weight.contiguous(), energy.contiguous(), None if tiles is None else tiles.contiguous(), scale, zero, codes]
        sizes = [rows, columns, group, count, 1 if tiles is None else min(search.kept, count)]
        grid = (-(-rows // WARPS), min(columns // group, 65535))
        self.on.launch("columns", "round_affine", grid, 256, [*tensors, *self._candidates(search), *sizes, *self._limits(codec)])
        return codes, scale, zero

    def _candidates(self, search: Any) -> list[Tensor]:
        return [part.to(self.on.device, torch.float32).contiguous() for part in (search.shrinks, search.zeros)]

    @staticmethod
    def _limits(codec: Any) -> list[int | float]:
        most = float(torch.finfo(SCALE_DTYPES[codec.scale_dtype]).max)
        return [codec.middle if codec.symmetric else 0, codec.high, MANTISSA[codec.scale_dtype], MIN_SCALE, most]

    def encode(self, codec: Any, rows: Tensor, importance: Tensor | None = None) -> Tensor:
        """See `quantkit.codecs._ggml.BlockCodec.encode`: the K types and Q8_0."""
        count, columns = rows.shape
        width, per_row = codec.row_bytes(columns), columns // codec.block
        out = self.on.empty(count, width, dtype=torch.uint8)
        weight = None
        if importance is not None and codec.weighted:
            weight = importance.to(self.on.device, torch.float32).contiguous()
        blocks = count * per_row
        grid = (-(-blocks * SUBS.get(codec.name, 1) // K_THREADS), 1)
        source = rows.to(torch.float32).contiguous()
        if blocks:
            self.on.launch("k_quants", codec.name.lower(), grid, K_THREADS, [source, weight, out, Wide(blocks), per_row])
        return out

    def multiply_groups(self, x: Tensor, planes: Any) -> Tensor:
        """Return x WT, float32 [rows, out], for x, float16 or bfloat16 [1..8, in], and `quantkit.infer.linear.Planes` of 4 bits."""
        middle = planes.middle if planes.zero is None else 0
        if planes.bits != 4 or planes.offset is not None or planes.group % 32:
            raise UsageError(
                f"groups4 multiplies 4-bit codes with zero points in groups of 32 or more, not {planes.bits} bits in {planes.group}."
            )
        return self._multiply("groups4", x, len(planes.packed), [planes.packed, planes.scale, planes.zero, middle, planes.group])

    def multiply_blocks(self, kind: str, x: Tensor, packed: Tensor) -> Tensor:
        """Return x WT, float32 [rows, out], for x, float16 or bfloat16 [1..8, in], and blocks of Q4_K, Q6_K or Q8_0, uint8 [out, bytes]."""
        return self._multiply(kind.lower(), x, len(packed), [packed])

    def _multiply(self, kernel: str, x: Tensor, out: int, weight: list[Any]) -> Tensor:
        rows, columns = x.shape
        if not 1 <= rows <= ROWS or x.dtype not in (torch.float16, torch.bfloat16) or columns % 32:
            raise UsageError(
                f"{kernel} multiplies 1 to {ROWS} rows of float16 or bfloat16, a multiple of 32 wide; not {list(x.shape)} {x.dtype}."
            )
        if not all(part.is_contiguous() for part in [x, *weight] if isinstance(part, Tensor)):
            raise UsageError(f"{kernel} reads contiguous tensors only.")
        y = self.on.empty(rows, out, dtype=torch.float32)
        brain = int(x.dtype == torch.bfloat16)
        self.on.launch("matvec", kernel, (-(-out // WARPS), 1), 256, [x, y, rows, columns, brain, out, *weight])
        return y

    def quantize_page(self, tail: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return keys int8 [heads, size, 64], values int8 [heads, 64, size] and their float16 scales.

        tail: float16 [2, heads, 64, size], keys and values of 64 tokens.
        """
        _, heads, tokens, size = tail.shape
        if tokens != 64 or size > 256:
            raise UsageError(f"quantize_page rounds 64 tokens of at most 256 columns, not {tokens} of {size}.")
        keys, values = (self.on.empty(heads, *shape, dtype=torch.int8) for shape in ((size, tokens), (tokens, size)))
        scales = [self.on.empty(heads, width, dtype=torch.float16) for width in (size, tokens)]
        self.on.launch("cache", "quantize_page", (heads, 2), 256, [tail.contiguous(), keys, values, *scales, heads, size])
        return keys, values, scales[0], scales[1]

    def gather_pages(self, pages: Any, table: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, bfloat16 [heads, 64 * pages, size], of the pages in `table`, int64 [pages]."""
        heads, size, tokens = pages.keys.shape[1:]
        keys, values = (self.on.empty(heads, len(table) * tokens, size, dtype=torch.bfloat16) for _ in range(2))
        held = [pages.keys, pages.values, pages.key_scale, pages.value_scale]
        arguments = [*held, table.to(self.on.device, torch.int32), keys, values, heads, size, len(table)]
        self.on.launch("cache", "gather_pages", (len(table), heads), 256, arguments)
        return keys, values


def _here() -> Ops:
    return Ops(launcher(torch.cuda.current_device() if torch.cuda.is_available() else 0))


def gptq_columns(threads: int) -> Callable[..., Any]:
    """Return the kernel."""
    return _here().gptq_columns


def round_affine(threads: int) -> Callable[..., Any]:
    """Return the kernel."""
    return _here().round_affine


def pack_fields(threads: int) -> Callable[..., Tensor]:
    """Return the kernel."""
    return _here().pack_fields


def unpack_fields(threads: int) -> Callable[..., Tensor]:
    """Return the kernel."""
    return _here().unpack_fields


def _encoder(name: str) -> Callable[[int], Callable[..., Tensor]]:
    def make(threads: int) -> Callable[..., Tensor]:
        from quantkit.codecs import CODECS

        ops, codec = _here(), CODECS[name]
        return lambda rows, importance=None: ops.encode(codec, rows, importance)

    return make


q2_k, q3_k, q4_k, q5_k, q6_k, q8_0 = map(_encoder, ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0"))
