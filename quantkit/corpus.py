"""Calibration data: documents in, rows of token ids out.

A corpus is a text, JSONL or Parquet file, a named or hub data set, the bundled texts, or text the model writes
itself. Documents are packed one after the other with the end-of-text token between them; nothing is dropped or
padded. Rows are drawn by seed from the non-overlapping windows, and begin with the beginning-of-text token where the
tokenizer would put one.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import CalibrationError, UsageError
from quantkit.foreign import bounded, foreign, parse_json
from quantkit.registry import data_folder

BREAK = "<|document|>"
HELD_OUT = "held-out"  # texts of the same kinds as the bundled ones, none of them among those
TEXT_COLUMNS = ("text", "content", "messages", "conversations", "prompt")
ENOUGH = 2  # read this many times the tokens asked for, so that the seed has windows to choose from
ALL = 1 << 40
LONG = 6  # characters read per token wanted: a document of a gigabyte is not tokenized whole
Document = str | list[dict[str, str]]


@dataclass(frozen=True)
class Tokens:
    """Rows of ids, int64 [samples, seq_len], with where they came from and their SHA-256."""

    rows: Tensor
    origin: str
    notices: list[str]

    def digest(self) -> str:
        """Return the SHA-256 of the ids."""
        return hashlib.sha256(self.rows.numpy().tobytes()).hexdigest()


def documents(spec: str, column: str = "", offline: bool = False) -> Iterator[Document]:
    """Yield the documents of a corpus: strings, or lists of chat messages. A CalibrationError says what is wrong."""
    path = Path(spec).expanduser()
    if spec == "bundled":
        for file in sorted(data_folder("calibration").joinpath("bundled").iterdir()):
            yield from _file_documents(file, "messages" if file.suffix == ".jsonl" else "")
    elif spec == HELD_OUT:
        yield from _file_documents(data_folder("calibration") / "held-out.txt", "")
    elif path.is_file():
        yield from _file_documents(path, column)
    elif spec.startswith("hf:"):
        yield from _hub_documents({"path": spec.removeprefix("hf:"), "split": "train"}, column, offline)
    elif spec in (named := named_sets()):
        yield from _hub_documents(named[spec], column, offline)
    else:
        raise CalibrationError(f"--calibration '{spec}' is no file and no name. Known: bundled, self, {', '.join(named)}, hf:owner/name.")


def named_sets() -> dict[str, dict[str, Any]]:
    """Return the manifest of named data sets."""
    return tomllib.loads((data_folder("calibration") / "datasets.toml").read_text(encoding="utf-8"))


def _file_documents(path: Path, column: str) -> Iterator[Document]:
    if path.suffix in (".jsonl", ".json"):
        yield from (_document(row, column, path) for row in _json_rows(path))
    elif path.suffix == ".parquet":
        for rows in _parquet_rows(path):
            yield from (_document(row, column, path) for row in rows)
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CalibrationError(f"{path} is not UTF-8 text ({error}).") from None
        yield from (part.strip("\n") + "\n" if BREAK in text else part for part in text.split(BREAK) if part.strip())


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            row = parse_json(line, f"{path}, line {number},", CalibrationError)
            if not isinstance(row, dict):
                raise CalibrationError(f"{path}, line {number}: not a JSON object.")
            yield row


def _parquet_rows(path: Path) -> Iterator[list[dict[str, Any]]]:
    import pyarrow.parquet

    with foreign(f"{path} is not readable Parquet", kind=CalibrationError):
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        while (batch := next(batches, None)) is not None:
            yield batch.to_pylist()


def _document(row: dict[str, Any], column: str, origin: object) -> Document:
    chosen = column or next((name for name in TEXT_COLUMNS if name in row), "")
    if chosen not in row:
        wanted = f"column '{column}'" if column else f"any of the columns {', '.join(TEXT_COLUMNS)}"
        raise CalibrationError(f"{origin} has not {wanted}. It has: {', '.join(row)}. Choose one with --column.")
    value = row[chosen]
    if isinstance(value, list):
        if not all(isinstance(message, dict) for message in value):
            raise CalibrationError(f"{origin}: column '{chosen}' holds a list, but not of chat messages.")
        return [{"role": m.get("role") or m.get("from", ""), "content": m.get("content") or m.get("value", "")} for m in value]
    if not isinstance(value, str):
        raise CalibrationError(f"{origin}: column '{chosen}' holds {type(value).__name__}, not text or chat messages.")
    return value


def _hub_documents(entry: dict[str, Any], column: str, offline: bool) -> Iterator[Document]:
    if offline:
        raise CalibrationError(f"The data set {entry['path']} needs the network, and --offline forbids it. Use a file or 'bundled'.")
    import datasets

    known = {k: entry[k] for k in ("path", "name", "split", "revision", "data_files") if k in entry}
    try:
        rows = datasets.load_dataset(**known, streaming=True)
        for row in rows:
            yield _document(row, column or entry.get("column", ""), entry["path"])
    except (OSError, ValueError, RuntimeError) as error:
        raise CalibrationError(f"The data set {entry['path']} could not be read: {str(error).splitlines()[0]}.") from None


def encode(tokenizer: Any, items: Iterable[Document], enough: int) -> tuple[list[int], int]:
    """Return about `enough` ids or more, documents joined by the end-of-text token, and how many documents were read."""
    ids: list[int] = []
    count = 0
    for item in items:
        if count and tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        if not isinstance(item, str):
            item = _chat_text(tokenizer, item)
        ids += tokenizer(item[: (enough - len(ids)) * LONG], add_special_tokens=False, verbose=False)["input_ids"]
        count += 1
        if len(ids) >= enough:
            break
    return ids, count


def _chat_text(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    if tokenizer.chat_template:
        # Some templates refuse a system message or two turns of one role; a broken one fails at every message.
        with suppress(CalibrationError):
            return render_chat(tokenizer, messages)
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages) + "\n"


def render_chat(tokenizer: Any, messages: list[dict[str, str]], **how: Any) -> str:
    """Return what the model's chat template makes of messages, within limits of time and memory; a CalibrationError if it fails."""
    with foreign("The model's chat template cannot be rendered", kind=CalibrationError), bounded():
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **how))


