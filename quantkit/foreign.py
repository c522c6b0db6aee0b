"""What others wrote: files that are not believed before they are bounded, and libraries whose errors become ours.

A damaged file makes a library raise anything at all: its own exceptions, a KeyError from deep inside, a panic of its Rust part. No list
of classes is ever complete, so this is the one place that catches them all, in the name of the file that caused them.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from quantkit.errors import QuantkitError, SourceError

RENDER_SECONDS = 1.5  # an honest template takes milliseconds
RENDER_BYTES = 1 << 29


def reason(error: BaseException) -> str:
    """Return the first line of an error that says something, without its full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


@contextmanager
def foreign(what: str, advice: str = "", kind: type[QuantkitError] = SourceError) -> Iterator[None]:
    """Turn whatever a library raises over a file into one error of ours; `what` says what failed, `advice` what to do."""
    try:
        yield
    except QuantkitError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # an interrupt, an exit
        raise kind(f"{what} ({reason(error)}).{' ' + advice if advice else ''}") from None


def parse_json(raw: bytes, where: object, kind: type[QuantkitError] = SourceError, hook: Callable[..., Any] | None = None) -> Any:
    """Return the value of JSON text; not UTF-8, too deep or half a character in it is an error that names `where`."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=hook)
        if b"\\ud" in raw or b"\\uD" in raw:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise kind(f"{where} is not readable JSON ({reason(error)}).") from None
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; a SourceError names the file if it is not one."""
    if not path.is_file():
        raise SourceError(f"{path} is missing, or no file.")
    value = parse_json(path.read_bytes(), path)
    if not isinstance(value, dict):
        raise SourceError(f"{path} holds no JSON object.")
    return value


def whole(value: Any, where: str, least: int = 0, most: int = 2**63 - 1) -> int:
    """Return a value that must be a whole number between two limits; a SourceError says what it is instead."""
    if type(value) is not int or not least <= value <= most:
        raise SourceError(f"{where} is {_short(value)}; it must be a whole number from {least} to {most}.")
    return value


def mapping(value: Any, where: str) -> dict[str, Any]:
    """Return a value that must be an object, or nothing at all; a SourceError says what it is instead."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise SourceError(f"{where} is {_short(value)}; it must be an object.")
    return value


def readable(text: str) -> str:
    """Return a name or text of the command line as UTF-8, whatever the console's encoding is."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


@contextmanager
def bounded(seconds: float = RENDER_SECONDS, nbytes: int = RENDER_BYTES) -> Iterator[None]:
    """Stop code that a file brought, such as a chat template: a TimeoutError after so much time, a MemoryError beyond so much memory.

    Where the system has no such limits, or outside the main thread, it runs without.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"it ran for more than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    limit = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform.startswith("linux"):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        with suppress(ValueError):  # a hard limit below it holds already
            resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, limit[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limit)
