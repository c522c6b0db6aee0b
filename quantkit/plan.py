"""Options and shapes in, rows out: what happens to every weight, what it will weigh, and who will load it.

All that can be refused is refused here, before any work: a format that cannot hold a codec, a grid no runtime loads.
A group that does not divide an input width falls back to the largest known smaller group that does; a weight that no
group fits, or whose widths cannot be packed, is kept. Each fallback is listed with its reason, and fails a strict run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from quantkit.codecs import CODECS, GGML_TYPES
from quantkit.codecs._grid import GROUPS
from quantkit.codecs._levels import SCALE_DTYPES
from quantkit.codecs.affine import Affine
from quantkit.errors import PlanError, StrictError, UsageError, name_list
from quantkit.families import FUSED_AT_RUN_TIME, KEEP_ALWAYS, family
from quantkit.formats._safetensors import CODES, DTYPES, TensorInfo
from quantkit.loader import Loader, is_conv1d, is_expert_stack, matches
from quantkit.tensors import PlanRow

RUNTIMES = {
    "int8": "vLLM, SGLang: INT8 kernels (CUTLASS; compute capability 7.5 and later); transformers: needs compressed-tensors",
    "fp8": "vLLM, SGLang: FP8 kernels on Ada and Hopper, weight-only (Marlin) on Ampere; transformers loads it",
    "nf4": "transformers, vLLM: need bitsandbytes; no SGLang kernel is fast",
    "fp4": "transformers, vLLM: need bitsandbytes; no SGLang kernel is fast",
    "llm-int8": "transformers, vLLM: need bitsandbytes",
    "mxfp4": "vLLM: weight-only (Marlin); transformers: needs compressed-tensors and dtype bfloat16",
    "nvfp4": "vLLM: Blackwell kernels, elsewhere weight-only (Marlin); transformers: needs compressed-tensors and dtype bfloat16",
}


def _is_special(codec: Any) -> bool:
    return bool(codec.name != "affine" or codec.activations != "none")


@dataclass
class Plan:
    """Rows for every linear of every block, and what follows from them.

    rows: one per linear; kept: shapes of every tensor that is carried over; ignore: linears outside the blocks
    (model names); before, after: bytes of all tensors; runtimes: one line each.
    """

    rows: list[PlanRow]
    kept: dict[str, TensorInfo]
    layouts: dict[str, dict[str, TensorInfo]]
    ignore: list[str]
    before: int
    runtimes: list[str] = field(default_factory=list)

    @property
    def packed(self) -> list[PlanRow]:
        """Rows that are stored in their codec."""
        return [row for row in self.rows if row.method not in ("keep", "scale")]

    @property
    def fallbacks(self) -> list[PlanRow]:
        """Rows whose codec is not what was asked for."""
        return [row for row in self.rows if row.reason.startswith("fallback")]

    @property
    def after(self) -> int:
        """Bytes of all tensors of the output."""
        parts = [*self.kept.values(), *(info for layout in self.layouts.values() for info in layout.values())]
        return sum(info.nbytes for info in parts)

    @property
    def bits_per_weight(self) -> float:
        """Mean bits of the quantized weights on disk: codes, scales, zero points, indexes."""
        weights = sum(row.shape[0] * row.shape[1] for row in self.packed)
        stored = sum(info.nbytes for row in self.packed for info in self.layouts[row.tensor].values())
        return 8 * stored / max(weights, 1)


def make_plan(loader: Loader, method: str, options: Any, form: Any, dtype: str, strict: bool) -> Plan:
    """Return the plan of a run; `form` is the output format, dtype what carried tensors become ("auto": unchanged)."""
    overrides, scale_dtype = parse_overrides(options.override), _scale_dtype(loader, form)
    kind = getattr(options, "codec", "affine")
    if kind not in (form.codecs or (kind,)):
        raise PlanError(f"{form.name} holds {', '.join(form.codecs)}, not {kind}. Choose another --format, or leave it to auto.")

    def choose(row: PlanRow) -> PlanRow:
        return _choose(row, loader, options, overrides, form, scale_dtype)

    for target in loader.names.stacks:
        if not is_expert_stack(loader.model.get_submodule(target.rpartition(".")[0])):
            raise PlanError(f"quantkit does not know how {type(loader.model).__name__} computes its experts; export-gguf quantizes them.")
    rows = [choose(row) for index in range(len(loader.blocks)) for row in _block_rows(loader, index, method, form)]
    rows = _one_group(rows, form) if form.uniform else rows
    rows = _agree(rows)
    if not any(row.method != "keep" for row in rows):
        reasons = sorted({row.reason for row in rows})
        raise PlanError(f"Nothing is left to quantize: {name_list(reasons)}.")
    scattered = getattr(options, "order", "none") == "full"
    if scattered and not form.scattered:
        raise PlanError(
            f"--order full scatters columns over groups, which today's readers of {form.name} do not take; "
            "use --order group, or --format gptq."
        )
    packed = {row.tensor: row for row in Plan(rows, {}, {}, [], 0).packed}
    layouts = {
        row.tensor: form.layout(row.tensor.removesuffix(".weight"), row.shape, row.codec, scattered and row.codec.groups(row.shape[1]) > 1)
        for row in packed.values()
    }
    store = loader.source.store
    kept = {name: kept_info(loader.info(name), dtype) for name in store.names() if name not in packed}
    ignore = linears_outside(loader, rows)
    before = sum(stored_bytes(store, name) for name in store.names())
    plan = Plan(rows, kept, layouts, ignore, before)
    if packed:
        plan.runtimes = runtimes([(row.codec, row.shape) for row in plan.packed], form.name, scattered)
    if strict and plan.fallbacks:
        lines = [f"{row.module} {list(row.shape)}: {row.reason}" for row in plan.fallbacks]
        raise StrictError(f"--strict: {len(lines)} weights cannot have the codec asked for: {'; '.join(lines[:8])}.")
    return plan


def stored_bytes(store: Any, name: str) -> int:
    """Return the bytes that a tensor takes in its file, packed or not."""
    measured = getattr(store, "stored_bytes", None)
    return int(measured(name)) if measured else int(store.info(name).nbytes)


def _one_group(rows: list[PlanRow], form: Any) -> list[PlanRow]:
    """Give every row the smallest group among them: the format's configuration has room for one."""
    groups = {row.codec.group for row in rows if row.codec} - {-1} or {-1}
    group, settled = min(groups), []
    for row in rows:
        if row.codec and row.codec.group != group:
            reason = f"fallback: {form.name} holds one group size for all; group {group} instead of {row.codec.group}"
            row = replace(row, codec=replace(row.codec, group=group), reason=reason)
        settled.append(row)
    return settled


