"""Importance matrices: the mean square of every input column of a weight, read, written and merged.

Two layouts, both llama.cpp's: a GGUF file of sums and counts, and the older `.dat` of means. Stacked experts have one
row of sums and one count each; an expert that saw no token weighs all its columns alike, and is reported.

Source: llama.cpp, tools/imatrix/imatrix.cpp and common/imatrix-loader.cpp.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import PlanError, SourceError, UsageError, name_list
from quantkit.foreign import whole
from quantkit.formats._gguf import read_header
from quantkit.mixture import order

SUMS, COUNTS = ".in_sum2", ".counts"
MAX_NAME = 127
DAT_CHUNK = 512
MOST = 2**31 - 1


@dataclass
class Entry:
    """What one weight's input was: sums of squares, float32 [matrices, in], and rows seen, float32 [matrices]."""

    sums: Tensor
    counts: Tensor

    def weights(self, matrix: int) -> Tensor:
        """Return the mean squares of a matrix's input columns, float32 [in]; ones if it saw nothing."""
        count = float(self.counts[matrix])
        return self.sums[matrix] / count if count > 0 else torch.ones_like(self.sums[matrix])

    def see(self, rows: Tensor, matrix: int = 0) -> None:
        """Add inputs of a matrix, float [..., in]."""
        flat = rows.detach().reshape(-1, rows.shape[-1]).to(torch.float32)
        self.sums[matrix] += flat.square().sum(0).cpu()
        self.counts[matrix] += flat.shape[0]

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Tell whether it is of a weight with this shape."""
        matrices = shape[0] if len(shape) == 3 else 1
        return tuple(self.sums.shape) == (matrices, shape[-1])

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise a PlanError unless it fits."""
        if not self.fits(shape):
            raise PlanError(f"The importance of {name} is {list(self.sums.shape)}, but the weight is {list(shape)}: it is another model's.")

    def add(self, other: Entry, name: str) -> None:
        """Add another run's sums."""
        if self.sums.shape != other.sums.shape:
            raise PlanError(f"Two importance matrices differ in {name}: {list(self.sums.shape)} and {list(other.sums.shape)}.")
        self.sums, self.counts = self.sums + other.sums, self.counts + other.counts


@dataclass
class Importance:
    """Entries by GGUF weight name; chunk: tokens of a chunk; chunks: how many; datasets: where the text came from."""

    entries: dict[str, Entry]
    chunk: int
    chunks: int
    datasets: list[str] = field(default_factory=list)
    file: str = ""

    def notices(self) -> list[str]:
        """Return what a user should know: experts that saw no token."""
        unseen = {name: (entry.counts == 0).nonzero()[:, 0].tolist() for name, entry in self.entries.items()}
        counts = {name: len(entry.counts) for name, entry in self.entries.items()}
        return [f"{name}: {len(n)} of {counts[name]} experts saw no token: {name_list(n, 8)}" for name, n in unseen.items() if n]

    def merge(self, other: Importance) -> None:
        """Add another matrix of the same model."""
        for name, entry in other.entries.items():
            if name in self.entries:
                self.entries[name].add(entry, name)
            else:
                self.entries[name] = entry
        self.chunks += other.chunks
        self.datasets += [name for name in other.datasets if name not in self.datasets]

    def add_keys(self, writer: Any) -> None:
        """Add the keys that llama-quantize leaves in a file made with an importance matrix."""
        writer.add_string("quantize.imatrix.file", self.file[:MAX_NAME])
        if self.datasets:
            writer.add_string("quantize.imatrix.dataset", self.datasets[0][:MAX_NAME])
        writer.add_uint32("quantize.imatrix.entries_count", len(self.entries))
        writer.add_uint32("quantize.imatrix.chunks_count", self.chunks)


def load(path: Path) -> Importance:
    """Return the importance matrix of a file in either layout; a SourceError says what is wrong with it."""
    if not path.is_file():
        raise SourceError(f"There is no {path}. Make one with: quantkit imatrix MODEL -o {path.name}")
    with path.open("rb") as file:
        magic = file.read(4)
    matrix = _load_gguf(path) if magic == b"GGUF" else _load_dat(path)
    for name, entry in matrix.entries.items():
        if not bool(torch.isfinite(entry.sums.sum())) or bool((entry.sums < 0).any()):
            raise SourceError(f"{path}: the sums of {name} hold NaN, Inf or negative numbers.")
    matrix.file = path.name
    return matrix


