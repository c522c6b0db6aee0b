"""Inference: packed linears, attention over pages, caches, decoding; each against a plain formula or transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quantkit.backends.cpu.attend import attend
from quantkit.backends.cpu.linear import packed_linear
from quantkit.codecs import CODECS
from quantkit.codecs.affine import Affine
from quantkit.codecs.bnb import Bnb4
from quantkit.codecs.float8 import Float8
from quantkit.codecs.fp4 import Fp4
from quantkit.errors import UsageError
from quantkit.infer import cache_int8
from quantkit.infer.attention import Look, Pages, State, attend_reference, sdpa
from quantkit.infer.cache import PagedCache
from quantkit.infer.cache_int8 import Int8Cache
from quantkit.infer.cache_plain import PlainCache
from quantkit.infer.decode import Engine, Request
from quantkit.infer.linear import linear_from, planes_of, planes_reference, values_of
from quantkit.infer.model import Runner, _block_planes
from quantkit.infer.sampling import Sampling, accept
from quantkit.infer.speculative import DraftModel, Length, Lookup
from quantkit.loader import Loader
from quantkit.methods._rounding import make_search, round_weight
from quantkit.source import resolve
from quantkit.tensors import QuantTensor

Run = Callable[..., Any]
ATTEND = {"reference": attend_reference, "cpu": attend(2)}


def rounded(bits: int, group: int, symmetric: bool, out: int = 96, columns: int = 128, seed: int = 0) -> QuantTensor:
    weight = torch.randn(out, columns, generator=torch.Generator().manual_seed(seed))
    return round_weight(weight, Affine(bits, group, symmetric), make_search(symmetric, True, True))


# --- linears


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [16, 32, 64, -1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_planes_hold_the_weight_and_kernels_multiply_it(bits: int, group: int, symmetric: bool) -> None:
    tensor = rounded(bits, group, symmetric)
    planes = planes_of(tensor)
    assert planes is not None
    assert torch.equal(values_of(planes, slice(None)), tensor.dequantize())
    stored = bits * 128 * 96 / 8 + planes.scale.nbytes
    assert planes.nbytes <= stored + (0 if symmetric else planes.scale.nbytes / 2)
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(1))
    exact = (x.double() @ tensor.dequantize().double().T).float()
    for make in (planes_reference, packed_linear(1), packed_linear(2)):
        # where inputs become 16-bit integers, half a step of theirs times the weights is what a sum may be off by
        rounding = x.abs().amax() / 65024 * tensor.dequantize().abs().sum(1)
        assert ((make(planes)(x) - exact).abs() <= 1e-5 * exact.abs() + 1e-4 + rounding).all()


def test_a_row_does_not_depend_on_the_others() -> None:
    planes = planes_of(rounded(4, 64, False, 4096, 512))
    assert planes is not None
    run, x = packed_linear(2)(planes), torch.randn(11, 512)
    whole = run(x)
    for rows in (slice(0, 1), slice(3, 5), slice(2, 9), slice(10, 11)):
        assert torch.equal(run(x[rows].contiguous()), whole[rows])


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_ggml_blocks_run_from_planes(name: str) -> None:
    codec, weight = CODECS[name], torch.randn(40, 512, generator=torch.Generator().manual_seed(0))
    data = codec.encode(weight)
    planes = _block_planes(data, codec)
    assert planes is not None and planes.nbytes <= 1.17 * data.nbytes + 64
    exact = codec.decode(data)
    torch.testing.assert_close(values_of(planes, slice(None)), exact, rtol=2e-3, atol=2e-3 * float(exact.abs().max()))
    x = torch.randn(3, 512)
    rounding = x.abs().amax() / 65024 * exact.abs().sum(1)
    assert ((packed_linear(1)(planes)(x) - x @ values_of(planes, slice(None)).T).abs() <= 1e-3 + rounding).all()
    assert _block_planes(CODECS["IQ4_NL"].encode(weight), CODECS["IQ4_NL"]) is None


CODES = [Float8("tensor"), Float8("channel"), Float8("block"), Fp4("mxfp4"), Fp4("nvfp4"), Bnb4("nf4"), Bnb4("fp4", False)]


@pytest.mark.parametrize("codec", CODES, ids=lambda c: c.label)
def test_other_codecs_run_exactly_a_tile_at_a_time(codec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.infer.linear.TILE", 128 * 192)
    tensor = codec.round(torch.randn(320, 192), True, None)
    x, bias = torch.randn(2, 3, 192), torch.randn(320)
    linear = linear_from(tensor, bias, packed_linear(1))
    torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, tensor.dequantize(), bias), rtol=1e-5, atol=1e-5)
    assert linear.nbytes < 0.35 * 4 * 320 * 192


def test_scattered_columns_run_from_planes() -> None:
    tensor = rounded(4, 32, False)
    index = torch.randperm(128, generator=torch.Generator().manual_seed(3)).div(32, rounding_mode="floor").to(torch.int32)
    scattered = QuantTensor(tensor.codes, tensor.params, tensor.codec, index)
    x = torch.randn(5, 128)
    linear = linear_from(scattered, None, packed_linear(1))
    rounding = x.abs().amax() / 65024 * scattered.dequantize().abs().sum(1)
    assert ((linear(x) - x @ scattered.dequantize().T).abs() <= 1e-4 + rounding).all()


# --- attention


def formula(q: Any, k: Any, v: Any, position: int, window: int, scale: float, softcap: float) -> torch.Tensor:
    """Attention in float64, the whole matrix at once: q [heads, rows, size], k and v [key-value heads, tokens, size]."""
    repeat = q.shape[0] // k.shape[0]
    k, v = (part.double().repeat_interleave(repeat, 0) for part in (k, v))
    scores = q.double() @ k.transpose(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    here, token = position + torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    hidden = (token > here) | ((token <= here - window) if window else torch.zeros_like(token > here))
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).float()


def paged(k: torch.Tensor, v: torch.Tensor, tokens: int, seed: int = 0) -> tuple[Pages, torch.Tensor]:
    heads, count, size = k.shape
    pages = -(-count // tokens)
    table = torch.randperm(pages + 3, generator=torch.Generator().manual_seed(seed))[:pages]
    keys, values = torch.full((pages + 3, heads, size, tokens), 7.0), torch.full((pages + 3, heads, tokens, size), 7.0)
    for i in range(count):
        keys[table[i // tokens], :, :, i % tokens], values[table[i // tokens], :, i % tokens] = k[:, i], v[:, i]
    return Pages(keys, values), table


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["reference", "cpu"]), heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]), size=st.sampled_from([16, 24, 64]),
    before=st.integers(0, 70), rows=st.integers(1, 40), window=st.sampled_from([0, 1, 7, 33]), softcap=st.sampled_from([0.0, 5.0]),
)  # fmt: skip
def test_tiled_attention_is_the_formula(
    name: str, heads: tuple[int, int], size: int, before: int, rows: int, window: int, softcap: float
) -> None:
    generator = torch.Generator().manual_seed(before * 41 + rows)
    q = torch.randn(heads[0], rows, size, generator=generator)
    k, v = (torch.randn(heads[1], before + rows, size, generator=generator) for _ in range(2))
    pages, table = paged(k, v, 16)
    state = State.fresh(heads[0], rows, size)
    ATTEND[name](q, pages, table, (0, before + rows), before, Look(window, size**-0.5, softcap), state)
    torch.testing.assert_close(state.result(), formula(q, k, v, before, window, size**-0.5, softcap), rtol=1e-5, atol=1e-5)


def test_a_query_row_does_not_depend_on_the_others() -> None:
    q, k, v = torch.randn(4, 50, 32), torch.randn(2, 90, 32), torch.randn(2, 90, 32)
    pages, table = paged(k, v, 16)
    states = [State.fresh(4, 50, 32), State.fresh(4, 1, 32)]
    ATTEND["cpu"](q, pages, table, (0, 90), 40, Look(0, 0.2, 0.0), states[0])
    ATTEND["cpu"](q[:, 17:18].contiguous(), pages, table, (0, 58), 57, Look(0, 0.2, 0.0), states[1])
    assert torch.equal(states[0].result()[:, 17], states[1].result()[:, 0])


def test_sdpa_is_the_formula() -> None:
    q, k, v = torch.randn(4, 9, 32), torch.randn(2, 30, 32), torch.randn(2, 30, 32)
    for window in (0, 5):
        torch.testing.assert_close(sdpa(q, k, v, 21, Look(window, 0.2, 0.0)), formula(q, k, v, 21, window, 0.2, 0.0), rtol=1e-5, atol=1e-5)


# --- caches

SHAPE = (2, 2, 16)  # layers, key-value heads, size


class PagedMachine(RuleBasedStateMachine):
    """Random lives of sequences in a paged cache, beside a record of what each was given."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PagedCache(*SHAPE, ATTEND["reference"])
        self.known: list[tuple[Any, list[torch.Tensor]]] = []
        self.generator = torch.Generator().manual_seed(0)

    @rule()
    def begin(self) -> None:
        if len(self.known) < 5:
            self.known.append((self.cache.open(), []))

    @precondition(lambda self: self.known)
    @rule(which=st.integers(0, 9), count=st.integers(1, 37))
    def grow(self, which: int, count: int) -> None:
        held, record = self.known[which % len(self.known)]
        segment = self.cache.extend(held, count)
        new = torch.randn(count, *SHAPE[:1], 2, *SHAPE[1:], generator=self.generator)
        record += list(new)
        q = torch.randn(4, count, SHAPE[2], generator=self.generator)
        for layer in range(SHAPE[0]):
            k, v = (new[:, layer, i].transpose(0, 1) for i in range(2))
            out = self.cache.attend(layer, segment, q, k, v, Look(0, 0.25, 0.0))
            whole = torch.stack(record)[:, layer]
            keys, values = (whole[:, i].transpose(0, 1) for i in range(2))
            torch.testing.assert_close(out, formula(q, keys, values, segment.start, 0, 0.25, 0.0), rtol=1e-4, atol=1e-5)
        self.cache.commit(segment)

    @precondition(lambda self: self.known)
    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        held, record = self.known[which % len(self.known)]
        if len(self.known) < 5:
            self.known.append((self.cache.fork(held), list(record)))

    @precondition(lambda self: self.known)
    @rule(which=st.integers(0, 9), share=st.floats(0, 1))
    def roll_back(self, which: int, share: float) -> None:
        held, record = self.known[which % len(self.known)]
        self.cache.truncate(held, int(share * held.length))
        del record[held.length :]

    @precondition(lambda self: self.known)
    @rule(which=st.integers(0, 9))
    def end(self, which: int) -> None:
        held, _ = self.known.pop(which % len(self.known))
        self.cache.close(held)

    @invariant()
    def counts_are_true(self) -> None:
        holders: dict[int, int] = {}
        for held, record in self.known:
            assert held.length == len(record) and len(held.pages) >= -(-held.length // 16)
            for page in held.pages:
                holders[page] = holders.get(page, 0) + 1
        pool = self.cache.pool
        assert {page: count for page, count in enumerate(pool.references) if count} == holders
        assert len(pool.free) == len(set(pool.free)) == len(pool.references) - len(holders)


TestPagedCache = PagedMachine.TestCase
TestPagedCache.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def fill(cache: Any, tokens: int, chunk: int, seed: int = 0) -> tuple[Any, torch.Tensor]:
    """Give a cache `tokens` tokens, `chunk` at a time; return the sequence and the last layer's outputs."""
    layers, heads, size = cache.count, cache.heads, cache.size
    generator = torch.Generator().manual_seed(seed)
    new = torch.randn(tokens, layers, 2, heads, size, generator=generator)
    q = torch.randn(2 * heads, tokens, size, generator=generator)
    held, parts = cache.open(), []
    for at in range(0, tokens, chunk):
        rows = slice(at, min(at + chunk, tokens))
        segment = cache.extend(held, rows.stop - at)
        for layer in range(layers):
            out = cache.attend(layer, segment, q[:, rows], *(new[rows, layer, i].transpose(0, 1) for i in range(2)), Look(0, 0.125, 0.0))
        parts.append(out)
        cache.commit(segment)
    return held, torch.cat(parts, 1)


@pytest.mark.parametrize("kind", [PlainCache, PagedCache, Int8Cache])
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_chunks_and_single_tokens_give_the_same(kind: Any, name: str) -> None:
    results = [fill(kind(1, 2, 64, ATTEND[name]), 150, chunk)[1] for chunk in (1, 37, 150)]
    exact = name == "cpu"  # every row by itself
    for other in results[1:]:
        assert torch.equal(other, results[0]) if exact else torch.allclose(other, results[0], rtol=1e-4, atol=1e-5)
    plain = fill(PlainCache(1, 2, 64, ATTEND[name]), 150, 150)[1]
    assert (results[0] - plain).norm() / plain.norm() < (2e-2 if kind is Int8Cache else 1e-5)


@pytest.mark.parametrize("whole", [None, sdpa])
def test_caches_serve_both_kinds_of_attention(whole: Any) -> None:
    plain = fill(PlainCache(2, 2, 16, attend_reference), 100, 9)[1]
    for kind in (PlainCache, PagedCache, Int8Cache):
        got = fill(kind(2, 2, 16, attend_reference, whole), 100, 9)[1]
        assert (got - plain).norm() / plain.norm() < (2e-2 if kind is Int8Cache else 1e-5)


@pytest.mark.parametrize(("size", "heads"), [(64, 3), (128, 2)])
def test_memory_is_what_the_formula_says(size: int, heads: int) -> None:
    for kind in (PagedCache, Int8Cache):
        cache = kind(3, heads, size, attend_reference)
        held = cache.open()
        cache.commit(cache.extend(held, 4096))
        tail = 0 if held.extra is None else held.extra.nbytes
        assert cache.pool.nbytes + tail == kind.bytes_for(3, heads, size, 4096)
    assert Int8Cache.bytes_for(3, heads, size, 4096) <= 0.53 * (4096 * 3 * heads * size * 2 * 2)


def test_continuations_share_their_prompt() -> None:
    cache = PagedCache(1, 2, 16, attend_reference)
    held, _ = fill(cache, 512, 64)
    alone = cache.pool.used
    others = [cache.fork(held) for _ in range(8)]
    for other in others:
        cache.commit(cache.extend(other, 10))
    assert cache.pool.used < 1.3 * alone
    for other in [*others, held]:
        cache.close(other)
    assert cache.pool.used == 0


def test_a_channel_of_keys_far_from_the_others_keeps_its_detail() -> None:
    """Qwen 2's key bias: one scale per token loses everything else (0.15), one per channel much of the channel itself (0.038)."""
    generator = torch.Generator().manual_seed(38)
    keys, queries = torch.randn(64, 16, generator=generator), torch.randn(32, 16, generator=generator) * 2
    keys[:, 0] += 100
    cache = Int8Cache(1, 1, 16, attend_reference)
    page = cache._make(1)
    cache_int8._encode(page, 0, torch.stack([keys, torch.zeros(64, 16)])[:, None])
    found = cache_int8._decode(page, 0)[0][0].T
    exact, rounded = ((queries @ k.T / 4).softmax(-1) for k in (keys, found))
    assert float((exact - rounded).abs().sum(-1).mean() / 2) < 0.01
    held, pages = cache.open(), cache.pool
    segment = cache.extend(held, 64)
    for attend_ in ATTEND.values():
        cache.operation = attend_
        cache.attend(0, segment, queries[None, :1].expand(1, 64, 16).contiguous(), keys[None], torch.eye(64, 16)[None], Look(0, 0.25, 0.0))
        cache.commit(segment)
        last = cache.extend(held, 1)
        values = cache.attend(0, last, queries[None, :1].contiguous(), keys[None, :1], torch.zeros(1, 1, 16), Look(0, 0.25, 0.0))
        wanted = torch.cat([queries[:1] @ keys.T, queries[:1] @ keys[:1].T], 1).div(4).softmax(-1)[:, :64] @ torch.eye(64, 16)
        assert (values[0] - wanted).abs().max() < 0.02
    assert pages.used == 1


def test_a_rollback_in_8_bits_keeps_what_it_can() -> None:
    cache = Int8Cache(1, 2, 64, attend_reference)
    held, _ = fill(cache, 100, 100)
    used = cache.pool.used
    cache.truncate(held, 80)
    assert cache.pool.used == used == 1
    cache.truncate(held, 50)
    assert cache.pool.used == 0 and held.length == 50
    cache.close(held)


# --- models


def runner_of(folder: Path, compute: str = "fast", **how: Any) -> Runner:
    return Runner(Loader(resolve(str(folder)), torch.device("cpu")), 2, compute, **how)


def all_logits(runner: Runner, ids: list[int], kind: str = "paged", chunk: int = 1 << 20) -> torch.Tensor:
    cache = runner.cache(kind)
    held, parts = cache.open(), []
    for at in range(0, len(ids), chunk):
        part = ids[at : at + chunk]
        parts.append(runner.step(part, [cache.extend(held, len(part))], cache, list(range(len(part)))))
    return torch.cat(parts)


IDS = torch.randint(3, 250, (70,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_runs_as_transformers_runs_it(family: str, run_cli: Run, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", family, dtype=torch.bfloat16)
    form = "gptq" if family == "gpt2" else "compressed-tensors"
    assert run_cli("rtn", model, "-o", tmp_path / "q", "--group-size", 32, "--format", form, "-q")[0] == 0
    loader = Loader(resolve(str(tmp_path / "q")), torch.device("cpu"))
    loader.materialize(loader.all_names())
    with torch.no_grad():
        theirs = loader.model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    size = float(theirs.abs().max())
    exact, fast = (runner_of(tmp_path / "q", compute) for compute in ("exact", "fast"))
    for kind, chunk in (("paged", 1 << 20), ("plain", 1), ("paged", 23)):
        assert (all_logits(exact, IDS, kind, chunk) - theirs).abs().max() < 2e-5 * size
        assert (all_logits(fast, IDS, kind, chunk) - theirs).abs().max() < 5e-4 * size  # inputs of 16 bits
    # eight-bit keys and values move the logits a little
    assert torch.nn.functional.cosine_similarity(all_logits(fast, IDS, "int8", 23), theirs, dim=-1).min() > 0.99
    packed = sum(p.stat().st_size for p in (tmp_path / "q").glob("*.safetensors"))
    positions = sum(p.nbytes // 2 for name, p in fast.model.named_parameters() if "wpe" in name or "embed_positions" in name)
    assert fast.nbytes < 1.15 * packed + positions + 8192


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16", "BF16"])
def test_gguf_files_run(kind: str, run_cli: Run, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", "llama")
    assert run_cli("export-gguf", model, "-o", tmp_path / "a.gguf", "--type", kind, "-q", "--pre-tokenizer", "gpt-2")[0] == 0
    loader = Loader(resolve(str(tmp_path / "a.gguf")), torch.device("cpu"))
    loader.materialize(loader.all_names())
    with torch.no_grad():
        theirs = loader.model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    for compute in ("exact", "fast"):
        ours = all_logits(runner_of(tmp_path / "a.gguf", compute), IDS)
        assert (ours - theirs).abs().max() < (1e-4 if compute == "exact" else 1e-2) * theirs.abs().max()


def test_rounded_inputs_are_honoured(run_cli: Run, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", "llama")
    words = ("--bits", 8, "--group-size", -1, "--activations", "dynamic", "-q")
    assert run_cli("rtn", model, "-o", tmp_path / "q", *words)[0] == 0
    loader = Loader(resolve(str(tmp_path / "q")), torch.device("cpu"))
    loader.materialize(loader.all_names())
    seen: dict[str, list[torch.Tensor]] = {}
    ours = runner_of(tmp_path / "q")
    for tag, model in (("theirs", loader.model), ("ours", ours.model)):
        layer = model.model.layers[0].mlp.down_proj
        layer.register_forward_hook(lambda module, args, output, tag=tag: seen.setdefault(tag, []).append(output.reshape(-1, 64)))
    with torch.no_grad():
        loader.model(input_ids=torch.tensor([IDS]), use_cache=False)
    all_logits(ours, IDS)
    difference = (seen["ours"][0] - seen["theirs"][0]).abs().amax(1)  # a last bit may round an input to its other neighbour
    assert difference.median() < 1e-5 and ours.model.model.layers[0].mlp.down_proj.inputs is not None


def test_a_head_of_8_bits_is_close(run_cli: Run, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", "llama", dtype=torch.bfloat16)
    plain, small = runner_of(model), runner_of(model, head=8)
    a, b = all_logits(plain, IDS), all_logits(small, IDS)
    assert 0 < (a - b).abs().max() < 0.02 * a.abs().max()


@pytest.fixture
def quantized(tmp_path: Path, run_cli: Run) -> Path:
    model = make_model(tmp_path / "m", "llama", dtype=torch.bfloat16)
    assert run_cli("rtn", model, "-o", tmp_path / "q", "--group-size", 32, "-q")[0] == 0
    return tmp_path / "q"


def texts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 250, (5 + 7 * i % 60,), generator=generator).tolist() for i in range(count)]


def outputs(
    runner: Runner, prompts: list[list[int]], kind: str = "paged", batch: int = 32, drafter: Any = None, **how: Any
) -> list[list[int]]:
    tokenizer = runner.loader.source.tokenizer()
    engine = Engine(runner, runner.cache(kind), tokenizer, batch, chunk=how.pop("chunk", 256))
    engine.ends = set()
    requests = [Request(prompt, how.get("limit", 20), drafter=drafter() if drafter else None) for prompt in prompts]
    engine.run(requests)
    engine.cache.clear()
    assert engine.cache.pool.used == 0, "no page is left"
    return [request.output for request in requests]


@pytest.mark.parametrize("kind", ["paged", "int8", "plain"])
def test_batches_chunks_and_drafts_give_the_same_tokens(kind: str, quantized: Path) -> None:
    runner, prompts = runner_of(quantized), texts(10)
    alone = [outputs(runner, [prompt], kind)[0] for prompt in prompts]
    assert outputs(runner, prompts, kind) == alone
    assert outputs(runner, prompts, kind, batch=3, chunk=11) == alone
    assert outputs(runner, prompts, kind, drafter=Lookup) == alone
    small = runner_of(quantized)
    cache = small.cache("paged")
    assert outputs(runner, prompts, kind, drafter=lambda: DraftModel(small, cache)) == alone
    assert cache.pool.used == 0


def test_a_thousand_requests_leave_no_page(quantized: Path) -> None:
    runner = runner_of(quantized)
    cache = runner.cache("paged")
    generator = torch.Generator().manual_seed(0)
    held = []
    for _ in range(1000):
        prompt = torch.randint(3, 8, (int(torch.randint(1, 60, (1,), generator=generator)),), generator=generator).tolist()
        one = cache.open(prompt)
        cache.commit(cache.extend(one, len(prompt) - one.length))
        cache.remember(one, prompt)
        held.append(one)
        if len(held) > 6:
            cache.close(held.pop(int(torch.randint(0, len(held), (1,), generator=generator))))
    for one in held:
        cache.close(one)
    cache.clear()
    assert cache.pool.used == 0


def test_a_shared_prompt_is_computed_once(quantized: Path) -> None:
    runner = runner_of(quantized)
    system = torch.randint(3, 250, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [system + tail for tail in texts(6, seed=2)]
    alone = [outputs(runner, [prompt], limit=6)[0] for prompt in prompts]
    for batch in (1, 4, 32):
        engine = Engine(runner, runner.cache("paged"), runner.loader.source.tokenizer(), batch)
        engine.ends = set()
        requests = [Request(prompt, 6) for prompt in prompts]
        engine.run(requests)
        assert [request.output for request in requests] == alone
        assert engine.prefilled <= 200 + sum(len(prompt) - 192 for prompt in prompts)
        assert engine.cache.hits == 5 * 192


def test_speculation_saves_steps_and_says_how_it_went(quantized: Path) -> None:
    runner = runner_of(quantized)
    prompt = texts(1)[0] * 6
    plain = Engine(runner, runner.cache("paged"), runner.loader.source.tokenizer())
    drafted = Engine(runner, runner.cache("paged"), runner.loader.source.tokenizer())
    small = runner_of(quantized)
    requests = [Request(prompt, 40), Request(prompt, 40, drafter=DraftModel(small, small.cache("paged")))]
    for engine, request in zip((plain, drafted), requests, strict=True):
        engine.ends = set()
        engine.run([request])
    assert requests[0].output == requests[1].output
    assert drafted.steps < 0.4 * plain.steps
    assert requests[1].length.rate > 0.9


def test_draft_length_follows_acceptance() -> None:
    good, bad = Length(), Length()
    for _ in range(20):
        good.learn(good.next(), good.next())
        bad.learn(bad.next(), 0)
    assert good.next() == 8 and bad.next() == 1


@pytest.mark.parametrize("certain", [True, False])
def test_accepted_tokens_have_the_targets_distribution(certain: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(temperature=1.0)
    target, guess = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]), torch.tensor([0.1, 0.5, 0.1, 0.1, 0.2])
    counts = torch.zeros(5)
    for _ in range(20000):
        draft = 1 if certain else int(torch.multinomial(guess, 1, generator=generator))
        counts[accept(target, draft, None if certain else guess, sampling, generator)[1]] += 1
    statistic = ((counts - 20000 * target) ** 2 / (20000 * target)).sum()
    assert statistic < 18.5  # the 0.1 % point of chi-square with 4 degrees of freedom


def test_sampling_keeps_what_it_should() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0])
    assert Sampling().probabilities(logits).tolist() == [1, 0, 0, 0, 0]
    assert (Sampling(1.0, top_k=2).probabilities(logits) > 0).tolist() == [True, True, False, False, False]
    assert (Sampling(1.0, top_p=0.7).probabilities(logits) > 0).tolist() == [True, True, False, False, False]
    assert (Sampling(1.0, min_p=0.2).probabilities(logits) > 0).tolist() == [True, True, False, False, False]
    assert int(Sampling(penalty=5.0).probabilities(logits, [0]).argmax()) == 1
    torch.testing.assert_close(Sampling(2.0).probabilities(logits), (logits / 2).softmax(-1))
    with pytest.raises(UsageError):
        Sampling(top_p=0.0)


# --- commands


def test_what_a_cache_costs_in_perplexity(quantized: Path, run_cli: Run) -> None:
    text = str(quantized / "text.txt")
    Path(text).write_text("the quick brown fox jumps over the lazy dog; " * 60)
    words = ("eval-ppl", quantized, "--data", text, "--window", 300, "--json")
    plain = run_cli(*words)[1]
    for kind in ("plain", "paged", "int8"):
        code, document, err = run_cli(*words, "--kv-cache", kind, "--reference", quantized)
        assert code == 0 and f"{kind} cache" in err
        assert abs(document["perplexity"] / plain["perplexity"] - 1) < (2e-2 if kind == "int8" else 1e-5)
        assert (document["kl_mean"] > 1e-7) == (kind == "int8")
    assert run_cli(*words, "--kv-cache", "no")[0] == 2


def test_generate_says_what_somebody_should_know(quantized: Path, run_cli: Run, tmp_path: Path) -> None:
    ends = json.loads((quantized / "generation_config.json").read_text()) | {"eos_token_id": [2, 4000]}
    (quantized / "generation_config.json").write_text(json.dumps(ends))
    template = json.loads((quantized / "tokenizer_config.json").read_text()) | {"chat_template": "{{ messages[0].content }}"}
    (quantized / "tokenizer_config.json").write_text(json.dumps(template))
    code, _, err = run_cli("generate", quantized, "--prompt", "abc", "--max-new-tokens", 3, "--json")
    assert code == 0 and "does not have: [4000]" in err and "--chat asks it" in err
    assert "--chat" not in run_cli("generate", quantized, "--prompt", "abc", "--max-new-tokens", 3, "--chat")[2]


def test_generate_prints_the_text_alone(quantized: Path, capsys: pytest.CaptureFixture[str], run_cli: Run, tmp_path: Path) -> None:
    def said(*words: object) -> str:
        from quantkit.cli import main

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["quantkit", "generate", str(quantized), *map(str, words)])
            main()
        return capsys.readouterr().out

    base = ("--prompt", "Line 7: the", "--max-new-tokens", 12, "--temperature", 0)
    plain = said(*base)
    assert plain.endswith("\n") and len(plain) > 3
    for words in (("--kv-cache", "plain"), ("--kv-cache", "paged-int8"), ("--attention", "sdpa"), ("--speculative", "lookup"),
                  ("--speculative", quantized), ("--reference",), ("--compute", "exact")):  # fmt: skip
        assert said(*base, *words) == plain, words
    drawn = [said(*base[:4], "--temperature", 1, "--seed", seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(json.dumps(x) for x in ("Line 7: the", {"prompt": "Line 8"})), encoding="utf-8")
    lines = [json.loads(line) for line in said("--prompts", file, "--max-new-tokens", 12).splitlines()]
    assert [line["reason"] for line in lines] == ["length"] * 2 and lines[0]["text"] + "\n" == plain
    code, document, _ = run_cli("generate", quantized, *base, "--stop", plain[2:4], "--json")
    assert code == 0 and document["results"][0]["reason"] == "stop" and plain[2:4] not in document["results"][0]["text"]


@pytest.mark.parametrize(("words", "text"), [
    (("--prompt", ""), "either --prompt"), (("--prompt", "a", "--max-new-tokens", 9999), "positions"),
    (("--prompt", "a", "--chat"), "no chat template"), (("--prompt", "a", "--attention", "flash-attn"), "needs the package"),
    (("--prompt", "a", "--top-p", 0), "top-p in"), (("--prompts", "/none"), "cannot be read"),
    (("--prompt", "a", "--head-bits", 4), "8, or 0"), (("--prompt", "a", "--speculative", "/none"), "There is no"),
])  # fmt: skip
def test_bad_requests_are_explained(words: tuple[object, ...], text: str, quantized: Path, run_cli: Run) -> None:
    code, _, err = run_cli("generate", quantized, *words)
    assert code in (1, 2) and text in err


def test_bench_measures_beside_transformers(quantized: Path, run_cli: Run) -> None:
    code, document, err = run_cli("bench", quantized, "--prompt-tokens", 20, "--new-tokens", 5, "--json")
    assert code == 0, err
    assert all(document[key]["decode"] > 0 for key in ("packed", "floor", "float32", "bfloat16"))
    assert document["weight_bytes"] > 0 and document["cache_bytes"] == PagedCache.bytes_for(3, 2, 16, 25)


def test_a_checkpoint_that_holds_only_its_head_runs(tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    """B11: the embedding is the head's tensor, whichever of the two is stored."""
    from safetensors.torch import load_file, save_file

    folder = make_model(tmp_path / "m", tie_word_embeddings=True)
    before = run_cli("generate", folder, "--prompt", "abc", "--max-new-tokens", 5, "--json")[1]["results"][0]["text"]
    tensors = load_file(str(folder / "model.safetensors"))
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    code, document, err = run_cli("generate", folder, "--prompt", "abc", "--max-new-tokens", 5, "--json")
    assert code == 0 and document["results"][0]["text"] == before, err
