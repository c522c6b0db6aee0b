"""THE loop over blocks: load, replay, solve, pack, record, free.

Hidden states entering the next block come from the stored (rounded) parameters, never from the solver's floats: each
group's weights are replaced by their dequantized form before its outputs are computed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from quantkit import memory
from quantkit.calibrate import Recording, run_block, view_block
from quantkit.formats.store import SafetensorsStore
from quantkit.journal import Journal
from quantkit.loader import Loader
from quantkit.plan import Plan
from quantkit.source import READERS
from quantkit.tensors import BlockView, InputGroup, LayerStats, PlanRow, QuantTensor

Schedule = Callable[[BlockView, list[Tensor], list[Tensor], torch.device], Iterator[tuple[InputGroup, LayerStats | None]]]


class Events:
    """What a run tells while it works; the report overrides what it shows."""

    def phase(self, text: str) -> None:
        """A new phase begins."""

    def block(self, index: int, total: int) -> None:
        """Block `index` of `total` begins."""

    def module(self, name: str, note: dict[str, Any]) -> None:
        """A module is solved."""

    def notice(self, text: str) -> None:
        """Something the user should know."""


def without_data(view: BlockView, states: list[Tensor], exact: list[Tensor], device: torch.device) -> Iterator[tuple[InputGroup, None]]:
    """The schedule of solvers that need no statistics: every linear by itself."""
    for group in view.groups:
        yield group, None


def quantize_blocks(loader: Loader, plan: Plan, recording: Recording | None, solver: Any, form: Any, journal: Journal,
                    schedule: Schedule, events: Events) -> None:  # fmt: skip
    """Quantize every block that the journal does not hold yet, in order, one in memory at a time."""
    states, exact = (recording.states, recording.exact) if recording else ([], [])
    if recording and 0 < journal.done < len(loader.blocks) and not journal.read_states(states + exact):
        events.phase(f"recomputing the states after block {journal.done}")
        _replay_stored(loader, plan, recording, form, journal)
    fresh = True
    for index in range(journal.done, len(loader.blocks)):
        events.block(index, len(loader.blocks))
        loader.materialize(loader.block_names(index))
        view = view_block(loader, recording, index) if recording else _bare_view(loader, index)
        tensors: dict[str, Tensor] = {}
        notes: list[dict[str, Any]] = []
        with closing(schedule(view, states, exact, loader.device)) as groups:  # type: ignore[type-var]
            for group, stats in groups:
                _solve_group(loader, _rows_of(plan, view, group.names), stats, solver, form, tensors, notes, events)
                del stats  # the next group's come before this name is bound again
                if fresh:  # the first solve compiles its kernels, which leaves tens of megabytes behind
                    memory.trim()
                    fresh = False
        missed = [row for row in plan.packed if row.block == index and row.module not in {note["module"] for note in notes}]
        for row in missed:
            _solve_group(loader, [row], LayerStats(row.shape[1]) if recording else None, solver, form, tensors, notes, events)
        last = index == len(loader.blocks) - 1
        journal.commit(tensors, notes, states + exact if recording and not last else None)
        loader.release(loader.block_names(index))
    journal.drop_states()


def _bare_view(loader: Loader, index: int) -> BlockView:
    groups = [InputGroup((name,), 0) for name in loader.linears(index)]
    return BlockView(index, loader.block_name(index), loader.blocks[index], groups, lambda module, hidden, batch: hidden)


def _rows_of(plan: Plan, view: BlockView, names: tuple[str, ...]) -> list[PlanRow]:
    wanted = {f"{view.name}.{name}" for name in names}
    return [row for row in plan.packed if row.module in wanted]


@torch.no_grad()
def _solve_group(loader: Loader, rows: list[PlanRow], stats: LayerStats | None, solver: Any, form: Any, tensors: dict[str, Tensor],
                 notes: list[dict[str, Any]], events: Events) -> None:  # fmt: skip
    """Solve the weights of one input group, put the stored values into the block, and pack them."""
    factors: dict[Any, Any] = {}
    for row in rows:
        began = time.perf_counter()
        if row.codec not in factors and stats is not None:
            factors[row.codec] = solver.prepare(stats, row.codec)
        module = loader.model.get_submodule(row.module)
        result, note = solver.solve(weight_of(module, row), factors.get(row.codec), row.codec)
        put_weight(module, row, result)
        tensors |= {name: value.cpu() for name, value in form.pack(row.tensor.removesuffix(".weight"), result).items()}
        notes.append(describe(row, result, note))
        events.module(row.module, {**notes[-1], "seconds": time.perf_counter() - began})


def weight_of(module: nn.Module, row: PlanRow) -> Tensor:
    """Return a module's weight as float32 [out, in]."""
    weight = module.get_parameter("weight").detach()
    return (weight.T if row.transposed else weight).to(torch.float32).contiguous()


def put_weight(module: nn.Module, row: PlanRow, result: QuantTensor) -> None:
    """Replace a module's weight by what the stored tensor stands for."""
    value = result.dequantize()
    module.get_parameter("weight").data.copy_(value.T if row.transposed else value)


def describe(row: PlanRow, result: QuantTensor, note: Any) -> dict[str, Any]:
    """Return the journal's note on one module: its grid, how it went, and a checksum of what must come back."""
    return {
        "module": row.module,
        "tensor": row.tensor,
        "bits": row.codec.bits,
        "group": row.codec.group,
        "symmetric": row.codec.symmetric,
        "error": note.error,
        "damp": note.damp,
        "tokens": note.tokens,
        "dead": note.dead,
        "fallback": note.fallback,
        "least_zero": int(result.params["zero"].min()),
        "sha256": quant_digest(result),
    }


def quant_digest(tensor: QuantTensor) -> str:
    """Return the SHA-256 of a tensor's codes, scales (float32) and zeros: equal before packing and after reading."""
    digest = hashlib.sha256()
    for value in (tensor.codes, tensor.params["scale"].to(torch.float32), tensor.params["zero"].to(torch.uint8)):
        digest.update(value.cpu().contiguous().numpy().data)
    return digest.hexdigest()


@torch.no_grad()
def _replay_stored(loader: Loader, plan: Plan, recording: Recording, form: Any, journal: Journal) -> None:
    """Bring the states up to the journal's last block from the stored codes."""
    config = {"checkpoint_format": "gptq_v2", "format": "pack-quantized", "sym": False}
    for index in range(journal.done):
        loader.materialize(loader.block_names(index))
        for batch, state in enumerate(recording.exact):
            state.copy_(run_block(loader.blocks[index], state.to(loader.device), recording.calls[batch][index]).cpu())
        store, _, _ = READERS[form.name](SafetensorsStore([journal.part(index)]), config)
        for row in plan.packed:
            if row.block == index:
                module = loader.model.get_submodule(row.module)
                put_weight(module, row, store.quant(row.tensor.removesuffix(".weight")))  # type: ignore[attr-defined]
        for batch, state in enumerate(recording.states):
            state.copy_(run_block(loader.blocks[index], state.to(loader.device), recording.calls[batch][index]).cpu())
        loader.release(loader.block_names(index))
