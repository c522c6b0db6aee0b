"""Linear layers and embeddings that run from packed weights: never a float copy of the model.

Two arithmetics. "fast": a kernel on bit planes of the codes, each row of x by itself (batch invariant). "exact": the artifact's own values,
dequantized a tile of rows at a time, multiplied in float32: what is measured is the artifact, not a kernel. Codecs without planes
(tables of levels, float8) run exact in both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.codecs._activations import Activation
from quantkit.codecs._levels import SCALE_DTYPES
from quantkit.codecs.affine import Affine
from quantkit.codecs.bnb import Bnb4
from quantkit.codecs.float8 import Float8
from quantkit.errors import SourceError
from quantkit.tensors import QuantTensor

LANES = 32
TILE = 1 << 22  # weights dequantized at a time
ROOM = 128  # bytes behind a part
HEIGHT = 128  # of the tallest blocks: tiles begin at multiples of it


@dataclass(frozen=True)
class Planes:
    """A weight as the kernels read it (their layout: backends/cpu/linear.py).

    packed: uint8 [out, in * bits / 8]; scale: float16 [out, groups]; and one of zero: uint8 [out, groups], offset: float16 [out, groups],
    or middle: the zero point of every group. order: int64 [in], the columns of x in the order of the codes, or None.
    """

    bits: int
    group: int
    packed: Tensor
    scale: Tensor
    zero: Tensor | None = None
    offset: Tensor | None = None
    middle: int = 0
    order: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        parts = (self.packed, self.scale, self.zero, self.offset, self.order)
        return sum(part.nbytes for part in parts if part is not None)


def pack_planes(codes: Tensor, bits: int) -> Tensor:
    """Return the bit planes, uint8 [out, in * bits / 8], of codes, uint8 [out, in]; 32 divides in."""
    runs = codes.view(len(codes), -1, LANES)
    if bits == 8:
        return codes.contiguous()
    if bits in (2, 3):
        planes = [_fields(runs & 3, 2), *([_fields(runs >> 2, 1)] if bits == 3 else [])]
    else:
        low = runs & 15
        planes = [low[:, :, :16] | (low[:, :, 16:] << 4), *([_fields(runs >> 4, bits - 4)] if bits > 4 else [])]
    return torch.cat(planes, 2).reshape(len(codes), -1)


def _fields(values: Tensor, bits: int) -> Tensor:
    """Return fields of 1 or 2 bits, uint8 [..., 4 * bits], of values [..., 32], the first in the lowest bits."""
    parts = values.view(*values.shape[:-1], -1, 8 // bits).to(torch.int32)
    return (parts << (bits * torch.arange(8 // bits, dtype=torch.int32))).sum(-1).to(torch.uint8)


def planes_of(tensor: QuantTensor) -> Planes | None:
    """Return the planes of groups of integers, or None if the kernels have none for them."""
    codec = tensor.codec
    if not isinstance(codec, Affine):
        return None
    codes, order = tensor.codes, None
    columns = codes.shape[1]
    if tensor.group_index is not None:
        order = torch.argsort(tensor.group_index.long(), stable=True)
        codes = codes[:, order]
    group = codec.width(columns)
    if columns % LANES or (group % LANES and group != 16):
        return None
    scale, zero = tensor.params["scale"], tensor.params["zero"]
    if scale.shape != (len(codes), columns // group) or zero.shape != scale.shape:  # a kernel believes it
        held = f"scales {list(scale.shape)}, zeros {list(zero.shape)}"
        raise SourceError(f"Codes {list(codes.shape)} in groups of {group} do not go with {held}.")
    if bool((scale.abs() > 65504).any()):
        return None
    constant = bool((zero == codec.middle).all())
    made = Planes(codec.bits, group, pack_planes(codes, codec.bits), scale.to(torch.float16).contiguous(),
                  None if constant else zero.contiguous(), None, codec.middle if constant else 0, order)  # fmt: skip
    return with_room(made)


def planes_of_blocks(codes: Tensor, scale: Tensor, offset: Tensor | None, middle: int, bits: int) -> Planes:
    """Return the planes of ggml blocks: codes uint8 [out, in], scale and offset float32 [out, groups]."""
    group = codes.shape[1] // scale.shape[1]
    shift = None if offset is None else offset.to(torch.float16).contiguous()
    return Planes(bits, group, pack_planes(codes, bits), scale.to(torch.float16).contiguous(), None, shift, middle)


def with_room(planes: Planes) -> Planes:
    """Return planes whose parts have some bytes behind them, which the kernels that take 64 at a time may read."""
    parts: dict[str, Any] = {
        name: _roomy(part) for name in ("packed", "scale", "zero", "offset") if (part := getattr(planes, name)) is not None
    }
    return replace(planes, **parts)


def _roomy(part: Tensor) -> Tensor:
    room = torch.zeros(part.numel() + ROOM // part.itemsize, dtype=part.dtype)
    room[: part.numel()] = part.reshape(-1)
    return room[: part.numel()].view(part.shape)


def planes_of_floats(weight: Tensor) -> Planes:
    """Return a weight's bfloat16 numbers as planes of 16 bits: the kernel that reads the packed ones reads these too."""
    data = weight.to(torch.bfloat16).contiguous().view(torch.uint8).view(len(weight), -1)
    return Planes(16, weight.shape[1], data, torch.ones(len(weight), 1, dtype=torch.float16))


