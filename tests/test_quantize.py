"""The whole command on tiny models: artifacts that load elsewhere, promises about output, resume and bad input."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, make_model, make_multimodal
from safetensors import safe_open
from safetensors.torch import load_file, save_file

Run = Callable[..., Any]
QUICK = ("--samples", 6, "--seq-len", 48, "--group-size", 16, "--threads", 1, "--json", "-q")


def digests(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


def quantize(run_cli: Run, model: Path, out: Path, text: Path, *words: object, method: str = "gptq") -> dict[str, Any]:
    code, document, err = run_cli(method, model, "-o", out, "--calibration", text, *QUICK, *words)
    assert code == 0, err
    return document


def plain_logits(model: Path, ids: torch.Tensor, **how: Any) -> torch.Tensor:
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32, **how).eval()
    with torch.no_grad():
        return loaded(input_ids=ids, use_cache=False).logits


IDS = torch.randint(3, 250, (1, 40), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("form", ["gptq", "compressed-tensors"])
@pytest.mark.parametrize("family", [*FAMILIES, "multimodal"])
def test_every_family_becomes_an_artifact(family: str, form: str, run_cli: Run, text_file: Path, tmp_path: Path) -> None:
    """Quantize, read back through to-hf, and compare eval-ppl of both: the artifact is a source like any other."""
    model = make_multimodal(tmp_path / "m") if family == "multimodal" else make_model(tmp_path / "m", family)
    if family == "gpt2" and form != "gptq":
        code, _, err = run_cli("gptq", model, "-o", tmp_path / "q", "--calibration", text_file, "--format", form, *QUICK)
        assert code == 1 and "Conv1D" in err and not (tmp_path / "q.partial").exists()
        return
    document = quantize(run_cli, model, tmp_path / "q", text_file, "--format", form)
    assert document["fallbacks"] == [] and document["verified"]["modules"] == len(document["modules"]) > 0
    assert all(0 <= note["error"] < 0.2 for note in document["modules"])
    assert run_cli("to-hf", tmp_path / "q", tmp_path / "back", "--dtype", "float32")[0] == 0
    scores = [
        run_cli("eval-ppl", path, "--data", text_file, "--window", 64, "--windows", 4, "--json")[1]["perplexity"]
        for path in (tmp_path / "q", tmp_path / "back")
    ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    if family != "multimodal":
        assert plain_logits(tmp_path / "back", IDS).isfinite().all()


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("words", [(), ("--asym",), ("--bits", 8), ("--asym", "--bits", 8), ("--group-size", -1)])
def test_transformers_loads_compressed_tensors(words: tuple[object, ...], run_cli: Run, text_file: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", torch_dtype="float32")
    quantize(run_cli, model, tmp_path / "q", text_file, "--format", "compressed-tensors", *words)
    run_cli("to-hf", tmp_path / "q", tmp_path / "back", "--dtype", "float32")
    # compressed-tensors 0.20 makes the packed zero points' parameters in the wrong shape; dequantizing while loading works
    from transformers import CompressedTensorsConfig

    how = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if "--asym" in words else {}
    ours, theirs = plain_logits(tmp_path / "back", IDS), plain_logits(tmp_path / "q", IDS, **how)
    assert float((ours - theirs).abs().max() / ours.abs().max()) < 1e-3


def test_scattered_columns_are_refused_where_nobody_reads_them(run_cli: Run, text_file: Path, llama: Path, tmp_path: Path) -> None:
    words = ("gptq", llama, "-o", tmp_path / "q", "--calibration", text_file, *QUICK, "--order", "full")
    code, _, err = run_cli(*words, "--format", "compressed-tensors")
    assert code == 1
    assert_one_line(err, "--order full.*--format gptq")
    assert run_cli(*words)[0] == 0


def test_tied_head_stays_tied(run_cli: Run, text_file: Path, tmp_path: Path) -> None:
    """B11: no lm_head appears, and the embedding is the source's to the bit."""
    model = make_model(tmp_path / "m", tie_word_embeddings=True, dtype=torch.bfloat16)
    quantize(run_cli, model, tmp_path / "q", text_file)
    before, after = load_file(str(model / "model.safetensors")), load_file(str(tmp_path / "q" / "model.safetensors"))
    assert not [name for name in after if name.startswith("lm_head")]
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "q" / "config.json").read_text())["tie_word_embeddings"] is True


