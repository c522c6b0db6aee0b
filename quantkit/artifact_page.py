"""One HTML page about one artifact: where its errors and its bits are, what it cost, what it measures. No script, nothing loaded.

Everything shown comes from the artifact, its manifest and, on request, its run's log and a measurement beside the source.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from html import escape

from quantkit.report_page import bar_chart, framed

WORST = 10
PLACE = re.compile(r"^(?P<before>.*?)\.?(?P<layer>\d+)\.(?P<role>.+)$")
EXPERT = re.compile(r"\b(experts)\.\d+")


@dataclass(frozen=True)
class Module:
    """One weight: name, its grid in words, stored bits per weight and bytes, the relative error, seconds to solve (0: not known)."""

    name: str
    grid: str
    bits: float
    nbytes: int
    error: float | None
    seconds: float = 0.0
    fallback: str = ""

    @property
    def place(self) -> tuple[int, str]:
        """The layer, -1 outside of the layers, and the role in it; experts of a layer are one role."""
        match = PLACE.match(self.name)
        if match is None:
            return -1, self.name
        return int(match["layer"]), EXPERT.sub(r"\1", match["role"])


@dataclass
class Facts:
    """What a page shows. lines: label -> text, in order; error_means: what an error is."""

    title: str
    command: str
    modules: list[Module]
    tiles: dict[str, str] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    error_means: str = ""
    notes: list[str] = field(default_factory=list)


def page(facts: Facts) -> str:
    """Return the page."""
    tiles = "".join(f"<div><dt>{escape(label)}<dd>{escape(text)}</div>" for label, text in facts.tiles.items())
    lines = "".join(f"<tr><th>{escape(label)}<td>{escape(text)}" for label, text in facts.lines.items())
    notes = "".join(f"<li>{escape(text)}" for text in facts.notes)
    parts = [
        f"<h1>{escape(facts.title)}</h1><pre>{escape(facts.command)}</pre><dl class=tiles>{tiles}</dl>",
        f"<h2>Notices</h2><ul>{notes}</ul>" if notes else "",
        _errors(facts),
        _bits(facts.modules),
        _worst(facts),
        f"<h2>How it was made</h2><div class=wide><table class=facts>{lines}</table></div>",
    ]
    return framed(facts.title, "".join(parts))


def _errors(facts: Facts) -> str:
    """Return a table of layers and roles; the darker a cell, the larger its error, on a logarithmic scale."""
    cells: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for module in facts.modules:
        if module.error is not None:
            layer, role = module.place
            cells[layer][role].append(module.error)
    inside = {layer: roles for layer, roles in cells.items() if layer >= 0}
    if not inside:
        return ""
    roles = list(dict.fromkeys(role for row in inside.values() for role in row))
    values = [v for row in inside.values() for found in row.values() for v in found if v > 0]
    least, most = (math.log(max(f(values), 1e-12)) for f in (min, max)) if values else (0.0, 0.0)

    def cell(found: list[float]) -> str:
        if not found:
            return "<td>"
        value = sum(found) / len(found)
        share = (math.log(max(value, 1e-12)) - least) / max(most - least, 1e-9)
        return f'<td style="--heat:{100 * min(max(share, 0), 1):.0f}%">{value:.2g}'

    heads = "".join(f"<th>{escape(_short(role))}" for role in roles)
    rows = "".join(f"<tr><th>{layer}" + "".join(cell(inside[layer][role]) for role in roles) for layer in sorted(inside))
    return (
        f"<h2>Error by layer and role</h2><p>{escape(facts.error_means)}</p>"
        f"<div class=wide><table class=heat><tr><th>layer{heads}{rows}</table></div>"
    )


def _short(role: str) -> str:
    return role.removesuffix(".weight").replace("self_attn.", "").replace("mlp.", "").replace("block_sparse_moe.", "")


def _bits(modules: list[Module]) -> str:
    """Return bars: the mean stored bits of the weights of each layer."""
    held: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for module in modules:
        layer = module.place[0]
        held[layer][0] += 8 * module.nbytes
        held[layer][1] += 8 * module.nbytes / module.bits if module.bits else 0.0
    bars = [("others" if layer < 0 else str(layer), bits / max(weights, 1.0)) for layer, (bits, weights) in sorted(held.items())]
    if not bars:
        return ""
    return f"<h2>Bits per weight by layer</h2><div class=wide>{bar_chart(bars, 'bits per weight by layer')}</div>"


def _worst(facts: Facts) -> str:
    known = sorted((m for m in facts.modules if m.error is not None), key=lambda m: -(m.error or 0.0))[:WORST]
    if not known:
        return ""
    timed = any(m.seconds for m in known)
    heads = "<tr><th>module<th>grid<th>bits<th>error" + ("<th>seconds" if timed else "")
    rows = "".join(
        f"<tr><td>{escape(m.name)}<td>{escape(m.grid)}{escape('; ' + m.fallback if m.fallback else '')}<td>{m.bits:.2f}<td>{m.error:.6f}"
        + (f"<td>{m.seconds:.2f}" if timed else "")
        for m in known
    )
    return f"<h2>Worst modules</h2><div class=wide><table>{heads}{rows}</table></div>"
