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


@pytest.mark.parametrize(("window", "windows", "scored", "wanted"), [(256, 3, 381, 2.0), (128, 7, 441, 2.9720), (64, 15, 465, 2.8946)])
def test_second_halves_as_llama_cpp_scores_them(
    window: int, windows: int, scored: int, wanted: float, run_cli: Run, tmp_path: Path
) -> None:
    """B33; llama-perplexity prints the same."""
    model = steer(tmp_path / "m", {"z": 0.5, "y": 0.25})
    (tmp_path / "t.txt").write_text("".join("y" if i % 256 < 128 else "z" for i in range(1000)))
    words = ("--protocol", "llama.cpp", "--window", window, "--windows", 0, "--json")
    document = run_cli("eval-ppl", model, "--data", tmp_path / "t.txt", *words)[1]
    assert document["perplexity"] == pytest.approx(wanted, abs=1e-4)
    assert (document["windows"], document["scored"]) == (windows, scored)


def test_sliding_windows_score_each_token_once(run_cli: Run, tmp_path: Path) -> None:
    model = steer(tmp_path / "m", {"z": 0.5, "y": 0.25})
    (tmp_path / "t.txt").write_text("".join("y" if i % 256 < 128 else "z" for i in range(1000)))
    words = ("--protocol", "stride", "--window", 256, "--stride", 128, "--windows", 0, "--json")
    document = run_cli("eval-ppl", model, "--data", tmp_path / "t.txt", *words)[1]
    assert (document["scored"], document["dropped"]) == (999, 0)
    assert document["perplexity"] == pytest.approx(2.8511, abs=1e-4)


def test_sliding_windows_equal_the_models_own_loss(run_cli: Run, tmp_path: Path, text_file: Path) -> None:
    """Hugging Face's loop: labels of the overlap are masked."""
    import transformers

    model = make_model(tmp_path / "m")
    ids = transformers.AutoTokenizer.from_pretrained(str(model))(text_file.read_text(), add_special_tokens=False)["input_ids"][:230]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32).eval()
    total = scored = end = 0.0
    for begin in range(0, 230, 50):
        stop = min(begin + 100, 230)
        row = torch.tensor(ids[begin:stop])
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(loaded(row[None]).logits[0, :-1], row[1:], reduction="none")
        new = losses[max(0, int(end) - begin - 1) :]
        total, scored, end = total + float(new.sum()), scored + len(new), stop
        if stop == 230:
            break
    from quantkit import perplexity
    from quantkit.loader import Loader
    from quantkit.source import resolve

    loader = Loader(resolve(str(model)), torch.device("cpu"))
    windows = perplexity._sliding(ids, 100, 50)
    text = perplexity.Text(windows, "stride", 100, 0, False)
    result = perplexity.measure(text, perplexity.Streamed(loader, perplexity.final_states(loader, text)))
    assert result.scored == scored
    assert result.perplexity == pytest.approx(math.exp(total / scored), rel=1e-5)


