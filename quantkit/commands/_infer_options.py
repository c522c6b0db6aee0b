"""The options of what runs a model, and of doctor. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.commands._options import SourceOptions
from quantkit.errors import UsageError
from quantkit.methods._options import option


@dataclass(frozen=True)
class InferOptions(SourceOptions):
    """How a model is run."""

    compute: str = option("fast", "fast kernels, or the artifact's exact values in float32.", choices=("fast", "exact"))
    kv_cache: str = option("paged", "Key-value cache; int8 is paged too.", choices=("plain", "paged", "int8", "paged-int8"))
    attention: str = option("tiled", "tiled reads pages directly.", choices=("tiled", "sdpa", "flash-attn"))
    head_bits: int = option(0, "8 runs the output matrix from 8 bits; 0 leaves it.")
    threads: int = option(0, "CPU threads; 0 leaves torch's choice.")
    reference: bool = option(False, "Use the plain PyTorch reference instead of faster kernels.")
    json: bool = option(False, "Print one JSON object on the last line of standard output.")

    def __post_init__(self) -> None:
        if self.head_bits not in (0, 8):
            raise UsageError(f"--head-bits {self.head_bits} cannot be: 8, or 0 to leave the head alone.")


@dataclass(frozen=True)
class GenerateOptions(InferOptions):
    """Options of generate."""

    prompt: str = option("", "Text to continue.")
    prompts: str = option("", "JSONL file: a text a line, or an object with prompt or messages; one JSON line each comes out.")
    chat: bool = option(False, "Put the prompt into the model's chat template.")
    max_new_tokens: int = option(40, "Tokens to add.")
    temperature: float = option(0.0, "0 takes the likeliest token.")
    top_k: int = option(0, "Draw from the likeliest K tokens; 0 from all.")
    top_p: float = option(1.0, "Draw from the likeliest tokens that hold this share.")
    min_p: float = option(0.0, "Leave out tokens less likely than this share of the likeliest.")
    repetition_penalty: float = option(1.0, "Make tokens that came already less likely.")
    seed: int = option(0, "Seed of the draws.")
    stop: tuple[str, ...] = option((), "Text that ends the output (repeatable).")
    speculative: str = option(
        "none", "Drafts: none, lookup (from the text itself), medusa (heads that the checkpoint has), or a smaller model."
    )
    batch: int = option(32, "Prompts at a time.")
    short_first: bool = option(False, "Begin with the shortest prompts.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.prompt) == bool(self.prompts):
            raise UsageError("Give either --prompt TEXT or --prompts FILE.")
        for name in ("max_new_tokens", "batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)} cannot be: at least 1.")


@dataclass(frozen=True)
class BenchOptions(InferOptions):
    """Options of bench."""

    prompt_tokens: int = option(128, "Tokens of the prompt.")
    new_tokens: int = option(128, "Tokens to decode.")
    against: str = option("auto", "Also run transformers on the dequantized weights.", choices=("auto", "float32", "bfloat16", "none"))
    floor: bool = option(True, "Also run with linears that compute nothing: what modules and attention cost.")


@dataclass(frozen=True)
class DoctorOptions:
    """Options of doctor."""

    json: bool = option(False, "Print one JSON object on the last line of standard output.")
