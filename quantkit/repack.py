"""An artifact in another container, exactly: the same codes, scales and zero points, one module in memory at a time.

What the other container cannot hold is refused before anything is written; nothing is rounded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantkit.artifact import Piece
from quantkit.errors import PlanError, name_list
from quantkit.formats import _safetensors as st
from quantkit.formats._packed import PackedStore
from quantkit.formats._safetensors import TensorInfo
from quantkit.formats.gguf import GgufStore
from quantkit.loader import Loader, is_conv1d
from quantkit.pipeline import quant_digest
from quantkit.tensors import PlanRow, QuantTensor


@dataclass
class Repacked:
    """What the new artifact holds. rows, notes: a module each; zeros_from_one: no zero point is 0."""

    rows: list[PlanRow]
    layouts: dict[str, dict[str, TensorInfo]]
    notes: list[dict[str, Any]]
    zeros_from_one: bool


def plan_repack(loader: Loader, form: Any) -> Repacked:
    """Read every packed module once and return the plan; a PlanError names the first that `form` cannot hold exactly."""
    store, found = loader.source.store, Repacked([], {}, [], True)
    for module in packed_modules(loader):
        tensor, weight = store.quant(module), f"{module}.weight"  # type: ignore[attr-defined]
        name = loader.names.to_model[weight].removesuffix(".weight")
        transposed, shape = is_conv1d(loader.model.get_submodule(name)), (tensor.codes.shape[0], tensor.codes.shape[1])
        if reason := _refusal(form, tensor, shape, transposed):
            raise PlanError(f"{name} cannot go into {form.name} as it is: {reason}. Quantize the original instead.")
        found.rows.append(PlanRow(name, weight, shape, "repack", tensor.codec, transposed=transposed))
        found.layouts[weight] = form.layout(module, shape, tensor.codec, tensor.group_index is not None)
        found.notes.append({"module": name, "tensor": weight, "sha256": quant_digest(tensor)})
        found.zeros_from_one &= "zero" not in tensor.params or int(tensor.params["zero"].min()) > 0
    groups = {row.codec.group for row in found.rows} if form.uniform else set()
    if len(groups) > 1:
        raise PlanError(f"{form.name} has room for one group size, and the source has {sorted(groups)}. Quantize the original instead.")
    return found


def packed_modules(loader: Loader) -> list[str]:
    """Return the packed modules of a source; a PlanError if it has none, or other blocks than integers with a scale (GGUF)."""
    store = loader.source.store
    if isinstance(store, PackedStore):
        return list(store.modules)
    if not isinstance(store, GgufStore):
        raise PlanError(f"{loader.source.name} holds no packed weights; convert is for quantized artifacts.")
    exact = store.exact_modules()
    linears = [loader.names.source_module(name) for name in loader.linear_names()]
    if lacking := [name for name in linears if name not in exact]:
        raise PlanError(
            f"{loader.source.name}: only Q4_0 and Q8_0 blocks are integers with one scale, and {len(lacking)} linear layers are of "
            f"other types ({name_list(lacking, 3)}). Quantize the original instead."
        )
    return linears


def _refusal(form: Any, tensor: QuantTensor, shape: tuple[int, int], transposed: bool) -> str:
    codec = tensor.codec
    if codec.name not in form.codecs:
        return f"it holds {', '.join(form.codecs)}, not {codec.name}"
    if codec.activation is not None and form.name not in ("compressed-tensors", "fp8"):
        return "it has no place for rounded activations"
    if transposed and not form.conv1d:
        return "no runtime loads Conv1D layers from it"
    if tensor.group_index is not None and not form.scattered:
        return "its columns are scattered over groups (g_idx)"
    if getattr(codec, "scale_dtype", form.scale_dtypes[0]) not in form.scale_dtypes:
        return f"its scales are {codec.scale_dtype}"
    reason: str = form.refuse(shape, codec)
    return reason


def packer(store: Any, form: Any, found: Repacked) -> Callable[[str, str, TensorInfo], Piece]:
    """Return a function that makes a Piece of a packed tensor; the last module is kept, its tensors follow each other."""
    last: tuple[str, dict[str, Tensor]] = ("", {})
    bits_of = {row.tensor: row.codec.bits for row in found.rows}

    def piece(weight: str, name: str, info: TensorInfo) -> Piece:
        def data() -> Iterator[bytes | memoryview]:
            nonlocal last
            module = weight.removesuffix(".weight")
            if last[0] != module:
                last = (module, form.pack(module, store.quant(module)))
            settle = form.settle(name, bits_of[weight], found.zeros_from_one)
            value = last[1][name]
            yield from st.tensor_bytes(settle(value) if settle else value)

        return Piece(name, info, data)

    return piece
