"""Reopen what was written and prove it: names, layouts, finite values, the solver's own codes, configuration, tokenizer.

A first version: it shows that the file on disk holds exactly what was decided. How good that is, `eval-ppl` measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.errors import SourceError, VerifyError, name_list
from quantkit.formats._packed import PackedStore
from quantkit.formats._safetensors import DTYPES, TensorInfo
from quantkit.formats.store import open_folder
from quantkit.pipeline import quant_digest
from quantkit.source import Source, load_config, resolve

SAMPLE = "The year 2024 had 366 days; ça va? 1+1=2.\n"


@dataclass(frozen=True)
class Proof:
    """What was checked: how many tensors, and how many modules whose codes came back exactly."""

    tensors: int
    modules: int


def verify(folder: Path, layout: dict[str, TensorInfo], notes: list[dict[str, Any]], source: Source) -> Proof:
    """Check an output folder against its plan (`layout`) and the journal's notes; a VerifyError names what differs."""
    store, _ = open_folder(folder)
    held = set(store.names())
    if held != set(layout):
        raise VerifyError(
            f"{folder}: tensors missing: {name_list(sorted(set(layout) - held)) or 'none'}; "
            f"tensors not planned: {name_list(sorted(held - set(layout))) or 'none'}."
        )
    for name, info in layout.items():
        if store.info(name) != info:
            raise VerifyError(f"{folder}: '{name}' is {store.info(name)}, planned was {info}.")
        if DTYPES[info.dtype].is_floating_point and not bool(torch.isfinite(store.read(name).to(torch.float32).sum())):
            raise VerifyError(f"{folder}: '{name}' holds NaN or Inf, or values too large to add up.")
    _check_codes(folder, notes)
    _check_loadable(folder, source)
    return Proof(len(layout), len(notes))


def _check_codes(folder: Path, notes: list[dict[str, Any]]) -> None:
    if not notes:
        return
    packed = resolve(str(folder)).store
    if not isinstance(packed, PackedStore):
        raise VerifyError(f"{folder}: reads as a plain checkpoint, though {len(notes)} modules were quantized.")
    for note in notes:
        if quant_digest(packed.quant(note["tensor"].removesuffix(".weight"))) != note["sha256"]:
            raise VerifyError(f"{folder}: the codes of {note['module']} do not come back as the solver chose them.")


def _check_loadable(folder: Path, source: Source) -> None:
    load_config(folder, None, source.trust_remote_code)
    try:
        before = source.tokenizer()
    except SourceError:
        return  # a source without a usable tokenizer gives an artifact without one
    after = resolve(str(folder), trust_remote_code=source.trust_remote_code).tokenizer()
    if before(SAMPLE)["input_ids"] != after(SAMPLE)["input_ids"]:
        raise VerifyError(f"{folder}: the tokenizer does not give the source's ids any more.")
