"""Calibration text that the model writes itself: sampled at temperature 1 from nothing, seeded, kept by hash.

No data and no network are needed, and the text has the model's own distribution. It needs the whole model in memory
and about as much time as the quantization, so it is never a silent default. Time is capped: what was written until
then is used, and the shortfall is said.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.corpus import Tokens
from quantkit.errors import CalibrationError
from quantkit.loader import Loader

BATCH = 16
SECONDS = 900.0


@torch.no_grad()
def write(loader: Loader, tokenizer: Any, samples: int, length: int, seed: int, cache: Path, say: Callable[[str], None]) -> Tokens:
    """Return rows of ids, int64 [samples, length], that the model wrote; a CalibrationError if it does not fit memory."""
    key = [loader.source.fingerprint(), samples, length, seed, torch.__version__]
    path = cache.expanduser() / "self" / (hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32] + ".safetensors")
    origin = f"self: {samples} samples of {length} tokens written by the model"
    if path.exists():
        return Tokens(load_file(str(path))["rows"], origin, [])
    needed = 4 * sum(p.numel() for p in loader.model.parameters())
    free = psutil.virtual_memory().available
    if needed > free * 0.8:
        raise CalibrationError(
            f"--calibration self needs the whole model in memory ({needed / 1e9:.1f} GB, {free / 1e9:.1f} GB free). "
            "Use --calibration bundled or a file."
        )
    loader.materialize(loader.all_names())
    say(f"the model writes {samples} x {length} tokens")
    rows = _sample(loader, tokenizer, samples, length, seed, say)
    loader.release(loader.all_names())
    notices = [] if len(rows) == samples else [f"only {len(rows)} of {samples} samples were written in {SECONDS:.0f} s"]
    if not notices:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"rows": rows}, str(path))
    return Tokens(rows, origin, notices)


def _sample(loader: Loader, tokenizer: Any, samples: int, length: int, seed: int, say: Callable[[str], None]) -> Tensor:
    """Write rows that begin with one random ordinary token (or the beginning token) each and never stop."""
    began = time.perf_counter()
    done: list[Tensor] = []
    special = set(tokenizer.all_special_ids)
    ordinary = torch.tensor([i for i in range(len(tokenizer)) if i not in special])
    while sum(map(len, done)) < samples and (not done or time.perf_counter() - began < SECONDS):
        count = min(BATCH, samples - sum(map(len, done)))
        generator = torch.Generator().manual_seed(seed * 1_000_003 + len(done))
        first = ordinary[torch.randint(len(ordinary), (count, 1), generator=generator)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed * 1_000_003 + len(done))
            rows = loader.model.generate(
                input_ids=first.to(loader.device), attention_mask=torch.ones_like(first), do_sample=True, temperature=1.0, top_k=0,
                top_p=1.0, min_new_tokens=length - 1, max_new_tokens=length - 1, pad_token_id=tokenizer.eos_token_id,
                suppress_tokens=sorted(special),
            )  # fmt: skip
        done.append(rows.cpu()[:, :length])
        say(f"{sum(map(len, done))} of {samples} samples written")
    return torch.cat(done)
