"""convert: the same codes in another container, there and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from quantkit.formats._gguf import read_header
from quantkit.source import resolve

Run = Callable[..., Any]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetry", ["--sym", "--asym"])
def test_there_and_back_is_the_identity(bits: int, symmetry: str, tmp_path: Path, run_cli: Run) -> None:
    model = make_model(tmp_path / "m", hidden_size=96, intermediate_size=192, num_attention_heads=6, num_key_value_heads=6)
    assert run_cli("rtn", model, "-o", tmp_path / "a", "--bits", bits, "--group-size", 32, symmetry, "-q")[0] == 0
    code, document, err = run_cli("convert", tmp_path / "a", tmp_path / "b", "--to", "compressed-tensors", "--json")
    assert code == 0, err
    assert document["modules"] == 21
    assert run_cli("diff", tmp_path / "a", tmp_path / "b", "--json")[1]["tensors"] == []
    code, _, err = run_cli("convert", tmp_path / "b", tmp_path / "c", "--to", "gptq")
    assert code == 0, err
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "c"))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_overrides_and_kept_layers_survive(llama: Path, tmp_path: Path, run_cli: Run) -> None:
    words = ("--group-size", 16, "--override", "down_proj=bits:8", "--exclude", r"layers\.1\.mlp\.up_proj")
    assert run_cli("rtn", llama, "-o", tmp_path / "a", *words, "-q")[0] == 0
    assert run_cli("convert", tmp_path / "a", tmp_path / "b")[0] == 0
    a, b = (run_cli("inspect", tmp_path / name, "--json")[1]["tensors"] for name in ("a", "b"))
    assert {t["name"]: t["scheme"] for t in a} == {t["name"]: t["scheme"] for t in b}
    config = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    assert sorted(config["ignore"]) == ["lm_head", "model.layers.1.mlp.up_proj"]
    assert len(config["config_groups"]) == 2
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(str(tmp_path / "b"), dtype=torch.float32)


def test_what_cannot_be_held_is_refused(llama: Path, text_file: Path, tmp_path: Path, run_cli: Run) -> None:
    words = ("--order", "full", "--group-size", 16, "--calibration", text_file, "--samples", 2, "--seq-len", 32, "-q")
    assert run_cli("gptq", llama, "-o", tmp_path / "q", *words)[0] == 0
    for source, text in ((tmp_path / "q", "scattered over groups"), (llama, "holds no packed weights")):
        code, _, err = run_cli("convert", source, tmp_path / "out")
        assert code == 1
        assert text in err
        assert not (tmp_path / "out").exists()
    code, _, err = run_cli("convert", tmp_path / "q", tmp_path / "out", "--to", "gptq")
    assert code == 1
    assert "already" in err


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    group=st.sampled_from([16, 32, -1]), symmetric=st.booleans(), inner=st.sampled_from([32, 96]), heads=st.sampled_from([1, 2, 4]),
    route=st.sampled_from([("gptq", "awq"), ("awq", "compressed-tensors"), ("compressed-tensors", "awq"), ("awq", "gptq")]),
)  # fmt: skip
def test_awq_there_and_back_is_the_identity(
    group: int, symmetric: bool, inner: int, heads: int, route: tuple[str, str], tmp_path_factory: pytest.TempPathFactory, run_cli: Run
) -> None:
    folder = tmp_path_factory.mktemp("m")
    model = make_model(folder / "m", intermediate_size=inner, num_key_value_heads=heads, head_dim=32, num_hidden_layers=1)
    first, second = route
    grid = ("--group-size", group, "--sym" if symmetric else "--asym", "--bits", 4, "-q")
    assert run_cli("rtn", model, "-o", folder / "a", "--format", first, *grid)[0] == 0
    assert run_cli("convert", folder / "a", folder / "b", "--to", second)[0] == 0
    assert run_cli("convert", folder / "b", folder / "c", "--to", first)[0] == 0
    there, back = (load_file(folder / name / "model.safetensors") for name in ("a", "c"))
    assert there.keys() == back.keys() and all(torch.equal(there[name], back[name]) for name in there)


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 8), ("Q4_0", 4)])
@pytest.mark.parametrize("to", ["compressed-tensors", "gptq"])
def test_gguf_blocks_are_groups_of_integers(kind: str, bits: int, to: str, tmp_path: Path, run_cli: Run) -> None:
    model = make_model(tmp_path / "m", "llama")
    assert run_cli("export-gguf", model, "-o", tmp_path / "a.gguf", "--type", kind, "--pure", "-q", "--pre-tokenizer", "gpt-2")[0] == 0
    code, document, err = run_cli("convert", tmp_path / "a.gguf", tmp_path / "b", "--to", to, "--json")
    assert code == 0 and document["modules"] == 21, err
    code, _, err = run_cli(
        "export-gguf", tmp_path / "b", "-o", tmp_path / "c.gguf", "--type", kind, "--pure", "-q", "--pre-tokenizer", "gpt-2"
    )
    assert code == 0, err
    there, back = (read_header(tmp_path / name) for name in ("a.gguf", "c.gguf"))
    for name in there.tensors:
        if "blk." in name:
            assert there.tensors[name].type_id == back.tensors[name].type_id
            assert there.read(name).tobytes() == back.read(name).tobytes(), name
    store = resolve(str(tmp_path / "a.gguf")).store
    for name in store.names():
        assert torch.equal(resolve(str(tmp_path / "b")).store.read(name), store.read(name)), name


def test_gptq_codes_go_into_gguf_as_they_are(text_file: Path, tmp_path: Path, run_cli: Run) -> None:
    model = make_model(tmp_path / "m", "llama")
    words = ("--calibration", text_file, "--samples", 4, "--seq-len", 32, "-q")
    assert run_cli("gptq", model, "-o", tmp_path / "q", "--group-size", 32, *words)[0] == 0
    code, _, err = run_cli("export-gguf", tmp_path / "q", "-o", tmp_path / "q.gguf", "--type", "Q4_0", "-q", "--pre-tokenizer", "gpt-2")
    assert code == 0, err
    packed, back = resolve(str(tmp_path / "q")).store, resolve(str(tmp_path / "q.gguf")).store
    for name in packed.names():
        if "layers" in name and name.endswith("_proj.weight"):
            assert torch.equal(back.read(name), packed.read(name)), name
    assert run_cli("gptq", model, "-o", tmp_path / "g64", "--group-size", 64, *words)[0] == 0
    code, _, err = run_cli("export-gguf", tmp_path / "g64", "-o", tmp_path / "x.gguf", "--type", "Q4_0", "-q", "--pre-tokenizer", "gpt-2")
    assert code == 1 and "--allow-requantize" in err
    code, _, err = run_cli("export-gguf", tmp_path / "q", "-o", tmp_path / "x.gguf", "--type", "Q4_K_M", "-q", "--pre-tokenizer", "gpt-2")
    assert code == 1 and "--allow-requantize" in err


def test_fp8_blocks_in_both_containers(tmp_path: Path, run_cli: Run) -> None:
    model = make_model(tmp_path / "m", "llama", hidden_size=128, intermediate_size=256, num_key_value_heads=4)
    assert run_cli("rtn", model, "-o", tmp_path / "a", "--codec", "fp8", "--format", "fp8", "-q")[0] == 0
    assert run_cli("convert", tmp_path / "a", tmp_path / "b", "--to", "compressed-tensors")[0] == 0
    assert run_cli("convert", tmp_path / "b", tmp_path / "c", "--to", "fp8")[0] == 0
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "c" / "model.safetensors").read_bytes()
    code, _, err = run_cli("convert", tmp_path / "a", tmp_path / "d", "--to", "gptq")
    assert code == 1 and "it holds affine, not fp8" in err