def eight_bits(weight: Tensor) -> Planes:
    """Return a float weight, [out, in], in 8 bits, symmetric groups of 32."""
    groups = weight.to(torch.float32).view(len(weight), -1, LANES)
    scale = (groups.abs().amax(-1) / 127).clamp_min(2.0**-24).to(torch.float16)
    codes = ((groups / scale.float()[..., None]).round().clamp(-127, 127) + 128).to(torch.uint8).view(weight.shape)
    return with_room(Planes(8, LANES, codes, scale, middle=128))


class PackedLinear(nn.Module):
    """y = x WT + bias, float32, from planes (with a kernel) or from a source of exact rows.

    rows(first, last): float32 [last - first, in], the artifact's own values; nbytes: what the weight takes in memory.
    """

    def __init__(self, shape: tuple[int, int], bias: Tensor | None, nbytes: int) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.nbytes = nbytes
        self.bias = None if bias is None else nn.Parameter(bias.to(torch.float32), requires_grad=False)
        self.order: Tensor | None = None
        self.kernel: Callable[[Tensor], Tensor] | None = None
        self.rows: Callable[[int, int], Tensor] | None = None
        self.inputs: tuple[Activation, Tensor | None] | None = None
        self.planes: Planes | None = None
        self.shared: tuple[Shared, int] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return float32 [..., out] for x, float32 [..., in]."""
        if self.shared is not None:
            result = self.shared[0].part(x, self.shared[1])
            result = result if self.bias is None else result + self.bias
            return result.view(*x.shape[:-1], self.out_features)
        flat = x.reshape(-1, self.in_features)
        if self.inputs is not None:
            flat = self.inputs[0].apply(flat, self.inputs[1])
        if self.kernel is not None:
            flat = flat if self.order is None else flat[:, self.order]
            result = self.kernel(flat.contiguous())
        else:
            result = self._tiles(flat)
        if self.bias is not None:
            result = result + self.bias
        return result.view(*x.shape[:-1], self.out_features)

    def _tiles(self, flat: Tensor) -> Tensor:
        assert self.rows is not None
        step = max(TILE // self.in_features // HEIGHT, 1) * HEIGHT
        tiles = [nn.functional.linear(flat, self.rows(at, min(at + step, self.out_features))) for at in range(0, self.out_features, step)]
        return torch.cat(tiles, 1)


class Shared:
    """One kernel for linears that are given the same tensor one after another (q, k and v; gate and up): the first computes for all."""

    def __init__(self, kernel: Callable[[Tensor], Tensor], sizes: list[int]) -> None:
        self.kernel, self.sizes = kernel, sizes
        self.input: Tensor | None = None
        self.parts: dict[int, Tensor] = {}

    def part(self, x: Tensor, index: int) -> Tensor:
        """Return the result of linear `index` for x, float32 [..., in], as [rows, out]; what is asked for twice is computed twice."""
        if self.input is not x or index not in self.parts:
            whole = self.kernel(x.reshape(-1, x.shape[-1]).contiguous())
            self.input, self.parts = x, dict(enumerate(torch.split(whole, self.sizes, 1)))
        found = self.parts.pop(index)
        if not self.parts:
            self.input = None
        return found


def share(linears: list[PackedLinear], make: Callable[..., Any]) -> bool:
    """Let linears that read the same input run as one; False if their planes are of different kinds."""
    planes = [linear.planes for linear in linears if linear.planes is not None]
    kinds = {(p.bits, p.group, p.zero is None, p.offset is None, p.middle, p.order is None) for p in planes}
    if len(planes) < len(linears) or len(kinds) > 1 or planes[0].order is not None:
        return False
    zeros, offsets = [p.zero for p in planes if p.zero is not None], [p.offset for p in planes if p.offset is not None]
    whole = replace(planes[0], packed=torch.cat([p.packed for p in planes]), scale=torch.cat([p.scale for p in planes]),
                    zero=torch.cat(zeros) if zeros else None, offset=torch.cat(offsets) if offsets else None)  # fmt: skip
    shared = Shared(make(with_room(whole)), [linear.out_features for linear in linears])
    for index, linear in enumerate(linears):
        linear.shared, linear.kernel, linear.planes = (shared, index), None, None
    return True


class Stub(nn.Module):
    """A linear that computes nothing: what is left of a step is what modules and attention cost."""

    def __init__(self, weight: Any, transposed: bool) -> None:
        super().__init__()
        self.value = torch.zeros(1, weight.shape[1 if transposed else 0])
        self.nbytes = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return zeros, float32 [..., out]."""
        return self.value.expand(*x.shape[:-1], self.value.shape[1])


