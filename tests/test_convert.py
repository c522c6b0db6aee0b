"""convert: the same codes in another container, there and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from safetensors.torch import load_file

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
    for source, text in ((tmp_path / "q", "scattered over groups"), (llama, "holds no packed integers")):
        code, _, err = run_cli("convert", source, tmp_path / "out")
        assert code == 1
        assert text in err
        assert not (tmp_path / "out").exists()
    code, _, err = run_cli("convert", tmp_path / "q", tmp_path / "out", "--to", "gptq")
    assert code == 1
    assert "already" in err
