"""Tokenizers in GGUF: the same ids in llama.cpp, special ids, templates, SentencePiece's own file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import byte_tokenizer, make_model
from llama_runtime import Runtime
from test_export import edit_config

from quantkit.errors import PlanError, SourceError
from quantkit.formats import _sentencepiece as sp
from quantkit.formats._gguf import read_header
from quantkit.formats.gguf_tokenizer import SPLITS
from quantkit.formats.gguf_vocab import find_pre_tokenizer, save_extras

NASTY = "def f(x):\n    return x**2  # 1234567 été\n\n\n \t<s> 你好，世界！🦙🦙 3.14159 don't I'LL  </s>  end   "


def keys_of(folder: Path, tmp_path: Path, run_cli: Callable[..., Any], *extra: str) -> dict[str, Any]:
    code, _, err = run_cli("export-gguf", folder, "-o", tmp_path / "m.gguf", "--type", "F16", "--force", *extra)
    assert code == 0, err
    return {name.removeprefix("tokenizer."): key.value for name, key in read_header(tmp_path / "m.gguf").keys.items()}


def test_llama_cpp_gives_the_tokenizers_ids(llama: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    from transformers import AutoTokenizer

    keys_of(llama, tmp_path, run_cli)
    wanted = AutoTokenizer.from_pretrained(str(llama))(NASTY, add_special_tokens=False)["input_ids"]
    assert Runtime(tmp_path / "m.gguf").tokenize(NASTY) == wanted


@pytest.mark.parametrize(("pre", "name"), [
    ({"type": "ByteLevel", "use_regex": True}, "gpt-2"),
    ({"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}]}, "smollm"),
    *[({"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": SPLITS[name]}},
                                              {"type": "ByteLevel", "use_regex": False}]}, name) for name in ("llama-bpe", "qwen2")],
])  # fmt: skip
def test_pre_tokenizers_are_recognised(pre: dict[str, Any], name: str) -> None:
    assert find_pre_tokenizer({"pre_tokenizer": pre}) == name


@pytest.mark.parametrize(
    "pre", [None, {"type": "Whitespace"}, {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel"}]}]
)
def test_an_unknown_pre_tokenizer_is_refused(pre: Any) -> None:
    with pytest.raises(PlanError, match="--pre-tokenizer NAME"):
        find_pre_tokenizer({"pre_tokenizer": pre})


def test_a_pre_tokenizer_can_be_named(llama: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    described = byte_tokenizer()
    described["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Punctuation", "behavior": "Isolated"}, described["decoder"]],
    }
    (llama / "tokenizer.json").write_text(json.dumps(described))
    code, _, err = run_cli("export-gguf", llama, "-o", tmp_path / "m.gguf")
    assert code == 1
    assert "Punctuation, ByteLevel" in err
    assert keys_of(llama, tmp_path, run_cli, "--pre-tokenizer", "qwen2")["ggml.pre"] == "qwen2"


def test_rows_beyond_the_tokenizer_become_padding(llama: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    keys = keys_of(llama, tmp_path, run_cli)
    assert len(keys["ggml.tokens"]) == 320
    assert keys["ggml.tokens"][319] == "[PAD319]"
    assert keys["ggml.token_type"][:4] == [3, 3, 3, 1]
    assert keys["ggml.token_type"][319] == 5


def test_merges_as_pairs_and_as_strings_are_one(tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    found = []
    for form in (lambda a, b: [a, b], lambda a, b: f"{a} {b}"):
        folder = make_model(tmp_path / f"m{len(found)}")
        described = byte_tokenizer()
        described["model"]["vocab"] |= {"th": 260, "the": 261}
        described["model"]["merges"] = [form("q", "u"), form("t", "h"), form("th", "e")]
        (folder / "tokenizer.json").write_text(json.dumps(described))
        found.append(keys_of(folder, tmp_path, run_cli)["ggml.merges"])
    assert found == [["q u", "t h", "th e"]] * 2


def test_lost_merges_are_an_error(llama: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    described = byte_tokenizer()
    described["model"]["merges"] = []
    (llama / "tokenizer.json").write_text(json.dumps(described))
    code, _, err = run_cli("export-gguf", llama, "-o", tmp_path / "m.gguf")
    assert code == 1
    assert "no merges" in err


def test_every_id_that_ends_a_text_has_a_place(llama: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    edit_config(llama, "generation_config.json", eos_token_id=[2, 5, 7, 9, 4000])
    _code, document, _ = run_cli("export-gguf", llama, "-o", tmp_path / "m.gguf", "--type", "F16", "--json")
    keys = read_header(tmp_path / "m.gguf").keys
    assert [keys[f"tokenizer.ggml.{name}_token_id"].value for name in ("eos", "eot", "eom")] == [2, 5, 7]
    assert any("[9] are left out" in notice for notice in document["notices"])
    assert any("4000 is no token" in notice for notice in document["notices"])


def test_chat_templates(llama: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    text = "{% for m in messages %}🦙{{ m['content'] }}\r\n{% endfor %}"
    (llama / "chat_template.jinja").write_bytes(text.encode())
    assert keys_of(llama, tmp_path, run_cli)["chat_template"] == text
    (llama / "chat_template.jinja").unlink()
    edit_config(llama, "tokenizer_config.json", chat_template=[{"name": "default", "template": "A"}, {"name": "tool use", "template": "B"}])
    keys = keys_of(llama, tmp_path, run_cli)
    assert (keys["chat_template"], keys["chat_template.tool_use"], keys["chat_templates"]) == ("A", "B", ["tool_use"])
    (llama / "chat_template.jinja").write_text("C")
    _code, document, _ = run_cli("export-gguf", llama, "-o", tmp_path / "m.gguf", "--type", "F16", "--force", "--json")
    assert read_header(tmp_path / "m.gguf").get("tokenizer.chat_template") == "C"
    assert any("differ" in notice for notice in document["notices"])


def test_sentencepiece_goes_there_and_back(llama: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    pieces = [sp.Piece(b"<unk>", 0.0, sp.UNKNOWN), sp.Piece(b"<s>", 0.0, sp.CONTROL), sp.Piece(b"</s>", 0.0, sp.CONTROL)]
    pieces += [sp.Piece(f"<0x{i:02X}>".encode(), 0.0, sp.BYTE) for i in range(256)]
    pieces += [sp.Piece(f"▁{c}".encode(), -float(i)) for i, c in enumerate("abcdefghij")] + [sp.Piece(b"x y", -1.5, sp.USER_DEFINED)]
    sp.write_pieces(llama / "tokenizer.model", pieces, True)
    assert sp.read_pieces(llama / "tokenizer.model") == pieces
    keys = keys_of(llama, tmp_path, run_cli)
    assert (keys["ggml.model"], keys["ggml.pre"]) == ("llama", "default")
    assert keys["ggml.tokens"][: len(pieces)] == [piece.text.decode() for piece in pieces]
    assert keys["ggml.scores"][3:][: len(pieces) - 3] == [piece.score for piece in pieces[3:]]
    assert Runtime(tmp_path / "m.gguf").model.get_vocab().n_vocab == 320


@pytest.mark.parametrize("data", [b"", b"\x0a\xff\xff", b"not a model at all", b"\x08" + b"\xff" * 30])
def test_a_damaged_sentencepiece_file_is_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(SourceError, match=r"tokenizer\.model"):
        sp.read_pieces(tmp_path / "tokenizer.model")


def test_a_tokenizer_that_cannot_be_parsed_is_named(llama: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    described = byte_tokenizer()
    described["pre_tokenizer"] = {"type": "Punctuation", "behavior": "nonsense"}
    (llama / "tokenizer.json").write_text(json.dumps(described))
    code, _, err = run_cli("export-gguf", llama, "-o", tmp_path / "m.gguf")
    assert code == 1
    assert "no usable tokenizer" in err


@pytest.mark.parametrize(
    ("scores", "kinds", "words"),
    [([0.0, 0.0], [1, -7], "-7 is no type"), ([0.0, 1e300], [1, 6], "no SentencePiece"), ([0.0, "x"], [1, 6], "no S")],
)
def test_a_vocabulary_that_makes_no_sentencepiece_model_is_refused(scores: Any, kinds: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    held = {"model": "llama", "tokens": ["a", "b"], "scores": scores, "token_type": kinds}
    header = SimpleNamespace(path="m.gguf", keys={}, get=lambda key, default=None: held.get(key.removeprefix("tokenizer.ggml."), default))
    with pytest.raises(SourceError, match=words):
        save_extras(header, tmp_path)  # type: ignore[arg-type]