class PackedExperts(nn.Module):
    """The experts of a layer, in the place of transformers' stacks; parts: (gate, up or down, expert) -> its linear."""

    def __init__(self, parts: dict[tuple[str, int], PackedLinear], act_fn: nn.Module) -> None:
        super().__init__()
        self.parts, self.act_fn = parts, act_fn
        self.nbytes = sum(part.nbytes for part in parts.values())

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return float32 [rows, width]; hidden_states [rows, width], the experts of each row and their weights [rows, k].

        A row's experts add up in ascending order, whatever other rows there are.
        """
        found = torch.zeros_like(hidden_states)
        for expert in sorted(set(top_k_index.flatten().tolist())):
            rows, places = torch.where(top_k_index == expert)
            x = hidden_states[rows]
            inner = self.act_fn(self.parts["gate", expert](x)) * self.parts["up", expert](x)
            found.index_add_(0, rows, self.parts["down", expert](inner) * top_k_weights[rows, places, None])
        return found


class PackedEmbedding(nn.Module):
    """Rows of a packed or bfloat16 matrix, float32 when they are looked up."""

    def __init__(self, rows: Callable[[Tensor], Tensor], nbytes: int, scale: float = 1.0) -> None:
        super().__init__()
        self.rows, self.nbytes, self.scale = rows, nbytes, scale

    def forward(self, ids: Tensor) -> Tensor:
        """Return float32 [..., width] for ids, int64 [...]."""
        found = self.rows(ids.reshape(-1))
        return (found * self.scale).view(*ids.shape, found.shape[1])


def values_of(planes: Planes, rows: Tensor | slice) -> Tensor:
    """Return rows of a weight from its planes, float32 [n, in], columns in the order of the codes."""
    packed, scale = planes.packed[rows], planes.scale[rows].to(torch.float32)
    if planes.bits == 16:
        return packed.view(torch.bfloat16).to(torch.float32)
    codes = _unpack_planes(packed, planes.bits).to(torch.float32).view(*scale.shape, planes.group)
    if planes.offset is not None:
        value = codes * scale[..., None] + planes.offset[rows].to(torch.float32)[..., None]
    else:
        zero = planes.middle if planes.zero is None else planes.zero[rows].to(torch.float32)[..., None]
        value = (codes - zero) * scale[..., None]
    return value.view(len(packed), -1)


def _unpack_planes(packed: Tensor, bits: int) -> Tensor:
    """Undo `pack_planes`."""
    if bits == 8:
        return packed
    runs = packed.view(len(packed), -1, 4 * bits)
    if bits in (2, 3):
        low, rest, shift = _from_fields(runs[:, :, :8], 2), runs[:, :, 8:], 2
    else:
        low, rest, shift = torch.cat([runs[:, :, :16] & 15, runs[:, :, :16] >> 4], 2), runs[:, :, 16:], 4
    if rest.shape[2]:
        low = low | (_from_fields(rest, rest.shape[2] // 4) << shift)
    return low.reshape(len(packed), -1)


def _from_fields(data: Tensor, bits: int) -> Tensor:
    fields = (data[..., None] >> (bits * torch.arange(8 // bits, dtype=torch.uint8, device=data.device))) & ((1 << bits) - 1)
    return fields.flatten(-2)


def planes_reference(planes: Planes) -> Callable[[Tensor], Tensor]:
    """Return the linear of planes in plain PyTorch: a tile of rows dequantized at a time; x, float32 [rows, in] to [rows, out]."""
    out, columns = planes.packed.shape[0], planes.scale.shape[1] * planes.group
    step = max(1, TILE // columns)

    def run(x: Tensor) -> Tensor:
        return torch.cat([nn.functional.linear(x, values_of(planes, slice(at, at + step))) for at in range(0, out, step)], 1)

    return run


def linear_from(tensor: QuantTensor, bias: Tensor | None, make: Callable[..., Any] | None) -> PackedLinear:
    """Return the linear of a packed weight: by a kernel if `make` gives one and planes exist, else exact."""
    shape = (tensor.codes.shape[0], tensor.codes.shape[1])
    planes = planes_of(tensor) if make is not None else None
    if make is not None and planes is not None:
        return linear_of_planes(planes, shape, bias, make)
    packed = compact(tensor)
    linear = PackedLinear(shape, bias, sum(part.nbytes for part in (packed.codes, *packed.params.values())))
    linear.rows = lambda first, last: rows_of(packed, shape, first, last)
    return linear


def linear_of_planes(planes: Planes, shape: tuple[int, int], bias: Tensor | None, make: Callable[..., Any]) -> PackedLinear:
    """Return the linear of planes."""
    linear = PackedLinear(shape, bias, planes.nbytes)
    linear.planes, linear.order, linear.kernel = planes, planes.order, make(replace(planes, order=None))
    return linear


def linear_of_blocks(data: Tensor, codec: Any, bias: Tensor | None) -> PackedLinear:
    """Return the exact linear of ggml blocks, uint8 [out, bytes]."""
    linear = PackedLinear((len(data), data.shape[1] // codec.size * codec.block), bias, data.nbytes)
    linear.rows = lambda first, last: codec.decode(data[first:last])
    return linear


def linear_of_floats(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Return the linear of a float weight, [out, in], kept in its dtype."""
    linear = PackedLinear((weight.shape[0], weight.shape[1]), bias, weight.nbytes)
    linear.rows = lambda first, last: weight[first:last].to(torch.float32)
    return linear


