"""Rows for every linear, exactly once, with the reason for each exception."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import FAMILIES, make_model

from quantkit.errors import UsageError
from quantkit.formats import FORMATS
from quantkit.loader import Loader
from quantkit.methods._options import GptqOptions
from quantkit.plan import make_plan, parse_overrides
from quantkit.source import resolve

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_has_one_place(family: str, tmp_path: Path) -> None:
    loader = Loader(resolve(str(make_model(tmp_path / "m", family))), CPU)
    plan = make_plan(loader, "gptq", GptqOptions(group_size=16), FORMATS["gptq"], "auto", strict=True)
    names = set(loader.source.store.names())
    assert set(plan.kept) | set(plan.layouts) == names and not set(plan.kept) & set(plan.layouts)
    linears = {f"{loader.block_name(i)}.{n}" for i in range(len(loader.blocks)) for n in loader.linears(i)}
    assert sorted(row.module for row in plan.rows) == sorted(linears)
    for row in plan.packed:
        module = loader.model.get_submodule(row.module)
        shape = tuple(module.weight.shape)
        assert row.shape == (shape[::-1] if row.transposed else shape)
    assert 4.0 < plan.bits_per_weight < 6.0 and plan.after < plan.before


def test_widths_that_cannot_be_packed_are_kept(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", hidden_size=72, num_attention_heads=3, num_key_value_heads=3, intermediate_size=96)
    loader = Loader(resolve(str(model)), CPU)
    plan = make_plan(loader, "gptq", GptqOptions(group_size=16), FORMATS["gptq"], "auto", strict=False)
    kept = {row.module.split(".")[-1]: row.reason for row in plan.rows if row.method == "keep"}
    assert set(kept) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
    assert all("no known group divides 72" in reason for reason in kept.values())
    config = FORMATS["gptq"].config(plan.rows, {"quantizer": "x"}, True)
    assert config["dynamic"]["-:^model\\.layers\\.0\\.self_attn\\.q_proj$"] == {}


def test_overrides_are_parsed_or_refused() -> None:
    assert parse_overrides(["a=b=bits:8,group:-1,sym:no"]) == [("a=b", {"bits": 8, "group": -1, "symmetric": False})]
    for text in ("x", "x=", "=bits:4", "x=bits", "x=bits:four", "x=sym:maybe", "x=dtype:8", "(=bits:4"):
        with pytest.raises(UsageError, match="is not REGEX"):
            parse_overrides([text])
