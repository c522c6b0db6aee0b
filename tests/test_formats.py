"""Packed tensors against unpackers written here from the formats' descriptions; readers give back what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.codecs.affine import Affine
from quantkit.errors import PlanError, SourceError
from quantkit.formats import FORMATS, _safetensors
from quantkit.formats._bits import fields_per_period, pack, unpack
from quantkit.formats.store import SafetensorsStore
from quantkit.source import READERS
from quantkit.tensors import QuantTensor


@settings(max_examples=60, deadline=None)
@given(bits=st.sampled_from([2, 3, 4, 8]), periods=st.integers(1, 4), columns=st.integers(1, 9), seed=st.integers(0, 99))
def test_unpack_inverts_pack(bits: int, periods: int, columns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(rng.integers(0, 1 << bits, (periods * fields_per_period(bits), columns), dtype=np.uint8))
    assert torch.equal(unpack(pack(values, bits), bits), values)


def stream(words: np.ndarray, bits: int, count: int) -> list[int]:
    """Read `count` fields from int32 words as one little-endian bit stream: the whole rule, in Python integers."""
    number = sum((int(word) & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(words))
    return [(number >> (bits * k)) & ((1 << bits) - 1) for k in range(count)]


def random_tensor(bits: int, group: int, symmetric: bool, scattered: bool, seed: int = 0) -> QuantTensor:
    rng = np.random.default_rng(seed)
    out, columns = 64, 96
    codec = Affine(bits, group, symmetric)
    groups = codec.groups(columns)
    codes = torch.from_numpy(rng.integers(0, codec.high + 1, (out, columns), dtype=np.uint8))
    scale = torch.from_numpy(rng.uniform(-0.1, 0.1, (out, groups)).astype(np.float32)).half().float()
    zero = torch.from_numpy(rng.integers(0, codec.high + 1, (out, groups), dtype=np.uint8))
    if symmetric:
        zero = torch.full_like(zero, codec.middle)
    index = torch.from_numpy(rng.permutation(np.arange(columns) // codec.width(columns)).astype(np.int32)) if scattered else None
    return QuantTensor(codes, {"scale": scale, "zero": zero}, codec, index)


CASES = [(b, g, s, x) for b in (2, 3, 4, 8) for g in (32, -1) for s in (True, False) for x in (False, True) if not (x and g == -1)]


@pytest.mark.parametrize(("bits", "group", "symmetric", "scattered"), CASES)
def test_gptq_tensors_unpack_to_the_codes(bits: int, group: int, symmetric: bool, scattered: bool) -> None:
    tensor = random_tensor(bits, group, symmetric, scattered)
    form = FORMATS["gptq"]
    packed = form.pack("m", tensor)
    out, columns = tensor.codes.shape
    qweight, qzeros = packed["m.qweight"].numpy(), packed["m.qzeros"].numpy()
    assert qweight.shape == (columns * bits // 32, out)
    assert [stream(qweight[:, o], bits, columns) for o in range(out)] == tensor.codes.tolist()
    assert [stream(row, bits, out) for row in qzeros] == tensor.params["zero"].T.tolist()
    assert packed["m.scales"].dtype == torch.float16 and torch.equal(packed["m.scales"].T.float(), tensor.params["scale"])
    wanted = tensor.group_index if tensor.group_index is not None else torch.arange(columns) // tensor.codec.width(columns)
    assert packed["m.g_idx"].tolist() == wanted.tolist()
    check_layout(form, packed, tensor)
    if int(tensor.params["zero"].min()) > 0:
        version1 = form.settle("m.qzeros", bits, True)(packed["m.qzeros"]).numpy()
        assert [stream(row, bits, out) for row in version1] == (tensor.params["zero"].T.int() - 1).tolist()


def check_layout(form: Any, packed: dict[str, torch.Tensor], tensor: QuantTensor) -> None:
    layout = form.layout("m", tuple(tensor.codes.shape), tensor.codec, tensor.group_index is not None)
    assert {n: (i.dtype, i.shape) for n, i in layout.items()} == {
        n: (_safetensors.CODES[t.dtype], tuple(t.shape)) for n, t in packed.items()
    }


def test_symmetric_words_are_the_known_ones() -> None:
    for bits, v1, v2 in ((4, 0x77777777, 0x88888888), (8, 0x7F7F7F7F, 0x80808080), (2, 0x55555555, 0xAAAAAAAA)):
        zeros = FORMATS["gptq"].pack("m", random_tensor(bits, 32, True, False))["m.qzeros"]
        assert {int(w) & 0xFFFFFFFF for w in zeros.flatten()} == {v2}
        assert {int(w) & 0xFFFFFFFF for w in FORMATS["gptq"].settle("m.qzeros", bits, True)(zeros).flatten()} == {v1}


@pytest.mark.parametrize(("bits", "group", "symmetric", "scattered"), CASES)
def test_compressed_tensors_unpack_to_the_codes(bits: int, group: int, symmetric: bool, scattered: bool) -> None:
    tensor = random_tensor(bits, group, symmetric, scattered)
    packed = FORMATS["compressed-tensors"].pack("m", tensor)
    out, columns = tensor.codes.shape
    words = packed["m.weight_packed"].numpy()
    assert [stream(words[o], bits, columns) for o in range(out)] == tensor.codes.tolist()
    assert packed["m.weight_shape"].tolist() == [out, columns]
    assert ("m.weight_zero_point" in packed) == (not symmetric)
    if not symmetric:
        zeros = packed["m.weight_zero_point"].numpy()
        assert [stream(zeros[:, g], bits, out) for g in range(zeros.shape[1])] == tensor.params["zero"].T.tolist()
    check_layout(FORMATS["compressed-tensors"], packed, tensor)


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True)])
def test_compressed_tensors_own_library_reads_it(bits: int, symmetric: bool) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    tensor = random_tensor(bits, 32, symmetric, False)
    packed = FORMATS["compressed-tensors"].pack("m", tensor)
    shape = torch.Size(tensor.codes.shape)
    signed = unpack_from_int32(packed["m.weight_packed"], bits, shape)
    assert torch.equal(signed.int() + (1 << (bits - 1)), tensor.codes.int())


@pytest.mark.parametrize("form", ["gptq", "compressed-tensors"])
@pytest.mark.parametrize(("bits", "group", "symmetric", "scattered"), CASES)
def test_readers_give_back_what_was_written(form: str, bits: int, group: int, symmetric: bool, scattered: bool, tmp_path: Path) -> None:
    tensor = random_tensor(bits, group, symmetric, scattered)
    packed = FORMATS[form].pack("m", tensor)
    zeros_from_one = int(tensor.params["zero"].min()) > 0
    for name in packed:
        if (change := FORMATS[form].settle(name, bits, zeros_from_one)) is not None:
            packed[name] = change(packed[name])
    _safetensors.write_file(tmp_path / "m.safetensors", packed)
    version = "gptq" if zeros_from_one else "gptq_v2"
    config = {"checkpoint_format": version, "sym": symmetric, "format": "pack-quantized"}
    store, _, _ = READERS[form](SafetensorsStore([tmp_path / "m.safetensors"]), config)
    back = store.quant("m")  # type: ignore[attr-defined]
    assert torch.equal(back.codes, tensor.codes)
    assert torch.equal(back.dequantize(), tensor.dequantize())
    assert store.names() == ["m.weight"]
    assert torch.equal(store.read("m.weight"), tensor.dequantize())


def hand_made(tmp_path: Path, bits: int, code: int, zero_word: int, version: str) -> Any:
    word = int(np.array(sum(code << (bits * k) for k in range(32 // bits)), dtype=np.uint32).view(np.int32))
    zeros = int(np.array(zero_word, dtype=np.uint32).view(np.int32))
    tensors = {
        "m.qweight": torch.full((64 * bits // 32, 32), word, dtype=torch.int32),
        "m.qzeros": torch.full((1, 32 * bits // 32), zeros, dtype=torch.int32),
        "m.scales": torch.full((1, 32), 0.05, dtype=torch.float16),
    }
    _safetensors.write_file(tmp_path / "m.safetensors", tensors)
    return READERS["gptq"](SafetensorsStore([tmp_path / "m.safetensors"]), {"checkpoint_format": version, "sym": True})[0]


def test_zero_points_of_both_versions(tmp_path: Path) -> None:
    """B04: a file of version 2 zeros that is tagged version 1 is refused, not read one step off."""
    for bits, code, v1, v2 in ((4, 8, 0x77777777, 0x88888888), (2, 2, 0x55555555, 0xAAAAAAAA)):
        assert not hand_made(tmp_path, bits, code, v1, "gptq").read("m.weight").any()
        assert not hand_made(tmp_path, bits, code, v2, "gptq_v2").read("m.weight").any()
        with pytest.raises(SourceError, match="version 2 zeros"):
            hand_made(tmp_path, bits, code, v2, "gptq").read("m.weight")


def test_words_that_are_no_matrix_of_integers_reach_no_kernel() -> None:
    for words in (torch.zeros(1, 4, 64, dtype=torch.int32), torch.zeros(16, 4, dtype=torch.int64), torch.zeros(16, dtype=torch.int32)):
        with pytest.raises(PlanError, match="32-bit integers"):
            unpack(words, 4)
    for values in (torch.zeros(8, 4, 2, dtype=torch.uint8), torch.zeros(8, 4)):
        with pytest.raises(PlanError, match="matrix of bytes"):
            pack(values, 4)