def test_biases_are_the_sources(run_cli: Run, text_file: Path, tmp_path: Path) -> None:
    """B12: exactly the biases of the source, unchanged."""
    model = make_model(tmp_path / "m", "qwen2")
    quantize(run_cli, model, tmp_path / "q", text_file)
    before, after = load_file(str(model / "model.safetensors")), load_file(str(tmp_path / "q" / "model.safetensors"))
    biases = {name for name in before if name.endswith(".bias")}
    assert biases == {name for name in after if name.endswith(".bias")} and len(biases) == 9
    assert all(torch.equal(before[name], after[name]) for name in biases)


def test_whole_row_groups(run_cli: Run, text_file: Path, tmp_path: Path) -> None:
    """B02: one scale per output channel is stored as such."""
    model = make_model(tmp_path / "m", intermediate_size=192)
    quantize(run_cli, model, tmp_path / "q", text_file, "--group-size", -1)
    tensors = load_file(str(tmp_path / "q" / "model.safetensors"))
    assert tensors["model.layers.0.mlp.down_proj.scales"].shape == (1, 64)
    assert tensors["model.layers.0.mlp.down_proj.qzeros"].shape == (1, 8)
    assert not tensors["model.layers.0.mlp.down_proj.g_idx"].any()
    assert json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["group_size"] == -1
    run_cli("to-hf", tmp_path / "q", tmp_path / "back", "--dtype", "float32")
    original, back = load_file(str(model / "model.safetensors")), load_file(str(tmp_path / "back" / "model.safetensors"))
    for name in original:
        assert float((original[name] - back[name]).norm() / original[name].norm()) < 0.25


def test_a_group_that_does_not_divide(run_cli: Run, text_file: Path, tmp_path: Path) -> None:
    """B01: decided before calibration, listed, written into the configuration, refused when strict."""
    model = make_model(tmp_path / "m", hidden_size=128, num_attention_heads=4, intermediate_size=192)
    words = ("gptq", model, "-o", tmp_path / "q", "--calibration", text_file, *QUICK, "--group-size", 128)
    code, _, err = run_cli(*words, "--strict")
    assert code == 1 and "down_proj" in err and "192" in err and not (tmp_path / "q.partial").exists()
    code, document, err = run_cli(*words)
    assert code == 0, err
    rows = {row["module"]: row for row in document["plan"]["modules"]}
    assert rows["model.layers.0.mlp.down_proj"]["group"] == 64 and "192" in rows["model.layers.0.mlp.down_proj"]["reason"]
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert config["group_size"] == 128
    assert config["dynamic"]["+:^model\\.layers\\.0\\.mlp\\.down_proj$"]["group_size"] == 64
    assert load_file(str(tmp_path / "q" / "model.safetensors"))["model.layers.0.mlp.down_proj.scales"].shape[0] == 3


