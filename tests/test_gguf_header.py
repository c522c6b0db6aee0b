"""Damaged GGUF files give one clear error, in bounded time and memory; whole ones say what they hold."""

from __future__ import annotations

import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import Shape, write_gguf

from quantkit.errors import SourceError
from quantkit.formats._gguf import read_header

SMALL = Shape(layers=2, hidden=64, ff=64, heads=4, kv=2)
NUMBERS = [(2**63).to_bytes(8, "little"), (2**64 - 1).to_bytes(8, "little"), (2**40).to_bytes(8, "little"), bytes(8), b"\x01" + bytes(7)]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "whole.gguf"
    write_gguf(path, SMALL, {"blk.0.attn_q.weight": np.random.default_rng(0).standard_normal((64, 64))})
    return path


def test_reads_what_the_package_reads(whole: Path) -> None:
    ours, theirs = read_header(whole), gguf.GGUFReader(str(whole))
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].shape == tuple(int(n) for n in tensor.shape[::-1])
        assert ours.read(tensor.name).tobytes() == tensor.data.tobytes()
    for name, key in ours.keys.items():
        assert theirs.fields[name].contents() == key.value


def mutate(raw: bytes, head: int, rng: random.Random) -> bytes:
    data, kind = bytearray(raw), rng.random()
    if kind < 0.15:
        return bytes(data[: rng.randrange(len(data))])
    if kind < 0.5:
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(head)] = rng.randrange(256)
    elif kind < 0.8:
        at = rng.randrange(head - 8)
        data[at : at + 8] = rng.choice([*NUMBERS, rng.randbytes(8)])
    else:
        start, stop = sorted(rng.randrange(head) for _ in range(2))
        del data[start:stop]
    return bytes(data)


def test_three_thousand_mutations_end_well(whole: Path) -> None:
    raw, rng = whole.read_bytes(), random.Random(0)
    head = min(entry.start for entry in read_header(whole).tensors.values())
    outcomes = {"read": 0, "refused": 0}
    slowest = 0.0
    tracemalloc.start()
    for _ in range(3000):
        whole.write_bytes(mutate(raw, head, rng))
        began = time.perf_counter()
        try:
            header = read_header(whole)
            for name in header.tensors:
                header.read(name)
            outcomes["read"] += 1
        except SourceError as error:
            assert str(whole) in str(error)
            outcomes["refused"] += 1
        slowest = max(slowest, time.perf_counter() - began)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert outcomes["refused"] > 2000
    assert outcomes["read"] > 100  # a changed digit of a setting is no damage that a reader can see
    assert slowest < 2.0
    assert peak < 16 << 20


def edited(path: Path, change: Any) -> Path:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(("change", "words"), [
    (lambda d: d.__setitem__(slice(0, 4), b"GGML"), "is not a GGUF file"),
    (lambda d: d.__setitem__(slice(4, 8), bytes([0, 0, 0, 3])), "big-endian"),
    (lambda d: d.__setitem__(slice(4, 8), bytes([9, 0, 0, 0])), "version 9"),
    (lambda d: d.__setitem__(slice(8, 16), (2**60).to_bytes(8, "little")), "it claims"),
    (lambda d: d.__delitem__(slice(-64, None)), "ends at byte"),
    (lambda d: d.__delitem__(slice(20, None)), "not a GGUF file"),
])  # fmt: skip
def test_damage_is_named(change: Any, words: str, whole: Path) -> None:
    with pytest.raises(SourceError, match=words):
        read_header(edited(whole, change))


@pytest.mark.parametrize("alignment", [16, 64])
def test_the_files_own_alignment_rules(alignment: int, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_custom_alignment(alignment)
    values = {f"t{i}": np.arange(5 + i, dtype=np.float32) for i in range(4)}
    for name, value in values.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(path)
    for name, value in values.items():
        assert header.read(name).tobytes() == value.tobytes()


def test_twice_the_same_name_and_an_odd_alignment_are_refused(whole: Path, tmp_path: Path) -> None:
    raw = whole.read_bytes()
    whole.write_bytes(raw.replace(b"blk.1.ffn_down.weight", b"blk.0.ffn_down.weight"))
    with pytest.raises(SourceError, match=r"holds 'blk\.0\.ffn_down\.weight' twice"):
        read_header(whole)
    path = tmp_path / "b.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint32("general.alignment", 24)
    writer.add_tensor("t", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SourceError, match="power of two"):
        read_header(path)
