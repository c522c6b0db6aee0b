"""bitsandbytes' codecs: NF4 and FP4 in blocks of 64 values of the flattened weight, and rows of INT8.

A block's value is table[code] * absmax. With double quantization absmax is itself stored in 8 bits: less its mean, in blocks of
256, on a table of 256 "dynamic" values. INT8: value = code * absmax / 127, absmax that of the row.
The search tries smaller absmax per block; without it the codes are the library's own.
Source: Dettmers et al. 2023, "QLoRA", sections 3 and D; Dettmers et al. 2022, "LLM.int8()"; the library's layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.codecs._activations import Activation
from quantkit.codecs._levels import best_scale
from quantkit.tensors import QuantTensor

BLOCK = 64
NESTED = 256
SHRINKS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85)
TINY = 1e-38
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4_TWELFTHS = (0, 0.0625, 8, 12, 4, 6, 2, 3)


def table_of(kind: str) -> Tensor:
    """Return the 16 values of a code, float32."""
    if kind == "nf4":
        return torch.tensor(NF4)
    half = torch.tensor(FP4_TWELFTHS) / 12
    return torch.cat([half, -half])


def dynamic_table() -> Tensor:
    """Return the 256 values that absmax is stored on, float32, ascending: for each power of ten, the middles of equal parts of 0.1 to 1."""
    values = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1, (1 << power) + 1, dtype=torch.float32)
        middles = (edges[:-1] + edges[1:]) / 2
        values += ((10.0 ** (power - 6)) * middles).tolist() + (-(10.0 ** (power - 6)) * middles).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32)


def _nearest(x: Tensor, table: Tensor) -> Tensor:
    """Return the index of the nearest table entry; a value in the middle takes the lower."""
    order = torch.argsort(table, stable=True)
    ordered = table[order]
    return order[torch.bucketize(x, (ordered[:-1] + ordered[1:]) / 2)]


@dataclass(frozen=True)
class Bnb4:
    """The 4-bit codec of one tensor. kind: nf4 or fp4; double: whether absmax is quantized too; dtype: what the library dequantizes to."""

    kind: str
    double: bool = True
    dtype: str = "bfloat16"
    block: int = BLOCK

    bits = 4
    activations = "none"

    @property
    def name(self) -> str:
        """The codec's name in the table."""
        return self.kind

    @property
    def label(self) -> str:
        """The grid in words."""
        return f"{self.kind}, blocks of {self.block}" + (", double quantization" if self.double else "")

    @property
    def activation(self) -> Activation | None:
        """Inputs are not rounded."""
        return None

    def refuse(self, shape: tuple[int, int]) -> str:
        """Return why a weight [out, in] cannot have this codec, or an empty string."""
        if shape[1] % self.block:  # its CPU kernels misread such rows
            return f"blocks of {self.block} do not divide {shape[1]} columns, which {self.kind} kernels need"
        return ""

    def blocks(self, shape: tuple[int, int]) -> int:
        """Return the blocks of a weight [out, in]; the last may be partial."""
        return -(-shape[0] * shape[1] // self.block)

    def bits_per_weight(self, columns: int) -> float:
        """Return the stored bits per weight."""
        return 4 + (8 + 32 / NESTED if self.double else 32) / self.block

    def share(self, weights: list[Tensor]) -> Tensor | None:
        """Nothing is shared between weights."""
        return None

    def round(self, weight: Tensor, search: bool, shared: Tensor | None) -> QuantTensor:
        """Return a weight, float32 [out, in], in this codec."""
        table = table_of(self.kind).to(weight.device)
        flat = torch.nn.functional.pad(weight.reshape(-1), (0, -weight.numel() % self.block)).view(-1, self.block)
        absmax = flat.abs().amax(1)

        def rounded(groups: Tensor, scale: Tensor) -> Tensor:
            return table[_nearest(groups * (1.0 / scale.clamp_min(TINY))[:, None], table)] * scale[:, None]

        if search:
            absmax = best_scale(flat, [absmax * shrink for shrink in SHRINKS], rounded)
        params = {"absmax": absmax}
        if self.double:
            params = nest(absmax)
            if search:
                absmax = self.absmax(params)  # codes for the scales that will be read back
        scaled = (flat * (1.0 / absmax.clamp_min(TINY))[:, None]).clamp(-1, 1)
        codes = _nearest(scaled, table).to(torch.uint8).reshape(-1)[: weight.numel()]
        return QuantTensor(codes.view(weight.shape), params, self)

    def absmax(self, params: dict[str, Tensor]) -> Tensor:
        """Return the scale of every block, float32 [blocks]."""
        if not self.double:
            return params["absmax"]
        table = dynamic_table().to(params["absmax"].device)
        blocks = torch.arange(len(params["absmax"]), device=table.device) // NESTED
        return table[params["absmax"].long()] * params["nested_absmax"][blocks] + params["offset"]

    def decode(self, tensor: QuantTensor) -> Tensor:
        """Return float32 [out, in]."""
        codes = tensor.codes.reshape(-1)
        values = table_of(self.kind).to(codes.device)[codes.long()]
        blocks = torch.arange(len(codes), device=codes.device) // self.block
        return (values * self.absmax(tensor.params)[blocks]).view(tensor.codes.shape)


def nest(absmax: Tensor) -> dict[str, Tensor]:
    """Return absmax, float32 [blocks], in 8 bits: codes uint8, the blocks' own absmax float32, and the offset, float32 []."""
    offset = absmax.mean()
    rest = absmax - offset
    padded = torch.nn.functional.pad(rest, (0, -len(rest) % NESTED)).view(-1, NESTED)
    nested = padded.abs().amax(1)
    scaled = (padded * (1.0 / nested.clamp_min(TINY))[:, None]).clamp(-1, 1)
    whole = len(rest) // NESTED * NESTED
    if whole < len(rest):  # the library divides in a partial block, and multiplies by the reciprocal in a full one
        last = rest[whole:]
        scaled = torch.cat([scaled.reshape(-1)[:whole], (last / last.abs().amax().clamp_min(TINY)).clamp(-1, 1)])
    codes = _nearest(scaled.reshape(-1)[: len(rest)], dynamic_table().to(absmax.device))
    return {"absmax": codes.to(torch.uint8), "nested_absmax": nested.clamp_min(TINY), "offset": offset}


@dataclass(frozen=True)
class RowInt8:
    """The 8-bit codec of one tensor: the weights of LLM.int8()."""

    name = "llm-int8"
    bits = 8
    activations = "none"

    @property
    def label(self) -> str:
        """The grid in words."""
        return "int8, whole rows, symmetric (LLM.int8)"

    @property
    def activation(self) -> Activation | None:
        """Inputs are rounded by the runtime, outliers apart; that is not imitated."""
        return None

    def refuse(self, shape: tuple[int, int]) -> str:
        """Everything fits."""
        return ""

    def bits_per_weight(self, columns: int) -> float:
        """Return the stored bits per weight."""
        return 8 + 32 / columns

    def share(self, weights: list[Tensor]) -> Tensor | None:
        """Nothing is shared between weights."""
        return None

    def round(self, weight: Tensor, search: bool, shared: Tensor | None) -> QuantTensor:
        """Return a weight, float32 [out, in], in this codec; the codes are the int8 values seen as uint8."""
        absmax = weight.abs().amax(1)
        ratio = torch.full_like(absmax, 127.0).div(absmax.clamp_min(TINY))  # number / tensor would multiply by a reciprocal
        codes = (weight * ratio[:, None]).round().clamp(-127, 127).to(torch.int8)
        return QuantTensor(codes.view(torch.uint8), {"absmax": absmax}, self)

    def decode(self, tensor: QuantTensor) -> Tensor:
        """Return float32 [out, in]."""
        values = tensor.codes.view(torch.int8).to(torch.float32)
        return values * (tensor.params["absmax"] / 127.0)[:, None]
