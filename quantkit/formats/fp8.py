"""Hugging Face's fine-grained FP8: float8 weights and, under `weight_scale_inv`, what multiplies them, one scale per block of 128 x 128.

For a linear of [out, in]: weight float8_e4m3fn [out, in]; weight_scale_inv float32 [out/128, in/128] (float8_e8m0fnu in newer DeepSeek
checkpoints), or one scalar per tensor. Inputs are rounded at run time, in groups of 128. The writer takes whole blocks only:
transformers' dequantizer derives the block's size from the shapes and misreads partial ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantkit.codecs._activations import Activation
from quantkit.codecs.float8 import BLOCK, Float8
from quantkit.errors import SourceError
from quantkit.formats._packed import PackedStore
from quantkit.formats._safetensors import TensorInfo
from quantkit.formats.store import TensorStore
from quantkit.tensors import PlanRow, QuantTensor


class Fp8Format:
    """The writer: what fits, how a module's tensors look, and the configuration."""

    name = "fp8"
    conv1d = False
    scattered = False
    uniform = False
    codecs = ("fp8",)
    scale_dtypes = ("float32",)
    side_config = ""

    def refuse(self, shape: tuple[int, int], codec: Float8) -> str:
        """Return why a weight [out, in] cannot be stored with this codec, or an empty string."""
        if codec.strategy != "block" or codec.block != (BLOCK, BLOCK):
            return f"it holds blocks of {BLOCK} x {BLOCK}, not {codec.label}"
        if any(size % part for size, part in zip(shape, codec.block, strict=True)):
            return f"shape {list(shape)} is not whole blocks of {BLOCK} x {BLOCK}, which transformers misreads"
        return ""

    def layout(self, module: str, shape: tuple[int, int], codec: Float8, scattered: bool) -> dict[str, TensorInfo]:
        """Return the tensors of a packed module before they exist."""
        scale = TensorInfo("F32", codec.shape_of_scale(shape))
        return {f"{module}.weight": TensorInfo("F8_E4M3", shape), f"{module}.weight_scale_inv": scale}

    def pack(self, module: str, tensor: QuantTensor) -> dict[str, Tensor]:
        """Return the tensors of a quantized module."""
        return {f"{module}.weight": tensor.codes.view(torch.float8_e4m3fn), f"{module}.weight_scale_inv": tensor.params["scale"]}

    def settle(self, name: str, bits: int, zeros_from_one: bool) -> Any:
        """Packed tensors are final."""
        return None

    def config(self, rows: list[PlanRow], options: dict[str, Any], zeros_from_one: bool) -> dict[str, Any]:
        """Return `quantization_config`."""
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": [*(row.module for row in rows if row.method == "keep"), *options["ignore"]],
        }


FORMAT = Fp8Format()


class Fp8Store(PackedStore):
    """The reader."""

    anchors = (".weight_scale_inv", ".weight_scale")  # two names of one thing: what a code is multiplied by
    suffixes = (".weight_scale_inv", ".weight_scale", ".activation_scale", ".weight")

    def __init__(self, inner: TensorStore, config: dict[str, Any]) -> None:
        super().__init__(inner)
        block = config.get("weight_block_size", [BLOCK, BLOCK])
        if block is not None and not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
            raise SourceError(f"fp8: weight_block_size {block} is no pair of sizes.")
        self.block = (int(block[0]), int(block[1])) if block else (BLOCK, BLOCK)
        self.static = config.get("activation_scheme") == "static"
        held = set(inner.names())
        for module in self.modules:
            if f"{module}.weight" not in held or inner.info(f"{module}.weight").dtype != "F8_E4M3":
                raise SourceError(f"The FP8 checkpoint has a scale for {module} but no float8 weight.")

    def _shape(self, module: str) -> tuple[int, int]:
        out, columns = self.inner.info(f"{module}.weight").shape
        return out, columns

    def _codec(self, module: str) -> Float8:
        strategy = "tensor" if self.inner.info(self.modules[module]).shape in ((), (1,)) else "block"
        activations = "static" if self.static and strategy == "tensor" else "dynamic"
        return Float8(strategy, "float32", activations, self.block)

    def activation(self, module: str) -> tuple[Activation, Tensor | None] | None:
        """Return how a module's inputs are rounded, and the static scale, float32 [1]."""
        activation = self._codec(module).activation
        assert activation is not None
        if not activation.static:
            return activation, None
        return activation, self.inner.read(f"{module}.activation_scale").to(torch.float32).reshape(1)

    def _quant(self, module: str) -> QuantTensor:
        codec = self._codec(module)
        scale = self.inner.read(self.modules[module]).to(torch.float32)
        scale = scale.reshape(1) if codec.strategy == "tensor" else scale
        if tuple(scale.shape) != codec.shape_of_scale(self.shape(module)):
            raise SourceError(f"{module}: scales {list(scale.shape)} are no blocks of {list(self.block)} of {list(self.shape(module))}.")
        return QuantTensor(self.inner.read(f"{module}.weight").view(torch.uint8), {"scale": scale}, codec)


def open_store(inner: TensorStore, config: dict[str, Any]) -> tuple[TensorStore, str, list[str]]:
    """Return the store of an FP8 checkpoint as plain weights, its description, and notices."""
    return Fp8Store(inner, config), "fp8", []
