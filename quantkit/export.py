"""A checkpoint to a GGUF file in one pass: names and types planned first, then one tensor in memory at a time.

No float16 file lies in between. Each tensor is read, put in llama.cpp's order, encoded in runs of rows and written; a
value that its type cannot hold is an error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.backends import Backend
from quantkit.codecs import CODECS, GGML_TYPES, rounded
from quantkit.codecs.affine import Affine
from quantkit.errors import PlanError, SourceError, StrictError, name_list
from quantkit.families import GgufFamily, gguf_family
from quantkit.foreign import bounded, foreign, read_json
from quantkit.formats import gguf, gguf_keys, gguf_vocab, gguf_write
from quantkit.formats._gguf import add_key
from quantkit.formats._packed import PackedStore
from quantkit.formats._safetensors import TensorInfo, require_finite
from quantkit.formats.gguf_tensors import GgufTensor, map_tensors, slices
from quantkit.formats.store import TensorStore
from quantkit.importance import Importance, match
from quantkit.mixture import Choice, Facts, Policy, Wishes, choose
from quantkit.source import Source

# Elements that one thread encodes at a time: small enough for its cache and for memory that malloc keeps.
CHUNK = 1 << 16
RUN = 1 << 24  # elements written at a time
HALF_MAX = 65504.0
FRONT_MATTER_SECONDS = 0.8
EXACT = {"Q4_0": 4, "Q8_0": 8}  # types whose blocks are groups of 32 integers with a float16 scale
TYPE_IDS = {name: int(CODECS[name].type_id) for name in GGML_TYPES}
# Below this no scale of a block comes near the largest float16, whatever the search.
SAFE = 30000.0


@dataclass
class ExportPlan:
    """What the file will hold. notices: what the user should know; fallbacks: rows that a type did not fit."""

    source: Source
    family: GgufFamily
    settings: gguf_keys.Settings
    policy: Policy
    tensors: dict[str, GgufTensor]
    choices: list[Choice]
    vocabulary: gguf_vocab.Vocabulary | None
    notices: list[str]
    importance: Importance | None = None

    @property
    def fallbacks(self) -> list[Choice]:
        """Tensors whose type is not the wanted one."""
        return [choice for choice in self.choices if choice.wanted]

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(torch.Size(choice.shape).numel() for choice in self.choices)

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(choice.nbytes for choice in self.choices)


def make_plan(source: Source, policy: Policy, wishes: Wishes, pre: str, importance: Importance | None, strict: bool) -> ExportPlan:
    """Return the plan of an export; everything that can be refused is refused here."""
    config = source.config().to_dict()
    settings = gguf_keys.Settings(config)
    family = gguf_family(str(config.get("model_type", "")))
    if settings.rope["rope_type"] == "dynamic":
        source.notices.append("llama.cpp has no dynamic rotary scaling: texts longer than the original context will suffer")
    mapping = map_tensors(source.store, settings, family, gguf_keys.rope_tensors(settings, family))
    notices = [*source.notices, *gguf_keys.differences(settings, family)]
    if mapping.unknown:
        text = f"{family.arch} has no place for {len(mapping.unknown)} tensors, left out: {name_list(mapping.unknown)}"
        if strict:
            raise StrictError(f"--strict: {text}.")
        notices.append(text)
    vocabulary = _vocabulary(source, settings, mapping.tensors, pre)
    shapes = {name: tensor.shape for name, tensor in mapping.tensors.items()}
    facts = Facts(family.arch, settings.layers, settings.heads, settings.kv_heads, settings.experts, "output.weight" not in shapes)
    choices = choose(shapes, policy, facts, wishes)
    plan = ExportPlan(source, family, settings, policy, mapping.tensors, choices, vocabulary, notices, importance)
    if importance is not None:
        match(importance, shapes)
        plan.notices += _check_importance(importance, choices)
    if strict and plan.fallbacks:
        lines = [f"{c.name} {list(c.shape)}: {c.type} for {c.wanted}, {c.reason}" for c in plan.fallbacks]
        raise StrictError(f"--strict: {len(lines)} tensors cannot have their type: {name_list(lines, 8)}.")
    return plan


def weight_names(source: Source) -> dict[str, list[str]]:
    """Return the GGUF names that each source tensor goes into: one, or two for a tensor that is split."""
    config = source.config().to_dict()
    settings = gguf_keys.Settings(config)
    names: dict[str, list[str]] = {}
    for name, tensor in map_tensors(source.store, settings, gguf_family(str(config.get("model_type", ""))), {}).tensors.items():
        for member in tensor.sources:
            names.setdefault(member, []).append(name)
    return names


def _vocabulary(source: Source, settings: gguf_keys.Settings, tensors: dict[str, GgufTensor], pre: str) -> gguf_vocab.Vocabulary | None:
    """Return the vocabulary, one token per row of the embedding; None when the source is a GGUF file and has its own."""
    rows = tensors["token_embd.weight"].shape[0]
    if isinstance(source.store, gguf.GgufStore):
        if pre:
            raise PlanError("--pre-tokenizer: a GGUF file has its own.")
        return None
    vocabulary = gguf_vocab.load_vocabulary(source.folder, source.tokenizer(), rows, pre)
    if pre and vocabulary.model != "gpt2":
        raise PlanError("--pre-tokenizer is for byte-level BPE; this is a SentencePiece tokenizer.")
    return vocabulary


def _check_importance(importance: Importance, choices: list[Choice]) -> list[str]:
    """Refuse an importance matrix of another model; return what it lacks."""
    lacking = []
    for choice in choices:
        if CODECS[choice.type].weighted and choice.reason != "not quantized":
            if (entry := importance.entries.get(choice.name)) is None:
                lacking.append(choice.name)
            elif choice.name != "token_embd.weight":
                entry.require(choice.name, choice.shape)
    lacking = [name for name in lacking if name not in ("token_embd.weight", "output.weight")]
    if len(lacking) == sum(CODECS[c.type].weighted for c in choices) and lacking:
        raise PlanError(f"The importance matrix has no entry for any tensor of this model; it has {name_list(importance.entries)}.")
    notices = [f"no importance for {len(lacking)} tensors, rounded without: {name_list(lacking)}"] if lacking else []
    return notices + importance.notices()


def make_writer(plan: ExportPlan, split_bytes: int) -> Any:
    """Return a gguf writer with all keys and tensor infos of the plan."""
    import gguf as package

    writer = gguf_write.make_writer(plan.family.arch, plan.choices, TYPE_IDS, split_bytes)
    writer.add_type(package.GGUFType.MODEL)
    if isinstance(plan.source.store, gguf.GgufStore):
        _copy_general(writer, plan.source.store)
    else:
        _add_general(writer, plan.source, plan.notices)
    gguf_keys.add_parameters(writer, plan.settings, plan.family)
    writer.add_file_type(plan.policy.file_type)
    writer.add_quantization_version(package.GGML_QUANT_VERSION)
    if plan.importance is not None:
        plan.importance.add_keys(writer)
    if isinstance(plan.source.store, gguf.GgufStore):
        gguf_vocab.copy_vocabulary(writer, plan.source.store.header)
    elif plan.vocabulary is not None:
        for notice in gguf_vocab.add_vocabulary(writer, plan.vocabulary, plan.source.folder, plan.family):
            if notice not in plan.notices:
                plan.notices.append(notice)
    return writer


def _add_general(writer: Any, source: Source, notices: list[str]) -> None:
    """Add what the folder's name, README and generation_config say about the model."""
    import gguf as package

    total, shared, experts, count = writer.get_total_parameter_count()
    try:
        with foreign("README.md's front matter is not used"), bounded(FRONT_MATTER_SECONDS):
            if source.page is None and (source.folder / "README.md").exists():
                raise SourceError("README.md leads out of the folder: it is not used.")
            metadata = package.Metadata.load(None, source.folder, None, total)
            for field in fields(metadata):
                if not _is_plain(getattr(metadata, field.name)):
                    setattr(metadata, field.name, None)
    except SourceError as error:
        notices.append(str(error))
        metadata = package.Metadata()
    metadata.name = metadata.name or source.name
    path = source.folder / "generation_config.json"
    penalty = read_json(path).get("repetition_penalty") if path.is_file() else None
    penalty = penalty if isinstance(penalty, (int, float)) else None
    metadata.sampling_penalty_repeat = metadata.sampling_penalty_repeat or penalty  # older packages look under another name
    if metadata.size_label is None and total > 0:
        metadata.size_label = package.size_label(total, shared, experts, count)
    metadata.set_gguf_meta_model(writer)


