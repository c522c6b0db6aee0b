"""Encoders beside ggml's own, one thread each, same rows, processor time: python tests/bench/ggml_speed.py LIBGGML_BASE.so

The library is built by llama.cpp's CMake (Release, default native flags). Prints millions of weights per second and
the ratio, and how much two threads give.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from quantkit.backends import Backend
from quantkit.codecs import CODECS, GGML_TYPES

ROWS, COLUMNS = 4096, 2048


def best(work: Callable[[], object], clock: Callable[[], float], times: int = 3) -> float:
    found = []
    for _ in range(times):
        began = clock()
        work()
        found.append(clock() - began)
    return min(found)


def main(library: str) -> None:
    ggml = ctypes.CDLL(library)
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, long, long, long, pointer]
    rng = np.random.default_rng(0)
    rows = torch.from_numpy((0.02 * rng.standard_normal((ROWS, COLUMNS))).astype(np.float32))
    weights = torch.from_numpy(np.exp(1.5 * rng.standard_normal(COLUMNS)).astype(np.float32))
    print(f"{'type':8} {'':10} {'ours':>8} {'ggml':>8} {'ratio':>7} {'2 threads':>10}")
    for name in GGML_TYPES[3:]:
        codec = CODECS[name]
        one, two = (Backend(torch.device("cpu"), threads).op(name, codec.encode) for threads in (1, 2))
        out = np.empty((ROWS, codec.row_bytes(COLUMNS)), np.uint8)
        for label, weight in (("plain", None), ("importance", weights)):
            source, importance = rows.numpy().ctypes.data, None if weight is None else weight.numpy().ctypes.data

            def theirs(kind: int = codec.type_id, importance: int | None = importance, source: int = source, out: np.ndarray = out) -> None:
                ggml.ggml_quantize_chunk(kind, source, out.ctypes.data, 0, ROWS, COLUMNS, importance)

            one(rows[:32], weight)
            two(rows[:128], weight)
            ours = best(lambda: one(rows, weight), time.process_time)
            peer = best(theirs, time.process_time, 2)
            gain = best(lambda: one(rows, weight), time.perf_counter) / best(lambda: two(rows, weight), time.perf_counter)
            million = ROWS * COLUMNS / 1e6
            print(f"{name:8} {label:10} {million / ours:8.1f} {million / peer:8.1f} {peer / ours:6.2f}x {gain:9.2f}x", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