def compact(tensor: QuantTensor) -> QuantTensor:
    """Return a tensor whose codes of 4 bits or fewer lie two in a byte, its parameters as small as they are stored."""
    params, codes = dict(tensor.params), tensor.codes
    if isinstance(tensor.codec, Affine) and tensor.codec.scale_dtype != "float32":
        params["scale"] = params["scale"].to(SCALE_DTYPES[tensor.codec.scale_dtype])
    if isinstance(tensor.codec, Bnb4) and tensor.codec.double:
        params = {"absmax": tensor.codec.absmax(params)}
        tensor = replace(tensor, codec=replace(tensor.codec, double=False))
    if tensor.codec.bits <= 4 and codes.shape[1] % 2 == 0:
        codes = codes[:, ::2] | (codes[:, 1::2] << 4)
    return QuantTensor(codes, params, tensor.codec, tensor.group_index)


def rows_of(packed: QuantTensor, shape: tuple[int, int], first: int, last: int) -> Tensor:
    """Return rows first..last of a compact tensor of a weight [out, in], float32; first must be a multiple of a block's height."""
    codes, codec = packed.codes[first:last], packed.codec
    if codes.shape[1] != shape[1]:
        codes = torch.stack([codes & 15, codes >> 4], 2).flatten(1)
    params = {}
    for name, value in packed.params.items():
        if isinstance(codec, Bnb4):
            per_row = shape[1] // codec.block
            params[name] = value[first * per_row : last * per_row]
        elif isinstance(codec, Float8) and codec.strategy == "block":
            params[name] = value[first // codec.block[0] : -(-last // codec.block[0])]
        else:
            params[name] = value[first:last] if len(value) == shape[0] and value.numel() > 1 else value
        if params[name].is_floating_point():
            params[name] = params[name].to(torch.float32)
    return QuantTensor(codes, params, codec, packed.group_index).dequantize()
