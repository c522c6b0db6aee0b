"""GGUF files written in one pass: all tensor infos first, then the data in order, block by block as it is made.

The gguf package packs keys and tensor infos and decides where a file is split; the data is streamed by us. Files are
written into a folder beside the output and renamed into place when they are whole.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from quantkit.errors import OutputError
from quantkit.formats._gguf import ALIGNMENT, SCALARS, STRING
from quantkit.formats._safetensors import sync
from quantkit.lock import clear, hold
from quantkit.mixture import Choice

PREAMBLE = 24  # magic, version, two counts
SPLIT_KEYS = sum(8 + len(f"split.{name}") + 4 + size for name, size in (("no", 2), ("count", 2), ("tensors.count", 4)))


def make_writer(arch: str, choices: list[Choice], type_ids: dict[str, int], split_bytes: int = 0) -> Any:
    """Return the gguf package's writer with the infos of these tensors; no file is opened yet."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(None, arch, split_max_size=split_bytes)
    for choice in choices:
        kind = GGMLQuantizationType(type_ids[choice.type])
        writer.add_tensor_info(choice.name, choice.shape, np.dtype(np.float32), choice.nbytes, raw_dtype=kind)
    return writer


def check_output(output: Path, force: bool) -> None:
    """Refuse an output that exists already, or has no folder."""
    if output.exists() and not force:
        raise OutputError(f"{output} exists already. Choose another --output, or replace it with --force.")
    if not output.resolve().parent.is_dir():
        raise OutputError(f"{output.resolve().parent} is no folder. Create it first.")


def write_files(writer: Any, output: Path, data: Callable[[str], Iterator[Any]], done: Callable[[str], None],
                prove: Callable[[list[Path]], None]) -> list[Path]:  # fmt: skip
    """Write the file, or the files of a split, and return their paths; data(name) yields a tensor's bytes in pieces.

    prove: looks at the whole files before they get their place, and may put more beside them.
    """
    folder = output.resolve().with_name(output.name + ".partial")
    with hold(folder):
        clear(folder)
        return _write_into(folder, writer, output, data, done, prove)


def _write_into(folder: Path, writer: Any, output: Path, data: Callable[[str], Iterator[Any]], done: Callable[[str], None],
                prove: Callable[[list[Path]], None]) -> list[Path]:  # fmt: skip
    try:
        _write_headers(writer, folder / output.name)
        for file, tensors in zip(writer.fout, writer.tensors, strict=True):
            _pad(file)
            for name, info in tensors.items():
                start = file.tell()
                for piece in data(name):
                    file.write(piece)
                assert file.tell() - start == info.nbytes, name
                _pad(file)
                done(name)
            sync(file)
        writer.close()
        written = sorted(folder.iterdir())
        prove(written)
        for path in folder.iterdir():
            path.replace(output.resolve().parent / path.name)
        return [output.resolve().parent / path.name for path in written]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_headers(writer: Any, path: Path) -> None:
    writer.write_header_to_file(path=path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))


def file_bytes(writer: Any) -> int:
    """Return the exact size of all files together, before any is opened."""
    total, shards = 0, len(writer.tensors)
    for index, tensors in enumerate(writer.tensors):
        head = PREAMBLE + sum(_key_bytes(name, key) for name, key in (writer.kv_data[0].items() if index == 0 else ()))
        head += sum(8 + len(name.encode()) + 4 + 8 * len(info.shape) + 12 for name, info in tensors.items())
        head += SPLIT_KEYS if shards > 1 else 0
        total += -(-head // ALIGNMENT) * ALIGNMENT + sum(-(-info.nbytes // ALIGNMENT) * ALIGNMENT for info in tensors.values())
    return total


def _key_bytes(name: str, key: Any) -> int:
    """Return the bytes of a key: name, type, value; an array has its own type and count before its elements."""
    import gguf

    head = 8 + len(name.encode()) + 4
    if key.type != gguf.GGUFValueType.ARRAY:
        return head + _value_bytes(key.value, int(key.type))
    element = int(key.sub_type if key.sub_type is not None else gguf.GGUFValueType.get_type(key.value[0]))
    if element == STRING:
        return head + 12 + sum(_value_bytes(item, element) for item in key.value)
    return head + 12 + len(key.value) * struct.calcsize("<" + SCALARS[element])


def _value_bytes(value: Any, kind: int) -> int:
    if kind == STRING:
        return 8 + len(value.encode() if isinstance(value, str) else value)
    return struct.calcsize("<" + SCALARS[kind])
