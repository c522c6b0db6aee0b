"""The layouts of compressed-tensors, one per kind of codec: how a module's tensors look, are made, and are read.

- pack-quantized: integers of 2 to 8 bits in 32-bit words along in; zero points packed along out.
- int-quantized, naive-quantized: int8 [out, in], scales [out, groups], zero points int8; for activations in 8 bits, or unpacked.
- float-quantized: float8 [out, in]; scales [1], [out, 1] or one per block.
- mxfp4-pack-quantized, nvfp4-pack-quantized: two E2M1 codes a byte, low nibble first; scales E8M0 bytes or E4M3 floats, and for
  NVFP4 a float32 that multiplied them.
A static activation scale is float32 [1] under input_scale. Codes and zero points of integers are stored signed where they have bytes
of their own, and unsigned (less the smallest) in words.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantkit.codecs._levels import SCALE_DTYPES, pack_nibbles, unpack_nibbles
from quantkit.codecs.affine import Affine
from quantkit.codecs.float8 import BLOCK, Float8
from quantkit.codecs.fp4 import Fp4
from quantkit.errors import SourceError
from quantkit.formats._bits import fields_per_period, pack, unpack
from quantkit.formats._packed import group_of
from quantkit.formats._safetensors import CODES, TensorInfo
from quantkit.tensors import QuantTensor

Args = dict[str, Any]


def kind_of(codec: Any, naive: bool) -> str:
    """Return the name of the layout that holds a codec."""
    if isinstance(codec, Affine):
        return "naive-quantized" if naive else "pack-quantized" if codec.activations == "none" else "int-quantized"
    if isinstance(codec, Float8):
        return "naive-quantized" if naive else "float-quantized"
    return f"{codec.name}-pack-quantized"


def pad(size: int, bits: int) -> int:
    """Return a size rounded up to whole periods of packed fields."""
    unit = fields_per_period(bits)
    return (size + unit - 1) // unit * unit


def _padded(values: Tensor, bits: int) -> Tensor:
    extra = pad(values.shape[0], bits) - values.shape[0]
    return torch.nn.functional.pad(values, (0, 0, 0, extra)) if extra else values


def layout(shape: tuple[int, int], codec: Any, kind: str) -> dict[str, TensorInfo]:
    """Return the tensors of a packed module by their suffix, before they exist."""
    out, columns = shape
    if isinstance(codec, Fp4):
        scale = TensorInfo("U8" if codec.kind == "mxfp4" else "F8_E4M3", (out, columns // codec.group))
        tail = {} if codec.kind == "mxfp4" else {"weight_global_scale": TensorInfo("F32", (1,))}
        return {"weight_packed": TensorInfo("U8", (out, columns // 2)), "weight_scale": scale, **tail}
    dtype = CODES[SCALE_DTYPES[codec.scale_dtype]]
    tail = {"input_scale": TensorInfo("F32", (1,))} if codec.activations == "static" else {}
    if isinstance(codec, Float8):
        return {"weight": TensorInfo("F8_E4M3", shape), "weight_scale": TensorInfo(dtype, codec.shape_of_scale(shape)), **tail}
    groups = codec.groups(columns)
    scale = TensorInfo(dtype, (out, groups))
    if kind != "pack-quantized":
        zero = {} if codec.symmetric else {"weight_zero_point": TensorInfo("I8", (out, groups))}
        return {"weight": TensorInfo("I8", shape), "weight_scale": scale, **zero, **tail}
    words = pad(columns, codec.bits) * codec.bits // 32
    result = {"weight_packed": TensorInfo("I32", (out, words)), "weight_scale": scale, "weight_shape": TensorInfo("I64", (2,))}
    if not codec.symmetric:
        result["weight_zero_point"] = TensorInfo("I32", (pad(out, codec.bits) * codec.bits // 32, groups))
    return result


def pack_module(tensor: QuantTensor, kind: str) -> dict[str, Tensor]:
    """Return the tensors of a quantized module by their suffix."""
    codec, params = tensor.codec, tensor.params
    if isinstance(codec, Fp4):
        scale = params["scale"] if codec.kind == "mxfp4" else params["scale"].view(torch.float8_e4m3fn)
        tail = {} if codec.kind == "mxfp4" else {"weight_global_scale": params["global_scale"]}
        return {"weight_packed": pack_nibbles(tensor.codes), "weight_scale": scale, **tail}
    scale = params["scale"].to(SCALE_DTYPES[codec.scale_dtype])
    tail = {"input_scale": params["input_scale"]} if "input_scale" in params else {}
    if isinstance(codec, Float8):
        return {"weight": tensor.codes.view(torch.float8_e4m3fn), "weight_scale": scale, **tail}
    bits, middle = codec.bits, codec.middle
    if kind != "pack-quantized":
        zero = {} if codec.symmetric else {"weight_zero_point": _signed(params["zero"], middle)}
        return {"weight": _signed(tensor.codes, middle), "weight_scale": scale, **zero, **tail}
    result = {
        "weight_packed": pack(_padded(tensor.codes.T, bits), bits, last=True),
        "weight_scale": scale,
        "weight_shape": torch.tensor(tensor.codes.shape, dtype=torch.int64),
    }
    if not codec.symmetric:
        result["weight_zero_point"] = pack(_padded(params["zero"], bits), bits)
    if tensor.group_index is not None:
        result["weight_g_idx"] = tensor.group_index.to(torch.int32)
    return result


def _signed(codes: Tensor, middle: int) -> Tensor:
    return (codes.to(torch.int16) - middle).to(torch.int8)


def _unsigned(values: Tensor, middle: int) -> Tensor:
    return (values.to(torch.int16) + middle).to(torch.uint8)


def weight_args(codec: Any) -> Args:
    """Return what config.json says of the weights."""
    if isinstance(codec, Fp4):
        strategy, dtype = ("group", "torch.uint8") if codec.kind == "mxfp4" else ("tensor_group", "torch.float8_e4m3fn")
        return {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": codec.group,
                "dynamic": False, "scale_dtype": dtype}  # fmt: skip
    if isinstance(codec, Float8):
        block = {"block_structure": list(codec.block)} if codec.strategy == "block" else {}
        return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": codec.strategy, "dynamic": False, **block}
    return {
        "num_bits": codec.bits,
        "type": "int",
        "symmetric": codec.symmetric,
        "strategy": "channel" if codec.group == -1 else "group",
        "group_size": None if codec.group == -1 else codec.group,
        "dynamic": False,
        "actorder": None,
    }


def input_args(codec: Any) -> Args | None:
    """Return what config.json says of the inputs, or None."""
    activation = codec.activation
    if activation is None:
        return None
    strategy = "tensor" if activation.static else "group" if activation.group else "token"
    size = {"group_size": activation.group} if activation.group else {}
    kind = "int" if activation.kind == "int8" else "float"
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": not activation.static, **size}


def read_module(tensors: dict[str, Tensor], args: Args, activations: str, where: str) -> QuantTensor:
    """Return a module from its tensors by suffix; args, activations (none, dynamic or static): what the configuration has of it."""
    params: dict[str, Tensor] = {}
    if "input_scale" in tensors and activations == "static":
        params["input_scale"] = tensors["input_scale"].to(torch.float32).reshape(1)
    scale = tensors["weight_scale"]
    if "weight_packed" in tensors and tensors["weight_packed"].dtype == torch.uint8:
        return _read_fp4(tensors, where)
    if "weight_packed" in tensors:
        return _read_words(tensors, args, where)
    weight, dtype = tensors["weight"], str(scale.dtype).removeprefix("torch.")
    if weight.dtype == torch.float8_e4m3fn:
        strategy = "tensor" if scale.dim() < 2 else "channel" if scale.shape == (len(weight), 1) else "block"
        high, wide = args.get("block_structure") or (BLOCK, BLOCK)
        codec = Float8(strategy, dtype, activations, (int(high), int(wide)))
        if scale.dim() == 2 and tuple(scale.shape) != codec.shape_of_scale((weight.shape[0], weight.shape[1])):
            raise SourceError(f"{where}: scales {list(scale.shape)} are no blocks of {list(codec.block)} of {list(weight.shape)}.")
        scale = scale.to(torch.float32)
        return QuantTensor(weight.view(torch.uint8), {"scale": scale.reshape(1) if strategy == "tensor" else scale, **params}, codec)
    if weight.dtype != torch.int8:
        raise SourceError(f"{where}: weights of {weight.dtype} with a scale are not known.")
    rows = scale.to(torch.float32).reshape(-1, 1).expand(len(weight), 1) if scale.numel() == 1 else scale.to(torch.float32)
    zero = tensors.get("weight_zero_point")
    zeros = (
        torch.full(rows.shape, 128, dtype=torch.uint8)
        if zero is None
        else _unsigned(zero.reshape(-1, 1).expand(rows.shape) if zero.numel() == 1 else zero, 128)
    )
    group = group_of(weight.shape[1], rows.shape[1], args.get("group_size"))
    affine = Affine(8, group, zero is None, dtype, activations)
    return QuantTensor(_unsigned(weight, 128), {"scale": rows.contiguous(), "zero": zeros.contiguous(), **params}, affine)


def _read_fp4(tensors: dict[str, Tensor], where: str) -> QuantTensor:
    codes, scale = unpack_nibbles(tensors["weight_packed"]), tensors["weight_scale"]
    codec = Fp4("mxfp4" if scale.dtype == torch.uint8 else "nvfp4")
    if scale.shape != (len(codes), codes.shape[1] // codec.group):
        raise SourceError(f"{where}: scales {list(scale.shape)} do not fit {codec.label} of {list(codes.shape)}.")
    if codec.kind == "mxfp4":
        return QuantTensor(codes, {"scale": scale}, codec)
    whole = tensors["weight_global_scale"].to(torch.float32).reshape(1)
    return QuantTensor(codes, {"scale": scale.view(torch.uint8), "global_scale": whole}, codec)


def _read_words(tensors: dict[str, Tensor], args: Args, where: str) -> QuantTensor:
    out, columns = tensors["weight_shape"].tolist()
    packed = tensors["weight_packed"]
    bits = next((b for b in (2, 3, 4, 8) if pad(columns, b) * b // 32 == packed.shape[1]), 0)
    if not bits:
        raise SourceError(f"{where}: {packed.shape[1]} words cannot hold rows of {columns}: packed by an older library?")
    codes = unpack(packed.T, bits, last=True)[:, :columns].contiguous()
    scale = tensors["weight_scale"].reshape(out, -1)
    words = tensors.get("weight_zero_point")
    zero = torch.full(scale.shape, 1 << (bits - 1), dtype=torch.uint8) if words is None else unpack(words, bits)[:out]
    group = group_of(columns, scale.shape[1], args.get("group_size"))
    codec = Affine(bits, group, words is None, str(scale.dtype).removeprefix("torch."))
    return QuantTensor(codes, {"scale": scale.to(torch.float32), "zero": zero}, codec, tensors.get("weight_g_idx"))
