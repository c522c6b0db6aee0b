"""THE loop over blocks: load, replay, transform, solve, pack, record, free.

Hidden states entering the next block come from the stored (rounded) parameters, never from the solver's floats: each
group's weights are replaced by their dequantized form before its outputs are computed.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit import memory
from quantkit.calibrate import Recording, run_block, view_block
from quantkit.codecs._activations import RoundedInputs
from quantkit.folds import Folds, fold_block
from quantkit.formats._safetensors import DTYPES
from quantkit.formats.store import SafetensorsStore
from quantkit.journal import Journal
from quantkit.loader import Loader
from quantkit.plan import Plan, describe_codec, fused_sets
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


@dataclass(frozen=True)
class Passes:
    """What is done to each block: its float weights are scaled (None: they are not), then a solver rounds them (None: it does not)."""

    scaler: Any
    solver: Any
    schedule: Schedule


def without_data(view: BlockView, states: list[Tensor], exact: list[Tensor], device: torch.device) -> Iterator[tuple[InputGroup, None]]:
    """The schedule of solvers that need no statistics: every linear by itself."""
    for group in view.groups:
        yield group, None


@torch.no_grad()
def outputs_only(view: BlockView, states: list[Tensor], exact: list[Tensor], device: torch.device) -> Iterator[tuple[InputGroup, None]]:
    """The schedule without a solver: the block's outputs, and no group to solve."""
    for batch, state in enumerate(states):
        state.copy_(view.replay(view.module, state, batch))
    yield from ()


def quantize_blocks(loader: Loader, plan: Plan, recording: Recording | None, passes: Passes, form: Any, journal: Journal,
                    events: Events) -> None:  # fmt: skip
    """Quantize every block that the journal does not hold yet, in order, one in memory at a time."""
    states, exact = (recording.states, recording.exact) if recording else ([], [])
    if recording and 0 < journal.done < len(loader.blocks) and not journal.read_states(states + exact):
        events.phase(f"recomputing the states after block {journal.done}")
        _replay_stored(loader, plan, recording, form, journal)
    fresh = True
    for index in range(journal.done, len(loader.blocks)):
        events.block(index, len(loader.blocks))
        loader.materialize(loader.block_names(index))
        view = view_block(loader, recording, index) if recording else bare_view(loader, index)
        tensors: dict[str, Tensor] = {}
        notes: list[dict[str, Any]] = []
        folds = scale_block(loader, plan, recording, passes.scaler, view) if recording and passes.scaler else Folds()
        view.exact = copy.deepcopy(view.module) if exact else None
        inputs = _round_inputs(loader, plan, index)
        with closing(passes.schedule(view, states, exact, loader.device)) as groups:  # type: ignore[type-var]
            for group, stats in groups:
                solve_group(loader, rows_of(plan, view, group.names), stats, passes.solver, form, tensors, notes, events)
                for note in notes[-len(group.names) :]:
                    if (
                        note["module"] in inputs
                        and (scale := tensors.get(f"{note['tensor'].removesuffix('.weight')}.input_scale")) is not None
                    ):
                        inputs[note["module"]].scale = scale
                del stats  # the next group's come before this name is bound again
                if fresh:  # the first solve compiles its kernels, which leaves tens of megabytes behind
                    memory.trim()
                    fresh = False
        for rows in missed_rows(plan, index, notes):
            solve_group(loader, rows, LayerStats(rows[0].shape[1]) if recording else None, passes.solver, form, tensors, notes, events)
        tensors |= edited_tensors(loader, plan, folds)
        last = index == len(loader.blocks) - 1
        journal.commit(tensors, notes, states + exact if recording and not last else None, folds.notes)
        for name in inputs:
            del loader.model.get_submodule(name).forward
        loader.release(loader.block_names(index))
    journal.drop_states()


