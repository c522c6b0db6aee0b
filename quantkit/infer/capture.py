"""A step recorded once and replayed: what transformers' own code of the blocks computes for one token, as a list of small kernels.

The blocks run once on one row while every operation on its numbers is noted (PyTorch's dispatcher shows them); linears and attention are
noted as wholes. Storages become places in an arena, with lives that end at their last use. Nothing is rewritten: a model whose
blocks do something that has no kernel, or look at numbers to decide, is not recorded, and runs as before. What is recorded is tried
beside the blocks themselves before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from quantkit.infer.attention import Look
from quantkit.infer.linear import PackedLinear, Stub
from quantkit.tensors import bits_of

ALIGN = 32  # numbers
UNARY = {"neg": "neg", "silu": "silu", "sigmoid": "sigmoid", "tanh": "tanh", "exp": "exp", "rsqrt": "rsqrt", "sqrt": "sqrt", "relu": "relu",
         "reciprocal": "reciprocal", "clone": "copy", "_to_copy": "copy"}  # fmt: skip
POWERS = {2.0: "square", 3.0: "cube", 0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal", 1.0: "copy"}


class NotRecorded(Exception):
    """The blocks do something that has no kernel; the message says what."""


@dataclass
class Place:
    """A storage of the recording: how many numbers, and from which instruction to which it lives."""

    numbers: int
    born: int
    last: int = 0
    offset: int = -1


@dataclass
class Operand:
    """A tensor as an instruction sees it: in a place of the arena, or a constant that stays in memory."""

    place: Place | None
    value: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def address(self) -> tuple[int, int]:
        """Return what a kernel takes as where its numbers are."""
        if self.place is None:
            return 1, self.value.data_ptr()
        return 0, 4 * (self.place.offset + int(self.value.storage_offset()))


@dataclass
class Note:
    """An instruction before its places are known. kernel, detail: which one; together: whether it needs all rows; write: its numbers."""

    kernel: str
    detail: Any
    together: bool
    used: list[Operand]
    write: Callable[[], list[int]]


@dataclass
class Recording:
    """A recorded step. inputs: for each tensor that the blocks are given, the block and the path to it in its arguments, and its place."""

    notes: list[Note]
    inputs: list[tuple[int, tuple[Any, ...], Place]]
    result: Operand
    held: list[Any]
    floats: int = 0

    def lay_out(self) -> None:
        """Give every place its offset: the lowest gap that is free while it lives."""
        for number, note in enumerate(self.notes):
            for operand in note.used:
                if operand.place is not None:
                    operand.place.last = number
        assert self.result.place is not None
        self.result.place.last = len(self.notes)
        found = {id(o.place): o.place for note in self.notes for o in note.used if o.place is not None}
        found |= {id(place): place for *_, place in self.inputs}
        laid: list[Place] = []
        for place in sorted(found.values(), key=lambda p: (p.born, p.last)):
            busy = sorted((other for other in laid if other.last >= place.born), key=lambda p: p.offset)
            offset = 0
            for other in busy:
                if other.offset - offset >= place.numbers:
                    break
                offset = max(offset, other.offset + -(-other.numbers // ALIGN) * ALIGN)
            place.offset = offset
            laid.append(place)
            self.floats = max(self.floats, offset + -(-place.numbers // ALIGN) * ALIGN)


def tensors_in(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Tensor]:
    """Return the float32 tensors of one row in a block's arguments, by their path."""
    if isinstance(value, Tensor):
        return {path: value} if value.dtype == torch.float32 else {}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (tuple, list)) else ()
    return {key: tensor for name, item in items for key, tensor in tensors_in(item, (*path, name)).items()}


def at_path(value: Any, path: tuple[Any, ...]) -> Tensor:
    """Return the tensor at a path of `tensors_in`."""
    for name in path:
        value = value[name]
    found: Tensor = value
    return found


