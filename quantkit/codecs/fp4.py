"""MXFP4 and NVFP4: E2M1 floats in groups with a scale.

MXFP4: groups of 32 columns, the scale a power of two (E8M0). NVFP4: groups of 16, the scale an E4M3 float times one
float32 per tensor. With the search a group's scale is the candidate with the least squared error, else the largest weight sits at 6.
Source: the OCP microscaling specification; for NVFP4 the conventions of compressed-tensors (the global scale is stored
as what multiplies a group's scale before it is rounded: weight = fp4 * scale / global).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.codecs._activations import FLOAT8_MAX, Activation
from quantkit.codecs._levels import E2M1_MAX, best_scale, largest, round_e2m1, values_e2m1
from quantkit.errors import UsageError
from quantkit.tensors import QuantTensor

E8M0_BIAS = 127
ZEROS_SCALE = 0.125  # what the library gives a group of zeros
# The largest weight of a group at 6, at 4 (twice as fine above), and between.
NV_REACHES = (1.0, 1.5, 1.25, 1.125, 0.9)


@dataclass(frozen=True)
class Fp4:
    """The codec of one tensor; kind: mxfp4 or nvfp4."""

    kind: str
    activations: str = "none"

    bits = 4

    def __post_init__(self) -> None:
        if self.activations != "none":
            raise UsageError(f"{self.kind} is written for weights alone: --activations none.")

    @property
    def name(self) -> str:
        """The codec's name in the table."""
        return self.kind

    @property
    def label(self) -> str:
        """The grid in words."""
        return f"{self.kind}, groups of {self.group}"

    @property
    def activation(self) -> Activation | None:
        """Inputs are not rounded."""
        return None

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return 32 if self.kind == "mxfp4" else 16

    def refuse(self, shape: tuple[int, int]) -> str:
        """Return why a weight [out, in] cannot have this codec, or an empty string."""
        return f"{self.kind} packs groups of {self.group}, which do not divide {shape[1]} columns" if shape[1] % self.group else ""

    def bits_per_weight(self, columns: int) -> float:
        """Return the stored bits per weight."""
        return 4 + 8 / self.group

    def share(self, weights: list[Tensor]) -> Tensor | None:
        """Return what weights that a runtime fuses must agree on: the largest magnitude, float32 [1], for NVFP4's global scale."""
        return None if self.kind == "mxfp4" else largest(weights)

    def round(self, weight: Tensor, search: bool, shared: Tensor | None) -> QuantTensor:
        """Return a weight, float32 [out, in], in this codec; shared: the largest magnitude of all that must have one global scale."""
        groups = weight.reshape(-1, self.group)
        reach = groups.abs().amax(1)
        if self.kind == "mxfp4":
            exponent = torch.frexp((reach / E2M1_MAX).clamp_min(2.0**-126))
            top = (exponent.exponent - (exponent.mantissa == 0.5).to(torch.int32)).clamp(-126, 127)  # the largest weight fits
            nearest = torch.frexp((reach * (8 / 7)).clamp_min(2.0**-126)).exponent - 3  # as the runtimes' own writers have it
            tries = [nearest, top, top - 1] if search else [nearest]
            scale = best_scale(groups, [torch.ldexp(torch.ones_like(reach), e.clamp(-127, 127)) for e in tries], _rounded)
            params = {"scale": (torch.frexp(scale).exponent - 1 + E8M0_BIAS).to(torch.uint8).view(len(weight), -1)}
            return QuantTensor(round_e2m1(groups / scale[:, None]).view(weight.shape), params, self)
        whole = (FLOAT8_MAX * E2M1_MAX) / (largest([weight]) if shared is None else shared).clamp_min(1e-30)
        locals_ = [_as_float8(whole * reach * share / E2M1_MAX) for share in (NV_REACHES if search else NV_REACHES[:1])]
        scale = best_scale(groups, [value / whole for value in locals_], _rounded)
        local = torch.where(reach > 0, _as_float8(scale * whole), ZEROS_SCALE)
        params = {"scale": local.to(torch.float8_e4m3fn).view(torch.uint8).view(len(weight), -1), "global_scale": whole}
        return QuantTensor(round_e2m1(groups / (local / whole)[:, None]).view(weight.shape), params, self)

    def decode(self, tensor: QuantTensor) -> Tensor:
        """Return float32 [out, in]."""
        stored = tensor.params["scale"]
        if self.kind == "mxfp4":
            scale = torch.ldexp(torch.ones(stored.shape, device=stored.device), stored.to(torch.int32) - E8M0_BIAS)
        else:
            scale = stored.view(torch.float8_e4m3fn).to(torch.float32) / tensor.params["global_scale"]
        values = values_e2m1(tensor.codes).view(*scale.shape, self.group)
        return (values * scale[..., None]).view(tensor.codes.shape)


def _as_float8(scale: Tensor) -> Tensor:
    """Return scales as E4M3 holds them, none of them 0."""
    return scale.clamp(2.0**-9, FLOAT8_MAX).to(torch.float8_e4m3fn).to(torch.float32)


def _rounded(groups: Tensor, scale: Tensor) -> Tensor:
    return values_e2m1(round_e2m1(groups / scale[:, None])) * scale[:, None]
