"""Calibration tokens for a command, with what there is to say about them."""

from __future__ import annotations

from pathlib import Path

from quantkit import corpus, selfwritten
from quantkit.commands._options import DataOptions
from quantkit.errors import UsageError
from quantkit.loader import Loader
from quantkit.report import Eye


def draw_tokens(loader: Loader, asked: DataOptions, eye: Eye) -> corpus.Tokens:
    """Return the samples that the options ask for, drawn from a corpus or written by the model itself."""
    tokenizer = loader.source.tokenizer()
    if asked.calibration == "self":
        tokens = selfwritten.write(loader, tokenizer, asked.samples, asked.seq_len, asked.seed, Path(asked.cache), eye.phase)
    else:
        tokens = corpus.draw(tokenizer, asked.calibration, asked.samples, asked.seq_len, asked.seed, asked.column, asked.offline)
    for text in tokens.notices:
        eye.notice(text)
    if (limit := getattr(loader.source.config().get_text_config(), "max_position_embeddings", None)) and asked.seq_len > limit:
        raise UsageError(f"--seq-len {asked.seq_len} is more than the model's {limit} positions.")
    return tokens
