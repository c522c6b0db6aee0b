"""Tables, progress and JSON; the only printing code beside cli and commands.

Everything for people goes to standard error: a live view on a terminal, plain lines elsewhere. `--json` puts one
object on the last line of standard output.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from quantkit import memory
from quantkit.errors import Interrupted
from quantkit.pipeline import Events
from quantkit.plan import Plan

RECENT = 7
WIDTH = 160  # of what no terminal reads: tables are not broken there
NUMBER = re.compile(r"\.\d+\.")
WORST = 5  # modules shown by themselves


def mib(count: float) -> str:
    """Return bytes as MiB for people."""
    return f"{count / 2**20:,.1f} MiB"


class Eye(Events):
    """The view of a run: overall progress, time left, memory, and the last layers' relative output errors."""

    def __init__(self, quiet: bool = False, log_file: str = "", label: str = "") -> None:
        self.label = f"{label}: " if label else ""
        self.log_file = Path(log_file) if log_file else None
        self.budget = 0.0
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        if not self.console.is_terminal:
            self.console = Console(stderr=True, quiet=quiet, highlight=False, width=WIDTH)
        self.process = psutil.Process()
        self.recent: list[tuple[str, dict[str, Any]]] = []
        self.block_began = self.began = time.perf_counter()
        self.errors: list[float] = []
        self.modules: list[tuple[str, dict[str, Any]]] = []
        self.live: Live | None = None
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(), console=self.console,
        )  # fmt: skip
        self.task: Any = None

    def __enter__(self) -> Eye:
        if self.console.is_terminal and not self.console.quiet:
            self.live = Live(self._view(), console=self.console, refresh_per_second=4, transient=True)
            self.live.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self.live:
            self.live.stop()
            self.live = None

    def _event(self, kind: str, **values: Any) -> None:
        """Append an event to the log file, if there is one."""
        if self.log_file:
            line = {"time": round(time.time(), 3), "event": kind, **values, "peak_memory": memory.peak()}
            with self.log_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _view(self) -> Group:
        use = f"memory {mib(self.process.memory_info().rss)}, peak {mib(memory.peak())}"
        lines = [f"  {name:<44} {note['bits']} bits  error {note['error']:.5f}" for name, note in self.recent]
        return Group(self.progress, use, *lines)

    def phase(self, text: str) -> None:
        """Say what begins."""
        self._event("phase", text=text)
        spent = time.perf_counter() - self.began
        self.console.print(f"[dim]{spent:7.1f} s, peak {mib(memory.peak())}[/dim]  {self.label}{text}", soft_wrap=True)

    def notice(self, text: str) -> None:
        """Say what the user should know."""
        self._event("notice", text=text)
        self.console.print(f"[yellow]notice:[/yellow] {escape(text)}", soft_wrap=True)

    def finding(self, level: str, line: str) -> None:
        """Say what a verification found."""
        self._event("finding", level=level, text=line)
        colour = "red" if level in ("error", "gate") else "yellow"
        self.console.print(f"[{colour}]{level}[/{colour}] {escape(line)}", soft_wrap=True)

    def block(self, index: int, total: int) -> None:
        """Advance to a block; Interrupted if the time that a run may take is over."""
        self._event("block", index=index, total=total)
        spent = time.perf_counter() - self.began
        if self.budget and spent > self.budget:
            raise Interrupted(
                f"--time-budget: {spent:.0f} s are spent after {index} of {total} blocks; the same command goes on from there"
            )
        if self.task is None:
            self.task = self.progress.add_task("blocks", total=total)
        self.progress.update(self.task, completed=index)
        self._finish_block(index, total)
        self.block_began = time.perf_counter()

    def count(self, done: int, total: int) -> None:
        """Advance a simple count; silent without a terminal."""
        if self.task is None:
            self.task = self.progress.add_task("written", total=total)
        self.progress.update(self.task, completed=done, total=total)

    def _finish_block(self, index: int, total: int) -> None:
        if self.errors and not self.live:
            mean = sum(self.errors) / len(self.errors)
            seconds = time.perf_counter() - self.block_began
            self.console.print(
                f"  {self.label}block {index}/{total}: mean error {mean:.5f}, {seconds:.1f} s, memory {mib(self.process.memory_info().rss)}"
            )
        self.errors.clear()

    def module(self, name: str, note: dict[str, Any]) -> None:
        """Show a solved module."""
        self._event("module", module=name, **{key: note[key] for key in ("error", "damp", "tokens", "fallback", "seconds")})
        self.errors.append(note["error"])
        self.modules.append((name, note))
        self.recent = [*self.recent, (name, note)][-RECENT:]
        if note["fallback"]:
            self.notice(f"{name}: fell back: {note['fallback']}")
        if self.live:
            self.live.update(self._view())

    def plan(self, plan: Plan, name: str, form: str) -> None:
        """Print what will be done."""
        done = (
            f"{len(plan.packed)} linear layers into {form} format, {plan.bits_per_weight:.2f} bits per weight"
            if plan.packed
            else "scaled, none rounded"
        )
        self.console.print(f"[bold]{name}[/bold]: {done}; {mib(plan.before)} -> {mib(plan.after)}")
        kinds: dict[tuple[str, str], int] = {}
        for row in plan.rows:
            what = row.codec.label if row.codec else "kept"
            kinds[what, row.reason] = kinds.get((what, row.reason), 0) + 1
        for (what, reason), count in kinds.items():
            self.console.print(f"  {count:5d} x {what}" + (f"  ({reason})" if reason else ""))
        for line in plan.runtimes:
            self.console.print(f"  {line}", soft_wrap=True)

    def modules_table(self, notes: list[dict[str, Any]]) -> None:
        """Print the modules by role, means over the layers, then the worst by themselves; --json and the model card have them all."""
        seconds = {name: note["seconds"] for name, note in self.modules}
        table = Table(box=None, header_style="bold", pad_edge=False)
        for head in ("module", "grid", "error", "largest", "damp", "seconds"):
            table.add_column(head, justify="left" if head in ("module", "grid") else "right")
        rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for note in notes:
            rows.setdefault((NUMBER.sub(".*.", note["module"]), note["grid"]), []).append(note)
        worst = sorted(notes, key=lambda note: -note["error"])[:WORST]
        for some in [*rows.values(), *([note] for note in worst if len(notes) > len(rows))]:
            spent = [seconds[note["module"]] for note in some if note["module"] in seconds]
            errors = [note["error"] for note in some]
            name = some[0]["module"] if len(some) == 1 else f"{NUMBER.sub('.*.', some[0]['module'])} ({len(some)})"
            cells = (some[0]["grid"], f"{sum(errors) / len(errors):.6f}", f"{max(errors):.6f}", f"{max(n['damp'] for n in some):g}")
            table.add_row(name, *cells, f"{sum(spent):.2f}" if spent else "")
        self.console.print(table)

    def table(self, head: list[str], rows: list[list[str]]) -> None:
        """Print a table, its first column to the left."""
        table = Table(box=None, header_style="bold", pad_edge=False)
        for number, title in enumerate(head):
            table.add_column(title, justify="right" if number else "left")
        for row in rows:
            table.add_row(*map(escape, row))
        self.console.print(table)

    def scales_table(self, notes: list[dict[str, Any]]) -> None:
        """Print what the scales did, pair by pair: the consumer's output error beside the one without scales, means over blocks."""
        kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for note in notes:
            kinds.setdefault((note["before"], ", ".join(note["group"])), []).append(note)
        table = Table("scales of", "folded into", "blocks", "error", "without", box=None, header_style="bold", pad_edge=False)
        for (before, group), rows in kinds.items():
            errors = [f"{sum(r[key] for r in rows) / len(rows):.6f}" if before else "" for key in ("error", "error_unscaled")]
            table.add_row(group, before or "nothing: no fold keeps the function", str(len(rows)), *errors)
        self.console.print(table)

    def totals(self, lines: dict[str, str]) -> None:
        """Print the closing lines."""
        self._event("totals", lines=lines)
        for key, value in lines.items():
            self.console.print(f"[bold]{key:<16}[/bold] {escape(value)}", soft_wrap=True)
