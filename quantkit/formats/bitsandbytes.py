"""bitsandbytes checkpoints, as transformers serializes them: NF4 and FP4 in 4 bits, LLM.int8() rows in 8.

4 bits, for a weight of n values: weight uint8 [n/2, 1], the first of two values in the high nibble; weight.absmax float32 [n/64],
or with double quantization uint8 and weight.nested_absmax float32 [blocks/256], weight.nested_quant_map float32 [256];
weight.quant_map float32 [16];
weight.quant_state.bitsandbytes__nf4 uint8: the rest as JSON (we pad it with spaces, so that its size is known beforehand).
8 bits: weight int8 [out, in]; SCB float32 [out]; weight_format uint8 [] = 0.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from quantkit.codecs.bnb import NESTED, Bnb4, RowInt8, dynamic_table, table_of
from quantkit.errors import SourceError
from quantkit.formats._packed import PackedStore
from quantkit.formats._safetensors import TensorInfo
from quantkit.formats.store import TensorStore
from quantkit.tensors import PlanRow, QuantTensor

STATE = "weight.quant_state.bitsandbytes__"
NUMBER = 26  # characters that the shortest form of any double fits in
MAX_STATE = 4096


def _state(codec: Bnb4, shape: tuple[int, int], offset: float) -> bytes:
    state: dict[str, Any] = {"quant_type": codec.kind, "blocksize": codec.block, "dtype": codec.dtype, "shape": list(shape)}
    if codec.double:
        state |= {"nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": offset}
    return json.dumps(state).encode()


def _state_size(codec: Bnb4, shape: tuple[int, int]) -> int:
    return len(_state(codec, shape, 0.0)) + NUMBER


class BitsandbytesFormat:
    """The writer: what fits, how a module's tensors look, and the configuration."""

    name = "bitsandbytes"
    conv1d = False
    scattered = False
    uniform = False
    codecs = ("nf4", "fp4", "llm-int8")
    scale_dtypes = ("float32",)
    side_config = ""

    def refuse(self, shape: tuple[int, int], codec: Bnb4 | RowInt8) -> str:
        """What the codec takes fits."""
        return ""

    def layout(self, module: str, shape: tuple[int, int], codec: Bnb4 | RowInt8, scattered: bool) -> dict[str, TensorInfo]:
        """Return the tensors of a packed module before they exist."""
        if isinstance(codec, RowInt8):
            scale = {f"{module}.SCB": TensorInfo("F32", shape[:1]), f"{module}.weight_format": TensorInfo("U8", ())}
            return {f"{module}.weight": TensorInfo("I8", shape), **scale}
        blocks = codec.blocks(shape)
        found = {
            "weight": TensorInfo("U8", (shape[0] * shape[1] // 2, 1)),
            "weight.absmax": TensorInfo("U8" if codec.double else "F32", (blocks,)),
            "weight.quant_map": TensorInfo("F32", (16,)),
            STATE + codec.kind: TensorInfo("U8", (_state_size(codec, shape),)),
        }
        if codec.double:
            found["weight.nested_absmax"] = TensorInfo("F32", (-(-blocks // NESTED),))
            found["weight.nested_quant_map"] = TensorInfo("F32", (256,))
        return {f"{module}.{suffix}": info for suffix, info in found.items()}

    def pack(self, module: str, tensor: QuantTensor) -> dict[str, Tensor]:
        """Return the tensors of a quantized module."""
        codec, params = tensor.codec, tensor.params
        if isinstance(codec, RowInt8):
            weight = tensor.codes.view(torch.int8)
            return {
                f"{module}.weight": weight,
                f"{module}.SCB": params["absmax"],
                f"{module}.weight_format": torch.tensor(0, dtype=torch.uint8),
            }
        codes, shape = tensor.codes.reshape(-1), (tensor.codes.shape[0], tensor.codes.shape[1])
        state = _state(codec, shape, float(params["offset"]) if codec.double else 0.0).ljust(_state_size(codec, shape))
        found = {
            "weight": ((codes[::2] << 4) | codes[1::2])[:, None],
            "weight.absmax": params["absmax"],
            "weight.quant_map": table_of(codec.kind),
            STATE + codec.kind: torch.frombuffer(bytearray(state), dtype=torch.uint8),
        }
        if codec.double:
            found |= {"weight.nested_absmax": params["nested_absmax"], "weight.nested_quant_map": dynamic_table()}
        return {f"{module}.{suffix}": value for suffix, value in found.items()}

    def settle(self, name: str, bits: int, zeros_from_one: bool) -> Any:
        """Packed tensors are final."""
        return None

    def config(self, rows: list[PlanRow], options: dict[str, Any], zeros_from_one: bool) -> dict[str, Any]:
        """Return `quantization_config`."""
        codec = next(row.codec for row in rows if row.method != "keep")
        left = [*(row.module for row in rows if row.method == "keep"), *options["ignore"]]
        config: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False}
        if isinstance(codec, RowInt8):
            return config | {"load_in_8bit": True, "llm_int8_threshold": 6.0, "llm_int8_skip_modules": left}
        return config | {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": codec.kind,
            "bnb_4bit_use_double_quant": codec.double,
            "bnb_4bit_compute_dtype": codec.dtype,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": left,
        }


FORMAT = BitsandbytesFormat()


class BitsandbytesStore(PackedStore):
    """The reader."""

    anchors = (f".{STATE}nf4", f".{STATE}fp4", ".SCB")
    suffixes = (
        ".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map", f".{STATE}nf4", f".{STATE}fp4",
        ".SCB", ".weight_format", ".weight",
    )  # fmt: skip

    def __init__(self, inner: TensorStore, config: dict[str, Any]) -> None:
        super().__init__(inner)
        self.held = set(inner.names())
        self.states = {module: self._read_state(module, name) for module, name in self.modules.items() if not name.endswith(".SCB")}

    def _read_state(self, module: str, name: str) -> dict[str, Any]:
        if self.inner.info(name).nbytes > MAX_STATE:
            raise SourceError(f"{name} has {self.inner.info(name).nbytes} bytes: no state of bitsandbytes.")
        try:
            state = json.loads(self.inner.read(name).numpy().tobytes())
            out, columns = (int(size) for size in state["shape"])
            codec = Bnb4(name[-3:], "nested_offset" in state, str(state["dtype"]), int(state["blocksize"]))
            offset = float(state.get("nested_offset", 0.0))
            nested = int(state.get("nested_blocksize", NESTED))
        except (ValueError, KeyError, TypeError) as error:
            raise SourceError(f"{name} is no state of bitsandbytes ({error}).") from None
        needed = {"weight": -(-out * columns // 2), "weight.absmax": codec.blocks((out, columns))} if codec.block > 0 else {}
        needed |= {"weight.nested_absmax": -(-codec.blocks((out, columns)) // NESTED)} if codec.double and needed else {}
        for suffix, count in needed.items():
            entry = f"{module}.{suffix}"
            size = (
                self.inner.info(entry).nbytes // (1 if suffix == "weight" or self.inner.info(entry).dtype == "U8" else 4)
                if entry in self.held
                else -1
            )
            if size != count:
                raise SourceError(f"{entry}: {count} values are needed for {out} x {columns}, {max(size, 0)} are there.")
        if not needed or nested != NESTED:
            raise SourceError(f"{name}: blocks of {codec.block} and {nested} are not known.")
        return {"codec": codec, "shape": (out, columns), "offset": offset}

    def _shape(self, module: str) -> tuple[int, int]:
        if module in self.states:
            shape: tuple[int, int] = self.states[module]["shape"]
            return shape
        out, columns = self.inner.info(f"{module}.weight").shape
        return out, columns

    def _quant(self, module: str) -> QuantTensor:
        if module not in self.states:
            codes, scale = self.inner.read(f"{module}.weight").view(torch.uint8), self.inner.read(f"{module}.SCB").to(torch.float32)
            return QuantTensor(codes, {"absmax": scale.view(len(codes))}, RowInt8())
        state = self.states[module]
        codec, (out, columns) = state["codec"], state["shape"]
        data = self.inner.read(f"{module}.weight").reshape(-1).view(torch.uint8)
        codes = torch.stack([data >> 4, data & 15], 1).reshape(-1)[: out * columns].view(out, columns)
        params = {"absmax": self.inner.read(f"{module}.weight.absmax")}
        if codec.double:
            params |= {"nested_absmax": self.inner.read(f"{module}.weight.nested_absmax"), "offset": torch.tensor(state["offset"])}
        return QuantTensor(codes, params, codec)


def open_store(inner: TensorStore, config: dict[str, Any]) -> tuple[TensorStore, str, list[str]]:
    """Return the store of a bitsandbytes checkpoint as plain weights, its description, and notices."""
    return BitsandbytesStore(inner, config), f"bitsandbytes {'8' if config.get('load_in_8bit') else '4'} bits", []
