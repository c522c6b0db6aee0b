"""What cannot be found by looking at a model, one row per family.

Blocks, linear layers and shared inputs are found from the module tree and a traced forward pass; a family needs a
row here only for an exception to that. There is none yet.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """One row: the path of the list of blocks when it cannot be found, and modules that are never quantized."""

    model_type: str
    blocks: str = ""
    keep: tuple[str, ...] = ()


FAMILIES: dict[str, Family] = {}

# Routers decide which expert runs: an error there is not small. Names as transformers gives them.
KEEP_ALWAYS = (r"\.(gate|router|shared_expert_gate)$",)


def family(model_type: str) -> Family:
    """Return the row of a model type, or an empty one: most need none."""
    return FAMILIES.get(model_type, Family(model_type))
