"""A recorded step computes what the blocks compute; products on 16-bit integers stay within their bound; heads that guess ahead."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EXPERTS, FAMILIES, make_model
from torch import Tensor, nn

from quantkit.backends.cpu import integer, program
from quantkit.backends.cpu.linear import packed_linear
from quantkit.codecs.affine import Affine
from quantkit.errors import SourceError
from quantkit.formats import _safetensors as st
from quantkit.infer.cache import PagedCache
from quantkit.infer.capture import NotRecorded, Recorder, Recording
from quantkit.infer.decode import Engine, Request
from quantkit.infer.linear import Planes, pack_planes, planes_of, planes_reference, with_room
from quantkit.infer.medusa import Medusa, MedusaHeads
from quantkit.infer.model import Runner
from quantkit.infer.sampling import Sampling
from quantkit.loader import Loader
from quantkit.source import resolve
from quantkit.tensors import QuantTensor

Run = Callable[..., tuple[int, Any, str]]
IDS = torch.randint(3, 250, (70,), generator=torch.Generator().manual_seed(5)).tolist()


def runner_of(folder: Path, **how: Any) -> Runner:
    return Runner(Loader(resolve(str(folder)), torch.device("cpu")), 2, **how)


def steps(runner: Runner, parts: list[list[int]]) -> Tensor:
    cache = runner.cache("paged")
    held = cache.open()
    return torch.cat([runner.step(part, [cache.extend(held, len(part))], cache, list(range(len(part)))) for part in parts])


# --- recordings


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_is_recorded_and_a_row_does_not_depend_on_the_others(family: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", family, dtype=torch.bfloat16)
    fast, plain = runner_of(model), runner_of(model)
    plain.replay = None
    theirs = steps(plain, [IDS])
    whole, pieces = steps(fast, [IDS]), steps(fast, [IDS[:1], IDS[1:4], *([i] for i in IDS[4:20]), IDS[20:]])
    assert fast.replay is not None and fast.replay.program is not None, fast.replay.reason
    assert (whole - theirs).abs().max() < 1e-5 * theirs.abs().max()
    assert torch.equal(whole, pieces)


def test_sequences_side_by_side_are_what_they_are_alone(tmp_path: Path) -> None:
    runner = runner_of(make_model(tmp_path / "m", "gemma3", dtype=torch.bfloat16))
    cache = runner.cache("paged")
    texts = [IDS[:30], IDS[30:34], IDS[34:70]]
    alone = [steps(runner, [text]) for text in texts]
    held = [cache.open() for _ in texts]
    rows = [*texts[0], *texts[1], *texts[2]]
    together = runner.step(rows, [cache.extend(h, len(t)) for h, t in zip(held, texts, strict=True)], cache, list(range(len(rows))))
    assert torch.equal(together, torch.cat(alone))


def test_experts_run_as_transformers_runs_them_without_a_recording(run_cli: Run, tmp_path: Path) -> None:
    for family in EXPERTS:
        model = make_model(tmp_path / family, family, dtype=torch.bfloat16)
        assert run_cli("rtn", model, "-o", tmp_path / f"{family}-q", "--group-size", 32, "-q")[0] == 0
        file = tmp_path / f"{family}.gguf"
        assert run_cli("export-gguf", model, "-o", file, "--type", "Q8_0", "-q", "--pre-tokenizer", "gpt-2")[0] == 0
        for path in (model, tmp_path / f"{family}-q", file):
            loader = Loader(resolve(str(path)), torch.device("cpu"))
            loader.materialize(loader.all_names())
            with torch.no_grad():
                theirs = loader.model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
            runner = runner_of(path)
            assert (steps(runner, [IDS]) - theirs).abs().max() < 1e-3 * theirs.abs().max()
            assert runner.replay is not None and runner.replay.program is None and "a block uses" in runner.replay.reason
            stored = path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.glob("*.safetensors"))
            assert runner.nbytes < 1.25 * stored


class Everything(nn.Module):
    """A block that does, on one row, every operation that has a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.weight = nn.Parameter(torch.randn(48, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor, angle: Tensor) -> Tensor:
        heads = x.view(1, 1, 3, 16).transpose(1, 2)
        turned = torch.cat((-heads[..., 8:], heads[..., :8]), -1) * angle[:, None]
        y = turned.transpose(1, 2).reshape(1, 1, 48) + self.norm(x) * self.weight
        small = y.pow(2).mean(-1, keepdim=True)
        y = y * torch.rsqrt(small + 1e-6) - x / (x.pow(2) + 2.0)
        parts = y.chunk(3, -1)
        z = torch.cat([nn.functional.silu(parts[0]), nn.functional.gelu(parts[1]), nn.functional.gelu(parts[2], approximate="tanh")], -1)
        z = z + torch.sigmoid(y) * 0.5 - torch.tanh(z) + torch.exp(-y.pow(2)) + nn.functional.relu(z) + z.pow(3) * 0.01
        z += torch.sqrt(z * z + 1.0) + (z * z + 1.0).reciprocal()
        return z * 1.5


def record(block: nn.Module, *inputs: Tensor) -> Recording:
    recorder = Recorder()
    recorder.enter_block(0, inputs, {})
    with torch.no_grad(), recorder:
        out = block(*inputs)
    made = Recording(recorder.notes, recorder.inputs, recorder._operand(out), recorder.alive)
    made.lay_out()
    return made


class _Rows:
    """A cache's place in a program that does not attend."""

    tokens = 16
    pool = PagedCache(1, 1, 16, lambda *args: None).pool


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_kernel_of_a_recording_is_torchs_operation(threads: int) -> None:
    torch.manual_seed(0)
    block, count = Everything(), 130
    made = record(block, torch.randn(1, 1, 48), torch.randn(1, 1, 16))
    run = program.program(threads)(made)
    kinds = {(note.kernel, note.detail) for note in made.notes}
    assert {name for kind, name in kinds if kind == "unary"} >= set(program.UNARY) - {"mul"} and ("layer_norm", None) in kinds
    x, angle = torch.randn(count, 48), torch.randn(count, 16)
    assert made.result.place is not None
    given = {place.offset: value for (_, _, place), value in zip(made.inputs, (x, angle), strict=True)}

    class Segment:
        start, table = 0, torch.zeros(1, dtype=torch.int64).numpy()
        count = 130

    found = run(given, (made.result.place.offset, 48), _Rows(), [Segment()])
    with torch.no_grad():
        wanted = torch.cat([block(x[i].view(1, 1, 48), angle[i].view(1, 1, 16)) for i in range(count)]).view(count, 48)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


def test_places_that_live_at_once_do_not_overlap() -> None:
    made = record(Everything(), torch.randn(1, 1, 48), torch.randn(1, 1, 16))
    places = {id(o.place): o.place for note in made.notes for o in note.used if o.place is not None}
    for place in places.values():
        for other in places.values():
            apart = place.offset + place.numbers <= other.offset or other.offset + other.numbers <= place.offset
            assert place is other or apart or place.last < other.born or other.last < place.born
    assert made.floats < sum(place.numbers for place in places.values()) / 2


def test_what_has_no_kernel_or_looks_at_numbers_is_not_recorded() -> None:
    class Sorts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sort(-1).values

    class Decides(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if float(x.sum()) > 0 else x * 3

    for block, word in ((Sorts(), "sort"), (Decides(), "sum")):
        with pytest.raises(NotRecorded, match=word):
            record(block, torch.randn(1, 1, 32))
    with pytest.raises(NotRecorded, match="shape"):
        record(Sorts(), torch.randn(2, 3, 32))


def test_a_recording_that_computes_something_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "m", "llama", dtype=torch.bfloat16)
    right = steps(runner_of(model), [IDS])
    unary = Recorder.unary

    def wrong(self: Recorder, name: str, x: Tensor, out: Tensor, number: float = 0.0) -> None:
        unary(self, "sigmoid" if name == "silu" else name, x, out, number)

    monkeypatch.setattr(Recorder, "unary", wrong)
    runner = runner_of(model)
    assert (steps(runner, [IDS]) - right).abs().max() < 1e-5 * right.abs().max()
    assert runner.replay is not None and runner.replay.program is None and runner.replay.reason == "the recording gives other numbers"
    assert "one operation at a time" in runner.backend.reasons["program"]


# --- products on 16-bit integers


@pytest.mark.skipif(not integer._has_them(), reason="this processor has no products of bytes")
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (4, 128), (8, 16), (8, 32), (8, 64)])
@pytest.mark.parametrize("mode", ["middle", "zero", "offset"])
@pytest.mark.parametrize("columns", [128, 256, 576, 1920])
def test_integer_products(bits: int, group: int, mode: str, columns: int) -> None:
    columns -= columns % group
    generator = torch.Generator().manual_seed(columns + group)
    groups = columns // group
    codes = torch.randint(0, 1 << bits, (67, columns), dtype=torch.uint8, generator=generator)
    scale = (torch.rand(67, groups, generator=generator) * 0.02 + 0.001).to(torch.float16)
    more: dict[str, Any] = {"middle": 1 << (bits - 1)}
    if mode == "zero":
        more = {"zero": torch.randint(0, 1 << bits, (67, groups), dtype=torch.uint8, generator=generator)}
    elif mode == "offset":
        more = {"offset": (torch.randn(67, groups, generator=generator) * 0.05).to(torch.float16)}
    planes = with_room(Planes(bits, group, pack_planes(codes, bits), scale, **more))
    kernel = packed_linear(2)(planes)
    assert kernel.integers  # type: ignore[attr-defined]
    x = torch.randn(7, columns, generator=generator)
    x[:, 5] *= 50
    x[3] = 0
    weight = planes_reference(planes)(torch.eye(columns)).T
    found = kernel(x)
    # half a step of each group's inputs, times the weights' codes from their zero point on
    step = x.view(7, groups, group).abs().amax(-1) / 65024
    bound = step @ weight.abs().view(67, groups, group).sum(-1).T
    assert ((found.double() - x.double() @ weight.double().T).abs() <= bound + 2e-5 * found.abs().max()).all()
    assert torch.equal(found, torch.cat([kernel(row[None]) for row in x])), "a row does not depend on the others"
    assert (found[3] == 0).all()