def describe_codec(codec: Any) -> dict[str, Any]:
    """Return a codec's name and settings as plain values."""
    return {"codec": codec.name, **(asdict(codec) if is_dataclass(codec) and not isinstance(codec, type) else {})}


def linears_outside(loader: Loader, rows: list[PlanRow]) -> list[str]:
    """Return the linear layers that no row is about, such as the head."""
    inside = {row.module for row in rows}
    return [name for name, module in loader.model.named_modules() if isinstance(module, nn.Linear) and name not in inside]


def kept_info(info: TensorInfo, dtype: str) -> TensorInfo:
    """Return what a carried tensor becomes on disk: floats take `dtype` unless it is "auto"."""
    if dtype == "auto" or not DTYPES[info.dtype].is_floating_point:
        return info
    return TensorInfo(CODES[getattr(torch, dtype)], info.shape)


def _block_rows(loader: Loader, index: int, method: str, form: Any) -> list[PlanRow]:
    rows = []
    for name, module in loader.linears(index).items():
        full = f"{loader.block_name(index)}.{name}"
        tensor = loader.names.to_source.get(f"{full}.weight")
        if tensor is None:
            raise PlanError(f"{full} shares its weight with another module, which quantkit does not quantize.")
        transposed = is_conv1d(module)
        shape = module.get_parameter("weight").shape
        out, columns = (shape[1], shape[0]) if transposed else (shape[0], shape[1])
        if transposed and not form.conv1d:
            raise PlanError(f"{full} is a Conv1D layer, which no runtime loads from {form.name}; use --format gptq (or GGUF).")
        rows.append(PlanRow(full, tensor, (out, columns), method, None, "", transposed, index))
    return rows + _expert_rows(loader, index, method)


