"""How a linear's input is rounded at run time, when an artifact says so: what compressed-tensors calls input_activations.

Scales are the runtime's: for each token, run of columns or whole tensor the largest magnitude over half the integer range
(127.5) or the largest float (448); a static scale was measured at calibration. `apply` does what the runtime's kernel
stands for in floating point: round to the grid and multiply the scale back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

FLOAT8_MAX = 448.0
KINDS = ("none", "dynamic", "static")
REACH = {"int8": 127.5, "fp8": FLOAT8_MAX}


@dataclass(frozen=True)
class Activation:
    """kind: int8 or fp8; group: columns that share a dynamic scale, 0 for the whole token; static: one scale for the tensor."""

    kind: str
    static: bool = False
    group: int = 0

    def static_scale(self, peak: float) -> Tensor:
        """Return the scale, float32 [1], of a tensor whose largest magnitude is `peak`."""
        return torch.tensor([max(peak, 1e-12) / REACH[self.kind]], dtype=torch.float32)

    def apply(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return x, float [..., in], as the runtime's kernel reads it; scale: the static one, float32 [1]."""
        shape = x.shape
        rows = x.reshape(*shape[:-1], -1, self.group) if self.group else x
        if not self.static:
            scale = (rows.abs().amax(-1, keepdim=True) / REACH[self.kind]).clamp_min(torch.finfo(x.dtype).eps)
        assert scale is not None
        if self.kind == "int8":
            rounded = (rows / scale).round().clamp(-128, 127)
        else:
            rounded = (rows / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn).to(x.dtype)
        return (rounded * scale).to(x.dtype).reshape(shape)


class RoundedInputs:
    """Stands in for a linear's forward and rounds its input first; a static scale that is not there yet rounds nothing."""

    def __init__(self, module: nn.Module, activation: Activation, scale: Tensor | None = None) -> None:
        self.forward, self.activation, self.scale = module.forward, activation, scale

    def __call__(self, x: Tensor) -> Tensor:
        """Return the linear's output for x, float [..., in]."""
        ready = not self.activation.static or self.scale is not None
        result: Tensor = self.forward(self.activation.apply(x, self.scale) if ready else x)
        return result
