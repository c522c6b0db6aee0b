"""The process's memory: its peak, and giving freed blocks back to the system."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys

ARENA_MAX, MMAP_THRESHOLD = -8, -3  # glibc's malloc.h
LARGE = 1 << 20


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
