"""The mean square of every linear layer's input columns, block by block: what an importance matrix is made of.

One replay of each block, on the unquantized weights, with a hook on the first linear of every input group. Far less
than the Hessians of `calibrate` (a vector per input), so all groups of a block are watched at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from quantkit.calibrate import Recording, view_block
from quantkit.importance import Entry
from quantkit.loader import Loader, is_expert_stack
from quantkit.schedules import expert_inner


@torch.no_grad()
def watch_blocks(loader: Loader, recording: Recording) -> Iterator[tuple[int, dict[str, Entry]]]:
    """Yield (block, energies by module name inside it), in order; afterwards the states are the model's last ones."""
    for index in range(len(loader.blocks)):
        loader.materialize(loader.block_names(index))
        view = view_block(loader, recording, index)
        found: dict[str, Entry] = {}
        handles = []
        for group in (group for group in view.groups if not group.experts):
            energy = Entry(torch.zeros(1, group.width), torch.zeros(1))
            found |= dict.fromkeys(group.names, energy)
            handles.append(view.module.get_submodule(group.names[0]).register_forward_pre_hook(partial(_see, energy)))
        for name, module in view.module.named_modules():
            if is_expert_stack(module):
                experts, width = module.down_proj.shape[0], module.down_proj.shape[2]
                inner = Entry(torch.zeros(experts, width), torch.zeros(experts))
                outer = Entry(torch.zeros(experts, module.gate_up_proj.shape[2]), torch.zeros(experts))
                found |= {f"{name}.gate_up_proj": outer, f"{name}.down_proj": inner}
                handles.append(module.register_forward_pre_hook(partial(_see_experts, outer, inner)))
        try:
            for batch, state in enumerate(recording.states):
                state.copy_(view.replay(view.module, state, batch))
        finally:
            for handle in handles:
                handle.remove()
        loader.release(loader.block_names(index))
        yield index, found


def _see(energy: Entry, module: nn.Module, args: tuple[Any, ...]) -> None:
    energy.see(args[0])


def _see_experts(outer: Entry, inner: Entry, module: Any, args: tuple[Any, ...]) -> None:
    """Add each expert's tokens, and what its gate and up make of them; args: hidden [tokens, in], experts [tokens, k], ..."""
    hidden, chosen = args[0].reshape(-1, args[0].shape[-1]), args[1].reshape(-1, args[1].shape[-1])
    for expert in range(len(outer.counts)):
        rows = hidden[(chosen == expert).any(1)]
        if len(rows):
            outer.see(rows, expert)
            inner.see(expert_inner(module, rows, expert), expert)
