"""Move a Llama checkpoint off the grid that its weights came on, the function unchanged: where the tables of docs/measured.md start.

    python tests/bench/off_grid.py CHECKPOINT OUTPUT

A model that was decoded from a 4-bit file lies on a 4-bit grid: rounding it again finds that grid and looks too good. Every channel between
two linears is multiplied on one side and divided on the other, by a factor between 0.6 and 1.6.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LOW, HIGH = 0.6, 1.6


def factors(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return log-uniform factors, float64 [count]."""
    share = torch.rand(count, generator=generator, dtype=torch.float64)
    return torch.exp(math.log(LOW) + share * (math.log(HIGH) - math.log(LOW)))


def rescale(weights: dict[str, torch.Tensor], config: dict[str, int], seed: int) -> None:
    """Rescale in place: norm and what reads it, up and down, v and o (query heads of one key-value head share a factor)."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    for index in range(config["num_hidden_layers"]):
        block = f"model.layers.{index}."
        for norm, readers in (("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                              ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"))):  # fmt: skip
            factor = factors(config["hidden_size"], generator)
            weights[f"{block}{norm}.weight"] *= factor
            for name in readers:
                weights[f"{block}{name}.weight"] /= factor
        factor = factors(config["intermediate_size"], generator)
        weights[f"{block}mlp.up_proj.weight"] *= factor[:, None]
        weights[f"{block}mlp.down_proj.weight"] /= factor
        factor = factors(kv_heads * size, generator)
        weights[f"{block}self_attn.v_proj.weight"] *= factor[:, None]
        weights[f"{block}self_attn.o_proj.weight"] /= factor.view(kv_heads, 1, size).expand(-1, heads // kv_heads, -1).flatten()


def main() -> None:
    """Read, rescale, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    config = json.loads((asked.checkpoint / "config.json").read_text())
    weights = {name: value.double() for name, value in load_file(asked.checkpoint / "model.safetensors").items()}
    rescale(weights, config, asked.seed)
    asked.output.mkdir(parents=True)
    for path in asked.checkpoint.iterdir():
        if path.suffix not in (".safetensors",) and path.name not in ("config.json", "quantkit.json"):
            shutil.copy(path, asked.output)
    (asked.output / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2))
    save_file({name: value.float().contiguous() for name, value in weights.items()}, asked.output / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