def _expert_rows(loader: Loader, index: int, method: str) -> list[PlanRow]:
    rows = []
    for (stack, part, expert), module in loader.expert_modules(index).items():
        parameter = f"{loader.block_name(index)}.{stack}.{'down_proj' if part == 'down' else 'gate_up_proj'}"
        out, columns = loader.info(f"{module}.weight").shape
        place = (parameter, expert, part)
        rows.append(PlanRow(module, f"{module}.weight", (out, columns), method, None, "", False, index, place))
    return rows


def _choose(
    row: PlanRow, loader: Loader, options: Any, overrides: list[tuple[str, dict[str, Any]]], form: Any, scale_dtype: str
) -> PlanRow:
    keep = family(str(loader.model.config.model_type)).keep
    if matches(KEEP_ALWAYS, row.module) or matches(keep, row.module):
        return replace(row, method="keep", reason="routers and the like are never quantized")
    if row.stack and options.activations != "none":
        return replace(row, method="keep", reason="fallback: inputs of experts are not rounded; kept as it is")
    if options.include and not matches(options.include, row.module):
        return replace(row, method="keep", reason="not in --include")
    if matches(options.exclude, row.module):
        return replace(row, method="keep", reason="in --exclude")
    kind = getattr(options, "codec", "affine")
    if kind in GGML_TYPES:
        codec = CODECS[kind]
        fits = row.shape[1] % codec.block == 0
        reason = "" if fits else f"{kind} packs blocks of {codec.block}, which do not divide {row.shape[1]} columns: not scaled for it"
        return replace(row, codec=codec if fits else None, reason=reason)
    if kind != "affine":
        codec = make_codec(kind, options, form, "float32" if scale_dtype == "float16" else scale_dtype, _source_dtype(loader))
        refusal = codec.refuse(row.shape) or form.refuse(row.shape, codec)
        return replace(row, method="keep", reason=f"fallback: {refusal}; kept as it is") if refusal else replace(row, codec=codec)
    wanted: dict[str, Any] = {
        "bits": options.bits,
        "group": options.group_size,
        "symmetric": options.sym,
        "activations": options.activations,
    }
    wanted |= next((change for pattern, change in overrides if re.search(pattern, row.module)), {})
    if options.activations != "none" and form.name not in ("compressed-tensors", "hf"):
        raise PlanError(f"{form.name} has no place for rounded activations: use --format compressed-tensors, or --activations none.")
    codec = Affine(**wanted, scale_dtype=scale_dtype)
    group, columns = codec.group, row.shape[1]
    reason = ""
    if group != -1 and columns % group:
        smaller = [g for g in GROUPS if 0 < g < group and columns % g == 0]
        if not smaller:
            return replace(row, method="keep", reason=f"fallback: no known group divides {columns} columns; kept as it is")
        codec = replace(codec, group=max(smaller))
        reason = f"fallback: {group} does not divide {columns} columns; group {codec.group} instead"
    if refusal := form.refuse(row.shape, codec):
        return replace(row, method="keep", reason=f"fallback: {refusal}; kept as it is")
    return replace(row, codec=codec, reason=reason)


def make_codec(kind: str, options: Any, form: Any, scale_dtype: str, dtype: str) -> Any:
    """Return the codec of this name, with the options that concern it; dtype: what a library that dequantizes makes of it."""
    if kind == "fp8" and form.name == "fp8":  # its runtimes always round the inputs
        return CODECS[kind]("block", "float32", "dynamic")
    if kind == "fp8":
        return CODECS[kind](options.strategy, scale_dtype, options.activations)
    if options.activations != "none":
        raise UsageError(f"--activations {options.activations} goes with --codec affine and fp8, not {kind}.")
    if kind in ("nf4", "fp4"):
        return CODECS[kind](kind, options.double, dtype)
    return CODECS[kind]() if kind == "llm-int8" else CODECS[kind](kind)


def _source_dtype(loader: Loader) -> str:
    config = loader.source.raw_config()
    wanted = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return wanted if wanted in SCALE_DTYPES else "bfloat16"


