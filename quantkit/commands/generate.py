"""`quantkit generate` and `quantkit bench`: run an artifact from its packed weights."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quantkit import memory
from quantkit.commands._infer_options import BenchOptions, GenerateOptions, InferOptions
from quantkit.corpus import render_chat
from quantkit.document import print_json
from quantkit.errors import SourceError, UsageError
from quantkit.foreign import foreign, readable
from quantkit.infer.cache import PagedCache
from quantkit.infer.decode import Engine, Pieces, Request, read_prompts, text_of
from quantkit.infer.medusa import Medusa, MedusaHeads
from quantkit.infer.model import Runner
from quantkit.infer.sampling import Sampling
from quantkit.infer.speculative import DraftModel, Lookup
from quantkit.loader import Loader
from quantkit.report import Eye, mib
from quantkit.source import resolve


def open_runner(model: str, asked: InferOptions, stub: bool = False) -> Runner:
    """Return a model ready to run on the CPU."""
    torch.set_num_threads(asked.threads or torch.get_num_threads())
    source = resolve(model, asked.revision, asked.offline, asked.trust_remote_code)
    return Runner(Loader(source, torch.device("cpu")), torch.get_num_threads(), asked.compute, asked.head_bits, asked.reference, stub)


def generate(model: str, asked: GenerateOptions) -> None:
    """Continue one prompt, its text alone on standard output as it comes, or a file of prompts, one JSON line each."""
    runner = open_runner(model, asked)
    source = runner.loader.source
    tokenizer = source.tokenizer()
    drafts = _drafters(runner, asked, tokenizer)
    sampling = Sampling(asked.temperature, asked.top_k, asked.top_p, asked.min_p, asked.repetition_penalty)
    requests = []
    for number, ids in enumerate(_prompts(asked, tokenizer)):
        _require_room(runner, len(ids) + asked.max_new_tokens)
        requests.append(Request(ids, asked.max_new_tokens, sampling, asked.stop, asked.seed + number, drafts()))
    engine = Engine(runner, runner.cache(asked.kv_cache, asked.attention), tokenizer, asked.batch, short_first=asked.short_first)
    eye = Eye()
    for text in [*source.notices, *engine.notices, *_chat_hint(asked, tokenizer)]:
        eye.notice(text)
    shown, began = Pieces(tokenizer), time.perf_counter()

    def show(request: Request, tokens: list[int]) -> None:
        sys.stdout.write(shown.more(tokens))
        sys.stdout.flush()

    live = asked.prompt and not asked.json and not asked.stop
    engine.run(requests, show if live else None)
    seconds = time.perf_counter() - began
    documents = [_document(tokenizer, request) for request in requests]
    if live:
        print(shown.more([], last=True), flush=True)
    elif asked.json:
        print_json({"command": "generate", "model": model, "results": documents, "seconds": round(seconds, 3), "steps": engine.steps,
                    "prefilled": engine.prefilled, "kernels": runner.backend.reasons})  # fmt: skip
    elif asked.prompt:
        print(documents[0]["text"])
    else:
        for document in documents:
            print_json(document)


def _chat_hint(asked: GenerateOptions, tokenizer: Any) -> list[str]:
    """Return what to say to somebody who asks an instruction-tuned model as if it were none."""
    if not tokenizer.chat_template or asked.chat or not asked.prompt:
        return []
    return ["the model has a chat template; --chat asks it as its makers meant"]


def _document(tokenizer: Any, request: Request) -> dict[str, Any]:
    document: dict[str, Any] = {"text": text_of(tokenizer, request), "tokens": len(request.output), "reason": request.reason}
    document["prompt_tokens"] = len(request.prompt)
    if request.drafter is not None and request.length.rounds:
        length = request.length
        mean = length.drafted / length.rounds
        document |= {"drafted": length.drafted, "accepted": length.accepted, "acceptance": round(length.rate, 4)}
        rate = min(length.rate, 0.9999)
        document["tokens_per_step"] = round(1 + length.accepted / length.rounds, 3)
        document["tokens_per_step_predicted"] = round((1 - rate ** (mean + 1)) / (1 - rate), 3)
    return document


def _prompts(asked: GenerateOptions, tokenizer: Any) -> list[list[int]]:
    items: list[dict[str, Any]] = [{"prompt": readable(asked.prompt)}]
    if asked.prompts:
        try:
            with Path(asked.prompts).open(encoding="utf-8") as file:
                items = list(read_prompts(iter(file)))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--prompts {asked.prompts} cannot be read ({error}).") from None
    found = []
    for item in items:
        messages = item.get("messages") or ([{"role": "user", "content": item["prompt"]}] if asked.chat else None)
        if messages and not tokenizer.chat_template:
            raise SourceError("The model has no chat template: leave --chat and messages out.")
        if messages:
            text = render_chat(tokenizer, messages, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            with foreign("The tokenizer cannot read a prompt"):
                ids = tokenizer(item["prompt"])["input_ids"]
        if not ids:
            raise UsageError("A prompt has no tokens. Give a text to continue.")
        found.append(list(ids))
    return found


def _require_room(runner: Runner, tokens: int) -> None:
    limit = getattr(runner.config, "max_position_embeddings", None)
    if limit and tokens > limit:
        raise UsageError(
            f"Prompt and output have {tokens} tokens, the model {limit} positions. Lower --max-new-tokens, or shorten the prompt."
        )


def _drafters(runner: Runner, asked: GenerateOptions, tokenizer: Any) -> Callable[[], Lookup | DraftModel | Medusa | None]:
    if asked.speculative == "none":
        return lambda: None
    if asked.speculative == "lookup":
        return Lookup
    if asked.speculative == "medusa":
        heads = MedusaHeads(runner.loader.source.folder, runner.config.hidden_size, runner.config.vocab_size, runner.make)
        return lambda: Medusa(heads)
    small = open_runner(asked.speculative, asked)
    other = small.loader.source.tokenizer()
    if small.config.vocab_size != runner.config.vocab_size or other.get_vocab() != tokenizer.get_vocab():
        raise UsageError(f"{asked.speculative} has another vocabulary than the model: it cannot draft for it.")
    cache = small.cache("paged")
    return lambda: DraftModel(small, cache)


def bench(model: str, asked: BenchOptions) -> None:
    """Measure prefill and decoding, beside transformers' own loop on the dequantized weights, in one run."""
    document: dict[str, Any] = {"command": "bench", "model": model, "prompt_tokens": asked.prompt_tokens, "new_tokens": asked.new_tokens}
    with Eye() as eye:
        runner = open_runner(model, asked)
        ids = torch.randint(3, runner.config.vocab_size - 1, (asked.prompt_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
        cache = runner.cache(asked.kv_cache, asked.attention)
        document |= {
            "packed": _measure(runner, cache, ids, asked.new_tokens),
            "weight_bytes": runner.nbytes,
            "cache_bytes": cache.pool.nbytes,
        }
        document["kernels"] = runner.backend.reasons
        eye.totals({"packed": _line(document["packed"]), "memory": f"weights {mib(runner.nbytes)}, cache {mib(cache.pool.nbytes)}"})
        del runner, cache
        if asked.floor:
            stub = open_runner(model, asked, stub=True)
            document["floor"] = _measure(stub, stub.cache(asked.kv_cache, asked.attention), ids, asked.new_tokens)
            eye.totals({"floor": _line(document["floor"]) + " (linears of the blocks compute nothing)"})
            del stub
        memory.trim()
        for dtype in ("float32", "bfloat16") if asked.against == "auto" else (asked.against,) if asked.against != "none" else ():
            document[dtype] = _measure_plain(model, asked, ids, getattr(torch, dtype))
            eye.totals({f"transformers, {dtype}": _line(document[dtype])})
            memory.trim()
    if asked.json:
        print_json(document)


def _line(result: dict[str, float]) -> str:
    return (
        f"{result['prefill']:.1f} tokens/s prefill, first token after {result['first']:.3f} s, {result['decode']:.2f} tokens/s "
        f"decode ({result['milliseconds']:.1f} ms a token)"
    )


def _numbers(first: float, spent: list[float], prompt: int) -> dict[str, float]:
    middle = statistics.median(spent)
    mean = sum(spent) / len(spent)
    return {
        "first": first,
        "prefill": prompt / first,
        "decode": 1 / mean,
        "milliseconds": 1000 * mean,
        "median_milliseconds": 1000 * middle,
    }


def _measure(runner: Runner, cache: PagedCache, ids: list[int], count: int) -> dict[str, float]:
    """Return times of one sequence: a prompt, then `count` tokens, greedy; kernels are warm."""
    for warm in (True, False):
        held = cache.open()
        began = time.perf_counter()
        logits = runner.step(ids, [cache.extend(held, len(ids))], cache, [len(ids) - 1])
        first, spent = time.perf_counter() - began, []
        for _ in range(2 if warm else count):
            began = time.perf_counter()
            token = int(logits[0].argmax())
            logits = runner.step([token], [cache.extend(held, 1)], cache, [0])
            spent.append(time.perf_counter() - began)
        if warm:
            cache.close(held)
    return _numbers(first, spent, len(ids))


@torch.no_grad()
def _measure_plain(model: str, asked: BenchOptions, ids: list[int], dtype: torch.dtype) -> dict[str, float]:
    """Return the same of transformers' generate on the dequantized model."""
    source = resolve(model, asked.revision, asked.offline, asked.trust_remote_code)
    loader = Loader(source, torch.device("cpu"))
    loader.materialize(loader.all_names())
    net = loader.model.to(dtype)
    given = torch.tensor([ids])
    marks: list[float] = []

    class Clock:
        """Told of every token by `generate`."""

        def put(self, value: Any) -> None:
            """Note the time."""
            marks.append(time.perf_counter())

        def end(self) -> None:
            """Nothing is left to do."""

    how = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "attention_mask": torch.ones_like(given)}
    net.generate(given, max_new_tokens=3, **how)
    net.generate(given, max_new_tokens=asked.new_tokens + 1, min_new_tokens=asked.new_tokens + 1, streamer=Clock(), **how)
    spent = [b - a for a, b in itertools.pairwise(marks[1:])]
    return _numbers(marks[1] - marks[0], spent, len(ids))
