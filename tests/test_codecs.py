"""Codecs of safetensors layouts against golden values of the libraries that read them, and against their own definitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.codecs._activations import Activation
from quantkit.codecs._levels import pack_nibbles, round_e2m1, unpack_nibbles, values_e2m1
from quantkit.codecs.bnb import Bnb4, RowInt8, dynamic_table
from quantkit.codecs.float8 import Float8
from quantkit.codecs.fp4 import Fp4
from quantkit.errors import SourceError, UsageError
from quantkit.formats import FORMATS
from quantkit.formats._safetensors import TensorInfo, write_file
from quantkit.formats.store import SafetensorsStore
from quantkit.source import READERS
from quantkit.tensors import QuantTensor

GOLDEN = Path(__file__).parent / "golden" / "libraries.safetensors"


def golden_weight(out: int, columns: int) -> torch.Tensor:
    """The weight that the golden file was made from: exact in float32, rows of different size, a block of zeros."""
    i = torch.arange(out * columns)
    value = ((i * i * 31 + i * 17) % 257 - 128).float() / 1024 * 2.0 ** ((i // columns) % 5 - 2).float()
    weight = value.view(out, columns).contiguous()
    weight[0, :64] = 0
    return weight


def golden(prefix: str) -> dict[str, torch.Tensor]:
    store = SafetensorsStore([GOLDEN])
    return {n.removeprefix(prefix + "."): store.read(n) for n in store.names() if n.startswith(prefix + ".")}


def reopened(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Any:
    write_file(folder / "model.safetensors", tensors)
    return READERS[config["quant_method"]](SafetensorsStore([folder / "model.safetensors"]), config)[0]


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True])
def test_bitsandbytes_4_bits_match_the_library(kind: str, double: bool, tmp_path: Path) -> None:
    theirs = golden(kind + ("_double" if double else ""))
    values = theirs.pop("values")
    store = reopened(tmp_path, {f"m.{name}": value for name, value in theirs.items()}, {"quant_method": "bitsandbytes"})
    torch.testing.assert_close(store.read("m.weight"), values, rtol=1e-6, atol=0)
    ours = Bnb4(kind, double, "float32").round(golden_weight(8, 128), False, None)
    packed = FORMATS["bitsandbytes"].pack("m", ours)
    assert torch.equal(packed["m.weight"], theirs["weight"])
    assert torch.equal(packed["m.weight.quant_map"], theirs["weight.quant_map"])
    state = f"weight.quant_state.bitsandbytes__{kind}"
    assert bytes(packed[f"m.{state}"].numpy()).rstrip() == bytes(theirs[state].numpy())
    if double:
        assert torch.equal(dynamic_table(), theirs["weight.nested_quant_map"])
        # The library's CPU code looks absmax up on a coarse raster: a code may be a neighbour's.
        assert (packed["m.weight.absmax"].int() - theirs["weight.absmax"].int()).abs().max() <= 1
        torch.testing.assert_close(packed["m.weight.nested_absmax"], theirs["weight.nested_absmax"])
    else:
        assert torch.equal(packed["m.weight.absmax"], theirs["weight.absmax"])


def test_bitsandbytes_8_bits_match_the_library(tmp_path: Path) -> None:
    theirs = golden("int8")
    values = theirs.pop("values")
    store = reopened(
        tmp_path, {f"m.{name}": value for name, value in theirs.items()}, {"quant_method": "bitsandbytes", "load_in_8bit": True}
    )
    torch.testing.assert_close(store.read("m.weight"), values, rtol=1e-6, atol=0)
    packed = FORMATS["bitsandbytes"].pack("m", RowInt8().round(golden_weight(8, 128), False, None))
    for name in ("weight", "SCB", "weight_format"):  # the weight is exact in float16, through which the library takes it
        assert torch.equal(packed[f"m.{name}"], theirs[name]), name


def test_fp8_blocks_match_transformers(tmp_path: Path) -> None:
    theirs = golden("fp8")
    tensors = {"m.weight": theirs["weight"].view(torch.float8_e4m3fn), "m.weight_scale_inv": theirs["weight_scale_inv"]}
    store = reopened(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [32, 64]})
    assert torch.equal(store.read("m.weight"), theirs["values"])
    ours = Float8("block", "float32", "dynamic", (32, 64)).round(golden_weight(32, 128), True, None)
    torch.testing.assert_close(ours.params["scale"], theirs["weight_scale_inv"], rtol=3e-7, atol=0)
    assert (ours.codes != theirs["weight"]).float().mean() < 1e-3


@pytest.mark.parametrize(
    ("name", "codec", "kind"),
    [
        ("ct_fp8", Float8("channel"), "float-quantized"),
        ("ct_mxfp4", Fp4("mxfp4"), "mxfp4-pack-quantized"),
        ("ct_nvfp4", Fp4("nvfp4"), "nvfp4-pack-quantized"),
    ],
)
def test_compressed_tensors_floats_match_the_library(name: str, codec: Any, kind: str, tmp_path: Path) -> None:
    theirs = golden(name)
    values = theirs.pop("values")
    packed = FORMATS["compressed-tensors"].pack("m", codec.round(golden_weight(8, 128), False, None))
    for suffix, value in theirs.items():
        ours = packed[f"m.{suffix}"]
        assert torch.equal(ours.view(torch.uint8) if value.dtype == torch.uint8 else ours, value), suffix
    store = reopened(tmp_path, packed, {"quant_method": "compressed-tensors", "format": kind})
    torch.testing.assert_close(store.read("m.weight"), values, rtol=2.0**-8, atol=0)  # the library unpacks 4-bit floats to bfloat16


def test_compressed_tensors_int8_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    theirs = golden("ct_int8")
    values = theirs.pop("values")
    tensors = {f"m.{name}": value for name, value in theirs.items()}
    store = reopened(tmp_path, tensors, {"quant_method": "compressed-tensors", "format": "int-quantized"})
    assert torch.equal(store.read("m.weight"), values)


def test_mxfp4_experts_are_shown_as_transformers_shows_them(tmp_path: Path) -> None:
    theirs = golden("moe")
    tensors = {f"model.layers.0.mlp.experts.{name}": value for name, value in theirs.items() if name != "values"}
    store = reopened(tmp_path, tensors, {"quant_method": "mxfp4"})
    assert store.names() == ["model.layers.0.mlp.experts.gate_up_proj"]
    assert store.info(store.names()[0]) == TensorInfo("F32", (2, 64, 4))
    assert torch.equal(store.read(store.names()[0]), theirs["values"])
    with pytest.raises(SourceError, match="no MXFP4 stack"):
        READERS["mxfp4"](reopened(tmp_path, {"x_blocks": torch.zeros(2, 3, dtype=torch.uint8)}, {"quant_method": "mxfp4"}), {})


def test_e2m1_rounds_to_nearest_and_ties_to_even() -> None:
    x = torch.arange(-900, 901) / 128
    values = values_e2m1(round_e2m1(x))
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    distance = (x.abs()[:, None] - levels).abs()
    assert torch.equal((values.abs() - x.abs()).abs(), distance.amin(1))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert values_e2m1(round_e2m1(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4]
    codes = torch.randint(0, 16, (3, 32), dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


CODECS = [
    Float8("tensor"),
    Float8("channel", "bfloat16"),
    Float8("block"),
    Fp4("mxfp4"),
    Fp4("nvfp4"),
    Bnb4("nf4"),
    Bnb4("fp4", False),
    RowInt8(),
]


@settings(max_examples=40, deadline=None)
@given(
    codec=st.sampled_from(CODECS),
    rows=st.integers(1, 5),
    blocks=st.integers(1, 3),
    size=st.sampled_from([1e-6, 0.02, 30.0]),
    seed=st.integers(0, 99),
)
def test_what_is_packed_comes_back_and_is_near(
    codec: Any, rows: int, blocks: int, size: float, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shape = (8 * rows, 64 * blocks)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size
    weight[0, :64] = 0
    form = FORMATS["bitsandbytes" if isinstance(codec, (Bnb4, RowInt8)) else "compressed-tensors"]
    tensor = codec.round(weight, True, None)
    packed = form.pack("m", tensor)
    expected = form.layout("m", shape, codec, False)
    from quantkit.formats._safetensors import CODES as DTYPE_CODES

    assert {n: TensorInfo(DTYPE_CODES[t.dtype], tuple(t.shape)) for n, t in packed.items()} == expected
    config = {"quant_method": "bitsandbytes", "load_in_8bit": isinstance(codec, RowInt8)}
    if form.name != "bitsandbytes":
        config = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    back = reopened(tmp_path_factory.mktemp("m"), packed, config).quant("m")
    assert torch.equal(back.codes, tensor.codes)
    assert all(torch.equal(back.params[name].float(), value.float()) for name, value in tensor.params.items())
    error = (back.dequantize() - weight).norm() / weight.norm()
    assert error < {8: 0.06, 4: 0.25}[codec.bits]


@pytest.mark.parametrize("codec", [Fp4("mxfp4"), Fp4("nvfp4"), Bnb4("nf4"), Bnb4("fp4")], ids=lambda c: c.name)
def test_the_search_is_never_worse(codec: Any) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) ** 3
    errors = [float((codec.round(weight, search, None).dequantize() - weight).square().sum()) for search in (True, False)]
    assert errors[0] < errors[1]


def test_fused_weights_share_what_they_must() -> None:
    parts = [torch.randn(16, 64) * size for size in (0.1, 1.0)]
    for codec, name in ((Fp4("nvfp4"), "global_scale"), (Float8("tensor"), "scale")):
        both = [codec.round(part, True, codec.share(parts)).params[name] for part in parts]
        assert torch.equal(*both)
        assert not torch.equal(codec.round(parts[0], True, None).params[name], both[0])


def test_activations_are_rounded_as_compressed_tensors_does() -> None:
    x = torch.randn(2, 3, 256)
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    assert torch.equal(Activation("int8").apply(x), (x / scale).round().clamp(-128, 127) * scale)
    static = Activation("int8", static=True)
    assert torch.equal(static.apply(x, static.static_scale(2.0)), (x / (2 / 127.5)).round().clamp(-128, 127) * (2 / 127.5))
    grouped = Activation("fp8", group=128).apply(x)
    assert (grouped - x).abs().max() < 0.07 * x.abs().max() and not torch.equal(grouped, x)


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(UsageError, match="no static activations"):
        Float8("block", "float32", "static")
    with pytest.raises(UsageError, match="Known: tensor, channel, block"):
        Float8("row")
    assert "do not divide 72 columns" in Bnb4("nf4").refuse((8, 72))
    assert "do not divide 40 columns" in Fp4("nvfp4").refuse((8, 40))
    assert "do not divide 96 columns" in Float8("block", "float32", "dynamic").refuse((8, 96))


def test_a_bitsandbytes_state_is_not_believed(tmp_path: Path) -> None:
    theirs = golden("nf4")
    state = "weight.quant_state.bitsandbytes__nf4"
    for damaged in (
        b"[1]",
        b"{}",
        b'{"quant_type": "nf4", "blocksize": 0, "dtype": "float32", "shape": [8, 128]}',
        bytes(theirs[state].numpy()).replace(b"128", b"999"),
    ):
        tensors = {f"m.{name}": value for name, value in theirs.items() if name != "values"}
        tensors[f"m.{state}"] = torch.frombuffer(bytearray(damaged), dtype=torch.uint8)
        with pytest.raises(SourceError):
            reopened(tmp_path, tensors, {"quant_method": "bitsandbytes"})


def test_a_quant_tensor_of_another_shape_of_scales_is_refused(tmp_path: Path) -> None:
    tensors = {"m.weight": torch.zeros(8, 128, dtype=torch.int8), "m.weight_scale": torch.ones(8, 1)}
    store = reopened(tmp_path, tensors, {"quant_method": "compressed-tensors", "format": "int-quantized"})
    assert isinstance(store.quant("m"), QuantTensor)
    tensors = {"m.weight": torch.zeros(8, 128).to(torch.float8_e4m3fn), "m.weight_scale": torch.ones(3, 2)}
    store = reopened(tmp_path, tensors, {"quant_method": "compressed-tensors", "format": "float-quantized"})
    with pytest.raises(SourceError, match="are no blocks"):
        store.quant("m")