def bos_prefix(tokenizer: Any) -> list[int]:
    """Return the ids that the tokenizer itself puts before a text: usually none, or the beginning-of-text token."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []


def pack_windows(ids: list[int], length: int, prefix: list[int]) -> Tensor:
    """Return non-overlapping windows, int64 [windows, length], each beginning with `prefix`; the tail is left out."""
    step = length - len(prefix)
    windows = len(ids) // step
    body = torch.tensor(ids[: windows * step], dtype=torch.int64).view(windows, step)
    return torch.cat([torch.tensor(prefix, dtype=torch.int64).expand(windows, -1), body], 1)


def draw(tokenizer: Any, spec: str, samples: int, length: int, seed: int, column: str = "", offline: bool = False) -> Tokens:
    """Return `samples` rows of `length` tokens of a corpus, drawn by seed; too little data is a notice, none an error."""
    if samples < 1 or length < 8:
        raise UsageError(f"--samples {samples} --seq-len {length} cannot be: at least 1 sample of 8 tokens.")
    prefix = bos_prefix(tokenizer)
    enough = ALL if spec == "bundled" else ENOUGH * samples * length  # a mix is drawn from as a whole
    ids, count = encode(tokenizer, documents(spec, column, offline), enough)
    windows = pack_windows(ids, length, prefix)
    if not len(windows):
        raise CalibrationError(f"{spec} gives {len(ids)} tokens from {count} documents: less than one sample of {length}.")
    notices = []
    if len(windows) < samples:
        notices.append(f"{spec} fills {len(windows)} of the {samples} samples asked for")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(windows), generator=generator)[:samples].sort().values
    origin = f"{spec}: {len(chosen)} of {len(windows)} windows of {length} tokens from {count} documents"
    return Tokens(windows[chosen], origin, notices)
