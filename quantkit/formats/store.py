"""Where tensors are read from: names, shapes and one tensor at a time, whatever the container.

`SafetensorsStore` and `BinStore` read plain checkpoints here; a quantized format's reader wraps a store and shows
its modules as plain weights again, so that any artifact can be a source.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quantkit.errors import SourceError, name_list
from quantkit.foreign import foreign, read_json
from quantkit.formats import _safetensors as st
from quantkit.formats._safetensors import TensorInfo

INDEX = "model.safetensors.index.json"
MEDUSA = "medusa_lm_head.safetensors"  # heads that guess ahead: beside the weights, none of them
BIN_INDEX = "pytorch_model.bin.index.json"


class TensorStore(Protocol):
    """Named tensors that are read one at a time."""

    def names(self) -> list[str]:
        """Names, in a stable order."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Dtype code and shape of one tensor, without reading it."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own."""
        ...

    def chunks(self, name: str) -> Iterator[bytes | memoryview]:
        """One tensor's bytes in pieces."""
        ...

    def files(self) -> list[Path]:
        """The files that hold the tensors."""
        ...


class SafetensorsStore:
    """The safetensors files of one checkpoint, checked as a whole before anything is read."""

    def __init__(self, paths: list[Path], claims: dict[str, str] | None = None) -> None:
        self.paths = paths
        self.entries: dict[str, tuple[Path, st.Entry]] = {}
        for path in paths:
            try:
                header = st.read_header(path)
            except SourceError as error:
                lacking = [name for name, file in (claims or {}).items() if file == path.name]
                raise SourceError(f"{error} It should hold {name_list(lacking, 3)}." if lacking else str(error)) from None
            for name, entry in header.items():
                if claims is not None and claims.get(name) != path.name:
                    continue
                if name in self.entries:
                    raise SourceError(
                        f"Two files hold '{name}': {self.entries[name][0].name} and {path.name}. "
                        "Remove the one that does not belong to this checkpoint."
                    )
                self.entries[name] = (path, entry)
        if claims is not None and (lacking := [name for name in claims if name not in self.entries]):
            where = sorted({claims[name] for name in lacking})
            raise SourceError(f"{INDEX} claims {len(lacking)} tensors that {name_list(where)} does not hold: {name_list(lacking)}.")

    def names(self) -> list[str]:
        """Names, by file and then by position in it."""
        return list(self.entries)

    def info(self, name: str) -> TensorInfo:
        """Dtype code and shape of one tensor."""
        return self.entries[name][1].info

    def read(self, name: str) -> Tensor:
        """One tensor, copied from the file."""
        return st.read_tensor(*self.entries[name])

    def chunks(self, name: str) -> Iterator[bytes | memoryview]:
        """One tensor's bytes in pieces."""
        return st.read_chunks(*self.entries[name])

    def files(self) -> list[Path]:
        """The shard files."""
        return self.paths


class BinStore:
    """Legacy `.bin` files, read by torch's weights-only loader; one file is mapped at a time."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self.where: dict[str, Path] = {}
        self.infos: dict[str, TensorInfo] = {}
        self.open: tuple[Path, dict[str, Tensor]] | None = None
        for path in paths:
            for name, tensor in self._load(path).items():
                self._check(path, name, tensor)
                self.where[name] = path
                self.infos[name] = TensorInfo(st.CODES[tensor.dtype], tuple(tensor.shape))

    def _load(self, path: Path) -> dict[str, Tensor]:
        if self.open is None or self.open[0] != path:
            advice = "quantkit never unpickles; save the model as safetensors."
            with foreign(f"{path} cannot be read by torch's weights-only loader", advice):
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if not isinstance(loaded, dict):
                raise SourceError(f"{path} holds a {type(loaded).__name__}, not named tensors.")
            self.open = (path, {str(k): v for k, v in loaded.items() if isinstance(v, Tensor)})
        return self.open[1]

    @staticmethod
    def _check(path: Path, name: str, tensor: Tensor) -> None:
        """Refuse what is no plain tensor, or stands for more bytes than the file holds."""
        plain = not tensor.is_nested and tensor.layout == torch.strided and tensor.device.type == "cpu" and tensor.dtype in st.CODES
        if not plain or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise SourceError(f"{path}: '{name}' is no plain tensor with all of its values in the file. Save the model as safetensors.")

    def names(self) -> list[str]:
        """Names, by file."""
        return list(self.infos)

    def info(self, name: str) -> TensorInfo:
        """Dtype code and shape of one tensor."""
        return self.infos[name]

    def read(self, name: str) -> Tensor:
        """One tensor, copied from the file."""
        return self._load(self.where[name])[name].clone(memory_format=torch.contiguous_format)

    def chunks(self, name: str) -> Iterator[bytes | memoryview]:
        """One tensor's bytes in pieces."""
        return st.tensor_bytes(self.read(name))

    def files(self) -> list[Path]:
        """The `.bin` files."""
        return self.paths


def open_folder(folder: Path) -> tuple[TensorStore, list[str]]:
    """Open a checkpoint folder; return its store and notices (weight files that the index does not name).

    An index rules when there is one; without it every `*.safetensors` is read, and two files that hold the same
    name are an error. `.bin` files are read only when there are no safetensors.
    """
    every = folder.glob("*.safetensors")
    found = sorted(path for path in every if (path.is_file() or path.is_symlink()) and path.name != MEDUSA)
    if (folder / INDEX).exists():
        claims = _weight_map(folder / INDEX)
        paths = _named_files(folder, claims, INDEX)
        ignored = [path.name for path in found if path not in paths]
        notices = [f"not named by {INDEX}, ignored: {name_list(ignored)}"] if ignored else []
        return SafetensorsStore(paths, claims), notices
    if found:
        return SafetensorsStore(found), []
    if (folder / BIN_INDEX).exists():
        return BinStore(_named_files(folder, _weight_map(folder / BIN_INDEX), BIN_INDEX)), []
    bins = sorted(folder.glob("pytorch_model*.bin"))
    if not bins:
        raise SourceError(f"{folder} holds no weights: no *.safetensors and no pytorch_model*.bin.")
    return BinStore(bins), []


def _weight_map(path: Path) -> dict[str, str]:
    claims = read_json(path).get("weight_map")
    if not isinstance(claims, dict) or not claims:
        raise SourceError(f"{path} has no weight_map.")
    return {str(name): str(file) for name, file in claims.items()}


def _named_files(folder: Path, claims: dict[str, str], index: str) -> list[Path]:
    for name in set(claims.values()):
        if "/" in name or "\\" in name or "\0" in name or not 0 < len(name) < 256 or name in (".", ".."):
            raise SourceError(f"{folder / index} names the file {name[:80]!r}; weights are files of the folder itself.")
    paths = [folder / name for name in sorted(set(claims.values()))]
    for path in paths:
        if not path.is_file():
            lacking = [name for name, file in claims.items() if file == path.name]
            raise SourceError(
                f"{folder / index} names {path.name}, which is missing; it should hold {name_list(lacking, 3)}. "
                "Download the checkpoint again."
            )
    return paths
