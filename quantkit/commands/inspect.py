"""`quantkit inspect` and `quantkit diff`: what an artifact holds, and how two differ."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from rich.table import Table

from quantkit import inventory
from quantkit.commands._options import DiffOptions, InspectOptions
from quantkit.document import print_json
from quantkit.inventory import Difference, Item
from quantkit.report import Eye, mib
from quantkit.source import resolve


def inspect(model: str, asked: InspectOptions) -> None:
    """Print schemes, sizes and runtimes of a source; with --tensors every tensor."""
    source = resolve(model, asked.revision, asked.offline, asked.trust_remote_code)
    found = list(inventory.items(source))
    takers = inventory.who_takes_it(source, found)
    weights, nbytes = sum(math.prod(item.shape) for item in found), sum(item.nbytes for item in found)
    kind = "gguf" if source.gguf_file else source.quantized or "plain checkpoint"
    with Eye() as eye:
        for text in source.notices:
            eye.notice(text)
        size = f"{weights / 1e6:,.1f} million weights, {mib(nbytes)}, {8 * nbytes / max(weights, 1):.3f} bits per weight"
        eye.totals({"source": f"{source.name}: {kind}, model type {source.config().model_type}", "holds": size})
        for scheme, (count, share, held) in _schemes(found).items():
            eye.totals({f"  {count} x {scheme}": f"{share / 1e6:,.1f} million weights, {mib(held)}"})
        for line in takers:
            eye.totals({"runtimes": line})
        if asked.tensors:
            eye.console.print(_tensor_table(found))
    if asked.json:
        document = {"command": "inspect", "model": model, "kind": kind, "model_type": source.config().model_type, "weights": weights}
        tensors = [{"name": i.name, "shape": list(i.shape), "scheme": i.scheme, "bytes": i.nbytes} for i in found]
        print_json({**document, "bytes": nbytes, "runtimes": takers, "notices": source.notices, "tensors": tensors})


def _schemes(found: list[Item]) -> dict[str, tuple[int, int, int]]:
    """Return scheme -> (tensors, weights, bytes), the largest first."""
    count: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    held: Counter[str] = Counter()
    for item in found:
        count[item.scheme] += 1
        weights[item.scheme] += math.prod(item.shape)
        held[item.scheme] += item.nbytes
    return {scheme: (count[scheme], weights[scheme], size) for scheme, size in held.most_common()}


def _tensor_table(found: list[Item]) -> Table:
    table = Table("tensor", "shape", "scheme", "bits", "bytes", box=None, header_style="bold", pad_edge=False)
    for item in found:
        table.add_row(item.name, "x".join(map(str, item.shape)), item.scheme, f"{item.bits:.2f}", f"{item.nbytes:,}")
    return table


def diff(a: str, b: str, asked: DiffOptions) -> None:
    """Print how two sources differ, the largest differences first."""
    sources = [resolve(model, None, asked.offline, asked.trust_remote_code) for model in (a, b)]
    found = list(inventory.differences(*sources))
    changed = sorted((d for d in found if d.error != 0), key=lambda d: -(math.inf if d.error is None else d.error))
    with Eye() as eye:
        eye.totals({"tensors": f"{len(found)}, of which {len(found) - len(changed)} hold equal values"})
        for label, side in (("a", [d.a for d in found]), ("b", [d.b for d in found])):
            eye.totals({label: f"{(a, b)[label == 'b']}: {mib(sum(item.nbytes for item in side if item))}"})
        if changed:
            eye.console.print(_difference_table(changed[: asked.most or len(changed)]))
        if asked.most and len(changed) > asked.most:
            eye.totals({"more": f"{len(changed) - asked.most} tensors differ less; --most 0 shows all"})
    if asked.json:
        print_json({"command": "diff", "a": a, "b": b, "equal": len(found) - len(changed), "tensors": [_row(d) for d in changed]})


def _row(difference: Difference) -> dict[str, Any]:
    sides = {key: item and {"scheme": item.scheme, "bytes": item.nbytes, "shape": list(item.shape)}
             for key, item in (("a", difference.a), ("b", difference.b))}  # fmt: skip
    return {"name": difference.name, **sides, "error": difference.error}


def _difference_table(changed: list[Difference]) -> Table:
    table = Table("tensor", "a", "b", "bytes", "|a - b| / |b|", box=None, header_style="bold", pad_edge=False)
    for d in changed:
        sides = [item.scheme if item else "absent" for item in (d.a, d.b)]
        sizes = f"{d.a.nbytes if d.a else 0:,} -> {d.b.nbytes if d.b else 0:,}"
        table.add_row(d.name, *sides, sizes, "other shape" if d.error is None else f"{d.error:.3e}")
    return table