def test_side_files_are_carried(run_cli: Run, text_file: Path, tmp_path: Path) -> None:
    """B13: everything of the folder comes along byte for byte, and odd generation settings do not end the run."""
    model = make_model(tmp_path / "m")
    odd = {"do_sample": False, "temperature": 0.9, "top_p": 0.6, "eos_token_id": [2, 5]}
    (model / "generation_config.json").write_text(json.dumps(odd))
    (model / "assets").mkdir()
    files = {
        "chat_template.jinja": b"{{ messages }}\r\n",
        "LICENSE": b"free",
        "configuration_custom.py": b"raise SystemExit",
        "assets/x.txt": b"x",
        "README.md": b"---\nlicense: mit\n---\nhello",
    }
    for name, content in files.items():
        (model / name).write_bytes(content)
    document = quantize(run_cli, model, tmp_path / "q", text_file, "--max-shard-size", "50KB")
    for name, content in files.items():
        assert (tmp_path / "q" / name.replace("README", "README.source")).read_bytes() == content
    assert set(document["carried"]) >= {"LICENSE", "assets/x.txt", "chat_template.jinja", "README.source.md"}
    card = (tmp_path / "q" / "README.md").read_text()
    assert "license: mit" in card and "quantkit gptq m --group-size 16" in card
    from transformers import GenerationConfig

    GenerationConfig.from_pretrained(str(tmp_path / "q")).save_pretrained(str(tmp_path / "again"))
    index = json.loads((tmp_path / "q" / "model.safetensors.index.json").read_text())
    total = 0
    for shard in sorted((tmp_path / "q").glob("model-*.safetensors")):
        with safe_open(str(shard), "pt") as file:
            assert file.metadata() == {"format": "pt"}
            names = list(file.keys())
            assert {index["weight_map"][name] for name in names} == {shard.name}
            total += sum(file.get_tensor(name).nbytes for name in names)
    assert total == index["metadata"]["total_size"] and len(set(index["weight_map"].values())) > 2
    manifest = json.loads((tmp_path / "q" / "quantkit.json").read_text())
    assert manifest["version"] == 1
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((tmp_path / "q" / name).read_bytes()).hexdigest() == digest


def test_same_in_same_out(run_cli: Run, text_file: Path, llama: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        quantize(run_cli, llama, tmp_path / name, text_file)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_overrides_include_exclude(run_cli: Run, text_file: Path, llama: Path, tmp_path: Path) -> None:
    words = ("--exclude", "o_proj", "--override", "down_proj=bits:8,group:32", "--format", "compressed-tensors")
    document = quantize(run_cli, llama, tmp_path / "q", text_file, *words)
    kinds = {note["module"].split(".")[-1]: (note["bits"], note["group"]) for note in document["modules"]}
    assert "o_proj" not in kinds and kinds["down_proj"] == (8, 32) and kinds["q_proj"] == (4, 16)
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.self_attn.o_proj" in config["ignore"] and "lm_head" in config["ignore"]
    assert plain_logits(tmp_path / "q", IDS).isfinite().all()
    document = quantize(run_cli, llama, tmp_path / "q2", text_file, "--include", r"layers\.1\..*up_proj")
    assert [note["module"] for note in document["modules"]] == ["model.layers.1.mlp.up_proj"]


def test_dry_run_plans_the_exact_size(run_cli: Run, text_file: Path, llama: Path, tmp_path: Path) -> None:
    code, document, _ = run_cli("gptq", llama, "-o", tmp_path / "q", "--calibration", text_file, *QUICK, "--dry-run")
    assert code == 0 and not (tmp_path / "q").exists() and not (tmp_path / "q.partial").exists()
    quantize(run_cli, llama, tmp_path / "q", text_file)
    data = (tmp_path / "q" / "model.safetensors").stat().st_size
    with (tmp_path / "q" / "model.safetensors").open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    assert document["plan"]["bytes_after"] == data - header


def test_schedules_and_rtn(run_cli: Run, text_file: Path, llama: Path, tmp_path: Path) -> None:
    errors = {}
    for schedule in ("one-pass", "two-pass"):
        document = quantize(run_cli, llama, tmp_path / schedule, text_file, "--schedule", schedule)
        assert document["schedule"] == schedule
        errors[schedule] = sum(note["error"] for note in document["modules"])
    assert errors["two-pass"] == pytest.approx(errors["one-pass"], rel=0.5)
    document = quantize(run_cli, llama, tmp_path / "rtn", text_file, method="rtn")
    assert document["verified"]["modules"] == 21


def test_a_budget_chooses_the_schedule(run_cli: Run, text_file: Path, llama: Path, tmp_path: Path) -> None:
    assert quantize(run_cli, llama, tmp_path / "a", text_file, "--max-memory", "16GB")["schedule"] == "one-pass"
    document = quantize(run_cli, llama, tmp_path / "b", text_file, "--max-memory", "504.5MB")
    assert document["schedule"] == "two-pass"


def test_spilled_states_give_the_same_bytes(
    run_cli: Run, text_file: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(run_cli, llama, tmp_path / "a", text_file)
    monkeypatch.setattr("quantkit.calibrate.SPILL_FROM", 0)
    quantize(run_cli, llama, tmp_path / "b", text_file)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


# Bad input: one clear line, exit 1 or 2, nothing half-written.


def damage(folder: Path, kind: str) -> None:
    path = folder / "model.safetensors"
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "zip":
        path.write_bytes(b"PK\x03\x04" + bytes(5000))
    elif kind == "nan":
        tensors = load_file(str(path))
        tensors["model.layers.1.mlp.down_proj.weight"][7, 104] = torch.nan
        save_file(tensors, str(path), {"format": "pt"})
    elif kind == "index":
        weights = dict.fromkeys(load_file(str(path)), "model-00001-of-00002.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    elif kind == "lacking":
        tensors = load_file(str(path))
        del tensors["model.layers.1.mlp.down_proj.weight"]
        save_file(tensors, str(path), {"format": "pt"})
    elif kind == "shape":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "head_dim": 8}))
    elif kind == "config":
        (folder / "config.json").write_text("{")


