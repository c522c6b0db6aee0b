"""compressed-tensors: what vLLM's own tools write, and transformers loads.

The layouts are in `_ct_kinds`; here is the dialect: which modules have which scheme, by targets in config.json. Every group names its
own format too, because the library guesses it otherwise. An older library's weight_g_idx is read, and written no more.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from quantkit.codecs._activations import Activation
from quantkit.codecs.affine import Affine
from quantkit.errors import SourceError, UsageError
from quantkit.formats import _ct_kinds as kinds
from quantkit.formats._bits import fields_per_period
from quantkit.formats._packed import PackedStore
from quantkit.formats._safetensors import TensorInfo
from quantkit.formats.store import TensorStore
from quantkit.tensors import PlanRow, QuantTensor

READ = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized",
    "mixed-precision",
)  # fmt: skip


class CompressedTensorsFormat:
    """The writer: what fits, how a module's tensors look, and the configuration. naive: 8 bits unpacked, for weights alone."""

    conv1d = False
    scattered = False  # its library dropped weight_g_idx in 2026; old artifacts that have one are read
    uniform = False
    codecs = ("affine", "fp8", "mxfp4", "nvfp4")
    scale_dtypes = ("float16", "bfloat16", "float32")
    side_config = ""

    def __init__(self, naive: bool = False) -> None:
        self.naive = naive
        self.name = "naive-quantized" if naive else "compressed-tensors"

    def refuse(self, shape: tuple[int, int], codec: Any) -> str:
        """Return why a weight [out, in] cannot be stored with this codec, or an empty string."""
        if not isinstance(codec, Affine):
            return ""
        if self.naive and codec.bits != 8:
            return f"naive-quantized holds 8 bits, not {codec.bits}"
        if codec.bits == 3:
            unit = fields_per_period(3)
            if shape[0] % unit or shape[1] % unit:
                return f"shape {list(shape)} is not a multiple of {unit}, which 3-bit packing needs"
        return ""

    def layout(self, module: str, shape: tuple[int, int], codec: Any, scattered: bool) -> dict[str, TensorInfo]:
        """Return the tensors of a packed module before they exist."""
        found = kinds.layout(shape, codec, kinds.kind_of(codec, self.naive))
        index = {"weight_g_idx": TensorInfo("I32", shape[1:])} if scattered else {}
        return {f"{module}.{suffix}": info for suffix, info in (found | index).items()}

    def pack(self, module: str, tensor: QuantTensor) -> dict[str, Tensor]:
        """Return the tensors of a quantized module."""
        packed = kinds.pack_module(tensor, kinds.kind_of(tensor.codec, self.naive))
        return {f"{module}.{suffix}": value for suffix, value in packed.items()}

    def settle(self, name: str, bits: int, zeros_from_one: bool) -> Any:
        """Packed tensors are final."""
        return None

    def config(self, rows: list[PlanRow], options: dict[str, Any], zeros_from_one: bool) -> dict[str, Any]:
        """Return `quantization_config`: one group of targets per codec, every other linear in `ignore`."""
        by_codec: dict[Any, list[str]] = {}
        for row in rows:
            if row.method != "keep":
                by_codec.setdefault(row.codec, []).append(row.module)
        groups = {}
        for number, (codec, modules) in enumerate(by_codec.items()):
            groups[f"group_{number}"] = {
                "targets": ["Linear"] if len(by_codec) == 1 else modules,
                "weights": kinds.weight_args(codec),
                "input_activations": kinds.input_args(codec),
                "output_activations": None,
                "format": kinds.kind_of(codec, self.naive),
            }
        found = {group["format"] for group in groups.values()}
        return {
            "quant_method": "compressed-tensors",
            "format": found.pop() if len(found) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": [*(row.module for row in rows if row.method == "keep"), *options["ignore"]],
            "kv_cache_scheme": options.get("kv_cache_scheme"),
            "global_compression_ratio": None,
        }


FORMAT = CompressedTensorsFormat()
NAIVE = CompressedTensorsFormat(naive=True)


