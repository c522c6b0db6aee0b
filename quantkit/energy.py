"""The mean square of every linear layer's input columns, block by block: what an importance matrix is made of.

One replay of each block, on the unquantized weights, with a hook on the first linear of every input group. Far less
than the Hessians of `calibrate` (a vector per input), so all groups of a block are watched at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.calibrate import Recording, view_block
from quantkit.loader import Loader


@dataclass
class Energy:
    """sums: float32 [matrices, in], of squares over all rows; counts: float32 [matrices], rows seen by each."""

    sums: Tensor
    counts: Tensor

    def add(self, rows: Tensor, matrix: int = 0) -> None:
        """Add inputs, float [..., in]."""
        flat = rows.detach().reshape(-1, rows.shape[-1]).to(torch.float32)
        self.sums[matrix] += flat.square().sum(0).cpu()
        self.counts[matrix] += flat.shape[0]


@torch.no_grad()
def watch_blocks(loader: Loader, recording: Recording) -> Iterator[tuple[int, dict[str, Energy]]]:
    """Yield (block, energies by module name inside it), in order; afterwards the states are the model's last ones."""
    for index in range(len(loader.blocks)):
        loader.materialize(loader.block_names(index))
        view = view_block(loader, recording, index)
        found: dict[str, Energy] = {}
        handles = []
        for group in view.groups:
            energy = Energy(torch.zeros(1, group.width), torch.zeros(1))
            found |= dict.fromkeys(group.names, energy)
            handles.append(view.module.get_submodule(group.names[0]).register_forward_pre_hook(partial(_see, energy)))
        try:
            for batch, state in enumerate(recording.states):
                state.copy_(view.replay(view.module, state, batch))
        finally:
            for handle in handles:
                handle.remove()
        loader.release(loader.block_names(index))
        yield index, found


def _see(energy: Energy, module: nn.Module, args: tuple[Any, ...]) -> None:
    energy.add(args[0])
