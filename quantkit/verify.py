"""Reopen an artifact and prove it: files and tensors against the manifest, codes, scales, configuration, tokenizer, a short run.

A finding has a stable code, the place, and what to do. Everything is read from disk again, so that `prove`, which every writing
command calls in a fresh process, shows what a runtime will find there. Without a manifest only what contradicts itself is found.
How good an artifact is, `eval-ppl` measures.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit import manifest, trial
from quantkit.corpus import render_chat
from quantkit.errors import CalibrationError, QuantkitError, SourceError, VerifyError, name_list
from quantkit.findings import Finding, Verdict
from quantkit.foreign import read_json, reason
from quantkit.formats import _gguf, _safetensors
from quantkit.formats._packed import PackedStore
from quantkit.formats._safetensors import TensorInfo
from quantkit.formats.gguf import CODEC_OF, GgufStore
from quantkit.loader import Loader
from quantkit.pipeline import quant_digest
from quantkit.plan import fused_sets
from quantkit.source import Source, resolve
from quantkit.tensors import QuantTensor

SAMPLE = "The year 2024 had 366 days; ça va? 1+1=2.\n"
PAGES = ("README", "LICENSE", "NOTICE", ".gitattributes")  # changing them changes no output
WILD = 2.0**12  # times the median: no solver of ours or of others makes such a scale
SHOWN = 3
# What the fresh process would import anyway; in a process that proves more than one artifact it is imported once.
PRELOADED = [
    "quantkit.verify", "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto", "transformers.generation",
    "transformers.conversion_mapping", "transformers.quantizers.auto", "accelerate.utils", "gguf", "jinja2.ext",
]  # fmt: skip


def verify(path: Path, trust_remote_code: bool = False) -> Verdict:
    """Look at a folder or GGUF file in every way and return the verdict; a SourceError only if there is nothing to look at."""
    if not path.exists():
        raise SourceError(f"There is no '{path}'. ARTIFACT is a folder or a .gguf file.")
    verdict = Verdict()
    where = manifest.path_of(path)
    made: dict[str, Any] | None = None
    if where.exists():
        try:
            made = manifest.read(where)
            verdict.checks["manifest"] = []
        except SourceError as error:
            verdict.checks["manifest"] = [Finding("QK105", where.name, reason(error))]
    else:
        verdict.checks["manifest"] = [Finding("QK104", path.name, "")]
    if made is not None:
        folder = path if path.is_dir() else path.parent
        verdict.counts |= {"files": len(made["files"]), "tensors": len(made["tensors"])}
        verdict.checks["files"] = list(_check_files(folder, made, path.is_dir()))
    if _is_piece(path):
        verdict.checks["opens"] = [Finding("QK107", path.name, "")]
        return verdict
    opened: list[Loader] = []
    verdict.checks["opens"] = list(_check_opens(path, trust_remote_code, opened))
    if opened:
        _look_inside(opened[0], made, verdict)
    return verdict


def _is_piece(path: Path) -> bool:
    try:
        return path.suffix == ".gguf" and _gguf.read_header(path).get("split.count", 1) > 1
    except SourceError:
        return False  # opening it says why


def _look_inside(loader: Loader, made: dict[str, Any] | None, verdict: Verdict) -> None:
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "configuration": lambda: _check_config(loader),
        "weights": lambda: _check_weights(loader, made, verdict),
        "tokenizer": lambda: _check_tokenizer(loader.source, made),
    }
    for name, check in checks.items():
        verdict.checks[name] = list(check())
    broken = any(finding.code in ("QK205", "QK301") for finding in verdict.findings)
    verdict.checks["run"] = [] if broken else list(_check_run(loader, made is None or "tokenizer" in made))


def _check_files(folder: Path, made: dict[str, Any], whole: bool) -> Iterator[Finding]:
    """Compare files with their checksums; where one differs, say which of its tensors does."""
    held: dict[str, tuple[str, TensorInfo]] = {}
    for name, wanted in made["files"].items():
        path = folder / name
        if not path.is_file():
            yield Finding("QK101", name, "")
            continue
        try:
            digest, tensors = manifest.digests(path)
            infos = _infos(path)
        except SourceError as error:
            yield Finding("QK102", name, reason(error))
            continue
        held |= {tensor: (value, infos[tensor]) for tensor, value in tensors.items()}
        if digest == wanted:
            continue
        if name.startswith(PAGES):
            yield Finding("QK106", name, "")
            continue
        changed = [t for t, value in tensors.items() if t in made["tensors"] and made["tensors"][t]["sha256"] != value]
        yield Finding("QK102", name, f"{len(changed)} of its tensors differ" if changed else "")
    yield from _check_tensors(held, made["tensors"])
    if whole:
        strange = [p.name for p in sorted(folder.iterdir()) if p.suffix in manifest.WEIGHTS and p.name not in made["files"]]
        yield from (Finding("QK103", name, "") for name in strange)


def _check_tensors(held: dict[str, tuple[str, TensorInfo]], planned: dict[str, Any]) -> Iterator[Finding]:
    for name, row in planned.items():
        if name not in held:
            yield Finding("QK201", name, "")
            continue
        digest, info = held[name]
        if (info.dtype, list(info.shape)) != (row["dtype"], row["shape"]):
            yield Finding("QK203", name, f"{info.dtype} {list(info.shape)}, planned was {row['dtype']} {row['shape']}")
        elif digest != row["sha256"]:
            yield Finding("QK204", name, "")
    yield from (Finding("QK202", name, "") for name in held if name not in planned)


def _infos(path: Path) -> dict[str, TensorInfo]:
    if path.suffix == ".gguf":
        entries = _gguf.read_header(path).tensors.values()
        return {e.name: TensorInfo(CODEC_OF.get(e.type_id, f"type {e.type_id} of {_gguf.BLOCKS[e.type_id][0]}"), e.shape) for e in entries}
    return {name: entry.info for name, entry in _safetensors.read_header(path).items()} if path.suffix == ".safetensors" else {}


def _check_opens(path: Path, trust_remote_code: bool, opened: list[Loader]) -> Iterator[Finding]:
    """Open the artifact as any command does: index, headers, names and shapes of every tensor of the model."""
    try:
        source = resolve(str(path.resolve()), trust_remote_code=trust_remote_code)
        for text in source.notices:
            code = "QK303" if "declares" in text else "QK108"
            yield Finding(code, "config.json" if code == "QK303" else path.name, text)
        opened.append(Loader(source, torch.device("cpu")))
    except QuantkitError as error:
        yield Finding("QK301", path.name, reason(error))


def _check_config(loader: Loader) -> Iterator[Finding]:
    """Let transformers' own classes read what config.json declares, and compare it with the packed tensors."""
    source = loader.source
    declared, store = source.declared, source.store
    if declared and source.quantized:
        from transformers.quantizers.auto import AutoQuantizationConfig

        try:
            AutoQuantizationConfig.from_dict(dict(declared))
        except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
            if not isinstance(error, ImportError):  # a library that is not installed says nothing about the file
                yield Finding("QK302", "quantization_config", reason(error))
    path = source.folder / "generation_config.json"
    if source.gguf_file is None and path.exists():
        from transformers import GenerationConfig

        try:
            GenerationConfig.from_dict(read_json(path)).validate(strict=True)
        except (SourceError, ValueError, TypeError, AttributeError) as error:
            yield Finding("QK404", path.name, reason(error))
    if not isinstance(store, PackedStore) or declared.get("quant_method") not in ("gptq", "awq"):
        return
    modules = list(store.modules)
    try:
        codecs = [store.quant(module).codec for module in modules[:1] + modules[-1:]]
    except SourceError:
        return  # the weights' own check says so
    for key, own in (("bits", "bits"), ("group_size", "group")):
        found = {getattr(codec, own) for codec in codecs}
        if key in declared and declared[key] not in found and not declared.get("dynamic"):
            yield Finding("QK303", "config.json", f"{key} is {declared[key]}, the tensors have {name_list(sorted(found))}")


