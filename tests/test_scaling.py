"""AWQ and SmoothQuant: folds that keep the function in every family, scales that help, and what follows them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, make_model
from torch import nn

from quantkit.backends import Backend
from quantkit.calibrate import record, view_block
from quantkit.codecs.affine import Affine
from quantkit.folds import find_pairs, fold, observe
from quantkit.loader import Loader
from quantkit.methods._options import AwqOptions, SmoothQuantOptions
from quantkit.methods.awq import AWQ
from quantkit.methods.smoothquant import SmoothQuant
from quantkit.source import resolve

Run = Callable[..., Any]
QUICK = ("--samples", 6, "--seq-len", 48, "--threads", 1, "--json", "-q")
IDS = torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(5))
# What each family's groups are folded into; None: nothing keeps the function (a GELU is between).
WANTED = {
    "gpt2": ["ln_1", "attn.c_attn", "ln_2", None],
    "starcoder2": ["input_layernorm", "self_attn.v_proj", "post_attention_layernorm", None],
    "opt": ["self_attn_layer_norm", "self_attn.v_proj", "final_layer_norm", "fc1"],
    "phi3": ["input_layernorm", "self_attn.qkv_proj", "post_attention_layernorm", "mlp.gate_up_proj"],
    "gemma2": ["input_layernorm", "self_attn.v_proj", "pre_feedforward_layernorm", "mlp.up_proj"],
    "gemma3": ["input_layernorm", "self_attn.v_proj", "pre_feedforward_layernorm", "mlp.up_proj"],
}
USUAL = ["input_layernorm", "self_attn.v_proj", "post_attention_layernorm", "mlp.up_proj"]


def logits(model: Path) -> torch.Tensor:
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32).eval()
    with torch.no_grad():
        return loaded(input_ids=IDS, use_cache=False).logits


def opened(model: Path) -> tuple[Loader, Any]:
    loader = Loader(resolve(str(model)), torch.device("cpu"))
    recording = record(loader, [torch.randint(3, 250, (3, 24), generator=torch.Generator().manual_seed(i)) for i in range(2)])
    loader.materialize(loader.block_names(1))
    return loader, recording


HEADS = {"mha": {"num_key_value_heads": 4}, "gqa": {"num_key_value_heads": 2}, "mqa": {"num_key_value_heads": 1}}
CASES = [(family, {}) for family in FAMILIES]
CASES += [("llama", {**heads, "attention_bias": bias, "mlp_bias": bias}) for heads in HEADS.values() for bias in (False, True)]
CASES += [("phi3", heads) for heads in HEADS.values()] + [("qwen2", HEADS["mqa"])]


@pytest.mark.parametrize(
    ("family", "changes"), CASES, ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values()))
)
def test_the_folded_model_is_the_same_function(family: str, changes: dict[str, Any], run_cli: Run, text_file: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", family, **changes)
    words = ("--then", "none", "--group-size", 16, "--calibration", text_file, *QUICK)
    code, document, err = run_cli("awq", model, "-o", tmp_path / "f", *words)
    assert code == 0, err
    found = [note["before"] or None for note in document["scales"] if note["block"] == 0]
    assert found == WANTED.get(family, USUAL)
    before, after = logits(model), logits(tmp_path / "f")
    assert (after - before).abs().max() < 1e-4 * before.abs().max()
    from safetensors.torch import load_file

    old, new = load_file(model / "model.safetensors"), load_file(tmp_path / "f" / "model.safetensors")
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed and all("layers." in name or ".h." in name for name in changed)


def test_a_fold_in_bfloat16_loses_nothing_of_the_norm(tmp_path: Path) -> None:
    loader, recording = opened(make_model(tmp_path / "m", "llama"))
    view = view_block(loader, recording, 1)
    pairs, refused = find_pairs(view, recording.probe_state, recording.probe_calls[1], 16)
    assert len(pairs) == 4 and not refused
    before = view.replay(view.module, recording.states[0], 0)
    for pair in pairs:
        scale = torch.rand(pair.units, generator=torch.Generator().manual_seed(1)) + 0.5
        changed = fold(view.module, pair, scale, lambda name: torch.bfloat16)
        if pair.kind == "norm":
            weight = view.module.get_parameter(changed[0])
            assert torch.equal(weight, weight.bfloat16().float())
    torch.testing.assert_close(view.replay(view.module, recording.states[0], 0), before, rtol=1e-4, atol=1e-4)


def test_pairs_are_tried_and_not_guessed(tmp_path: Path) -> None:
    """A norm whose output somebody else reads too takes no scales; a linear behind a GELU neither."""
    loader, recording = opened(make_model(tmp_path / "m", "llama"))
    mlp, forward = loader.blocks[1].mlp, loader.blocks[1].mlp.forward
    mlp.forward = lambda x: forward(x) + 0.1 * x
    view = view_block(loader, recording, 1)
    pairs, refused = find_pairs(view, recording.probe_state, recording.probe_calls[1], 16)
    assert [group.names for group in refused] == [("mlp.gate_proj", "mlp.up_proj")]
    assert [pair.before for pair in pairs] == ["input_layernorm", "self_attn.v_proj", "mlp.up_proj"]


def test_grouped_heads_share_their_scales(tmp_path: Path) -> None:
    loader, recording = opened(make_model(tmp_path / "m", "llama"))
    pairs, _ = find_pairs(view_block(loader, recording, 1), recording.probe_state, recording.probe_calls[1], 16)
    values = next(pair for pair in pairs if pair.before == "self_attn.v_proj")
    assert values.units == 32 and values.consumer == "self_attn.o_proj"
    assert torch.equal(values.index.view(4, 16)[0], values.index.view(4, 16)[1])
    assert torch.equal(values.index.view(4, 16)[2], values.index.view(4, 16)[3])
    assert [pair.consumer for pair in pairs] == ["self_attn", "self_attn.o_proj", "mlp", "mlp.down_proj"]


def planted(tmp_path: Path) -> tuple[Loader, Any]:
    """A model whose input_layernorm makes a few columns thirty times as large as the others."""
    loader, recording = opened(make_model(tmp_path / "m", "llama"))
    loader.blocks[1].input_layernorm.weight.data[:4] *= 30
    return loader, recording


@pytest.mark.parametrize(("cls", "options", "codec"), [
    (AWQ, AwqOptions(), Affine(3, 32, False)),
    (SmoothQuant, SmoothQuantOptions(), Affine(8, -1, True, "float32", "dynamic")),
])  # fmt: skip
def test_scales_help_where_they_should(cls: Any, options: Any, codec: Affine, tmp_path: Path) -> None:
    loader, recording = planted(tmp_path)
    view = view_block(loader, recording, 1)
    pairs, _ = find_pairs(view, recording.probe_state, recording.probe_calls[1], 16)
    scaler = cls(options, Backend(torch.device("cpu"), 1), 16)
    pair, seen = pairs[0], observe(view, recording.states, pairs, 100)[0]
    weights = {name: view.module.get_submodule(name).weight.clone() for name in pair.group.names}
    scale, note = scaler.search(view.module, pair, seen, dict.fromkeys(pair.group.names, codec))
    assert note["error"] < 0.75 * note["error_unscaled"]
    assert scale[:4].mean() > 1.5 * scale[4:].mean()
    for name, weight in weights.items():
        assert torch.equal(view.module.get_submodule(name).weight, weight), "the search leaves the weights alone"


def test_statistics_are_those_of_the_input(tmp_path: Path) -> None:
    loader, recording = opened(make_model(tmp_path / "m", "llama"))
    view = view_block(loader, recording, 1)
    states = [state.clone() for state in recording.states]
    pairs, _ = find_pairs(view, recording.probe_state, recording.probe_calls[1], 16)
    seen = observe(view, recording.states, pairs, 1)
    rows = torch.cat([view.module.input_layernorm(state).reshape(-1, 64) for state in states])
    torch.testing.assert_close(seen[0].mean, rows.abs().mean(0))
    torch.testing.assert_close(seen[0].peak, rows.abs().amax(0))
    torch.testing.assert_close(seen[0].stats.energy(), rows.square().mean(0))
    assert len(seen[0].calls) == 1 and all(torch.equal(a, b) for a, b in zip(states, recording.states, strict=True))


@pytest.mark.parametrize("then", ["rtn", "gptq"])
def test_awq_artifacts(then: str, run_cli: Run, text_file: Path, llama: Path, tmp_path: Path) -> None:
    for name, words in (("q", ()), ("again", ()), ("two", ("--schedule", "two-pass"))):
        code, document, err = run_cli("awq", llama, "-o", tmp_path / name, "--group-size", 16, "--then", then,
                                      "--calibration", text_file, *QUICK, *words)  # fmt: skip
        assert code == 0, err
        assert document["verified"]["modules"] == 21 and len(document["scales"]) == 12
    assert (tmp_path / "q" / "model.safetensors").read_bytes() == (tmp_path / "again" / "model.safetensors").read_bytes()
    assert run_cli("to-hf", tmp_path / "q", tmp_path / "back", "--dtype", "float32")[0] == 0
    assert torch.nn.functional.cosine_similarity(logits(tmp_path / "back"), logits(llama), dim=-1).mean() > 0.9
    code, document, _ = run_cli("inspect", tmp_path / "q", "--json")
    assert code == 0 and document["kind"] == "awq 4 bits" and document["runtimes"]


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("words", [
    ("rtn", "--codec", "fp8"), ("rtn", "--codec", "fp8", "--activations", "dynamic"),
    ("rtn", "--codec", "fp8", "--strategy", "tensor", "--activations", "static"), ("rtn", "--codec", "fp8", "--strategy", "block"),
    ("rtn", "--bits", "8", "--group-size", "-1", "--activations", "dynamic"), ("smoothquant", "--activations", "static"),
    ("smoothquant", "--then", "gptq"), ("rtn", "--bits", "8", "--group-size", "32", "--format", "naive-quantized"),
    ("rtn", "--codec", "mxfp4"), ("rtn", "--codec", "nvfp4"),
], ids=lambda words: " ".join(words))  # fmt: skip
def test_transformers_gives_our_logits(words: tuple[str, ...], run_cli: Run, text_file: Path, tmp_path: Path) -> None:
    """What transformers and its compressed-tensors make of the artifact, rounded inputs included, is what quantkit says it is."""
    import transformers
    from transformers import CompressedTensorsConfig

    model = make_model(tmp_path / "m", torch_dtype="float32")
    data = ("--calibration", text_file)
    code, _, err = run_cli(words[0], model, "-o", tmp_path / "q", *words[1:], *QUICK, *data)
    assert code == 0, err
    fp4 = words[-1] in ("mxfp4", "nvfp4")
    how = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if fp4 else {}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "q"), dtype=torch.float32, **how).eval()
    loader = Loader(resolve(str(tmp_path / "q")), torch.device("cpu"))
    loader.materialize(loader.all_names())
    with torch.no_grad():
        theirs, ours = (net(input_ids=IDS, use_cache=False).logits for net in (loaded, loader.model))
    # compressed-tensors unpacks 4-bit floats to bfloat16
    assert (theirs - ours).abs().max() < (2e-2 if words[-1] == "nvfp4" else 1e-4) * ours.abs().max()


@pytest.mark.parametrize("codec", ["nf4", "fp4", "llm-int8"])
def test_bitsandbytes_artifacts_are_sources(codec: str, run_cli: Run, llama: Path, tmp_path: Path) -> None:
    assert run_cli("rtn", llama, "-o", tmp_path / "q", "--codec", codec, *QUICK)[0] == 0
    assert run_cli("to-hf", tmp_path / "q", tmp_path / "back", "--dtype", "float32")[0] == 0
    assert torch.nn.functional.cosine_similarity(logits(tmp_path / "back"), logits(llama), dim=-1).mean() > 0.9
    code, document, _ = run_cli("inspect", tmp_path / "q", "--json")
    assert code == 0 and "bitsandbytes" in document["kind"] and any("bitsandbytes" in line for line in document["runtimes"])


def test_fp8_checkpoints_are_sources_for_any_method(run_cli: Run, text_file: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", "llama", hidden_size=128, intermediate_size=256, num_key_value_heads=4)
    assert run_cli("rtn", model, "-o", tmp_path / "q", "--codec", "fp8", "--format", "fp8", *QUICK)[0] == 0
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path / "q"), dtype=torch.float32, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    ).eval()
    assert run_cli("to-hf", tmp_path / "q", tmp_path / "back", "--dtype", "float32")[0] == 0
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS, use_cache=False).logits, logits(tmp_path / "back"))
    words = ("--samples", 4, "--seq-len", 32, "--calibration", text_file, "--group-size", 32, "-q", "--json")
    code, _, err = run_cli("gptq", tmp_path / "q", "-o", tmp_path / "g", *words)
    assert code == 1 and "--allow-requantize" in err
    assert run_cli("gptq", tmp_path / "q", "-o", tmp_path / "g", *words, "--allow-requantize")[0] == 0


@pytest.mark.parametrize(("words", "text"), [
    (("awq", "--format", "hf"), "--then none"),
    (("awq", "--then", "none", "--format", "gptq"), "--then none"),
    (("awq", "--codec", "Q4_K"), "needs --then none"),
    (("awq", "--bits", "3", "--format", "awq"), "awq holds 4 bits"),
    (("rtn", "--activations", "dynamic"), "--bits 8 --group-size -1"),
    (("rtn", "--codec", "nf4", "--activations", "dynamic"), "compressed-tensors holds"),
    (("rtn", "--codec", "nf4", "--format", "gptq"), "gptq holds affine"),
    (("rtn", "--bits", "8", "--group-size", "-1", "--activations", "dynamic", "--format", "gptq"), "no place for rounded activations"),
    (("smoothquant", "--alpha", "2"), "from 0 to 1"),
    (("rtn", "--codec", "q4"), "Known: affine, fp8"),
])  # fmt: skip
def test_what_cannot_be_is_said(words: tuple[str, ...], text: str, run_cli: Run, text_file: Path, llama: Path, tmp_path: Path) -> None:
    code, _, err = run_cli(words[0], llama, "-o", tmp_path / "q", "--calibration", text_file, *QUICK, *words[1:])
    assert code in (1, 2) and text in err and not (tmp_path / "q").exists(), err


def test_awq_takes_one_group_size_for_all(run_cli: Run, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", "llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=2)
    code, document, _ = run_cli("rtn", model, "-o", tmp_path / "q", "--group-size", 64, "--format", "awq", *QUICK)
    assert code == 0
    assert {row["group"] for row in document["plan"]["modules"]} == {32}
    assert any("one group size" in row["reason"] for row in document["plan"]["modules"])


def test_a_fused_set_agrees(run_cli: Run, tmp_path: Path) -> None:
    """k_proj and v_proj are too narrow for awq's packing; q_proj, which runtimes fuse with them, stays too."""
    model = make_model(tmp_path / "m", "llama", head_dim=8, num_attention_heads=8, num_key_value_heads=2)
    code, document, _ = run_cli("rtn", model, "-o", tmp_path / "q", "--group-size", 32, "--format", "awq", *QUICK)
    assert code == 0
    reasons = {row["module"].rpartition(".")[2]: row["reason"] for row in document["plan"]["modules"]}
    assert "multiple of 32" in reasons["k_proj"] and "fuse it" in reasons["q_proj"] and not reasons["o_proj"]


