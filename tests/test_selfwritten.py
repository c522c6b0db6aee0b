"""Text that the model writes itself: seeded, kept by hash, refused when the model does not fit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quantkit import selfwritten
from quantkit.errors import CalibrationError
from quantkit.loader import Loader
from quantkit.source import resolve


def test_it_is_seeded_kept_and_refused(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def write(seed: int, cache: str) -> torch.Tensor:
        source = resolve(str(llama))
        return selfwritten.write(Loader(source, torch.device("cpu")), source.tokenizer(), 3, 24, seed, tmp_path / cache, said.append).rows

    first = write(0, "a")
    assert first.shape == (3, 24) and not (first < 3).any()
    assert torch.equal(first, write(0, "b")) and not torch.equal(first, write(1, "a"))
    monkeypatch.setattr(selfwritten, "_sample", lambda *args: pytest.fail("written again"))
    assert torch.equal(first, write(0, "a"))
    monkeypatch.setattr(selfwritten.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(CalibrationError, match="needs the whole model in memory"):
        write(5, "c")
