"""Mixtures of experts: each expert on the tokens that are routed to it, in every schedule and container; those without a token too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from safetensors.torch import load_file, save_file

from quantkit.loader import Loader
from quantkit.source import resolve
from quantkit.tensors import LayerStats

Run = Callable[..., Any]
CPU = torch.device("cpu")
WORDS = [("gptq",), ("gptq", "--format", "compressed-tensors", "--schedule", "two-pass"), ("awq",), ("rtn", "--bits", 3)]


def perplexity(path: Path, text: Path) -> float:
    """Return what transformers itself measures on the first two windows of 64 tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor(resolve(str(path)).tokenizer()(text.read_text())["input_ids"][:128]).view(2, 64)
    with torch.no_grad():
        return float(model(ids, labels=ids).loss.exp())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("words", WORDS)
def test_experts_are_quantized(family: str, words: tuple[Any, ...], tmp_path: Path, run_cli: Run, text_file: Path) -> None:
    model = make_model(tmp_path / family, family)
    data = ("--calibration", text_file, "--samples", 8, "--seq-len", 64) if words[0] != "rtn" else ()
    code, document, err = run_cli(*words, model, "--group-size", 32, *data, "-o", tmp_path / "out", "--json")
    assert code == 0, err
    experts = [note for note in document["modules"] if ".experts." in note["module"]]
    assert len(experts) == 3 * 4 * 3 and not [
        note for note in document["modules"] if "gate." in note["module"] or note["module"].endswith(".gate")
    ]
    if words[0] != "rtn":
        gates = [note["tokens"] for note in experts if note["module"].endswith(("w1", "gate_proj"))]
        assert sum(gates) == 3 * 2 * 8 * 64  # layers, experts of a token, tokens
        downs = [note["tokens"] for note in experts if note["module"].endswith(("w2", "down_proj"))]
        assert gates == downs and "experts saw" in err
    assert run_cli("to-hf", tmp_path / "out", tmp_path / "plain", "--dtype", "float32")[0] == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "plain"))
    for note in experts:  # every expert's own weights, in their place
        near = (after[note["tensor"]] - before[note["tensor"]]).norm() / before[note["tensor"]].norm()
        assert 0.01 < near < (0.35 if words[-1] == 3 else 0.2), note["module"]
    found = []
    for folder in ("out", "plain"):
        given = (tmp_path / folder, "--data", text_file, "--window", 64, "--windows", 2, "--json")
        code, document, err = run_cli("eval-ppl", *given)
        assert code == 0, err
        found.append(document["perplexity"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert perplexity(tmp_path / "plain", text_file) == pytest.approx(found[1], rel=1e-3)


def test_gptq_beats_rounding_on_every_kind_of_expert_weight(tmp_path: Path, run_cli: Run, text_file: Path) -> None:
    model = make_model(tmp_path / "m", "mixtral")
    data = ("--calibration", text_file, "--samples", 16, "--seq-len", 128, "--bits", 3, "--group-size", 32, "--json", "-q")
    code, solved, err = run_cli("gptq", model, *data, "-o", tmp_path / "a")
    assert code == 0, err
    code, rounded, err = run_cli("awq", model, *data, "--sym", "--no-scale-search", "--format", "gptq", "-o", tmp_path / "b")
    assert code == 0, err
    for part in ("w1", "w2", "w3"):
        ours, plain = ([n["error"] for n in d["modules"] if n["module"].endswith(part)] for d in (solved, rounded))
        assert sum(ours) < 0.9 * sum(plain), part


def starve(model: Path) -> None:
    """Make expert 5 of layer 0 never chosen, and expert 3 only for token 77."""
    tensors = load_file(model / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, 0], embedding[:, 1] = 8, 0
    embedding[77, 1] = 8
    router = tensors["model.layers.0.block_sparse_moe.gate.weight"]
    router[:, :2] = 0
    router[5, 0], router[3, 0], router[3, 1] = -100, -100, 1000
    tensors["model.layers.0.self_attn.o_proj.weight"][:2] = 0
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"model.layers.0.{name}.weight"][:] = 1
    save_file({name: value.contiguous() for name, value in tensors.items()}, model / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "words", [("gptq",), ("gptq", "--schedule", "two-pass"), ("gptq", "--float-stream"), ("awq",), ("awq", "--then", "gptq")]
)
def test_experts_that_saw_no_token_or_one(words: tuple[str, ...], tmp_path: Path, run_cli: Run) -> None:
    model = make_model(tmp_path / "m", "mixtral", num_local_experts=8, num_hidden_layers=1)
    starve(model)
    tokens = Loader(resolve(str(model)), CPU).source.tokenizer()
    letter = tokens.decode([77])
    (tmp_path / "t.txt").write_text(("xyz" * 40)[:100] + letter + ("zyx" * 40)[:99])
    code, document, err = run_cli(*words, model, "--calibration", tmp_path / "t.txt", "--samples", 1, "--seq-len", 200, "--group-size", 32,
                                  "-o", tmp_path / "out", "--json")  # fmt: skip
    assert code == 0, err
    notes = {note["module"]: note for note in document["modules"]}
    for part in ("w1", "w2", "w3"):
        never, once = (notes[f"model.layers.0.block_sparse_moe.experts.{n}.{part}"] for n in (5, 3))
        assert never["tokens"] == 0 and once["tokens"] == 1 and never["bits"] == once["bits"] == 4
        assert never["grid"] == once["grid"] == notes["model.layers.0.block_sparse_moe.experts.0.w1"]["grid"]
    assert "block_sparse_moe.experts.5 (0)" in err and "experts saw 0 to" in err
    held = load_file(tmp_path / "out" / "model.safetensors")
    scales = [value for name, value in held.items() if name.endswith("scales")]
    assert all(bool(torch.isfinite(value).all()) and bool((value != 0).all()) for value in scales)
    if words == ("gptq",):
        assert any("experts.5" in name for name in document["fallbacks"])
        assert run_cli(*words, model, "--calibration", tmp_path / "t.txt", "--samples", 1, "--seq-len", 200, "--group-size", 32,
                       "-o", tmp_path / "strict", "--strict")[0] == 1  # fmt: skip


def test_down_is_judged_on_what_quantized_gate_and_up_make(tmp_path: Path) -> None:
    from quantkit.calibrate import record, view_block
    from quantkit.schedules import one_pass

    loader = Loader(resolve(str(make_model(tmp_path / "m", "mixtral"))), CPU)
    recording = record(loader, [torch.arange(3, 67).view(1, -1)])
    loader.materialize(loader.block_names(0))
    view = view_block(loader, recording, 0)
    stack: Any = view.module.get_submodule("mlp.experts")
    found: dict[str, LayerStats] = {}
    for group, stats in one_pass(view, recording.states, [], CPU):
        if group.names[0].endswith("experts.2.w1"):
            stack.gate_up_proj.data[2] = 0  # what a solver would put there
        found |= dict.fromkeys(group.names, stats)
    down = "model.layers.0.block_sparse_moe.experts.{}.w2"
    assert found[down.format(2)].tokens > 0 and not found[down.format(2)].hessian.any()
    assert found[down.format(1)].hessian.any()


def test_a_killed_run_with_experts_resumes(tmp_path: Path, run_cli: Run, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit.journal import Journal

    model = make_model(tmp_path / "m", "mixtral")
    words = (
        "gptq",
        model,
        "--calibration",
        text_file,
        "--samples",
        4,
        "--seq-len",
        64,
        "--group-size",
        32,
        "--resume-states",
        "recompute",
        "-q",
    )
    assert run_cli(*words, "-o", tmp_path / "whole")[0] == 0
    real = Journal.commit

    def commit(journal: Journal, *args: Any) -> None:
        if journal.done == 2:
            raise KeyboardInterrupt
        real(journal, *args)

    monkeypatch.setattr(Journal, "commit", commit)
    assert run_cli(*words, "-o", tmp_path / "out")[0] == 130
    monkeypatch.setattr(Journal, "commit", real)
    assert run_cli(*words, "-o", tmp_path / "out")[0] == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_experts_whose_inputs_would_be_rounded_are_kept(tmp_path: Path, run_cli: Run, text_file: Path) -> None:
    model = make_model(tmp_path / "m", "mixtral")
    code, document, err = run_cli(
        "smoothquant", model, "--calibration", text_file, "--samples", 2, "--seq-len", 64, "-o", tmp_path / "out", "--json"
    )
    assert code == 0, err
    kept = [m for m in document["plan"]["modules"] if ".experts." in m["module"]]
    assert kept and all(m["method"] == "keep" and "inputs of experts are not rounded" in m["reason"] for m in kept)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert any("experts.0.w1" in name for name in config["ignore"])
