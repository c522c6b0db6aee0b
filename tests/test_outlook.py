"""`plan` before a run and `report` after it: what they say is what happens."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model

from quantkit import forecast
from quantkit.forecast import Load
from quantkit.infer.cache_int8 import Int8Cache
from quantkit.loader import Loader
from quantkit.source import resolve

Run = Callable[..., Any]
CPU = torch.device("cpu")
SHORT = ("--samples", 2, "--seq-len", 32)


@pytest.mark.parametrize(
    "words", [("gptq",), ("gptq", "--format", "compressed-tensors", "--exclude", "down_proj"), ("awq",), ("rtn", "--codec", "nf4")]
)
def test_the_planned_bytes_are_those_written(words: tuple[str, ...], llama: Path, tmp_path: Path, run_cli: Run, text_file: Path) -> None:
    method, *flags = words
    given = (llama, *flags, *(("--calibration", text_file, *SHORT) if method != "rtn" else ()), "--json", "-q")
    code, out, err = run_cli("plan", "--method", method, *given, "--no-measure")
    assert code == 0, err
    planned = out
    code, out, err = run_cli(method, *given, "-o", tmp_path / "out")
    assert code == 0, err
    assert planned["bytes"] == (tmp_path / "out" / "model.safetensors").stat().st_size
    everything = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert abs(planned["bytes"] + planned["bytes_beside"] - everything) < 0.2 * planned["bytes_beside"]
    assert planned["peak_memory"] > 0 and planned["seconds"] == 0
    assert {"embedding", "attention", "MLP", "norms and biases"} <= set(planned["roles"])
    assert sum(row["bytes_after"] for row in planned["roles"].values()) == out["plan"]["bytes_after"]


def test_the_planned_gguf_file_is_the_one_written(llama: Path, tmp_path: Path, run_cli: Run) -> None:
    code, out, err = run_cli("plan", "--method", "export-gguf", llama, "--type", "Q8_0", "--json", "-q")
    assert code == 0, err
    assert run_cli("export-gguf", llama, "--type", "Q8_0", "-o", tmp_path / "m.gguf", "-q")[0] == 0
    planned = out
    assert planned["bytes"] == (tmp_path / "m.gguf").stat().st_size
    assert planned["seconds"] > 0 and set(planned["seconds_by_phase"]) == {"start", "check", "encode", "write", "verify"}


@pytest.mark.parametrize("method", ["gptq", "gptq --float-stream", "awq", "smoothquant", "rtn"])
def test_one_block_is_measured_and_nothing_is_written(method: str, llama: Path, tmp_path: Path, run_cli: Run, text_file: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    data = ("--calibration", text_file, *SHORT) if method != "rtn" else ()
    code, out, err = run_cli("plan", llama, "--method", *method.split(), *data, "--json")
    assert code == 0, err
    seconds = out["seconds_by_phase"]
    assert seconds["blocks"] > 0 and (seconds["record"] > 0) == (method != "rtn")
    assert "peak memory" in err and "2 x layers x key-value heads" in err
    assert not list((tmp_path / "here").iterdir())


def test_flags_that_a_method_does_not_have_are_refused(llama: Path, run_cli: Run) -> None:
    assert run_cli("plan", llama, "--method", "rtn", "--damp", "0.1")[0] == 2
    assert run_cli("plan", llama, "--lengths", "many")[0] == 2
    assert run_cli("plan")[0] == 2


def test_cache_memory_counts_windows_heads_and_bytes(tmp_path: Path) -> None:
    config = resolve(str(make_model(tmp_path / "m", "gemma3"))).config()  # windows of 16 tokens in two of three layers
    found = forecast.kv_bytes(config, 100, 3)
    assert found["bfloat16"] == 3 * 2 * 2 * 16 * (16 + 100 + 16) * 2
    assert found["float8 or int8"] * 2 == found["bfloat16"]
    assert found["quantkit int8"] == 3 * Int8Cache.bytes_for(3, 2, 16, 100)


def test_memory_grows_with_what_is_held(llama: Path) -> None:
    loader = Loader(resolve(str(llama)), CPU)
    one, two = (forecast.blocks_room(loader, Load(n, n, 512, 4), "one-pass", 0, True).total for n in (64, 128))
    assert two - one == 4 * 512 * 2 * 64 * (64 + 64 + 128)  # states, normed copies, widest inputs; both streams
    assert forecast.blocks_room(loader, Load(64, 64, 512, 4), "two-pass", 0, True).total < one
    assert forecast.blocks_room(loader, Load(0, 0, 0, 0), "none", 7, True).host == 7


class Reader(HTMLParser):
    """Collects what a page would load, and its table rows."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.rows = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.rows += tag == "tr"
        if tag in ("script", "link", "img", "iframe") or any(name in ("src", "href") or name.startswith("on") for name, _ in attributes):
            self.loads.append(tag)


def test_a_report_shows_every_layer_and_loads_nothing(llama: Path, tmp_path: Path, run_cli: Run, text_file: Path) -> None:
    data = ("--calibration", text_file, *SHORT)
    assert run_cli("gptq", llama, *data, "-o", tmp_path / "out", "--log-file", tmp_path / "log.jsonl", "-q")[0] == 0
    words = (
        "report",
        tmp_path / "out",
        "--html",
        "-o",
        tmp_path / "r.html",
        "--log",
        tmp_path / "log.jsonl",
        "--data",
        text_file,
        "--windows",
        1,
    )
    code, out, err = run_cli(*words, "--json")
    assert code == 0, err
    document, page = out, (tmp_path / "r.html").read_text()
    reader = Reader()
    reader.feed(page)
    assert not reader.loads and "@media(prefers-color-scheme:dark)" in page
    heat = page.split("class=heat>")[1].split("</table>")[0]
    assert [int(n) for n in re.findall(r"<tr><th>(\d+)", heat)] == [0, 1, 2]
    assert all(f"<th>{role}" in heat for role in ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
    worst = max((m for m in document["modules"] if m["error"] is not None), key=lambda m: m["error"])
    assert page.split("Worst modules")[1].index(worst["module"]) < 200
    measured = document["measured"]
    assert f"{measured['perplexity']:.3f}" in page and "peak memory" in page and "quantkit gptq" in page
    assert run_cli(*words)[0] == 2  # the page is there


def test_a_report_of_a_gguf_file_compares_weights_with_the_source(llama: Path, tmp_path: Path, run_cli: Run) -> None:
    assert run_cli("export-gguf", llama, "--type", "Q4_0", "-o", tmp_path / "m.gguf", "-q")[0] == 0
    code, out, err = run_cli("report", tmp_path / "m.gguf", "--no-measure", "--json")
    assert code == 0, err
    errors = {m["module"]: m["error"] for m in out["modules"]}
    assert 0.03 < errors["model.layers.1.mlp.down_proj"] < 0.2 and "weights" in out["error_means"]


def test_a_log_that_is_none_is_one_error(llama: Path, tmp_path: Path, run_cli: Run) -> None:
    (tmp_path / "log").write_text('{"event": "module", "peak_memory": 1}\n')
    code, _, err = run_cli("report", llama, "--log", tmp_path / "log")
    assert code == 1 and "log:1 is no event" in err
