"""A few hundred mutated inputs on every run; `tests/fuzz/fuzz.py --count 10000` for many."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "fuzz" / "fuzz.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc and sets Linux limits")
def test_mutated_inputs_are_read_or_refused(tmp_path: Path) -> None:
    words = ["--count", "400", "--seed", "20260101", "--work", str(tmp_path / "work"), "--found", str(tmp_path / "found")]
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=500)
    kept = {path.parent.name: path.read_text()[-1500:] for path in (tmp_path / "found").glob("*/trace.txt")}
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}\n{kept}"
    assert "400 inputs in" in done.stdout
