"""Plant faults into good artifacts of every format and count what `verify` finds.

    python tests/bench/faults.py --faults 200 --good 50

Prints a table of kind, planted, found, and found at the right place; then false alarms on good artifacts. `--bare` removes the
manifest first: what is found then contradicts itself.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conftest import make_model
from planted import FOLDER_FAULTS, FORMATS, GGUF_FAULTS, GGUF_TYPES

import quantkit.verify
from quantkit import manifest
from quantkit.cli import main as main_of_the_command_line
from quantkit.verify import verify

FAMILIES = ("llama", "qwen2", "gpt2", "phi3", "gemma3")


def command(*words: object) -> bool:
    """Run the command line in this process; False where a format does not take a family."""
    sys.argv = ["quantkit", *map(str, words), "-q"]
    try:
        main_of_the_command_line()
    except SystemExit as error:
        return not error.code
    return True


def make_artifacts(folder: Path, families: tuple[str, ...]) -> list[Path]:
    """Return good artifacts: every format of every family, each in a folder of its own."""
    found = []
    for family in families:
        model = make_model(folder / family, family)
        (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
        for name, words in FORMATS.items():
            out = folder / f"{family}-{name}"
            found += [out] if command("rtn", model, "-o", out, *words) else []
        for kind in GGUF_TYPES:
            out = folder / f"{family}-{kind}"
            out.mkdir()
            words = ("--type", kind, "--pre-tokenizer", "gpt-2")
            found += [out] if command("export-gguf", model, "-o", out / "model.gguf", *words) else []
    return found


def target(folder: Path) -> Path:
    """Return what to verify in a folder: its GGUF file, or itself."""
    return next(iter(folder.glob("*.gguf")), folder)


def main() -> None:
    """Plant, verify, count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--good", type=int, default=50)
    parser.add_argument("--families", type=int, default=4)
    parser.add_argument("--bare", action="store_true")
    asked = parser.parse_args()
    rng, planted, found, placed, alarms = random.Random(0), Counter[str](), Counter[str](), Counter[str](), []
    quantkit.verify.isolated = lambda work, *given: work(*given)  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as scratch:
        artifacts = make_artifacts(Path(scratch), FAMILIES[: asked.families])
        good = [artifacts[i % len(artifacts)] for i in range(asked.good)]
        alarms = [folder.name for folder in good if verify(target(folder)).of("error")]
        missed = []
        for number in range(asked.faults):
            folder = rng.choice(artifacts)
            copy = Path(scratch) / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(folder, copy)
            faults = GGUF_FAULTS if target(copy) != copy else FOLDER_FAULTS
            kind = rng.choice(sorted(faults))
            if asked.bare:
                manifest.path_of(target(copy)).unlink()
            place = faults[kind](copy, rng)
            lines = [finding.line() for finding in verify(target(copy)).of("error")]
            planted[kind] += 1
            found[kind] += bool(lines)
            placed[kind] += any(place in line for line in lines)
            if not lines or not any(place in line for line in lines):
                missed.append((number, folder.name, kind, place, lines[:2]))
    for kind in sorted(planted):
        print(f"{kind:20} planted {planted[kind]:4} found {found[kind]:4} placed {placed[kind]:4}")
    totals = {"planted": planted.total(), "found": found.total(), "placed": placed.total(), "good": asked.good, "alarms": alarms}
    for line in missed:
        print(*line)
    print(json.dumps(totals))


if __name__ == "__main__":
    main()
