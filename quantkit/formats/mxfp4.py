"""Hugging Face's MXFP4 checkpoints (gpt-oss): stacks of experts in E2M1 floats, shown as the plain parameters they stand for.

X_blocks uint8 [experts, out, in/32, 16], two codes a byte, low nibble first; X_scales uint8 [experts, out, in/32], powers of two. The
plain parameter X is [experts, in, out]. Read only: no model but gpt-oss has this layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.codecs._levels import unpack_nibbles
from quantkit.codecs.fp4 import Fp4
from quantkit.errors import SourceError
from quantkit.formats import _safetensors as st
from quantkit.formats._safetensors import TensorInfo
from quantkit.formats.store import TensorStore
from quantkit.tensors import QuantTensor

BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32


class Mxfp4Store:
    """Wraps a store; packed stacks become float32 [experts, in, out]."""

    def __init__(self, inner: TensorStore) -> None:
        self.inner = inner
        held = set(inner.names())
        self.stacks = {name.removesuffix(BLOCKS): name for name in held if name.endswith(BLOCKS)}
        for stack, name in self.stacks.items():
            blocks = inner.info(name).shape
            scales = inner.info(stack + SCALES).shape if stack + SCALES in held else ()
            if len(blocks) != 4 or blocks[3] != GROUP // 2 or scales != blocks[:3]:
                raise SourceError(f"{name} {list(blocks)} and its scales {list(scales)} are no MXFP4 stack.")

    def names(self) -> list[str]:
        """Names as a plain checkpoint would have them."""
        shown = []
        for name in self.inner.names():
            stack = name.removesuffix(BLOCKS)
            if stack in self.stacks and name.endswith(BLOCKS):
                shown.append(stack)
            elif name.removesuffix(SCALES) not in self.stacks:
                shown.append(name)
        return shown

    def stored_bytes(self, name: str) -> int:
        """Return the bytes of a tensor on disk."""
        parts = [name + BLOCKS, name + SCALES] if name in self.stacks else [name]
        return sum(self.inner.info(part).nbytes for part in parts)

    def info(self, name: str) -> TensorInfo:
        """Packed stacks count as float32."""
        if name not in self.stacks:
            return self.inner.info(name)
        experts, out, groups, _ = self.inner.info(name + BLOCKS).shape
        return TensorInfo("F32", (experts, groups * GROUP, out))

    def read(self, name: str) -> Tensor:
        """One tensor; a packed stack is dequantized, one expert at a time."""
        if name not in self.stacks:
            return self.inner.read(name)
        blocks, scales = self.inner.read(name + BLOCKS), self.inner.read(name + SCALES)
        result = torch.empty(self.info(name).shape)
        for index, (block, scale) in enumerate(zip(blocks, scales, strict=True)):
            codes = unpack_nibbles(block.reshape(len(block), -1))
            result[index] = Fp4("mxfp4").decode(QuantTensor(codes, {"scale": scale}, None)).T
        return result

    def chunks(self, name: str) -> Iterator[bytes | memoryview]:
        """One tensor's bytes in pieces."""
        return st.tensor_bytes(self.read(name)) if name in self.stacks else self.inner.chunks(name)

    def files(self) -> list[Path]:
        """The files of the wrapped store."""
        return self.inner.files()


def open_store(inner: TensorStore, config: dict[str, Any]) -> tuple[TensorStore, str, list[str]]:
    """Return the store of an MXFP4 checkpoint as plain weights, its description, and notices."""
    return Mxfp4Store(inner), "mxfp4", []
