"""A packed artifact shown as a plain checkpoint: the shared part of the readers of quantized formats.

A subclass of `PackedStore` names its modules' tensors and turns them into a `QuantTensor`; here they become
`MODULE.weight` in float32, and everything else passes through.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from quantkit.codecs._activations import Activation
from quantkit.errors import SourceError
from quantkit.foreign import foreign
from quantkit.formats import _safetensors as st
from quantkit.formats._safetensors import TensorInfo
from quantkit.formats.store import TensorStore
from quantkit.tensors import QuantTensor

BYTES = ("I8", "U8", "F8_E4M3", "F8_E5M2")  # no weight is stored so without a scale


class PackedStore(ABC):
    """Wraps a store; `anchors` are the suffixes that mark a packed module, `suffixes` all that belong to one."""

    anchors: tuple[str, ...]
    suffixes: tuple[str, ...]

    def __init__(self, inner: TensorStore) -> None:
        self.inner = inner
        self.modules = {n.removesuffix(a): n for n in inner.names() for a in self.anchors if n.endswith(a)}
        self._shown: dict[str, str] = {}  # shown name -> module, or "" when it passes through
        for name in inner.names():
            module = next((name.removesuffix(s) for s in self.suffixes if name.endswith(s)), None)
            if module is None or module not in self.modules:
                self._require_plain(name)
                self._shown[name] = ""
            elif name.endswith(self.anchors):
                self._shown[f"{module}.weight"] = module

    def _require_plain(self, name: str) -> None:
        """Raise a SourceError if a tensor belongs to a packed module whose other parts are missing."""
        part = next((s for s in self.suffixes if s != ".weight" and name.endswith(s)), "")
        if part or (name.endswith(".weight") and self.inner.info(name).dtype in BYTES):
            module = name.removesuffix(part or ".weight")
            raise SourceError(
                f"{module} has {name.removeprefix(module + '.')} but lacks {' or '.join(self.anchors)}. The checkpoint is damaged."
            )

    @contextmanager
    def fitting(self, module: str) -> Iterator[None]:
        """Turn what torch says of tensors that do not fit each other into a SourceError that names the module."""
        with foreign(f"{module}: its packed tensors do not fit each other", "The checkpoint is damaged."):
            yield

    def stored_bytes(self, name: str) -> int:
        """Return the bytes of a tensor on disk, all parts of a packed one."""
        if not self.is_packed(name):
            return self.inner.info(name).nbytes
        module, held = name.removesuffix(".weight"), set(self.inner.names())
        return sum(self.inner.info(module + suffix).nbytes for suffix in self.suffixes if module + suffix in held)

    def shape(self, module: str) -> tuple[int, int]:
        """Return (out, in) of a packed module, from headers alone."""
        with self.fitting(module):
            return self._shape(module)

    def quant(self, module: str) -> QuantTensor:
        """Read a packed module."""
        with self.fitting(module):
            tensor = self._quant(module)
        if tuple(tensor.codes.shape) != self.shape(module):
            raise SourceError(
                f"{module}: its codes are {list(tensor.codes.shape)}, its shape {list(self.shape(module))}. The checkpoint is damaged."
            )
        if (index := tensor.group_index) is not None:
            groups = tensor.params["scale"].shape[1]
            if index.shape != tensor.codes.shape[1:] or index.is_floating_point() or not 0 <= int(index.min()) <= int(index.max()) < groups:
                raise SourceError(f"{module}: its g_idx does not give each column one of {groups} groups. The checkpoint is damaged.")
        return tensor

    @abstractmethod
    def _shape(self, module: str) -> tuple[int, int]:
        """Return (out, in) of a packed module."""

    @abstractmethod
    def _quant(self, module: str) -> QuantTensor:
        """Read a packed module; what torch raises is caught."""

    def activation(self, module: str) -> tuple[Activation, Tensor | None] | None:
        """Return how a module's inputs are rounded at run time, and the static scale, float32 [1]; None if they are not."""
        return None

    def names(self) -> list[str]:
        """Names as a plain checkpoint would have them."""
        return list(self._shown)

    def is_packed(self, name: str) -> bool:
        """Tell whether a name is the weight of a packed module."""
        return bool(self._shown[name])

    def info(self, name: str) -> TensorInfo:
        """Packed modules count as float32."""
        module = self._shown[name]
        return TensorInfo("F32", self.shape(module)) if module else self.inner.info(name)

    def read(self, name: str) -> Tensor:
        """One tensor; a packed module's weight is dequantized to float32 [out, in]."""
        module = self._shown[name]
        if not module:
            return self.inner.read(name)
        tensor = self.quant(module)
        with self.fitting(module):
            return tensor.dequantize()

    def chunks(self, name: str) -> Iterator[bytes | memoryview]:
        """One tensor's bytes in pieces."""
        return st.tensor_bytes(self.read(name)) if self._shown[name] else self.inner.chunks(name)

    def files(self) -> list[Path]:
        """The files of the wrapped store."""
        return self.inner.files()


def group_of(columns: int, groups: int, declared: object) -> int:
    """Return the group size of a row of `columns` with so many groups: -1 for one, unless the configuration names the row's width."""
    if groups > 1:
        return columns // groups
    return columns if declared == columns else -1
