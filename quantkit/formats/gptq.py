"""GPTQ checkpoints: `qweight`, `qzeros`, `scales`, `g_idx`, as AutoGPTQ defined them and most runtimes load them.

For a linear of [out, in], b bits, G groups: qweight int32 [in*b/32, out], packed along in; qzeros int32 [G, out*b/32],
packed along out; scales float16 [G, out]; g_idx int32 [in]. weight[o, i] = scales[g, o] * (q[i, o] - zero[g, o]).
Version 1 stores zero - 1, version 2 zero itself. Version 1 loads in more places but cannot hold a zero of 0, so the
writer keeps true zeros until all are known and then takes version 1 if it can.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from quantkit.codecs._grid import BITS
from quantkit.codecs.affine import Affine
from quantkit.errors import SourceError, UsageError
from quantkit.formats._bits import fields_per_period, pack, unpack
from quantkit.formats._packed import PackedStore, group_of
from quantkit.formats._safetensors import TensorInfo
from quantkit.formats.store import TensorStore
from quantkit.tensors import PlanRow, QuantTensor

V1, V2 = "gptq", "gptq_v2"


class GptqFormat:
    """The writer: what fits, how a module's tensors look, and the configuration."""

    name = "gptq"
    conv1d = True
    scattered = True
    uniform = False
    codecs = ("affine",)
    scale_dtypes = ("float16",)
    side_config = "quantize_config.json"

    def refuse(self, shape: tuple[int, int], codec: Affine) -> str:
        """Return why a weight [out, in] cannot be stored with this codec, or an empty string."""
        unit = fields_per_period(codec.bits)
        for what, size in (("output", shape[0]), ("input", shape[1])):
            if size % unit:
                return f"{what} width {size} is not a multiple of {unit}, which {codec.bits}-bit packing needs"
        return ""

    def layout(self, module: str, shape: tuple[int, int], codec: Affine, scattered: bool) -> dict[str, TensorInfo]:
        """Return the tensors of a packed module before they exist."""
        out, columns = shape
        groups = codec.groups(columns)
        return {
            f"{module}.qweight": TensorInfo("I32", (columns * codec.bits // 32, out)),
            f"{module}.qzeros": TensorInfo("I32", (groups, out * codec.bits // 32)),
            f"{module}.scales": TensorInfo("F16", (groups, out)),
            f"{module}.g_idx": TensorInfo("I32", (columns,)),
        }

    def pack(self, module: str, tensor: QuantTensor) -> dict[str, Tensor]:
        """Return the tensors of a quantized module, with zeros as they are (version 2)."""
        bits, columns = tensor.codec.bits, tensor.codes.shape[1]
        index = tensor.group_index
        if index is None:
            index = torch.arange(columns, device=tensor.codes.device) // tensor.codec.width(columns)
        return {
            f"{module}.qweight": pack(tensor.codes.T, bits),
            f"{module}.qzeros": pack(tensor.params["zero"], bits, last=True),
            f"{module}.scales": tensor.params["scale"].T.to(torch.float16).contiguous(),
            f"{module}.g_idx": index.to(torch.int32),
        }

    def settle(self, name: str, bits: int, zeros_from_one: bool) -> Any:
        """Return the function that turns a packed tensor into its final form, or None if it is final already."""
        if not name.endswith(".qzeros") or not zeros_from_one:
            return None
        return lambda words: pack(unpack(words.T, bits) - 1, bits, last=True)

    def config(self, rows: list[PlanRow], options: dict[str, Any], zeros_from_one: bool) -> dict[str, Any]:
        """Return `quantization_config`; rows that differ from the first are named in `dynamic`."""
        packed = [row for row in rows if row.method != "keep"]
        first = most_common_codec(packed)
        dynamic: dict[str, Any] = {}
        for row in rows:
            key = "^" + re.escape(row.module) + "$"
            if row.method == "keep":
                dynamic["-:" + key] = {}
            elif row.codec != first:
                dynamic["+:" + key] = {"bits": row.codec.bits, "group_size": row.codec.group, "sym": row.codec.symmetric}
        return {
            "quant_method": "gptq",
            "bits": first.bits,
            "group_size": first.group,
            "desc_act": options.get("order") == "full",
            "sym": first.symmetric,
            "lm_head": False,
            "true_sequential": True,
            **({"damp_percent": damp} if 0 < (damp := options.get("damp", 0.0)) < 1 else {}),  # transformers takes no 0
            "checkpoint_format": V1 if zeros_from_one else V2,
            "pack_dtype": "int32",
            "dynamic": dynamic or None,
            "meta": {"quantizer": [options["quantizer"]]},
        }


FORMAT = GptqFormat()


def most_common_codec(rows: list[PlanRow]) -> Affine:
    """Return the codec that most of the quantized rows have, the first of equals."""
    count: dict[Affine, int] = {}
    for row in rows:
        count[row.codec] = count.get(row.codec, 0) + 1
    best: Affine = max(count, key=lambda codec: count[codec])
    return best


class GptqStore(PackedStore):
    """The reader."""

    anchors = (".qweight",)
    suffixes = (".qweight", ".qzeros", ".scales", ".g_idx")

    def __init__(self, inner: TensorStore, config: dict[str, Any]) -> None:
        super().__init__(inner)
        form = config.get("checkpoint_format") or config.get("format") or V1
        if form not in (V1, V2):
            raise SourceError(f"checkpoint_format '{form}' is not read. Known: {V1}, {V2}.")
        self.offset = 1 if form == V1 else 0
        self.symmetric = bool(config.get("sym", True))
        self.declared = config.get("group_size")
        held = set(inner.names())
        for module in self.modules:
            lacking = [f"{module}{s}" for s in self.suffixes[:3] if f"{module}{s}" not in held]
            if lacking:
                raise SourceError(f"The GPTQ checkpoint lacks {', '.join(lacking)}.")

    def _bits(self, module: str) -> int:
        out = self.inner.info(f"{module}.scales").shape[1]
        bits = self.inner.info(f"{module}.qzeros").shape[1] * 32 // max(out, 1)
        if bits not in BITS:
            raise SourceError(f"{module}: qzeros and scales imply {bits} bits. Known: {', '.join(map(str, BITS))}.")
        return bits

    def _shape(self, module: str) -> tuple[int, int]:
        words, out = self.inner.info(f"{module}.qweight").shape
        return out, words * 32 // self._bits(module)

    def _quant(self, module: str) -> QuantTensor:
        bits, columns = self._bits(module), self.shape(module)[1]
        codes = unpack(self.inner.read(f"{module}.qweight"), bits, last=True)
        scale = self.inner.read(f"{module}.scales")
        zero = unpack(self.inner.read(f"{module}.qzeros").T, bits)
        zero = (zero + self.offset) & ((1 << bits) - 1)
        if self.symmetric and bool((zero == (1 << (bits - 1)) + 1).all()):
            raise SourceError(
                f"{module}: config.json says symmetric, but every zero point reads as {(1 << (bits - 1)) + 1}: the file "
                f"stores version 2 zeros and is tagged version 1. Set checkpoint_format to {V2}."
            )
        width = columns // scale.shape[0]
        index = None
        if f"{module}.g_idx" in self.inner.names():
            index = self.inner.read(f"{module}.g_idx")
            trivial = torch.arange(columns, dtype=index.dtype) // width
            index = None if torch.equal(index, trivial) or not bool(index.any()) else index
        dtype = str(scale.dtype).removeprefix("torch.")
        group = group_of(columns, scale.shape[0], self.declared)
        codec = _codec(bits, group, bool((zero == 1 << (bits - 1)).all()), dtype, module)
        return QuantTensor(codes, {"scale": scale.T.to(torch.float32).contiguous(), "zero": zero}, codec, index)


def _codec(bits: int, group: int, symmetric: bool, dtype: str, module: str) -> Affine:
    try:
        return Affine(bits, group, symmetric, dtype)
    except UsageError as error:
        raise SourceError(f"{module}: {error}") from None


def open_store(inner: TensorStore, config: dict[str, Any]) -> tuple[TensorStore, str, list[str]]:
    """Return the store of a GPTQ checkpoint as plain weights, its description, and notices."""
    return GptqStore(inner, config), f"gptq {config.get('bits', '?')} bits", []