def _scale_dtype(loader: Loader, form: Any) -> str:
    """Scales are stored as float16 unless the format takes the model's dtype and that is bfloat16."""
    wanted = _source_dtype(loader)
    return wanted if wanted in form.scale_dtypes and wanted != "float32" else "float16"


def _agree(rows: list[PlanRow]) -> list[PlanRow]:
    """Keep what a runtime fuses with a weight that had to be kept, and take the smallest group for all: they must agree in scheme."""
    settled = {row.module: row for row in rows}
    for names in fused_sets(settled):
        members = [settled[name] for name in names]
        chosen = {row.codec for row in members}
        forced = [row for row in members if row.reason.startswith("fallback")]
        if len(chosen) == 1 or not forced:
            continue
        if kept := next((row for row in forced if row.codec is None), None):
            why = f"fallback: runtimes fuse it with {kept.module}, which is kept"
            settled |= {row.module: row if row.codec is None else replace(row, method="keep", codec=None, reason=why) for row in members}
        else:
            least = min((row.codec for row in members), key=lambda codec: (codec.group == -1, codec.group))
            why = f"fallback: runtimes fuse it with others of group {least.group}"
            settled |= {row.module: row if row.codec == least else replace(row, codec=least, reason=why) for row in members}
    return [settled[row.module] for row in rows]


def fused_sets(modules: Iterable[str]) -> list[list[str]]:
    """Return the modules that runtimes make one of, set by set."""
    known, found = set(modules), []
    for name in modules:
        parent, _, last = name.rpartition(".")
        for names in FUSED_AT_RUN_TIME:
            if last == names[0]:
                found.append([f"{parent}.{other}" for other in names if f"{parent}.{other}" in known])
    return [names for names in found if len(names) > 1]


def parse_overrides(texts: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return (pattern, changes) from REGEX=bits:N,group:N,sym:yes|no; a UsageError shows what is wrong."""
    parsed = []
    for text in texts:
        pattern, separator, changes = text.rpartition("=")
        result: dict[str, Any] = {}
        try:
            re.compile(pattern)
            for item in changes.split(","):
                key, value = item.split(":")
                if key == "sym":
                    result["symmetric"] = {"yes": True, "no": False}[value]
                else:
                    result[{"bits": "bits", "group": "group"}[key]] = int(value)
        except (ValueError, KeyError, re.error):
            separator = ""
        if not separator or not pattern:
            raise UsageError(f"--override '{text}' is not REGEX=bits:N,group:N,sym:yes|no (any of the three).")
        parsed.append((pattern, result))
    return parsed


def runtimes(codecs: Sequence[tuple[Any, tuple[int, ...]]], form: str, scattered: bool) -> list[str]:
    """Return, for the common runtimes, whether they take these (codec, shape) and how fast (kernel limits of mid 2026)."""
    if special := sorted({codec.name if codec.name != "affine" else "int8" for codec, _ in codecs if _is_special(codec)}):
        return [RUNTIMES[name] for name in special]
    marlin = []
    for codec, (out, columns) in codecs:
        if codec.bits not in (4, 8) or codec.group not in (-1, 32, 64, 128):
            marlin.append(f"{codec.bits} bits, group {codec.group}")
        elif not codec.symmetric and form != "awq":
            marlin.append("asymmetric")
        elif out % 64 or columns % 128:
            marlin.append(f"shape {out}x{columns} (newer versions pad)")
    fast = "fast (Marlin)" if not marlin else f"slower kernels or none: {name_list(sorted(set(marlin)), 3)}"
    if scattered and not marlin:
        fast = "Marlin with g_idx: slower than without, no tensor parallelism on some layers"
    lines = [f"vLLM, SGLang: {fast}"]
    if form in ("gptq", "awq"):
        lines.append("transformers: needs gptqmodel and optimum")
    elif all(codec.symmetric for codec, _ in codecs):
        lines.append("transformers: needs compressed-tensors")
    else:
        lines.append("transformers: needs compressed-tensors, and CompressedTensorsConfig(dequantize=True) for asymmetric grids")
    return lines
