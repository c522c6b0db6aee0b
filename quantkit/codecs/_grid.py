"""Which widths and groups integers have. Imports no torch, so that the command line can refuse others at once."""

from __future__ import annotations

from quantkit.errors import UsageError

BITS = (2, 3, 4, 8)
GROUPS = (16, 32, 64, 128, -1)


def require_grid(bits: int, group: int) -> None:
    """Refuse what no codec of integers has; a UsageError names what there is."""
    if bits not in BITS:
        raise UsageError(f"--bits {bits} cannot be. Known: {', '.join(map(str, BITS))}.")
    if group not in GROUPS:
        raise UsageError(f"--group-size {group} cannot be. Known: {', '.join(map(str, GROUPS))} (-1: one group per row).")
