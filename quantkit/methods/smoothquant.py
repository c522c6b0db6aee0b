"""SmoothQuant: move the range of activations into the weights, so that both fit 8 bits.

Source: Xiao et al. 2022, "SmoothQuant", section 4: s = max|x|^alpha / max|w|^(1 - alpha) for each input channel; inputs are divided
by it, columns multiplied. Alpha is searched for each pair, or given for all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.backends import Backend
from quantkit.methods._options import SmoothQuantOptions
from quantkit.methods._scaling import SMALLEST, Scaler, Trial, normalize


class SmoothQuant(Scaler):
    """The transform."""

    powers: tuple[float, ...] = (0.2, 0.35, 0.5, 0.65, 0.8)

    def __init__(self, options: SmoothQuantOptions, backend: Backend, head: int) -> None:
        super().__init__(options, backend, head)
        if options.alpha != -1:
            self.powers, self.forced = (options.alpha,), True

    def scales(self, trial: Trial, power: float) -> Tensor:
        """Return max|x|^power / max|w|^(1 - power)."""
        reach = torch.stack([weight.abs().amax(0) for weight in trial.weights]).amax(0)
        inputs, weights = (trial.largest_by_unit(columns).clamp_min(SMALLEST) for columns in (trial.seen.peak, reach))
        return normalize(inputs**power / weights ** (1 - power))
