"""The values that cross the seams between methods, codecs, formats and backends, and only these.

All are data: no algorithm lives here except adding up statistics. Shapes follow torch: a weight is [out, in],
whatever its module stores (a Conv1D's is transposed at the seam).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

HESSIAN_TILE = 256


@dataclass(frozen=True)
class Grid:
    """The values one tensor may take, as data: affine, or levels if `table` is given.

    Affine: value = scale * (code - offset), low <= code <= high. Levels: value = scale * table[code].
    scale, offset: float32 [out, groups]; table: float32 [levels], ascending.
    """

    scale: Tensor
    offset: Tensor
    low: int
    high: int
    table: Tensor | None = None


@dataclass(frozen=True)
class QuantTensor:
    """One quantized weight.

    codes: uint8 [out, in] in the column order of the model. params: named tensors of the codec, exact in the
    dtype they are stored in. group_index: int32 [in], the group of each input column, or None when it is
    column // group. codec: the codec that decodes it.
    """

    codes: Tensor
    params: dict[str, Tensor]
    codec: Any
    group_index: Tensor | None = None

    def dequantize(self) -> Tensor:
        """Return the weight, float32 [out, in], that these codes stand for."""
        result: Tensor = self.codec.decode(self)
        return result


@dataclass
class LayerStats:
    """What calibration saw of one input: X is [tokens, in].

    hessian: float32 [in, in], the sum of x xT; only tiles of its upper triangle are filled until `mean()`. With `tiles`
    only the diagonal tiles are kept, float32 [in, HESSIAN_TILE]: row i holds the columns of its own tile.
    tokens: rows seen. peak: the largest magnitude.
    drift: float32 [in, in], the sum of (f - x) xT over `paired` rows, where f is the input that the
    unquantized model has in x's place; None when nothing was paired.
    Statistics of two runs over different data add up (`merge`).
    """

    width: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    tiles: bool = False
    tokens: int = 0
    nonfinite: int = 0
    peak: float = 0.0
    hessian: Tensor = field(init=False)
    drift: Tensor | None = None
    paired: int = 0
    finished: bool = False

    def __post_init__(self) -> None:
        columns = min(self.width, HESSIAN_TILE) if self.tiles else self.width
        self.hessian = torch.zeros(self.width, columns, dtype=torch.float32, device=self.device)

    def add(self, inputs: Tensor) -> None:
        """Add inputs, float [..., in], to the sums; each row counts once."""
        assert not self.finished
        rows = inputs.detach().reshape(-1, self.width).to(torch.float32)
        self.tokens += rows.shape[0]
        if not rows.numel():
            return
        if not torch.isfinite(rows.sum()):
            self.nonfinite += int((~torch.isfinite(rows)).any(dim=1).sum())
            return
        low, high = torch.aminmax(rows)
        self.peak = max(self.peak, float(-low), float(high))
        # The strict lower triangle is a mirror: skipping it saves almost half of the products.
        for start in range(0, self.width, HESSIAN_TILE):
            stop = min(start + HESSIAN_TILE, self.width)
            if self.tiles:
                self.hessian[start:stop, : stop - start].addmm_(rows[:, start:stop].T, rows[:, start:stop])
            else:
                self.hessian[start:stop, start:].addmm_(rows[:, start:stop].T, rows[:, start:])

    def pair(self, inputs: Tensor, exact: Tensor) -> None:
        """Add to the drift: inputs and what they would be without any quantization, float [..., in] each."""
        rows = inputs.detach().reshape(-1, self.width).to(torch.float32)
        change = exact.detach().reshape(-1, self.width).to(torch.float32) - rows
        if self.drift is None:
            self.drift = torch.zeros(self.width, self.width, dtype=torch.float32, device=self.device)
        if torch.isfinite(change.sum()):
            self.drift.addmm_(change.T, rows)
            self.paired += rows.shape[0]

    def merge(self, other: LayerStats) -> None:
        """Add the sums of `other`, taken over other tokens of the same input."""
        self.hessian += other.hessian
        if other.drift is not None:
            self.drift = other.drift.clone() if self.drift is None else self.drift + other.drift
        self.paired += other.paired
        self.tokens += other.tokens
        self.nonfinite += other.nonfinite
        self.peak = max(self.peak, other.peak)

    def mean(self) -> Tensor:
        """Return the mean of x xT over tokens, float32 [in, in], symmetric, in the memory of the sums; nothing is added after."""
        if not self.finished:
            self.finished = True
            self.hessian.div_(max(self.tokens, 1))
            for start in range(0, 0 if self.tiles else self.width, HESSIAN_TILE):
                stop = min(start + HESSIAN_TILE, self.width)
                tile = torch.triu(self.hessian[start:stop, start:stop])
                self.hessian[start:stop, start:stop] = tile + torch.triu(tile, 1).T
                self.hessian[stop:, start:stop] = self.hessian[start:stop, stop:].T
        return self.hessian

    def diagonal_tiles(self, width: int) -> Tensor:
        """Return the mean of x xT inside each run of `width` columns, float32 [in / width, width, width]; `width` divides HESSIAN_TILE."""
        mean, found = self.mean(), []
        for start in range(0, self.width, width):
            first = start % HESSIAN_TILE if self.tiles else start
            found.append(mean[start : start + width, first : first + width])
        return torch.stack(found)

    def energy(self) -> Tensor:
        """Return the mean square of each input column, float32 [in]."""
        mean = self.mean()
        if not self.tiles:
            return mean.diagonal().clone()
        columns = torch.arange(self.width, device=mean.device)
        return mean[columns, columns % HESSIAN_TILE]


@dataclass(frozen=True)
class Note:
    """How one weight went in a solver. error: relative squared output error, tr(E H ET) / tr(W H WT)."""

    error: float
    damp: float
    tokens: int
    dead: int
    fallback: str = ""


@dataclass(frozen=True)
class InputGroup:
    """Modules of a block that read the same input tensor; names are relative to the block, those of single experts full.

    experts: how many a stack holds, 0 for linear layers.
    """

    names: tuple[str, ...]
    width: int
    experts: int = 0


@dataclass(frozen=True, eq=False)
class Pair:
    """A place where scales can hide: they multiply the input columns of a group's linears and are divided out before them.

    before: the module that makes the group's input. kind: what of it takes the scales: "norm" (weight and bias), "shifted" (a
    norm that adds 1 to its weight) or "rows" (a linear's output rows from `start` on). index: int64 [in], the unit of each
    input column: columns of heads that share a key-value head share a unit. consumer: the module whose output shows what
    an error in the group does. Names are relative to the block.
    """

    group: InputGroup
    before: str
    kind: str
    start: int
    index: Tensor
    consumer: str

    @property
    def units(self) -> int:
        """How many scales there are."""
        return int(self.index.max()) + 1


@dataclass
class Seen:
    """What a transform looks at: one input's statistics and a few calls of its consumer.

    mean, peak: float32 [in], mean and largest absolute value of each column; stats: the diagonal tiles of the Hessian;
    calls: arguments of the consumer for the first batches.
    """

    mean: Tensor
    peak: Tensor
    stats: LayerStats
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


@dataclass
class BlockView:
    """One loaded block: its module, its input groups in the order of their first call, and a replay of it.

    replay(module, hidden, batch) runs the module, or a copy of it, on hidden states [batch, tokens, width].
    exact: a copy whose weights stay as they were, when drift is measured. rest: called when the states entering the
    block will not be read for a while. experts: (stack, part, expert) -> the module's full name.
    """

    index: int
    name: str
    module: nn.Module
    groups: list[InputGroup]
    replay: Callable[[nn.Module, Tensor, int], Tensor]
    exact: nn.Module | None = None
    rest: Callable[[], None] = lambda: None
    experts: dict[tuple[str, str, int], str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanRow:
    """One weight tensor and what happens to it.

    module: the module's name in the model; tensor: the weight's name in the source; shape: (out, in).
    stack: for an expert, the parameter that holds all of them, its number, and its part (gate, up, down).
    method is "keep" when the tensor is carried over as it is; reason says why, or why the codec is not the asked one.
    """

    module: str
    tensor: str
    shape: tuple[int, int]
    method: str
    codec: Any = None
    reason: str = ""
    transposed: bool = False
    block: int = -1
    stack: tuple[str, int, str] | None = None


def bits_of(number: float) -> int:
    """Return the bits of a float64 as an int64: how instructions of a recorded step hold it."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])
