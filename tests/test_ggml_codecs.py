"""ggml's block types: the bytes of other tools' quantizers, the reference, and its faster twins.

GOLDEN was made by ggml_quantize_chunk of llama-cpp-python 0.3.36 (libggml-base.so, x86-64, no fused multiply-add) on
`golden_rows()`: SHA-256 of the blocks, and of their dequantized float32 values, shortened.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.backends import Backend
from quantkit.codecs import CODECS, GGML_TYPES
from quantkit.errors import PlanError

BLOCKS = [name for name in GGML_TYPES if name not in ("F32", "F16", "BF16")]
GOLDEN = {
    ("Q4_0", False): ("c6448287b36c9b993fce1039f448b43f", "623f3c7e6bd9ea39"),
    ("Q4_0", True): ("7fa6b69e3828698a06cd10ba0df911b5", "a2bf6f31936e9991"),
    ("Q4_1", False): ("ae097d66984612ef1214917bb05721a6", "d4cdc57447c520c8"),
    ("Q4_1", True): ("cca54d4f2ace60fd561c118e453dea2a", "b6713b05e5ad3d4b"),
    ("Q5_0", False): ("320646d101691fd43795909a1de2a3d3", "f68dc4e38dc5f6a6"),
    ("Q5_0", True): ("ef6ff5beb238f4b926639d15207e4955", "584631319ccf3d34"),
    ("Q5_1", False): ("1cd876e9d030915094ce2ba95a1bf35c", "674a2244ecc7262e"),
    ("Q5_1", True): ("7bd95b9bc6987ae42cc9a0f34b9c0d44", "bef5fe664ca2f2ff"),
    ("Q8_0", False): ("f2b36f07841d024d6ea611a8cde29af3", "01187eabf526fada"),
    ("Q2_K", False): ("1e2aaf912338f382b1d81fccc75bf8e2", "c04884994502a223"),
    ("Q2_K", True): ("e02822ca584803769c31d100d24c33c7", "e94492cb14b18611"),
    ("Q3_K", False): ("4a20cb3099d6e12417820fbad3cca994", "ae2b2035cf231bb5"),
    ("Q3_K", True): ("8632dd999a9f5b8111d8b06794414c28", "68252c99beae5911"),
    ("Q4_K", False): ("1b33f927fe8fd96a606cd99aae2cb0dd", "23eb0e3c8abd6994"),
    ("Q4_K", True): ("5603b04328fc3be120bbe71eb51fe2cd", "5c8502370a5eb332"),
    ("Q5_K", False): ("a3f40a9e66acf1ee41bc96a382d997ec", "8ef8dbf028dfcff5"),
    ("Q5_K", True): ("9a89e87874dfd462a46aef49e63df1d5", "0b9123199f8825c2"),
    ("Q6_K", False): ("f221fbeb8f92d79f1b7b5c2aeced46d8", "73a5aa17a15c03ce"),
    ("Q6_K", True): ("61e03af98c0ac5fc102010415707b737", "2c1e599df4aa7f5d"),
    ("IQ4_NL", False): ("0e0509fba9d25b581a655574a0928889", "f316d7a06f779ac9"),
    ("IQ4_NL", True): ("8ab7f383efcb746cb86b9afdb74fb244", "3375dc4f9d12680c"),
    ("IQ4_XS", False): ("05ef8e4a2c31ed12fa3eb6028d8182ab", "06d8a0bb234ab9aa"),
    ("IQ4_XS", True): ("c5610b417ad933a757518d675e0ac86e", "a0157f731241e39e"),
    ("MXFP4", False): ("ff9c110a4f787863e1ff2693453b8e38", "6e4e5d18dac0fc62"),
}
KINDS = ("normal", "heavy", "zero", "constant", "subnormal", "tiny", "outlier", "sparse", "positive", "mixed")


def golden_rows() -> tuple[torch.Tensor, torch.Tensor]:
    i = torch.arange(1024)
    j = torch.arange(512)
    rows = (((31 * i * i + 17 * i) % 257 - 128) / 256).to(torch.float32).reshape(2, 512)
    return rows, ((29 * j) % 64 / 16).to(torch.float32)


def make_rows(kind: str, columns: int, seed: int = 0) -> torch.Tensor:
    """Return seven rows of a kind; seven, so that a tile of lanes is not full."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((7, columns))
    if kind == "heavy":
        x = rng.standard_t(2, (7, columns))
    elif kind == "zero":
        x = np.zeros((7, columns))
    elif kind == "constant":
        x = 0.37 * np.sign(rng.standard_normal((7, 1))) * np.ones((7, columns))
    elif kind == "outlier":
        x[:, ::97] *= 300
    elif kind == "sparse":
        x *= rng.random((7, columns)) < 0.03
    elif kind == "mixed":
        x *= np.exp(3 * rng.standard_normal((7, columns // 32))).repeat(32, 1)
    scale = {"subnormal": 1e-39, "tiny": 1e-8}.get(kind, 1.0)
    return torch.from_numpy((np.abs(x) if kind == "positive" else x * scale).astype(np.float32))


def make_importance(columns: int) -> torch.Tensor:
    return torch.from_numpy(np.exp(1.5 * np.random.default_rng(1).standard_normal(columns)).astype(np.float32))


def encoders(name: str) -> list[Any]:
    return [CODECS[name].encode, Backend(torch.device("cpu"), 2).op(name, CODECS[name].encode)]


@pytest.mark.parametrize(("name", "weighted"), GOLDEN)
def test_golden_bytes(name: str, weighted: bool) -> None:
    rows, importance = golden_rows()
    for encode in encoders(name):
        data = encode(rows, importance if weighted else None)
        values = CODECS[name].decode(data)
        digests = [hashlib.sha256(v.contiguous().numpy().tobytes()).hexdigest() for v in (data, values)]
        assert (digests[0][:32], digests[1][:16]) == GOLDEN[name, weighted]


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("kind", KINDS)
def test_twins_write_the_references_bytes_and_ours_decode_as_ggufs(name: str, kind: str) -> None:
    rows = make_rows(kind, 1280)
    codec = CODECS[name]
    for importance in (None, make_importance(1280)):
        reference, fast = (encode(rows, importance) for encode in encoders(name))
        assert torch.equal(reference, fast)
        theirs = gguf.dequantize(reference.numpy(), gguf.GGMLQuantizationType(codec.type_id))
        np.testing.assert_array_equal(codec.decode(reference).numpy(), theirs)


def portable_ggml() -> Any:
    spec = importlib.util.find_spec("llama_cpp")
    path = Path(spec.submodule_search_locations[0]) / "lib" / "libggml-base.so" if spec and spec.submodule_search_locations else None
    if path is None or not path.exists():
        pytest.skip("llama-cpp-python is not installed")
    library = ctypes.CDLL(str(path))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, long, long, long, pointer]
    return library


@pytest.mark.parametrize("name", BLOCKS)
def test_bytes_are_those_of_llama_cpp(name: str) -> None:
    codec, ggml = CODECS[name], portable_ggml()
    for kind in KINDS:
        if (name, kind) == ("MXFP4", "subnormal"):
            continue  # there llama.cpp's exponent wraps around
        rows = make_rows(kind, 1024, seed=3)
        for importance in (None, make_importance(1024)):
            theirs = np.empty((7, codec.row_bytes(1024)), np.uint8)
            weight = None if importance is None else importance.numpy().ctypes.data
            ggml.ggml_quantize_chunk(codec.type_id, rows.numpy().ctypes.data, theirs.ctypes.data, 0, 7, 1024, weight)
            np.testing.assert_array_equal(encoders(name)[1](rows, importance).numpy(), theirs, err_msg=kind)


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(BLOCKS), rows=st.integers(0, 40), blocks=st.integers(1, 5), threads=st.integers(1, 3), seed=st.integers(0, 9))
def test_any_shape_and_any_number_of_threads(name: str, rows: int, blocks: int, threads: int, seed: int) -> None:
    codec = CODECS[name]
    x = torch.randn(rows, blocks * codec.block, generator=torch.Generator().manual_seed(seed))
    data = Backend(torch.device("cpu"), threads).op(name, codec.encode)(x)
    assert torch.equal(data, codec.encode(x))
    assert codec.decode(data).shape == x.shape


def test_chunks_of_many_rows_are_cut_at_rows() -> None:
    """Importance of Q4_0 needs the mean square of whole rows, whatever the chunk a row falls into."""
    rows, importance = torch.randn(301, 4096, generator=torch.Generator().manual_seed(0)), make_importance(4096)
    reference, fast = (encode(rows, importance) for encode in encoders("Q4_0"))
    assert torch.equal(reference, fast)


@pytest.mark.parametrize("name", ["F16", "BF16", "F32"])
def test_floats_are_torchs(name: str) -> None:
    rows, dtype = torch.randn(3, 40), {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[name]
    assert torch.equal(CODECS[name].decode(CODECS[name].encode(rows)), rows.to(dtype).to(torch.float32))


def test_a_row_that_blocks_do_not_fill_is_refused() -> None:
    with pytest.raises(PlanError, match="256, which do not divide 576"):
        CODECS["Q4_K"].row_bytes(576)


def test_more_bits_and_importance_fit_better() -> None:
    rows, importance = make_rows("heavy", 1024), make_importance(1024)

    def error(name: str, weighted: bool) -> float:
        values = CODECS[name].decode(encoders(name)[1](rows, importance if weighted else None))
        return float(((values - rows).square() * importance).sum())

    order = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0"]
    errors = [error(name, True) for name in order]
    assert errors == sorted(errors, reverse=True)
    assert all(error(name, True) < error(name, False) for name in order[:4])


def test_a_cache_that_cannot_be_written_is_said_and_not_fatal() -> None:
    """In a process of its own, where Numba finds no folder for compiled code."""
    import subprocess
    import sys

    code = (
        "import numba.core.caching as c; c.CacheImpl._locator_classes = []; import torch\n"
        "from quantkit.backends import Backend; from quantkit.codecs import CODECS; codec = CODECS['Q8_0']\n"
        "b = Backend(torch.device('cpu'), 1); x = torch.randn(3, 64)\n"
        "assert torch.equal(b.op('Q8_0', codec.encode)(x), codec.encode(x)); print(b.reasons['Q8_0'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "compiled anew each time" in done.stdout
