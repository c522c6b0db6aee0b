"""A deterministic fuzzer of quantkit's readers: small valid files are mutated and read as the commands read them.

    python fuzz.py --count 2000 --seed 0 --work DIR [--kinds plain,gguf] [--only N] [--replay DIR/found/NAME]

An input passes if it is read, or refused with a QuantkitError. Anything else is a finding: another exception, more than
2 s of CPU or 300 MB of memory, a file opened outside the model's folder, or a try to reach the network. The smallest input of
each finding (exception type and innermost line of quantkit) is kept under `found/` with its traceback. Input N of a seed
is the same on every run, so `--only N` repeats it; `--replay` runs a kept one.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ |= {
    "TRANSFORMERS_VERBOSITY": "critical",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
import logging

import torch
from entries import PROBLEMS, RUNNERS, TOKENIZERS, Late, run_model
from mutate import Edits, mutate
from seeds import make_seeds

from quantkit import corpus
from quantkit.errors import QuantkitError
from quantkit.source import resolve

LIMIT_S, KILL_S, LIMIT_BYTES = 2.0, 8.0, 300 << 20
FOUND = 10  # exit code of a child that found something
FULL = 0.35  # the share of models that also go through tokenizer, skeleton, export and side files
PACKAGE = str(Path(corpus.__file__).parent)
ALLOWED = (sys.prefix, sys.base_prefix, str(Path(PACKAGE).parent), "/proc", "/sys", "/dev/null", "/dev/urandom", "/usr/lib", "/usr/share")


@dataclass
class Watch:
    """What one input did: files opened outside, hosts asked for. `root` is set while an input runs."""

    root: str = ""
    scratch: str = ""
    outside: list[str] = field(default_factory=list)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """See every audit event of the interpreter."""
        if not self.root:
            return
        if event == "open" and isinstance(args[0], (str, bytes)):
            path = os.path.realpath(os.fsdecode(args[0]))
            if not path.startswith((self.root, self.scratch, *ALLOWED)):
                self.outside.append(path)
        elif event in ("socket.getaddrinfo", "socket.connect", "subprocess.Popen", "builtins.input"):
            self.outside.append(f"{event} {args[:1]}")
            raise OSError(f"{event} is forbidden here")


@dataclass
class Finding:
    """One distinct failure: its smallest input, and how often it was met."""

    key: str
    kind: str
    index: int
    what: str
    edits: Edits
    trace: str
    count: int = 1

    @property
    def size(self) -> int:
        """Bytes of the mutated files."""
        return sum(len(value) if isinstance(value, bytes) else 1 for value in self.edits.values())


class Fuzzer:
    """Seeds, a box in which one input lies at a time, and what was found."""

    def __init__(self, work: Path, found: Path, seed: int) -> None:
        self.seed, self.found = seed, found
        shutil.rmtree(work, ignore_errors=True)
        self.scratch, self.box = work / "scratch", work / "box"
        self.seeds = make_seeds(work / "seeds")
        (work / "outside").mkdir()
        for name in ("plain", "gptq"):
            shutil.copytree(self.seeds[name], work / "outside" / name)
        self.findings: dict[str, Finding] = {}
        self.runs: Counter[str] = Counter()
        self.refused = self.worst_bytes = 0
        self.worst_s, self.total_s = 0.0, 0.0
        self.watch = Watch(scratch=str(self.scratch))
        sys.addaudithook(self.watch)
        signal.signal(signal.SIGPROF, self._late)
        for name, path in self.seeds.items():
            shutil.copytree(path, self.box / name) if path.is_dir() else self._copy(path, self.box / name / path.name)
        TOKENIZERS.append(resolve(str(self.seeds["plain"])).tokenizer())

    @staticmethod
    def _copy(path: Path, target: Path) -> None:
        target.parent.mkdir(parents=True)
        shutil.copyfile(path, target)

    @staticmethod
    def _late(*_: Any) -> None:
        raise Late

    def target(self, kind: str) -> Path:
        """Return what is opened for a kind: its folder in the box, or its file."""
        seed = self.seeds[kind]
        return self.box / kind if seed.is_dir() else self.box / kind / seed.name

    def once(self, kind: str, full: bool) -> tuple[list[BaseException], float, int]:
        """Run what lies in the box; return the exceptions that are no QuantkitError, CPU seconds and bytes above the start."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        (self.scratch / "tmp").mkdir()
        runner = RUNNERS.get(kind.partition("-")[0], run_model)
        Path("/proc/self/clear_refs").write_text("5")
        before, began = _status("VmRSS"), time.process_time()
        PROBLEMS.clear()
        self.watch.root, self.watch.outside = str(self.box / kind), []
        faulthandler.dump_traceback_later(150, exit=True)
        try:
            signal.setitimer(signal.ITIMER_PROF, KILL_S)
            runner(self.target(kind), full, self.scratch)
        except QuantkitError:
            self.refused += 1
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # Late among them
            PROBLEMS.append(error)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self.watch.root = ""
            faulthandler.cancel_dump_traceback_later()
        return list(PROBLEMS), time.process_time() - began, max(0, _status("VmHWM") - before)

    def run(self, index: int, kind: str, edits: Edits, what: str, full: bool) -> None:
        """Put an input in the box, run it, note what it did, and put the seed back."""
        folder = self.box / kind
        for name, value in edits.items():
            _place(folder / name, value)
        try:
            problems, seconds, used = self.once(kind, full)
            outside = sorted(set(self.watch.outside))
            if seconds > LIMIT_S or used > LIMIT_BYTES:  # a first import may take this long: again
                problems, seconds, used = self.once(kind, full)
            self.runs[kind] += 1
            self.total_s += seconds
            self.worst_s, self.worst_bytes = max(self.worst_s, seconds), max(self.worst_bytes, used)
            note = f"{what}; {seconds:.1f} s CPU, {used >> 20} MB"
            for problem in problems:
                trace = "".join(traceback.format_exception(problem, limit=-30))[-6000:]
                self.add(f"{type(problem).__name__} at {_frame(problem)}", kind, index, note, edits, trace)
            if seconds > LIMIT_S:
                self.add(f"slow {_group(kind, edits)}", kind, index, note, edits, f"{seconds} s\n")
            if used > LIMIT_BYTES:
                self.add(f"memory {_group(kind, edits)}", kind, index, note, edits, f"{used >> 20} MB\n")
            for path in outside:
                self.add(f"outside {_group(kind, edits)}", kind, index, f"{note}; {path}", edits, path + "\n")
        finally:
            for name in edits:
                self.restore(kind, name)

    def restore(self, kind: str, name: str) -> None:
        """Put the seed's file back."""
        original = self.seeds[kind] / name if self.seeds[kind].is_dir() else self.seeds[kind]
        _place(self.box / kind / name, original.read_bytes() if original.is_file() else None)

    def add(self, key: str, kind: str, index: int, what: str, edits: Edits, trace: str) -> None:
        """Keep a finding if it is new or smaller than the one that is kept."""
        known, finding = self.findings.get(key), Finding(key, kind, index, what, edits, trace)
        finding.count = known.count + 1 if known else 1
        if known and known.size <= finding.size:
            known.count += 1
            return
        self.findings[key] = finding
        folder = self.found / "".join(c if c.isalnum() or c in "._" else "-" for c in key)[:90]
        how = folder / "how.json"
        if how.is_file() and json.loads(how.read_text())["size"] <= finding.size:  # an earlier run's
            return
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "files").mkdir(parents=True)
        for name, value in edits.items():
            _place(folder / "files" / name, value)
        removed = [name for name, value in edits.items() if value is None]
        about = {"key": key, "kind": kind, "seed": self.seed, "index": index, "what": what, "removed": removed, "size": finding.size}
        how.write_text(json.dumps(about, indent=1))
        (folder / "trace.txt").write_text(trace, encoding="utf-8", errors="replace")
        if not known:
            print(f"NEW {index}: {key} [{kind}: {what[:150]}]", flush=True)

    def inputs(self, indices: Iterable[int], kinds: list[str]) -> Iterator[tuple[int, str, Edits, str, bool]]:
        """Yield the inputs of these numbers; each depends on the seed and its number alone."""
        for index in indices:
            rng = random.Random(f"{self.seed}:{index}")
            kind = rng.choice(kinds)
            try:
                edits, what = mutate(rng, self.seeds[kind], self.box.parent / "outside")
            except MemoryError:  # an input that is too large to be made
                continue
            yield index, kind, edits, what, rng.random() < FULL

    def replay(self, folder: Path) -> None:
        """Run a kept finding and print what it does."""
        about = json.loads((folder / "how.json").read_text())
        files = [p for p in sorted((folder / "files").rglob("*")) if p.is_file() or p.is_symlink()]
        edits: Edits = {str(p.relative_to(folder / "files")): p.readlink() if p.is_symlink() else p.read_bytes() for p in files}
        self.run(about["index"], about["kind"], edits | dict.fromkeys(about["removed"]), "replay", True)
        for finding in self.findings.values():
            print(finding.trace)


