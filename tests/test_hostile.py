"""Broken and hostile input, by kind: one line that names the file, in bounded time and memory, and nothing read elsewhere."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import byte_tokenizer
from safetensors.torch import load_file, save_file

from quantkit import importance
from quantkit.errors import CalibrationError, QuantkitError, SourceError
from quantkit.foreign import bounded, foreign, parse_json
from quantkit.loader import Loader
from quantkit.source import resolve

Run = Callable[..., Any]
CPU = torch.device("cpu")


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


CONFIGS: dict[str, dict[str, Any]] = {
    "a flag that is a number": {"mlp_bias": 5},
    "a size that is a list": {"hidden_size": [64]},
    "no heads": {"num_attention_heads": 0},
    "architectures of nothing": {"architectures": [7]},
    "layers without end": {"num_hidden_layers": 10**8},
    "labels without end": {"num_labels": 10**8},
    "ids without end": {"eos_token_id": [0] * 100_000},
    "a rope of a string": {"rope_parameters": "long"},
    "an unknown rope": {"rope_parameters": {"rope_type": "wobble", "factor": 8.0, "rope_theta": 1e4}},
    "a quantization of a number": {"quantization_config": 4},
    "half a character": {"name": "\ud800"},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_configuration_is_not_believed(kind: str, llama: Path) -> None:
    edit_json(llama / "config.json", **CONFIGS[kind])
    began = time.process_time()
    with pytest.raises(QuantkitError, match=r"config|wobble|number of heads|refuses|build"):
        Loader(resolve(str(llama)), CPU)
    assert time.process_time() - began < 2


@pytest.mark.parametrize("raw", [b"[" * 100_000, b"\xff\xfe{}", b'{"a": "\\ud800"}', b"{", b""])
def test_json_of_any_depth_is_one_error(raw: bytes, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="here"):
        parse_json(raw, "here")


def test_a_library_that_panics_is_one_error_and_an_interrupt_is_not() -> None:
    panic = type("PanicException", (BaseException,), {})
    for error in (panic("rust"), KeyError("x"), RecursionError(), MemoryError(), Exception("")):
        with pytest.raises(SourceError, match="what failed"), foreign("what failed"):
            raise error
    for kind in (KeyboardInterrupt, SystemExit):
        with pytest.raises(kind), foreign("what failed"):
            raise kind


@pytest.mark.parametrize("kind", ["huge id", "a vocabulary of strings", "no object", "deep", "merges of numbers"])
def test_a_tokenizer_is_not_believed(kind: str, llama: Path) -> None:
    described = byte_tokenizer()
    if kind == "huge id":
        described["model"]["vocab"]["x"] = 2**31 - 1
    elif kind == "a vocabulary of strings":
        described["model"]["vocab"]["x"] = "y"
    elif kind == "merges of numbers":
        described["model"]["merges"] = [[1, 2]]
    text = {"no object": "[]", "deep": "[" * 10_000}.get(kind) or json.dumps(described)
    (llama / "tokenizer.json").write_text(text)
    with pytest.raises(SourceError, match=r"tokenizer"):
        resolve(str(llama)).tokenizer()


@pytest.mark.parametrize(("template", "why"), [
    ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "ran for more than"),
    ("{{ 'a' * 10**10 }}", "cannot be rendered"),
    ("{{ messages[0].x.y }}", "cannot be rendered"),
    ("{{ ''.__class__.__mro__ }}", "cannot be rendered"),
])  # fmt: skip
def test_a_chat_template_is_rendered_within_limits(template: str, why: str, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit.corpus import render_chat

    monkeypatch.setattr("quantkit.corpus.bounded", lambda: bounded(0.5))
    (llama / "chat_template.jinja").write_text(template)
    with pytest.raises(CalibrationError, match=why):
        render_chat(resolve(str(llama)).tokenizer(), [{"role": "user", "content": "x"}])


def test_links_out_of_the_folder_are_not_followed(llama: Path, tmp_path: Path, run_cli: Run) -> None:
    """Weights and configuration are refused; a side file is left out and said; a hub snapshot's links to its blobs are its files."""
    (tmp_path / "secret.txt").write_text("secret")
    (llama / "notes.txt").symlink_to(tmp_path / "secret.txt")
    (llama / "loop.txt").symlink_to(llama / "loop.txt")
    os.mkfifo(llama / "pipe.txt")
    code, _, err = run_cli("to-hf", llama, tmp_path / "out")
    assert code == 0 and "not carried over: loop.txt, notes.txt, pipe.txt" in err, err
    assert not (tmp_path / "out" / "notes.txt").exists()
    (llama / "config.json").rename(tmp_path / "c.json")
    (llama / "config.json").symlink_to(tmp_path / "c.json")
    with pytest.raises(SourceError, match="link out of the folder"):
        resolve(str(llama))
    (llama / "config.json").unlink()
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (tmp_path / "c.json").rename(blobs / "c")
    (snapshot / "config.json").symlink_to("../../blobs/c")
    (llama / "model.safetensors").rename(blobs / "w")
    (snapshot / "model.safetensors").symlink_to("../../blobs/w")
    Loader(resolve(str(snapshot)), CPU)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "x" * 300, "a\0b"])
