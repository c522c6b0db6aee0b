"""Synthetic GGUF files: zeros of any shape, with the keys that llama.cpp's loader wants."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np


@dataclass(frozen=True)
class Shape:
    """A model's sizes; experts 0 is dense."""

    arch: str = "llama"
    layers: int = 5
    hidden: int = 256
    ff: int = 512
    heads: int = 8
    kv: int = 8
    experts: int = 0
    tied: bool = False
    vocab: int = 64

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return torch shapes by GGUF name."""
        h, f, kv = self.hidden, self.ff, self.hidden // self.heads * self.kv
        found: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.vocab, h), "output_norm.weight": (h,)}
        if not self.tied:
            found["output.weight"] = (self.vocab, h)
        stack = (self.experts,) if self.experts else ()
        suffix = "_exps" if self.experts else ""
        for i in range(self.layers):
            block: dict[str, tuple[int, ...]] = {"attn_norm": (h,), "ffn_norm": (h,), "attn_output": (h, h)}
            if self.arch in ("phi3", "gpt2"):
                block |= {"attn_qkv": (h + 2 * kv, h), "ffn_up": ((2 if self.arch == "phi3" else 1) * f, h), "ffn_down": (h, f)}
            else:
                block |= {"attn_q": (h, h), "attn_k": (kv, h), "attn_v": (kv, h)}
                block |= {f"ffn_{part}{suffix}": (*stack, f, h) for part in ("gate", "up")} | {f"ffn_down{suffix}": (*stack, h, f)}
            if self.experts:
                block["ffn_gate_inp"] = (self.experts, h)
            found |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
        return found


def write_gguf(path: Path, shape: Shape, values: dict[str, Any] | None = None, float16: bool = True) -> None:
    """Write the file; values: arrays for some tensors instead of zeros."""
    writer = gguf.GGUFWriter(str(path), shape.arch)
    writer.add_context_length(512)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    writer.add_file_type(1)
    if shape.arch == "llama":
        writer.add_rope_dimension_count(shape.hidden // shape.heads)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{i}" for i in range(shape.vocab)])
    writer.add_token_types([1] * shape.vocab)
    writer.add_token_merges(["t 0"])
    for name, size in shape.tensors().items():
        data = (values or {}).get(name, np.zeros(size, np.float32))
        half = float16 and len(size) > 1 and "ffn_gate_inp" not in name
        writer.add_tensor(name, data.astype(np.float16 if half else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
