"""Where scales can hide: pairs of a module and the linears that read its output, found by running the block.

A scale that multiplies a linear's input column can be divided out of what makes that column: a norm's weight, or the
rows of an earlier linear if everything between is linear in them. Which modules those are is not looked up: candidates come from
one traced run of the block, and each is tried with random powers of two, which floating point multiplies exactly. If
the block's output stays what it was, the fold is possible; whatever the family, grouped heads and gates included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.calibrate import Call, run_block
from quantkit.loader import is_conv1d, is_linear
from quantkit.tensors import BlockView, InputGroup, LayerStats, Pair, Seen

TOLERANCE = 1e-4


@torch.no_grad()
def find_pairs(view: BlockView, hidden: Tensor, call: Call, head: int) -> tuple[list[Pair], list[InputGroup]]:
    """Return a block's pairs and the input groups that no scale can be folded for.

    hidden: a few tokens' states entering the block, [1, tokens, width]; head: columns of an attention head.
    """
    block, groups = view.module, [group for group in view.groups if not group.experts]
    makers, before = _trace(block, hidden, call, groups)
    reference = run_block(block, hidden, call)
    pairs, refused = [], []
    for group in groups:
        candidates = _candidates(block, group, makers[group], before[group], head)
        found = next((pair for pair in candidates if _holds(block, pair, hidden, call, reference)), None)
        if found is None:
            refused.append(group)
        else:
            pairs.append(found)
    return pairs, refused


def _trace(block: nn.Module, hidden: Tensor, call: Call, groups: list[InputGroup]) -> tuple[dict[Any, list[str]], dict[Any, list[str]]]:
    """Return, per group, the weighted modules whose output is its very input, and the linears called before it, latest first."""
    outputs: list[tuple[str, Tensor]] = []
    inputs: dict[InputGroup, tuple[Tensor, int]] = {}

    def made(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs.append((name, output))  # kept alive, so that an address means one tensor

    def read(group: InputGroup, module: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.setdefault(group, (args[0], len(outputs)))

    leaves = [(n, m) for n, m in block.named_modules() if not list(m.children()) and list(m.parameters(recurse=False))]
    handles = [module.register_forward_hook(partial(made, name)) for name, module in leaves]
    handles += [block.get_submodule(group.names[0]).register_forward_pre_hook(partial(read, group)) for group in groups]
    try:
        run_block(block, hidden, call)
    finally:
        for handle in handles:
            handle.remove()
    linears = {name for name, module in leaves if is_linear(module)}
    makers, before = {}, {}
    for group, (value, count) in inputs.items():
        same = [name for name, out in outputs[:count] if out.data_ptr() == value.data_ptr() and out.shape == value.shape]
        makers[group] = [name for name in same if name not in linears]
        before[group] = [name for name, _ in reversed(outputs[:count]) if name in linears and name not in group.names]
    return makers, before


def _candidates(block: nn.Module, group: InputGroup, makers: list[str], before: list[str], head: int) -> Iterator[Pair]:
    for name in makers:
        for kind in ("norm", "shifted"):
            yield Pair(group, name, kind, 0, torch.arange(group.width), _consumer(block, group.names))
    for name in dict.fromkeys(before):
        rows, columns = _rows(block.get_submodule(name)), group.width
        for units in dict.fromkeys((columns, rows, (rows - columns) // 2)):  # one each; a key-value head each; the same, fused with q
            if not 0 < units <= min(rows, columns) or columns % units or (units < columns and units % head):
                continue
            column = torch.arange(columns)
            index = column if units == columns else column // head // (columns // units) * head + column % head
            consumer = group.names[0] if len(group.names) == 1 else _consumer(block, group.names)
            yield Pair(group, name, "rows", rows - units, index, consumer)


def _consumer(block: nn.Module, names: tuple[str, ...]) -> str:
    """Return the child of the block that holds these linears: "self_attn", "mlp", or the block itself ("") for more than one."""
    children = {name.partition(".")[0] for name in names}
    return children.pop() if len(children) == 1 else ""


def _rows(linear: nn.Module) -> int:
    return linear.get_parameter("weight").shape[1 if is_conv1d(linear) else 0]


def _holds(block: nn.Module, pair: Pair, hidden: Tensor, call: Call, reference: Tensor) -> bool:
    generator = torch.Generator().manual_seed(0)
    scale = (2.0 ** torch.randint(-1, 2, (pair.units,), generator=generator)).to(hidden.device)
    with _restored(block, pair):
        fold(block, pair, scale)
        change = (run_block(block, hidden, call) - reference).abs().max()
    return bool(change <= TOLERANCE * reference.abs().max())


@contextmanager
def _restored(block: nn.Module, pair: Pair) -> Iterator[None]:
    modules = [block.get_submodule(name) for name in (pair.before, *pair.group.names)]
    saved = [(p, p.data.clone()) for module in modules for p in module.parameters(recurse=False)]
    try:
        yield
    finally:
        for parameter, value in saved:
            parameter.data.copy_(value)


@torch.no_grad()
def fold(block: nn.Module, pair: Pair, scale: Tensor, stored: Callable[[str], torch.dtype] | None = None) -> list[str]:
    """Multiply the group's columns by scale, float32 [units], and divide it out of what is before; return the parameters changed.

    stored(name) is the dtype that a parameter (named in the block) has on disk. A norm's weight is rounded to it first, and the
    columns get the scale that the rounded weight stands for, so that nothing is lost.
    """
    module = block.get_submodule(pair.before)
    index = pair.index.to(scale.device)
    if pair.kind == "rows":
        changed = _divide_rows(module, pair.start, scale)
    else:
        weight, shift = module.get_parameter("weight"), 1.0 if pair.kind == "shifted" else 0.0
        old = weight.data + shift
        new = old / scale - shift
        if stored is not None:
            new = new.to(stored(f"{pair.before}.weight")).to(new.dtype)
        moved = (old / (new + shift)).to(torch.float32)
        scale = torch.where(torch.isfinite(moved) & (moved > 0), moved, scale)
        weight.data.copy_(new)
        changed = ["weight"]
        if (bias := getattr(module, "bias", None)) is not None:
            bias.data.div_(scale)
            changed.append("bias")
    for name in pair.group.names:
        linear = block.get_submodule(name)
        columns = scale[index][:, None] if is_conv1d(linear) else scale[index]
        linear.get_parameter("weight").data.mul_(columns)
    return [f"{pair.before}.{name}" for name in changed] + [f"{name}.weight" for name in pair.group.names]


def _divide_rows(linear: nn.Module, start: int, scale: Tensor) -> list[str]:
    weight, rows = linear.get_parameter("weight").data, slice(start, start + len(scale))
    if is_conv1d(linear):
        weight[:, rows].div_(scale)
    else:
        weight[rows].div_(scale[:, None])
    if getattr(linear, "bias", None) is None:
        return ["weight"]
    linear.get_parameter("bias").data[rows].div_(scale)
    return ["weight", "bias"]


@dataclass
class Folds:
    """What was done to one block. changed: parameters; notes: a line each on the pairs, and on groups that have none."""

    changed: list[str] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)


@torch.no_grad()
def fold_block(view: BlockView, states: list[Tensor], probe: tuple[Tensor, Call], scaler: Any, codecs: dict[str, Any],
               stored: Callable[[str], torch.dtype]) -> Folds:  # fmt: skip
    """Search and fold the scales of every pair of a block whose linears are quantized; the states stay as they are.

    codecs: of the linears that will be quantized, by their name in the block.
    """
    pairs, refused = find_pairs(view, *probe, scaler.head)
    pairs = [pair for pair in pairs if any(name in codecs for name in pair.group.names)]
    done = Folds()
    for pair, seen in zip(pairs, observe(view, states, pairs, scaler.keep), strict=True):
        scale, note = scaler.search(view.module, pair, seen, codecs)
        done.changed += [name for name in fold(view.module, pair, scale, stored) if name not in done.changed]
        done.notes.append(note)
        seen.calls.clear()
    for group in refused:
        if any(name in codecs for name in group.names):
            done.notes.append({"group": list(group.names), "before": ""})
    return done


@torch.no_grad()
def observe(view: BlockView, states: list[Tensor], pairs: list[Pair], keep: int) -> list[Seen]:
    """Replay the block over all states, once, and return what each pair's input and consumer saw; the states stay.

    keep: how many tokens' worth of the consumers' calls to keep.
    """
    device = next(view.module.parameters()).device
    seen = [Seen(torch.zeros(p.group.width, device=device), torch.zeros(p.group.width, device=device),
                 LayerStats(p.group.width, device, tiles=True)) for p in pairs]  # fmt: skip
    wanted = True

    def look(one: Seen, module: nn.Module, args: tuple[Any, ...]) -> None:
        rows = args[0].reshape(-1, args[0].shape[-1]).to(torch.float32).abs()
        one.mean += rows.sum(0)
        torch.maximum(one.peak, rows.amax(0), out=one.peak)
        one.stats.add(args[0])

    def hold(one: Seen, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if wanted:
            one.calls.append((args, kwargs))

    handles = []
    for pair, one in zip(pairs, seen, strict=True):
        handles.append(view.module.get_submodule(pair.group.names[0]).register_forward_pre_hook(partial(look, one)))
        handles.append(view.module.get_submodule(pair.consumer).register_forward_pre_hook(partial(hold, one), with_kwargs=True))
    tokens = 0
    try:
        for batch, state in enumerate(states):
            wanted = tokens < keep
            view.replay(view.module, state, batch)
            tokens += state.shape[0] * state.shape[1]
    finally:
        for handle in handles:
            handle.remove()
    for one in seen:
        one.mean /= max(one.stats.tokens, 1)
    return seen
