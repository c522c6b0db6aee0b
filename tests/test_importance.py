"""Importance matrices: what they hold, both files, merging, and their way into a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model

from quantkit.calibrate import record, run_block, view_block
from quantkit.errors import PlanError, SourceError
from quantkit.formats._gguf import read_header
from quantkit.importance import Entry, Importance, load, match, merge_files, save
from quantkit.loader import Loader
from quantkit.source import resolve


def example() -> Importance:
    generator = torch.Generator().manual_seed(0)
    dense = Entry(torch.rand(1, 8, generator=generator) * 1024, torch.tensor([1024.0]))
    stack = Entry(torch.rand(3, 8, generator=generator) * 100, torch.tensor([600.0, 424.0, 0.0]))
    stack.sums[2] = 0
    return Importance({"blk.0.attn_q.weight": dense, "blk.0.ffn_up_exps.weight": stack}, 512, 2, ["text.txt"])


@pytest.mark.parametrize("name", ["m.gguf", "m.dat"])
def test_both_layouts_come_back(name: str, tmp_path: Path) -> None:
    wanted = example()
    save(wanted, tmp_path / name)
    found = load(tmp_path / name)
    match(found, {"blk.0.ffn_up_exps.weight": (3, 4, 8)})
    assert found.datasets == ["text.txt"]
    assert found.chunks == 2
    for key, entry in wanted.entries.items():
        for i in range(len(entry.counts)):
            torch.testing.assert_close(found.entries[key].weights(i), entry.weights(i))


def test_merging_adds_sums_and_counts(tmp_path: Path) -> None:
    save(example(), tmp_path / "a.gguf")
    save(example(), tmp_path / "b.gguf")
    total, one = merge_files([tmp_path / "a.gguf", tmp_path / "b.gguf"]), example()
    assert total.chunks == 4
    for name, entry in one.entries.items():
        torch.testing.assert_close(total.entries[name].sums, 2 * entry.sums)
        torch.testing.assert_close(total.entries[name].counts, 2 * entry.counts)


def test_an_expert_without_tokens_weighs_alike_and_is_told() -> None:
    assert torch.equal(example().entries["blk.0.ffn_up_exps.weight"].weights(2), torch.ones(8))
    assert example().notices()[0].startswith("blk.0.ffn_up_exps.weight: 1 of 3 experts saw no token: ")


@pytest.mark.parametrize("data", [b"", b"\x01\x00\x00", b"\x05\x00\x00\x00\x03\x00\x00\x00abc", b"GGUF" + bytes(40)])
def test_a_damaged_file_is_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.dat").write_bytes(data)
    with pytest.raises(SourceError, match=r"m\.dat"):
        load(tmp_path / "m.dat")


def test_another_models_matrix_is_refused() -> None:
    with pytest.raises(PlanError, match="it is another model's"):
        example().entries["blk.0.attn_q.weight"].require("blk.0.attn_q.weight", (16, 16))


def inputs_by_hooks(folder: Path, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the mean squares that transformers' own forward gives every linear."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda m, a, n=name: found.__setitem__(n, a[0].reshape(-1, a[0].shape[-1]).square().mean(0)))
    with torch.no_grad():
        model(rows)
    return found


def test_entries_are_the_mean_squares_of_every_input(llama: Path, text_file: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    from quantkit import corpus

    out = tmp_path / "m.gguf"
    words = ("imatrix", llama, "-o", out, "--calibration", text_file, "--samples", 4, "--seq-len", 32, "--batch", 2)
    code, document, err = run_cli(*words, "--json")
    assert code == 0, err
    assert document["entries"] == 21
    tokens = corpus.draw(resolve(str(llama)).tokenizer(), str(text_file), 4, 32, 0)
    wanted, found = inputs_by_hooks(llama, tokens.rows), load(out).entries
    names = {"self_attn.q_proj": "attn_q", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.down_proj": "ffn_down"}
    for index in range(3):
        for theirs, ours in names.items():
            entry = found[f"blk.{index}.{ours}.weight"]
            torch.testing.assert_close(entry.weights(0), wanted[f"model.layers.{index}.{theirs}"], rtol=1e-4, atol=1e-6)
            assert float(entry.counts[0]) == 128
    code, _, err = run_cli(*words)
    assert code == 1
    assert "exists already" in err
    assert run_cli(*words, "--force", "--merge", out)[0] == 0
    assert float(load(out).entries["blk.0.attn_q.weight"].counts[0]) == 256


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_counted_one_by_one(family: str, text_file: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    folder, out = make_model(tmp_path / "m", family), tmp_path / "m.gguf"
    code, _, err = run_cli("imatrix", folder, "-o", out, "--calibration", text_file, "--samples", 2, "--seq-len", 32)
    assert code == 0, err
    entries = load(out).entries
    up, down, gate = (entries[f"blk.0.ffn_{part}_exps.weight"] for part in ("up", "down", "gate"))
    assert torch.equal(up.sums, gate.sums)
    assert float(up.counts.sum()) == 2 * 64  # two experts of every token
    assert torch.equal(up.counts, down.counts)
    code, _document, err = run_cli("export-gguf", folder, "-o", tmp_path / "q.gguf", "--type", "Q4_0", "--imatrix", out, "--json")
    assert code == 0, err
    keys = read_header(tmp_path / "q.gguf").keys
    assert keys["quantize.imatrix.entries_count"].value == len(entries)
    assert keys["quantize.imatrix.file"].value == "m.gguf"
    run_cli("export-gguf", folder, "-o", tmp_path / "p.gguf", "--type", "Q4_0", "-q")
    plain, weighted = (read_header(tmp_path / f"{name}.gguf").read("blk.1.ffn_up_exps.weight") for name in ("p", "q"))
    assert (plain != weighted).any()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_replaying_experts_equals_the_models_forward(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, rows = make_model(tmp_path / "m", family), torch.arange(3, 51)[None]
    loader = Loader(resolve(str(folder)), torch.device("cpu"))
    recording = record(loader, [rows])
    state = recording.states[0]
    with torch.no_grad():
        for index in range(len(loader.blocks)):
            loader.materialize(loader.block_names(index))
            assert view_block(loader, recording, index).groups
            state = run_block(loader.blocks[index], state, recording.calls[0][index])
            loader.release(loader.block_names(index))
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
        wanted = model.model(rows, output_hidden_states=True).last_hidden_state
        torch.testing.assert_close(model.model.norm(state), wanted, rtol=1e-5, atol=1e-5)


def test_auto_computes_it_now_and_two_bits_need_it(llama: Path, text_file: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    folder = make_model(tmp_path / "m", hidden_size=256, intermediate_size=256)
    code, _, err = run_cli("export-gguf", folder, "-o", tmp_path / "a.gguf", "--type", "Q2_K_S")
    assert code == 1
    assert "--imatrix auto" in err
    words = ("--calibration", text_file, "--samples", 2, "--seq-len", 32)
    code, _, err = run_cli("export-gguf", folder, "-o", tmp_path / "a.gguf", "--type", "Q2_K_S", "--imatrix", "auto", *words)
    assert code == 0, err
    run_cli("imatrix", llama, "-o", tmp_path / "other.gguf", *words)
    code, _, err = run_cli("export-gguf", folder, "-o", tmp_path / "b.gguf", "--imatrix", tmp_path / "other.gguf")
    assert code == 1
    assert "another model's" in err