def _check_weights(loader: Loader, made: dict[str, Any] | None, verdict: Verdict) -> Iterator[Finding]:
    """Read every packed module: its codes as the solver chose them, its scales sane, and what runtimes fuse alike; then all the rest."""
    store = loader.source.store
    chosen = {note["tensor"].removesuffix(".weight"): note for note in made["modules"]} if made else {}
    modules = list(store.modules) if isinstance(store, PackedStore) else []
    schemes: dict[str, Any] = {}
    for module in modules:
        try:
            tensor = store.quant(module)  # type: ignore[attr-defined]
        except SourceError as error:
            yield Finding("QK301", module, reason(error))
            continue
        solved = module in chosen and quant_digest(tensor) == chosen[module]["sha256"]
        if module in chosen and not solved:
            yield Finding("QK207", module, "")
        yield from _check_scales(module, tensor, solved)
        index = tensor.group_index
        schemes[module] = (tensor.codec, None if index is None else hashlib.sha256(index.numpy().tobytes()).hexdigest())
    lost = [module for module in chosen if module not in modules] if not isinstance(store, GgufStore) else []
    yield from (Finding("QK207", module, "it is not packed") for module in lost)
    verdict.counts["modules"] = len(modules)
    known = loader.names.to_model
    packed = {known[f"{m}.weight"].removesuffix(".weight"): s for m, s in schemes.items() if f"{m}.weight" in known}
    for names in fused_sets(loader.linear_names()):
        kinds = {packed.get(name) for name in names}
        if len(kinds) > 1:
            words = [f"{name.rpartition('.')[2]} {packed[name][0].label if name in packed else 'plain'}" for name in names]
            yield Finding("QK304", names[0].rpartition(".")[0], name_list(words))
    for name in store.names():
        if name.removesuffix(".weight") not in schemes:
            yield from _check_plain(store, name)


