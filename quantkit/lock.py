"""One run per output: an unfinished folder is locked while a run writes it, and a second run is refused.

The lock belongs to the process, so a killed run leaves none behind. Where the system has no such locks, there is none.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quantkit.errors import OutputError


@contextmanager
def hold(folder: Path) -> Iterator[Path]:
    """Make a folder if it is not there and keep other runs out of it; an OutputError if one is in it."""
    try:
        import fcntl
    except ImportError:
        folder.mkdir(exist_ok=True)
        yield folder
        return
    folder.mkdir(exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(f"Another run is writing {folder}. Wait for it, or choose another --output.") from None
        yield folder
    finally:
        with suppress(OSError):
            folder.rmdir()  # if nothing was written: a refusal leaves nothing behind
        os.close(handle)


def clear(folder: Path) -> None:
    """Remove what a folder holds, but not the folder, which may be locked."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
