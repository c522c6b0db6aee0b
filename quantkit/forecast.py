"""What a run will take, from shapes alone: memory, scratch disk, size of the output, and the cache of whoever serves it.

The terms of the memory are what the code holds at the same time; the tests compare their sum with measured peaks.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quantkit.export import RUN, ExportPlan
from quantkit.families import KEEP_ALWAYS
from quantkit.formats import _safetensors as st
from quantkit.formats._safetensors import TensorInfo
from quantkit.formats.store import TensorStore
from quantkit.infer.cache_int8 import Int8Cache
from quantkit.loader import Loader, head_size
from quantkit.memory import SPILL_FROM
from quantkit.plan import Plan

ROLES = {
    "experts": r"\bexperts\b|_exps\b",
    "router": "|".join(KEEP_ALWAYS),
    "attention": r"attn|attention|[qkvo]_proj",
    "MLP": r"mlp|ffn|feed_forward|gate_proj|up_proj|down_proj|fc\d?|c_proj",
    "embedding": r"embed|wte|wpe",
    "head": r"lm_head|^output\.",
}
DTYPE_BYTES = {"bfloat16": 2, "float8 or int8": 1}
MANIFEST_TENSOR, MANIFEST_MODULE, MANIFEST_REST = 152, 520, 2600  # bytes of quantkit.json


@dataclass(frozen=True)
class Load:
    """What a run reads: calibration samples, how many of them also go through the unquantized model, their tokens, samples of a batch."""

    samples: int
    paired: int
    length: int
    batch: int


@dataclass(frozen=True)
class Room:
    """Bytes that a run holds at its peak, on the host and on the device (one machine's memory where they are the same), and where."""

    host: int
    device: int
    phase: str

    @property
    def total(self) -> int:
        """Bytes of both."""
        return self.host + self.device


def role_of(name: str) -> str:
    """Return what a tensor is for: embedding, head, attention, MLP, experts, router, norms and the like."""
    if name.endswith(".bias") or re.search(r"norm|ln_\w|layernorm", name, re.IGNORECASE):
        return "norms and biases"
    return next((role for role, pattern in ROLES.items() if re.search(pattern, name.removesuffix(".weight"))), "other")


def states_bytes(loader: Loader, load: Load) -> int:
    """Return the bytes of the hidden states between two blocks, float32."""
    hidden: int = loader.model.get_input_embeddings().weight.shape[1]
    return 4 * load.length * (load.samples + load.paired) * hidden


def blocks_room(loader: Loader, load: Load, schedule: str, held: int, full: bool) -> Room:
    """Return what quantizing block by block holds; held: bytes the process has already; full: whether Hessians are whole.

    One pass holds, per token, the residual stream, a normed copy and the widest input of a linear, for the exact stream
    too; two passes hold the statistics of all of a block's inputs at once.
    """
    linears = [module.get_parameter("weight").shape for module in loader.linears(0).values()]
    hidden, widest = loader.model.get_input_embeddings().weight.shape[1], max(max(shape) for shape in linears)
    block = 4 * sum(parameter.numel() for parameter in loader.blocks[0].parameters())
    tokens = load.length * (load.samples + load.paired)
    states = states_bytes(loader, load)
    if not load.samples:
        return Room(held, block + 4 * 4 * max(shape[0] * shape[1] for shape in linears), "quantizing")
    work = block * (3 if load.paired else 2) + 4 * (5 * widest**2 if full else 4 * max(math.prod(shape) for shape in linears))
    lanes = 4 * tokens * (hidden + widest) if schedule == "one-pass" else 4 * 4 * widest**2
    return Room(held + states, work + lanes, "quantizing")


def checking_room(store: TensorStore, held: int) -> Room:
    """Return what looking for NaN holds: the largest tensor as it is stored, and as floats."""
    largest = max((store.info(name) for name in store.names()), key=lambda info: math.prod(info.shape))
    return Room(held + largest.nbytes + (4 if largest.dtype != "F32" else 0) * math.prod(largest.shape), 0, "checking")


def opening_room(loader: Loader, load: Load, bare: int, held: int) -> list[Room]:
    """Return what a run holds before its first block is quantized: the largest tensor checked, then the embedding and the states.

    bare: bytes the process has before kernels are compiled.
    """
    rooms = [checking_room(loader.source.store, bare)]
    if load.samples:
        outer = 4 * sum(_elements(loader, name) for name in set(loader.outer_names(head=False)))
        states = states_bytes(loader, load)
        rooms.append(Room(held + (0 if states >= SPILL_FROM else states), outer, "recording"))
    return rooms


def _elements(loader: Loader, name: str) -> int:
    value = loader.model.get_parameter_or_buffer(name)
    return int(value.numel()) if value.is_meta else 0


def export_room(plan: ExportPlan, held: int) -> Room:
    """Return what writing a GGUF file holds: its largest tensor as stored, as it is handed on, a run of it as floats and encoded."""
    store = plan.source.store
    sizes = [sum(store.info(name).nbytes for name in tensor.sources[:1]) for tensor in plan.tensors.values() if tensor.sources]
    return Room(held + max(sizes) + 4 * RUN, 0, "writing")


def scratch_bytes(loader: Loader, plan: Plan, load: Load, shard: int) -> int:
    """Return the free disk that a run needs: its output, one shard more, and states to resume from."""
    return plan.after + shard + 6 * states_bytes(loader, load)


def folder_bytes(loader: Loader, plan: Plan) -> tuple[int, int]:
    """Return bytes of the weight files, exactly for one shard, and of all files about them."""
    infos: dict[str, TensorInfo] = {}
    for name in loader.source.store.names():
        infos |= plan.layouts.get(name) or {name: plan.kept[name]}
    file = io.BytesIO()
    st.write_header(file, infos)
    weights = file.tell() + plan.after
    folder = loader.source.folder
    sides = [] if loader.source.gguf_file else [folder / name for name in loader.source.side_files()]
    beside = sum(path.stat().st_size for path in sides)
    names = sum(len(name) + MANIFEST_TENSOR for name in infos) + sum(2 * len(row.module) + MANIFEST_MODULE for row in plan.packed)
    return weights, beside + names + MANIFEST_REST


def kv_bytes(config: Any, tokens: int, batch: int) -> dict[str, int]:
    """Return the bytes of a key-value cache by dtype: 2 x layers x key-value heads x head size x tokens x bytes, for each sequence.

    A layer with a sliding window holds at most its window. The last row is quantkit's own cache of 8-bit pages.
    """
    text = config.get_text_config()
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    size, layers = head_size(config), int(text.num_hidden_layers)
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    held = sum(min(tokens, int(window)) if window and "sliding" in kind else tokens for kind in kinds)
    found = {name: 2 * heads * size * held * width * batch for name, width in DTYPE_BYTES.items()}
    return {**found, "quantkit int8": Int8Cache.bytes_for(layers, heads, size, tokens) * batch}


def parameters(infos: Iterable[tuple[str, tuple[int, ...], int, int]]) -> dict[str, list[int]]:
    """Return role -> [tensors, parameters, bytes before, bytes after] from (name, shape, before, after), the largest first."""
    found: dict[str, list[int]] = {}
    for name, shape, before, after in infos:
        row = found.setdefault(role_of(name), [0, 0, 0, 0])
        for place, value in enumerate((1, math.prod(shape), before, after)):
            row[place] += value
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))