def test_scaling_resumes_to_the_same_bytes(
    run_cli: Run, text_file: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.journal import Journal

    words = ("--group-size", 16, "--calibration", text_file, *QUICK)
    for how in ("store", "recompute"):
        for method in (("awq",), ("awq", "--then", "none"), ("smoothquant", "--activations", "static", "--group-size", -1)):
            flags = (*words, *method[1:], "--resume-states", how)
            assert run_cli(method[0], llama, "-o", tmp_path / "whole", "--force", *flags)[0] == 0
            commit, done = Journal.commit, []

            def stop(self: Journal, *args: Any) -> None:
                commit(self, *args)
                done.append(1)
                if len(done) == 2:
                    raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(Journal, "commit", stop)
                assert run_cli(method[0], llama, "-o", tmp_path / "cut", "--force", *flags)[0] == 130
            code, document, err = run_cli(method[0], llama, "-o", tmp_path / "cut", "--force", *flags)
            assert code == 0 and document["resumed_from_block"] == 2, err
            assert (tmp_path / "cut" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes(), (
                how,
                method,
            )


def test_blocks_keep_their_own_forward(run_cli: Run, tmp_path: Path) -> None:
    loader, _ = opened(make_model(tmp_path / "m", "llama"))
    assert not any("forward" in vars(module) for module in loader.model.modules() if isinstance(module, nn.Linear))
