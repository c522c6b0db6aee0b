"""Blocks replaced, for a step, by the recording of what they do: the rest of the model stays transformers' own code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.calibrate import intercept
from quantkit.infer.capture import NotRecorded, Recorder, Recording, at_path
from quantkit.infer.linear import PackedLinear, Stub

TRIED = 5  # tokens that a new recording is tried on
CLOSE = 1e-3  # of the largest logit: what the recording may differ from the blocks


class _OneToken:
    """What stands in the cache's place while a step is recorded."""

    count, start = 1, 0

    def __init__(self, recorder: Recorder) -> None:
        self.attend = recorder.attend


class Replay:
    """The recording of a runner's blocks, made when it is first asked for; `reason` says why there is none."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.reason = runner, ""
        self.program: Any = None
        self.recording: Recording | None = None
        self.tried = False

    @contextmanager
    def of(self, cache: Any, segments: list[Any]) -> Iterator[None]:
        """Let a step through a cache run from the recording, if there is one."""
        if not self.tried:
            self.tried = True
            self._prepare(cache)
        if self.program is None:
            yield
            return
        given: list[tuple[Any, Any]] = []
        with intercept(self.runner.loader.blocks, self._stand_in(given, cache, segments)):
            yield

    def _stand_in(self, given: list[tuple[Any, Any]], cache: Any, segments: list[Any]) -> Any:
        """Return what replaces the blocks: all but the last hand their input on, the last one runs the recording of all."""
        last = len(self.runner.loader.blocks) - 1

        def stand_in(index: int, *args: Any, **kwargs: Any) -> Any:
            given.append((args, kwargs))
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            if index == last:
                hidden = self._run(given, cache, segments)[None]
            return (hidden,) if self.runner.loader.returns_tuple else hidden

        return stand_in

    def _run(self, given: list[tuple[Any, Any]], cache: Any, segments: list[Any]) -> Tensor:
        assert self.recording is not None and self.recording.result.place is not None
        rows = sum(segment.count for segment in segments)
        inputs = {}
        for index, path, place in self.recording.inputs:
            value = at_path(given[index], path)
            inputs[place.offset] = value.expand(1, rows, *value.shape[2:]).reshape(rows, -1)
        result = self.recording.result
        assert result.place is not None
        out: Tensor = self.program(inputs, (result.place.offset + result.value.storage_offset(), result.value.numel()), cache, segments)
        return out

    def _prepare(self, cache: Any) -> None:
        """Record the blocks and try the recording; a reason if there is none."""
        make = self.runner.backend.op("program", _no_program)
        if make is _no_program:
            self.reason = "no kernel"
            return
        try:
            recording = self._record()
            recording.lay_out()
            self.recording, self.program = recording, make(recording)
            self._try(cache)
        except NotRecorded as error:
            self.program, self.reason = None, str(error)
            self.runner.backend.reasons["program"] = f"blocks run one operation at a time: {error}"

    def _record(self) -> Recording:
        """Run the blocks on one token and note what they do."""
        runner, recorder = self.runner, Recorder()
        blocks = runner.loader.blocks
        plain = [block.forward for block in blocks]
        linears = [module for block in blocks for module in block.modules() if isinstance(module, PackedLinear)]
        results: list[Tensor] = []

        def note(index: int, *args: Any, **kwargs: Any) -> Any:
            recorder.enter_block(index, args, kwargs)
            with recorder:
                out = plain[index](*args, **kwargs)
            results.append(out[0] if isinstance(out, tuple) else out)
            runner.loader.returns_tuple = isinstance(out, tuple)
            return out

        for module in linears:
            module.forward = partial(recorder.linear, module)  # type: ignore[method-assign]
        stubs = [module for block in blocks for module in block.modules() if isinstance(module, Stub)]
        for stub in stubs:
            stub.forward = partial(recorder.nothing, stub)  # type: ignore[method-assign]
        try:
            with intercept(blocks, note):
                runner.forward(torch.tensor([0]), torch.tensor([1]), _OneToken(recorder), [_OneToken(recorder)], torch.tensor([0]))
        finally:
            for replaced in [*linears, *stubs]:
                del replaced.forward
        result = recorder._operand(results[-1])
        if result.place is None or not results[-1].is_contiguous():
            raise NotRecorded("the blocks give no new numbers")
        return Recording(recorder.notes, recorder.inputs, result, recorder.alive)

    def _try(self, cache: Any) -> None:
        """Compare the recording with the blocks on a few tokens, in one piece and one by one; NotRecorded if they differ."""
        runner, program = self.runner, self.program
        ids = [(7 * i + 3) % runner.config.vocab_size for i in range(TRIED)]
        found = []
        for way in ("blocks", "whole", "each"):
            self.program = None if way == "blocks" else program
            held, rows = cache.open(), []
            for some in [ids] if way != "each" else [[i] for i in ids]:
                rows.append(runner.step(some, [cache.extend(held, len(some))], cache, list(range(len(some)))))
            found.append(torch.cat(rows))
            cache.close(held)
        self.program = program
        size = float(found[0].abs().max())
        if not bool(((found[1] - found[0]).abs() < CLOSE * size).all()) or not torch.equal(found[1], found[2]):
            raise NotRecorded("the recording gives other numbers")


def _no_program(recording: Any) -> Any:
    raise NotRecorded("no kernel")
