"""`quantkit to-hf`: any source as a plain checkpoint; `quantkit convert`: an artifact in another container, exactly."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from quantkit import __version__, artifact
from quantkit.commands._options import ConvertOptions, ToHfOptions, parse_size
from quantkit.errors import PlanError, SourceError
from quantkit.formats import FORMATS
from quantkit.loader import Loader
from quantkit.plan import kept_info, linears_outside
from quantkit.repack import packer, plan_repack
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


def convert(model: str, output: Path, asked: ConvertOptions) -> None:
    """Write an artifact's codes into another container and prove that they come back."""
    source = resolve(model, asked.revision, asked.offline, asked.trust_remote_code)
    form = FORMATS[asked.to]
    partial = artifact.prepare_output(output, source.folder, asked.force)
    with Eye() as eye:
        for text in source.notices:
            eye.notice(text)
        loader = Loader(source, torch.device("cpu"))
        if source.quantized.split(" ")[0] == form.name:
            raise PlanError(f"{model} is {source.quantized} already.")
        eye.phase(f"reading {source.name} ({source.quantized})")
        found = plan_repack(loader, form)
        kept = {name: loader.info(name) for name in source.store.names() if name not in found.layouts}
        total = sum(info.nbytes for info in [*kept.values(), *(i for layout in found.layouts.values() for i in layout.values())])
        shutil.rmtree(partial, ignore_errors=True)
        artifact.require_disk(partial.parent, total, "The artifact")
        partial.mkdir()
        eye.phase(f"writing {form.name}, {mib(total)}")
        try:
            pieces = artifact.pieces_of(loader, kept, found.layouts, packer(source.store, form, found))  # type: ignore[arg-type]
            artifact.write_shards(partial, pieces, min(parse_size(asked.max_shard_size, "--max-shard-size"), max(total, 1)))
            options = {"quantizer": f"quantkit:{__version__}", "ignore": linears_outside(loader, found.rows)}
            config = form.config(found.rows, options, found.zeros_from_one)
            carried, notices = artifact.write_side_files(loader, partial, config, "auto")
            for text in notices:
                eye.notice(text)
            if form.side_config:
                artifact.write_json(partial / form.side_config, config)
            proof = verify(partial, {piece.name: piece.info for piece in pieces}, found.notes, source)
        except (SourceError, OSError):
            shutil.rmtree(partial, ignore_errors=True)
            raise
        artifact.publish(partial, output)
        eye.totals({"verified": f"the codes of {proof.modules} modules are the source's", "output": str(output)})
    if asked.json:
        document = {"command": "convert", "model": model, "to": form.name, "output": str(output), "bytes": total, "carried": carried}
        print_json({**document, "modules": proof.modules})
