"""A checkpoint's tensors as GGUF's: names, row orders, stacked experts, split and transposed weights.

Nothing is read here but names and shapes; `slices` reads one tensor, expert by expert, when its turn comes.

Source: llama.cpp's converter (conversion/*.py); names by the gguf package's tensor map.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import SourceError, name_list
from quantkit.families import GgufFamily
from quantkit.formats._experts import EXPERT, PARTS, STACK
from quantkit.formats.gguf_keys import Settings
from quantkit.formats.store import TensorStore

BUFFERS = re.compile(r"\.(attn\.bias|attn\.masked_bias|attention\.bias|attention\.masked_bias|rotary_emb\.inv_freq)$")
OTHER_TOWERS = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector|vision_model|audio_tower|embed_vision|visual)\.")


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file and how it comes about.

    shape: torch's. sources: the checkpoint's tensors, one per expert of a stack. heads: how many heads' rows are put
    in rotary pairs. half: 0 or 1 of a fused tensor's rows. shift: added to every element. value: given, not read.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...] = ()
    heads: int = 0
    half: int = -1
    transposed: bool = False
    shift: float = 0.0
    rows: int = -1
    value: Tensor | None = None


@dataclass
class Mapping:
    """All tensors of the file, and source tensors left out: by intention, and without a place."""

    tensors: dict[str, GgufTensor]
    dropped: list[str]
    unknown: list[str]


def map_tensors(store: TensorStore, settings: Settings, family: GgufFamily, extra: dict[str, Tensor]) -> Mapping:
    """Return the file's tensors; extra: tensors made from the configuration. A SourceError names what is missing."""
    import gguf

    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.arch)
    table = gguf.get_tensor_name_map(arch, settings.layers)
    found = Mapping({name: GgufTensor(name, tuple(value.shape), value=value) for name, value in extra.items()}, [], [])
    stacks: dict[str, dict[int, str]] = {}
    for source in store.names():
        name = source.replace("language_model.", "")
        if BUFFERS.search(name) or OTHER_TOWERS.search(name):
            found.dropped.append(source)
        elif match := EXPERT.fullmatch(name):
            block = _block_of(name)
            stacks.setdefault(f"blk.{block}.ffn_{PARTS[match['part']]}_exps.weight", {})[int(match["index"])] = source
        elif match := STACK.fullmatch(name):
            _add_stack(found, source, match["part"], _block_of(name), store.info(source).shape)
        elif (target := table.get_name(name, try_suffixes=(".weight", ".bias"))) is None:
            found.unknown.append(source)
        else:
            _add(found, target, source, name, store.info(source).shape, settings, family)
    for target, members in stacks.items():
        _add_members(found, target, members, settings, store)
    _settle_head(found, settings, store)
    _check(found, settings, family)
    return found


def _block_of(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdecimal())


def _add(found: Mapping, target: str, source: str, name: str, shape: tuple[int, ...], settings: Settings, family: GgufFamily) -> None:
    transposed = name.endswith(family.transposed) if family.transposed else False
    tensor = GgufTensor(target, shape[::-1] if transposed else shape, (source,), transposed=transposed)
    if family.permuted and re.search(r"\.(q|k)_proj\.(weight|bias)$", name):
        tensor = replace(tensor, heads=settings.kv_heads if ".k_proj." in name else settings.heads)
    if family.norm_shift and name.endswith("norm.weight"):
        tensor = replace(tensor, shift=family.norm_shift)
    if target in found.tensors:
        raise SourceError(f"'{source}' and '{found.tensors[target].sources[0]}' are both {target}. Remove one from the checkpoint.")
    found.tensors[target] = tensor


