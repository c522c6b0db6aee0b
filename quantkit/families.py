"""What cannot be found by looking at a model, one row per family.

Blocks, linear layers and shared inputs are found from the module tree and a traced forward pass; a family needs a
row in FAMILIES only for an exception to that. There is none yet. GGUF rows say how llama.cpp wants a family written.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.errors import PlanError


@dataclass(frozen=True)
class Family:
    """One row: the path of the list of blocks when it cannot be found, and modules that are never quantized."""

    model_type: str
    blocks: str = ""
    keep: tuple[str, ...] = ()


FAMILIES: dict[str, Family] = {}

# Routers decide which expert runs: an error there is not small. Names as transformers gives them.
KEEP_ALWAYS = (r"\.(gate|router|shared_expert_gate)$",)

# Linears that vLLM and SGLang make one of: they must agree in scheme and in scales per tensor.
FUSED_AT_RUN_TIME = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def family(model_type: str) -> Family:
    """Return the row of a model type, or an empty one: most need none."""
    return FAMILIES.get(model_type, Family(model_type))


@dataclass(frozen=True)
class GgufFamily:
    """How llama.cpp names and stores a family.

    arch: general.architecture; permuted: Q and K rows go in rotary pairs; norm_shift: added to norm weights, which
    the model adds at run time; transposed: suffixes of weights stored [in, out]; needs: what every block must have,
    one of each group. no_prefix_space: the tokenizer adds no space in front.
    """

    arch: str
    permuted: bool = False
    norm_shift: float = 0.0
    transposed: tuple[str, ...] = ()
    no_prefix_space: bool = False
    needs: tuple[tuple[str, ...], ...] = (
        ("attn_norm",), ("attn_q",), ("attn_k",), ("attn_v",), ("attn_output",), ("ffn_norm",),
        ("ffn_gate", "ffn_gate_exps"), ("ffn_up", "ffn_up_exps"), ("ffn_down", "ffn_down_exps"),
    )  # fmt: skip


FUSED = (("attn_norm",), ("attn_qkv",), ("attn_output",), ("ffn_norm",), ("ffn_up",), ("ffn_down",))
GEMMA = (*GgufFamily("gemma2").needs, ("post_attention_norm",), ("post_ffw_norm",))
GGUF_FAMILIES = {
    "llama": GgufFamily("llama", permuted=True),
    "mistral": GgufFamily("llama", permuted=True),
    "mixtral": GgufFamily("llama", permuted=True),
    "qwen2": GgufFamily("qwen2"),
    "qwen3": GgufFamily("qwen3"),
    "qwen3_moe": GgufFamily("qwen3moe"),
    "gemma2": GgufFamily("gemma2", norm_shift=1.0, no_prefix_space=True, needs=GEMMA),
    "gemma3": GgufFamily("gemma3", norm_shift=1.0, no_prefix_space=True, needs=GEMMA),
    "gemma3_text": GgufFamily("gemma3", norm_shift=1.0, no_prefix_space=True, needs=GEMMA),
    "phi3": GgufFamily("phi3", needs=FUSED),
    "gpt2": GgufFamily("gpt2", transposed=(".c_attn.weight", ".c_proj.weight", ".c_fc.weight"), needs=FUSED),
}


def gguf_family(model_type: str) -> GgufFamily:
    """Return how a model type is written to GGUF; a PlanError lists the known ones."""
    if model_type not in GGUF_FAMILIES:
        raise PlanError(f"quantkit does not write '{model_type}' models to GGUF. Known: {', '.join(GGUF_FAMILIES)}.")
    return GGUF_FAMILIES[model_type]
