"""Record quantkit at work as an SVG of a terminal: the README's picture.

    python docs/record.py docs/demo.svg

Runs the README's two commands on the built-in model, in a terminal, and keeps what they print in the end.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 112
COMMANDS = (
    ("quantkit gptq smollm2-135m --bits 4 --samples 16 -o smollm2-gptq", 16),
    ('quantkit generate smollm2-gptq --chat --prompt "What is the capital of France?"', 6),
)


def run(command: str, folder: Path) -> str:
    """Return what a command prints on a terminal, its last view of everything that is drawn again and again."""
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(WIDTH), "LINES": "40", "TERM": "xterm-256color"}
    process = subprocess.Popen(command, shell=True, cwd=folder, stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    held = io.BytesIO()
    while True:
        try:
            piece = os.read(master, 1 << 16)
        except OSError:
            break
        if not piece:
            break
        held.write(piece)
    if process.wait():
        raise SystemExit(f"{command} failed:\n{held.getvalue().decode(errors='replace')}")
    return settle(held.getvalue().decode(errors="replace"))


def settle(text: str) -> str:
    """Return the lines that stay on the screen: a live view erases its own lines before it draws them again."""
    lines: list[str] = []
    for piece in re.split(r"(\x1b\[1A|\x1b\[2K|\x1b\[\?25[hl]|\r\n|\r)", text):
        if piece == "\x1b[1A":
            lines = lines[:-1]
        elif piece == "\x1b[2K":
            lines = [*lines[:-1], ""]
        elif piece == "\r\n":
            lines.append("")
        elif piece and piece != "\r" and not piece.startswith("\x1b[?25"):
            lines = [*lines[:-1], (lines[-1] if lines else "") + piece]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def main() -> None:
    """Run the commands and write the picture."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as folder:
        for command, keep in COMMANDS:
            lines = run(command, Path(folder)).splitlines()
            console.print(Text(f"$ {command}", style="bold green"))
            shown = lines if len(lines) <= 2 * keep else [*lines[:keep], "  ...", *lines[-keep // 2 :]]
            for line in shown:
                console.print(Text.from_ansi(line), soft_wrap=False)
            console.print()
    target = Path(sys.argv[1])
    target.write_text(console.export_svg(title="quantkit"), encoding="utf-8")
    print(f"{target}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    if shutil.which("quantkit") is None:
        raise SystemExit("quantkit is not on PATH: pip install -e '.[demo]'")
    main()
