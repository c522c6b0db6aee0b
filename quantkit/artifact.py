"""The output folder: shards assembled from part files, configuration, side files, model card, manifest, rename.

Data is copied by byte range, one shard at a time, and a part file is deleted when the last of its tensors is in a
finished shard: the extra disk is at most one shard. Nothing here depends on the time or the place of the run, so the
same run gives the same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import OutputError, ResumeError, SourceError, name_list
from quantkit.foreign import foreign, read_json, readable
from quantkit.formats import _safetensors as st
from quantkit.formats import gguf_vocab
from quantkit.formats._safetensors import TensorInfo
from quantkit.formats.store import INDEX
from quantkit.journal import Journal
from quantkit.loader import Loader
from quantkit.lock import clear, hold
from quantkit.source import Source

LOADING = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")
```

Without those packages: `quantkit generate . --prompt "..."` and `quantkit verify .`. Runtimes, as they were known when it was made:
"""
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p")


@dataclass(frozen=True)
class Piece:
    """One tensor of the output: its name, layout, and where its bytes come from."""

    name: str
    info: TensorInfo
    data: Callable[[], Iterator[bytes | memoryview]]
    part: int = -1


def require_apart(output: Path, source: Source) -> None:
    """Refuse an output that is a file of the source, or a folder that holds one, by whatever link; --force changes nothing here."""
    target = output.resolve()
    if source.gguf_file is not None:
        own = [source.gguf_file]
    else:
        own = [source.folder, *source.store.files(), *(source.folder / name for name in source.side_files())]
    for path in own:
        real = path.resolve()
        if target == real or target in real.parents or (output.is_file() and output.samefile(path)):
            raise OutputError(f"{output} is the source itself, or holds it ({path.name}). Choose another --output.")


def prepare_output(output: Path, source: Source, force: bool) -> Path:
    """Check the output path and return the path of its partial folder; an OutputError says what is in the way."""
    resolved = output.resolve()
    require_apart(output, source)
    if output.exists() and not force:
        raise OutputError(f"{output} exists already. Choose another --output, or replace it with --force.")
    if not resolved.parent.is_dir():
        raise OutputError(f"{resolved.parent} is no folder. Create it first.")
    return resolved.with_name(resolved.name + ".partial")


def require_disk(folder: Path, needed: int, what: str) -> None:
    """Raise an OutputError if the disk of `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(f"{what} needs {needed / 1e6:,.0f} MB on the disk of {folder}, which has {free / 1e6:,.0f} MB free.")


def pieces_of(loader: Loader, kept: dict[str, TensorInfo], layouts: dict[str, dict[str, TensorInfo]],
              from_part: Callable[[str, str, TensorInfo], Piece]) -> list[Piece]:  # fmt: skip
    """Return the output's tensors in the source's order; a quantized weight's place is taken by its packed tensors."""
    pieces = []
    for name in loader.source.store.names():
        if name in layouts:
            pieces += [from_part(name, packed, info) for packed, info in layouts[name].items()]
        else:
            pieces.append(Piece(name, kept[name], lambda n=name: loader.chunks(n, kept[n])))  # type: ignore[misc]
    return pieces


def part_reader(journal: Journal, blocks: dict[str, int], settle: Callable[[str, str], Any]) -> Callable[[str, str, TensorInfo], Piece]:
    """Return a function that makes a Piece of a packed tensor; `settle(weight, name)` may give it its final form."""

    def piece(weight: str, name: str, info: TensorInfo) -> Piece:
        index = blocks[weight]

        def data() -> Iterator[bytes | memoryview]:
            path = journal.part(index)
            if not path.exists():
                raise ResumeError(f"{path} is missing, and its shard is not finished. Start over with --restart.")
            entry = st.read_header(path)[name]
            change = settle(weight, name)
            if change is None:
                yield from st.read_chunks(path, entry)
            else:
                yield from st.tensor_bytes(change(st.read_tensor(path, entry)))

        return Piece(name, info, data, index)

    return piece


def write_shards(partial: Path, pieces: list[Piece], max_bytes: int, journal: Journal | None = None) -> dict[str, str]:
    """Write the tensors as one or more shards and, for more than one, the index; return tensor name -> file name."""
    shards: list[list[Piece]] = [[]]
    for piece in pieces:
        if shards[-1] and sum(p.info.nbytes for p in shards[-1]) + piece.info.nbytes > max_bytes:
            shards.append([])
        shards[-1].append(piece)
    last_shard = {piece.part: number for number, shard in enumerate(shards) for piece in shard}
    where: dict[str, str] = {}
    for number, shard in enumerate(shards):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        where |= {piece.name: name for piece in shard}
        if not (partial / name).exists():
            _write_shard(partial / name, shard)
        for part in [p for p, last in last_shard.items() if last == number and p >= 0]:
            if journal is not None:
                journal.part(part).unlink(missing_ok=True)
    if len(shards) > 1:
        total = sum(piece.info.nbytes for piece in pieces)
        write_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))})
    return where