def test_without_products_of_bytes_floats_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer, "_has_them", lambda: False)
    codes = torch.randint(0, 16, (40, 256), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    planes = with_room(Planes(4, 64, pack_planes(codes, 4), torch.full((40, 4), 0.01, dtype=torch.float16), middle=8))
    kernel = packed_linear(2)(planes)
    assert not kernel.integers  # type: ignore[attr-defined]
    x = torch.randn(3, 256)
    torch.testing.assert_close(kernel(x), planes_reference(planes)(x), rtol=1e-5, atol=1e-4)


# --- Medusa heads


def write_heads(folder: Path, width: int, vocabulary: int, heads: int = 3, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for head in range(heads):
        tensors[f"{head}.0.linear.weight"] = torch.randn(width, width, generator=generator) * 0.1
        tensors[f"{head}.0.linear.bias"] = torch.randn(width, generator=generator) * 0.1
        tensors[f"{head}.1.weight"] = torch.randn(vocabulary, width, generator=generator).to(torch.bfloat16)
    st.write_file(folder / "medusa_lm_head.safetensors", tensors)


@pytest.fixture
def with_heads(tmp_path: Path) -> Path:
    model = make_model(tmp_path / "m", "llama", dtype=torch.bfloat16)
    write_heads(model, 64, 320)
    return model


def test_heads_guess_as_their_formula_says(with_heads: Path) -> None:
    heads = MedusaHeads(with_heads, 64, 320)
    state = torch.randn(64)
    held = {name: st.read_tensor(with_heads / "medusa_lm_head.safetensors", entry)
            for name, entry in st.read_header(with_heads / "medusa_lm_head.safetensors").items()}  # fmt: skip
    for index, logits in enumerate(heads.guess(state, 3)):
        inner = state + nn.functional.silu(held[f"{index}.0.linear.weight"] @ state + held[f"{index}.0.linear.bias"])
        torch.testing.assert_close(logits, held[f"{index}.1.weight"].float() @ inner, rtol=1e-4, atol=1e-3)
    assert len(heads.guess(state, 2)) == 2


def test_drafts_of_heads_change_no_token(with_heads: Path) -> None:
    runner = runner_of(with_heads)
    tokenizer = runner.loader.source.tokenizer()
    results = {}
    for name in ("plain", "medusa", "knowing"):
        heads = MedusaHeads(with_heads, 64, 320, runner.make)
        if name == "knowing":  # heads that guess what will come, to see drafts stand
            said = results["plain"]
            heads.guess = lambda state, count: [  # type: ignore[method-assign]
                nn.functional.one_hot(torch.tensor(said[min(len(request.output) + k, 23)]), 320).float() for k in range(count)
            ]
        engine = Engine(runner, runner.cache("paged"), tokenizer)
        engine.ends = set()
        request = Request(IDS[:20], 24, drafter=None if name == "plain" else Medusa(heads))
        engine.run([request])
        results[name] = request.output
        if name == "knowing":
            assert request.length.rate == 1.0 and engine.steps < 12
        elif name == "medusa":
            assert request.length.drafted > 0
    assert results["medusa"] == results["plain"] == results["knowing"]


def test_heads_see_the_state_that_the_last_token_was_drawn_from(with_heads: Path) -> None:
    runner = runner_of(with_heads)
    seen: list[Tensor] = []

    class Watching(Medusa):
        def see(self, state: Tensor) -> None:
            super().see(state)
            seen.append(state.clone())

    engine = Engine(runner, runner.cache("paged"), runner.loader.source.tokenizer())
    engine.ends = set()
    request = Request(IDS[:9], 6, drafter=Watching(MedusaHeads(with_heads, 64, 320)))
    engine.run([request])
    ids = [*IDS[:9], *request.output]
    steps(runner, [ids[:-1]])
    assert torch.equal(seen[0], runner.states[8]) and any(torch.equal(seen[1], state) for state in runner.states[9:])


def test_sampled_drafts_of_heads_are_drawn_from_their_shares(with_heads: Path) -> None:
    medusa = Medusa(MedusaHeads(with_heads, 64, 320))
    medusa.see(torch.randn(64))
    drafted = medusa.draft([1, 2], 3, Sampling(temperature=1.0), torch.Generator().manual_seed(0))
    assert len(drafted.tokens) == 3 and all(share is not None and abs(float(share.sum()) - 1) < 1e-5 for share in drafted.shares)


def test_heads_are_carried_into_artifacts_and_bad_ones_are_named(with_heads: Path, run_cli: Run, tmp_path: Path) -> None:
    code, document, _ = run_cli("rtn", with_heads, "-o", tmp_path / "q", "--group-size", 32, "-q", "--json")
    assert code == 0 and "medusa_lm_head.safetensors" in document["carried"]
    words = ("--prompt", "abc", "--max-new-tokens", 12, "--json")
    plain, drafted = (run_cli("generate", tmp_path / "q", *words, *more)[1]["results"][0] for more in ((), ("--speculative", "medusa")))
    assert drafted["text"] == plain["text"] and drafted["drafted"] > 0
    write_heads(with_heads, 32, 320)
    with pytest.raises(SourceError, match="hidden size of 64"):
        MedusaHeads(with_heads, 64, 320)
    (with_heads / "medusa_lm_head.safetensors").unlink()
    code, _, err = run_cli("generate", with_heads, *words, "--speculative", "medusa")
    assert code == 1 and "holds no medusa_lm_head.safetensors" in err
    st.write_file(with_heads / "medusa_lm_head.safetensors", {"0.x": torch.zeros(2)})
    with pytest.raises(SourceError, match="no part of a Medusa head"):
        MedusaHeads(with_heads, 64, 320)
    assert json.loads((tmp_path / "q" / "quantkit.json").read_text())["carried"].count("medusa_lm_head.safetensors") == 1


def test_scales_that_do_not_go_with_their_codes_reach_no_kernel() -> None:
    codes, zero = torch.zeros(4, 64, dtype=torch.uint8), torch.full((4, 2), 8, dtype=torch.uint8)
    for scale in (torch.ones(4, 3), torch.ones(3, 2)):
        with pytest.raises(SourceError, match="do not go with"):
            planes_of(QuantTensor(codes, {"scale": scale, "zero": zero}, Affine(4, 32, True)))
