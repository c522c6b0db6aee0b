"""Write docs/commands.md from the command line itself: every command with its flags, as --help prints them.

python docs/commands.py
"""

from __future__ import annotations

from pathlib import Path

import typer

from quantkit.cli import app

WIDTH = 118


def text() -> str:
    """Return the page."""
    group = typer.main.get_command(app)
    parts = ["# Commands\n\nMade from the code by `docs/commands.py`; `quantkit COMMAND --help` prints the same.\n"]
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        context = typer.Context(command, info_name=f"quantkit {name}", terminal_width=WIDTH)
        shown = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
        parts.append(f"## {name}\n\n```\n{shown}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(text(), encoding="utf-8")
