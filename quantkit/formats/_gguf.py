"""A GGUF file's header, read with every number checked before it is believed.

The gguf package trusts counts and lengths, so a damaged file can cost it all memory or end in a traceback; here each
is bounded by the bytes that are left. Tensor data is mapped only while one tensor is read.

Layout (docs/gguf.md of ggml): "GGUF", version u32, tensor count u64, key count u64, keys (string, type u32, value),
tensor infos (string, dims u32, dims x u64 with the row length first, type u32, offset u64), padding, data. Strings are
u64 length and UTF-8; offsets count from the data section and are multiples of general.alignment.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.errors import SourceError

ALIGNMENT = 32
MAX_DIMS = 4
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# Elements and bytes of a block, by type id: everything that a file may hold.
BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74),
    18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2),
    26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36),
}  # fmt: skip


@dataclass(frozen=True)
class Key:
    """One key's value; kind: its type id, and for an array the element's as `element`."""

    value: Any
    kind: int
    element: int | None = None


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: torch shape (row length last), type id, where its bytes are in the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """Keys and tensors of a file, in its order."""

    path: Path
    keys: dict[str, Key]
    tensors: dict[str, TensorEntry]

    def get(self, key: str, default: Any = None) -> Any:
        """Return a key's value, or the default."""
        return self.keys[key].value if key in self.keys else default

    def read(self, name: str, index: int | None = None) -> Any:
        """Return the bytes of a tensor, or of slice `index` of it, uint8, one row per row of blocks, in memory of their own."""
        entry = self.tensors[name]
        count = 1 if index is None else entry.shape[0]
        start = entry.start + (index or 0) * (entry.nbytes // count)
        data = np.fromfile(self.path, np.uint8, entry.nbytes // count, offset=start)
        return data.reshape(max(math.prod(entry.shape[:-1]) // count, 1), -1)


def add_key(writer: Any, name: str, key: Key) -> None:
    """Add a key that was read to the gguf package's writer, as it is: text as its bytes, since a token need not be UTF-8."""
    from gguf import GGUFValueType

    element = None if key.element is None else GGUFValueType(key.element)
    writer.add_key_value(name, _raw(key.value), GGUFValueType(key.kind), sub_type=element)


def _raw(value: Any) -> Any:
    if isinstance(value, list):
        return [_raw(item) for item in value]
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value


class _Cursor:
    """Reads forward in a buffer and never past its end."""

    def __init__(self, path: Path, buffer: Any) -> None:
        self.path, self.buffer, self.at, self.size = path, buffer, 0, len(buffer)

    def fail(self, why: str) -> SourceError:
        return SourceError(f"{self.path} is damaged or truncated: {why} (byte {self.at} of {self.size}). Download it again.")

    def take(self, count: int, what: str) -> int:
        """Move over `count` bytes and return where they began."""
        if count > self.size - self.at:
            raise self.fail(f"{what} needs {count} bytes, {self.size - self.at} are left")
        start, self.at = self.at, self.at + count
        return start

    def number(self, code: str, what: str) -> Any:
        return struct.unpack_from("<" + code, self.buffer, self.take(struct.calcsize("<" + code), what))[0]

    def text(self, what: str) -> str:
        length = self.number("Q", what)
        start = self.take(length, what)
        try:
            return bytes(self.buffer[start : start + length]).decode("utf-8")
        except UnicodeDecodeError:
            if what.startswith("the value"):  # a token may be any bytes
                return bytes(self.buffer[start : start + length]).decode("utf-8", "surrogateescape")
            raise self.fail(f"{what} is not UTF-8") from None

    def value(self, key: str) -> Key:
        kind = self.number("I", f"the type of '{key}'")
        what = f"the value of '{key}'"
        if kind == STRING:
            return Key(self.text(what), kind)
        if kind in SCALARS:
            return Key(self.number(SCALARS[kind], what), kind)
        if kind != ARRAY:
            raise self.fail(f"'{key}' has the unknown type {kind}")
        element, count = self.number("I", what), self.number("Q", what)
        if element == STRING:
            if count > (self.size - self.at) // 8:
                raise self.fail(f"{what} claims {count} strings")
            return Key([self.text(what) for _ in range(count)], kind, element)
        if element not in SCALARS:
            raise self.fail(f"{what} is an array of the type {element}, which cannot be")
        width = struct.calcsize("<" + SCALARS[element])
        start = self.take(count * width, what)
        raw = bytes(self.buffer[start : start + count * width])
        return Key(np.frombuffer(raw, np.dtype(SCALARS[element]).newbyteorder("<")).tolist(), kind, element)


def read_header(path: Path) -> Header:
    """Return the header of a GGUF file; a SourceError says what is wrong with it."""
    size = path.stat().st_size
    if size < 24:
        raise SourceError(f"{path} has {size} bytes: not a GGUF file. Download it again.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
        return _parse(_Cursor(path, buffer))


def _parse(cursor: _Cursor) -> Header:
    path = cursor.path
    if bytes(cursor.buffer[:4]) != b"GGUF":
        raise SourceError(f"{path} is not a GGUF file (its first four bytes say so). Download it again.")
    cursor.at = 4
    version = cursor.number("I", "the version")
    if version not in (2, 3):
        why = "was written for a big-endian machine" if version & 0xFFFF == 0 else f"has version {version}; 2 and 3 are known"
        raise SourceError(f"{path} {why}.")
    tensor_count, key_count = cursor.number("Q", "the tensor count"), cursor.number("Q", "the key count")
    if tensor_count > cursor.size // 24 or key_count > cursor.size // 12:
        raise cursor.fail(f"it claims {tensor_count} tensors and {key_count} keys")
    keys: dict[str, Key] = {}
    for _ in range(key_count):
        key = cursor.text("a key")
        if not key or key in keys:
            raise cursor.fail(f"the key '{key}' is empty or given twice")
        keys[key] = cursor.value(key)
    infos = [_tensor_info(cursor) for _ in range(tensor_count)]
    alignment = _alignment(path, keys)
    base = -(-cursor.at // alignment) * alignment
    return Header(path, keys, _place(cursor, infos, base, alignment))


def _alignment(path: Path, keys: dict[str, Key]) -> int:
    key = keys.get("general.alignment")
    if key is None:
        return ALIGNMENT
    value = key.value
    if key.kind != 4 or value < 1 or value & (value - 1):
        raise SourceError(f"{path}: general.alignment is {value!r}; it must be a power of two, stored as uint32.")
    return int(value)


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text("a tensor's name")
    dims = cursor.number("I", f"the shape of '{name}'")
    if not 1 <= dims <= MAX_DIMS:
        raise cursor.fail(f"'{name}' has {dims} dimensions")
    shape = tuple(cursor.number("Q", f"the shape of '{name}'") for _ in range(dims))[::-1]
    return name, shape, cursor.number("I", f"the type of '{name}'"), cursor.number("Q", f"the offset of '{name}'")


def _place(cursor: _Cursor, infos: list[tuple[str, tuple[int, ...], int, int]], base: int, alignment: int) -> dict[str, TensorEntry]:
    tensors: dict[str, TensorEntry] = {}
    for name, shape, type_id, offset in infos:
        if name in tensors:
            raise SourceError(f"{cursor.path} holds '{name}' twice.")
        if type_id not in BLOCKS:
            raise cursor.fail(f"'{name}' has the unknown type {type_id}")
        block, size = BLOCKS[type_id]
        if min(shape) < 1 or math.prod(shape) > 8 * cursor.size * block or shape[-1] % block:
            raise cursor.fail(f"'{name}' has the shape {list(shape)}, which its type or the file cannot hold")
        nbytes = math.prod(shape) // block * size
        if offset % alignment or base + offset + nbytes > cursor.size:
            raise cursor.fail(f"'{name}' ends at byte {base + offset + nbytes}, or begins at an offset that {alignment} does not divide")
        tensors[name] = TensorEntry(name, shape, type_id, base + offset, nbytes)
    end = 0
    for entry in sorted(tensors.values(), key=lambda entry: entry.start):
        if entry.start < end:
            raise cursor.fail(f"'{entry.name}' overlaps the tensor before it")
        end = entry.start + entry.nbytes
    return tensors