def _round_inputs(loader: Loader, plan: Plan, index: int) -> dict[str, RoundedInputs]:
    """Let a block's linears read their inputs as the runtime will; static scales come when their group is solved."""
    inputs = {}
    for row in plan.packed:
        if row.block == index and row.codec.activation is not None:
            module = loader.model.get_submodule(row.module)
            inputs[row.module] = module.forward = RoundedInputs(module, row.codec.activation)
    return inputs


def scale_block(loader: Loader, plan: Plan, recording: Recording, scaler: Any, view: BlockView) -> Folds:
    """Fold the scaler's scales into a block; its kept tensors then hold what they will on disk."""
    codecs = {row.module.removeprefix(f"{view.name}."): row.codec for row in plan.rows if row.block == view.index and row.codec}
    probe = (recording.probe_state.to(loader.device), recording.probe_calls[view.index])

    def stored(name: str) -> torch.dtype:
        info = plan.kept.get(loader.names.to_source[f"{view.name}.{name}"])
        return DTYPES[info.dtype] if info else torch.float32

    folds = fold_block(view, recording.states, probe, scaler, codecs, stored)
    for name in folds.changed:
        value = view.module.get_parameter(name).data
        value.copy_(value.to(stored(name)))
    return Folds([f"{view.name}.{name}" for name in folds.changed], folds.notes)


def missed_rows(plan: Plan, index: int, notes: list[dict[str, Any]]) -> list[list[PlanRow]]:
    """Return the packed rows of a block that no group held, those together that runtimes fuse: nothing reached them, or nothing ran."""
    solved = {note["module"] for note in notes}
    missed = {row.module: row for row in plan.packed if row.block == index and row.module not in solved}
    fused = fused_sets(missed)
    alone = set(missed) - {name for names in fused for name in names}
    return [[missed[name] for name in names] for names in [*fused, *([name] for name in missed if name in alone)]]


def edited_tensors(loader: Loader, plan: Plan, folds: Folds) -> dict[str, Tensor]:
    """Return what a block's folds changed and no solver packs, as it will be on disk."""
    packed = {row.tensor for row in plan.packed}
    edited = {loader.names.to_source[name]: loader.model.get_parameter(name) for name in folds.changed}
    return {name: value.data.to(DTYPES[plan.kept[name].dtype]).cpu() for name, value in edited.items() if name not in packed}


def bare_view(loader: Loader, index: int) -> BlockView:
    """Return the view of a loaded block for a run without data: each linear by itself, or with those that runtimes fuse it with."""
    names = list(loader.linears(index))
    groups = {name: InputGroup((name,), 0) for name in names}
    for fused in fused_sets(names):
        groups |= dict.fromkeys(fused, InputGroup(tuple(fused), 0))
    return BlockView(
        index, loader.block_name(index), loader.blocks[index], list(dict.fromkeys(groups.values())), lambda module, hidden, batch: hidden
    )


def rows_of(plan: Plan, view: BlockView, names: tuple[str, ...]) -> list[PlanRow]:
    """Return the packed rows of a group's linears."""
    wanted = {f"{view.name}.{name}" for name in names} | set(names)
    return [row for row in plan.packed if row.module in wanted]


@torch.no_grad()
def solve_group(loader: Loader, rows: list[PlanRow], stats: LayerStats | None, solver: Any, form: Any, tensors: dict[str, Tensor],
                 notes: list[dict[str, Any]], events: Events) -> None:  # fmt: skip
    """Solve the weights of one input group, put the stored values into the block, and pack them."""
    factors: dict[Any, Any] = {}
    shared = {row.codec: solver.share([weight_of(loader, r) for r in rows], row.codec) for row in rows}
    for row in rows:
        began = time.perf_counter()
        if row.codec not in factors and stats is not None:
            factors[row.codec] = solver.prepare(stats, row.codec)
        result, note = solver.solve(weight_of(loader, row), factors.get(row.codec), row.codec, shared[row.codec])
        if (activation := row.codec.activation) is not None and activation.static:
            assert stats is not None
            result.params["input_scale"] = activation.static_scale(stats.peak)
        put_weight(loader, row, result)
        tensors |= {name: value.cpu() for name, value in form.pack(row.tensor.removesuffix(".weight"), result).items()}
        notes.append(describe(row, result, note))
        events.module(row.module, {**notes[-1], "seconds": time.perf_counter() - began})