def _load_gguf(path: Path) -> Importance:
    header = read_header(path)
    lacking = [key for key in ("imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size") if key not in header.keys]
    if lacking or header.get("general.type") != "imatrix":
        raise SourceError(f"{path} is a GGUF file but no importance matrix ({name_list(lacking) or 'its general.type'}).")
    entries = {}
    for tensor in header.tensors:
        if not tensor.endswith(SUMS):
            continue
        name = tensor.removesuffix(SUMS)
        if name + COUNTS not in header.tensors or header.tensors[name + COUNTS].type_id or header.tensors[tensor].type_id:
            raise SourceError(f"{path}: {name} has no {COUNTS}, or one that is not float32.")
        sums, counts = (torch.from_numpy(header.read(n).copy()).view(torch.float32) for n in (tensor, name + COUNTS))
        counts = counts.reshape(-1)
        if len(counts) != len(sums):
            raise SourceError(f"{path}: {name} has {len(sums)} rows of sums and {len(counts)} counts.")
        entries[name] = Entry(sums, counts)
    datasets = header.get("imatrix.datasets")
    if not isinstance(datasets, list):
        raise SourceError(f"{path}: imatrix.datasets is no list.")
    size = whole(header.get("imatrix.chunk_size"), f"{path}: imatrix.chunk_size", 1, MOST)
    count = whole(header.get("imatrix.chunk_count"), f"{path}: imatrix.chunk_count", 0, MOST)
    return Importance(entries, size, count, [str(name).encode("utf-8", "replace").decode() for name in datasets])


def _load_dat(path: Path) -> Importance:
    data, at = path.read_bytes(), 0
    wrong = SourceError(f"{path} is no importance matrix: neither GGUF nor the older layout, or truncated.")

    def number() -> int:
        nonlocal at
        if at + 4 > len(data):
            raise wrong
        at += 4
        return int(struct.unpack_from("<i", data, at - 4)[0])

    def take(count: int) -> bytes:
        nonlocal at
        if count < 0 or at + count > len(data):
            raise wrong
        at += count
        return data[at - count : at]

    entries: dict[str, Entry] = {}
    for _ in range(number()):
        name = take(number()).decode("utf-8", "replace")
        calls, size = number(), number()
        values = torch.from_numpy(np.frombuffer(take(4 * size), np.float32).copy())
        # Means times calls, of chunks whose size the file does not tell.
        entries[name] = Entry(values[None] * DAT_CHUNK, torch.tensor([float(max(calls, 1) * DAT_CHUNK)]))
    if not entries:
        raise wrong
    chunks = max(number(), 0) if at < len(data) else 0
    dataset = take(number()).decode("utf-8", "replace") if at < len(data) else ""
    return Importance(entries, DAT_CHUNK, chunks, [dataset] if dataset else [])


def save(matrix: Importance, path: Path) -> None:
    """Write an importance matrix: the older layout if the name ends in .dat, else GGUF."""
    temporary = path.with_name(path.name + ".tmp")
    if path.suffix == ".dat":
        temporary.write_bytes(_dat_bytes(matrix))
    else:
        _save_gguf(matrix, temporary)
    temporary.replace(path)


def _save_gguf(matrix: Importance, path: Path) -> None:
    from gguf import GGUFValueType, GGUFWriter

    writer = GGUFWriter(str(path), "imatrix")
    writer.kv_data[0].clear()  # such a file has no architecture
    writer.add_string("general.type", "imatrix")
    writer.add_key_value("imatrix.datasets", matrix.datasets or ["unknown"], GGUFValueType.ARRAY, sub_type=GGUFValueType.STRING)
    writer.add_uint32("imatrix.chunk_count", matrix.chunks)
    writer.add_uint32("imatrix.chunk_size", matrix.chunk)
    for name in sorted(matrix.entries):
        entry = matrix.entries[name]
        writer.add_tensor(name + SUMS, entry.sums.contiguous().numpy())
        writer.add_tensor(name + COUNTS, entry.counts.reshape(-1, 1).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _dat_bytes(matrix: Importance) -> bytes:
    entries = {name: entry for name, entry in sorted(matrix.entries.items()) if bool(entry.counts.any())}
    if matrix.chunks > MOST:
        raise SourceError(f"The matrix was made from {matrix.chunks} chunks, more than the older layout can say. Save it as .gguf.")
    parts = [struct.pack("<i", len(entries))]
    for name, entry in entries.items():
        calls = -(-int(entry.counts.max()) // matrix.chunk)
        if calls > MOST:
            raise SourceError(f"'{name}' was seen {calls} times, more than the older layout can say. Save it as .gguf.")
        values = torch.cat([entry.weights(i) for i in range(len(entry.counts))]) * calls
        raw = name.encode()
        parts += [struct.pack("<i", len(raw)), raw, struct.pack("<ii", calls, values.numel()), values.numpy().tobytes()]
    dataset = (matrix.datasets[0] if matrix.datasets else "").encode()
    return b"".join([*parts, struct.pack("<ii", matrix.chunks, len(dataset)), dataset])


def match(matrix: Importance, shapes: dict[str, tuple[int, ...]]) -> None:
    """Give flat entries of the older layout the shape of their stacked experts."""
    for name, entry in matrix.entries.items():
        shape = shapes.get(name, ())
        if len(shape) == 3 and entry.sums.numel() == shape[0] * shape[2]:
            entry.sums = entry.sums.reshape(shape[0], shape[2])
            entry.counts = entry.counts.expand(shape[0]).clone() if len(entry.counts) == 1 else entry.counts


def merge_files(paths: list[Path]) -> Importance:
    """Return the sum of several files."""
    if not paths:
        raise UsageError("Give at least one importance matrix to merge.")
    total = load(paths[0])
    for path in paths[1:]:
        total.merge(load(path))
    total.entries = {name: total.entries[name] for name in order(list(total.entries))}
    return total
