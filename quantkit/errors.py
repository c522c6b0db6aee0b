"""Every error a user can meet, in one tree.

Each message says what was asked, which number broke the rule, and what to do next. The exit code of the
command is the `exit_code` of the error's class, so a caller never parses text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

NUMBER = re.compile(r"\.(\d+)\.")


class QuantkitError(Exception):
    """A failure with a message for people; exit code 1."""

    exit_code = 1


class UsageError(QuantkitError):
    """The request itself cannot be: unknown name, impossible number; exit code 2."""

    exit_code = 2


class SourceError(QuantkitError):
    """The model, or a file of it, is missing, damaged or not what was asked for."""


class CalibrationError(QuantkitError):
    """The calibration data is missing, empty or has no such column."""


class PlanError(QuantkitError):
    """What was asked cannot be stored, loaded or computed; said before any work."""


class BackendError(QuantkitError):
    """A backend cannot compute here: no device, no compiler, a driver that is too old."""


class OutputError(QuantkitError):
    """The output cannot be written, or is there already."""


class ResumeError(QuantkitError):
    """A run was left unfinished with other settings, or its journal is damaged."""


class StrictError(QuantkitError):
    """Something fell back, and `--strict` forbids it."""


class VerifyError(QuantkitError):
    """What was written is not what was planned."""


class GateMissed(QuantkitError):
    """A quality gate was missed; exit code 3."""

    exit_code = 3


class Interrupted(QuantkitError):
    """Stopped by the user; the same command resumes; exit code 130."""

    exit_code = 130


def name_ranges(names: Iterable[str]) -> str:
    """Return all names in one line: those that differ in one number alone become one, with its ranges in braces."""
    kinds: dict[str, list[int]] = {}
    for name in names:
        kinds.setdefault(NUMBER.sub(".{}.", name, count=1), []).extend(int(found[1]) for found in [NUMBER.search(name)] if found)
    return ", ".join(kind.replace("{}", f"{{{_ranges(sorted(numbers))}}}", 1) if numbers else kind for kind, numbers in kinds.items())


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers with runs as first-last."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def name_list(names: object, limit: int = 5) -> str:
    """Return up to `limit` names joined by commas, and how many more there are."""
    items = [str(name) for name in names]  # type: ignore[attr-defined]
    shown = ", ".join(items[:limit])
    return f"{shown} and {len(items) - limit} more" if len(items) > limit else shown
