"""One operation, three computers: the PyTorch reference, Numba, and the CUDA sources run on the CPU. Equal bytes, whatever the order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_shim import COMPILER, ShimLauncher
from torch import Tensor

from quantkit.backends import KERNELS, Backend
from quantkit.backends.cuda import launch, nvrtc
from quantkit.backends.cuda.ops import Ops
from quantkit.codecs import CODECS
from quantkit.codecs.affine import Affine
from quantkit.errors import BackendError, PlanError, UsageError
from quantkit.formats import _bits
from quantkit.infer import cache_int8
from quantkit.infer.attention import Pages
from quantkit.infer.linear import planes_of
from quantkit.methods._rounding import make_search, round_reference
from quantkit.methods.gptq import columns_reference
from quantkit.tensors import QuantTensor

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the CUDA sources are compiled as C++ here, and there is no g++")
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
NAMES = ("reference", "cpu", "cuda-shim")
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Ops:
    return Ops(ShimLauncher(tmp_path_factory.mktemp("kernels")))


@pytest.fixture
def compute(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return op(computer, name, reference): the operation as that computer does it."""

    def op(computer: str, name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
        if computer == "reference":
            return reference
        if computer == "cpu":
            kernel: Callable[..., Any] = KERNELS[f"cpu/{name}"](2)
            return kernel
        ops: Ops = request.getfixturevalue("shim")
        if name in K_TYPES:
            return lambda rows, importance=None: ops.encode(CODECS[name], rows, importance)
        found: Callable[..., Any] = getattr(ops, name)
        return found

    return op


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def factor_of(n: int, seed: int) -> Tensor:
    x = noise(4 * n, n, seed=seed) @ (torch.eye(n) + 0.2 * noise(n, n, seed=seed + 1))
    inverse = torch.linalg.inv((x.T @ x / len(x) + 0.05 * torch.eye(n)).double())
    return torch.linalg.cholesky(inverse, upper=True).float()


@pytest.mark.parametrize("computer", NAMES)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("n", "m"), [(32, 1), (96, 33), (160, 64), (1024, 7)])
def test_fields_in_words(computer: str, bits: int, n: int, m: int, compute: Callable[..., Any]) -> None:
    values = torch.randint(0, 1 << bits, (n, m), dtype=torch.uint8, generator=torch.Generator().manual_seed(n + m))
    pack, unpack = compute(computer, "pack_fields", _bits.pack_reference), compute(computer, "unpack_fields", _bits.unpack_reference)
    for order in (_bits.IN_ORDER, AWQ):
        placed = values.view(-1, 8, m)[:, list(order)].reshape(n, m).long()  # by the definition: field k of a column at bit k * bits
        stream = torch.stack([(placed >> bit) & 1 for bit in range(bits)], 1).reshape(n * bits, m)
        wanted = (stream.view(-1, 32, m) << torch.arange(32)[:, None]).sum(1)
        wanted = torch.where(wanted >= 1 << 31, wanted - (1 << 32), wanted).to(torch.int32)
        for view in (values, values.T.contiguous().T, values.repeat(1, 2)[:, :m]):
            for last in (False, True):
                words = pack(view, bits, order, last)
                assert words.is_contiguous() and torch.equal(words, wanted.T if last else wanted)
                back = unpack(words.T if last else words, bits, order, last)
                assert back.is_contiguous() and torch.equal(back, values.T if last else values)


def test_fields_that_do_not_fill_words_are_refused() -> None:
    with pytest.raises(PlanError, match="33 fields of 3 bits"):
        _bits.pack(torch.zeros(33, 2, dtype=torch.uint8), 3)
    with pytest.raises(PlanError, match="words do not hold"):
        _bits.unpack(torch.zeros(2, 2, dtype=torch.int32), 3)