DAMAGE = {
    "truncated": "truncated",
    "empty": "0 bytes",
    "zip": "not a safetensors file",
    "nan": r"model.layers.1.mlp.down_proj.weight.*\(7, 104\)",
    "index": "model-00001-of-00002.safetensors, which is missing",
    "lacking": "lacks 1 tensors.*down_proj",
    "shape": "[qk]_proj.*has shape",
    "config": "config.json is not readable JSON",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_sources(kind: str, run_cli: Run, text_file: Path, llama: Path, tmp_path: Path) -> None:
    damage(llama, kind)
    code, _, err = run_cli("gptq", llama, "-o", tmp_path / "q", "--calibration", text_file, *QUICK)
    assert code == 1
    assert_one_line(err, DAMAGE[kind])
    assert not (tmp_path / "q").exists()


def assert_one_line(err: str, pattern: str) -> None:
    import re

    last = err.strip().splitlines()[-1]
    assert last.startswith("quantkit: ") and re.search(pattern, last), err
    assert "Traceback" not in err


BAD_WORDS = {
    "group": (("--group-size", 48), 2, "--group-size 48 cannot be.*16, 32, 64, 128"),
    "bits": (("--bits", 5), 2, "--bits 5 cannot be.*2, 3, 4, 8"),
    "order": (("--order", "best"), 2, "--order 'best' cannot be.*group, full, none"),
    "format": (("--format", "onnx"), 2, "Known: auto, gptq, awq"),
    "flag": (("--bitz", 4), 2, "--bitz"),
    "size": (("--max-shard-size", "many"), 2, "not a size"),
    "regex": (("--exclude", "("), 2, "regular expression"),
    "override": (("--override", "x=y"), 2, "bits:N,group:N,sym"),
    "device": (("--device", "cuda:99"), 2, "--device cuda:99"),
    "data": (("--calibration", "no/such.txt"), 1, "is no file and no name.*bundled, self, wikitext2"),
    "nothing": (("--include", "vision"), 1, "Nothing is left to quantize"),
}


@pytest.mark.parametrize("kind", BAD_WORDS)
def test_bad_words(kind: str, run_cli: Run, text_file: Path, llama: Path, tmp_path: Path) -> None:
    words, wanted, pattern = BAD_WORDS[kind]
    code, _, err = run_cli("gptq", llama, "-o", tmp_path / "q", "--calibration", text_file, *QUICK, *words)
    assert code == wanted, err
    assert_one_line(err, pattern)
    assert not (tmp_path / "q").exists() and not (tmp_path / "q.partial").exists()


def test_bad_places(run_cli: Run, text_file: Path, llama: Path, tmp_path: Path) -> None:
    """B31 and the rest: the source is never the output, an existing output is never replaced unasked."""
    before = digests(llama)
    (tmp_path / "link").symlink_to(llama)
    cases: list[tuple[object, object, str]] = [
        (tmp_path / "none", tmp_path / "q", "There is no"),
        (llama, llama, "is the source itself"),
        (llama, str(llama) + "/../" + llama.name, "is the source itself"),
        (llama, tmp_path / "link", "is the source itself"),
        (llama, text_file, "exists already"),
        (llama, tmp_path / "a" / "b", "is no folder"),
        (text_file, tmp_path / "q", "not a .gguf"),
    ]
    for model, output, pattern in cases:
        code, _, err = run_cli("gptq", model, "-o", output, "--calibration", text_file, *QUICK)
        assert code in (1, 2)
        assert_one_line(err, pattern)
    assert digests(llama) == before
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "mine").write_text("x")
    quantize(run_cli, llama, tmp_path / "old", text_file, "--force")
    assert not (tmp_path / "old" / "mine").exists() and (tmp_path / "old" / "quantkit.json").exists()


