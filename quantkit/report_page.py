"""One HTML page about several artifacts: a table, and divergence against size as a plot. No script, nothing loaded."""

from __future__ import annotations

import math
from html import escape
from typing import Any

WIDTH, HEIGHT, MARGIN = 640, 360, 56
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:62em;margin:2em auto;padding:0 1em}table{border-collapse:collapse}"
    "td,th{padding:.3em .8em;text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}"
    "svg text{font-size:12px}circle{fill:#2457a7}"
)


def page(results: list[dict[str, Any]], reference: dict[str, Any] | None, data: str) -> str:
    """Return the page for results as `eval-ppl` documents them."""
    rows = [*([reference] if reference else []), *sorted(results, key=lambda r: float(r["perplexity"]))]
    plot = _plot(results) if reference else ""
    first = results[0]
    how = f"{first['windows']} windows of {first['window']} tokens, protocol {first['protocol']}, {first['scored']} tokens scored"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>quantkit eval-ppl</title><style>{STYLE}</style>"
        f"<h1>Perplexity on {escape(data)}</h1><p>{how}.</p>{_table(rows)}{plot}</html>\n"
    )


def _table(rows: list[dict[str, Any]]) -> str:
    heads = "".join(f"<th>{head}" for head in ("model", "MiB", "perplexity", "ratio", "KL mean", "KL 99.9 %", "same top token"))
    return f"<table><tr>{heads}" + "".join(f"<tr>{_cells(row)}" for row in rows) + "</table>"


def _cells(row: dict[str, Any]) -> str:
    values = [escape(str(row["model"])), f"{row['bytes'] / 2**20:,.1f}", f"{row['perplexity']:.4f} &plusmn; {row['error']:.4f}"]
    if "kl_mean" in row:
        values += [f"{row['ratio']:.5f}", f"{row['kl_mean']:.5f}", f"{row['kl_999']:.4f}", f"{100 * row['top1']:.2f} %"]
    else:
        values += [""] * 4
    return "".join(f"<td>{value}" for value in values)


def _plot(results: list[dict[str, Any]]) -> str:
    """Return an SVG: size in MiB across, mean divergence upwards on a logarithmic scale."""
    sizes = [row["bytes"] / 2**20 for row in results]
    levels = [math.log10(max(float(row["kl_mean"]), 1e-9)) for row in results]
    bottom, top = math.floor(min(levels)), math.ceil(max(levels) + 1e-9)
    wide, high = max(sizes) * 1.1 or 1.0, max(top - bottom, 1)

    def x(size: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * size / wide

    def y(level: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (level - bottom) / high

    grid = "".join(
        f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y(k):.1f}" y2="{y(k):.1f}" stroke="#ddd"/>'
        f'<text x="{MARGIN - 8}" y="{y(k) + 4:.1f}" text-anchor="end">1e{k}</text>'
        for k in range(bottom, bottom + high + 1)
    )
    ticks = "".join(
        f'<text x="{x(wide * i / 4):.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{wide * i / 4:,.0f}</text>' for i in range(5)
    )
    points = "".join(
        f'<circle cx="{x(size):.1f}" cy="{y(level):.1f}" r="4"/>'
        f'<text x="{x(size) + 7:.1f}" y="{y(level) - 5:.1f}">{escape(str(row["model"]).rstrip("/").rsplit("/", 1)[-1])}</text>'
        for row, size, level in zip(results, sizes, levels, strict=True)
    )
    names = f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">MiB</text><text x="8" y="24">mean KL divergence (nats)</text>'
    label = "divergence against size"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="{label}">{grid}{ticks}{names}{points}</svg>'