def test_divergence_from_the_reference(run_cli: Run, tmp_path: Path, text_file: Path) -> None:
    """Against float64 arithmetic on transformers' own logits."""
    import transformers

    a, b = make_model(tmp_path / "a"), make_model(tmp_path / "b", seed=3)
    words = ("--data", text_file, "--window", 64, "--windows", 5, "--json")
    document = run_cli("eval-ppl", a, "--reference", b, *words)[1]
    ids = torch.tensor(transformers.AutoTokenizer.from_pretrained(str(a))(text_file.read_text(), add_special_tokens=False)["input_ids"])
    rows = ids[:320].view(5, 64)
    p, q = (
        transformers.AutoModelForCausalLM.from_pretrained(str(m), dtype=torch.float32)(rows)
        .logits[:, :-1]
        .detach()
        .double()
        .log_softmax(-1)
        for m in (a, b)
    )
    kl = (q.exp() * (q - p)).sum(-1).reshape(-1)
    assert document["kl_mean"] == pytest.approx(float(kl.mean()), rel=1e-4)
    assert "divergence" not in document
    assert document["kl_max"] == pytest.approx(float(kl.max()), rel=1e-4)
    for key, share in (("kl_median", 0.5), ("kl_99", 0.99), ("kl_999", 0.999)):
        assert document[key] == pytest.approx(float(kl.quantile(share)), rel=1e-4)
    assert document["top1"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    change = (p.exp() - q.exp()).gather(-1, rows[:, 1:, None])
    assert document["rms_dp"] == pytest.approx(float(change.square().mean().sqrt()), rel=1e-4)
    same = run_cli("eval-ppl", a, "--reference", a, *words)[1]
    assert (same["kl_max"], same["top1"], same["rms_dp"]) == (0.0, 1.0, 0.0)


def test_several_artifacts_one_table_one_page(llama: Path, run_cli: Run, tmp_path: Path, text_file: Path) -> None:
    names = []
    for bits in (8, 4, 2):
        names.append(tmp_path / f"b{bits}")
        assert run_cli("rtn", llama, "-o", names[-1], "--bits", bits, "--group-size", 16, "-q")[0] == 0
    words = ("--data", text_file, "--window", 64, "--windows", 4, "--html", tmp_path / "r.html", "--json")
    code, document, err = run_cli("eval-ppl", *names, "--reference", llama, *words)
    assert code == 0, err
    divergences = [result["kl_mean"] for result in document["results"]]
    assert divergences == sorted(divergences)
    assert [result["bytes"] > 0 for result in document["results"]] == [True] * 3
    page = (tmp_path / "r.html").read_text()
    assert page.count("<circle") == 3
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")


def test_the_same_codes_measure_alike_in_every_container(run_cli: Run, llama: Path, tmp_path: Path, text_file: Path) -> None:
    values = []
    for form in ("gptq", "compressed-tensors"):
        run_cli("rtn", llama, "-o", tmp_path / form, "--format", form, "--bits", 4, "--group-size", 16, "-q")
        values.append(run_cli("eval-ppl", tmp_path / form, "--data", text_file, "--window", 64, "--windows", 4, "--json")[1]["perplexity"])
    assert values[0] == pytest.approx(values[1], rel=1e-6)


def test_gates_pass_then_fail_on_a_damaged_artifact(run_cli: Run, llama: Path, tmp_path: Path, text_file: Path) -> None:
    out = tmp_path / "q"
    run_cli("rtn", llama, "-o", out, "--bits", 8, "--group-size", 16, "-q")
    words = ("--reference", llama, "--data", text_file, "--window", 64, "--windows", 4, "--json")
    limits = ("--max-kl", 0.01, "--min-top1", 0.9, "--max-ppl-ratio", 1.02, "--max-ppl-delta", 20)
    code, document, err = run_cli("eval-ppl", out, *words, *limits)
    assert code == 0, err
    assert document["gates_missed"] == []
    tensors = load_file(str(out / "model.safetensors"))
    tensors["model.layers.1.mlp.down_proj.scales"] *= -1
    save_file(tensors, str(out / "model.safetensors"), {"format": "pt"})
    code, document, err = run_cli("eval-ppl", out, *words, *limits)
    assert code == 3
    assert "misses --max-kl 0.01" in err and "too high" in err
    assert len(document["gates_missed"]) >= 2


def test_what_cannot_be_compared_is_refused(run_cli: Run, llama: Path, tmp_path: Path, text_file: Path) -> None:
    code, _, err = run_cli("eval-ppl", llama, "--data", text_file, "--max-kl", 1)
    assert code == 2 and "--max-kl needs --reference" in err
    other = make_model(tmp_path / "other")
    path = other / "tokenizer.json"
    path.write_text(
        path.read_text().replace('"use_regex": true', '"use_regex": false').replace('["q", "u"]', '["d", "a"]').replace('"qu"', '"da"')
    )
    code, _, err = run_cli("eval-ppl", other, "--reference", llama, "--data", text_file, "--window", 64)
    assert code == 2 and "different tokenizers" in err
    code, _, err = run_cli("eval-ppl", llama, "--data", text_file, "--protocol", "nonsense")
    assert code == 2 and "Known: windows, stride, llama.cpp" in err


def test_the_references_side_is_kept_and_used(run_cli: Run, llama: Path, tmp_path: Path, text_file: Path) -> None:
    other, kept = make_model(tmp_path / "b", seed=3), tmp_path / "kept.safetensors"
    words = ("--reference", llama, "--data", text_file, "--window", 64, "--windows", 3, "--json", "--save-logits", kept)
    first = run_cli("eval-ppl", other, *words)[1]
    written = kept.read_bytes()
    code, second, err = run_cli("eval-ppl", other, *words)
    assert code == 0 and "using" in err
    assert second == first and kept.read_bytes() == written
    code, _, err = run_cli("eval-ppl", other, *words, "--protocol", "stride")
    assert code == 2 and "saved for another reference, text or protocol" in err
    code, _, err = run_cli("eval-ppl", other, "--data", text_file, "--save-logits", kept)
    assert code == 2 and "needs --reference" in err