def test_already_quantized(run_cli: Run, text_file: Path, llama: Path, tmp_path: Path) -> None:
    """B20: an artifact is refused or dequantized on request; leftovers in a config are seen through."""
    quantize(run_cli, llama, tmp_path / "q", text_file)
    code, _, err = run_cli("gptq", tmp_path / "q", "-o", tmp_path / "q2", "--calibration", text_file, *QUICK)
    assert code == 1
    assert_one_line(err, "already quantized.*gptq 4 bits")
    quantize(run_cli, tmp_path / "q", tmp_path / "q3", text_file, "--allow-requantize")
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    quantize(run_cli, llama, tmp_path / "q4", text_file)
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    code, _, err = run_cli("to-hf", tmp_path / "q", tmp_path / "back")
    assert code == 1
    assert_one_line(err, "packed tensors.*declares no quantization")


def test_a_full_disk(run_cli: Run, text_file: Path, llama: Path, tmp_path: Path) -> None:
    """Refused before any work when it can be known; resumable when the disk fills up later."""
    small = tmp_path / "small"
    small.mkdir()
    if (
        os.getuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(small)], check=False, capture_output=True).returncode
    ):
        pytest.skip("mounting a small tmpfs needs root")
    try:
        code, _, err = run_cli("gptq", llama, "-o", small / "q", "--calibration", text_file, *QUICK)
        assert code == 1
        assert_one_line(err, "MB free")
        assert not list(small.iterdir())
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_disk_that_fills_up_later(run_cli: Run, text_file: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit import journal

    real, count = journal.st.write_file, iter(range(100))

    def failing(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        if next(count) == 1:
            raise OSError(28, "No space left on device")
        real(path, tensors)

    monkeypatch.setattr(journal.st, "write_file", failing)
    code, _, err = run_cli("gptq", llama, "-o", tmp_path / "q", "--calibration", text_file, *QUICK)
    assert code == 1
    assert_one_line(err, "disk is full.*resume")
    monkeypatch.undo()
    assert not (tmp_path / "q").exists()


# Killed runs.


def command(model: Path, out: Path, text: Path, *words: object) -> list[str]:
    return [
        sys.executable,
        "-m",
        "quantkit",
        "gptq",
        str(model),
        "-o",
        str(out),
        "--calibration",
        str(text),
        *map(str, QUICK),
        *map(str, words),
    ]


@pytest.mark.slow
def test_killed_runs_resume_to_the_same_bytes(text_file: Path, tmp_path: Path, run_cli: Run) -> None:
    model = make_model(tmp_path / "m", num_hidden_layers=8)
    words = ("--max-shard-size", "100KB", "--asym")
    expected = quantize(run_cli, model, tmp_path / "whole", text_file, *words)
    rng = random.Random(0)
    resumed = []
    for attempt in range(4):
        out = tmp_path / f"q{attempt}"
        resume = ("--resume-states", "recompute") if attempt % 2 else ()
        process = subprocess.Popen(command(model, out, text_file, *words, *resume), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(out.with_name(out.name + ".partial") / "journal" / f"{rng.randrange(7):05d}.json", process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not out.exists()
        document = quantize(run_cli, model, out, text_file, *words, *resume)
        resumed.append(document["resumed_from_block"])
        assert digests(out) == digests(tmp_path / "whole")
        assert [n["sha256"] for n in document["modules"]] == [n["sha256"] for n in expected["modules"]]
        shutil.rmtree(out)
    assert all(block is not None and block > 0 for block in resumed)


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while not path.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)


@pytest.mark.slow
def test_an_interrupt_says_how_to_resume(text_file: Path, tmp_path: Path, run_cli: Run) -> None:
    """B40: exit 130, no folder under the final name, other settings refused by name, --restart discards."""
    model = make_model(tmp_path / "m", num_hidden_layers=12)
    out = tmp_path / "q"
    process = subprocess.Popen(
        command(model, out, text_file), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a suite run in the background ignores it
    )  # fmt: skip
    wait_for(tmp_path / "q.partial" / "journal" / "00002.json", process)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=10)[1].decode()
    assert process.returncode == 130 and "resume" in err and not out.exists()
    code, _, err = run_cli("gptq", model, "-o", out, "--calibration", text_file, *QUICK, "--bits", 3)
    assert code == 1
    assert_one_line(err, "other settings: options.bits was 4, now 3.*--restart")
    document = quantize(run_cli, model, out, text_file, "--bits", 3, "--restart")
    assert document["resumed_from_block"] is None


def test_a_damaged_part_is_done_again(text_file: Path, llama: Path, tmp_path: Path, run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit.commands import quantize as module

    quantize(run_cli, llama, tmp_path / "whole", text_file)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_finish", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run_cli("gptq", llama, "-o", tmp_path / "q", "--calibration", text_file, *QUICK)[0] == 130
    part = tmp_path / "q.partial" / "journal" / "00001.safetensors"
    part.write_bytes(part.read_bytes()[:-7] + b"damaged")
    document = quantize(run_cli, llama, tmp_path / "q", text_file)
    assert document["resumed_from_block"] == 1
    assert digests(tmp_path / "q") == digests(tmp_path / "whole")


def test_a_second_run_into_one_output_is_refused(text_file: Path, llama: Path, tmp_path: Path, run_cli: Run) -> None:
    from quantkit.lock import hold

    words = ("--calibration", text_file, "--samples", 4, "--seq-len", 64, "-q")
    with hold(tmp_path / "q.partial"):
        (tmp_path / "q.partial" / "kept").write_text("of the first run")
        for command in (("gptq", llama, "-o", tmp_path / "q", *words), ("to-hf", llama, tmp_path / "q")):
            code, _, err = run_cli(*command)
            assert code == 1 and "Another run is writing" in err
        code, _, err = run_cli("gptq", llama, "-o", tmp_path / "q", *words, "--restart")
        assert code == 1 and (tmp_path / "q.partial" / "kept").exists()
    with hold(tmp_path / "m.gguf.partial"):
        code, _, err = run_cli("export-gguf", llama, "-o", tmp_path / "m.gguf", "-q")
        assert code == 1 and "Another run is writing" in err
    assert run_cli("gptq", llama, "-o", tmp_path / "q", *words)[0] == 0


def test_a_time_budget_stops_between_blocks_and_events_are_logged(text_file: Path, llama: Path, tmp_path: Path, run_cli: Run) -> None:
    words = ("--calibration", text_file, "--samples", 4, "--seq-len", 64, "-q", "--log-file", tmp_path / "log.jsonl")
    code, _, err = run_cli("gptq", llama, "-o", tmp_path / "q", *words, "--time-budget", "0.001s")
    assert code == 130 and "--time-budget" in err and not (tmp_path / "q").exists()
    assert run_cli("gptq", llama, "-o", tmp_path / "q", *words)[0] == 0
    assert run_cli("gptq", llama, "-o", tmp_path / "p", *words, "--time-budget", "soon")[0] == 2
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds.count("module") == 21 and {"phase", "block", "totals"} <= set(kinds)
    assert all(event["time"] > 0 and event["peak_memory"] > 0 for event in events)


@pytest.mark.parametrize("command", ["gptq", "to-hf", "imatrix", "export-gguf", "convert"])
def test_force_never_replaces_the_source(command: str, text_file: Path, llama: Path, tmp_path: Path, run_cli: Run) -> None:
    """B31: whatever link leads to it, whatever flag is given."""
    assert run_cli("export-gguf", llama, "-o", tmp_path / "m.gguf", "--type", "Q4_0", "-q")[0] == 0
    (tmp_path / "link.gguf").symlink_to(tmp_path / "m.gguf")
    (tmp_path / "hard.gguf").hardlink_to(tmp_path / "m.gguf")
    before = hashlib.sha256((tmp_path / "m.gguf").read_bytes()).hexdigest()
    data = ("--calibration", text_file, "--samples", 4, "--seq-len", 64)
    for name in ("m.gguf", "link.gguf", "hard.gguf"):
        out = tmp_path / name
        words = {
            "gptq": ("gptq", tmp_path / "m.gguf", "-o", out, *data, "--allow-requantize"),
            "imatrix": ("imatrix", tmp_path / "m.gguf", "-o", out, *data),
            "export-gguf": ("export-gguf", tmp_path / "m.gguf", "-o", out, "--type", "F16"),
            "to-hf": ("to-hf", tmp_path / "m.gguf", out),
            "convert": ("convert", tmp_path / "m.gguf", out),
        }[command]
        code, _, err = run_cli(*words, "--force")
        assert code == 1 and "is the source itself" in err, err
    assert hashlib.sha256((tmp_path / "m.gguf").read_bytes()).hexdigest() == before
    code, _, err = run_cli("export-gguf", llama, "-o", llama / "model.safetensors", "--force")
    assert code == 1 and "is the source itself" in err


def test_nan_anywhere_is_said_before_the_work(text_file: Path, llama: Path, tmp_path: Path, run_cli: Run) -> None:
    """B23: in the head too, which no block reads."""
    tensors = load_file(str(llama / "model.safetensors"))
    tensors["lm_head.weight"][7, 3] = float("nan")
    save_file(tensors, str(llama / "model.safetensors"), {"format": "pt"})
    for words in (("gptq", llama, "-o", tmp_path / "q", "--calibration", text_file), ("export-gguf", llama, "-o", tmp_path / "m.gguf")):
        code, _, err = run_cli(*words, "-q")
        assert code == 1 and "'lm_head.weight' holds 1 NaN or Inf, the first at (7, 3)" in err
    assert not (tmp_path / "q.partial").exists() and not (tmp_path / "m.gguf").exists()


def test_a_quantized_gguf_needs_a_word(text_file: Path, llama: Path, tmp_path: Path, run_cli: Run) -> None:
    """B20: floats in a GGUF file do not."""
    data = ("--calibration", text_file, "--samples", 4, "--seq-len", 64, "-q")
    for kind in ("Q8_0", "F16"):
        assert run_cli("export-gguf", llama, "-o", tmp_path / f"{kind}.gguf", "--type", kind, "-q")[0] == 0
    for method in ("gptq", "awq", "rtn"):
        code, _, err = run_cli(method, tmp_path / "Q8_0.gguf", "-o", tmp_path / method, *data)
        assert code == 1 and "already quantized (GGUF Q8_0)" in err
    assert run_cli("rtn", tmp_path / "F16.gguf", "-o", tmp_path / "a", *data)[0] == 0
    assert run_cli("rtn", tmp_path / "Q8_0.gguf", "-o", tmp_path / "b", *data, "--allow-requantize")[0] == 0


def test_what_went_less_than_well_is_said_at_the_end(text_file: Path, llama: Path, tmp_path: Path, run_cli: Run) -> None:
    """B03: few tokens, repeated ones, dead columns."""
    tensors = load_file(str(llama / "model.safetensors"))
    tensors["model.layers.0.input_layernorm.weight"][7] = 0
    save_file(tensors, str(llama / "model.safetensors"), {"format": "pt"})
    (tmp_path / "z.txt").write_text("z" * 600)
    words = ("--calibration", tmp_path / "z.txt", "--samples", 1, "--seq-len", 32, "--damp", 0, "--json")
    code, document, err = run_cli("gptq", llama, "-o", tmp_path / "q", *words)
    text = " ".join(document["notices"])
    assert code == 0 and "damping was raised from 0 to" in text and "saw fewer tokens than they have input columns (32 at least)" in text
    assert "3 modules have input columns that were always zero, 1 at most" in text and "damping was raised" in err
