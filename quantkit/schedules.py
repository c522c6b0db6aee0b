"""When the statistics of a block's input groups are taken, and on which weights.

A schedule is a generator that yields a group when its inputs are complete, lets the caller edit the group's weights, and goes on:

- one pass: each batch's forward runs in a thread of its own, one at a time by baton, and waits at the first linear
  of each group until all batches are there. Every linear is computed once, on weights already quantized.
- two passes: all statistics in one replay, then a second replay for the outputs. Half the speed, less memory.

A stack of experts is a group whose inputs are tokens and their experts; it is yielded expert by expert.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import PlanError
from quantkit.loader import is_expert_stack
from quantkit.tensors import BlockView, InputGroup, LayerStats

LANE_STACK = 1 << 20  # below the size of a huge page, which a larger stack would take whole at its first touch


class _Cancelled(BaseException):
    """Ends a lane whose result is not wanted any more."""


class _Lane:
    """One batch's forward pass in a thread that runs only while it holds the baton."""

    def __init__(self, work: Callable[[_Lane], Tensor]) -> None:
        self.go, self.arrived = threading.Semaphore(0), threading.Semaphore(0)
        self.input: Any = None
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

    def wait(self, inputs: Any) -> None:
        """Called inside the lane: hand over the inputs of a group and wait for the baton."""
        self.input = inputs
        self.arrived.release()
        self.go.acquire()
        if self.cancelled:
            raise _Cancelled

    def step(self) -> Any:
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
Routed = list[tuple[Tensor, Tensor]]  # of each batch, what a stack of experts is given: hidden [tokens, in], experts [tokens, k]


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
        by_thread[threading.get_ident()].wait(args[:2] if is_expert_stack(module) else args[0])

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
            if group.experts:
                routed = [_step(lane, view, group) for lane in lanes]
                for twin in twins:
                    _step(twin, view, group)
                yield from expert_groups(view, group, routed, device, tiles)
                del routed
                continue
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


def _step(lane: _Lane, view: BlockView, group: InputGroup) -> Any:
    inputs = lane.step()
    if inputs is None:
        raise PlanError(f"{view.name}: a batch never reached {group.names[0]}; use --schedule two-pass.")
    return inputs


@torch.no_grad()
def two_pass(view: BlockView, states: list[Tensor], exact: list[Tensor], device: torch.device, tiles: bool = False) -> Groups:
    """Yield each input group with statistics taken on the unquantized block; then replay for the outputs."""
    stats = {group: LayerStats(group.width, device, tiles) for group in view.groups if not group.experts}
    routed: dict[InputGroup, Routed] = {group: [] for group in view.groups if group.experts}
    seen: dict[InputGroup, Tensor] = {}
    twin = False  # whether the replay is of the exact stream

    def see(group: InputGroup, module: nn.Module, args: tuple[Any, ...]) -> None:
        if group.experts:
            if not twin:
                routed[group].append((args[0], args[1]))
        elif not exact:
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
                twin = True
                exact[batch].copy_(view.replay(view.module, exact[batch], batch))
                twin = False
            view.replay(view.module, state, batch)
    finally:
        for handle in handles:
            handle.remove()
    for group in view.groups:
        if group.experts:
            yield from expert_groups(view, group, routed.pop(group), device, tiles)
        else:
            yield group, stats.pop(group)
    for batch, state in enumerate(states):
        state.copy_(view.replay(view.module, state, batch))


@torch.no_grad()
def float_pass(
    view: BlockView, states: list[Tensor], device: torch.device, kinds: set[bool], advance: bool
) -> tuple[dict[bool, Statistics], dict[InputGroup, Routed]]:
    """Return every input group's statistics on the block as it is, by whether they hold only diagonal tiles (`kinds`), and what stacks of
    experts are given.

    advance: whether `states` become the block's outputs.
    """
    dense = [group for group in view.groups if not group.experts]
    found = {tiles: {group: LayerStats(group.width, device, tiles) for group in dense} for tiles in kinds}
    routed: dict[InputGroup, Routed] = {group: [] for group in view.groups if group.experts}

    def see(group: InputGroup, module: nn.Module, args: tuple[Any, ...]) -> None:
        if group.experts:
            routed[group].append((args[0], args[1]))
        for stats in found.values() if not group.experts else ():
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
    return found, routed


@torch.no_grad()
def expert_groups(view: BlockView, group: InputGroup, routed: Routed, device: torch.device, tiles: bool) -> Groups:
    """Yield, expert by expert, its gate and up with the tokens that are routed to it, then its down with what they make of them.

    The caller edits the stack in between, so down's inputs are those of weights already quantized. An expert without a token is
    yielded too, its statistics empty.
    """
    module: Any = view.module.get_submodule(group.names[0])
    for expert in range(group.experts):
        for parts in (("gate", "up"), ("down",)):
            names = tuple(view.experts[key] for part in parts if (key := (group.names[0], part, expert)) in view.experts)
            width = module.down_proj.shape[2] if parts == ("down",) else group.width
            stats = LayerStats(width, device, tiles)
            for hidden, chosen in routed:
                rows = hidden.reshape(-1, group.width)[(chosen.reshape(-1, chosen.shape[-1]) == expert).any(1)]
                if len(rows):
                    stats.add(expert_inner(module, rows, expert) if parts == ("down",) else rows)
            if names:
                yield InputGroup(names, width), stats


def expert_inner(module: Any, rows: Tensor, expert: int) -> Tensor:
    """Return what an expert's down is given for hidden states [tokens, in]: act(gate) * up."""
    gate, up = nn.functional.linear(rows, module.gate_up_proj[expert]).chunk(2, dim=-1)
    inner: Tensor = module.act_fn(gate) * up
    return inner


SCHEDULES = {"one-pass": one_pass, "two-pass": two_pass}
