"""Token batches in, recordings and replays of blocks out.

The arguments of every block are recorded, not only the first one's: families with mixed layer types hand each
block its own mask and rotary embedding. Replay then needs one block in memory and nothing of the rest of the model.

What is done with the replays is the schedules' business (schedules.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import PlanError
from quantkit.loader import Loader, is_expert_stack, is_linear
from quantkit.memory import SPILL_FROM, Spill
from quantkit.tensors import BlockView, InputGroup

PROBE_TOKENS = 8


class _Stop(Exception):
    """Ends a forward pass whose rest is not wanted."""


@dataclass(frozen=True)
class Call:
    """The arguments of one block call; the hidden states are left out and put back in by `with_hidden`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def with_hidden(self, hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs of the call with these hidden states, [batch, tokens, width]."""
        if "hidden_states" in self.kwargs:
            return self.args, {**self.kwargs, "hidden_states": hidden}
        return (hidden, *self.args[1:]), self.kwargs


@dataclass
class Recording:
    """Hidden states entering the next block, and every block's call, per batch.

    exact: the states that the unquantized model has there, for the first batches only, when drift is measured.
    probe_state, probe_calls: a batch of a few tokens, for tracing.
    """

    states: list[Tensor]
    exact: list[Tensor]
    calls: list[list[Call]]
    probe_state: Tensor
    probe_calls: list[Call]
    spill: Spill | None = None

    def rest(self) -> None:
        """Let go of the memory of states that nobody reads for a while, if they live in a file."""
        if self.spill is not None:
            self.spill.drop()


@dataclass
class _Pool:
    """Keeps each distinct tensor once: masks and positions are the same for most blocks and batches."""

    known: list[Tensor] = field(default_factory=list)

    def intern(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            for other in self.known:
                if other is value or (other.shape == value.shape and other.dtype == value.dtype and torch.equal(other, value)):
                    return other
            self.known.append(value)
            return value
        if isinstance(value, tuple):
            return tuple(self.intern(item) for item in value)
        if isinstance(value, list):
            return [self.intern(item) for item in value]
        if isinstance(value, dict):
            return {key: self.intern(item) for key, item in value.items()}
        return value


@contextmanager
def intercept(blocks: nn.ModuleList, handler: Callable[..., Any]) -> Iterator[None]:
    """Let `handler(index, *args, **kwargs)` stand in for each block's forward."""
    for index, block in enumerate(blocks):
        block.forward = partial(handler, index)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Call]:
    if "hidden_states" in kwargs:
        return kwargs["hidden_states"], Call(args, {**kwargs, "hidden_states": None})
    return args[0], Call((None, *args[1:]), kwargs)


def _returns_tuple(loader: Loader, probe: Tensor) -> bool:
    found: list[bool] = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        found.append(isinstance(output, tuple))
        raise _Stop

    loader.materialize(loader.block_names(0))
    handle = loader.blocks[0].register_forward_hook(look)
    try:
        loader.model(input_ids=probe, use_cache=False)
    except _Stop:
        pass
    finally:
        handle.remove()
        loader.release(loader.block_names(0))
    if not found:
        raise PlanError(f"{type(loader.model).__name__} never called {loader.block_name(0)}; add a row to families.py.")
    return found[0]


@torch.no_grad()
def record(loader: Loader, batches: list[Tensor], paired: int = 0, folder: Path | None = None) -> Recording:
    """Run the model's own code on each batch, int64 [batch, tokens], with every block replaced by a recorder.

    The first `paired` batches get exact states beside those that will follow the quantized blocks. With a folder the
    states live in a mapped file there if they are large.
    """
    outer = loader.outer_names(head=False)
    loader.materialize(outer)
    probe = batches[0][:1, :PROBE_TOKENS].to(loader.device)
    loader.returns_tuple = tuples = _returns_tuple(loader, probe)
    pool, last = _Pool(), len(loader.blocks) - 1
    states: list[Tensor] = []
    calls: list[list[Call]] = []

    def recorder(index: int, *args: Any, **kwargs: Any) -> Any:
        hidden, call = _split(args, kwargs)
        if index == 0:
            states.append(hidden.cpu())
            calls.append([])
        calls[-1].append(Call(pool.intern(call.args), pool.intern(call.kwargs)))
        if index == last:
            raise _Stop
        return (hidden,) if tuples else hidden

    with intercept(loader.blocks, recorder):
        for batch in [*batches, probe]:
            with suppress(_Stop):
                loader.model(input_ids=batch.to(loader.device), use_cache=False)
    loader.release(outer)
    recording = Recording(states[:-1], [state.clone() for state in states[:paired]], calls[:-1], states[-1], calls[-1])
    if folder is not None:
        spill_states(recording, folder)
    return recording


def spill_states(recording: Recording, folder: Path) -> None:
    """Move the states into a mapped file if they take more memory than that is worth."""
    sizes = [state.nbytes for state in recording.states + recording.exact]
    if sum(sizes) < SPILL_FROM:
        return
    recording.spill = Spill(folder, Spill.room(sizes))
    for states in (recording.states, recording.exact):
        for index, state in enumerate(states):
            moved = torch.frombuffer(recording.spill.take(state.nbytes), dtype=state.dtype).view(state.shape)
            states[index] = moved.copy_(state)
    recording.rest()


def run_block(block: nn.Module, hidden: Tensor, call: Call) -> Tensor:
    """Return the hidden states that a block makes of `hidden`, [batch, tokens, width]."""
    args, kwargs = call.with_hidden(hidden)
    output = block(*args, **kwargs)
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result


@torch.no_grad()
def trace_groups(block: nn.Module, hidden: Tensor, call: Call) -> list[InputGroup]:
    """Return the block's input groups by running it once on a few tokens.

    Linears that are given the very same tensor form a group, a stack of experts one of its own; groups are in the order
    of their first call.
    """
    seen: dict[Any, list[str]] = {}
    found: dict[Any, InputGroup] = {}
    inputs: list[Tensor] = []

    def look(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.append(args[0])  # kept alive, so that an address means one tensor
        experts = len(module.get_parameter("down_proj")) if is_expert_stack(module) else 0
        key = (name if experts else args[0].data_ptr(), tuple(args[0].shape), args[0].stride())
        seen.setdefault(key, [])
        if name not in seen[key]:
            seen[key].append(name)
        found[key] = InputGroup(tuple(seen[key]), args[0].shape[-1], experts)

    handles = [m.register_forward_pre_hook(partial(look, n)) for n, m in block.named_modules() if is_linear(m) or is_expert_stack(m)]
    try:
        run_block(block, hidden, call)
    finally:
        for handle in handles:
            handle.remove()
    return list(found.values())


def view_block(loader: Loader, recording: Recording, index: int) -> BlockView:
    """Return the view of a loaded block: its groups, and a replay of it for a batch number."""
    block = loader.blocks[index]
    groups = trace_groups(block, recording.probe_state.to(loader.device), recording.probe_calls[index])

    def replay(module: nn.Module, hidden: Tensor, batch: int) -> Tensor:
        return run_block(module, hidden.to(loader.device), recording.calls[batch][index]).cpu()

    return BlockView(index, loader.block_name(index), block, groups, replay, None, recording.rest, loader.expert_modules(index))
