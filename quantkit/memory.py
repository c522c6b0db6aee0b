"""The process's memory: its peak, and giving freed blocks back to the system."""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import resource
import sys
from pathlib import Path

ARENA_MAX, MMAP_THRESHOLD = -8, -3  # glibc's malloc.h
LARGE = 1 << 19


SPILL_FROM = 32 << 20


class Spill:
    """Bytes that live in a mapped file without a name: what is not in use costs no resident memory.

    `take` hands out page-aligned pieces; `drop` tells the system that nobody needs them for a while. Touching a piece
    again brings its bytes back, so dropping is never wrong, only slow if it was too early.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        path = folder / "spill.bin"
        with path.open("w+b") as file:
            file.truncate(max(nbytes, mmap.PAGESIZE))
            self.map = mmap.mmap(file.fileno(), 0)
        path.unlink()
        self.used = 0

    @staticmethod
    def room(pieces: list[int]) -> int:
        """Return the bytes that pieces of these sizes take."""
        return sum(math.ceil(size / mmap.PAGESIZE) * mmap.PAGESIZE for size in pieces)

    def take(self, nbytes: int) -> memoryview:
        """Return the next `nbytes` bytes."""
        start = self.used
        self.used += self.room([nbytes])
        return memoryview(self.map)[start : start + nbytes]

    def drop(self) -> None:
        """Let the pages go; the file keeps their content."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED)


def peak() -> int:
    """Return the peak resident memory of this process, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def return_large_blocks() -> None:
    """Make glibc give large freed blocks back at once and keep one heap: tensors come and go in many threads."""
    if sys.platform.startswith("linux") and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(ARENA_MAX, 1)
        mallopt(MMAP_THRESHOLD, LARGE)


def trim() -> None:
    """Collect garbage and give the freed rest of the heap back: what loading and tokenizing left behind."""
    gc.collect()
    if sys.platform.startswith("linux") and (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        malloc_trim(0)
