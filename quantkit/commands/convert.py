"""`quantkit to-hf`: any source as a plain checkpoint that `from_pretrained` loads."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from quantkit import artifact
from quantkit.commands._options import ToHfOptions, parse_size
from quantkit.errors import SourceError
from quantkit.loader import Loader
from quantkit.plan import kept_info
from quantkit.report import Eye, mib, print_json
from quantkit.source import resolve
from quantkit.verify import verify


def to_hf(model: str, output: Path, asked: ToHfOptions) -> None:
    """Dequantize or decode a source, one tensor at a time, into safetensors shards with everything else carried over."""
    source = resolve(model, asked.revision, asked.offline, asked.trust_remote_code)
    partial = artifact.prepare_output(output, source.folder, asked.force)
    with Eye() as eye:
        for text in source.notices:
            eye.notice(text)
        loader = Loader(source, torch.device("cpu"))
        kept = {name: kept_info(loader.info(name), asked.dtype) for name in source.store.names()}
        total = sum(info.nbytes for info in kept.values())
        shutil.rmtree(partial, ignore_errors=True)
        artifact.require_disk(partial.parent, total, "The checkpoint")
        partial.mkdir()
        eye.phase(f"writing {len(kept)} tensors, {mib(total)}")
        try:
            pieces = artifact.pieces_of(loader, kept, {}, _no_parts)
            artifact.write_shards(partial, pieces, min(parse_size(asked.max_shard_size, "--max-shard-size"), max(total, 1)))
            carried, notices = artifact.write_side_files(loader, partial, None, asked.dtype)
            if (readme := partial / "README.source.md").exists():
                readme.rename(partial / "README.md")
                carried = ["README.md" if name == "README.source.md" else name for name in carried]
            for text in notices:
                eye.notice(text)
            proof = verify(partial, kept, [], source)
        except (SourceError, OSError):
            shutil.rmtree(partial, ignore_errors=True)  # nothing to resume: conversion is cheap
            raise
        artifact.publish(partial, output)
        eye.totals({"verified": f"{proof.tensors} tensors", "output": str(output)})
    if asked.json:
        document = {"command": "to-hf", "model": model, "output": str(output), "bytes": total, "carried": carried}
        print_json({**document, "quantized_source": source.quantized})


def _no_parts(weight: str, name: str, info: object) -> artifact.Piece:
    raise AssertionError(f"{name}: a conversion has no part files")