def test_an_index_names_files_of_its_folder(name: str, llama: Path) -> None:
    names = list(load_file(str(llama / "model.safetensors")))
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, name)}))
    with pytest.raises(SourceError, match="files of the folder itself"):
        resolve(str(llama))


@pytest.mark.parametrize("number", [1e999, -1, 1.5, True, "1", 2**70, None])
def test_header_numbers_are_whole_numbers(number: Any, tmp_path: Path) -> None:
    from quantkit.formats._safetensors import read_header

    raw = json.dumps({"a": {"dtype": "U8", "shape": [number], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(8))
    with pytest.raises(SourceError, match=r"x\.safetensors"):
        read_header(tmp_path / "x.safetensors")


def test_a_bin_file_that_stands_for_more_than_it_holds(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    for content in ({"a": torch.zeros(1).expand(9000, 9000)}, [1, 2], torch.zeros(2), {"a": torch.eye(3).to_sparse()}):
        torch.save(content, llama / "pytorch_model.bin")
        with pytest.raises(SourceError, match=r"pytorch_model\.bin"):
            resolve(str(llama))


def test_8_bit_weights_without_their_scales_are_refused(llama: Path) -> None:
    """B19: read as plain floats they would be a thousand times too large."""
    tensors = load_file(str(llama / "model.safetensors"))
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, str(llama / "model.safetensors"), {"format": "pt"})
    for declared in (None, {"quant_method": "fp8", "weight_block_size": [128, 128]}):
        edit_json(llama / "config.json", quantization_config=declared)
        with pytest.raises(SourceError, match="without their scales"):
            resolve(str(llama))


def test_an_importance_matrix_is_not_believed(llama: Path, tmp_path: Path, run_cli: Run, text_file: Path) -> None:
    words = ("--calibration", text_file, "--samples", 2, "--seq-len", 32, "-q")
    assert run_cli("imatrix", llama, "-o", tmp_path / "m.gguf", *words)[0] == 0
    raw = (tmp_path / "m.gguf").read_bytes()
    at = raw.index(b"imatrix.chunk_size") + len(b"imatrix.chunk_size") + 4
    (tmp_path / "m.gguf").write_bytes(raw[:at] + struct.pack("<I", 0) + raw[at + 4 :])
    with pytest.raises(SourceError, match="chunk_size is 0"):
        importance.load(tmp_path / "m.gguf")


def test_calibration_data_is_not_believed(tmp_path: Path) -> None:
    from quantkit.corpus import documents

    for name, raw in (
        ("a.jsonl", b'{"text": "\xff"}'),
        ("b.parquet", b"PAR1" + bytes(50) + b"PAR1"),
        ("c.jsonl", b"[" * 5000),
        ("d.txt", b"\xff"),
    ):
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(CalibrationError, match=name):
            list(documents(str(tmp_path / name)))


def test_front_matter_that_is_no_yaml_does_not_stop_an_export(llama: Path, tmp_path: Path, run_cli: Run) -> None:
    (llama / "README.md").write_text("---\nlicense:\t[mit\n---\n")
    code, _, err = run_cli("export-gguf", llama, "-o", tmp_path / "m.gguf", "--type", "F16")
    assert code == 0 and "front matter is not used" in err
    (llama / "README.md").write_text("---\nlicense: 2024-01-01\ntags: [[a]]\n---\n")
    assert run_cli("export-gguf", llama, "-o", tmp_path / "n.gguf", "--type", "F16")[0] == 0


def test_a_model_card_that_is_a_link_out_of_the_folder_is_not_read(llama: Path, tmp_path: Path, run_cli: Run) -> None:
    (tmp_path / "secret.md").write_text("---\nlicense: secret\n---\nsecret\n")
    (llama / "README.md").symlink_to(tmp_path / "secret.md")
    code, _, err = run_cli("export-gguf", llama, "-o", tmp_path / "m.gguf", "--type", "F16")
    assert code == 0 and "README.md leads out of the folder" in err
    assert b"secret" not in (tmp_path / "m.gguf").read_bytes()
    assert run_cli("rtn", llama, "-o", tmp_path / "out", "-q")[0] == 0
    assert not any("secret" in path.read_text() for path in (tmp_path / "out").glob("README*"))


@pytest.mark.parametrize("changes", [{"num_local_experts": "x"}, {"head_dim": "x"}, {"head_dim": -16}])
def test_an_export_does_not_believe_the_configuration(changes: dict[str, Any], llama: Path, tmp_path: Path, run_cli: Run) -> None:
    edit_json(llama / "config.json", **changes)
    code, _, err = run_cli("export-gguf", llama, "-o", tmp_path / "m.gguf", "--type", "F16")
    assert code == 1 and len(err.strip().splitlines()[-1]) < 300 and "config" in err


def test_an_embedding_of_one_row_is_refused(llama: Path, tmp_path: Path, run_cli: Run) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].reshape(-1)
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    code, _, err = run_cli("export-gguf", llama, "-o", tmp_path / "m.gguf", "--type", "F16")
    assert code == 1 and "embed_tokens" in err


def test_counts_that_the_older_layout_cannot_say(tmp_path: Path) -> None:
    entry = importance.Entry(torch.ones(1, 32), torch.tensor([2.0**40]))
    with pytest.raises(SourceError, match=r"'w' was seen 1099511627776 times.*\.gguf"):
        importance.save(importance.Importance({"w": entry}, 1, 1, ["text"], "test"), tmp_path / "m.dat")


def test_a_file_that_vanishes_and_a_folder_without_rights(
    llama: Path, tmp_path: Path, run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.formats import _safetensors

    def vanish(path: Path, entry: Any) -> Any:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(_safetensors, "read_tensor", vanish)
    code, _, err = run_cli("to-hf", llama, tmp_path / "out", "--dtype", "float16")
    assert code == 1 and "model.safetensors: No such file or directory" in err and "Traceback" not in err


def test_an_ascii_console_and_odd_names(llama: Path, tmp_path: Path) -> None:
    """B15: names and texts that the console cannot show do not end a run."""
    import subprocess
    import sys

    model = llama.rename(tmp_path / "猫")
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "quantkit"]
    done = subprocess.run([*command, "rtn", str(model), "-o", str(tmp_path / "q")], env=env, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "base_model: 猫" in (tmp_path / "q" / "README.md").read_text(encoding="utf-8")
    done = subprocess.run([*command, "generate", str(tmp_path / "q"), "--prompt", "é 猫"], env=env, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_merges_that_were_lost_are_said_by_every_command(run_cli: Run, llama: Path, tmp_path: Path) -> None:
    path = llama / "tokenizer.json"
    described = json.loads(path.read_text())
    described["model"] |= {"merges": [], "vocab": described["model"]["vocab"] | {f"w{i}": 260 + i for i in range(9)}}
    path.write_text(json.dumps(described))
    for words in (("rtn", llama, "-o", tmp_path / "q", "--group-size", 32), ("to-hf", llama, tmp_path / "plain"),
                  ("inspect", llama), ("generate", llama, "--prompt", "abc", "--max-new-tokens", 2)):  # fmt: skip
        code, _, err = run_cli(*words)
        assert code == 0 and "tokenizer.json has no merges" in err, words[0]


def test_a_failure_is_a_json_object_too(llama: Path, tmp_path: Path) -> None:
    for words, code, text in ((("inspect", "./nothing"), 1, "There is no './nothing'"), (("rtn", str(llama), "--bits", "5"), 2, "--bits 5"),
                              (("rtn", str(llama), "--group-size", "100"), 2, "--group-size 100")):  # fmt: skip
        done = subprocess.run([sys.executable, "-m", "quantkit", *words, "--json"], capture_output=True, text=True, cwd=tmp_path)
        document = json.loads(done.stdout.splitlines()[-1])
        assert done.returncode == code == document["exit_code"] and document["command"] == words[0] and text in document["error"]
        assert text in done.stderr


def test_a_name_that_the_console_cannot_read_says_what_to_set(llama: Path, tmp_path: Path) -> None:
    llama.rename(tmp_path / "猫")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = ["generate", "猫".encode(), "--prompt", "abc"]
    done = subprocess.run([sys.executable, "-m", "quantkit", *words], capture_output=True, cwd=tmp_path, env=environment)
    assert done.returncode == 1 and b"Set PYTHONUTF8=1" in done.stderr


def test_tensors_without_a_place_are_named_by_readers_too(run_cli: Run, llama: Path, tmp_path: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    save_file({**weights, "extra.five": torch.zeros(5)}, llama / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "t.txt").write_text("the quick brown fox " * 40)
    for words in (("to-hf", llama, tmp_path / "plain"), ("eval-ppl", llama, "--data", tmp_path / "t.txt", "--window", 64)):
        code, _, err = run_cli(*words)
        assert code == 0 and "extra.five" in err


def test_nan_is_found_before_a_conversion_and_leaves_nothing(run_cli: Run, llama: Path, tmp_path: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 4] = float("nan")
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    code, _, err = run_cli("to-hf", llama, tmp_path / "plain")
    assert code == 1 and "model.layers.1.mlp.down_proj.weight" in err and not list(tmp_path.glob("plain*"))


def test_the_head_size_that_would_fit_is_named(run_cli: Run, llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}))
    for words in (("rtn", llama, "-o", tmp_path / "q", "--group-size", 32), ("export-gguf", llama, "-o", tmp_path / "a.gguf")):
        code, _, err = run_cli(*words)
        assert code == 1 and "head_dim 32" in err
