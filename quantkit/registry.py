"""The table that the plug-in folders use: a name, a line about it, and where its code is.

Nothing is imported to list a table, so `--help` stays fast. A row's code is imported when it is first asked for.
It is not a discovery mechanism: rows are written by hand in the folder's `__init__.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import UsageError


def data_folder(name: str) -> Path:
    """Return a data folder of the project: inside the package in a wheel, beside it in a checkout."""
    here = Path(__file__).parent
    return here / name if (here / name).is_dir() else here.parent / name


@dataclass(frozen=True)
class Row:
    """One plug-in: its name, one line for the help text, and `module:attribute`."""

    name: str
    summary: str
    target: str


class Table:
    """Rows by name; `table["gptq"]` imports and returns the attribute of that row."""

    def __init__(self, kind: str, rows: list[Row]) -> None:
        self.kind = kind
        self.rows = {row.name: row for row in rows}

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows.values())

    def names(self) -> list[str]:
        """Return the known names in the order of the table."""
        return list(self.rows)

    def __getitem__(self, name: str) -> Any:
        """Import and return what the row `name` points at; an unknown name is a UsageError."""
        if name not in self.rows:
            raise UsageError(f"Unknown {self.kind} '{name}'. Known: {', '.join(self.rows)}.")
        module, _, attribute = self.rows[name].target.partition(":")
        return getattr(importlib.import_module(module), attribute)
