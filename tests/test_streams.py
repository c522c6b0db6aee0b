"""One stream of activations for several outputs: each is what it is alone on that stream, killed or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model

from quantkit.calibrate import record
from quantkit.journal import Journal
from quantkit.loader import Loader
from quantkit.source import resolve

Run = Callable[..., Any]

SHARED = """
summary = "several on one stream"
[data]
calibration = "{text}"
samples = 4
seq_len = 64

[[outputs]]
name = "gptq"
passes = [{{ method = "gptq" }}]
group_size = 32
[[outputs]]
name = "three"
passes = [{{ method = "gptq", order = "none" }}]
bits = 3
[[outputs]]
name = "awq"
passes = [{{ method = "awq", search_tokens = 128 }}]
[[outputs]]
name = "plain"
passes = [{{ method = "awq", then = "none", search_tokens = 128 }}]
[[outputs]]
name = "smooth"
passes = [{{ method = "smoothquant", search_tokens = 128 }}, {{ method = "gptq" }}]
[[outputs]]
name = "m.gguf"
format = "gguf"
type = "Q8_0"
"""
ALONE = {
    "gptq": ("gptq", "--group-size", 32),
    "three": ("gptq", "--order", "none", "--bits", 3),
    "awq": ("awq", "--search-tokens", 128),
    "plain": ("awq", "--then", "none", "--search-tokens", 128),
    "smooth": ("smoothquant", "--then", "gptq", "--search-tokens", 128),
}


@pytest.fixture
def recipe(tmp_path: Path, text_file: Path) -> Path:
    (tmp_path / "r.toml").write_text(SHARED.format(text=text_file))
    return tmp_path / "r.toml"


def same(a: Path, b: Path) -> None:
    names = sorted(path.name for path in a.iterdir())
    assert names == sorted(path.name for path in b.iterdir())
    for name in names:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_each_output_is_its_command_on_the_float_stream(family: str, recipe: Path, tmp_path: Path, run_cli: Run, text_file: Path) -> None:
    model = make_model(tmp_path / family, family)
    code, document, err = run_cli("run", recipe, model, "-o", tmp_path / "out", "--share-activations", "--json")
    assert code == 0, err
    assert [Path(one["output"]).name for one in document["outputs"]] == [*ALONE, "m.gguf"]
    assert err.count("recording 4 x 64 tokens") == 1
    for name, words in ALONE.items():
        data = ("--calibration", text_file, "--samples", 4, "--seq-len", 64, "--float-stream", "-q")
        assert run_cli(words[0], model, *words[1:], *data, "-o", tmp_path / name)[0] == 0
        same(tmp_path / name, tmp_path / "out" / name)


def test_the_float_stream_is_the_unquantized_models(llama: Path, tmp_path: Path, run_cli: Run, text_file: Path) -> None:
    """The last block's error, told by the solver, is that of its own rounding on the float model's inputs."""
    data = ("--calibration", text_file, "--samples", 2, "--seq-len", 32, "--bits", 3, "--json", "-q")
    notes = {}
    for words in ((), ("--float-stream",), ("--float-stream", "--include", r"layers\.2\.")):
        code, document, err = run_cli("gptq", llama, *data, *words, "-o", tmp_path / f"out{len(notes)}")
        assert code == 0, err
        notes[words] = {note["module"]: note["sha256"] for note in document["modules"] if ".2." in note["module"]}
    quantized, float_stream, alone = notes.values()
    assert float_stream == alone != quantized


def test_a_killed_run_goes_on_with_every_output(recipe: Path, llama: Path, tmp_path: Path, run_cli: Run,
                                                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    assert run_cli("run", recipe, llama, "-o", tmp_path / "whole", "--share-activations", "-q")[0] == 0
    commits, real = [], Journal.commit

    def commit(journal: Journal, *args: Any) -> None:
        if len(commits) == 7:  # in the middle of the second block: some outputs have it, some do not
            raise KeyboardInterrupt
        commits.append(1)
        real(journal, *args)

    monkeypatch.setattr(Journal, "commit", commit)
    assert run_cli("run", recipe, llama, "-o", tmp_path / "out", "--share-activations", "-q")[0] == 130
    monkeypatch.setattr(Journal, "commit", real)
    code, document, err = run_cli("run", recipe, llama, "-o", tmp_path / "out", "--share-activations", "--json")
    assert code == 0, err
    assert {one["resumed_from_block"] for one in document["outputs"][:5]} == {1, 2}
    for name in ALONE:
        same(tmp_path / "whole" / name, tmp_path / "out" / name)


def test_outputs_with_other_data_do_not_share(recipe: Path, llama: Path, tmp_path: Path, run_cli: Run) -> None:
    recipe.write_text(recipe.read_text().replace('name = "three"', 'name = "three"\nsamples = 3'))
    code, _, err = run_cli("run", recipe, llama, "-o", tmp_path / "out", "--share-activations")
    assert code == 1 and "three have other samples" in err


def test_the_float_stream_reproduces(llama: Path, tmp_path: Path, run_cli: Run, text_file: Path) -> None:
    data = ("--calibration", text_file, "--samples", 2, "--seq-len", 32, "--float-stream", "-q")
    assert run_cli("gptq", llama, *data, "-o", tmp_path / "out")[0] == 0
    assert run_cli("reproduce", tmp_path / "out")[0] == 0


def test_states_of_blocks_that_are_done_come_from_the_float_blocks(llama: Path) -> None:
    from quantkit.streams import _advance

    loader = Loader(resolve(str(llama)), torch.device("cpu"))
    recording = record(loader, [torch.arange(8).view(1, 8)])
    _advance(loader, recording, 3)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        states = model.model(torch.arange(8).view(1, 8), output_hidden_states=True).hidden_states
    found = model.model.norm(recording.states[0])
    assert torch.allclose(found, states[-1], atol=1e-4)


def test_side_by_side_gives_the_bytes_of_one_by_one(recipe: Path, llama: Path, tmp_path: Path, run_cli: Run) -> None:
    code, document, err = run_cli("run", recipe, llama, "-o", tmp_path / "two", "--json")
    assert code == 0 and [Path(one["output"]).name for one in document["outputs"]] == [*ALONE, "m.gguf"], err
    assert "gptq: quantizing 3 blocks" in err and "three: block 1/3" in err and "awq: block 1/3" in err
    assert run_cli("run", recipe, llama, "-o", tmp_path / "one", "--one-by-one", "-q")[0] == 0
    for name in ALONE:
        same(tmp_path / "one" / name, tmp_path / "two" / name)


def test_one_that_fails_ends_the_other_which_goes_on_later(recipe: Path, llama: Path, tmp_path: Path, run_cli: Run,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    real = Journal.commit

    def commit(journal: Journal, *args: Any) -> None:
        if journal.partial.name == "three.partial" and journal.done == 1:
            raise OSError(28, "no space", str(journal.partial))
        real(journal, *args)

    monkeypatch.setattr(Journal, "commit", commit)
    code, _, err = run_cli("run", recipe, llama, "-o", tmp_path / "out", "-q")
    assert code == 1 and "disk is full" in err and not (tmp_path / "out" / "gptq").exists()
    monkeypatch.setattr(Journal, "commit", real)
    code, document, err = run_cli("run", recipe, llama, "-o", tmp_path / "out", "--json")
    assert code == 0 and document["outputs"][1]["resumed_from_block"] == 1, err
