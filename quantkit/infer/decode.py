"""The decoding loop: many requests over one cache, prompts in chunks between decode steps, drafts checked by the target.

A step packs rows of several sequences side by side. A finished sequence leaves and a waiting one enters between two steps (continuous
batching). Every row's numbers depend on its own sequence alone, so batches, chunks and drafts give the tokens that one at a time gives.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import UsageError
from quantkit.foreign import read_json
from quantkit.infer.cache import Held, PagedCache, Segment
from quantkit.infer.medusa import Medusa
from quantkit.infer.model import Runner
from quantkit.infer.sampling import Sampling, accept
from quantkit.infer.speculative import DraftModel, Length, Lookup

CHUNK = 256


@dataclass
class Request:
    """One prompt and what becomes of it. stops: texts that end it; seed: of its draws; reason: why it ended."""

    prompt: list[int]
    limit: int
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    seed: int = 0
    drafter: Lookup | DraftModel | Medusa | None = None
    output: list[int] = field(default_factory=list)
    reason: str = ""
    length: Length = field(default_factory=Length)
    held: Held | None = None
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    @property
    def ids(self) -> list[int]:
        """All tokens so far."""
        return self.prompt + self.output


class Engine:
    """Requests in, tokens out. batch: sequences at a time; short_first: waiting prompts enter by length; ends: tokens that end a text."""

    def __init__(
        self, runner: Runner, cache: PagedCache, tokenizer: Any, batch: int = 32, chunk: int = CHUNK, short_first: bool = False
    ) -> None:
        self.runner, self.cache, self.tokenizer = runner, cache, tokenizer
        self.batch, self.chunk, self.short_first = batch, chunk, short_first
        path = runner.loader.source.folder / "generation_config.json"
        given = read_json(path).get("eos_token_id") if path.exists() and runner.loader.source.gguf_file is None else None
        ends = (
            given if given is not None else runner.config.eos_token_id if runner.config.eos_token_id is not None else tokenizer.eos_token_id
        )
        self.ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
        beyond = sorted(end for end in self.ends if end >= runner.config.vocab_size)
        self.notices = [f"the settings end a text at tokens that the model does not have: {beyond}"] if beyond else []
        self.prefilled = self.steps = 0

    def run(self, requests: Sequence[Request], emit: Callable[[Request, list[int]], None] | None = None) -> None:
        """Complete all requests; emit(request, tokens) is told of new tokens as they come."""
        waiting = sorted(requests, key=lambda r: len(r.prompt)) if self.short_first else list(requests)
        active: list[Request] = []
        try:
            while waiting or active:
                while waiting and len(active) < self.batch:
                    request = waiting.pop(0)
                    request.held = self.cache.open()
                    active.append(request)
                before = {id(request): len(request.output) for request in active}
                late = next((request for request in active if not self._ready(request)), None)
                if late is not None:
                    self._prefill(late)
                if ready := [request for request in active if self._ready(request) and request.output and not request.reason]:
                    self._decode(ready)
                for request in active:
                    if emit and len(request.output) > before[id(request)]:
                        emit(request, request.output[before[id(request)] :])
                for request in [request for request in active if request.reason]:
                    self._leave(request)
                    active.remove(request)
        finally:
            for request in active:
                self._leave(request)

    def _leave(self, request: Request) -> None:
        assert request.held is not None
        self.cache.close(request.held)
        if request.drafter is not None:
            request.drafter.forget()

    def _ready(self, request: Request) -> bool:
        assert request.held is not None
        return request.held.length >= len(request.prompt)

    def _prefill(self, request: Request) -> None:
        if request.held is not None and not request.held.length:  # now, when others may have computed its beginning
            request.held = self.cache.open(request.prompt)
        held = request.held
        assert held is not None
        count = min(self.chunk, len(request.prompt) - held.length)
        tokens = request.prompt[held.length : held.length + count]
        segment = self.cache.extend(held, count)
        logits = self.runner.step(tokens, [segment], self.cache, [count - 1])
        self.prefilled, self.steps = self.prefilled + count, self.steps + 1
        if held.length == len(request.prompt):
            self.cache.remember(held, request.prompt)
            if request.drafter is not None:
                request.drafter.see(self.runner.states[0])
            self._add(request, [request.sampling.draw(self._share(request, logits[0], []), request.generator)])

    def _share(self, request: Request, logits: Tensor, more: list[int]) -> Tensor:
        return request.sampling.probabilities(logits, request.ids + more if request.sampling.penalty != 1 else ())

    def _decode(self, ready: list[Request]) -> None:
        """Give each ready sequence its next token, or check its draft."""
        tokens: list[int] = []
        segments: list[Segment] = []
        drafts = []
        for request in ready:
            assert request.held is not None
            room = min(request.limit - len(request.output) - 1, self._room(request.held))
            count = min(request.length.next(), room)
            draft = (
                request.drafter.draft(request.ids, count, request.sampling, request.generator) if request.drafter and count > 0 else None
            )
            proposed = draft.tokens if draft else []
            drafts.append(draft)
            tokens += [request.output[-1], *proposed]
            segments.append(self.cache.extend(request.held, 1 + len(proposed)))
        logits = self.runner.step(tokens, segments, self.cache, list(range(len(tokens))))
        self.steps += 1
        at, states = 0, self.runner.states
        for request, draft, segment in zip(ready, drafts, segments, strict=True):
            rows = slice(at, at + segment.count)
            at += segment.count
            self._check(request, draft, logits[rows], states[rows], segment)

    def _room(self, held: Held) -> int:
        """Return how many drafted tokens fit beside the next one: with pages of 8 bits a draft may not cross the end of one."""
        return self.cache.tokens - held.length % self.cache.tokens - 1 if self.cache.crosses_badly else 1 << 30

    def _check(self, request: Request, draft: Any, rows: Tensor, states: Tensor, segment: Segment) -> None:
        proposed = draft.tokens if draft else []
        new = _greedy(rows, proposed) if request.sampling.is_greedy else []
        for index, row in enumerate(rows if not new else ()):
            share = self._share(request, row, new)
            if index == len(proposed):
                new.append(request.sampling.draw(share, request.generator))
                break
            stands, token = accept(share, proposed[index], draft.shares[index], request.sampling, request.generator)
            new.append(token)
            if not stands:
                break
        if request.drafter is not None:
            request.drafter.see(states[len(new) - 1])
        if proposed:
            request.length.learn(len(proposed), len(new) - 1)
        self.cache.truncate(segment.held, segment.start + len(new))
        self._add(request, new)

    def _add(self, request: Request, tokens: list[int]) -> None:
        """Append tokens until one ends the text."""
        for token in tokens:
            if token in self.ends:
                request.reason = "end"
                return
            request.output.append(token)
            if request.stops and self._stopped(request):
                request.reason = "stop"
                return
            if len(request.output) >= request.limit:
                request.reason = "length"
                return

    def _stopped(self, request: Request) -> bool:
        tail = self.tokenizer.decode(request.output[-64:], skip_special_tokens=True)
        return any(stop in tail for stop in request.stops)


def _greedy(rows: Tensor, proposed: Sequence[int]) -> list[int]:
    """Return the likeliest tokens of rows, up to the first that a draft did not guess."""
    best: list[int] = rows.argmax(-1).tolist()
    same = next((index for index, token in enumerate(proposed) if token != best[index]), len(proposed))
    return best[: same + 1]


def text_of(tokenizer: Any, request: Request) -> str:
    """Return a request's text, cut before the stop that ended it."""
    text = str(tokenizer.decode(request.output, skip_special_tokens=True))
    found = [text.find(stop) for stop in request.stops if stop in text]
    return text[: min(found)] if found else text


class Pieces:
    """New tokens to new text; a character still incomplete waits for its rest."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.shown = tokenizer, 0
        self.ids: list[int] = []

    def more(self, tokens: Sequence[int], last: bool = False) -> str:
        """Return the text that these tokens add; last: nothing comes after them."""
        self.ids += tokens
        text = str(self.tokenizer.decode(self.ids, skip_special_tokens=True))
        if text.endswith("\ufffd") and not last:
            return ""
        new, self.shown = text[self.shown :], len(text)
        return new


def read_prompts(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file of prompts: a string, or an object with `prompt` or `messages`."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UsageError(f"line {number} of the prompts is not JSON ({error}).") from None
        item = {"prompt": value} if isinstance(value, str) else value
        if not isinstance(item, dict) or not ("prompt" in item or "messages" in item):
            raise UsageError(f"line {number} of the prompts is neither a text nor an object with prompt or messages.")
        yield item