def _place(loader: Loader, row: PlanRow) -> Tensor:
    """Return where a row's weight lies, [out, in]: a view of its module's parameter, or of the stack of experts."""
    if row.stack is None:
        weight = loader.model.get_submodule(row.module).get_parameter("weight").data
        return weight.T if row.transposed else weight  # type: ignore[no-any-return]
    parameter, expert, part = row.stack
    held: Tensor = loader.model.get_parameter(parameter).data[expert]
    return held if part == "down" else held.chunk(2)[part == "up"]


def weight_of(loader: Loader, row: PlanRow) -> Tensor:
    """Return a row's weight as float32 [out, in], a copy only if it has to be."""
    return _place(loader, row).to(torch.float32).contiguous()


def put_weight(loader: Loader, row: PlanRow, result: QuantTensor) -> None:
    """Replace a row's weight by what the stored tensor stands for."""
    _place(loader, row).copy_(result.dequantize())


def describe(row: PlanRow, result: QuantTensor, note: Any) -> dict[str, Any]:
    """Return the journal's note on one module: its grid, how it went, and a checksum of what must come back."""
    return {
        "module": row.module,
        "tensor": row.tensor,
        **describe_codec(row.codec),
        "bits": row.codec.bits,
        "grid": row.codec.label,
        "error": note.error,
        "damp": note.damp,
        "tokens": note.tokens,
        "dead": note.dead,
        "fallback": note.fallback,
        **({"least_zero": int(result.params["zero"].min())} if "zero" in result.params else {}),
        "sha256": quant_digest(result),
    }


def quant_digest(tensor: QuantTensor) -> str:
    """Return the SHA-256 of a tensor's codes and parameters (floats as float32): equal before packing and after reading."""
    digest = hashlib.sha256()
    for _, value in [("", tensor.codes), *sorted(tensor.params.items())]:
        value = value.to(torch.float32) if value.is_floating_point() else value
        digest.update(value.cpu().contiguous().numpy().data)
    return digest.hexdigest()


@torch.no_grad()
def _replay_stored(loader: Loader, plan: Plan, recording: Recording, form: Any, journal: Journal) -> None:
    """Bring the states up to the journal's last block from the stored codes."""
    extra = {"quantizer": "", "ignore": [], "order": "none"}
    config = form.config(plan.rows, extra, False) if plan.packed else None
    for index in range(journal.done):
        loader.materialize(loader.block_names(index))
        for batch, state in enumerate(recording.exact):
            state.copy_(run_block(loader.blocks[index], state.to(loader.device), recording.calls[batch][index]).cpu())
        part = SafetensorsStore([journal.part(index)])
        store = READERS[config["quant_method"]](part, config)[0] if config else part
        inputs = _round_inputs(loader, plan, index)
        for row in plan.packed:
            if row.block == index:
                stored = store.quant(row.tensor.removesuffix(".weight"))  # type: ignore[attr-defined]
                put_weight(loader, row, stored)
                if row.module in inputs:
                    inputs[row.module].scale = stored.params.get("input_scale")
        for name in part.names():
            if name in plan.kept:  # what a fold changed and no solver packed
                value = part.read(name).to(loader.device)
                loader.model.get_parameter(loader.names.to_model[name]).data.copy_(value)
        for batch, state in enumerate(recording.states):
            state.copy_(run_block(loader.blocks[index], state.to(loader.device), recording.calls[batch][index]).cpu())
        for name in inputs:
            del loader.model.get_submodule(name).forward
        loader.release(loader.block_names(index))
