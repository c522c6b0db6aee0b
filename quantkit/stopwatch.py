"""How long a run will take, from a short measurement of this machine: one block, one batch, a few rows of each weight.

What grows with the samples is timed on one batch, what grows with a weight's rows on some of them, and the rest is counted.
"""

from __future__ import annotations

import copy
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from quantkit.backends import Backend
from quantkit.calibrate import Recording, record, view_block
from quantkit.codecs import CODECS
from quantkit.export import ExportPlan
from quantkit.folds import fold_block
from quantkit.forecast import Load
from quantkit.loader import Loader
from quantkit.pipeline import Passes, bare_view, rows_of, weight_of
from quantkit.plan import Plan
from quantkit.tensors import BlockView

ROWS = 256  # of each weight that are really solved
WARM = 16  # rows that compile the kernels
PIECE = 1 << 24  # bytes written, hashed, and elements encoded to learn the rates
CODES = 1 << 20


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one block: what it takes whatever the data (loading, search, solving), and for each batch."""

    fixed: float
    batch: float
    loading: float


def since_start() -> float:
    """Return the seconds since this process began: what starting the program, opening a model and its tokenizer take."""
    return time.time() - float(psutil.Process().create_time())


@torch.no_grad()
def time_recording(loader: Loader, load: Load) -> tuple[Recording, float]:
    """Return a recording of one batch of arbitrary tokens, and the seconds it took."""
    began = time.perf_counter()
    vocabulary = loader.model.get_input_embeddings().weight.shape[0]
    rows = max(1, min(load.batch, load.samples))
    tokens = torch.randint(0, vocabulary, (rows, load.length), generator=torch.Generator().manual_seed(0))
    found = record(loader, [tokens], 1 if load.paired else 0)
    return found, time.perf_counter() - began


@torch.no_grad()
def time_block(loader: Loader, plan: Plan, recording: Recording | None, passes: Passes) -> BlockTime:
    """Load the first block and do to it what a run does, with `ROWS` rows of each weight; the block is released again."""
    began = time.perf_counter()
    loader.materialize(loader.block_names(0))
    loading = time.perf_counter() - began
    try:
        view = view_block(loader, recording, 0) if recording else bare_view(loader, 0)
        _round(loader, plan, view, recording, passes, WARM)
        began = time.perf_counter()
        search, forward = _time_search(loader, plan, view, recording, passes) if recording and passes.scaler else (0.0, 0.0)
        statistics, solving = _round(loader, plan, view, recording, passes, ROWS)
    finally:
        loader.release(loader.block_names(0))
    return BlockTime(loading + search + solving, forward + statistics, loading)


def _time_search(loader: Loader, plan: Plan, view: BlockView, recording: Recording, passes: Passes) -> tuple[float, float]:
    """Return the seconds of the search for scales, and of the pass over one batch that it begins with."""
    began = time.perf_counter()
    view.replay(view.module, recording.states[0].clone(), 0)
    forward = time.perf_counter() - began
    codecs = {row.module.removeprefix(f"{view.name}."): row.codec for row in plan.rows if row.block == 0 and row.codec}
    probe = (recording.probe_state.to(loader.device), recording.probe_calls[0])
    began = time.perf_counter()
    fold_block(view, recording.states, probe, passes.scaler, codecs, lambda name: torch.float32)
    return max(time.perf_counter() - began - forward, 0.0), forward


def _round(loader: Loader, plan: Plan, view: BlockView, recording: Recording | None, passes: Passes, rows: int) -> tuple[float, float]:
    """Return the seconds of one batch's statistics, and of solving every weight of the block, scaled up from `rows` rows."""
    states = [state.clone() for state in recording.states] if recording else []
    exact = [state.clone() for state in recording.exact] if recording else []
    view.exact = copy.deepcopy(view.module) if exact else None
    statistics = solving = 0.0
    began = time.perf_counter()
    with closing(passes.schedule(view, states, exact, loader.device)) as groups:  # type: ignore[type-var]
        for group, stats in groups:
            statistics += time.perf_counter() - began
            began = time.perf_counter()
            factors: dict[Any, Any] = {}
            for row in rows_of(plan, view, group.names):
                if row.codec not in factors and stats is not None:
                    factors[row.codec] = passes.solver.prepare(stats, row.codec)
            solving += time.perf_counter() - began
            for row in rows_of(plan, view, group.names):
                weight = weight_of(loader, row)
                part = weight[:rows].contiguous()
                began = time.perf_counter()
                passes.solver.solve(part, factors.get(row.codec), row.codec, passes.solver.share([part], row.codec))
                solving += (time.perf_counter() - began) * len(weight) / len(part)
            began = time.perf_counter()
    return statistics + time.perf_counter() - began, solving


def blocks_seconds(loader: Loader, one: BlockTime, batches: int) -> float:
    """Return the seconds of all blocks, each as heavy as its weights are beside the first one's."""
    sizes = [sum(p.numel() for p in block.parameters()) for block in loader.blocks]
    return (one.fixed + one.batch * batches) * sum(sizes) / max(sizes[0], 1)


def disk_rate(folder: Path) -> float:
    """Return the bytes a second that are written to a folder's disk, read back and hashed."""
    data = os.urandom(PIECE)
    began = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        hashlib.sha256(file.read()).digest()
    return PIECE / (time.perf_counter() - began)


def _quickest(work: Callable[[], Any]) -> float:
    """Return the seconds of the quickest of three runs: others on the machine only make it slower."""
    spent = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began)
    return min(spent)


def encode_seconds(plan: ExportPlan, backend: Backend, threads: int) -> tuple[float, float]:
    """Return the seconds of encoding and of decoding all tensors of a GGUF file, from the rate of each type on `CODES` random weights."""
    elements: dict[str, int] = {}
    for choice in plan.choices:
        elements[choice.type] = elements.get(choice.type, 0) + torch.Size(choice.shape).numel()
    total = decoding = 0.0
    for kind, count in elements.items():
        codec = CODECS[kind]
        encoder: Callable[..., Any] = backend.op(kind, codec.encode)
        weights = torch.randn(CODES // 4096, 4096, generator=torch.Generator().manual_seed(0))
        energy = torch.ones(4096) if plan.importance is not None and codec.weighted else None
        encoder(weights[:WARM], importance=energy)
        encoded = encoder(weights, importance=energy)
        total += _quickest(lambda: encoder(weights, importance=energy)) * count / CODES  # noqa: B023
        torch.set_num_threads(threads)  # decoding has torch's threads, where encoding has one for each of ours
        decoding += _quickest(lambda: codec.decode(encoded)) * count / CODES  # noqa: B023
        torch.set_num_threads(1)
    return total / threads, decoding