@contextmanager
def fresh_folder(partial: Path, pieces: list[Piece], shard_bytes: Callable[[int], int]) -> Iterator[int]:
    """Write the shards of a conversion into a new folder and yield their bytes; what fails leaves nothing, as a conversion is cheap."""
    total = sum(piece.info.nbytes for piece in pieces)
    require_disk(partial.parent, total, "The output")
    with hold(partial):
        clear(partial)
        try:
            write_shards(partial, pieces, shard_bytes(total))
            yield total
        except (SourceError, OSError):
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _write_shard(path: Path, shard: list[Piece]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        st.write_header(file, {piece.name: piece.info for piece in shard})
        for piece in shard:
            for data in piece.data():
                file.write(data)
        st.sync(file)
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file as Hugging Face tools do: indented, UTF-8, a newline at the end."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", errors="surrogateescape")


def write_side_files(loader: Loader, partial: Path, quantization: dict[str, Any] | None, dtype: str) -> tuple[list[str], list[str]]:
    """Write config.json and carry over everything that is no weight; return the files carried and notices."""
    source = loader.source
    config = source.raw_config()
    notices: list[str] = []
    if dtype != "auto":
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    if quantization is not None:
        config["quantization_config"] = quantization
    carried = []
    for relative in source.side_files():
        target = partial / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        if str(relative) in ("config.json", "README.md"):
            continue
        shutil.copyfile(source.folder / relative, target)
        carried.append(str(relative))
    if source.gguf_file is not None:
        from transformers import GenerationConfig

        with foreign(f"{source.gguf_file}: its generation settings cannot be written"):
            GenerationConfig.from_model_config(source.config()).save_pretrained(str(partial))
        source.tokenizer().save_pretrained(str(partial))
        gguf_vocab.save_extras(source.store.header, partial)  # type: ignore[attr-defined]
    elif source.page is not None:
        shutil.copyfile(source.page, partial / "README.source.md")
        carried.append("README.source.md")
    write_json(partial / "config.json", config)
    if left := source.left_out():
        notices.append(f"not carried over: {name_list(left)}")
    return carried, notices


def check_side_files(source: Source) -> list[str]:
    """Look at what will be carried over before any work: settings that libraries refuse, templates that are lost; return notices."""
    notices: list[str] = []
    if source.gguf_file is not None:
        return notices
    path = source.folder / "generation_config.json"
    if path.is_file():
        settings = read_json(path)
        given = [key for key in SAMPLING if settings.get(key) not in (None, 1.0) and not (key == "top_k" and settings[key] == 50)]
        if given and not settings.get("do_sample"):
            notices.append(f"generation_config.json sets {', '.join(given)} without do_sample: carried over as it is, "
                           "but transformers refuses to save such settings")  # fmt: skip
    gguf_vocab.chat_template(source.folder, notices)
    return notices


def publish(partial: Path, output: Path) -> None:
    """Give the finished folder its name; an existing output (allowed by --force) is removed only then."""
    target = output.resolve()
    old = target.with_name(target.name + ".replaced")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    partial.rename(target)
    if old.is_dir():
        shutil.rmtree(old)
    elif old.exists():
        old.unlink()


def model_card(source_name: str, command: str, summary: str, takers: list[str], table: str, source_readme: Path | None) -> str:
    """Return the README of an artifact: how it was made, what loads it (takers: a line for each runtime), and its table.

    The source's licence and language entries are kept in its front matter.
    """
    source_name, command = readable(source_name), readable(command)
    matter = ["base_model: " + source_name, "tags: [quantkit, quantized]"]
    if source_readme is not None:
        text = source_readme.read_text(encoding="utf-8", errors="replace")
        if text.startswith("---\n") and (end := text.find("\n---", 4)) > 0:
            matter += [line for line in text[4:end].splitlines() if line.startswith(("license", "language"))]
    return (
        "---\n" + "\n".join(matter) + "\n---\n\n"
        f"# {source_name}, quantized\n\n{summary}\n\nMade by [quantkit](quantkit.json) with\n\n"
        f"```\n{command}\n```\n\n## What loads it\n\n{LOADING}\n" + "".join(f"- {line}\n" for line in takers) + f"\n{table}\n\n"
        "The licence is that of the base model" + ("; its own page is README.source.md.\n" if source_readme is not None else ".\n")
    )
