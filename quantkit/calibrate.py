"""Token batches in, statistics out; the only place with forward hooks.

The arguments of every block are recorded, not only the first one's: families with mixed layer types hand each
block its own mask and rotary embedding. Replay then needs one block in memory and nothing of the rest of the model.

Two schedules fill the statistics of a block's input groups; both are generators that yield a group when its inputs
are complete, let the caller edit the group's weights, and go on:

- one pass: each batch's forward runs in a thread of its own, one at a time by baton, and waits at the first linear
  of each group until all batches are there. Every linear is computed once, on weights already quantized.
- two passes: all statistics in one replay, then a second replay for the outputs. Half the speed, less memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import PlanError
from quantkit.loader import Loader, is_linear
from quantkit.memory import SPILL_FROM, Spill
from quantkit.tensors import BlockView, InputGroup, LayerStats

PROBE_TOKENS = 8
LANE_STACK = 1 << 20  # below the size of a huge page, which a larger stack would take whole at its first touch


class _Stop(Exception):
    """Ends a forward pass whose rest is not wanted."""


class _Cancelled(BaseException):
    """Ends a lane whose result is not wanted any more."""


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

    Linears that are given the very same tensor form a group; groups are in the order of their first call.
    """
    seen: dict[Any, list[str]] = {}
    inputs: list[Tensor] = []

    def look(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.append(args[0])  # kept alive, so that an address means one tensor
        key = (args[0].data_ptr(), tuple(args[0].shape), args[0].stride())
        seen.setdefault(key, [])
        if name not in seen[key]:
            seen[key].append(name)

    handles = [m.register_forward_pre_hook(partial(look, n)) for n, m in block.named_modules() if is_linear(m)]
    try:
        run_block(block, hidden, call)
    finally:
        for handle in handles:
            handle.remove()
    return [InputGroup(tuple(names), key[1][-1]) for key, names in seen.items()]


def view_block(loader: Loader, recording: Recording, index: int) -> BlockView:
    """Return the view of a loaded block: its groups, and a replay of it for a batch number."""
    block = loader.blocks[index]
    groups = trace_groups(block, recording.probe_state.to(loader.device), recording.probe_calls[index])

    def replay(module: nn.Module, hidden: Tensor, batch: int) -> Tensor:
        return run_block(module, hidden.to(loader.device), recording.calls[batch][index]).cpu()

    return BlockView(index, loader.block_name(index), block, groups, replay, None, recording.rest)


class _Lane:
    """One batch's forward pass in a thread that runs only while it holds the baton."""

    def __init__(self, work: Callable[[_Lane], Tensor]) -> None:
        self.go, self.arrived = threading.Semaphore(0), threading.Semaphore(0)
        self.input: Tensor | None = None
        self.result: Tensor | None = None
        self.error: BaseException | None = None
        self.cancelled = False
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        before = threading.stack_size(LANE_STACK)
        try:
            self.thread.start()
        finally:
            threading.stack_size(before)

    def _run(self, work: Callable[[_Lane], Tensor]) -> None:
        self.go.acquire()
        try:
            if not self.cancelled:
                with torch.no_grad():
                    self.result = work(self)
        except BaseException as error:  # handed to the thread that waits in `step`
            self.error = error
        self.arrived.release()

    def wait(self, inputs: Tensor) -> None:
        """Called inside the lane: hand over the inputs of a group and wait for the baton."""
        self.input = inputs
        self.arrived.release()
        self.go.acquire()
        if self.cancelled:
            raise _Cancelled

    def step(self) -> Tensor | None:
        """Give the lane the baton until it waits again; return its inputs, or None when its forward is done."""
        self.go.release()
        self.arrived.acquire()
        if self.error is not None:
            raise self.error
        inputs, self.input = self.input, None
        return inputs

    def cancel(self) -> None:
        """End a lane that is waiting."""
        self.cancelled = True
        self.go.release()
        self.thread.join()


Groups = Iterator[tuple[InputGroup, LayerStats]]
Statistics = dict[InputGroup, LayerStats]


def one_pass(view: BlockView, states: list[Tensor], exact: list[Tensor], device: torch.device, tiles: bool = False) -> Groups:
    """Yield each input group when all batches have reached it; afterwards `states` holds the block's outputs.

    exact: the unquantized model's states for the first batches; they run through `view.exact` in step with the others.
    tiles: whether only the diagonal tiles of the Hessians are wanted.
    """
    by_thread: dict[int, _Lane] = {}

    def work(module: nn.Module, hidden: Tensor, batch: int, lane: _Lane) -> Tensor:
        by_thread[threading.get_ident()] = lane
        return view.replay(module, hidden, batch)

    def stop(module: nn.Module, args: tuple[Any, ...]) -> None:
        by_thread[threading.get_ident()].wait(args[0])

    modules = [view.module] if view.exact is None else [view.module, view.exact]
    firsts = [module.get_submodule(group.names[0]) for module in modules for group in view.groups]
    handles = [module.register_forward_pre_hook(stop) for module in firsts]
    lanes: list[_Lane] = []
    twins: list[_Lane] = []
    try:
        lanes = [_Lane(partial(work, view.module, state, batch)) for batch, state in enumerate(states)]
        if view.exact is not None:
            twins = [_Lane(partial(work, view.exact, state, batch)) for batch, state in enumerate(exact)]
        for group in view.groups:
            stats = LayerStats(group.width, device, tiles)
            for batch, lane in enumerate(lanes):
                inputs = _step(lane, view, group)
                stats.add(inputs)
                if batch < len(twins):
                    stats.pair(inputs, _step(twins[batch], view, group))
                del inputs
            view.rest()
            yield group, stats
            del stats
        for runners, results in ((lanes, states), (twins, exact)):
            for lane, state in zip(runners, results, strict=True):
                lane.step()
                assert lane.result is not None
                state.copy_(lane.result)
                lane.result = None
    finally:
        for handle in handles:
            handle.remove()
        for lane in [*lanes, *twins]:
            lane.cancel()


def _step(lane: _Lane, view: BlockView, group: InputGroup) -> Tensor:
    inputs = lane.step()
    if inputs is None:
        raise PlanError(f"{view.name}: a batch never reached {group.names[0]}; use --schedule two-pass.")
    return inputs


@torch.no_grad()
def two_pass(view: BlockView, states: list[Tensor], exact: list[Tensor], device: torch.device, tiles: bool = False) -> Groups:
    """Yield each input group with statistics taken on the unquantized block; then replay for the outputs."""
    stats = {group: LayerStats(group.width, device, tiles) for group in view.groups}
    seen: dict[InputGroup, Tensor] = {}

    def see(group: InputGroup, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not exact:
            stats[group].add(args[0])
        elif group in seen:
            stats[group].pair(args[0], seen.pop(group))
            stats[group].add(args[0])
        else:
            seen[group] = args[0]

    firsts = [(group, view.module.get_submodule(group.names[0])) for group in view.groups]
    handles = [module.register_forward_pre_hook(partial(see, group)) for group, module in firsts]
    try:
        for batch, state in enumerate(states):
            if batch == len(exact):
                exact = []  # no more pairs: `see` adds what it is given
            elif exact:
                exact[batch].copy_(view.replay(view.module, exact[batch], batch))
            view.replay(view.module, state, batch)
    finally:
        for handle in handles:
            handle.remove()
    for group in view.groups:
        yield group, stats.pop(group)
    for batch, state in enumerate(states):
        state.copy_(view.replay(view.module, state, batch))


@torch.no_grad()
def float_pass(view: BlockView, states: list[Tensor], device: torch.device, kinds: set[bool], advance: bool) -> dict[bool, Statistics]:
    """Return every input group's statistics on the block as it is, by whether they hold only diagonal tiles (`kinds`).

    advance: whether `states` become the block's outputs.
    """
    found = {tiles: {group: LayerStats(group.width, device, tiles) for group in view.groups} for tiles in kinds}

    def see(group: InputGroup, module: nn.Module, args: tuple[Any, ...]) -> None:
        for stats in found.values():
            stats[group].add(args[0])

    handles = [view.module.get_submodule(g.names[0]).register_forward_pre_hook(partial(see, g)) for g in view.groups]
    try:
        for batch, state in enumerate(states):
            output = view.replay(view.module, state, batch)
            if advance:
                state.copy_(output)
    finally:
        for handle in handles:
            handle.remove()
    return found


SCHEDULES = {"one-pass": one_pass, "two-pass": two_pass}