def _add_stack(found: Mapping, source: str, part: str, block: int, shape: tuple[int, ...]) -> None:
    if part == "gate_up_proj":
        count, rows, columns = shape
        for half, kind in enumerate(("gate", "up")):
            target = f"blk.{block}.ffn_{kind}_exps.weight"
            found.tensors[target] = GgufTensor(target, (count, rows // 2, columns), (source,), half=half)
        return
    target = f"blk.{block}.ffn_{PARTS[part]}_exps.weight"
    found.tensors[target] = GgufTensor(target, shape, (source,))


def _add_members(found: Mapping, target: str, members: dict[int, str], settings: Settings, store: TensorStore) -> None:
    if sorted(members) != list(range(settings.experts)):
        lacking = sorted(set(range(settings.experts)) - set(members))
        raise SourceError(f"{target}: config.json says {settings.experts} experts; without a tensor: {name_list(lacking)}.")
    sources = tuple(members[i] for i in range(settings.experts))
    found.tensors[target] = GgufTensor(target, (len(sources), *store.info(sources[0]).shape), sources)


def _settle_head(found: Mapping, settings: Settings, store: TensorStore) -> None:
    """Apply `tie_word_embeddings`, which transformers obeys whatever the file holds."""
    head, embedding = found.tensors.get("output.weight"), found.tensors.get("token_embd.weight")
    if settings.get("tie_word_embeddings"):
        if head is not None and embedding is None:
            found.tensors["token_embd.weight"] = replace(head, name="token_embd.weight")
        if head is not None:
            found.dropped.append(head.sources[0])
            del found.tensors["output.weight"]
    elif head is None:
        raise SourceError(
            "config.json says that the output matrix is not the embedding (tie_word_embeddings is false), "
            "but the checkpoint has no lm_head.weight. Set it to true if the model ties them."
        )


def _check(found: Mapping, settings: Settings, family: GgufFamily) -> None:
    groups: list[tuple[str, ...]] = [("token_embd.weight",), ("output_norm.weight",)]
    groups += [tuple(f"blk.{i}.{name}.weight" for name in need) for i in range(settings.layers) for need in family.needs]
    lacking = [names[0] for names in groups if not any(name in found.tensors for name in names)]
    if lacking:
        raise SourceError(
            f"The checkpoint lacks {len(lacking)} tensors of a {family.arch} model: {name_list(lacking)}. "
            f"It holds, without a place for them: {name_list(found.unknown) or 'nothing else'}."
        )
    layer = re.compile(r"\.(?:layers|h)\.(\d+)\.")
    beyond = [name for name in found.unknown if (match := layer.search("." + name)) and int(match[1]) >= settings.layers]
    if beyond:
        raise SourceError(f"config.json says {settings.layers} layers, but the checkpoint has more: {name_list(beyond, 2)}.")
    width = settings.head_dim
    for name, rows in (("attn_q", settings.heads * width), ("attn_k", settings.kv_heads * width)):
        tensor = found.tensors.get(f"blk.0.{name}.weight")
        if tensor is not None and tensor.shape[0] != rows:
            raise SourceError(
                f"'{tensor.sources[0]}' has {tensor.shape[0]} rows, but config.json makes it {rows} (head_dim {width}). "
                "Its hidden_size, head counts or head_dim are not those of these weights: "
                f"with head_dim {tensor.shape[0] * width // rows} they would fit."
            )
    embedding = found.tensors["token_embd.weight"]
    if embedding.shape[1:] != (settings.hidden,):
        raise SourceError(
            f"'{embedding.sources[0]}' has shape {list(embedding.shape)}, but config.json says hidden_size {settings.hidden}."
        )


def slices(tensor: GgufTensor, read: Any) -> Iterator[Tensor]:
    """Yield the tensor, [..., rows, columns] in the checkpoint's dtype, whole or expert by expert; read(name) reads one."""
    if tensor.value is not None:
        yield tensor.value
        return
    for source in tensor.sources:
        value: Tensor = read(source)
        if tensor.half >= 0:
            value = value.chunk(2, dim=-2)[tensor.half]
        if tensor.transposed:
            value = value.T
        if tensor.heads:
            value = value.reshape(tensor.heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
        if tensor.shift:
            value = value.to(torch.float32) + tensor.shift
        if tensor.rows >= 0:
            value = value[: tensor.rows]
        yield value
