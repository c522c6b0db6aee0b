"""How every kernel is compiled: no fast math, no lock held, and kept on disk if a folder for that can be written."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from numba import njit
from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher

SETTINGS: dict[str, Any] = {"nogil": True, "fastmath": False, "error_model": "numpy"}


def jit(function: Callable[..., Any]) -> Any:
    """Compile a kernel on its first call; `error_model` numpy, because a branch for each division would end vectors."""
    try:
        return njit(cache=True, **SETTINGS)(function)
    except RuntimeError:  # neither its folder nor the user's cache can be written
        return njit(**SETTINGS)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile what becomes part of each of its callers, however many there are: a vector handed over in memory costs more than its sum."""
    return njit(forceinline=True, **SETTINGS)(function)


def is_kept(module: ModuleType) -> bool:
    """Tell whether a module's kernels are kept on disk, so that the next process need not compile them."""
    kernels: list[Any] = [value for value in vars(module).values() if isinstance(value, Dispatcher)]
    return not any(isinstance(kernel._cache, NullCache) for kernel in kernels)
