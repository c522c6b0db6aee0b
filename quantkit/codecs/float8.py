"""FP8 E4M3 weights: value = float8 * scale, one scale per tensor, per output channel, or per block of 128 x 128.

scale = largest magnitude / 448, rounded to the dtype it is stored in before any weight is; a float's relative precision is the
same everywhere, so no scale is searched. Blocks at the edges may be partial.
Source: the OCP 8-bit floating point specification (E4M3: bias 7, no infinity).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.codecs._activations import FLOAT8_MAX, Activation
from quantkit.codecs._levels import SCALE_DTYPES, largest
from quantkit.errors import UsageError
from quantkit.tensors import QuantTensor

STRATEGIES = ("tensor", "channel", "block")
BLOCK = 128


@dataclass(frozen=True)
class Float8:
    """The codec of one tensor. activations: none, dynamic or static."""

    strategy: str
    scale_dtype: str = "float32"
    activations: str = "none"
    block: tuple[int, int] = (BLOCK, BLOCK)

    name = "fp8"
    bits = 8

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise UsageError(f"--strategy {self.strategy} cannot be. Known: {', '.join(STRATEGIES)}.")
        if self.strategy == "block" and self.activations == "static":
            raise UsageError("--strategy block has no static activations. Use dynamic ones, or --strategy tensor or channel.")

    @property
    def label(self) -> str:
        """The grid in words."""
        scales = {"tensor": "a scale per tensor", "channel": "a scale per channel", "block": f"blocks of {self.block[0]} x {self.block[1]}"}
        return f"fp8, {scales[self.strategy]}" + ("" if self.activations == "none" else f", {self.activations} activations")

    @property
    def activation(self) -> Activation | None:
        """How inputs are rounded."""
        if self.activations == "none":
            return None
        return Activation("fp8", self.activations == "static", self.block[1] if self.strategy == "block" else 0)

    def shape_of_scale(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight [out, in]."""
        if self.strategy == "tensor":
            return (1,)
        return (shape[0], 1) if self.strategy == "channel" else (-(-shape[0] // self.block[0]), -(-shape[1] // self.block[1]))

    def refuse(self, shape: tuple[int, int]) -> str:
        """Return why a weight [out, in] cannot have this codec, or an empty string."""
        if self.strategy == "block" and self.activations != "none" and shape[1] % self.block[1]:
            return f"groups of {self.block[1]} activations do not divide {shape[1]} columns"
        return ""

    def bits_per_weight(self, columns: int) -> float:
        """Return the stored bits per weight of a wide row; a tensor's own scale is not worth counting."""
        bits = 8 * SCALE_DTYPES[self.scale_dtype].itemsize
        return 8 + {"tensor": 0.0, "channel": bits / columns, "block": bits / (self.block[0] * self.block[1])}[self.strategy]

    def round(self, weight: Tensor, search: bool, shared: Tensor | None) -> QuantTensor:
        """Return a weight, float32 [out, in], in this codec; shared: the largest magnitude of all that must have one scale."""
        if self.strategy == "tensor":
            reach = largest([weight]) if shared is None else shared
        elif self.strategy == "channel":
            reach = weight.abs().amax(1, keepdim=True)
        else:
            (out, columns), (high, wide) = weight.shape, self.block
            padded = torch.nn.functional.pad(weight.abs(), (0, -columns % wide, 0, -out % high))
            reach = padded.view(-(-out // high), high, -1, wide).amax((1, 3))
        dtype = SCALE_DTYPES[self.scale_dtype]
        scale = (reach / FLOAT8_MAX).clamp_min(torch.finfo(dtype).tiny).to(dtype).to(torch.float32)
        codes = (weight / self._spread(scale, weight.shape)).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
        return QuantTensor(codes.view(torch.uint8), {"scale": scale}, self)

    def share(self, weights: list[Tensor]) -> Tensor | None:
        """Return what weights that a runtime fuses must agree on: the largest magnitude, float32 [1], for a scale per tensor."""
        return largest(weights) if self.strategy == "tensor" else None

    def _spread(self, scale: Tensor, shape: torch.Size) -> Tensor:
        if self.strategy != "block":
            return scale
        wide = scale.repeat_interleave(self.block[0], 0).repeat_interleave(self.block[1], 1)
        return wide[: shape[0], : shape[1]]

    def decode(self, tensor: QuantTensor) -> Tensor:
        """Return float32 [out, in]."""
        values = tensor.codes.view(torch.float8_e4m3fn).to(torch.float32)
        return values * self._spread(tensor.params["scale"].to(torch.float32), values.shape)
