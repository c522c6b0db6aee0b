"""Safetensors files by byte range: a header that is checked before it is believed, reads into memory of our own.

The safetensors package maps the whole file (mapped pages count as resident memory) and writes whole shards from
memory; streaming needs neither. The layout is its specification's: u64 little-endian header length, a JSON header,
then the data; offsets count from the end of the header and need no alignment.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from quantkit.errors import SourceError
from quantkit.foreign import parse_json, whole

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
if hasattr(torch, "float8_e8m0fnu"):  # torch 2.7
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
CODES = {dtype: code for code, dtype in DTYPES.items()}
SIZES = {code: dtype.itemsize for code, dtype in DTYPES.items()}
MAX_HEADER = 16_000_000  # more than a hundred thousand tensors
CHUNK = 16 << 20


class TensorInfo(NamedTuple):
    """A tensor on disk: safetensors dtype code and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return SIZES[self.dtype] * math.prod(self.shape)


class Entry(NamedTuple):
    """Where a tensor's bytes are in a file, counted from its start."""

    info: TensorInfo
    start: int
    stop: int


def read_header(path: Path) -> dict[str, Entry]:
    """Return the entries of a safetensors file, in the order of their data; a SourceError names what is wrong."""
    if not path.is_file():
        raise SourceError(f"{path} is missing, or no file.")
    size = path.stat().st_size
    if size < 8:
        raise SourceError(f"{path} has {size} bytes: not a safetensors file. Download it again.")
    with path.open("rb") as file:
        start = file.read(8)
        if start.startswith(b"PK"):
            raise SourceError(f"{path} is a zip archive, not a safetensors file. Unpack it, or download the right file.")
        length = int.from_bytes(start, "little")
        if length > min(size - 8, MAX_HEADER):
            raise SourceError(
                f"{path} claims a header of {length} bytes but has {size}: truncated, or not a safetensors file. Download it again."
            )
        raw = file.read(length)
    header = parse_json(raw, f"{path}: its header", hook=lambda pairs: _unique(path, pairs))
    if not isinstance(header, dict):
        raise SourceError(f"{path} has a header that is no JSON object. Download it again.")
    header.pop("__metadata__", None)
    return _entries(path, header, 8 + length, size)


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise SourceError(f"{path} names '{twice[:80]}' twice.")
    return result


def _entries(path: Path, header: dict[str, Any], base: int, size: int) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for name, item in header.items():
        try:
            where = f"{path}: a number of '{name[:80]}'"
            dtype, shape = str(item["dtype"]), tuple(whole(n, where) for n in item["shape"])
            start, stop = (base + whole(n, where) for n in item["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise SourceError(f"{path}: the header's entry for '{name}' is malformed.") from None
        if dtype not in SIZES:
            raise SourceError(f"{path}: '{name}' has dtype {dtype}. Known: {', '.join(SIZES)}.")
        entries[name] = Entry(TensorInfo(dtype, shape), start, stop)
    end = base
    for name, entry in sorted(entries.items(), key=lambda pair: (pair[1].start, pair[1].stop)):
        if entry.start < end or entry.stop - entry.start != entry.info.nbytes or min(entry.info.shape, default=0) < 0:
            raise SourceError(f"{path}: the byte range of '{name}' overlaps another or does not fit its shape.")
        if entry.stop > size:
            raise SourceError(f"{path} is truncated: '{name}' ends at byte {entry.stop}, the file has {size}. Download it again.")
        end = entry.stop
    return dict(sorted(entries.items(), key=lambda pair: pair[1].start))


def read_tensor(path: Path, entry: Entry) -> Tensor:
    """Return one tensor in memory of its own, whatever the alignment of its data."""
    buffer = torch.empty(entry.stop - entry.start, dtype=torch.uint8)
    if buffer.numel():
        with path.open("rb", buffering=0) as file:
            file.seek(entry.start)
            view, done = buffer.numpy().data, 0
            while done < len(view):
                count = file.readinto(view[done : done + CHUNK])
                if not count:
                    raise SourceError(f"{path} ended while it was read.")
                done += count
    return buffer.view(DTYPES[entry.info.dtype]).reshape(entry.info.shape)


def read_chunks(path: Path, entry: Entry) -> Iterator[bytes]:
    """Yield one tensor's bytes in pieces."""
    with path.open("rb") as file:
        file.seek(entry.start)
        left = entry.stop - entry.start
        while left:
            piece = file.read(min(left, CHUNK))
            if not piece:
                raise SourceError(f"{path} ended while it was read.")
            left -= len(piece)
            yield piece


def tensor_bytes(tensor: Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes, row-major, in pieces."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
    for start in range(0, raw.numel(), CHUNK):
        yield raw[start : start + CHUNK].numpy().data


def write_header(file: BinaryIO, infos: dict[str, TensorInfo]) -> None:
    """Write the header for tensors that will follow in this order, padded so that data starts at a multiple of 8."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, info in infos.items():
        header[name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [offset, offset + info.nbytes],
        }
        offset += info.nbytes
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(len(raw).to_bytes(8, "little") + raw)


def sync(file: BinaryIO) -> None:
    """Push a file's bytes to the disk."""
    file.flush()
    os.fsync(file.fileno())


def write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to `path` atomically: a temporary file, fsync, rename."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        write_header(file, {n: TensorInfo(CODES[t.dtype], tuple(t.shape)) for n, t in tensors.items()})
        for tensor in tensors.values():
            for piece in tensor_bytes(tensor):
                file.write(piece)
        sync(file)
    temporary.replace(path)


def require_finite(name: str, value: Tensor) -> None:
    """Raise a SourceError naming the tensor, the count and the first index of NaN or Inf, if there are any."""
    bad = ~torch.isfinite(value)
    if count := int(bad.sum()):
        first = tuple(int(i) for i in bad.nonzero()[0])
        raise SourceError(f"'{name}' holds {count} NaN or Inf, the first at {first}. The checkpoint is damaged, or a merge failed.")
