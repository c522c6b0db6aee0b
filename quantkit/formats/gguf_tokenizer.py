"""The tokenizer that a GGUF file describes, as transformers' own kind.

Byte-level BPE is built here from tokens, kinds and merges: transformers reads such files slowly, adds tokens of its own
for some families and rebuilds the pre-tokenizer of only a few. SentencePiece is transformers'.
An unknown `tokenizer.ggml.pre` is an error: a wrong split of digits costs perplexity without a word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantkit.errors import SourceError
from quantkit.foreign import foreign
from quantkit.formats._gguf import Header

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {"llama-bpe": WORDS + r"\p{N}{1,3}" + TAIL, "qwen2": WORDS + r"\p{N}" + TAIL}
SPLITS |= {"llama3": SPLITS["llama-bpe"], "llama-v3": SPLITS["llama-bpe"], "deepseek-r1-qwen": SPLITS["qwen2"]}
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")
BYTE_LEVEL = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone")
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")  # a word that is a token needs no merges
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def load_tokenizer(header: Header) -> Any:
    """Return the tokenizer of a GGUF file."""
    model = header.get("tokenizer.ggml.model")
    if model == "gpt2":
        return _from_merges(header)
    from transformers import AutoTokenizer

    if model is None:
        raise SourceError(f"{header.path} has no tokenizer.")
    with foreign(f"{header.path} has no usable tokenizer"):
        return AutoTokenizer.from_pretrained(str(header.path.parent), gguf_file=header.path.name)


def _from_merges(header: Header) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    tokens, merges = header.get("tokenizer.ggml.tokens"), header.get("tokenizer.ggml.merges")
    if not _texts(tokens) or not _texts(merges):
        raise SourceError(f"{header.path} has a byte-level tokenizer without tokens or without merges.")
    kinds = header.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(kinds, list):
        raise SourceError(f"{header.path}: tokenizer.ggml.token_type is no list.")
    pre = str(header.get("tokenizer.ggml.pre") or "gpt-2")
    vocabulary = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind != UNUSED}
    pairs = [(merge[:at], merge[at + 1 :]) for merge in merges if (at := merge.find(" ", 1)) > 0]
    with foreign(f"{header.path}: its tokenizer's merges do not fit its tokens"):
        backend = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=pre in WHOLE_WORDS))
    set_pre_tokenizer(backend, pre, header.path)
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True, normalized=False) for t, kind in zip(tokens, kinds, strict=False) if kind == CONTROL]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(t, normalized=False) for t, kind in zip(tokens, kinds, strict=False) if kind == USER_DEFINED])
    ids = {ours: header.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in NAMES.items()}
    named = {f"{name}_token": tokens[i] for name, i in ids.items() if type(i) is int and 0 <= i < len(tokens)}
    level: Any = processors.ByteLevel(trim_offsets=True)
    if header.get("tokenizer.ggml.add_bos_token") and "bos_token" in named:
        bos = named["bos_token"]
        template = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, ids["bos"])])
        level = processors.Sequence([level, template])
    backend.post_processor = level
    with foreign(f"{header.path} has no usable tokenizer"):
        return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=templates(header), **named)


def templates(header: Header) -> Any:
    """Return the chat template of a file, or its templates by name if there are several; None if there is none."""
    prefix, default = "tokenizer.chat_template.", header.get("tokenizer.chat_template")
    named = {name.removeprefix(prefix): key.value for name, key in header.keys.items() if name.startswith(prefix)}
    if not named:
        return default if isinstance(default, str) else None
    named |= {"default": default} if default is not None else {}
    return {name: text for name, text in named.items() if isinstance(text, str)}


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def set_pre_tokenizer(backend: Any, pre: str, path: Path) -> None:
    """Give a tokenizers.Tokenizer the pre-tokenizer of llama.cpp's name `pre`; unknown names are a SourceError."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in SPLITS)
    if pre in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[pre]), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        if SPLITS[pre] == SPLITS["qwen2"]:
            backend.normalizer = normalizers.NFC()
    elif pre in SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif pre in BYTE_LEVEL:
        backend.pre_tokenizer = byte_level
    else:
        known = ", ".join(sorted([*SPLITS, *SINGLE_DIGITS, *BYTE_LEVEL]))
        raise SourceError(
            f"{path} uses the pre-tokenizer '{pre}', which quantkit does not know, and guessing would change the "
            f"tokens. Start from the original checkpoint instead. Known: {known}."
        )