def _check_scales(module: str, tensor: QuantTensor, solved: bool) -> Iterator[Finding]:
    """Look at a module's scales; solved: whether they are what its solver left, so that a wild one is the source's."""
    scale = tensor.params.get("scale")
    if scale is not None and scale.is_floating_point():
        if not bool(torch.isfinite(scale).all()):
            yield Finding("QK205", module, f"{int((~torch.isfinite(scale)).sum())} scales")
            return
        if tensor.codec.name == "affine":
            sizes = scale.abs()
            middle = float(sizes.median())
            zeros, wild = _dead_groups(tensor), int((sizes > WILD * max(middle, 2.0**-24)).sum())
            if wild and solved:
                yield Finding("QK209", module, f"{wild} scales are more than {WILD:.0f} times the median {middle:.3g}")
            if zeros or (wild and not solved):
                yield Finding("QK206", module, f"{zeros} are 0, {wild} are more than {WILD:.0f} times the median {middle:.3g}")
    value = tensor.dequantize()
    if not bool(torch.isfinite(value.sum())):
        yield Finding("QK205", module, "")
    elif not bool(value.any()):
        yield Finding("QK208", module, "")


def _dead_groups(tensor: QuantTensor) -> int:
    """Return how many groups have codes that mean something, and a scale of 0."""
    dead = tensor.params["scale"] == 0
    if not bool(dead.any()) or tensor.group_index is not None:
        return int(dead.sum())
    codes = tensor.codes.reshape(*dead.shape, -1)
    return int((dead & (codes != tensor.params["zero"][..., None]).any(-1)).sum())


