"""export-gguf: what llama.cpp makes of the file, what comes back from it, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from llama_runtime import Runtime
from safetensors.torch import load_file, save_file

from quantkit.formats._gguf import read_header
from quantkit.formats.gguf import decode

IDS = [5, 70, 71, 90, 100, 33, 34, 60, 61, 62, 63, 200, 201, 17, 18, 19, 20, 21, 80, 81, 82, 83, 84, 85]
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama biases": {"attention_bias": True, "mlp_bias": True},
    "llama wide heads": {"head_dim": 32},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False, "layer_types": ["full_attention"] * 3},
    "qwen2 tied": {"use_sliding_window": False, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True},
    "qwen3": {},
    "gemma2": {"layer_types": None, "head_dim": 16},
    "gemma3": {"layer_types": None, "head_dim": 16, "final_logit_softcapping": None, "num_hidden_layers": 6},  # one global layer in six
    "phi3": {"sliding_window": None, "pad_token_id": 0},
    "gpt2": {},
    "mixtral": {},
    "qwen3_moe": {},
}


def reference_logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_llama_cpp_computes_what_transformers_does(name: str, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    pytest.importorskip("cyllama")
    folder = make_model(tmp_path / "m", name.split(" ")[0], **ARCHITECTURES[name])
    code, document, err = run_cli("export-gguf", folder, "-o", tmp_path / "m.gguf", "--type", "F32", "--json")
    assert code == 0, err
    assert document["bytes"] == (tmp_path / "m.gguf").stat().st_size
    theirs, ours = Runtime(tmp_path / "m.gguf").logits(IDS).log_softmax(-1), reference_logits(folder).log_softmax(-1)
    divergence = (ours.exp() * (ours - theirs[:, : ours.shape[1]])).sum(-1)
    assert float(divergence.max()) < 2e-3  # its cache and some of its products are float16


@pytest.mark.parametrize("scaling", [
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128},
])  # fmt: skip
def test_rotary_scaling_arrives(scaling: dict[str, Any], tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    pytest.importorskip("cyllama")
    folder = make_model(tmp_path / "m", rope_parameters=scaling, head_dim=64, num_attention_heads=1, num_key_value_heads=1)
    assert run_cli("export-gguf", folder, "-o", tmp_path / "m.gguf", "--type", "F32", "-q")[0] == 0
    theirs, ours = Runtime(tmp_path / "m.gguf").logits(IDS).log_softmax(-1), reference_logits(folder).log_softmax(-1)
    assert float((ours.exp() * (ours - theirs)).sum(-1).max()) < 2e-3


def test_llama3_divisors_are_stored(tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip
    folder = make_model(tmp_path / "m", rope_parameters=scaling, head_dim=64, num_attention_heads=1, num_key_value_heads=1)
    run_cli("export-gguf", folder, "-o", tmp_path / "m.gguf", "--type", "F32", "-q")
    values = decode(read_header(tmp_path / "m.gguf"), "rope_freqs.weight")
    torch.testing.assert_close(torch.tensor(values[:7]), torch.tensor([1, 1, 1, 1.4255, 2.4423, 4.6372, 8]), atol=1e-4, rtol=0)
    assert set(values[6:]) == {8.0}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "phi3", "qwen3_moe"])
def test_gguf_to_checkpoint_to_gguf_is_the_identity(family: str, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    changes = {"layer_types": None} if family == "gemma3" else {}
    folder = make_model(tmp_path / "m", family, **changes)
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    assert run_cli("export-gguf", folder, "-o", first, "--type", "F16", "-q")[0] == 0
    code, _, err = run_cli("to-hf", first, tmp_path / "back", "--dtype", "float32")
    assert code == 0, err
    code, _, err = run_cli("export-gguf", tmp_path / "back", "-o", second, "--type", "F16", "-q")
    assert code == 0, err
    a, b = read_header(first), read_header(second)
    assert list(a.tensors) == list(b.tensors)
    for name in a.tensors:
        assert (a.read(name) == b.read(name)).all(), name
    keys = {name for name in a.keys if name.startswith("tokenizer.") and "chat_template" not in name}
    assert {name: a.keys[name] for name in keys} == {name: b.keys[name] for name in keys}


def test_grouped_key_rows_go_in_rotary_pairs(tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    folder = make_model(tmp_path / "m", hidden_size=128, num_attention_heads=8, num_key_value_heads=2, attention_bias=True)
    weights = load_file(folder / "model.safetensors")
    run_cli("export-gguf", folder, "-o", tmp_path / "m.gguf", "--type", "F32", "-q")
    header = read_header(tmp_path / "m.gguf")
    source = [row for pair in zip(range(8), range(8, 16), strict=True) for row in pair]
    order = torch.tensor(source + [16 + row for row in source])
    for suffix in ("weight", "bias"):
        rows = torch.tensor(decode(header, f"blk.0.attn_k.{suffix}"))
        assert torch.equal(rows, weights[f"model.layers.0.self_attn.k_proj.{suffix}"][order])


def test_types_size_and_fallbacks_are_told_before_writing(llama: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    out = tmp_path / "m.gguf"
    code, plan, err = run_cli("export-gguf", llama, "-o", out, "--dry-run", "--json")
    assert code == 0
    assert not out.exists()
    assert plan["fallbacks"] == 22
    assert "do not divide their rows" in err
    code, done, _ = run_cli("export-gguf", llama, "-o", out, "--json")
    assert code == 0
    assert out.stat().st_size == plan["bytes"] == done["bytes"]
    kinds = {tensor["name"]: tensor["type"] for tensor in done["tensors"]}
    assert kinds["blk.0.attn_q.weight"] == "Q5_0"
    code, _, err = run_cli("export-gguf", llama, "-o", out, "--force", "--strict")
    assert code == 1
    assert "--strict: 22 tensors cannot have their type" in err


def test_reference_and_kernels_write_the_same_file(tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    folder = make_model(tmp_path / "m", hidden_size=256, intermediate_size=256)
    for name, extra in (("a", ()), ("b", ("--reference",))):
        assert run_cli("export-gguf", folder, "-o", tmp_path / f"{name}.gguf", "--type", "Q3_K_M", "-q", *extra)[0] == 0
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_a_split_loads_and_holds_the_same(llama: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    code, document, _ = run_cli("export-gguf", llama, "-o", tmp_path / "m.gguf", "--type", "F16", "--split-max-size", "100KB", "--json")
    assert code == 0
    paths = [Path(path) for path in document["files"]]
    assert len(paths) > 2
    assert paths[0].name == f"m-00001-of-{len(paths):05d}.gguf"
    assert sum(path.stat().st_size for path in paths) == document["bytes"]
    run_cli("export-gguf", llama, "-o", tmp_path / "one.gguf", "--type", "F16", "-q")
    assert sum(len(read_header(path).tensors) for path in paths) == len(read_header(tmp_path / "one.gguf").tensors)
    assert torch.equal(Runtime(paths[0]).logits(IDS), Runtime(tmp_path / "one.gguf").logits(IDS))


def edit_config(folder: Path, name: str = "config.json", **changes: Any) -> None:
    path = folder / name
    settings = json.loads(path.read_text()) if path.exists() else {}
    settings |= changes
    path.write_text(json.dumps({k: v for k, v in settings.items() if v != "remove"}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_what_float16_cannot_hold_is_named(llama: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    edit_weights(llama, lambda w: w["model.layers.1.mlp.down_proj.weight"].view(-1).__setitem__(1000, 70144.0))
    out = tmp_path / "m.gguf"
    code, _, err = run_cli("export-gguf", llama, "-o", out, "--type", "F16")
    assert code == 1
    assert "'model.layers.1.mlp.down_proj.weight' has 1 values that F16 cannot hold, the first at (7, 104)" in err
    assert not list(tmp_path.glob("*.gguf*"))
    assert run_cli("export-gguf", llama, "-o", out, "--type", "F16", "--tensor-type", "blk.1.ffn_down=BF16")[0] == 0
    assert run_cli("export-gguf", llama, "-o", out, "--type", "Q8_0", "--force")[0] == 0
    assert abs(decode(read_header(out), "blk.1.ffn_down.weight").reshape(-1)[1000] - 70167.5) < 100


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_is_named(value: float, llama: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    edit_weights(llama, lambda w: w["model.layers.1.mlp.down_proj.weight"].view(-1).__setitem__(1000, value))
    code, _, err = run_cli("export-gguf", llama, "-o", tmp_path / "m.gguf", "--type", "Q8_0")
    assert code == 1
    assert "'model.layers.1.mlp.down_proj.weight' holds 1 NaN or Inf" in err


def test_ties_follow_the_configuration(tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    tied = make_model(tmp_path / "tied", tie_word_embeddings=True)

    def only_the_head(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")

    edit_weights(tied, only_the_head)
    assert run_cli("export-gguf", tied, "-o", tmp_path / "m.gguf", "--type", "F32")[0] == 0
    names = set(read_header(tmp_path / "m.gguf").tensors)
    assert "token_embd.weight" in names
    assert "output.weight" not in names
    loose = make_model(tmp_path / "loose")
    edit_weights(loose, lambda w: w.pop("lm_head.weight"))
    code, _, err = run_cli("export-gguf", loose, "-o", tmp_path / "n.gguf")
    assert code == 1
    assert "no lm_head.weight" in err


@pytest.mark.parametrize(("change", "words"), [
    (lambda f: edit_weights(f, lambda w: w.pop("model.layers.1.mlp.up_proj.weight")), "lacks 1 tensors of a llama model: blk.1.ffn_up"),
    (lambda f: edit_config(f, num_hidden_layers=2), "config.json says 2 layers, but the checkpoint has more: model.layers.2."),
    (lambda f: edit_config(f, head_dim=8), "has 64 rows, but config.json makes it 32 (head_dim 8)"),
    (lambda f: edit_config(f, model_type="opt", architectures=["OPTForCausalLM"]), "does not write 'opt' models to GGUF. Known: llama"),
])  # fmt: skip
def test_a_checkpoint_that_does_not_fit_its_configuration(
    change: Any, words: str, llama: Path, tmp_path: Path, run_cli: Callable[..., Any]
) -> None:
    change(llama)
    code, _, err = run_cli("export-gguf", llama, "-o", tmp_path / "m.gguf")
    assert code == 1
    assert words in err
    assert not (tmp_path / "m.gguf").exists()


def test_a_tensor_without_a_place_is_told_once(llama: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    edit_weights(llama, lambda w: w.update(extra=torch.zeros(5, dtype=torch.int8)))
    code, document, err = run_cli("export-gguf", llama, "-o", tmp_path / "m.gguf", "--json")
    assert code == 0
    assert err.count("llama has no place for 1 tensors, left out: extra") == 1
    assert len(document["notices"]) == len(set(document["notices"]))
    assert run_cli("export-gguf", llama, "-o", tmp_path / "m.gguf", "--force", "--strict", "--type", "F16")[0] == 1


def test_the_source_is_never_the_output(llama: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    path = tmp_path / "a.gguf"
    run_cli("export-gguf", llama, "-o", path, "--type", "F16", "-q")
    before = path.read_bytes()
    (tmp_path / "link.gguf").symlink_to(path)
    for out in (path, tmp_path / "link.gguf", tmp_path / ".." / tmp_path.name / "a.gguf"):
        code, _, err = run_cli("export-gguf", path, "-o", out, "--type", "Q8_0", "--force")
        assert code == 1
        assert "is the source itself" in err
    assert path.read_bytes() == before
    code, _, err = run_cli("export-gguf", llama, "-o", path)
    assert code == 1
    assert "exists already" in err


def test_a_quantized_source_needs_a_word(llama: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    run_cli("export-gguf", llama, "-o", tmp_path / "q.gguf", "--type", "Q8_0", "-q")
    code, _, err = run_cli("export-gguf", tmp_path / "q.gguf", "-o", tmp_path / "r.gguf", "--type", "Q4_0")
    assert code == 1
    assert "already quantized (GGUF Q8_0)" in err
    assert run_cli("export-gguf", tmp_path / "q.gguf", "-o", tmp_path / "r.gguf", "--type", "Q4_0", "--allow-requantize", "-q")[0] == 0
    assert run_cli("export-gguf", tmp_path / "q.gguf", "-o", tmp_path / "f.gguf", "--type", "F16", "-q")[0] == 0


def test_a_gptq_artifact_becomes_a_gguf(llama: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    run_cli("rtn", llama, "-o", tmp_path / "art", "--bits", "8", "-q")
    code, _, err = run_cli("export-gguf", tmp_path / "art", "-o", tmp_path / "m.gguf", "--type", "F32", "-q")
    assert code == 0, err
    theirs, ours = Runtime(tmp_path / "m.gguf").logits(IDS).log_softmax(-1), reference_logits(llama).log_softmax(-1)
    assert float((ours.exp() * (ours - theirs)).sum(-1).max()) < 0.02


def test_sampling_settings_become_keys(llama: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    edit_config(llama, "generation_config.json", temperature=0.6, top_k=20, repetition_penalty=1.1, do_sample=True)
    assert run_cli("export-gguf", llama, "-o", tmp_path / "m.gguf", "--type", "F16", "-q")[0] == 0
    keys = read_header(tmp_path / "m.gguf").keys
    found = [keys[f"general.sampling.{name}"].value for name in ("temp", "top_k", "penalty_repeat")]
    assert found == pytest.approx([0.6, 20, 1.1])
    assert keys["general.name"].value


def test_a_modelfile_has_the_sampling_settings(llama: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    edit_config(llama, "generation_config.json", temperature=0.6, top_p=0.9, do_sample=True)
    assert run_cli("export-gguf", llama, "-o", tmp_path / "m.gguf", "--type", "F16", "--modelfile", "-q")[0] == 0
    assert (tmp_path / "Modelfile").read_text() == "FROM ./m.gguf\nPARAMETER temperature 0.6\nPARAMETER top_p 0.9\n"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q8_0", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q3_K_S", "Q2_K", "Q4_0", "MXFP4_MOE"])
def test_llama_cpp_loads_every_mixture_and_reads_our_values(kind: str, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    """Packed, it computes with 8-bit activations; on the same values in float32 it must agree with us."""
    pytest.importorskip("cyllama")
    folder = make_model(tmp_path / "m", hidden_size=768, intermediate_size=1024, num_attention_heads=12, num_key_value_heads=4)
    assert run_cli("export-gguf", folder, "-o", tmp_path / "q.gguf", "--type", kind, "-q")[0] == 0
    assert run_cli("to-hf", tmp_path / "q.gguf", tmp_path / "plain", "--dtype", "float32")[0] == 0
    assert run_cli("export-gguf", tmp_path / "plain", "-o", tmp_path / "f.gguf", "--type", "F32", "-q")[0] == 0
    ours = reference_logits(tmp_path / "plain").log_softmax(-1)
    packed, plain = (Runtime(tmp_path / f"{name}.gguf").logits(IDS).log_softmax(-1) for name in ("q", "f"))
    assert float((ours.exp() * (ours - plain)).sum(-1).max()) < 2e-3
    assert float((ours.exp() * (ours - packed)).sum(-1).mean()) < 0.02


@pytest.mark.parametrize("changes", [
    {"attention_bias": True, "mlp_bias": True},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 64}, "head_dim": 64},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}},
], ids=["biases", "llama3", "linear", "yarn"])  # fmt: skip
def test_a_gguf_file_as_a_source_keeps_its_settings(changes: dict[str, Any], tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    """B24, B26: logits at short and long range are the checkpoint's, from the file and from the checkpoint made of it."""
    from quantkit.loader import Loader
    from quantkit.source import resolve

    folder = make_model(tmp_path / "m", **changes)
    assert run_cli("export-gguf", folder, "-o", tmp_path / "m.gguf", "--type", "F32", "-q")[0] == 0
    assert run_cli("to-hf", tmp_path / "m.gguf", tmp_path / "again", "--dtype", "float32")[0] == 0
    ids = torch.randint(3, 256, (1, 201), generator=torch.Generator().manual_seed(0))

    def logits(path: Path) -> torch.Tensor:
        loader = Loader(resolve(str(path)), torch.device("cpu"))
        loader.materialize(loader.all_names())
        with torch.no_grad():
            values: torch.Tensor = loader.model(ids, use_cache=False).logits[0]
        return values

    wanted = logits(folder)
    for other in (tmp_path / "m.gguf", tmp_path / "again"):
        torch.testing.assert_close(logits(other), wanted, atol=1e-5, rtol=1e-5)


