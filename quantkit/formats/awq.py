"""AWQ checkpoints, version GEMM: `qweight`, `qzeros`, `scales`, as AutoAWQ defined them.

For a linear of [out, in], 4 bits, G groups: qweight int32 [in, out/8], qzeros int32 [G, out/8], scales float16 [G, out].
weight[o, i] = scales[g, o] * (q[i, o] - zero[g, o]); zeros are stored as they are. A word holds eight neighbouring output
columns, in the order that its kernel wants:

    bits 31..28 ... 3..0   hold columns   7 5 3 1 6 4 2 0

A checkpoint has one group size; modules are left out of it by a part of their name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantkit.codecs.affine import Affine
from quantkit.errors import PlanError, SourceError, UsageError
from quantkit.formats._bits import pack, unpack
from quantkit.formats._packed import PackedStore, group_of
from quantkit.formats._safetensors import TensorInfo
from quantkit.formats.store import TensorStore
from quantkit.tensors import PlanRow, QuantTensor

BITS = 4
PER_WORD = 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each field of a word holds
OUT_UNIT = 32  # its allocator counts words as out // 32 * 4


def _pack(values: Tensor) -> Tensor:
    """Return int32 [n, out/8] from uint8 [out, n]."""
    return pack(values, BITS, ORDER, last=True)


def _unpack(words: Tensor) -> Tensor:
    """Return uint8 [out, n] from int32 [n, out/8]."""
    return unpack(words.T, BITS, ORDER)


class AwqFormat:
    """The writer: what fits, how a module's tensors look, and the configuration."""

    name = "awq"
    conv1d = False
    scattered = False
    uniform = True
    codecs = ("affine",)
    scale_dtypes = ("float16",)
    side_config = ""

    def refuse(self, shape: tuple[int, int], codec: Affine) -> str:
        """Return why a weight [out, in] cannot be stored with this codec, or an empty string."""
        if codec.bits != BITS:
            return f"awq holds {BITS} bits, not {codec.bits}"
        if shape[0] % OUT_UNIT:
            return f"output width {shape[0]} is not a multiple of {OUT_UNIT}, which awq's packing needs"
        return ""

    def layout(self, module: str, shape: tuple[int, int], codec: Affine, scattered: bool) -> dict[str, TensorInfo]:
        """Return the tensors of a packed module before they exist."""
        out, columns = shape
        groups = codec.groups(columns)
        return {
            f"{module}.qweight": TensorInfo("I32", (columns, out // PER_WORD)),
            f"{module}.qzeros": TensorInfo("I32", (groups, out // PER_WORD)),
            f"{module}.scales": TensorInfo("F16", (groups, out)),
        }

    def pack(self, module: str, tensor: QuantTensor) -> dict[str, Tensor]:
        """Return the tensors of a quantized module."""
        return {
            f"{module}.qweight": _pack(tensor.codes),
            f"{module}.qzeros": _pack(tensor.params["zero"]),
            f"{module}.scales": tensor.params["scale"].T.to(torch.float16).contiguous(),
        }

    def settle(self, name: str, bits: int, zeros_from_one: bool) -> Any:
        """Packed tensors are final."""
        return None

    def config(self, rows: list[PlanRow], options: dict[str, Any], zeros_from_one: bool) -> dict[str, Any]:
        """Return `quantization_config`; a PlanError if a module that is left out has a name that is part of another's."""
        packed = [row for row in rows if row.method != "keep"]
        left = [*(row.module for row in rows if row.method == "keep"), *options["ignore"]]
        for name in left:
            if hit := next((row.module for row in packed if name in row.module), None):
                raise PlanError(f"awq leaves modules out by a part of their name, and {name} is part of {hit}; use another --format.")
        return {
            "quant_method": "awq",
            "bits": BITS,
            "group_size": packed[0].codec.group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": left or None,
        }


FORMAT = AwqFormat()


class AwqStore(PackedStore):
    """The reader."""

    anchors = (".qweight",)
    suffixes = (".qweight", ".qzeros", ".scales")

    def __init__(self, inner: TensorStore, config: dict[str, Any]) -> None:
        super().__init__(inner)
        self.declared = config.get("group_size")
        version = str(config.get("version") or config.get("format") or "gemm").lower()
        bits = config.get("bits", config.get("w_bit", BITS))
        if version != "gemm" or bits != BITS:
            raise SourceError(f"awq version '{version}' with {bits} bits is not read. Known: gemm with {BITS}.")
        held = set(inner.names())
        for module in self.modules:
            lacking = [f"{module}{s}" for s in self.suffixes if f"{module}{s}" not in held]
            if lacking:
                raise SourceError(f"The AWQ checkpoint lacks {', '.join(lacking)}.")
            shapes = [inner.info(f"{module}{s}").shape for s in self.suffixes]
            with self.fitting(module):
                (columns, words), zeros, (groups, out) = shapes
            if words * PER_WORD != out or zeros != (groups, words) or not groups or columns % groups:
                raise SourceError(f"{module}: qweight {list(shapes[0])}, qzeros {list(zeros)} and scales {list(shapes[2])} do not fit.")

    def _shape(self, module: str) -> tuple[int, int]:
        columns, words = self.inner.info(f"{module}.qweight").shape
        return words * PER_WORD, columns

    def _quant(self, module: str) -> QuantTensor:
        codes = _unpack(self.inner.read(f"{module}.qweight"))
        zero = _unpack(self.inner.read(f"{module}.qzeros"))
        scale = self.inner.read(f"{module}.scales")
        group = group_of(codes.shape[1], len(scale), self.declared)
        dtype = str(scale.dtype).removeprefix("torch.")
        try:
            codec = Affine(BITS, group, bool((zero == 1 << (BITS - 1)).all()), dtype)
        except UsageError as error:
            raise SourceError(f"{module}: {error}") from None
        return QuantTensor(codes.contiguous(), {"scale": scale.T.to(torch.float32).contiguous(), "zero": zero.contiguous()}, codec)


def open_store(inner: TensorStore, config: dict[str, Any]) -> tuple[TensorStore, str, list[str]]:
    """Return the store of an AWQ checkpoint as plain weights, its description, and notices."""
    return AwqStore(inner, config), "awq 4 bits", []
