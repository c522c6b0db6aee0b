"""What a run says at its end although it went well."""

from __future__ import annotations

from typing import Any

from quantkit.errors import name_list
from quantkit.plan import Plan

STARVED, STARVED_SHOWN = 64, 8  # tokens; experts with fewer are named


def remarks_on(plan: Plan, options: Any, notes: list[dict[str, Any]], data: bool) -> list[str]:
    """Return what of a run a user should know although it went well: raised damping, fallbacks, too few tokens, dead columns.

    data: whether the run took statistics.
    """
    columns = {row.module: row.shape[1] for row in plan.packed}
    asked = getattr(options, "damp", 0.0)
    raised = {n["module"]: n["damp"] for n in notes if n["damp"] > asked}
    fallen = [n["module"] for n in notes if n["fallback"]]
    few = {n["module"]: n["tokens"] for n in notes if 0 < n["tokens"] < columns[n["module"]]}
    dead = {n["module"]: n["dead"] for n in notes if n["dead"]}
    remarks = []
    experts = {n["module"].rpartition(".")[0]: n["tokens"] for n in notes if ".experts." in n["module"]}
    if experts and data:
        counts, starved = sorted(experts.values()), sorted((count, name) for name, count in experts.items() if count < STARVED)
        text = f"experts saw {counts[0]} to {counts[-1]} tokens, {counts[len(counts) // 2]} at the median"
        named = name_list([f"{name} ({count})" for count, name in starved], STARVED_SHOWN)
        remarks.append(text + (f"; {len(starved)} under {STARVED}: {named}; more --samples help" if starved else ""))
    if raised:
        remarks.append(f"damping was raised from {asked:g} to {max(raised.values()):g} for {len(raised)} modules: {name_list(raised, 3)}")
    if fallen:
        remarks.append(f"{len(fallen)} modules fell back to plain rounding: {name_list(fallen)}")
    if few:
        remarks.append(
            f"{len(few)} modules saw fewer tokens than they have input columns ({min(few.values())} at least); more --samples help"
        )
    if dead:
        remarks.append(
            f"{len(dead)} modules have input columns that were always zero, {max(dead.values())} at most: rounded like any other"
        )
    return remarks
