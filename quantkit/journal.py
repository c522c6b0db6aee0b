"""What makes a killed run resumable: finished blocks, the states entering the next one, and the settings of the run.

In NAME.partial/journal: settings.json; per block one part file (packed tensors) and one JSON record, whose rename
commits the block; two generations of states. A record holds the checksums of its part and states, so a half-written
file is noticed and its block done again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import ResumeError
from quantkit.formats import _safetensors as st
from quantkit.lock import clear

VERSION = 1


class Journal:
    """The journal of one run. `done` blocks are committed; `resumed` tells whether some were found at the start."""

    def __init__(self, partial: Path, settings: dict[str, Any], restart: bool, keep_states: bool = True) -> None:
        self.partial = partial
        self.keep_states = keep_states
        self.folder = partial / "journal"
        settings = json.loads(json.dumps({"version": VERSION, **settings}))
        if restart and partial.exists():
            clear(partial)
        if (self.folder / "settings.json").exists():
            self._compare(settings)
        else:
            if partial.exists():
                clear(partial)
            self.folder.mkdir(parents=True)
            _write_json(self.folder / "settings.json", settings)
        self.records = self._read_records()
        self.resumed = bool(self.records)

    @property
    def done(self) -> int:
        """How many blocks are committed."""
        return len(self.records)

    def _compare(self, settings: dict[str, Any]) -> None:
        try:
            old = json.loads((self.folder / "settings.json").read_text(encoding="utf-8"))
        except ValueError:
            raise ResumeError(f"{self.folder / 'settings.json'} is damaged. Start over with --restart.") from None
        if changed := list(_changes(old, settings)):
            lines = "; ".join(f"{key} was {_short(before)}, now {_short(now)}" for key, before, now in changed)
            raise ResumeError(
                f"{self.partial} holds an unfinished run with other settings: {lines}. "
                "Finish that run with its settings, or start over with --restart."
            )

    def _read_records(self) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        while (path := self.folder / f"{len(records):05d}.json").exists():
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                break
            part = self.part(len(records))
            if part.exists() and _digest(part) != record["part"]:
                break
            records.append(record)
        return records

    def part(self, index: int) -> Path:
        """Return the path of a block's part file; it is gone once its tensors are in a shard."""
        return self.folder / f"{index:05d}.safetensors"

    def commit(self, tensors: dict[str, Tensor], notes: list[dict[str, Any]], states: list[Tensor] | None,
               folds: list[dict[str, Any]]) -> None:  # fmt: skip
        """Record the next block; its JSON's rename is the moment it counts."""
        index = self.done
        st.write_file(self.part(index), tensors)
        record = {"part": _digest(self.part(index)), "notes": notes, "folds": folds, "tensors": list(tensors), "states": None}
        if states is not None and self.keep_states:
            record["states"] = self._write_states(index % 2, states)
        _write_json(self.folder / f"{index:05d}.json", record)
        self.records.append(record)

    def _write_states(self, generation: int, states: list[Tensor]) -> str:
        digest = hashlib.sha256()
        with (self.folder / f"states-{generation}.bin").open("wb") as file:
            for state in states:
                for piece in st.tensor_bytes(state):
                    digest.update(piece)
                    file.write(piece)
            st.sync(file)
        return digest.hexdigest()

    def read_states(self, states: list[Tensor]) -> bool:
        """Fill `states` with those after the last committed block; False if they were not stored or are damaged."""
        path = self.folder / f"states-{(self.done - 1) % 2}.bin"
        wanted = self.records[-1]["states"]
        if wanted is None or not path.exists() or path.stat().st_size != sum(s.nbytes for s in states):
            return False
        if _digest(path) != wanted:
            return False
        with path.open("rb", buffering=0) as file:
            for state in states:
                view, done = state.reshape(-1).view(torch.uint8).numpy().data, 0
                while done < len(view):
                    done += file.readinto(view[done:]) or 0
        return True

    def notes(self) -> list[dict[str, Any]]:
        """Return the notes of all committed blocks, one per quantized module."""
        return [note for record in self.records for note in record["notes"]]

    def folds(self) -> list[dict[str, Any]]:
        """Return the notes of all committed blocks on the scales folded into them."""
        return [{"block": index, **note} for index, record in enumerate(self.records) for note in record["folds"]]

    def held(self) -> dict[str, int]:
        """Return the block of every tensor in the part files."""
        return {name: index for index, record in enumerate(self.records) for name in record["tensors"]}

    def drop_states(self) -> None:
        """Delete the states: the last block is done."""
        for path in self.folder.glob("states-*.bin"):
            path.unlink()

    def remove(self) -> None:
        """Delete the journal: the output is verified."""
        shutil.rmtree(self.folder)


def _changes(old: Any, new: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, before, now) of every setting that differs, inside tables too."""
    for key in {**old, **new}:
        before, now = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(now, dict):
            yield from _changes(before, now, f"{prefix}{key}.")
        elif before != now:
            yield f"{prefix}{key}", before, now


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