def _place(path: Path, value: bytes | Path | None) -> None:
    path.unlink(missing_ok=True)
    if value is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(value) if isinstance(value, Path) else path.write_bytes(value)


def _group(kind: str, edits: Edits) -> str:
    """Return what stands for a finding that has no line: the changed file of a folder, or the kind of a single file."""
    names = [name + (" (link)" if isinstance(value, Path) else "") for name, value in edits.items()]
    return names[0] if names[0].endswith(("json", "jinja", "link)")) else kind


def _frame(error: BaseException) -> str:
    """Return file:line of the innermost frame in quantkit."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(PACKAGE)]
    return f"{Path(frames[-1].filename).relative_to(PACKAGE)}:{frames[-1].lineno}" if frames else "outside quantkit"


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def main() -> int:
    """Run; the exit code is 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    parser.add_argument("--kinds", default="", help="comma-separated; default all")
    parser.add_argument("--work", type=Path, default=Path("fuzz-work"))
    parser.add_argument("--found", type=Path, default=Path("found"))
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--died", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not (asked.child or asked.replay):
        return supervise(asked)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    fuzzer = Fuzzer(asked.work.resolve(), asked.found.resolve(), asked.seed)
    import tempfile

    tempfile.tempdir = str(fuzzer.scratch / "tmp")
    for kind in fuzzer.seeds:  # what is imported on first use is imported now; a seed that is refused is a mistake of ours
        problems, *_ = fuzzer.once(kind, True)
        if problems or fuzzer.refused:
            raise SystemExit(f"the seed {kind} is not read: {problems!r}")
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + (4 << 30), resource.RLIM_INFINITY))
    if asked.replay:
        fuzzer.replay(asked.replay)
        return int(bool(fuzzer.findings))
    kinds = [kind for kind in fuzzer.seeds if not asked.kinds or kind in asked.kinds.split(",")]
    if asked.died is not None:  # the last child's end is a finding of the input before
        for _, kind, edits, what, _ in fuzzer.inputs([asked.start - 1], kinds):
            fuzzer.add(f"died {_group(kind, edits)}", kind, asked.start - 1, f"{what}; exit code {asked.died}", edits, f"{asked.died}\n")
    return run_all(fuzzer, range(asked.start, asked.start + asked.count), kinds, asked.work / "now", asked.seconds)


