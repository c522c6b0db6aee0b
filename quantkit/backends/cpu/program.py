"""A recorded step of a model as one call: small kernels over an arena, one after another, all threads in lockstep.

An instruction is a row of int64: the address of its kernel (backends/cpu/instructions.py), whether the threads meet before it, and the
kernel's own numbers. Threads meet by counting up one number: nothing is asked of the operating system while all of them run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from quantkit.backends.cpu import integer
from quantkit.backends.cpu._jit import SETTINGS, jit
from quantkit.backends.cpu.instructions import BINARY, KERNELS, MAKERS, UNARY, WIDTH
from quantkit.backends.cpu.linear import CONSTANT, OFFSETS, ZEROS, factor_of, span_of
from quantkit.errors import BackendError
from quantkit.tensors import bits_of

ROWS = 64  # of the batch that go through all instructions together: their arena stays in the cache
OPEN = 1 << 60  # arrivals that nobody waits for
SPINS = 4000  # looks at the gate before a thread lets others run
SIGNATURE = types.void(*[types.int64] * 7)
CODES = {"unary": UNARY, "binary": BINARY}


@intrinsic  # type: ignore[untyped-decorator]
def _call(typing: Any, kernel: Any, a: Any, arena: Any, pitch: Any, rows: Any, thread: Any, threads: Any, live: Any) -> Any:
    """Call a kernel by its address."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 7).as_pointer()
        builder.call(builder.inttoptr(args[0], kind), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), build


@intrinsic  # type: ignore[untyped-decorator]
def _arrive(typing: Any, gate: Any) -> Any:
    """Count one more arrival at an address."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(types.int64), build


@intrinsic  # type: ignore[untyped-decorator]
def _arrived(typing: Any, gate: Any) -> Any:
    """Return the arrivals so far."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], ir.IntType(64).as_pointer()), "acquire", 8)

    return types.int64(types.int64), build


@intrinsic  # type: ignore[untyped-decorator]
def _let_others(typing: Any) -> Any:
    """Give the processor to another thread."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])

    return types.int32(), build


@lru_cache
def address_of(name: str, *more: int) -> int:
    """Return the address of a kernel, compiled now if it is not on disk; more: bits and unrolled runs of a linear."""
    function = MAKERS[name](*more) if more else KERNELS[name]
    settings = {key: value for key, value in SETTINGS.items() if key != "nogil"}
    try:
        made = cfunc(SIGNATURE, cache=True, **settings)(function)
    except RuntimeError:  # no folder to keep it in
        made = cfunc(SIGNATURE, **settings)(function)
    _kept.append(made)
    return int(made.address)


_kept: list[Any] = []


@jit
def _run(table: Any, first: int, arena: int, pitch: int, rows: int, thread: int, threads: int, live: int, gate: int) -> None:
    """Run all instructions as one of `threads`; first: the address of the table."""
    passed = 0
    for i in range(table.shape[0]):
        if table[i, 1] and threads > 1:
            passed += threads
            _arrive(gate)
            looks = 0
            while _arrived(gate) < passed:
                looks += 1
                if looks > SPINS:
                    _let_others()
        _call(table[i, 0], first + i * WIDTH * 8 + 16, arena, pitch, rows, thread, threads, live)


class Program:
    """Instructions and their arena. floats: numbers of a pitch.

    table: int64 [instructions, WIDTH]; held: what the addresses in it point to.
    """

    def __init__(self, threads: int, table: Any, floats: int, held: list[Any]) -> None:
        self.threads, self.table, self.floats, self.held = threads, table, floats, held
        self.pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None
        self.arena = torch.zeros(ROWS, floats)
        self.gate = np.zeros(8, np.int64)

    def __call__(self, inputs: dict[int, Tensor], out: tuple[int, int], cache: Any, segments: list[Any]) -> Tensor:
        """Run rows, packed side by side: inputs: place in the pitch -> float32 [rows, numbers]; out: place and numbers of the result.

        Returns float32 [rows, numbers]. segments: as in `PagedCache.attend`; their keys and values are in the cache afterwards.
        """
        rows = sum(segment.count for segment in segments)
        pools = np.array([[layer.keys.data_ptr(), layer.values.data_ptr()] for layer in cache.pool.layers], np.int64)
        result = torch.empty(rows, out[1])
        for first in range(0, rows, ROWS):
            last = min(first + ROWS, rows)
            for place, value in inputs.items():
                self.arena[: last - first, place : place + value.shape[1]] = value[first:last]
            self._pass(last - first, self._live(segments, first, last, cache.tokens, pools))
            result[first:last] = self.arena[: last - first, out[0] : out[0] + out[1]]
        return result

    def _live(self, segments: list[Any], first: int, last: int, tokens: int, pools: Any) -> Any:
        """Return what `attend` reads of the segments' rows first..last."""
        found, at = [], 0
        for segment in segments:
            low, high = max(at, first), min(at + segment.count, last)
            if low < high:
                found += [low - first, high - low, segment.start + low - at, segment.table.ctypes.data]
            at += segment.count
        return np.array([len(found) // 4, tokens, pools.ctypes.data, 0, *found], np.int64)

    def _pass(self, rows: int, live: Any) -> None:
        self.gate[0] = 0
        fixed = (self.table.ctypes.data, self.arena.data_ptr(), 4 * self.floats, rows)
        more = (self.threads, live.ctypes.data, self.gate.ctypes.data)
        others = []
        try:
            for thread in range(1, self.threads):
                assert self.pool is not None
                others.append(self.pool.submit(partial(_run, self.table, *fixed, thread, *more)))
            _run(self.table, *fixed, 0, *more)
        finally:  # an interrupt may come before this thread began: nobody waits for it then
            self.gate[0] = OPEN
        for other in others:
            other.result()


def program(threads: int) -> Callable[[Any], Program]:
    """Return a maker of programs for `threads` threads from recordings (`quantkit.infer.capture.Recording`, laid out)."""

    if sys.platform == "win32":
        raise BackendError("threads cannot wait for each other in kernels on Windows")

    def make(recording: Any) -> Program:
        table = np.zeros((len(recording.notes), WIDTH), np.int64)
        apart = False  # whether the one before shares its work out by rows, as this one does
        for row, note in zip(table, recording.notes, strict=True):
            numbers, kernel = note.write(), note.kernel
            more: tuple[int, ...] = ()
            if note.kernel in CODES:
                numbers = [CODES[note.kernel].index(note.detail), *numbers]
            elif note.kernel == "linear":
                planes = note.detail.planes
                before, after = _weight(planes)
                numbers, more = [*before, *numbers, *after], (planes.bits, span_of(planes.group)[0])
                if note.detail.integers:
                    kernel, more = "whole", (planes.bits, integer.BLOCK_COLUMNS[planes.bits] // planes.group)
            row[0], row[1] = address_of(kernel, *more), note.together or not apart
            row[2 : 2 + len(numbers)] = numbers
            apart = not note.together
        return Program(threads, table, recording.floats, recording.held)

    return make


def _weight(planes: Any) -> tuple[list[int], list[int]]:
    """Return a linear's numbers before and after its operands."""
    mode = OFFSETS if planes.offset is not None else ZEROS if planes.zero is not None else CONSTANT
    parts = [0 if part is None else part.data_ptr() for part in (planes.packed, planes.scale, planes.zero, planes.offset)]
    before = [planes.packed.shape[0], planes.scale.shape[1], planes.group, span_of(planes.group)[1]]
    return before, [*parts, mode, planes.middle, bits_of(factor_of(mode, planes.group, planes.middle))]
