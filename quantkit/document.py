"""The JSON object that `--json` puts on the last line of standard output, of a run that succeeds or fails. Imports no torch."""

from __future__ import annotations

import json
from typing import Any

JSON_VERSION = 1
_printed: list[int] = []


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON object as one line of standard output."""
    print(json.dumps({"version": JSON_VERSION, **document}), flush=True)
    _printed.append(len(document))


def print_failure(command: str, message: str, code: int) -> None:
    """Print what went wrong as a JSON object, unless the command has printed its own already (a missed gate is in it)."""
    if not _printed:
        print_json({"command": command, "error": message, "exit_code": code})