def _is_plain(value: Any) -> bool:
    """Tell whether a piece of metadata is text, a number, or a list of texts or of tables of text: what GGUF has keys for."""
    if isinstance(value, list):
        return all(isinstance(item, str) or (isinstance(item, dict) and all(isinstance(v, str) for v in item.values())) for item in value)
    return value is None or isinstance(value, (str, int, float))


def _copy_general(writer: Any, store: gguf.GgufStore) -> None:
    skip = ("general.architecture", "general.file_type", "general.quantization_version", "general.alignment", "general.type")
    for name, key in store.header.keys.items():
        if name.startswith("general.") and name not in skip:
            add_key(writer, name, key)


def write(plan: ExportPlan, writer: Any, output: Path, backend: Backend, threads: int, done: Callable[[str], None],
          prove: Callable[[list[Path]], None]) -> list[Path]:  # fmt: skip
    """Write the files and return their paths; writer: `make_writer`'s; backend: of one thread, the pool has `threads`.

    prove: see `gguf_write.write_files`.
    """
    choices = {choice.name: choice for choice in plan.choices}
    with ThreadPoolExecutor(threads) as pool:

        def data(name: str) -> Iterator[Any]:
            yield from encode(plan, choices[name], backend, pool)

        return gguf_write.write_files(writer, output, data, done, prove)