def test_divisors_that_no_llama3_has_are_kept_as_they_are() -> None:
    from quantkit.formats._gguf import Header
    from quantkit.formats.gguf_settings import _of_divisors

    header = Header(Path("x"), {}, {})
    found = _of_divisors(torch.tensor([1.0, 3.0, 2.0, 5.0]).double(), {"rope_theta": 10000.0}, header, "llama")
    assert found["rope_type"] == "longrope" and found["long_factor"] == [1.0, 3.0, 2.0, 5.0] and found["attention_factor"] == 1.0


def test_all_ids_that_end_a_text_come_back(tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    """B14: eot and eom are read again, an id that is no token is ignored and said."""
    from quantkit.source import resolve

    folder = make_model(tmp_path / "m")
    edit_config(folder, pad_token_id=-1)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5, 7, -1]}))
    code, _, err = run_cli("export-gguf", folder, "-o", tmp_path / "m.gguf", "--type", "F16")
    assert code == 0 and "eos_token_id -1 is no token" in err
    assert resolve(str(tmp_path / "m.gguf")).config().eos_token_id == [2, 5, 7]
    assert run_cli("to-hf", tmp_path / "m.gguf", tmp_path / "again")[0] == 0
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text())["eos_token_id"] == [2, 5, 7]


def test_a_merge_with_a_space_inside_is_refused(llama: Path, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    """B27: written as two pieces with a space between, it would be read as another merge."""
    described = json.loads((llama / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    for text in ("a b", "a bc"):
        vocabulary[text] = len(vocabulary)
    described["model"]["merges"].append(["a b", "c"])
    (llama / "tokenizer.json").write_text(json.dumps(described))
    code, _, err = run_cli("export-gguf", llama, "-o", tmp_path / "m.gguf")
    assert code == 1 and "['a b', 'c']" in str(err).replace("('a b', 'c')", "['a b', 'c']")


def test_windows_that_llama_cpp_does_not_have_are_told(tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    for family, why in (("mistral", "no sliding window for llama"), ("gemma3", "one in 6"), ("gemma2", "")):
        folder = make_model(tmp_path / family, family)
        code, _, err = run_cli("export-gguf", folder, "-o", tmp_path / f"{family}.gguf", "--type", "F16")
        assert code == 0 and (why in err if why else "look back" not in err), err
