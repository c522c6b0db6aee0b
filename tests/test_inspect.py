"""inspect and diff: every kind of source, damaged ones, and two that differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

Run = Callable[..., Any]


def test_every_kind_says_what_it_holds(llama: Path, tmp_path: Path, run_cli: Run) -> None:
    run_cli("rtn", llama, "-o", tmp_path / "g", "--bits", 4, "--group-size", 16, "-q")
    run_cli("rtn", llama, "-o", tmp_path / "c", "--bits", 8, "--group-size", 32, "--asym", "--format", "compressed-tensors", "-q")
    run_cli("export-gguf", llama, "-o", tmp_path / "m.gguf", "--type", "Q8_0", "-q")
    wanted = {
        llama: ("plain checkpoint", "F32", "as it is"),
        tmp_path / "g": ("gptq 4 bits", "4 bits, groups of 16, symmetric", "gptqmodel"),
        tmp_path / "c": ("compressed-tensors", "8 bits, groups of 32, asymmetric", "dequantize=True"),
        tmp_path / "m.gguf": ("gguf", "Q8_0", "llama.cpp, Ollama: yes"),
    }
    plain = run_cli("inspect", llama, "--json")[1]
    for path, (kind, scheme, taker) in wanted.items():
        code, document, err = run_cli("inspect", path, "--json", "--tensors")
        assert code == 0, err
        assert document["kind"].startswith(kind)
        tensors = {tensor["name"]: tensor for tensor in document["tensors"]}
        assert tensors["model.layers.0.mlp.up_proj.weight"]["scheme"] == scheme
        assert any(taker in line for line in document["runtimes"])
        assert {name: tensor["shape"] for name, tensor in tensors.items()} == {t["name"]: t["shape"] for t in plain["tensors"]}
        assert document["weights"] == plain["weights"]
        assert scheme in err


def test_a_scattered_order_is_seen(llama: Path, text_file: Path, tmp_path: Path, run_cli: Run) -> None:
    words = ("--order", "full", "--group-size", 16, "--calibration", text_file, "--samples", 4, "--seq-len", 32, "-q")
    assert run_cli("gptq", llama, "-o", tmp_path / "q", *words)[0] == 0
    document = run_cli("inspect", tmp_path / "q", "--json")[1]
    assert any("g_idx" in tensor["scheme"] for tensor in document["tensors"])


@pytest.mark.parametrize("damage", ["cut", "lacking"])
def test_a_damaged_artifact_is_named(damage: str, llama: Path, tmp_path: Path, run_cli: Run) -> None:
    run_cli("rtn", llama, "-o", tmp_path / "g", "--group-size", 16, "-q")
    path = tmp_path / "g" / "model.safetensors"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        tensors = load_file(path)
        del tensors["model.layers.1.mlp.up_proj.scales"]
        save_file(tensors, path, {"format": "pt"})
    code, _, err = run_cli("inspect", tmp_path / "g")
    assert code == 1
    assert ("truncated" if damage == "cut" else "lacks model.layers.1.mlp.up_proj.scales") in err


def test_two_runs_with_other_seeds_differ_where_they_should(llama: Path, text_file: Path, tmp_path: Path, run_cli: Run) -> None:
    for seed in (0, 1):
        words = ("--group-size", 16, "--calibration", text_file, "--samples", 4, "--seq-len", 32, "--seed", seed, "-q")
        assert run_cli("gptq", llama, "-o", tmp_path / f"s{seed}", *words)[0] == 0
    code, document, err = run_cli("diff", tmp_path / "s0", tmp_path / "s1", "--json")
    assert code == 0, err
    changed = {tensor["name"] for tensor in document["tensors"]}
    assert changed <= {f"model.layers.{i}.{m}.weight" for i in range(3) for m in MODULES}
    assert len(changed) > 15
    assert all(0 < tensor["error"] < 0.3 for tensor in document["tensors"])
    assert run_cli("diff", tmp_path / "s0", tmp_path / "s0", "--json")[1]["tensors"] == []


MODULES = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]


def test_containers_are_compared_by_their_values(llama: Path, tmp_path: Path, run_cli: Run) -> None:
    run_cli("export-gguf", llama, "-o", tmp_path / "f32.gguf", "--type", "F32", "-q")
    run_cli("export-gguf", llama, "-o", tmp_path / "q8.gguf", "--type", "Q8_0", "-q")
    assert run_cli("diff", tmp_path / "f32.gguf", llama, "--json")[1]["tensors"] == []
    document = run_cli("diff", tmp_path / "q8.gguf", llama, "--json")[1]
    assert all(tensor["error"] < 0.01 for tensor in document["tensors"])
    assert document["equal"] == 7  # the norms
