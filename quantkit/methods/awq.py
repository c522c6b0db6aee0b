"""AWQ: scale input columns so that rounding hurts the outputs least, and hide the scales in what comes before.

Source: Lin et al. 2023, "AWQ", section 3. A column that is multiplied by s before rounding, its input divided by s, has its
rounding error divided by s; but a larger column widens its group's grid for everybody. The scales are mean activations to a
power over mean weights to the rest of it (as AutoAWQ has it), one per unit of the pair, so grouped key-value heads take part.
Clipping is no step of its own: the solver that follows searches each group's grid. Tried and left out: scales from the minimum
of a model of the error (22.64 where these give 22.21).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantkit.codecs.affine import Affine
from quantkit.methods._scaling import SMALLEST, Scaler, Trial, normalize


class AWQ(Scaler):
    """The transform."""

    powers = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.7)

    def scales(self, trial: Trial, power: float) -> Tensor:
        """Return mean|x|^power / share^(1 - power), the shares being |w| relative to the largest of its group, averaged over rows."""
        shares = torch.zeros_like(trial.seen.mean)
        for (_, codec), weight in zip(trial.linears, trial.weights, strict=True):
            groups = weight.abs().view(len(weight), -1, _width(codec, weight.shape[1]))
            shares += (groups / groups.amax(-1, keepdim=True).clamp_min(1e-30)).view_as(weight).sum(0)
        shares /= sum(len(weight) for weight in trial.weights)
        return normalize(trial.by_unit(trial.seen.mean) ** power / (trial.by_unit(shares) ** (1 - power)).clamp_min(SMALLEST))


def _width(codec: Any, columns: int) -> int:
    """Return the columns that share a scale."""
    return codec.width(columns) if isinstance(codec, Affine) else min(codec.block, 32)
