"""What a source holds, tensor by tensor: scheme, bits per weight, bytes; and how two sources differ.

Tensors have the names and shapes of a plain checkpoint, whatever the container, so any two sources can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.codecs import CODECS
from quantkit.formats._packed import PackedStore
from quantkit.formats.gguf import CODEC_OF, GgufStore
from quantkit.formats.mxfp4 import Mxfp4Store
from quantkit.formats.store import TensorStore
from quantkit.plan import runtimes
from quantkit.source import Source


@dataclass(frozen=True)
class Item:
    """One tensor: plain name and shape, scheme in words, bytes on disk; codec and scattered (a g_idx) of a packed one."""

    name: str
    shape: tuple[int, ...]
    scheme: str
    nbytes: int
    codec: Any = None
    scattered: bool = False

    @property
    def bits(self) -> float:
        """Bits per weight on disk."""
        return 8 * self.nbytes / max(math.prod(self.shape), 1)


@dataclass(frozen=True)
class Difference:
    """One tensor in two sources. error: |A - B| / |B| in the Frobenius norm, None where shapes differ or one lacks it."""

    name: str
    a: Item | None
    b: Item | None
    error: float | None


def items(source: Source) -> Iterator[Item]:
    """Yield every tensor of a source; packed ones are read, so that what is said of their grids is true."""
    store = source.store
    for name in store.names():
        if isinstance(store, GgufStore):
            entry = store.header.tensors[store.tensors[name]]
            yield Item(name, store.info(name).shape, CODEC_OF.get(entry.type_id, f"ggml type {entry.type_id}"), store.stored_bytes(name))
        elif isinstance(store, PackedStore) and store.is_packed(name):
            yield _packed(store, name)
        elif isinstance(store, Mxfp4Store) and name in store.stacks:
            yield Item(name, store.info(name).shape, "mxfp4, groups of 32", store.stored_bytes(name))
        else:
            info = store.info(name)
            yield Item(name, info.shape, info.dtype, info.nbytes)


def _packed(store: PackedStore, name: str) -> Item:
    module = name.removesuffix(".weight")
    tensor = store.quant(module)
    codec, scattered = tensor.codec, tensor.group_index is not None
    words = codec.label + (", g_idx" if scattered else "")
    return Item(name, store.shape(module), words, store.stored_bytes(name), codec, scattered)


def who_takes_it(source: Source, found: list[Item]) -> list[str]:
    """Return, for the common runtimes, whether they take a source."""
    if isinstance(source.store, GgufStore):
        unknown = sorted({item.scheme for item in found if item.scheme not in CODECS.names()})
        return ["llama.cpp, Ollama: yes" + (f" (types that quantkit does not write: {', '.join(unknown)})" if unknown else "")]
    if isinstance(source.store, Mxfp4Store):
        return ["transformers, vLLM, SGLang: as it is"]
    packed = [(item.codec, item.shape) for item in found if item.codec is not None]
    if not packed:
        return ["transformers, vLLM, SGLang: as it is; llama.cpp: after quantkit export-gguf"]
    return runtimes(packed, source.quantized.split(" ")[0], any(item.scattered for item in found))


def differences(a: Source, b: Source) -> Iterator[Difference]:
    """Yield every tensor of either source, one in memory at a time from each."""
    left, right = ({item.name: item for item in items(source)} for source in (a, b))
    for name in dict.fromkeys([*left, *right]):
        one, two = left.get(name), right.get(name)
        error = _error(a.store, b.store, name) if one and two and one.shape == two.shape else None
        yield Difference(name, one, two, error)


def _error(a: TensorStore, b: TensorStore, name: str) -> float:
    x, y = (store.read(name).to(torch.float32) for store in (a, b))
    size = float(y.norm())
    distance = float((x - y).norm())
    return distance / size if size else math.inf if distance else 0.0
