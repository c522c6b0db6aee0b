"""Documents to rows: packing, columns, chat, seeds, and errors that list what there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import write_tokenizer

from quantkit import corpus
from quantkit.errors import CalibrationError, UsageError


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(str(folder))


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def test_documents_are_packed_not_dropped(tokenizer: Any, tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", [{"text": "ab"}, {"text": "c" * 5}, {"text": "d" * 30}])
    ids, count = corpus.encode(tokenizer, corpus.documents(path), 10**6)
    assert count == 3 and tokenizer.decode(ids) == "ab</s>ccccc</s>" + "d" * 30
    windows = corpus.pack_windows(ids, 8, [])
    assert windows.shape == (4, 8) and windows.flatten().tolist() == ids[:32]


def test_rows_are_drawn_by_seed(tokenizer: Any, text_file: Path) -> None:
    first, again, other = (corpus.draw(tokenizer, str(text_file), 5, 32, seed) for seed in (0, 0, 1))
    assert torch.equal(first.rows, again.rows) and first.digest() == again.digest()
    assert not torch.equal(first.rows, other.rows) and first.rows.shape == (5, 32)


def test_too_little_is_said_and_none_is_an_error(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("x" * 70)
    tokens = corpus.draw(tokenizer, str(tmp_path / "short.txt"), 10, 32, 0)
    assert len(tokens.rows) == 2 and "fills 2 of the 10 samples" in tokens.notices[0]
    (tmp_path / "empty.txt").write_text("")
    for name in ("empty.txt",):
        with pytest.raises(CalibrationError, match="0 tokens from 0 documents"):
            corpus.draw(tokenizer, str(tmp_path / name), 10, 32, 0)
    with pytest.raises(UsageError, match="--seq-len 4"):
        corpus.draw(tokenizer, str(tmp_path / "short.txt"), 10, 4, 0)


def test_columns_are_listed(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", [{"question": "a", "answer": "b"}])
    with pytest.raises(CalibrationError, match="It has: question, answer"):
        list(corpus.documents(path))
    with pytest.raises(CalibrationError, match=r"column 'txt'.*question, answer"):
        list(corpus.documents(path, "txt"))
    assert list(corpus.documents(path, "answer")) == ["b"]
    with pytest.raises(CalibrationError, match="holds int"):
        list(corpus.documents(lines(tmp_path / "n.jsonl", [{"text": 5}])))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text"')
    with pytest.raises(CalibrationError, match="line 2"):
        list(corpus.documents(str(tmp_path / "bad.jsonl")))
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(CalibrationError, match="not UTF-8"):
        list(corpus.documents(str(tmp_path / "latin.txt")))


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"], "n": [1, 2]}), tmp_path / "d.parquet")
    assert list(corpus.documents(str(tmp_path / "d.parquet"))) == ["a", "b"]
    (tmp_path / "bad.parquet").write_bytes(b"nothing")
    with pytest.raises(CalibrationError, match="not readable Parquet"):
        list(corpus.documents(str(tmp_path / "bad.parquet")))


def test_chat_goes_through_the_template(tokenizer: Any, tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}])
    ids, _ = corpus.encode(tokenizer, corpus.documents(path), 100)
    assert tokenizer.decode(ids) == "user: hi\nassistant: yo\n"
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    ids, _ = corpus.encode(tokenizer, corpus.documents(path), 100)
    assert tokenizer.decode(ids) == "[user]hi[assistant]yo"


def test_the_beginning_token_comes_where_the_tokenizer_puts_it(tokenizer: Any, text_file: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    assert corpus.bos_prefix(tokenizer) == []
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert corpus.bos_prefix(tokenizer) == [1]
    rows = corpus.draw(tokenizer, str(text_file), 3, 32, 0).rows
    assert rows[:, 0].tolist() == [1, 1, 1] and not (rows[:, 1:] == 1).any()


def test_names(tokenizer: Any) -> None:
    named = corpus.named_sets()
    assert {"wikitext2", "c4", "pile-val", "ultrachat"} <= set(named)
    assert all({"path", "split", "revision", "column", "licence", "rows"} <= set(entry) for entry in named.values())
    with pytest.raises(CalibrationError, match="--offline forbids"):
        next(corpus.documents("c4", offline=True))
    with pytest.raises(CalibrationError, match="--offline forbids"):
        next(corpus.documents("hf:someone/something", offline=True))


def test_bundled_texts_are_many_and_whole(tokenizer: Any) -> None:
    found = list(corpus.documents("bundled"))
    assert len(found) > 90
    assert sum(isinstance(item, list) for item in found) >= 20
    assert sum(len(item) for item in found if isinstance(item, str)) > 100_000
    drawn = corpus.draw(tokenizer, "bundled", 2, 64, 0)
    assert f"from {len(found)} documents" in drawn.origin, "a small draw is from all of them"
    held = list(corpus.documents(corpus.HELD_OUT))
    assert len(held) >= 8 and not set(held) & {item for item in found if isinstance(item, str)}
    assert not [item for item in found if isinstance(item, str) and corpus.BREAK in item]
