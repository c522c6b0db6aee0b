"""What the fuzzer calls: each kind of file is read as the commands read it, step by step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quantkit import artifact, corpus, export, importance, inventory, mixture
from quantkit.commands.export import modelfile
from quantkit.errors import QuantkitError
from quantkit.formats import gguf, gguf_vocab, gguf_write
from quantkit.formats._gguf import read_header
from quantkit.loader import Loader
from quantkit.source import Source, resolve

CHAT: list[corpus.Document] = ["A text of 12 words.\n", [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]]


class Late(BaseException):
    """Raised by the timer; no `except Exception` swallows it."""


PROBLEMS: list[BaseException] = []


def tolerate(step: Callable[[], Any]) -> Any:
    """Run a step; a QuantkitError is a good answer, anything else is noted and the next step runs all the same."""
    try:
        return step()
    except (Late, KeyboardInterrupt):
        raise
    except QuantkitError:
        return None
    except BaseException as error:  # panics of Rust code are no Exception
        PROBLEMS.append(error)


def _exported(source: Source) -> None:
    for name in ("Q8_0", "Q4_K_M"):
        plan = export.make_plan(source, mixture.load_policy(name), mixture.Wishes(), "", None, False)
        gguf_write.file_bytes(export.make_writer(plan, 0))
        modelfile(plan, "x.gguf")


def _loaded(source: Source, scratch: Path) -> None:
    loader = Loader(source, torch.device("cpu"))
    for name in source.store.names():
        tolerate(lambda name=name: loader.read(name))  # type: ignore[misc]
    artifact.write_side_files(loader, scratch, None, "auto")


def _spoken(source: Source) -> None:
    tokenizer = source.tokenizer()
    corpus.bos_prefix(tokenizer)
    corpus.encode(tokenizer, CHAT, 1000)


def run_model(path: Path, full: bool, scratch: Path) -> None:
    """Open a folder or GGUF file as every command does; `full`: also tokenizer, skeleton, export and side files."""
    if path.suffix == ".gguf":
        header = read_header(path)
        for name in header.tensors:
            tolerate(lambda name=name: gguf.decode(header, name))  # type: ignore[misc]
        if not full:
            return
        tolerate(lambda: gguf_vocab.save_extras(header, scratch))
    source = resolve(str(path), offline=True)
    tolerate(source.config)
    tolerate(source.raw_config)
    tolerate(lambda: inventory.who_takes_it(source, list(inventory.items(source))))
    for name in source.store.names():
        tolerate(lambda name=name: (source.store.info(name), source.store.read(name)))  # type: ignore[misc]
    if isinstance(source.store, gguf.GgufStore):
        for module in source.store.exact_modules():
            tolerate(lambda module=module: source.store.quant(module))  # type: ignore[misc]
    if full:
        for step in (lambda: _spoken(source), lambda: _loaded(source, scratch), lambda: _exported(source)):
            tolerate(step)


def run_matrix(path: Path, full: bool, scratch: Path) -> None:
    """Load an importance matrix, merge it with itself, write it in both layouts."""
    matrix = importance.load(path)
    matrix.merge(importance.load(path))
    matrix.notices()
    importance.match(matrix, {name: (2, 8, entry.sums.shape[-1]) for name, entry in matrix.entries.items()})
    for suffix in (".dat", ".gguf"):
        importance.save(matrix, scratch / f"again{suffix}")


def run_recipe(path: Path, full: bool, scratch: Path) -> None:
    """Load a recipe and choose types with it."""
    policy = mixture.load_policy(str(path))
    shapes: dict[str, tuple[int, ...]] = {
        f"blk.{i}.{name}.weight": (64, 256) for i in range(2) for name in ("attn_v", "ffn_down", "attn_output", "ffn_up")
    }
    mixture.choose(shapes, policy, mixture.Facts("llama", 2, 8, 2, 0, True), mixture.Wishes())


def run_corpus(path: Path, full: bool, scratch: Path) -> None:
    """Read calibration data and, for a share, tokenize it."""
    documents = list(corpus.documents(str(path), offline=True))
    if full:
        corpus.draw(TOKENIZERS[0], str(path), 4, 16, 0, offline=True)
    assert all(isinstance(item, (str, list)) for item in documents)


RUNNERS: dict[str, Callable[[Path, bool, Path], None]] = {"imatrix": run_matrix, "recipe": run_recipe, "corpus": run_corpus}
TOKENIZERS: list[Any] = []
