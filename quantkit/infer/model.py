"""A model ready to run: transformers' own code, its linears and embeddings replaced by packed ones, its cache by ours.

Weights are read one tensor at a time and never exist as a float copy of the model. Rows of several sequences are packed side by side,
[1, T], with their positions.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.backends import Backend
from quantkit.errors import PlanError
from quantkit.formats._packed import PackedStore
from quantkit.formats.gguf import GgufStore
from quantkit.infer.attention import Step, attend_reference, pick_attention, register
from quantkit.infer.cache import PagedCache, Segment
from quantkit.infer.cache_int8 import Int8Cache
from quantkit.infer.cache_plain import PlainCache
from quantkit.infer.linear import (
    LANES,
    PackedEmbedding,
    PackedExperts,
    PackedLinear,
    Planes,
    Stub,
    eight_bits,
    linear_from,
    linear_of_blocks,
    linear_of_floats,
    linear_of_planes,
    planes_of_blocks,
    planes_of_floats,
    planes_reference,
    share,
    values_of,
    with_room,
)  # fmt: skip
from quantkit.infer.replay import Replay
from quantkit.loader import Loader, head_size, is_conv1d
from quantkit.plan import fused_sets

MOST = 1.17  # times the stored bytes: what planes of blocks may take
CACHES = {"plain": PlainCache, "paged": PagedCache, "int8": Int8Cache, "paged-int8": Int8Cache}


class Runner:
    """One model in memory. compute: "fast" or "exact"; head: bits of the output matrix, 0: as it is; stub: linears compute nothing."""

    def __init__(
        self, loader: Loader, threads: int, compute: str = "fast", head: int = 0, reference: bool = False, stub: bool = False
    ) -> None:
        if not hasattr(loader.model, "lm_head"):
            raise PlanError(f"quantkit does not run {type(loader.model).__name__} yet; eval-ppl measures it.")
        self.loader, self.model, self.config = loader, loader.model, loader.model.config.get_text_config()
        self.backend = Backend(loader.device, threads, reference)
        self.make = None if compute == "exact" else self.backend.op("packed_linear", planes_reference)
        self.attend = self.backend.op("attend", attend_reference)
        self.stub = stub
        self.nbytes = 0
        self._replace(head)
        rest = [name for name in loader.all_names() if self._is_left(name)]
        loader.materialize(rest)
        self.nbytes += sum(loader.model.get_parameter_or_buffer(name).nbytes for name in rest)
        try:
            self.model.set_attn_implementation(register())
        except ValueError as error:
            raise PlanError(f"{type(loader.model).__name__} takes no attention but its own ({str(error).splitlines()[0]}).") from None
        self.states = torch.empty(0)  # what the last step's logits were made from, float32 [wanted, width]
        self.model.lm_head.register_forward_pre_hook(self._keep_states)
        forward = inspect.signature(type(self.model).forward).parameters
        self.cache_word = "cache" if "cache" in forward else "past_key_values"
        self.replay = Replay(self) if compute == "fast" and not reference else None

    def _is_left(self, name: str) -> bool:
        module, _, key = name.rpartition(".")
        owner = self.model.get_submodule(module)
        return not isinstance(owner, (PackedLinear, PackedEmbedding)) and (key in owner._parameters or key in owner._buffers)

    def _replace(self, head: int) -> None:
        embedding = self.model.get_input_embeddings()
        names = {id(module): name for name, module in self.model.named_modules()}
        tied = "lm_head.weight" in self.loader.names.tied or f"{names[id(embedding)]}.weight" in self.loader.names.tied
        weight = self._planes(f"{names[id(embedding)]}.weight")
        scale = float(getattr(embedding, "embed_scale", 1.0))
        if isinstance(weight, PackedLinear):
            assert weight.rows is not None
            rows = weight.rows
            looked = PackedEmbedding(lambda ids: torch.cat([rows(int(i), int(i) + 1) for i in ids]), weight.nbytes, scale)
        else:
            looked = PackedEmbedding(lambda ids: values_of(weight, ids), weight.nbytes, scale)
        self.nbytes += looked.nbytes
        shape = (embedding.weight.shape[0], embedding.weight.shape[1])
        for index in range(len(self.loader.blocks)):
            for name, module in self.loader.linears(index).items():
                self._put(f"{self.loader.block_name(index)}.{name}", self._linear(f"{self.loader.block_name(index)}.{name}", module))
            self._experts(index)
            self._fuse(index)
        self._put(names[id(embedding)], looked)
        output = self._head(weight, shape, tied, head)
        self._put("lm_head", output)

    def _fuse(self, index: int) -> None:
        """Let q, k and v, and gate and up, run as one kernel call each where they can."""
        if self.make is None:
            return
        modules = self.loader.blocks[index].named_modules()
        made = {name: module for name, module in modules if isinstance(module, PackedLinear) and module.inputs is None}
        for names in fused_sets(made):
            share([made[name] for name in names], self.make)

    def _head(self, embedding: Planes | PackedLinear, shape: tuple[int, int], tied: bool, bits: int) -> PackedLinear:
        weight = embedding if tied else self._planes("lm_head.weight")
        bias = self.loader.read(self.loader.names.to_source["lm_head.bias"]) if self.model.lm_head.bias is not None else None
        if bits == 8 and isinstance(weight, Planes) and self.make is not None and weight.bits == 16:
            smaller = eight_bits(values_of(weight, slice(None)))
            self.nbytes += smaller.nbytes
            return linear_of_planes(smaller, shape, bias, self.make)
        self.nbytes += 0 if tied else weight.nbytes
        if isinstance(weight, Planes):
            return linear_of_planes(weight, shape, bias, self.make or planes_reference)
        if bias is not None:
            weight.bias = nn.Parameter(bias, requires_grad=False)
        return weight

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, last = name.rpartition(".")
        setattr(self.model.get_submodule(parent), last, module)

    def _planes(self, name: str) -> Planes | PackedLinear:
        """Return a matrix outside the blocks as planes, or as an exact linear where it has none."""
        names = self.loader.names
        source = names.to_source[names.tied.get(name, name)]
        store = self.loader.source.store
        if isinstance(store, GgufStore) and (raw := store.raw_rows(source)) is not None:
            return (_block_planes(*raw) if self.make else None) or linear_of_blocks(*raw, None)
        value = store.read(source)
        if value.dtype == torch.bfloat16 and value.shape[1] % LANES == 0:
            return planes_of_floats(value)
        return linear_of_floats(value, None)

    def _linear(self, name: str, module: nn.Module) -> nn.Module:
        names = self.loader.names
        if self.stub:
            return Stub(module.weight, is_conv1d(module))
        bias = self.loader.read(names.to_source[f"{name}.bias"]) if getattr(module, "bias", None) is not None else None
        return self._packed(names.to_source[f"{name}.weight"], bias, is_conv1d(module))

    def _experts(self, index: int) -> None:
        """Replace a block's stacks of experts by packed linears, one for each part of each expert."""
        stacks: dict[str, dict[tuple[str, int], PackedLinear]] = {}
        for (stack, part, number), module in self.loader.expert_modules(index).items():
            stacks.setdefault(stack, {})[part, number] = self._packed(f"{module}.weight", None, False)
        for stack, parts in stacks.items():
            name = f"{self.loader.block_name(index)}.{stack}"
            self._put(name, PackedExperts(parts, self.model.get_submodule(name).act_fn))

    def _packed(self, source: str, bias: Tensor | None, transposed: bool) -> PackedLinear:
        """Return the linear of a tensor of the source; transposed: transformers keeps it [in, out]."""
        store = self.loader.source.store
        if isinstance(store, PackedStore) and store.is_packed(source):
            plain = source.removesuffix(".weight")
            activation = store.activation(plain)
            made = linear_from(store.quant(plain), bias, self.make if activation is None else None)
            if activation is not None:
                made.inputs = (activation[0], activation[1])
        elif isinstance(store, GgufStore) and not transposed and (raw := store.raw_rows(source)) is not None:
            planes = _block_planes(*raw) if self.make else None
            shape = (raw[0].shape[0], raw[0].shape[1] // raw[1].size * raw[1].block)
            made = linear_of_planes(planes, shape, bias, self.make) if planes and self.make else linear_of_blocks(*raw, bias)
        else:
            made = self._dense(store.read(source), bias, transposed)
        self.nbytes += made.nbytes + (0 if bias is None else bias.nbytes)
        return made

    def _dense(self, value: Tensor, bias: Tensor | None, transposed: bool) -> PackedLinear:
        value = value.T.contiguous() if transposed else value
        if self.make is not None and value.dtype == torch.bfloat16 and value.shape[1] % LANES == 0:
            return linear_of_planes(planes_of_floats(value), (value.shape[0], value.shape[1]), bias, self.make)
        return linear_of_floats(value, bias)

    def _keep_states(self, head: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.states = args[0][0]

    def cache(self, kind: str, attention: str = "tiled") -> PagedCache:
        """Return an empty cache of this kind for the model."""
        heads = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        cache = CACHES[kind](len(self.loader.blocks), heads, head_size(self.config), self.attend, pick_attention(attention))
        if self.attend is not attend_reference:
            cache.step = self.backend.op("paged_step", attend_reference)
        return cache

    @torch.no_grad()
    def step(self, tokens: list[int], segments: list[Segment], cache: PagedCache, wanted: list[int]) -> Tensor:
        """Run packed rows through the model, commit the segments, and return the wanted rows' logits, float32 [wanted, vocabulary]."""
        positions = torch.cat([torch.arange(s.start, s.start + s.count) for s in segments])
        if self.replay is not None and type(cache) is PagedCache and cache.whole is None:
            with self.replay.of(cache, segments):
                logits = self.forward(torch.tensor(tokens), positions, cache, segments, torch.tensor(wanted))
        else:
            logits = self.forward(torch.tensor(tokens), positions, cache, segments, torch.tensor(wanted))
        for segment in segments:
            cache.commit(segment)
        return logits

    def forward(self, tokens: Tensor, positions: Tensor, cache: Any, segments: list[Any], wanted: Tensor) -> Tensor:
        """Run transformers' own code over rows, int64 [rows] each, and return the wanted rows' logits."""
        from transformers.cache_utils import Cache

        layers = [_layer_class()(index, cache, segments) for index in range(len(self.loader.blocks))]
        more = {self.cache_word: Cache(layers=layers)}
        output = self.model(input_ids=tokens[None], position_ids=positions[None], use_cache=True, logits_to_keep=wanted, **more)
        logits: Tensor = output.logits[0]
        return logits


def _block_planes(data: Tensor, codec: Any) -> Planes | None:
    """Return planes of ggml blocks, uint8 [rows, bytes], some rows at a time; None if they are no integers with scales, or would grow."""
    columns = data.shape[1] // codec.size * codec.block
    probe = codec.parts(data[:1].reshape(-1, codec.size))
    if probe is None or columns % LANES:
        return None
    groups = columns // codec.block * probe.scale.shape[1]
    stored = probe.bits * columns + 16 * groups * (1 if probe.offset is None else 2)
    if stored > MOST * 8 * data.shape[1]:
        return None
    found = []
    for at in range(0, len(data), 256):
        part = codec.parts(data[at : at + 256].reshape(-1, codec.size))
        rows = min(256, len(data) - at)
        offset = None if part.offset is None else part.offset.reshape(rows, groups)
        found.append(planes_of_blocks(part.codes.reshape(rows, columns), part.scale.reshape(rows, groups), offset, part.middle, part.bits))
    offsets = [planes.offset for planes in found if planes.offset is not None]
    whole = Planes(
        probe.bits, found[0].group, torch.cat([p.packed for p in found]), torch.cat([p.scale for p in found]), None,
        torch.cat(offsets) if offsets else None, probe.middle,
    )  # fmt: skip
    return with_room(whole)


@cache
def _layer_class() -> type:
    """Return our layer of transformers' cache; a function, because transformers is not imported before a model runs."""
    from transformers.cache_utils import CacheLayerMixin

    class Layer(CacheLayerMixin):  # type: ignore[misc]
        """A layer that hands its keys on to our attention function."""

        is_sliding = False
        is_compileable = False

        def __init__(self, index: int, cache: PagedCache, segments: list[Segment]) -> None:
            super().__init__()
            self.step = (index, cache, segments)

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            """Nothing is held here."""

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Step, Step]:
            """Return the new keys and values for `paged_attention`."""
            index, cache, segments = self.step
            step = Step(index, key_states, value_states, cache, segments)
            return step, step

        def get_seq_length(self) -> int:
            """Positions are given, so nobody needs it."""
            return 0

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            """There is no mask."""
            return query_length, 0

        def get_max_length(self) -> int:
            """No limit."""
            return -1

        def get_max_cache_shape(self) -> int:
            """No limit, in older versions."""
            return -1

    return Layer
