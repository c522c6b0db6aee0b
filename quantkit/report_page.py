"""One HTML page about several artifacts: a table, and divergence against size as a plot. No script, nothing loaded."""

from __future__ import annotations

import math
from html import escape
from typing import Any

WIDTH, HEIGHT, MARGIN = 640, 360, 56
# Colours are variables, so that one rule turns the page dark; the heat of a cell mixes the accent into the background.
STYLE = (
    ":root{color-scheme:light dark;--text:#1c2430;--soft:#5a6675;--line:#d8dee6;--back:#fff;--tile:#f3f6fa;--accent:#2457a7;--hot:#e4803b}"
    "@media(prefers-color-scheme:dark){:root{--text:#e4e9f0;--soft:#9aa7b6;--line:#36404d;--back:#12171e;--tile:#1c242e;--accent:#7fb0ff;"
    "--hot:#b3541c}}"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:64em;margin:2em auto;padding:0 1em;color:var(--text);background:var(--back)}"
    "h1{font-size:1.5em;overflow-wrap:anywhere}h2{font-size:1.15em;margin-top:2em}p{color:var(--soft)}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--tile);padding:.7em 1em;border-radius:6px}"
    "table{border-collapse:collapse}td,th{padding:.3em .8em;text-align:right;border-bottom:1px solid var(--line);font-weight:normal}"
    "th{color:var(--soft)}td:first-child,th:first-child{text-align:left}.wide{overflow-x:auto}"
    ".facts td,.facts th{text-align:left;vertical-align:top;overflow-wrap:anywhere}.facts th{white-space:nowrap}"
    ".heat td{text-align:center;font-size:12px;padding:.25em .5em;background:color-mix(in srgb,var(--hot) var(--heat,0%),var(--back))}"
    ".tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5em,1fr));gap:.8em;margin:1.2em 0}"
    ".tiles div{background:var(--tile);padding:.6em .9em;border-radius:6px}dt{color:var(--soft);font-size:13px}dd{margin:0;font-size:1.1em}"
    "svg{max-width:100%;height:auto}.wide svg{max-width:none}"
    ".wide td:not(.facts td){white-space:nowrap}svg text{font-size:12px;fill:var(--soft)}svg line{stroke:var(--line)}"
    "circle,rect{fill:var(--accent)}"
)


def page(results: list[dict[str, Any]], reference: dict[str, Any] | None, data: str) -> str:
    """Return the page for results as `eval-ppl` documents them."""
    rows = [*([reference] if reference else []), *sorted(results, key=lambda r: float(r["perplexity"]))]
    plot = _plot(results) if reference else ""
    first = results[0]
    how = f"{first['windows']} windows of {first['window']} tokens, protocol {first['protocol']}, {first['scored']} tokens scored"
    return framed("quantkit eval-ppl", f"<h1>Perplexity on {escape(data)}</h1><p>{how}.</p>{_table(rows)}{plot}")


def framed(title: str, body: str) -> str:
    """Return a whole page: its head with the style, and the body."""
    return (
        '<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>{body}</html>\n"
    )


def _table(rows: list[dict[str, Any]]) -> str:
    heads = "".join(f"<th>{head}" for head in ("model", "MiB", "perplexity", "ratio", "KL mean", "KL 99.9 %", "same top token"))
    return f"<div class=wide><table><tr>{heads}" + "".join(f"<tr>{_cells(row)}" for row in rows) + "</table></div>"


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
        f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y(k):.1f}" y2="{y(k):.1f}"/>'
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


def bar_chart(bars: list[tuple[str, float]], label: str) -> str:
    """Return an SVG of (name, height) bars, each with its number above it."""
    wide = max(WIDTH, 30 * len(bars))
    step, most, room = (wide - 16) / len(bars), max(height for _, height in bars) or 1.0, 130
    drawn = "".join(
        f'<rect x="{8 + i * step + 2:.1f}" y="{20 + room * (1 - height / most):.1f}" width="{step - 4:.1f}" '
        f'height="{room * height / most:.1f}"/>'
        f'<text x="{8 + (i + 0.5) * step:.1f}" y="{14 + room * (1 - height / most):.1f}" text-anchor="middle">{height:.3g}</text>'
        f'<text x="{8 + (i + 0.5) * step:.1f}" y="{room + 38}" text-anchor="middle">{escape(name)}</text>'
        for i, (name, height) in enumerate(bars)
    )
    return f'<svg viewBox="0 0 {wide} {room + 46}" width="{wide}" role="img" aria-label="{escape(label)}">{drawn}</svg>'
