"""A model's configuration as GGUF keys, with the value types that llama.cpp's loader insists on.

The gguf package's writer knows each key's type; here is which keys a family has and where their values come from.
A scaling of the rotary embedding that llama.cpp does not know is an error: short texts would hide it.

Source: llama.cpp's converter (conversion/*.py) and loader (src/llama-model.cpp), docs/gguf.md of ggml.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import PlanError
from quantkit.families import GgufFamily
from quantkit.foreign import mapping, whole
from quantkit.formats.gguf_settings import gemma_scalar

PATTERNS = {"gemma2": 2, "gemma3": 6}
ROPE_TYPES = ("default", "linear", "yarn", "longrope", "su", "llama3", "dynamic")


class Settings:
    """A configuration to ask: text settings at the top, whatever the wrapper."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.values = {**config, **mapping(config.get("text_config"), "config.json: text_config")}
        rope = mapping(self.values.get("rope_parameters") or self.values.get("rope_scaling") or None, "config.json: rope_parameters")
        self.local_rope: dict[str, Any] = mapping(rope.get("sliding_attention") or None, "config.json: sliding_attention")
        self.rope: dict[str, Any] = dict(mapping(rope.get("full_attention") or None, "config.json: full_attention") or rope)
        self.rope.setdefault("rope_type", self.rope.get("type", "default"))
        for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
            if self.values.get(key) is not None:
                self.rope.setdefault(key, self.values[key])
        if self.rope["rope_type"] not in ROPE_TYPES:
            raise PlanError(f"llama.cpp has no rotary scaling '{self.rope['rope_type']}'. Known: {', '.join(ROPE_TYPES)}.")

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first of these settings that is there and not null."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), default)

    def need(self, *names: str) -> Any:
        """Return the first of these settings; a PlanError if there is none."""
        value = self.get(*names)
        if value is None:
            raise PlanError(f"config.json has no {' or '.join(names)}.")
        return value

    @property
    def layers(self) -> int:
        """Blocks of the model."""
        return whole(self.need("num_hidden_layers", "n_layer"), "config.json: the number of layers", 1)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return whole(self.need("hidden_size", "n_embd"), "config.json: hidden_size", 1)

    @property
    def heads(self) -> int:
        """Query heads."""
        return whole(self.need("num_attention_heads", "n_head"), "config.json: the number of heads", 1)

    @property
    def kv_heads(self) -> int:
        """Key heads."""
        return whole(self.get("num_key_value_heads", default=self.heads), "config.json: num_key_value_heads", 1)

    @property
    def experts(self) -> int:
        """Experts of a block, 0 for none."""
        return whole(self.get("num_local_experts", "num_experts", default=0), "config.json: the number of experts")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return whole(self.get("head_dim", default=self.hidden // self.heads), "config.json: head_dim", 1)


def add_parameters(writer: Any, settings: Settings, family: GgufFamily) -> None:
    """Add the architecture's keys."""
    writer.add_block_count(settings.layers)
    {"gpt2": _gpt2, "phi3": _phi3, "gemma2": _gemma2}.get(family.arch, _common)(writer, settings)
    if family.arch == "llama":
        writer.add_vocab_size(settings.need("vocab_size"))
        writer.add_rope_dimension_count(settings.head_dim)
    if family.arch == "gemma3":
        _gemma3(writer, settings)
    if family.arch == "qwen3moe" and (width := settings.get("moe_intermediate_size")):
        writer.add_expert_feed_forward_length(width)


def _sizes(writer: Any, settings: Settings) -> None:
    writer.add_context_length(settings.need("max_position_embeddings", "n_positions"))
    writer.add_embedding_length(settings.hidden)
    writer.add_feed_forward_length(settings.need("intermediate_size"))
    writer.add_head_count(settings.heads)
    writer.add_head_count_kv(settings.kv_heads)
    writer.add_layer_norm_rms_eps(settings.need("rms_norm_eps"))


def _common(writer: Any, settings: Settings) -> None:
    _sizes(writer, settings)
    _add_rope(writer, settings)
    if settings.experts:
        writer.add_expert_count(settings.experts)
        writer.add_expert_used_count(settings.need("num_experts_per_tok"))
    if settings.get("head_dim") is not None:
        writer.add_key_length(settings.head_dim)
        writer.add_value_length(settings.head_dim)


def _add_rope(writer: Any, settings: Settings) -> None:
    import gguf

    rope, kinds = settings.rope, gguf.RopeScalingType
    kind = {"linear": kinds.LINEAR, "yarn": kinds.YARN, "longrope": kinds.LONGROPE, "su": kinds.LONGROPE}.get(rope["rope_type"])
    if kind is not None:
        writer.add_rope_scaling_type(kind)
    if kind in (kinds.LINEAR, kinds.YARN):
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == kinds.YARN:
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        extras = {
            "extrapolation_factor": writer.add_rope_scaling_yarn_ext_factor,
            "attention_factor": writer.add_rope_scaling_yarn_attn_factor,
            "beta_fast": writer.add_rope_scaling_yarn_beta_fast,
            "beta_slow": writer.add_rope_scaling_yarn_beta_slow,
        }
        for key, add in extras.items():
            if rope.get(key) is not None:
                add(rope[key])
    if rope.get("rope_theta") is not None:
        writer.add_rope_freq_base(rope["rope_theta"])
    local = settings.local_rope.get("rope_theta", settings.get("rope_local_base_freq"))
    if local is not None:
        writer.add_rope_freq_base_swa(local)


def _gemma3(writer: Any, settings: Settings) -> None:
    if (cap := settings.get("final_logit_softcapping")) is not None:
        writer.add_final_logit_softcapping(cap)
    if settings.get("sliding_window_pattern") != 1 and settings.get("sliding_window") is not None:
        writer.add_sliding_window(settings.need("sliding_window"))


def _gemma2(writer: Any, settings: Settings) -> None:
    _sizes(writer, settings)
    writer.add_key_length(settings.head_dim)
    writer.add_value_length(settings.head_dim)
    writer.add_attn_logit_softcapping(settings.need("attn_logit_softcapping"))
    writer.add_final_logit_softcapping(settings.need("final_logit_softcapping"))
    writer.add_sliding_window(settings.need("sliding_window"))


def _phi3(writer: Any, settings: Settings) -> None:
    _sizes(writer, settings)
    writer.add_rope_scaling_orig_ctx_len(settings.rope.get("original_max_position_embeddings", settings.need("max_position_embeddings")))
    writer.add_rope_dimension_count(phi3_rope_dims(settings))
    writer.add_rope_freq_base(settings.rope["rope_theta"])
    writer.add_sliding_window(settings.get("sliding_window", default=0))
    if settings.rope.get("long_factor"):
        writer.add_rope_scaling_attn_factors(_attention_factor(settings))


def phi3_rope_dims(settings: Settings) -> int:
    """Return how many of a head's dimensions phi3 rotates."""
    return int(settings.rope.get("partial_rotary_factor", 1.0) * settings.hidden) // settings.heads


def _attention_factor(settings: Settings) -> float:
    original = settings.rope["original_max_position_embeddings"]
    scale = settings.need("max_position_embeddings") / original
    if scale <= 1.0:
        return 1.0
    return 0.1 * math.log(scale) + 1.0 if settings.rope["rope_type"] == "yarn" else math.sqrt(1 + math.log(scale) / math.log(original))


def _gpt2(writer: Any, settings: Settings) -> None:
    writer.add_context_length(settings.need("n_ctx", "n_positions"))
    writer.add_embedding_length(settings.hidden)
    writer.add_feed_forward_length(settings.get("n_inner", default=4 * settings.hidden))
    writer.add_head_count(settings.heads)
    writer.add_layer_norm_eps(settings.need("layer_norm_epsilon"))


def differences(settings: Settings, family: GgufFamily) -> list[str]:
    """Return what llama.cpp computes differently, because the file has no key for it: patterns of windows, Gemma's scalar."""
    found, window, kinds = [], settings.get("sliding_window"), settings.get("layer_types") or []
    if every := PATTERNS.get(family.arch):
        usual = ["full_attention" if (index + 1) % every == 0 else "sliding_attention" for index in range(len(kinds))]
        if kinds != usual:
            found.append(f"llama.cpp lets every layer but one in {every} look back {window} tokens only; layer_types says otherwise")
    elif family.arch != "phi3" and window and settings.get("use_sliding_window", default=True):
        found.append(f"llama.cpp has no sliding window for {family.arch}: beyond {window} tokens it attends to more than this model does")
    scalar = settings.get("query_pre_attn_scalar")
    if scalar is not None:
        theirs = gemma_scalar(settings.layers, settings.hidden, settings.heads, settings.head_dim)
        if scalar != theirs:
            found.append(f"llama.cpp divides attention scores by the root of {theirs:g}, this model by that of {scalar:g}")
    return found


def rope_tensors(settings: Settings, family: GgufFamily) -> dict[str, Tensor]:
    """Return the tensors that carry a rotary scaling, float32: llama3's divisors, phi3's long and short factors."""
    rope = settings.rope
    if rope["rope_type"] == "llama3" and family.arch == "llama":
        return {"rope_freqs.weight": _llama3_divisors(settings)}
    if family.arch == "phi3" and rope.get("long_factor"):
        factors = {f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"], dtype=torch.float32) for kind in ("long", "short")}
        for name, value in factors.items():
            if 2 * len(value) != phi3_rope_dims(settings):
                raise PlanError(f"config.json gives {len(value)} values for {name}; a head rotates {phi3_rope_dims(settings)} dimensions.")
        return factors
    return {}


def _llama3_divisors(settings: Settings) -> Tensor:
    """Return what divides each frequency, float32 [head_dim / 2]."""
    rope, dims = settings.rope, settings.head_dim
    frequencies = 1.0 / (rope.get("rope_theta", 10000.0) ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims))
    factor, low, high = rope.get("factor", 8.0), rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
    original = rope.get("original_max_position_embeddings", 8192)
    divisors = []
    for frequency in frequencies:
        length = 2 * math.pi / frequency
        if length < original / high:
            divisors.append(torch.tensor(1.0))
        elif length > original / low:
            divisors.append(torch.tensor(float(factor)))
        else:
            smooth = (original / length - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.stack(divisors).to(torch.float32)