@dataclass(eq=False)
class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what happens to one row: storages that the blocks are given or make are places, all others constants."""

    notes: list[Note] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)
    inputs: list[tuple[int, tuple[Any, ...], Place]] = field(default_factory=list)
    alive: list[Any] = field(default_factory=list)  # so that no storage is given out twice
    fused: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def enter_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the tensors that a block is given, if they are none that the blocks made, as inputs."""
        for path, tensor in tensors_in((args, kwargs)).items():
            key = tensor.untyped_storage().data_ptr()
            if key not in self.places:
                if tensor.shape[:2] != (1, 1):
                    raise NotRecorded(f"a block is given numbers of shape {list(tensor.shape)}")
                self.inputs.append((index, path, self._place(tensor, 0)))  # filled before the first instruction

    def _place(self, tensor: Tensor, born: int | None = None) -> Place:
        if tensor.dtype != torch.float32:
            raise NotRecorded(f"{tensor.dtype} in a block")
        place = Place(tensor.untyped_storage().nbytes() // 4, len(self.notes) if born is None else born)
        self.places[tensor.untyped_storage().data_ptr()] = place
        self.alive.append(tensor)
        return place

    def _operand(self, tensor: Tensor) -> Operand:
        place = self.places.get(tensor.untyped_storage().data_ptr())
        if place is None and tensor.dtype != torch.float32:
            raise NotRecorded(f"a constant of {tensor.dtype}")
        self.alive.append(tensor)
        return Operand(place, tensor, tuple(tensor.shape), tuple(tensor.stride()))

    def _is_live(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage().data_ptr() in self.places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        flat = [*args, *(args[0] if args and isinstance(args[0], (list, tuple)) else ())]
        if not any(self._is_live(value) for value in flat):
            return out
        if isinstance(out, Tensor) and self._is_live(out) and not name.endswith("_"):
            return out  # a view
        if isinstance(out, (list, tuple)) and all(self._is_live(part) for part in out):
            return out  # views
        self._note(name, args, kwargs, out)
        return out

    def _note(self, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        if name == "cat":
            self._cat(args[0], args[1] if len(args) > 1 else 0, out)
        elif name in UNARY:
            self.unary(UNARY[name], args[0], out)
        elif name == "gelu":
            self.unary("gelu_tanh" if kwargs.get("approximate") == "tanh" else "gelu", args[0], out)
        elif name == "pow" and isinstance(args[1], (int, float)) and float(args[1]) in POWERS:
            self.unary(POWERS[float(args[1])], args[0], out)
        elif name == "mean" and len(args) > 1 and list(args[1]) in ([-1], [args[0].dim() - 1]):
            self._mean(args[0], out)
        elif name == "native_layer_norm":
            self._layer_norm(args, out[0])
        elif name in ("add", "sub", "mul", "div", "add_", "mul_") and kwargs.get("alpha", 1) == 1:
            self._arithmetic(name.removesuffix("_"), args[0], args[1], out)
        elif name == "copy_":
            self.unary("copy", args[1], out)
        else:
            raise NotRecorded(f"a block uses {name}")

    def _arithmetic(self, name: str, x: Any, y: Any, out: Tensor) -> None:
        if isinstance(y, (int, float)):
            if name in ("add", "sub"):
                self.unary("add", x, out, float(y) if name == "add" else -float(y))
            elif name == "mul":
                self.unary("mul", x, out, float(y))
            else:
                self.binary(name, x, torch.tensor(float(y)), out)
        else:
            self.binary(name, x, y, out)

    def _out(self, out: Tensor) -> Operand:
        if not self._is_live(out):
            self._place(out)
        return self._operand(out)

    def unary(self, name: str, x: Tensor, out: Tensor, number: float = 0.0) -> None:
        """Note out = name(x), element by element."""
        if not out.numel():
            return
        source, target = self._operand(x.expand(out.shape) if x.shape != out.shape else x), self._out(out)
        sizes, (so, sx) = _loops(target.shape, [target.strides, source.strides])
        self.notes.append(
            Note("unary", name, False, [target, source], lambda: [*sizes, *target.address(), *so, *source.address(), *sx, bits_of(number)])
        )

    def binary(self, name: str, x: Tensor, y: Tensor, out: Tensor) -> None:
        """Note out = x name y, element by element."""
        a, b, target = self._operand(x.expand(out.shape)), self._operand(y.expand(out.shape)), self._out(out)
        sizes, (so, sa, sb) = _loops(target.shape, [target.strides, a.strides, b.strides])
        self.notes.append(
            Note("binary", name, False, [target, a, b], lambda: [*sizes, *target.address(), *so, *a.address(), *sa, *b.address(), *sb])
        )

    def _cat(self, parts: list[Tensor], dim: int, out: Tensor) -> None:
        self._out(out)
        at = 0
        for part in parts:
            self.unary("copy", part, out.narrow(dim, at, part.shape[dim]))
            at += part.shape[dim]

    def _runs(self, x: Tensor, length: int) -> tuple[int, int]:
        """Return how many runs of the last dimension there are, and from one to the next how many numbers."""
        flat = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
        if x.stride(-1) != 1 or len(flat) > 1:
            raise NotRecorded("a mean over scattered numbers")
        return (flat[0][0], flat[0][1]) if flat else (1, length)

    def _mean(self, x: Tensor, out: Tensor) -> None:
        source, target, length = self._operand(x), self._out(out), x.shape[-1]
        runs, stride = self._runs(x, length)
        self.notes.append(Note("mean", None, False, [target, source], lambda: [runs, length, *target.address(), *source.address(), stride]))

    def _layer_norm(self, args: Any, out: Tensor) -> None:
        x, shape, weight, bias, epsilon = args
        if len(shape) != 1 or weight is None or bias is None or weight.dtype != torch.float32:
            raise NotRecorded("a layer norm without weight or bias")
        source, target = self._operand(x), self._out(out)
        runs, stride = self._runs(x, shape[0])
        self.alive += [weight, bias]
        more = [weight.data_ptr(), bias.data_ptr(), bits_of(epsilon)]
        self.notes.append(
            Note("layer_norm", None, False, [target, source], lambda: [runs, shape[0], *target.address(), *source.address(), stride, *more])
        )

    def linear(self, module: PackedLinear, x: Tensor) -> Tensor:
        """Note a linear, and return what it gives, float32 [1, 1, out]."""
        if module.inputs is not None or (module.kernel is None and module.shared is None):
            raise NotRecorded("a linear without a kernel")
        with _disable_current_modes():
            if module.shared is not None:
                shared, index = module.shared
                if id(shared) not in self.fused or self.fused[id(shared)][0] is not x:
                    self.fused[id(shared)] = x, self._product(shared.kernel, x, None)
                result = torch.split(self.fused[id(shared)][1], shared.sizes, 1)[index]
            else:
                assert module.kernel is not None
                result = self._product(module.kernel, x, module.order)
            if module.bias is not None:
                plain, result = result, result + module.bias
                self.binary("add", plain, module.bias.detach(), result)
            return result.view(*x.shape[:-1], module.out_features)

    def _product(self, kernel: Any, x: Tensor, order: Tensor | None) -> Tensor:
        flat = x.reshape(1, -1)
        if not hasattr(kernel, "planes") or not self._is_live(flat) or flat.stride(1) != 1:
            raise NotRecorded("a linear without a kernel")
        if order is not None:
            source, picked = self._operand(flat), flat[:, order].contiguous()
            target, where = self._out(picked), order.contiguous()
            self.alive.append(where)
            length = where.numel()
            self.notes.append(
                Note("gather", None, False, [target, source], lambda: [length, *target.address(), *source.address(), where.data_ptr()])
            )
            flat = picked
        result: Tensor = kernel(flat.contiguous())
        into, given = self._out(result), self._operand(flat)
        self.alive.append(kernel)
        self.notes.append(Note("linear", kernel, True, [into, given], lambda: [*into.address(), *given.address()]))
        return result

    def attend(self, layer: int, segment: Any, q: Tensor, k: Tensor, v: Tensor, look: Look) -> Tensor:
        """Note attention, in the place of a cache: q, k, v float32 [heads, 1, size]; one token attends to itself."""
        with _disable_current_modes():
            out = v.repeat_interleave(q.shape[0] // v.shape[0], 0).contiguous()
            parts = [self._operand(part) for part in (q, k, v)] + [self._out(out)]
            if any(part.place is None or part.strides[2] != 1 for part in parts):
                raise NotRecorded("attention over scattered numbers")
            fixed = [layer, q.shape[0], k.shape[0], q.shape[2], look.window]
            scales = [bits_of(look.scale), bits_of(look.softcap)]
            self.notes.append(
                Note("attend", None, True, parts,
                     lambda: [*fixed, *(n for part in parts for n in (part.address()[1], part.strides[0])), *scales])
            )  # fmt: skip
            return out

    def nothing(self, stub: Stub, x: Tensor) -> Tensor:
        """Note a linear that computes nothing, and return its zeros."""
        with _disable_current_modes():
            made = torch.zeros(*x.shape[:-1], stub.value.shape[1])
            target = self._out(made)
            self.notes.append(Note("zero", None, False, [target], lambda: [made.numel(), *target.address()]))
            return made


def _loops(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> tuple[list[int], list[list[int]]]:
    """Return four sizes and each operand's four strides: dimensions of one left out, neighbours joined where all operands allow it."""
    dims = [(size, [s[d] for s in strides]) for d, size in enumerate(shape) if size > 1]
    joined: list[tuple[int, list[int]]] = []
    for size, steps in dims:
        if joined and all(outer == size * inner for outer, inner in zip(joined[-1][1], steps, strict=True)):
            joined[-1] = (joined[-1][0] * size, steps)
        else:
            joined.append((size, steps))
    if len(joined) > 4:
        raise NotRecorded("more than four dimensions")
    joined = [(1, [0] * len(strides))] * (4 - len(joined)) + joined
    return [size for size, _ in joined], [[steps[i] for _, steps in joined] for i in range(len(strides))]
