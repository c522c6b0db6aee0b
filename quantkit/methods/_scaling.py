"""Scales searched pair by pair: what AWQ and SmoothQuant share.

A method names a family of scales with one parameter; here each member is judged by the output of the pair's whole consumer
(attention, gated MLP, or the linear), rounded weights and, if the codec says so, rounded inputs included, on the consumer's
own recorded calls: no block is ever run again, and no copy of it is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.backends import Backend
from quantkit.codecs.affine import Affine
from quantkit.methods._rounding import make_search, round_reference, round_weight
from quantkit.tensors import Pair, Seen

SMALLEST = 1e-4


class Scaler(ABC):
    """A transform of the float weights, for one run. powers: the grid; refine: steps beside its best; forced: the grid as it is."""

    powers: tuple[float, ...]
    refine = 0.05
    forced = False

    def __init__(self, options: Any, backend: Backend, head: int) -> None:
        """Take the columns of an attention head, for the pairs' search."""
        self.options, self.head, self.keep = options, head, options.search_tokens
        self.backend = backend
        self.round = backend.op("round_affine", round_reference)

    @abstractmethod
    def scales(self, trial: Trial, power: float) -> Tensor:
        """Return the family's member, float32 [units]."""

    @torch.no_grad()
    def search(self, block: nn.Module, pair: Pair, seen: Seen, codecs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Return the pair's scales, float32 [units], and a note; ones if no scale helps.

        codecs: of the linears that will be quantized, by name; others stay as they are.
        """
        trial = Trial(self.rounded, block, pair, seen, codecs)
        ones = torch.ones(pair.units, device=seen.mean.device)
        plain = trial.error(ones)
        errors = {power: trial.error(self.scales(trial, power)) for power in self.powers}
        if not self.forced:
            middle = min(errors, key=lambda power: errors[power])
            errors |= {power: trial.error(self.scales(trial, power)) for power in (middle - self.refine, middle + self.refine)}
        power = min(errors, key=lambda power: errors[power])
        note = {"group": list(pair.group.names), "before": pair.before, "error_unscaled": plain}
        if errors[power] >= plain and not self.forced:
            return ones, {**note, "power": None, "error": plain}
        return self.scales(trial, power), {**note, "power": round(power, 4), "error": errors[power]}

    def rounded(self, weight: Tensor, codec: Any, energy: Tensor) -> Tensor:
        """Return what a weight, float32 [out, in], becomes on this codec; energy: float32 [in]."""
        if isinstance(codec, Affine):
            return round_weight(weight, codec, make_search(codec.symmetric, False, False), None, self.round).dequantize()
        encode = self.backend.op(codec.name, codec.encode)
        shown: Tensor = codec.decode(encode(weight, energy))
        return shown


class Trial:
    """One pair under test: its weights, what the consumer gives with them, and the error for any scales."""

    def __init__(
        self, rounded: Callable[[Tensor, Any, Tensor], Tensor], block: nn.Module, pair: Pair, seen: Seen, codecs: dict[str, Any]
    ) -> None:
        self.rounded, self.pair, self.seen = rounded, pair, seen
        self.consumer = block.get_submodule(pair.consumer)
        self.index = pair.index.to(seen.mean.device)
        self.linears = [(block.get_submodule(name), codecs[name]) for name in pair.group.names if name in codecs]
        self.weights = [natural(module).clone() for module, _ in self.linears]
        self.energy = seen.stats.energy()
        self.exact = [self._run(call) for call in seen.calls]
        self.power = sum(float(output.square().sum()) for output in self.exact)

    def _run(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Tensor:
        output = self.consumer(*call[0], **call[1])
        value: Tensor = output[0] if isinstance(output, tuple) else output
        return value.to(torch.float32)

    def error(self, scale: Tensor) -> float:
        """Return the relative squared error of the consumer's output when the scaled weights, and inputs, are rounded."""
        columns = scale[self.index]
        for (module, codec), weight in zip(self.linears, self.weights, strict=True):
            natural(module).copy_(self.rounded(weight * columns, codec, self.energy / columns.square()) / columns)
        with self._rounded_inputs(columns):
            off = sum(float((self._run(call) - exact).square().sum()) for call, exact in zip(self.seen.calls, self.exact, strict=True))
        for (module, _), weight in zip(self.linears, self.weights, strict=True):
            natural(module).copy_(weight)
        return off / max(self.power, 1e-30)

    @contextmanager
    def _rounded_inputs(self, columns: Tensor) -> Iterator[None]:
        """Let the linears read their inputs as the runtime will, which sees them divided by the scales."""
        active = [(module, codec.activation) for module, codec in self.linears if getattr(codec, "activation", None)]

        def stand_in(forward: Callable[[Tensor], Tensor], activation: Any) -> Callable[[Tensor], Tensor]:
            scale = activation.static_scale(float((self.seen.peak / columns).max())).to(columns.device)
            return lambda x: forward(activation.apply(x / columns, scale) * columns)

        for module, activation in active:
            module.forward = stand_in(module.forward, activation)
        try:
            yield
        finally:
            for module, _ in active:
                del module.forward

    def by_unit(self, columns: Tensor) -> Tensor:
        """Return the mean over each unit's columns, float32 [units]."""
        total = torch.zeros(self.pair.units, device=columns.device).index_add_(0, self.index, columns)
        return total / torch.bincount(self.index, minlength=self.pair.units)

    def largest_by_unit(self, columns: Tensor) -> Tensor:
        """Return the largest of each unit's columns, float32 [units]."""
        return torch.zeros(self.pair.units, device=columns.device).scatter_reduce_(0, self.index, columns, "amax")


def normalize(scale: Tensor) -> Tensor:
    """Return scales around 1: divided by the geometric mean of the largest and the smallest, none too small, none infinite."""
    scale = torch.where(torch.isfinite(scale), scale, torch.ones_like(scale)).clamp_min(SMALLEST)
    return scale / (scale.max() * scale.min()).sqrt()


def natural(module: nn.Module) -> Tensor:
    """Return a linear's weight as [out, in], a view."""
    weight = module.get_parameter("weight").data
    return weight.T if type(module).__name__ == "Conv1D" else weight