@pytest.mark.parametrize("computer", NAMES[1:])
@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "dtype"),
    [(4, 64, True, "float16"), (4, 32, False, "bfloat16"), (3, 128, True, "float32"), (2, 16, False, "float16"), (8, 64, True, "bfloat16")],
)
def test_the_column_loop(computer: str, bits: int, group: int, symmetric: bool, dtype: str, compute: Callable[..., Any]) -> None:
    codec = Affine(bits, group, symmetric, dtype)
    columns = compute(computer, "gptq_columns", columns_reference)
    for rows, n in ((5, 128), (9, group)):
        weight, factor, importance = noise(rows, n, seed=n), factor_of(n, bits), noise(n, seed=3).square() + 0.1
        for search in (make_search(symmetric, True, True), make_search(symmetric, False, False)):
            wanted = columns_reference(weight, factor, importance, codec, group, search)
            found = columns(weight, factor, importance, codec, group, search)
            for ours, theirs in zip(found, wanted, strict=True):
                assert torch.equal(ours, theirs)
        grid = codec.grid(wanted[2], wanted[3])
        for ours, theirs in zip(columns(weight, factor, importance, codec, group, search, grid), wanted, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("computer", NAMES[1:])
@pytest.mark.parametrize(("bits", "group", "symmetric"), [(4, 64, True), (4, 32, False), (3, 128, False), (2, 16, True)])
def test_rounding_on_searched_grids(computer: str, bits: int, group: int, symmetric: bool, compute: Callable[..., Any]) -> None:
    codec = Affine(bits, group, symmetric, "float16")
    weight, energy = noise(11, 256, seed=bits), noise(256, seed=4).square() + 0.1
    half = noise(256 // group, group, 2 * group, seed=5)
    tiles = half @ half.transpose(1, 2) / group
    for given in (tiles, None):
        search = make_search(symmetric, True, True)
        wanted = round_reference(weight, codec, search, energy, given)
        for ours, theirs in zip(
            compute(computer, "round_affine", round_reference)(weight, codec, search, energy, given), wanted, strict=True
        ):
            assert torch.equal(ours, theirs)


def k_rows() -> Tensor:
    rows = noise(6, 512, seed=9)
    rows[1] *= 1e-3
    rows[2, :256], rows[2, 256:300] = 0, 0
    rows[3] = rows[3].abs()
    rows[4] = 1.0
    rows[5, ::7] *= 30
    return rows


@pytest.mark.parametrize("computer", NAMES[1:])
@pytest.mark.parametrize("kind", K_TYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_blocks_of_ggml(computer: str, kind: str, weighted: bool, compute: Callable[..., Any]) -> None:
    codec, rows = CODECS[kind], k_rows()
    importance = noise(512, seed=10).square() + 0.01 if weighted else None
    wanted = codec.encode(rows, importance)
    found = compute(computer, kind, codec.encode)(rows, importance)
    assert torch.equal(found, wanted), (found != wanted).nonzero()[:5].tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_products_from_4_bit_groups(dtype: torch.dtype, rows: int, shim: Ops) -> None:
    for symmetric in (True, False):
        codes = torch.randint(0, 16, (13, 256), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        scale = (noise(13, 4, seed=2) * 0.1).to(torch.float16).float()
        zero = torch.full((13, 4), 8, dtype=torch.uint8) if symmetric else torch.randint(0, 16, (13, 4), dtype=torch.uint8)
        tensor = QuantTensor(codes, {"scale": scale, "zero": zero}, Affine(4, 64, symmetric))
        planes, x = planes_of(tensor), noise(rows, 256, seed=3).to(dtype)
        assert planes is not None
        close(shim.multiply_groups(x, planes), x.double() @ tensor.dequantize().double().T)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("rows", [1, 5])
def test_products_from_blocks(kind: str, rows: int, shim: Ops) -> None:
    codec = CODECS[kind]
    packed, x = codec.encode(noise(17, 768, seed=4)), noise(rows, 768, seed=5).to(torch.bfloat16)
    close(shim.multiply_blocks(kind, x, packed), x.double() @ codec.decode(packed).double().T)
    one = shim.multiply_blocks(kind, x[:1], packed)
    assert torch.equal(one, shim.multiply_blocks(kind, x, packed)[:1])  # a row does not depend on the others


def close(found: Tensor, wanted: Tensor) -> None:
    assert (found.double() - wanted).abs().max() <= 1e-3 * wanted.abs().max()


def test_what_a_product_cannot_read_is_refused(shim: Ops) -> None:
    packed = CODECS["Q8_0"].encode(noise(4, 64))
    for x in (noise(1, 64), noise(9, 64).to(torch.bfloat16), noise(1, 48).to(torch.bfloat16)):
        with pytest.raises(UsageError, match="multiplies 1 to 8 rows"):
            shim.multiply_blocks("Q8_0", x, packed)
    with pytest.raises(UsageError, match="contiguous"):
        shim.multiply_blocks("Q8_0", noise(64, 1).to(torch.bfloat16).T.expand(2, 64), packed)
    with pytest.raises(UsageError, match="64 tokens"):
        shim.quantize_page(torch.zeros(2, 1, 32, 16, dtype=torch.float16))


@pytest.mark.parametrize(("heads", "size"), [(1, 16), (3, 64), (2, 256)])
def test_pages_of_8_bits(heads: int, size: int, shim: Ops) -> None:
    tails = [(noise(2, heads, 64, size, seed=seed) * 3).to(torch.float16) for seed in range(3)]
    tails[1][0, 0, :, 3] = 0
    pages = Pages(
        torch.zeros(3, heads, size, 64, dtype=torch.int8), torch.zeros(3, heads, 64, size, dtype=torch.int8),
        torch.zeros(3, heads, size, dtype=torch.float16), torch.zeros(3, heads, 64, dtype=torch.float16),
    )  # fmt: skip
    for page, tail in enumerate(tails):
        cache_int8._encode(pages, page, tail)
        held = (pages.keys[page], pages.values[page], pages.key_scale[page], pages.value_scale[page])  # type: ignore[index]
        for ours, theirs in zip(shim.quantize_page(tail), held, strict=True):
            assert torch.equal(ours, theirs)
    keys, values = shim.gather_pages(pages, torch.tensor([2, 0]))
    for place, page in enumerate((2, 0)):
        key, value = cache_int8._decode(pages, page)
        part = slice(64 * place, 64 * place + 64)
        assert torch.equal(keys[:, part], key.transpose(1, 2).to(torch.bfloat16)) and torch.equal(values[:, part], value.to(torch.bfloat16))


def test_no_result_depends_on_the_order_of_threads(shim: Ops) -> None:
    launcher: Any = shim.on
    codec, weight = CODECS["Q3_K"], k_rows()[:2]
    values = torch.randint(0, 8, (96, 40), dtype=torch.uint8)
    before = launcher.seed
    try:
        found = []
        for launcher.seed in (1, 2, 3):
            found.append((shim.encode(codec, weight, torch.ones(512)), shim.pack_fields(values, 3, _bits.IN_ORDER, True)))
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    finally:
        launcher.seed = before


PLANTED = {
    "a nibble too far": ("pack", "i32 shift = field * bits - 32 * w;", "i32 shift = (field + 1) * bits - 32 * w;"),
    "no barrier after loading": ("pack", "    __syncthreads();\n    i32 each", "    i32 each"),
    "a word is not written": ("pack", "m) continue;\n        u32 word", "m || w == 3) continue;\n        u32 word"),
    "the row is read before it is there": ("columns", "= work[t];\n                    __syncwarp();", "= work[t];"),
    "the triangle is read before it is there": ("columns", "    __syncthreads();\n    i32 lane", "    i32 lane"),
    "one column is left out": ("columns", "if (j > c && j < n) work[t]", "if (j > c + 1 && j < n) work[t]"),
    "scales are read before they are there": (
        "k_quants", "    room.first[room.sub] = found.scale;\n    __syncthreads();", "    room.first[room.sub] = found.scale;"
    ),
    "a step of the search is left out": ("k_quants", "for (i32 k = -9; k < 10; ++k)", "for (i32 k = -8; k < 10; ++k)"),
    "a barrier that not all reach": (
        "cache", "    i32 head = (i32)blockIdx.x, w", "    if (threadIdx.x == 3) __syncthreads();\n    i32 head = 0, w"
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, tmp_path: Path) -> None:
    module, before, after = PLANTED[bug]
    text = nvrtc.source(module)
    assert text.count(before) >= 1
    ops = Ops(ShimLauncher(tmp_path, changed={module: text.replace(before, after)}))
    with pytest.raises((AssertionError, RuntimeError)):
        if module == "pack":
            values = torch.randint(0, 16, (96, 40), dtype=torch.uint8)
            assert torch.equal(ops.pack_fields(values, 4, _bits.IN_ORDER, False), _bits.pack_reference(values, 4, _bits.IN_ORDER, False))
        elif module == "columns":
            search, codec = make_search(True, True, True), Affine(4, 16, True)
            given = (noise(9, 64), factor_of(64, 1), torch.ones(64), codec, 16, search)
            assert all(torch.equal(a, b) for a, b in zip(ops.gptq_columns(*given), columns_reference(*given), strict=True))
        elif module == "k_quants":
            assert torch.equal(ops.encode(CODECS["Q6_K"], noise(12, 256, seed=2)), CODECS["Q6_K"].encode(noise(12, 256, seed=2)))
        else:
            ops.quantize_page(torch.zeros(2, 1, 64, 16, dtype=torch.float16))


@pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
@pytest.mark.parametrize("module", nvrtc.MODULES)
def test_every_kernel_compiles_without_spills_or_warnings(module: str, architecture: str) -> None:
    try:
        nvrtc.toolkit()
    except BackendError as error:
        pytest.skip(str(error))
    built = nvrtc.compile_module(module, architecture)
    rows = nvrtc.resources(built.log)
    kernels = re.findall(r"^QK_KERNEL[^(]*\([^)]*\)\s+(\w+)\(", nvrtc.source(module), re.MULTILINE)
    assert [row.kernel for row in rows] == sorted(kernels)
    assert all(row.spilled == 0 and 0 < row.registers <= 168 and row.shared <= 48 << 10 for row in rows), rows


def test_the_gpu_script_runs_every_operation(shim: Ops, capsys: pytest.CaptureFixture[str]) -> None:
    """What it does on a GPU, on the CPU's fibers and at a small size."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("gpu", Path(__file__).parent / "bench" / "gpu.py")
    assert spec is not None and spec.loader is not None
    gpu = importlib.util.module_from_spec(spec)
    sys.modules["gpu"] = gpu
    spec.loader.exec_module(gpu)
    bench = gpu.Bench(shim.on, 1)
    gpu.run(bench, 256, 12, 3)
    wrong = [row.operation for row in bench.rows if not row.right]
    assert len(bench.rows) == 36 and not wrong, wrong


def test_sanitizers_see_nothing(tmp_path: Path) -> None:
    """The kernels' own tests again, compiled with the address and undefined-behaviour sanitizers, in a process of their own."""
    runtime = subprocess.run([str(COMPILER), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
    if not Path(runtime).is_file():
        pytest.skip("g++ has no address sanitizer here")
    script = Path(__file__).parent / "shim" / "sanitized.py"
    environment = {**os.environ, "LD_PRELOAD": str(Path(runtime).resolve()), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 0 and "all equal" in done.stdout, done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize("why", ["no package", "no device", "an old GPU", "an old driver", "a compiler that fails"])
def test_without_cuda_the_next_backend_does_it_and_says_so_once(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "no package":
        monkeypatch.setitem(sys.modules, "cuda.core", None)
        text = "pip install 'quantkit\\[cuda\\]'"
    elif why == "no device":
        text = "torch .* (is built without CUDA|sees no CUDA device)"
    else:
        text = {
            "an old GPU": "Card has compute capability 7.5; the kernels need 8.0",
            "an old driver": "the driver does not load the kernels",
            "a compiler that fails": "pack.cu does not compile for sm_90: .*nonsense",
        }[why]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5) if why == "an old GPU" else (9, 0))
    if why == "an old driver":
        monkeypatch.setattr(nvrtc, "load_cubin", lambda module, architecture: b"no cubin")
    if why == "a compiler that fails":
        monkeypatch.setattr(nvrtc, "CACHE", "/nowhere")
        monkeypatch.setattr(nvrtc, "source", lambda module: 'extern "C" __global__ void f() { nonsense(); }')
    if why != "no package":
        pytest.importorskip("cuda.core")
    launch.launcher.cache_clear()
    backend = Backend(torch.device("cuda"), 2)
    for name in ("gptq_columns", "round_affine"):
        assert backend.op(name, round_reference) is round_reference
        assert re.search(text, backend.reasons[name])
    assert len(backend.notices) == 1 and backend.notices[0].startswith("plain PyTorch instead of CUDA kernels")
    with pytest.raises(BackendError, match=f"--backend cuda: .*{text}"):
        Backend(torch.device("cuda"), 2, must=True).op("gptq_columns", columns_reference)


def test_backend_cuda_is_an_error_without_a_device(run_cli: Callable[..., Any], llama: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, _, err = run_cli("rtn", llama, "-o", tmp_path / "out", "--backend", "cuda")
    assert code == 1 and "--backend cuda: torch" in err and not (tmp_path / "out").exists()
    assert run_cli("rtn", llama, "-o", tmp_path / "out", "--backend", "cuda", "--device", "cpu")[0] == 2
    assert run_cli("rtn", llama, "-o", tmp_path / "out", "--backend", "reference", "-q")[0] == 0


def test_doctor_says_what_works_and_what_does_not(run_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9" if name == "llm-quantkit" else real(name))
    code, document, err = run_cli("doctor", "--json")
    assert code == 0 and [row["backend"] for row in document["backends"]] == ["reference", "cpu", "cuda"]
    assert "gptq_columns" in document["backends"][1]["operations"]
    if not torch.cuda.is_available():
        assert not document["backends"][2]["works"] and "CUDA" in document["backends"][2]["reason"]
    assert any("llm-quantkit 0.9 installs a command named quantkit" in text for text in document["problems"]) and "llm-quantkit" in err


def test_a_cubin_made_ahead_of_time_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pack.sm_90.cubin").write_bytes(b"made by nvcc")
    monkeypatch.setattr(nvrtc, "data_folder", lambda name: tmp_path)
    assert nvrtc.load_cubin("pack", "sm_90") == b"made by nvcc"


def test_cubins_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.core")
    built = nvrtc.load_cubin("cache", "sm_80", tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".cubin"]
    monkeypatch.setattr(nvrtc, "compile_module", lambda *words: pytest.fail("compiled again"))
    assert nvrtc.load_cubin("cache", "sm_80", tmp_path) == built
