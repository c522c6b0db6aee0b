"""What CONTRIBUTING shows works as it stands there."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit import methods
from quantkit.registry import Row

TEXT = (Path(__file__).resolve().parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_a_method_in_two_edits(
    llama: Path, tmp_path: Path, run_cli: Callable[..., Any], text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, rows = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    module = types.ModuleType("quantkit.methods.clip")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, "clip.py", "exec"), module.__dict__)
    row, options = eval(f"({rows.splitlines()[0].rstrip(',')}, {{{rows.splitlines()[1]}}})", {"Row": Row})
    monkeypatch.setitem(methods.METHODS.rows, row.name, row)
    monkeypatch.setattr(methods, "OPTIONS", methods.OPTIONS | options)
    from quantkit.commands import quantize
    from quantkit.commands._options import RunOptions

    asked = RunOptions(calibration=str(text_file), samples=2, seq_len=32, output=str(tmp_path / "out"), quiet=True)
    document = quantize.run("clip", str(llama), methods.options_of("clip")(share=0.8), asked)
    assert all(0 < note["error"] < 0.2 and note["tokens"] == 64 for note in document["modules"])
    assert run_cli("verify", tmp_path / "out")[0] == 0