def _check_plain(store: Any, name: str) -> Iterator[Finding]:
    try:
        value: Tensor = store.read(name)
    except SourceError as error:
        yield Finding("QK301", name, reason(error))
        return
    if not value.is_floating_point() or not value.numel():
        return
    value = value.to(torch.float32)
    if not bool(torch.isfinite(value.sum())) and (count := int((~torch.isfinite(value)).sum())):
        yield Finding("QK205", name, f"{count} values")
    elif name.endswith("proj.weight") and value.dim() > 1 and not bool(value.any()):
        yield Finding("QK208", name, "")


def _check_tokenizer(source: Source, made: dict[str, Any] | None) -> Iterator[Finding]:
    wanted = made.get("tokenizer") if made else None
    if made is not None and wanted is None:
        return  # the source had none that loads
    try:
        tokenizer = source.tokenizer()
    except SourceError as error:
        yield Finding("QK401" if wanted or (source.folder / "tokenizer.json").exists() else "QK104", source.name, reason(error))
        return
    if wanted is not None and token_digest(source) != wanted:
        yield Finding("QK402", source.name, "")
    if not tokenizer.chat_template:
        return
    try:
        render_chat(tokenizer, [{"role": "user", "content": SAMPLE}])
    except CalibrationError as error:
        yield Finding("QK403", source.name, reason(error))


def token_digest(source: Source) -> str | None:
    """Return a checksum of what the tokenizer makes of a sample text; None if there is no usable tokenizer."""
    try:
        ids = source.tokenizer()(SAMPLE)["input_ids"]
    except SourceError:
        return None
    return hashlib.sha256(repr(list(ids)).encode()).hexdigest()


def _check_run(loader: Loader, speaks: bool) -> Iterator[Finding]:
    """Run a few tokens of a sample text, or the first ids where there is no tokenizer to trust."""
    vocabulary = int(loader.model.get_input_embeddings().weight.shape[0])
    try:
        ids = [i for i in loader.source.tokenizer()(SAMPLE)["input_ids"] if i < vocabulary][: trial.TOKENS] if speaks else []
    except SourceError:
        ids = []
    given = torch.tensor([ids or list(range(min(trial.TOKENS, vocabulary)))])
    try:
        outcomes = trial.run(loader, given)
    except QuantkitError as error:
        yield Finding("QK301", loader.source.name, reason(error))
        return
    exact, *narrow = outcomes
    if exact.where:
        yield Finding("QK501", exact.where, f"float32, {given.shape[1]} tokens")
        return
    if exact.still:
        yield Finding("QK502", loader.source.name, f"all of {given.shape[1]} tokens get the same scores")
    for outcome in narrow:
        if outcome.where:
            code = "QK503" if outcome.dtype == "float16" else "QK501"
            yield Finding(code, outcome.where, f"{outcome.dtype}; the largest state in float32 is {exact.peak:,.0f}")


def prove(path: Path, trust_remote_code: bool = False) -> Verdict:
    """Verify in a fresh process what was written at `path`; a VerifyError lists what is wrong with it."""
    try:
        verdict = isolated(_verify_here, str(path), torch.get_num_threads(), trust_remote_code)
    except BrokenProcessPool:
        raise VerifyError(f"{path}: the process that verifies it was killed, most likely for memory. Run quantkit verify on it.") from None
    if errors := verdict.of("error"):
        lines = "\n  ".join(finding.line() for finding in errors[:SHOWN])
        more = f"\n  and {len(errors) - SHOWN} more" if len(errors) > SHOWN else ""
        raise VerifyError(f"{path} is not what it should be:\n  {lines}{more}")
    return verdict


def isolated(work: Callable[..., Verdict], *given: Any) -> Verdict:
    """Return what a function returns in a process that has seen nothing of this one."""
    way = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(way)
    if way == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *given).result()


def _verify_here(path: str, threads: int, trust_remote_code: bool) -> Verdict:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return verify(Path(path), trust_remote_code)
    finally:
        torch.set_num_threads(before)
