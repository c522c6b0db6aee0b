"""The table: names without imports, a UsageError that lists what is known."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quantkit.codecs import CODECS
from quantkit.errors import UsageError
from quantkit.formats import FORMATS
from quantkit.methods import METHODS, OPTIONS
from quantkit.registry import Row, Table


def test_rows_are_imported_when_asked_for() -> None:
    table = Table("thing", [Row("path", "a path", "pathlib:Path"), Row("gone", "nothing", "no_such_module:x")])
    assert table.names() == ["path", "gone"] and [row.summary for row in table] == ["a path", "nothing"]
    assert table["path"].__name__ == "Path"
    with pytest.raises(UsageError, match=r"Unknown thing 'other'\. Known: path, gone"):
        table["other"]


@pytest.mark.parametrize("table", [METHODS, FORMATS, CODECS], ids=lambda t: t.kind)
def test_every_row_is_there(table: Table) -> None:
    for name in table.names():
        assert table[name] is not None
    assert set(OPTIONS) == set(METHODS.names())


def test_listing_imports_nothing_heavy() -> None:
    code = "import sys; from quantkit.methods import METHODS; METHODS.names(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