def supervise(asked: argparse.Namespace) -> int:
    """Run the inputs in a child, since code in C and Rust may end it without an exception; go on after what ended it."""
    start, stop = (asked.start, asked.start + asked.count) if asked.only is None else (asked.only, asked.only + 1)
    ends, died, found = time.monotonic() + asked.seconds, list[str](), False
    while (left := ends - time.monotonic()) > 0:
        more = ["--child", "--start", str(start), "--count", str(max(stop - start, 0)), "--seconds", str(left), *died]
        code = subprocess.call([sys.executable, *sys.argv, *more])
        if code in (0, FOUND):
            return int(found or code == FOUND)
        now = asked.work / "now"
        if not now.is_file():
            return 2  # it never began
        start, died, found = int(now.read_text()) + 1, ["--died", str(code)], True
        now.unlink()
    return int(found)


def run_all(fuzzer: Fuzzer, indices: Iterable[int], kinds: list[str], now: Path, limit: float) -> int:
    """Run these inputs until the time is over and print what was found; `now` holds the number of the one that runs."""
    began, base = time.monotonic(), _status("VmRSS")
    for index, kind, edits, what, full in fuzzer.inputs(indices, kinds):
        now.write_text(str(index))
        fuzzer.run(index, kind, edits, what, full)
        if index % 200 == 0:
            gc.collect()
        if time.monotonic() - began > limit:
            break
    count, grown = sum(fuzzer.runs.values()), (_status("VmRSS") - base) >> 20
    print(f"{count} inputs in {time.monotonic() - began:.0f} s, {fuzzer.refused} refused; {dict(fuzzer.runs)}")
    print(f"worst: {fuzzer.worst_s:.2f} s CPU, {fuzzer.worst_bytes >> 20} MB; grown by {grown} MB over all inputs")
    for key, finding in sorted(fuzzer.findings.items(), key=lambda pair: -pair[1].count):
        print(f"{finding.count:5} {key}  (smallest: {finding.size} bytes, input {finding.index})", flush=True)
    return FOUND if fuzzer.findings else 0


if __name__ == "__main__":
    sys.exit(main())
