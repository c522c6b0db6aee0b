"""The type of every tensor is the one that llama-quantize chooses."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from gguf_files import Shape, write_gguf

from quantkit.errors import PlanError, UsageError
from quantkit.mixture import Facts, Policy, Wishes, choose, load_policy, order, parse_tensor_types, policies

SHAPES = {
    "dense": Shape(layers=8),
    "many layers": Shape(layers=17),
    "grouped": Shape(kv=2, layers=6),
    "half grouped": Shape(kv=4),
    "one key head": Shape(kv=1),
    "tied": Shape(tied=True),
    "tied, grouped": Shape(tied=True, kv=2, layers=4),
    "eight experts": Shape(experts=8, layers=4),
    "four experts": Shape(experts=4, layers=9, kv=2),
    "rows of 288": Shape(hidden=288, ff=576, heads=9, kv=3),
    "rows of 320 and 144": Shape(hidden=320, ff=144, heads=5, kv=5),
    "qwen2": Shape(arch="qwen2", kv=2),
    "phi3": Shape(arch="phi3", layers=6),
    "gemma2": Shape(arch="gemma2", tied=True, layers=4),
    "eighty layers": Shape(layers=80, kv=2, ff=256),
}


def facts_of(shape: Shape) -> Facts:
    return Facts(shape.arch, shape.layers, shape.heads, shape.kv, shape.experts, shape.tied)


def chosen(shape: Shape, name: str, wishes: Wishes | None = None) -> dict[str, str]:
    choices = choose(shape.tensors(), load_policy(name), facts_of(shape), wishes or Wishes(imatrix=name == "Q2_K_S"))
    return {choice.name: choice.type for choice in choices}


def theirs(path: Path, file_type: int, **settings: object) -> dict[str, str]:
    from cyllama.llama import llama_cpp

    params = llama_cpp.LlamaModelQuantizeParams()
    params.ftype, params.nthread = file_type, 1
    for key, value in settings.items():
        setattr(params, key, value)
    out = path.with_suffix(".out.gguf")
    llama_cpp.model_quantize(str(path), str(out), params)
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(str(out)).tensors}


@pytest.mark.parametrize("name", SHAPES)
def test_types_are_llama_quantizes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("cyllama")
    shape, path = SHAPES[name], tmp_path / "in.gguf"
    write_gguf(path, shape)
    names = ["Q3_K_M", "Q4_K_M"] if shape.layers == 80 else [n for n in policies() if n not in ("F32", "Q2_K_S")]
    if not shape.experts:
        names = [n for n in names if n != "MXFP4_MOE"]
    for policy in names:
        try:
            expected = theirs(path, load_policy(policy).file_type)
        except RuntimeError:  # it has no fallback for rows that no block of 32 divides; ours is F16
            assert shape.ff % 32 and "F16" in chosen(shape, policy).values()
            continue
        assert chosen(shape, policy) == expected, policy


def test_overrides_are_llama_quantizes(tmp_path: Path) -> None:
    pytest.importorskip("cyllama")
    path = tmp_path / "in.gguf"
    write_gguf(path, SHAPES["grouped"])
    assert chosen(SHAPES["grouped"], "Q4_K_M", Wishes(pure=True)) == theirs(path, 15, pure=True)
    kinds = {"Q8_0": 8, "Q5_K": 13}
    wishes = Wishes(output="Q8_0", embedding="Q5_K")
    assert chosen(SHAPES["grouped"], "Q4_K_M", wishes) == theirs(path, 15, output_tensor_type=8, token_embedding_type=kinds["Q5_K"])


def test_order_is_llama_quantizes(tmp_path: Path) -> None:
    pytest.importorskip("cyllama")
    path = tmp_path / "in.gguf"
    write_gguf(path, SHAPES["many layers"])
    assert list(theirs(path, 15)) == order(list(SHAPES["many layers"].tensors()))


def test_a_tensor_type_wins_and_does_not_count() -> None:
    shape = Shape(layers=16)
    plain = chosen(shape, "Q4_K_M")
    other = chosen(shape, "Q4_K_M", Wishes(tensor_types=parse_tensor_types((r"blk\.0\.ffn_down=q8_0",))))
    assert other["blk.0.ffn_down.weight"] == "Q8_0"
    assert plain["blk.1.ffn_down.weight"] == "Q6_K"
    assert other["blk.2.ffn_down.weight"] == "Q6_K" != plain["blk.2.ffn_down.weight"]


def test_a_fallback_says_why_and_what_was_wanted() -> None:
    choices = {c.name: c for c in choose(SHAPES["rows of 320 and 144"].tensors(), load_policy("Q4_K_M"), facts_of(Shape()), Wishes())}
    assert (choices["blk.0.attn_q.weight"].type, choices["blk.0.attn_q.weight"].wanted) == ("Q5_0", "Q4_K")
    assert "320 columns are no multiple of 256" in choices["blk.0.attn_q.weight"].reason
    assert choices["blk.0.ffn_down.weight"].type == "F16"


def test_what_cannot_be_is_refused() -> None:
    shape = SHAPES["rows of 288"]
    with pytest.raises(PlanError, match="--embedding-type Q4_K: blocks of 256 do not divide the 288 columns"):
        choose(shape.tensors(), load_policy("Q4_0"), facts_of(shape), Wishes(embedding="Q4_K"))
    with pytest.raises(PlanError, match="importance matrix"):
        choose(Shape().tensors(), load_policy("Q2_K_S"), facts_of(Shape()), Wishes())
    with pytest.raises(UsageError, match="Known: BF16, F16"):
        load_policy("Q9_K")
    with pytest.raises(UsageError, match="unknown type 'Q9'"):
        parse_tensor_types(("ffn=Q9",))
    with pytest.raises(UsageError, match="REGEX=TYPE"):
        parse_tensor_types(("ffn",))


@pytest.mark.parametrize("text", ["[types]\nfile_type = 1\nbase = 'Q4_K'\nattn_v = ['sometimes: Q6_K']", "[types]\nbase = 'Q4_K'", "x = ["])
def test_a_bad_recipe_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"mine\.toml"):
        load_policy(str(path))


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[types]\nfile_type = 15\nbase = 'Q4_K'\nffn_down = ['first-2: Q8_0']\n")
    policy = load_policy(str(path))
    assert isinstance(policy, Policy)
    types = {c.name: c.type for c in choose(Shape().tensors(), policy, facts_of(Shape()), Wishes())}
    assert [types[f"blk.{i}.ffn_down.weight"] for i in range(3)] == ["Q8_0", "Q8_0", "Q4_K"]