class CompressedTensorsStore(PackedStore):
    """The reader."""

    anchors = (".weight_scale",)
    suffixes = (
        ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx", ".weight_global_scale",
        ".input_scale", ".input_zero_point", ".input_global_scale", ".weight",
    )  # fmt: skip

    def __init__(self, inner: TensorStore, config: dict[str, Any]) -> None:
        super().__init__(inner)
        if config.get("format") not in READ:
            raise SourceError(f"compressed-tensors format '{config.get('format')}' is not read. Known: {', '.join(READ)}.")
        self.groups = config.get("config_groups") or {}
        if not isinstance(self.groups, dict) or not all(isinstance(group, dict) for group in self.groups.values()):
            raise SourceError("compressed-tensors: config_groups is no object of objects.")
        self.notices: list[str] = []
        self.held = set(inner.names())
        self.shapes: dict[str, tuple[int, int]] = {}
        self.inputs = {module: self._activations(module) for module in self.modules}
        for module in self.modules:
            with self.fitting(module):
                self.shapes[module] = self._measure(module)

    def _measure(self, module: str) -> tuple[int, int]:
        if f"{module}.weight" in self.held:
            out, columns = self.inner.info(f"{module}.weight").shape
            return out, columns
        if f"{module}.weight_packed" not in self.held:
            raise SourceError(f"The compressed-tensors checkpoint lacks {module}.weight or {module}.weight_packed.")
        info = self.inner.info(f"{module}.weight_packed")
        if info.dtype == "U8":
            return info.shape[0], 2 * info.shape[1]
        if f"{module}.weight_shape" not in self.held:
            raise SourceError(f"The compressed-tensors checkpoint lacks {module}.weight_shape.")
        out, columns = self.inner.read(f"{module}.weight_shape").reshape(-1).tolist()
        return int(out), int(columns)

    def _activations(self, module: str) -> str:
        """Return how a module's inputs are rounded: none, dynamic or static."""
        args = _scheme(self.groups, module).get("input_activations")
        if not args:
            return "none"
        if args.get("num_bits") != 8 or not args.get("symmetric", True):
            kind = f"{args.get('num_bits')}-bit {'' if args.get('symmetric', True) else 'asymmetric '}"
            text = f"{kind}activations are not imitated: what is measured here is the weights alone"
            self.notices += [] if text in self.notices else [text]
            return "none"
        return "static" if args.get("dynamic") is False else "dynamic"

    def _shape(self, module: str) -> tuple[int, int]:
        return self.shapes[module]

    def activation(self, module: str) -> tuple[Activation, Tensor | None] | None:
        """Return how a module's inputs are rounded, and the static scale, float32 [1]."""
        if self.inputs[module] == "none":
            return None
        args, static = _scheme(self.groups, module)["input_activations"], self.inputs[module] == "static"
        kind = "int8" if args.get("type", "int") == "int" else "fp8"
        scale = self.inner.read(f"{module}.input_scale").float().reshape(1) if static else None
        return Activation(kind, static, args.get("group_size") or 0 if args.get("strategy") == "group" else 0), scale

    def _quant(self, module: str) -> QuantTensor:
        names = {suffix[1:]: module + suffix for suffix in self.suffixes if module + suffix in self.held}
        tensors = {suffix: self.inner.read(name) for suffix, name in names.items()}
        try:
            return kinds.read_module(tensors, _scheme(self.groups, module).get("weights") or {}, self.inputs[module], module)
        except UsageError as error:
            raise SourceError(f"{module}: {error}") from None


def _scheme(groups: dict[str, Any], module: str) -> dict[str, Any]:
    """Return the group of a module: one that names it, else one whose pattern fits, else that of all linears."""
    best: tuple[int, dict[str, Any]] = (3, {})
    for group in groups.values():
        targets = group.get("targets")
        for target in map(str, targets if isinstance(targets, list) else []):
            rank = 0 if target == module else 1 if target[:3] == "re:" and re.match(target[3:], module) else 2 if target == "Linear" else 3
            best = min(best, (rank, group), key=lambda pair: pair[0])
    return best[1]


def open_store(inner: TensorStore, config: dict[str, Any]) -> tuple[TensorStore, str, list[str]]:
    """Return the store of a compressed-tensors artifact as plain weights, its description, and notices."""
    store = CompressedTensorsStore(inner, config)
    return store, f"compressed-tensors {config.get('format')}", store.notices
