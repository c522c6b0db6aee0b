"""Replay equals the model's own forward for every family; groups are found; statistics are right in both schedules."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from conftest import FAMILIES, make_model, make_multimodal

from quantkit.calibrate import record, trace_groups, view_block
from quantkit.loader import Loader
from quantkit.perplexity import Text, Window, final_states, logits
from quantkit.schedules import SCHEDULES
from quantkit.source import resolve
from quantkit.tensors import LayerStats

CPU = torch.device("cpu")


def load(path: Path) -> Loader:
    return Loader(resolve(str(path)), CPU)


def build(family: str, path: Path) -> Path:
    return make_multimodal(path) if family == "multimodal" else make_model(path, family)


@pytest.mark.parametrize("family", [*FAMILIES, "multimodal"])
def test_replay_equals_forward(family: str, tmp_path: Path) -> None:
    import transformers

    path = build(family, tmp_path / family)
    ids = torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(1))
    loader = load(path)
    states = final_states(loader, Text([Window(row, 1) for row in ids], "windows", 40, 0, False))
    loader.materialize(loader.outer_names(head=True))
    ours = logits(loader, ids, states[0])
    cls = transformers.Gemma3ForConditionalGeneration if family == "multimodal" else transformers.AutoModelForCausalLM
    model = cls.from_pretrained(str(path), dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(input_ids=ids, use_cache=False).logits
    scale = float(theirs.abs().max())
    assert scale > 1e-3, "a model whose logits are all zero proves nothing"
    assert float((ours - theirs).abs().max()) <= 1e-5 * max(scale, 1.0)


GROUPS = {
    "llama": [
        {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"},
        {"self_attn.o_proj"},
        {"mlp.gate_proj", "mlp.up_proj"},
        {"mlp.down_proj"},
    ],
    "phi3": [{"self_attn.qkv_proj"}, {"self_attn.o_proj"}, {"mlp.gate_up_proj"}, {"mlp.down_proj"}],
    "gpt2": [{"attn.c_attn"}, {"attn.c_proj"}, {"mlp.c_fc"}, {"mlp.c_proj"}],
}


@pytest.mark.parametrize("family", GROUPS)
def test_groups_are_found_by_tracing(family: str, tmp_path: Path) -> None:
    loader = load(make_model(tmp_path / family, family))
    recording = record(loader, [torch.randint(3, 250, (1, 16))])
    loader.materialize(loader.block_names(0))
    groups = trace_groups(loader.blocks[0], recording.probe_state, recording.probe_calls[0])
    assert [set(group.names) for group in groups] == GROUPS[family]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("paired", [0, 2])
def test_schedules_see_every_token_and_leave_the_outputs(schedule: str, paired: int, tmp_path: Path) -> None:
    loader = load(make_model(tmp_path / "m"))
    batches = list(torch.randint(3, 250, (6, 32), generator=torch.Generator().manual_seed(0)).split(2))
    recording = record(loader, batches, paired)
    loader.materialize(loader.block_names(0))
    expected = [view_block(loader, recording, 0).replay(loader.blocks[0], state, i) for i, state in enumerate(recording.states)]
    seen: list[torch.Tensor] = []
    module = loader.blocks[0].get_submodule("mlp.down_proj")
    handle = module.register_forward_pre_hook(lambda m, args: seen.append(args[0].reshape(-1, args[0].shape[-1])))
    for i, state in enumerate(recording.states):
        view_block(loader, recording, 0).replay(loader.blocks[0], state, i)
    handle.remove()
    rows = torch.cat([x for x in seen if x.shape[0] > 8])
    view = view_block(loader, recording, 0)
    view.exact = copy.deepcopy(view.module) if recording.exact else None
    for group, stats in SCHEDULES[schedule](view, recording.states, recording.exact, CPU):
        assert stats.tokens == 6 * 32
        assert stats.paired == paired * 2 * 32
        if group.names == ("mlp.down_proj",):
            torch.testing.assert_close(stats.mean(), rows.T @ rows / len(rows), rtol=1e-4, atol=1e-5)
            if paired:  # nothing was changed in this block, so nothing drifted
                assert float(stats.drift.abs().max()) == 0.0
    for state, wanted in zip(recording.states, expected, strict=True):
        torch.testing.assert_close(state, wanted, rtol=0, atol=0)


def test_one_pass_shows_later_groups_what_earlier_ones_became(tmp_path: Path) -> None:
    loader = load(make_model(tmp_path / "m"))
    recording = record(loader, [torch.randint(3, 250, (2, 16))], paired=1)
    loader.materialize(loader.block_names(0))
    view = view_block(loader, recording, 0)
    view.exact = copy.deepcopy(view.module) if recording.exact else None
    drifts = {}
    for group, stats in SCHEDULES["one-pass"](view, recording.states, recording.exact, CPU):
        drifts[group.names[0]] = float(stats.drift.abs().max())
        if group.names == ("self_attn.o_proj",):
            view.module.get_submodule("self_attn.o_proj").weight.data.mul_(0.5)
    assert drifts["self_attn.q_proj"] == drifts["self_attn.o_proj"] == 0.0
    assert drifts["mlp.gate_proj"] > 0.0 and drifts["mlp.down_proj"] > 0.0
    assert not torch.equal(recording.states[0], recording.exact[0])


def test_a_failure_in_the_middle_ends_all_lanes(tmp_path: Path) -> None:
    import threading

    loader = load(make_model(tmp_path / "m"))
    recording = record(loader, list(torch.randint(3, 250, (4, 16)).split(1)))
    loader.materialize(loader.block_names(0))
    view = view_block(loader, recording, 0)
    view.exact = copy.deepcopy(view.module) if recording.exact else None
    before = threading.active_count()
    groups = SCHEDULES["one-pass"](view, recording.states, [], CPU)
    next(groups)
    assert threading.active_count() == before + 4
    groups.close()
    assert threading.active_count() == before


def test_statistics_add_up_and_skip_what_is_not_finite() -> None:
    x = torch.randn(100, 300, generator=torch.Generator().manual_seed(0))
    whole, left, right = LayerStats(300), LayerStats(300), LayerStats(300)
    whole.add(x)
    left.add(x[:30])
    right.add(x[30:])
    left.merge(right)
    assert left.tokens == whole.tokens == 100
    torch.testing.assert_close(left.mean(), whole.mean(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole.mean(), x.T @ x / 100, rtol=1e-4, atol=1e-5)
    bad = x.clone()
    bad[3, 5] = torch.nan
    partly = LayerStats(300)
    partly.add(bad)
    assert partly.nonfinite == 1 and bool(torch.isfinite(partly.mean()).all())
