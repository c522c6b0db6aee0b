"""inspect and diff on every kind of artifact, whole and damaged; checkpoints of other makers as sources."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import write_tokenizer
from safetensors.torch import load_file, save_file

Run = Callable[..., Any]
KINDS = {
    "gptq": ("rtn", "--group-size", 32),
    "awq": ("rtn", "--group-size", 32, "--format", "awq"),
    "pack": ("rtn", "--group-size", 32, "--format", "compressed-tensors", "--asym"),
    "int8": ("rtn", "--bits", 8, "--group-size", -1, "--activations", "dynamic"),
    "naive": ("rtn", "--bits", 8, "--group-size", 32, "--format", "naive-quantized"),
    "fp8": ("rtn", "--codec", "fp8"),
    "mxfp4": ("rtn", "--codec", "mxfp4"),
    "nvfp4": ("rtn", "--codec", "nvfp4"),
    "nf4": ("rtn", "--codec", "nf4"),
    "llm-int8": ("rtn", "--codec", "llm-int8"),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_inspect_says_what_an_artifact_is_and_what_is_wrong_with_it(kind: str, run_cli: Run, llama: Path, tmp_path: Path) -> None:
    method, *words = KINDS[kind]
    assert run_cli(method, llama, "-o", tmp_path / "q", *words, "-q")[0] == 0
    code, document, err = run_cli("inspect", tmp_path / "q", "--json")
    assert code == 0, err
    packed = [tensor for tensor in document["tensors"] if tensor["name"].endswith("_proj.weight")]
    assert len(packed) == 21 and all(not tensor["scheme"].startswith(("F32", "BF16")) for tensor in packed)
    assert document["bytes"] < 0.8 * sum(p.stat().st_size for p in llama.glob("*.safetensors")) and document["runtimes"]
    code, difference, _ = run_cli("diff", tmp_path / "q", llama, "--json")
    assert code == 0 and len(difference["tensors"]) == 21 and all(0 < tensor["error"] < 0.3 for tensor in difference["tensors"])
    path = tmp_path / "q" / "model.safetensors"
    tensors = load_file(path)
    victim = next(name for name in tensors if "q_proj" in name and any(part in name for part in ("scale", "absmax", "SCB")))
    for damage in ("dropped", "reshaped"):
        changed = dict(tensors)
        value = changed.pop(victim)
        if damage == "reshaped":
            changed[victim] = torch.cat([value.view(torch.uint8).reshape(-1), torch.zeros(3, dtype=torch.uint8)])
        save_file(changed, path)
        code, _, err = run_cli("inspect", tmp_path / "q")
        assert code == 1 and "Traceback" not in err and "q_proj" in err, (damage, err)


def test_two_seeds_differ_where_they_should(run_cli: Run, text_file: Path, llama: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        words = ("--calibration", text_file, "--samples", 4, "--seq-len", 32, "--group-size", 32, "--seed", seed, "-q")
        assert run_cli("gptq", llama, "-o", tmp_path / str(seed), *words)[0] == 0
    code, document, _ = run_cli("diff", tmp_path / "1", tmp_path / "2", "--json")
    assert code == 0 and {tensor["name"].rpartition(".")[0].rpartition(".")[2] for tensor in document["tensors"]} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert all(0 < tensor["error"] < 0.3 for tensor in document["tensors"])


def test_mxfp4_experts_are_a_source(run_cli: Run, tmp_path: Path) -> None:
    """gpt-oss as it is published: quantkit and transformers make the same plain model of it."""
    import transformers

    config = transformers.GptOssConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
        max_position_embeddings=128, pad_token_id=0, eos_token_id=2,
        layer_types=["sliding_attention", "full_attention"], rope_scaling=None,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.GptOssForCausalLM(config).save_pretrained(str(tmp_path / "m"))
    write_tokenizer(tmp_path / "m")
    path, packed, generator = tmp_path / "m" / "model.safetensors", {}, torch.Generator().manual_seed(0)
    for name, value in load_file(path).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inner, outer = value.shape
            packed[name + "_blocks"] = torch.randint(0, 256, (experts, outer, inner // 32, 16), generator=generator, dtype=torch.uint8)
            packed[name + "_scales"] = torch.randint(118, 122, (experts, outer, inner // 32), generator=generator, dtype=torch.uint8)
        else:
            packed[name] = value
    save_file(packed, path, {"format": "pt"})
    text = (tmp_path / "m" / "config.json").read_text(encoding="utf-8").rstrip().removesuffix("}")
    (tmp_path / "m" / "config.json").write_text(text + ', "quantization_config": {"quant_method": "mxfp4"}}', encoding="utf-8")
    assert run_cli("to-hf", tmp_path / "m", tmp_path / "plain", "--dtype", "float32")[0] == 0
    ids = torch.randint(3, 300, (1, 40))
    with torch.no_grad():
        theirs, ours = (
            transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / name), dtype=torch.float32)(ids).logits
            for name in ("m", "plain")
        )
    assert torch.equal(theirs, ours)
    code, document, _ = run_cli("inspect", tmp_path / "m", "--json")
    assert code == 0 and document["kind"] == "mxfp4" and sum("mxfp4" in tensor["scheme"] for tensor in document["tensors"]) == 4
    code, _, err = run_cli("gptq", tmp_path / "m", "-o", tmp_path / "q", "-q")
    assert code == 1 and "already quantized" in err
