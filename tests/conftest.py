"""Tiny models made on the spot, one per family, and the text they are calibrated on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(2)
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "wikitext2"

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GPT2 = {"vocab_size": 320, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "bos_token_id": 1, "eos_token_id": 2}
OPT = {k: v for k, v in SMALL.items() if k not in ("intermediate_size", "num_key_value_heads")}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL),
    "mistral": ("Mistral", {**SMALL, "sliding_window": 16}),
    "qwen2": ("Qwen2", {**SMALL, "use_sliding_window": True, **MIXED}),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 32}),
    "gemma2": ("Gemma2", {**SMALL, "head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0, **MIXED}),
    "gemma3": ("Gemma3Text", {**SMALL, "head_dim": 16, "query_pre_attn_scalar": 16, **MIXED}),
    "phi3": ("Phi3", {**SMALL, "sliding_window": 16}),
    "gpt2": ("GPT2", GPT2),
    "opt": ("OPT", {**OPT, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "starcoder2": ("Starcoder2", {**SMALL, "sliding_window": 16}),
}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True},
    ),
}


def byte_tokenizer() -> dict[str, Any]:
    """Return a tokenizer.json of bytes: three special tokens, one token per byte, and one merge of two of them."""
    from tokenizers.pre_tokenizers import ByteLevel

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {symbol: 3 + i for i, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    vocab["qu"] = len(vocab)
    special = [
        {"id": i, "content": c, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for c, i in list(vocab.items())[:3]
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocab, "merges": [["q", "u"]], "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    model |= {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "ignore_merges": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": model,
    }


def write_tokenizer(folder: Path) -> None:
    """Write the byte tokenizer's files into a model folder."""
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()), encoding="utf-8")
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")


def make_model(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Path:
    """Write a tiny random model of a family into a folder, with a tokenizer, and return the folder."""
    import transformers

    prefix, settings = {**FAMILIES, **EXPERTS}[family]
    config = getattr(transformers, f"{prefix}Config")(**{**settings, **changes})
    name = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}.get(prefix, f"{prefix}ForCausalLM")
    torch.manual_seed(seed)
    model = getattr(transformers, name)(config)
    randomize(model, seed)
    model.to(dtype).save_pretrained(str(folder))
    write_tokenizer(folder)
    return folder


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter values large enough that a wrong mask, norm or bias shows."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        fan = parameter.shape[-1] if parameter.dim() > 1 else 4
        noise = torch.randn(parameter.shape, generator=generator) / fan**0.5
        parameter.data.copy_(noise if parameter.dim() > 1 else parameter.data + 0.3 * noise)


def make_multimodal(folder: Path) -> Path:
    """Write a tiny Gemma 3 with a vision tower: the text model is `model.language_model`."""
    import transformers

    text = {**FAMILIES["gemma3"][1]}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=300)
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config)
    randomize(model, 0)
    model.save_pretrained(str(folder))
    write_tokenizer(folder)
    return folder


@pytest.fixture(autouse=True)
def _verify_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify what a test writes in this process, which has the libraries loaded; tests marked `fresh` do as users do."""
    if "fresh" not in request.keywords:
        monkeypatch.setattr("quantkit.verify.isolated", lambda work, *given: work(*given))


TEXT = "".join(f"Line {i}: the {'quick brown fox' if i % 3 else 'lazy dog'} saw {i * i} of {i * 7 % 13} things.\n" for i in range(400))


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A calibration text of about 20 000 bytes."""
    path = tmp_path / "calibration.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A tiny float32 Llama folder."""
    return make_model(tmp_path / "llama")


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run the command line in this process; return exit code, the JSON document of the last line (or None), and stderr."""

    def run(*words: object) -> tuple[int, Any, str]:
        from quantkit.cli import main

        monkeypatch.setattr("sys.argv", ["quantkit", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as error:
            code = int(error.code or 0)
        out, err = capsys.readouterr()
        lines = out.strip().splitlines()
        document = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None
        return code, document, err

    return run
