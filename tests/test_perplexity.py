"""The evaluator against arithmetic: models whose next token does not depend on the context."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from safetensors.torch import load_file, save_file

from quantkit.commands.evaluate import compare

Run = Callable[..., Any]


def steer(folder: Path, odds: dict[str, float]) -> Path:
    """Write a model that gives these characters these probabilities whatever came before; the rest shares what is left."""
    make_model(folder)
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(str(folder)).convert_tokens_to_ids
    tensors = load_file(str(folder / "model.safetensors"))
    for name, value in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            value.zero_()
        elif "norm" in name:
            value.fill_(1.0)
    embed, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    embed.zero_()
    embed[:, 0] = 8.0  # after the final norm, column 0 is 8
    probability = torch.full((320,), (1 - sum(odds.values())) / (320 - len(odds)), dtype=torch.float64)
    for character, share in odds.items():
        probability[ids(character)] = share
    head.zero_()
    head[:, 0] = (probability.log() / 8).float()
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    return folder


def test_full_windows(run_cli: Run, tmp_path: Path) -> None:
    """B33: 3 windows of 256 tokens, the first of each unscored, the tail dropped: 2.8246."""
    model = steer(tmp_path / "m", {"z": 0.5, "y": 0.25})
    (tmp_path / "t.txt").write_text("".join("y" if i % 256 < 128 else "z" for i in range(1000)))
    code, document, err = run_cli("eval-ppl", model, "--data", tmp_path / "t.txt", "--window", 256, "--windows", 0, "--json")
    assert code == 0, err
    assert document["perplexity"] == pytest.approx(2.8246, abs=1e-4)
    assert (document["windows"], document["scored"], document["dropped"], document["bos"]) == (3, 765, 232, False)
    assert document["error"] == pytest.approx(0.0, abs=1e-4)


def test_uniform(run_cli: Run, tmp_path: Path) -> None:
    model = steer(tmp_path / "m", {})
    (tmp_path / "t.txt").write_text("z" * 1000)
    for window in (64, 128, 256):
        document = run_cli("eval-ppl", model, "--data", tmp_path / "t.txt", "--window", window, "--json")[1]
        assert document["perplexity"] == pytest.approx(320.0, rel=1e-5)


def test_reference_is_paired(run_cli: Run, tmp_path: Path, text_file: Path) -> None:
    a, b = make_model(tmp_path / "a"), make_model(tmp_path / "b", seed=3)
    words = ("--data", text_file, "--window", 64, "--windows", 5, "--json")
    document = run_cli("eval-ppl", a, "--reference", b, *words)[1]
    alone = run_cli("eval-ppl", b, *words)[1]
    assert document["reference"]["perplexity"] == alone["perplexity"]
    assert document["ratio"] == pytest.approx(document["perplexity"] / alone["perplexity"])
    assert document["delta"] == pytest.approx(document["perplexity"] - alone["perplexity"])
    same = run_cli("eval-ppl", a, "--reference", a, *words)[1]
    assert same["ratio"] == 1.0 and same["ratio_error"] == 0.0


def test_compare_pairs_by_window() -> None:
    result = compare((1.0, 2.0, 3.0), (0.9, 1.9, 2.9))
    assert result["ratio"] == pytest.approx(math.exp(0.1)) and result["ratio_error"] == pytest.approx(0.0, abs=1e-9)


def test_it_equals_the_models_own_loss(run_cli: Run, tmp_path: Path, text_file: Path) -> None:
    import transformers

    model = make_model(tmp_path / "m", "gemma2")
    document = run_cli("eval-ppl", model, "--data", text_file, "--window", 100, "--windows", 3, "--json")[1]
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(model))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32).eval()
    ids = torch.tensor(tokenizer(text_file.read_text(), add_special_tokens=False)["input_ids"])[:300].view(3, 100)
    with torch.no_grad():
        losses = [float(loaded(input_ids=row[None], labels=row[None]).loss) for row in ids]
    assert document["losses"] == pytest.approx(losses, rel=1e-5)


def test_bad_requests(run_cli: Run, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("short")
    code, _, err = run_cli("eval-ppl", llama, "--data", tmp_path / "t.txt")
    assert code == 1 and "5 tokens, less than one window of 1024" in err
    code, _, err = run_cli("eval-ppl", llama, "--data", tmp_path / "t.txt", "--window", 1)
    assert code == 2 and "--window 1" in err
