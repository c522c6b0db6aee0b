"""Several outputs on one stream of activations, the unquantized model's: a block is loaded and replayed once for all of them.

Every statistic is taken on the float stream, so no output depends on another, and each is byte for byte what it is alone.
A transform's scales are folded into the block's weights for its own output and taken out again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.calibrate import Recording, run_block, view_block
from quantkit.folds import Folds
from quantkit.journal import Journal
from quantkit.loader import Loader
from quantkit.pipeline import Events, Passes, edited_tensors, missed_rows, rows_of, scale_block, solve_group
from quantkit.plan import Plan
from quantkit.schedules import Routed, Statistics, expert_groups, float_pass
from quantkit.tensors import BlockView, InputGroup, LayerStats


@dataclass(frozen=True)
class Lane:
    """One output: its plan, passes, container and journal. tiles: whether its solver needs only the diagonal tiles of the Hessians."""

    plan: Plan
    passes: Passes
    form: Any
    journal: Journal
    tiles: bool


def quantize_streams(loader: Loader, lanes: list[Lane], recording: Recording, events: Events) -> None:
    """Quantize every block that a lane's journal does not hold yet, in order, one in memory at a time."""
    start, total = min(lane.journal.done for lane in lanes), len(loader.blocks)
    if 0 < start < total:
        events.phase(f"recomputing the states after block {start}")
        _advance(loader, recording, start)
    for index in range(start, total):
        events.block(index, total)
        loader.materialize(loader.block_names(index))
        view = view_block(loader, recording, index)
        waiting = [lane for lane in lanes if lane.journal.done <= index]
        for lane in (lane for lane in waiting if lane.passes.scaler):
            with _restored(loader, index):
                folds = scale_block(loader, lane.plan, recording, lane.passes.scaler, view)
                taken = float_pass(view, recording.states, loader.device, {lane.tiles}, False) if lane.passes.solver else ({}, {})
                _solve(loader, lane, view, taken[0].get(lane.tiles, {}), taken[1], folds, events)
        plain = [lane for lane in waiting if not lane.passes.scaler]
        shared, routed = float_pass(view, recording.states, loader.device, {lane.tiles for lane in plain}, True)
        for lane in plain:
            with _restored(loader, index):
                _solve(loader, lane, view, shared[lane.tiles], routed, Folds(), events)
        loader.release(loader.block_names(index))


@torch.no_grad()
def _advance(loader: Loader, recording: Recording, blocks: int) -> None:
    """Bring the states past so many blocks."""
    for index in range(blocks):
        loader.materialize(loader.block_names(index))
        for batch, state in enumerate(recording.states):
            state.copy_(run_block(loader.blocks[index], state.to(loader.device), recording.calls[batch][index]).cpu())
        loader.release(loader.block_names(index))


@contextmanager
def _restored(loader: Loader, index: int) -> Iterator[None]:
    """Put a block's tensors back as they were."""
    saved: dict[str, Tensor] = {name: loader.model.get_parameter_or_buffer(name).detach().clone() for name in loader.block_names(index)}
    try:
        yield
    finally:
        for name, value in saved.items():
            loader.model.get_parameter_or_buffer(name).data.copy_(value)


def _solve(loader: Loader, lane: Lane, view: BlockView, shared: Statistics, routed: dict[InputGroup, Routed], folds: Folds,
           events: Events) -> None:  # fmt: skip
    """Round a lane's weights of a block from the statistics, and from what the stacks of experts were given, and commit them."""
    tensors: dict[str, Tensor] = {}
    notes: list[dict[str, Any]] = []
    if lane.passes.solver is not None:
        for group in view.groups:
            taken = [(group, shared[group])] if not group.experts else expert_groups(view, group, routed[group], loader.device, lane.tiles)
            for each, stats in taken:
                rows = rows_of(lane.plan, view, each.names)
                solve_group(loader, rows, stats, lane.passes.solver, lane.form, tensors, notes, events)
        for rows in missed_rows(lane.plan, view.index, notes):
            solve_group(loader, rows, LayerStats(rows[0].shape[1]), lane.passes.solver, lane.form, tensors, notes, events)
    tensors |= edited_tensors(loader, lane.plan, folds)
    lane.journal.commit(tensors, notes, None, folds.notes)