def planned(plan: ExportPlan) -> dict[str, TensorInfo]:
    """Return type and shape of every tensor of the file."""
    return {choice.name: TensorInfo(choice.type, choice.shape) for choice in plan.choices}


def encode(plan: ExportPlan, choice: Choice, backend: Backend, pool: ThreadPoolExecutor) -> Iterator[Any]:
    """Yield a tensor's bytes, a run of rows at a time; the pool widens, checks and encodes them in small chunks."""
    tensor, codec = plan.tensors[choice.name], CODECS[choice.type]
    if (stored := held_exactly(plan.source.store, tensor, choice.type)) is not None:
        yield from _carry(tensor, choice.type, stored)
        return
    encoder = backend.op(choice.type, codec.encode)
    entry = plan.importance.entries.get(choice.name) if plan.importance and codec.weighted else None
    matrix = 0
    for part in slices(tensor, plan.source.store.read):
        for rows in part.reshape(-1, *part.shape[-2:]) if part.dim() > 1 else part.reshape(1, 1, -1):
            weight = entry.weights(matrix) if entry is not None and entry.fits(choice.shape) else None
            matrix += 1
            step = max(1, RUN // max(rows.shape[1], 1))
            for start in range(0, rows.shape[0], step):
                held = partial(_require_held, choice=choice, tensor=tensor, start=start)
                yield _encode_run(rows[start : start + step], partial(encoder, importance=weight), codec, held, pool).numpy().data


def held_exactly(store: TensorStore, tensor: GgufTensor, kind: str) -> PackedStore | None:
    """Return the store if what it packs of a tensor are blocks of this type already: symmetric groups of 32 with float16 scales."""
    if not isinstance(store, PackedStore) or kind not in EXACT or tensor.transposed or tensor.shift or not tensor.sources:
        return None
    if not all(store.is_packed(source) for source in tensor.sources):
        return None
    for source in tensor.sources:
        packed = store.quant(source.removesuffix(".weight"))
        if packed.codec != Affine(EXACT[kind], 32, True, "float16") or packed.group_index is not None:
            return None
    return store


def _carry(tensor: GgufTensor, kind: str, store: PackedStore) -> Iterator[Any]:
    """Yield a tensor's blocks with the codes and scales of the source, its rows in the file's order."""
    for source in tensor.sources:
        packed, one = store.quant(source.removesuffix(".weight")), replace(tensor, sources=(source,))
        codes, scale = (next(slices(one, lambda name, part=part: part)) for part in (packed.codes, packed.params["scale"]))
        yield rounded.from_codes(kind, codes, scale).numpy().data


def carries(plan: ExportPlan) -> bool:
    """Tell whether every packed weight of the source comes into the file as it is."""
    store = plan.source.store
    if not isinstance(store, PackedStore):
        return False
    packed = [
        c for c in plan.choices if any(source in store.names() and store.is_packed(source) for source in plan.tensors[c.name].sources)
    ]
    return all(held_exactly(store, plan.tensors[choice.name], choice.type) for choice in packed)


def _encode_run(run: Tensor, encoder: Callable[..., Tensor], codec: Any, held: Callable[..., None], pool: ThreadPoolExecutor) -> Tensor:
    """Return uint8 [rows, bytes] for a run of rows in the checkpoint's dtype; held(piece, encoded, row) looks at each chunk."""
    columns = run.shape[1]
    encoded = torch.empty(len(run), codec.row_bytes(columns), dtype=torch.uint8)
    step = max(1, CHUNK // max(columns, 1))

    def work(row: int) -> None:
        piece = run[row : row + step].to(torch.float32).contiguous()
        encoded[row : row + step] = encoder(piece)
        held(piece, encoded[row : row + step], row)

    list(pool.map(work, range(0, len(run), step)))
    return encoded


def _require_held(piece: Tensor, encoded: Tensor, at: int, choice: Choice, tensor: GgufTensor, start: int) -> None:
    """Raise a SourceError if the source holds NaN, or a value or a block's scale is too large for the type."""
    source = tensor.sources[0] if tensor.sources else choice.name
    least, most = (float(value) for value in torch.aminmax(piece))
    if not (math.isfinite(least) and math.isfinite(most)):
        require_finite(source, piece)
    if choice.type in ("F32", "BF16") or max(-least, most) <= (HALF_MAX if choice.type == "F16" else SAFE):
        return
    bad = ~torch.isfinite(CODECS[choice.type].decode(encoded))
    if count := int(bad.sum()):
        row, column = (int(i) for i in bad.nonzero()[0])
        raise SourceError(
            f"'{source}' has {count} values that {choice.type} cannot hold, the first at ({start + at + row}, {column}). "
            f"Keep it wider: --tensor-type '{choice.name}=BF16'."
        )
