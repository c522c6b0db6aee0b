"""`quantkit generate`: a sentence from any source, to see that it speaks. Greedy; transformers' own loop.

A first version for demos: the weights are dequantized into memory. The inference loop on packed weights is to come.
"""

from __future__ import annotations

import torch

from quantkit.commands._options import GenerateOptions
from quantkit.errors import UsageError
from quantkit.loader import Loader, pick_device
from quantkit.source import resolve


@torch.no_grad()
def generate(model: str, asked: GenerateOptions) -> str:
    """Return the prompt and its greedy continuation."""
    if not asked.prompt:
        raise UsageError("--prompt is empty. Give a text to continue.")
    source = resolve(model, asked.revision, asked.offline, asked.trust_remote_code)
    loader = Loader(source, pick_device(asked.device))
    loader.materialize(loader.all_names())
    tokenizer = source.tokenizer()
    ids = tokenizer(asked.prompt, return_tensors="pt").input_ids.to(loader.device)
    output = loader.model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked.max_new_tokens, do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return str(tokenizer.decode(output[0], skip_special_tokens=True))
