"""`quantkit to-hf`: any source as a plain checkpoint; `quantkit convert`: an artifact in another container, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quantkit import __version__, artifact
from quantkit.commands._options import ConvertOptions, ToHfOptions
from quantkit.commands._proof import finish, provenance
from quantkit.document import print_json
from quantkit.errors import PlanError
from quantkit.formats import FORMATS
from quantkit.loader import Loader
from quantkit.plan import kept_info, linears_outside
from quantkit.repack import packer, plan_repack
from quantkit.report import Eye, mib
from quantkit.source import resolve


def to_hf(model: str, output: Path, asked: ToHfOptions) -> None:
    """Dequantize or decode a source, one tensor at a time, into safetensors shards with everything else carried over."""
    source = resolve(model, asked.revision, asked.offline, asked.trust_remote_code)
    partial = artifact.prepare_output(output, source, asked.force)
    with Eye() as eye:
        for text in source.notices:
            eye.notice(text)
        source.require_finite()
        loader = Loader(source, torch.device("cpu"))
        for text in loader.notices("carried over as they are"):
            eye.notice(text)
        kept = {name: kept_info(loader.info(name), asked.dtype) for name in source.store.names()}
        pieces = artifact.pieces_of(loader, kept, {}, _no_parts)
        with artifact.fresh_folder(partial, pieces, asked.shard_bytes) as total:
            eye.phase(f"wrote {len(kept)} tensors, {mib(total)}")
            carried, notices = artifact.write_side_files(loader, partial, None, asked.dtype)
            if (readme := partial / "README.source.md").exists():
                readme.rename(partial / "README.md")
                carried = ["README.md" if name == "README.source.md" else name for name in carried]
            for text in notices:
                eye.notice(text)
            proven = finish(partial, kept, {**provenance("to-hf", source, asked), "modules": []}, source, eye)
        artifact.publish(partial, output)
        eye.totals({"carried over": ", ".join(carried), "output": str(output)} if carried else {"output": str(output)})
    if asked.json:
        document = {"command": "to-hf", "model": model, "output": str(output), "bytes": total, "carried": carried}
        print_json({**document, **proven, "quantized_source": source.quantized})


def _no_parts(weight: str, name: str, info: object) -> artifact.Piece:
    raise AssertionError(f"{name}: a conversion has no part files")


def convert(model: str, output: Path, asked: ConvertOptions) -> None:
    """Write an artifact's codes into another container and prove that they come back."""
    source = resolve(model, asked.revision, asked.offline, asked.trust_remote_code)
    form = FORMATS[asked.to]
    partial = artifact.prepare_output(output, source, asked.force)
    with Eye() as eye:
        loader = Loader(source, torch.device("cpu"))
        for text in [*source.notices, *loader.notices("carried over as they are")]:
            eye.notice(text)
        if source.quantized.split(" ")[0] == form.name:
            raise PlanError(f"{model} is {source.quantized} already.")
        eye.phase(f"reading {source.name} ({source.quantized or ('gguf' if source.gguf_file else 'plain')})")
        found = plan_repack(loader, form)
        kept = {name: loader.info(name) for name in source.store.names() if name not in found.layouts}
        pieces = artifact.pieces_of(loader, kept, found.layouts, packer(source.store, form, found))
        options: dict[str, Any] = {"quantizer": f"quantkit:{__version__}", "ignore": linears_outside(loader, found.rows)}
        options |= {"kv_cache_scheme": source.declared.get("kv_cache_scheme")}
        config = form.config(found.rows, options, found.zeros_from_one)
        with artifact.fresh_folder(partial, pieces, asked.shard_bytes) as total:
            eye.phase(f"wrote {form.name}, {mib(total)}")
            carried, notices = artifact.write_side_files(loader, partial, config, "auto")
            for text in notices:
                eye.notice(text)
            if form.side_config:
                artifact.write_json(partial / form.side_config, config)
            body = {**provenance("convert", source, asked), "modules": found.notes}
            proven = finish(partial, {piece.name: piece.info for piece in pieces}, body, source, eye)
        artifact.publish(partial, output)
        eye.totals({"codes": f"of {len(found.notes)} modules are the source's", "output": str(output)})
    if asked.json:
        document = {"command": "convert", "model": model, "to": form.name, "output": str(output), "bytes": total, "carried": carried}
        print_json({**document, **proven, "modules": len(found.notes)})
