"""Groups of small integers: value = scale * (code - zero), with 2, 3, 4 or 8 bits a code.

A group is `group` neighbouring columns of one row, or the whole row for -1. Scales are rounded to the dtype they are
stored in before any code is chosen, so nothing is lost on the way to disk. Symmetric means zero = 2^(bits-1); a range
always contains 0, whatever the signs of the weights. The codec does not pack: that is the container's business.

Source: the range conventions of GPTQ (Frantar et al. 2022) with the corrections that the shared extreme weight
sits at +-(2^bits - 1)/2 scales and that a one-signed symmetric group keeps both signs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.codecs._activations import Activation
from quantkit.codecs._grid import require_grid
from quantkit.codecs._levels import SCALE_DTYPES
from quantkit.errors import PlanError, UsageError
from quantkit.tensors import Grid, QuantTensor

# The smallest scale worth having: normal in float16, so that no group's step loses precision.
MIN_SCALE = 2.0**-14


@dataclass(frozen=True)
class Affine:
    """The codec of one tensor; frozen, so that it can be compared and journaled."""

    bits: int
    group: int
    symmetric: bool
    scale_dtype: str = "float16"
    activations: str = "none"

    def __post_init__(self) -> None:
        if self.activations != "none" and (self.bits != 8 or self.group != -1):
            raise UsageError("--activations int8 kernels want weights of 8 bits in whole rows: --bits 8 --group-size -1.")
        require_grid(self.bits, self.group)

    name = "affine"

    @property
    def label(self) -> str:
        """The grid in words."""
        group = "whole rows" if self.group == -1 else f"groups of {self.group}"
        inputs = "" if self.activations == "none" else f", {self.activations} int8 activations"
        return f"{self.bits} bits, {group}, {'symmetric' if self.symmetric else 'asymmetric'}{inputs}"

    @property
    def activation(self) -> Activation | None:
        """How inputs are rounded."""
        return None if self.activations == "none" else Activation("int8", self.activations == "static")

    @property
    def high(self) -> int:
        """The largest code; the smallest is 0."""
        return (1 << self.bits) - 1

    @property
    def max_scale(self) -> float:
        """The largest scale that can be stored; a group that needs more is clipped."""
        return torch.finfo(SCALE_DTYPES[self.scale_dtype]).max

    @property
    def middle(self) -> int:
        """The zero point of a symmetric group."""
        return 1 << (self.bits - 1)

    def width(self, columns: int) -> int:
        """Return the columns of a group in a row of `columns`."""
        return columns if self.group == -1 else self.group

    def groups(self, columns: int) -> int:
        """Return the groups in a row of `columns`; a PlanError if they do not come out even."""
        if columns % self.width(columns):
            raise PlanError(f"A group of {self.group} does not divide {columns} columns.")
        return columns // self.width(columns)

    def bits_per_weight(self, columns: int) -> float:
        """Return the stored bits per weight, scales and zero points included."""
        scale = 8 * SCALE_DTYPES[self.scale_dtype].itemsize
        return self.bits + (scale + (0 if self.symmetric else self.bits)) / self.width(columns)

    def round_scale(self, scale: Tensor) -> Tensor:
        """Return float32 scales that are exact in the stored dtype: finite, none nearer to 0 than the smallest useful one."""
        size = scale.abs().clamp(MIN_SCALE, self.max_scale).to(SCALE_DTYPES[self.scale_dtype]).to(torch.float32)
        return torch.where(scale < 0, -size, size)

    def range_of(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and the largest value, float32 [out], that the grid of each row should reach."""
        low, high = weight.amin(1).clamp_max(0), weight.amax(1).clamp_min(0)
        if self.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        return low, high

    def params_for(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return (scale, zero), float32 [out], of a grid from `low` to `high`; both exact as stored."""
        scale = self.round_scale((high - low) / self.high)
        if self.symmetric:
            return scale, torch.full_like(scale, self.middle)
        return scale, (-low / scale).round().clamp(0, self.high)

    def encode(self, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Return codes, uint8 [out, n], of weights [out, n] on grids scale, zero [out, 1]."""
        return ((weight * (1.0 / scale)).round() + zero).clamp(0, self.high).to(torch.uint8)

    def fit(self, weight: Tensor, importance: Tensor | None = None, shrinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (scale, zero), float32 [out], for one group of weights [out, n].

        Without `shrinks` the grid spans the weights. With them, float32 [steps], the range shrunk by each factor is
        tried and the least squared error, weighted per column by `importance` [n], wins; the first of equals stays.
        """
        low, high = self.range_of(weight)
        best_scale, best_zero = self.params_for(low, high)
        if shrinks is None:
            return best_scale, best_zero
        importance = torch.ones_like(weight[0]) if importance is None else importance
        best = torch.full_like(low, torch.inf)
        for shrink in shrinks.tolist():
            scale, zero = self.params_for(low * shrink, high * shrink)
            codes = self.encode(weight, scale[:, None], zero[:, None])
            error = ((scale[:, None] * (codes - zero[:, None]) - weight).square() * importance).sum(1)
            better = error < best
            best = torch.where(better, error, best)
            best_scale = torch.where(better, scale, best_scale)
            best_zero = torch.where(better, zero, best_zero)
        return best_scale, best_zero

    def grid(self, scale: Tensor, zero: Tensor) -> Grid:
        """Return the grid of scales and zeros, float32 [out, groups]."""
        return Grid(scale=scale, offset=zero, low=0, high=self.high)

    def decode(self, tensor: QuantTensor) -> Tensor:
        """Return float32 [out, in]: scale * (code - zero), the product rounded once."""
        scale, zero = tensor.params["scale"], tensor.params["zero"].to(torch.float32)
        columns = tensor.codes.shape[1]
        codes = tensor.codes.to(torch.float32)
        if tensor.group_index is None:
            width = columns // scale.shape[1]
            return ((codes.view(-1, scale.shape[1], width) - zero[:, :, None]) * scale[:, :, None]).view(-1, columns)
        index = tensor.group_index.long()
        return (codes - zero[:, index]) * scale[:, index]
