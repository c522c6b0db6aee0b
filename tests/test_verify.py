"""Verification, manifests and reproduction: planted faults are found and placed, good artifacts raise no alarm."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from conftest import make_model
from planted import FOLDER_FAULTS, FORMATS, GGUF_FAULTS, GGUF_TYPES
from safetensors.torch import load_file, save_file

from quantkit import manifest
from quantkit.findings import RULES
from quantkit.verify import verify

Run = Callable[..., Any]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Run], Path]:
    """Return a function that makes a good artifact of a format once and gives its folder."""
    root = tmp_path_factory.mktemp("good")

    def get(name: str, run_cli: Run) -> Path:
        model, out = root / "llama", root / name
        if not model.exists():
            make_model(model)
            (model / "chat_template.jinja").write_text(TEMPLATE)
        if not out.exists():
            if name in FORMATS:
                assert run_cli("rtn", model, "-o", out, *FORMATS[name], "-q")[0] == 0
            else:
                out.mkdir()
                assert run_cli("export-gguf", model, "-o", out / "m.gguf", "--type", name, "-q")[0] == 0
        return out

    return get


def target(folder: Path) -> Path:
    return next(iter(folder.glob("*.gguf")), folder)


@pytest.mark.parametrize("name", [*FORMATS, *GGUF_TYPES])
def test_good_artifacts_raise_no_alarm(name: str, good: Callable[[str, Run], Path], run_cli: Run) -> None:
    folder = good(name, run_cli)
    verdict = verify(target(folder))
    assert [f.line() for f in verdict.findings] == []
    assert verdict.counts["tensors"] > 20 and list(verdict.checks)[-1] == "run"
    code, document, err = run_cli("verify", target(folder), "--json", "--strict")
    assert code == 0 and document["passed"] and document["says"].startswith("The sun"), err


@pytest.mark.parametrize("kind", FOLDER_FAULTS)
@pytest.mark.parametrize("name", ["gptq-asym", "awq", "compressed", "nf4"])
def test_faults_in_folders_are_found_and_placed(
    kind: str, name: str, good: Callable[[str, Run], Path], run_cli: Run, tmp_path: Path
) -> None:
    copy = shutil.copytree(good(name, run_cli), tmp_path / "copy")
    place = FOLDER_FAULTS[kind](copy, random.Random(f"{kind}{name}"))
    assert any(place in finding.line() for finding in verify(copy).of("error")), place


@pytest.mark.parametrize("kind", GGUF_FAULTS)
@pytest.mark.parametrize("name", ["Q4_K_M", "F16"])
def test_faults_in_gguf_files_are_found_and_placed(
    kind: str, name: str, good: Callable[[str, Run], Path], run_cli: Run, tmp_path: Path
) -> None:
    copy = shutil.copytree(good(name, run_cli), tmp_path / "copy")
    place = GGUF_FAULTS[kind](copy, random.Random(f"{kind}{name}"))
    assert any(place in finding.line() for finding in verify(target(copy)).of("error")), place


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(str(folder / "model.safetensors"))
    change(tensors)
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})


def test_without_a_manifest_contradictions_are_found(good: Callable[[str, Run], Path], run_cli: Run, tmp_path: Path) -> None:
    folder = shutil.copytree(good("gptq", run_cli), tmp_path / "copy")
    (folder / "quantkit.json").unlink()
    assert [f.code for f in verify(folder).findings] == ["QK104"]
    scales = "model.layers.1.mlp.up_proj.scales"

    def broken(change: Callable[[dict[str, torch.Tensor]], None]) -> list[str]:
        again = shutil.copytree(folder, tmp_path / "again")
        edit(again, change)
        lines = [f.line() for f in verify(again).findings if f.level != "note"]
        shutil.rmtree(again)
        return lines

    assert broken(lambda t: t[scales].fill_(float("nan")))[0].startswith("QK205 a tensor holds NaN or Inf: model.layers.1.mlp.up_proj")
    assert any(line.startswith("QK206") for line in broken(lambda t: t[scales][0, :3].fill_(3e4)))
    assert any(line.startswith("QK206") for line in broken(lambda t: t[scales][0, 0].fill_(0)))
    assert any(line.startswith("QK301") for line in broken(lambda t: t.pop(scales) is None))
    assert any(line.startswith("QK301") for line in broken(lambda t: t["model.layers.0.mlp.up_proj.g_idx"].fill_(-1)))
    assert any(line.startswith("QK208") for line in broken(lambda t: t["model.layers.0.mlp.up_proj.qweight"].fill_(0x88888888 - (1 << 32))))


@pytest.mark.parametrize("method", ["gptq", "awq", "rtn"])
def test_a_weight_that_really_is_huge_is_no_error(method: str, run_cli: Run, tmp_path: Path, text_file: Path) -> None:
    model = make_model(tmp_path / "m", "llama", torch.bfloat16)
    edit(model, lambda t: t["model.layers.1.mlp.down_proj.weight"][7, 104].fill_(70144.0))
    data = ("--calibration", text_file, "--samples", 4, "--seq-len", 64) if method != "rtn" else ()
    code, document, err = run_cli(method, model, *data, "-o", tmp_path / "out", "--json")
    assert code == 0, err
    codes = {finding["code"] for finding in document["verified"]["findings"]}
    assert "QK209" in codes and "QK206" not in codes and "layers.1.mlp.down_proj" in err


def test_a_config_that_lies_about_bits_and_a_scheme_that_is_mixed(run_cli: Run, llama: Path, tmp_path: Path) -> None:
    assert run_cli("rtn", llama, "-o", tmp_path / "q", "--exclude", "gate_proj", "-q")[0] == 0
    assert [f.code for f in verify(tmp_path / "q").findings] == ["QK304"] * 3
    assert run_cli("verify", tmp_path / "q")[0] == 0
    assert run_cli("verify", tmp_path / "q", "--strict")[0] == 1
    assert run_cli("rtn", llama, "-o", tmp_path / "p", "-q")[0] == 0
    config = json.loads((tmp_path / "p" / "config.json").read_text())
    config["quantization_config"]["group_size"] = 128
    (tmp_path / "p" / "config.json").write_text(json.dumps(config))
    assert any(f.code == "QK303" and "group_size is 128" in f.text for f in verify(tmp_path / "p").findings)


def test_overflow_and_a_model_that_does_not_listen(run_cli: Run, tmp_path: Path) -> None:
    """float16 overflows where the residual stream passes 65,504; a head of zeros gives every context the same scores."""
    model = make_model(tmp_path / "m", tie_word_embeddings=False)

    def loud(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"].mul_(1e6)

    edit(model, loud)
    assert run_cli("rtn", model, "-o", tmp_path / "q", "-q")[0] == 0
    codes = {f.code: f.where for f in verify(tmp_path / "q").findings}
    assert codes == {"QK503": "model.layers.1"}
    edit(model, lambda t: t["lm_head.weight"].fill_(1e-3))
    edit(model, lambda t: t["model.norm.weight"].fill_(0))
    assert "QK502" in [f.code for f in verify(model).findings]


@pytest.mark.fresh
def test_a_writing_command_verifies_in_a_fresh_process(run_cli: Run, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, document, err = run_cli("rtn", llama, "-o", tmp_path / "q", "--json")
    assert code == 0 and document["verified"]["findings"] == [], err
    from quantkit.formats.gptq import GptqFormat

    honest = GptqFormat.settle
    monkeypatch.setattr(
        GptqFormat, "settle", lambda self, name, bits, one: (lambda w: w + 1) if "qzeros" in name else honest(self, name, bits, one)
    )
    code, _, err = run_cli("rtn", llama, "-o", tmp_path / "p")
    assert code == 1 and "QK207" in err and "model.layers.0." in err
    assert not (tmp_path / "p").exists() and (tmp_path / "p.partial").exists()


def test_gates_and_junit(run_cli: Run, llama: Path, tmp_path: Path) -> None:
    assert run_cli("rtn", llama, "-o", tmp_path / "q", "--bits", 8, "-q")[0] == 0
    words = ("verify", tmp_path / "q", "--windows", 1, "--junit", tmp_path / "r.xml", "--json", "--no-generate")
    code, document, err = run_cli(*words, "--max-kl", 0.5, "--max-ppl-delta", 50)
    assert code == 0 and 0 <= document["measured"]["kl_mean"] < 0.5, err
    suite = ElementTree.parse(tmp_path / "r.xml").getroot()[0]
    assert suite.get("failures") == "0" and [case.get("name") for case in suite][-1] == "gates"
    code, document, err = run_cli(*words, "--max-kl", 0)
    assert code == 3 and "misses --max-kl 0" in err and not document["passed"]
    suite = ElementTree.parse(tmp_path / "r.xml").getroot()[0]
    assert suite.get("failures") == "1" and suite[-1][0].get("message", "").startswith("QK601")


def test_a_missing_source_for_gates_is_asked_for(run_cli: Run, llama: Path, tmp_path: Path) -> None:
    assert run_cli("rtn", llama, "-o", tmp_path / "a" / "q", "-q")[0] == 1
    (tmp_path / "a").mkdir()
    assert run_cli("rtn", llama, "-o", tmp_path / "a" / "q", "-q")[0] == 0
    llama.rename(tmp_path / "elsewhere")
    code, _, err = run_cli("verify", tmp_path / "a" / "q", "--max-kl", 1)
    assert code == 2 and "--reference" in err
    assert run_cli("verify", tmp_path / "nothing")[0] == 1


def test_reproduce_gives_the_same_bytes(run_cli: Run, llama: Path, tmp_path: Path, text_file: Path) -> None:
    data = ("--calibration", text_file, "--samples", 4, "--seq-len", 64, "-q")
    assert run_cli("gptq", llama, "-o", tmp_path / "g", *data, "--asym", "--exclude", "o_proj")[0] == 0
    assert run_cli("awq", llama, "-o", tmp_path / "a", *data, "--then", "gptq", "--group-size", 32)[0] == 0
    assert run_cli("export-gguf", llama, "-o", tmp_path / "m.gguf", "--type", "Q4_0", "-q")[0] == 0
    assert run_cli("to-hf", tmp_path / "g", tmp_path / "plain")[0] == 0
    for artifact in ("g", "a", "m.gguf", "plain"):
        code, document, err = run_cli("reproduce", manifest.path_of(tmp_path / artifact), "--json")
        assert code == 0 and document["identical"] and document["tensors_differ"] == [], err
    assert run_cli("reproduce", tmp_path / "m.gguf", "--threads", 1)[0] == 0
    changed = json.loads((tmp_path / "g" / "quantkit.json").read_text())
    changed["run"]["options"]["damp"] = 0.2
    (tmp_path / "g" / "quantkit.json").write_text(json.dumps(changed))
    code, document, err = run_cli("reproduce", tmp_path / "g", "--json")
    assert code == 1 and not document["identical"] and any("qweight" in name for name in document["tensors_differ"]), err
    text_file.unlink()
    code, _, err = run_cli("reproduce", tmp_path / "a")
    assert code == 2 and "--calibration" in err


def test_reproduce_refuses_another_source(run_cli: Run, llama: Path, tmp_path: Path) -> None:
    assert run_cli("rtn", llama, "-o", tmp_path / "q", "-q")[0] == 0
    edit(llama, lambda t: t["model.norm.weight"].add_(1))
    code, _, err = run_cli("reproduce", tmp_path / "q")
    assert code == 1 and "is not the model that this was made from" in err
    assert run_cli("reproduce", llama)[0] == 1


def test_codes_are_stable_and_say_what_to_do() -> None:
    assert all(code[:2] == "QK" and code[2:].isdigit() and len(code) == 5 for code in RULES)
    assert all(rule.level in ("error", "warning", "gate", "note") and rule.advice.endswith(".") for rule in RULES.values())


def test_pieces_and_leftovers_of_others_are_no_alarm(run_cli: Run, llama: Path, tmp_path: Path) -> None:
    assert run_cli("export-gguf", llama, "-o", tmp_path / "m.gguf", "--type", "F16", "--split-max-size", "100KB", "-q")[0] == 0
    first = next(path for path in sorted(tmp_path.glob("m-*.gguf")))
    code, document, err = run_cli("verify", first, "--json")
    assert code == 0 and [f["code"] for f in document["findings"]] == ["QK107"] and document["files"] > 1, err
    next(path for path in sorted(tmp_path.glob("m-*.gguf"), reverse=True)).unlink()
    assert any(f.code == "QK101" for f in verify(first).findings)
    names = load_file(str(llama / "model.safetensors"))
    (llama / "model.safetensors").rename(llama / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"x": torch.zeros(2)}, str(llama / "consolidated.safetensors"))
    assert [f.code for f in verify(llama).findings] == ["QK104", "QK108"]


def test_an_artifact_of_a_gguf_file_reproduces_and_names_no_folder_of_this_machine(run_cli: Run, llama: Path, tmp_path: Path) -> None:
    assert run_cli("export-gguf", llama, "--type", "F16", "-o", tmp_path / "m.gguf", "-q")[0] == 0
    assert run_cli("rtn", tmp_path / "m.gguf", "-o", tmp_path / "out", "-q")[0] == 0
    assert '"_name_or_path"' not in (tmp_path / "out" / "config.json").read_text()
    code, _, err = run_cli("reproduce", tmp_path / "out")
    assert code == 0, err
    assert "passed" in run_cli("verify", tmp_path / "out")[2]
