"""compressed-tensors, format pack-quantized: what vLLM's own tools write, and transformers loads.

For a linear of [out, in], b bits, G groups: weight_packed int32 [out, ceil(in*b/32)], packed along in;
weight_scale [out, G]; weight_zero_point int32 [out*b/32, G], packed along out, only if asymmetric; weight_shape
int64 [2]; weight_g_idx int32 [in] only if columns are scattered over groups. Codes and zero points are stored
unsigned, which is their signed value plus 2^(b-1): the same numbers as ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantkit.codecs.affine import SCALE_DTYPES, Affine
from quantkit.errors import SourceError, UsageError
from quantkit.formats._bits import fields_per_period, pack, unpack
from quantkit.formats._packed import PackedStore
from quantkit.formats._safetensors import CODES, TensorInfo
from quantkit.formats.store import TensorStore
from quantkit.tensors import PlanRow, QuantTensor


def _pad(size: int, bits: int) -> int:
    unit = fields_per_period(bits)
    return (size + unit - 1) // unit * unit


def _padded(values: Tensor, bits: int) -> Tensor:
    extra = _pad(values.shape[0], bits) - values.shape[0]
    return torch.nn.functional.pad(values, (0, 0, 0, extra)) if extra else values


class CompressedTensorsFormat:
    """The writer: what fits, how a module's tensors look, and the configuration."""

    name = "compressed-tensors"
    conv1d = False
    scattered = False  # its library dropped weight_g_idx in 2026; old artifacts that have one are read
    scale_dtypes = ("float16", "bfloat16", "float32")
    side_config = ""

    def refuse(self, shape: tuple[int, int], codec: Affine) -> str:
        """Return why a weight [out, in] cannot be stored with this codec, or an empty string."""
        if codec.bits == 3:
            unit = fields_per_period(3)
            if shape[0] % unit or shape[1] % unit:
                return f"shape {list(shape)} is not a multiple of {unit}, which 3-bit packing needs"
        return ""

    def layout(self, module: str, shape: tuple[int, int], codec: Affine, scattered: bool) -> dict[str, TensorInfo]:
        """Return the tensors of a packed module before they exist."""
        out, columns = shape
        groups = codec.groups(columns)
        result = {
            f"{module}.weight_packed": TensorInfo("I32", (out, _pad(columns, codec.bits) * codec.bits // 32)),
            f"{module}.weight_scale": TensorInfo(CODES[SCALE_DTYPES[codec.scale_dtype]], (out, groups)),
            f"{module}.weight_shape": TensorInfo("I64", (2,)),
        }
        if not codec.symmetric:
            words = _pad(out, codec.bits) * codec.bits // 32
            result[f"{module}.weight_zero_point"] = TensorInfo("I32", (words, groups))
        if scattered:
            result[f"{module}.weight_g_idx"] = TensorInfo("I32", (columns,))
        return result

    def pack(self, module: str, tensor: QuantTensor) -> dict[str, Tensor]:
        """Return the tensors of a quantized module."""
        bits = tensor.codec.bits
        result = {
            f"{module}.weight_packed": pack(_padded(tensor.codes.T, bits), bits).T.contiguous(),
            f"{module}.weight_scale": tensor.params["scale"].to(SCALE_DTYPES[tensor.codec.scale_dtype]),
            f"{module}.weight_shape": torch.tensor(tensor.codes.shape, dtype=torch.int64),
        }
        if not tensor.codec.symmetric:
            result[f"{module}.weight_zero_point"] = pack(_padded(tensor.params["zero"], bits), bits)
        if tensor.group_index is not None:
            result[f"{module}.weight_g_idx"] = tensor.group_index.to(torch.int32)
        return result

    def settle(self, name: str, bits: int, zeros_from_one: bool) -> Any:
        """Packed tensors are final."""
        return None

    def config(self, rows: list[PlanRow], options: dict[str, Any], zeros_from_one: bool) -> dict[str, Any]:
        """Return `quantization_config`: one group of targets per codec, every other linear in `ignore`."""
        by_codec: dict[Affine, list[str]] = {}
        for row in rows:
            if row.method != "keep":
                by_codec.setdefault(row.codec, []).append(row.module)
        groups = {}
        for number, (codec, modules) in enumerate(by_codec.items()):
            groups[f"group_{number}"] = {
                "targets": ["Linear"] if len(by_codec) == 1 else modules,
                "weights": {
                    "num_bits": codec.bits,
                    "type": "int",
                    "symmetric": codec.symmetric,
                    "strategy": "channel" if codec.group == -1 else "group",
                    "group_size": None if codec.group == -1 else codec.group,
                    "dynamic": False,
                    "actorder": None,
                },
                "input_activations": None,
                "output_activations": None,
            }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": [*(row.module for row in rows if row.method == "keep"), *options["ignore"]],
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


FORMAT = CompressedTensorsFormat()


class CompressedTensorsStore(PackedStore):
    """The reader of pack-quantized artifacts."""

    anchor = ".weight_packed"
    suffixes = (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx")

    def __init__(self, inner: TensorStore, config: dict[str, Any]) -> None:
        super().__init__(inner)
        if config.get("format") != "pack-quantized":
            raise SourceError(f"compressed-tensors format '{config.get('format')}' is not read yet, only pack-quantized.")
        self.held = set(inner.names())
        self.shapes: dict[str, tuple[int, int]] = {}
        for module in self.modules:
            lacking = [f"{module}{s}" for s in (".weight_scale", ".weight_shape") if f"{module}{s}" not in self.held]
            if lacking:
                raise SourceError(f"The compressed-tensors checkpoint lacks {', '.join(lacking)}.")
            out, columns = inner.read(f"{module}.weight_shape").tolist()
            self.shapes[module] = (out, columns)

    def shape(self, module: str) -> tuple[int, int]:
        """Return (out, in)."""
        return self.shapes[module]

    def quant(self, module: str) -> QuantTensor:
        """Read a module."""
        out, columns = self.shapes[module]
        packed = self.inner.read(f"{module}.weight_packed")
        bits = next((b for b in (2, 3, 4, 8) if _pad(columns, b) * b // 32 == packed.shape[1]), 0)
        if not bits:
            raise SourceError(f"{module}: {packed.shape[1]} words cannot hold rows of {columns}: packed by an older library?")
        codes = unpack(packed.T.contiguous(), bits)[:columns].T.contiguous()
        scale = self.inner.read(f"{module}.weight_scale").reshape(out, -1)
        symmetric = f"{module}.weight_zero_point" not in self.held
        if symmetric:
            zero = torch.full(scale.shape, 1 << (bits - 1), dtype=torch.uint8)
        else:
            zero = unpack(self.inner.read(f"{module}.weight_zero_point"), bits)[:out]
        index = self.inner.read(f"{module}.weight_g_idx") if f"{module}.weight_g_idx" in self.held else None
        group = -1 if scale.shape[1] == 1 else columns // scale.shape[1]
        try:
            codec = Affine(bits, group, symmetric, str(scale.dtype).removeprefix("torch."))
        except UsageError as error:
            raise SourceError(f"{module}: {error}") from None
        return QuantTensor(codes, {"scale": scale.to(torch.float32), "zero": zero}, codec, index)


def open_store(inner: TensorStore, config: dict[str, Any]) -> tuple[TensorStore, str, list[str]]:
    """Return the store of a compressed-tensors artifact as plain weights, its description, and notices."""
    return CompressedTensorsStore(inner, config), f"compressed-tensors {config.get('format')}", []
