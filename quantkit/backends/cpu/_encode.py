"""From a codec and a kernel for a run of blocks to `encode`: chunks over threads, odd blocks by the reference.

Threads are a pool over fixed chunks of blocks; blocks are independent, so no byte depends on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 17  # elements


def in_chunks(threads: int, work: Callable[[Any], None], chunks: Sequence[Any]) -> None:
    """Call work on every chunk, on a pool of threads if that is worth it."""
    if threads == 1 or len(chunks) == 1:
        for chunk in chunks:
            work(chunk)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, chunks))


def encoder(codec: Any, kernel: Callable[..., None], threads: int, row_sums: Callable[..., None] | None = None) -> Callable[..., Tensor]:
    """Return a twin of `codec.encode`.

    kernel(source, importance, first, last, out, odd, *row_sums) encodes units first..last of source, float32 [units,
    block], into out, uint8 [units, size], and sets odd, uint8 [units], where it must not be believed. importance:
    float32 [units of a row, block], no rows for none. row_sums(rows, out) fills what the kernel needs of whole rows.
    """

    def encode(rows: Tensor, importance: Tensor | None = None) -> Tensor:
        count, columns = rows.shape
        width = codec.row_bytes(columns)
        out = np.empty((count * columns // codec.block, codec.size), np.uint8)
        source = np.ascontiguousarray(rows.to(torch.float32).numpy()).reshape(-1, codec.block)
        weighted = importance is not None and codec.weighted
        weight = np.empty((0, codec.block), np.float32)
        if weighted:
            assert importance is not None
            weight = np.ascontiguousarray(importance.to(torch.float32).numpy()).reshape(-1, codec.block)
        extra = [np.empty(count if weighted else 0, np.float32)] if row_sums else []
        odd = np.zeros(len(out), np.uint8)
        step = max(1, CHUNK // columns) * (columns // codec.block) if columns else 1
        chunks = [(first, min(first + step, len(out))) for first in range(0, len(out), step)]

        def work(chunk: tuple[int, int]) -> None:
            if row_sums and weighted:
                per_row = columns // codec.block
                row_sums(source.reshape(count, columns), chunk[0] // per_row, chunk[1] // per_row, extra[0])
            kernel(source, weight, *chunk, out, odd, *extra)

        in_chunks(threads, work, chunks)
        if odd.any():
            _again(codec, rows, importance if weighted else None, odd, out)
        return torch.from_numpy(out).reshape(count, width)

    return encode


def _again(codec: Any, rows: Tensor, importance: Tensor | None, odd: Any, out: Any) -> None:
    """Encode the rows that hold odd blocks with the reference."""
    per_row = out.shape[0] // rows.shape[0]
    for row in np.flatnonzero(odd.reshape(-1, per_row).any(1)):
        out[row * per_row : (row + 1) * per_row] = codec.encode(rows[row : row + 1], importance).reshape(per_row, -1).numpy()
