"""Settings of a GGUF file that transformers' mapping leaves out: biases, rotary scaling, every id that ends a text.

Without them a model loads and speaks, but worse with every token: scaled frequencies matter at long range first. llama3's scaling is
stored as one divisor per frequency; its parameters are found from them again, and where none fit the divisors are kept as they are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import SourceError
from quantkit.formats._gguf import Header

KINDS = ("none", "linear", "yarn", "longrope")
ENDS = ("eos", "eot", "eom")
LARGE_GEMMA = (46, 62)  # layers of Gemma 2 27B and Gemma 3 27B
CLOSE = 1e-4  # relative, between stored divisors and those of the parameters found


def set_sizes(text: Any, header: Header, arch: str) -> None:
    """Set the width of experts, and say that attention or MLP have biases, if the file holds some."""
    if (width := header.get(f"{arch}.expert_feed_forward_length")) and hasattr(text, "moe_intermediate_size"):
        text.moe_intermediate_size = width
    for attribute, tensor in (("attention_bias", "blk.0.attn_q.bias"), ("mlp_bias", "blk.0.ffn_up.bias")):
        if tensor in header.tensors and hasattr(text, attribute):
            setattr(text, attribute, True)


def as_mixtral(config: Any, header: Header) -> Any:
    """Return the configuration of a llama file with experts as Mixtral's, which is what it is; other configurations as they are."""
    experts = header.get("llama.expert_count")
    if config.model_type != "llama" or not experts:
        return config
    from transformers import MixtralConfig

    used = header.get("llama.expert_used_count", 2)
    values = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures", "transformers_version")}
    return MixtralConfig(**values, num_local_experts=experts, num_experts_per_tok=used, sliding_window=None)


def set_windows(text: Any, header: Header, arch: str) -> None:
    """Set the sliding window, and what Gemma divides its scores by: llama.cpp derives it from the sizes, but for the 27B models."""
    window = header.get(f"{arch}.attention.sliding_window")
    if window is not None and hasattr(text, "sliding_window"):
        text.sliding_window = window or None
    if hasattr(text, "query_pre_attn_scalar"):
        text.query_pre_attn_scalar = gemma_scalar(text.num_hidden_layers, text.hidden_size, text.num_attention_heads, text.head_dim)


def gemma_scalar(layers: int, hidden: int, heads: int, head_dim: int) -> float:
    """Return what llama.cpp takes for Gemma's query_pre_attn_scalar: the head size, or hidden / heads in the 27B models."""
    return hidden / heads if layers in LARGE_GEMMA else head_dim


def set_ends(config: Any, header: Header) -> None:
    """Give the configuration all ids that end a text: of the text, of a turn, of a message."""
    ids = [header.get(f"tokenizer.ggml.{name}_token_id") for name in ENDS]
    rows = len(header.get("tokenizer.ggml.tokens") or [])
    found = list(dict.fromkeys(i for i in ids if type(i) is int and 0 <= i < max(rows, 1)))
    if found:
        config.eos_token_id = found if len(found) > 1 else found[0]


def set_rope(text: Any, header: Header, arch: str, read: Any) -> None:
    """Set the rotary scaling from keys and tensors; read(name) decodes a tensor. A SourceError for a kind that is not known."""
    parameters = getattr(text, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return
    whole = parameters.get("full_attention") if isinstance(parameters.get("full_attention"), dict) else parameters
    assert whole is not None
    kind = str(header.get(f"{arch}.rope.scaling.type") or "none")
    if kind not in KINDS:
        raise SourceError(f"{header.path} scales its rotary embedding by '{kind}', which is not known. Known: {', '.join(KINDS)}.")
    original = header.get(f"{arch}.rope.scaling.original_context_length")
    if "rope_freqs.weight" in header.tensors:
        whole |= _of_divisors(torch.from_numpy(read("rope_freqs.weight")).reshape(-1).double(), whole, header, arch)
    elif {"rope_factors_long.weight", "rope_factors_short.weight"} <= set(header.tensors):
        factors = {f"{name}_factor": read(f"rope_factors_{name}.weight").reshape(-1).tolist() for name in ("long", "short")}
        whole |= {"rope_type": "longrope", "original_max_position_embeddings": original, **factors}
        text.original_max_position_embeddings = original
        whole |= _given(header, arch, {"attention_factor": "attn_factor"})
    elif kind in ("linear", "yarn"):
        whole |= {"rope_type": kind, **_given(header, arch, {"factor": "factor"})}
        if kind == "yarn":
            keys = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
            whole |= {"original_max_position_embeddings": original, **_given(header, arch, keys)}


def _given(header: Header, arch: str, keys: dict[str, str]) -> dict[str, float]:
    found = {ours: header.get(f"{arch}.rope.scaling.{theirs}") for ours, theirs in keys.items()}
    return {ours: float(value) for ours, value in found.items() if value is not None}


def _of_divisors(divisors: Tensor, rope: dict[str, Any], header: Header, arch: str) -> dict[str, Any]:
    """Return rope parameters whose frequencies are divided so: llama3's where they fit, else the divisors themselves (as longrope)."""
    theta = float(rope.get("rope_theta") or header.get(f"{arch}.rope.freq_base") or 10000.0)
    count = len(divisors)
    turns = theta ** (-torch.arange(count, dtype=torch.float64) / count) / (2 * math.pi)  # per token
    factor = float(divisors.max())
    between = (divisors > 1 + 1e-6) & (divisors < factor * (1 - 1e-6))
    if int(between.sum()) >= 2:
        # 1 / divisor = (1 - s) / factor + s, and s = (original * turns - low) / (high - low): a line in `turns`.
        s = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
        x = turns[between]
        slope = float((s[0] - s[-1]) / (x[0] - x[-1]))
        offset = float(s[0] - slope * x[0])  # -low / (high - low); low is 1 in all checkpoints
        found = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": _neat(1 - 1 / offset) if offset else 0.0}
        found["original_max_position_embeddings"] = _neat(-slope / offset) if offset else 0
        if found["high_freq_factor"] > 1 and _fits(found, turns, divisors):
            return {"rope_type": "llama3", **found}
    plain = divisors.tolist()
    length = header.get(f"{arch}.context_length", 0)
    return {"rope_type": "longrope", "short_factor": plain, "long_factor": plain, "factor": 1.0, "attention_factor": 1.0,
            "original_max_position_embeddings": length}  # fmt: skip


def _neat(value: float) -> float | int:
    near = round(value)
    return near if abs(value - near) < 1e-2 * max(abs(near), 1) * 0.1 else value


def _fits(found: dict[str, Any], turns: Tensor, divisors: Tensor) -> bool:
    low, high, original = found["low_freq_factor"], found["high_freq_factor"], found["original_max_position_embeddings"]
    s = ((original * turns - low) / (high - low)).clamp(0, 1)
    again = 1 / ((1 - s) / found["factor"] + s)
    return bool(((again - divisors).abs() <= CLOSE * divisors).all())
