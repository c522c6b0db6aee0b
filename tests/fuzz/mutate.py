"""Mutations of valid files: of bytes, of numbers in text, of the structure of JSON and of lines, of where a name leads.

`mutate` picks one file of a seed and changes it one to three times; everything hangs on the random generator alone.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mutate_binary import change_bin, change_gguf, change_safetensors
from pools import HINTS, LARGEST, NUMBERS, RAW, TEMPLATES, TEXTS, TOML, YAML

Edits = dict[str, bytes | Path | None]  # relative name -> bytes, the target of a link, or nothing: removed


def mutate(rng: random.Random, seed: Path, outside: Path) -> tuple[Edits, str]:
    """Return the changed files of a seed, and what was done; outside: copies of models that a link or path may lead to."""
    if not seed.is_dir():
        data, what = _change(rng, seed.name, seed.read_bytes())
        return {seed.name: data}, what
    names = sorted(
        str(path.relative_to(seed)) for path in seed.rglob("*") if path.is_file() and path.name not in ("quantkit.json", "README.source.md")
    )
    names += (
        ["config.json"] * 4
        + ["tokenizer_config.json", "tokenizer.json"]
        + [n for n in names if n.endswith((".index.json", ".safetensors"))] * 2
    )
    name = rng.choice(names)
    if rng.random() < 0.04:
        kind = rng.choice(("removed", "link out", "link to a folder", "dangling link", "link to itself", "empty"))
        inside = {
            "link out": outside / "plain" / name,
            "link to a folder": outside,
            "dangling link": Path("nowhere"),
            "link to itself": Path(Path(name).name),
        }
        return {name: b"" if kind == "empty" else inside.get(kind)}, f"{name}: {kind}"
    data, what = _change(rng, name, (seed / name).read_bytes())
    edits: Edits = {name: data}
    if rng.random() < 0.1 and (other := rng.choice(names)) != name:
        edits[other], more = _change(rng, other, (seed / other).read_bytes())
        what += " + " + more
    return edits, what


def _change(rng: random.Random, name: str, data: bytes) -> tuple[bytes, str]:
    structured: Callable[..., tuple[bytes, str]] | None = None
    if name.endswith(".json"):
        structured = change_json
    elif name.endswith(".jsonl"):
        structured = _rows
    elif name.endswith(".safetensors"):
        structured = _safetensors
    elif name.endswith(".gguf"):
        structured = _gguf
    elif name.endswith(".bin"):
        structured = _bin
    elif name.endswith((".toml", ".md", ".jinja", ".txt")):
        structured = _lines
    if structured is not None and rng.random() < 0.75:
        data, what = structured(rng, name, data)
        return data[:LARGEST], f"{name}: {what}"
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data, what = _bytes(rng, data)
        done.append(what)
    return data, f"{name}: {', '.join(done)}"


def _bytes(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    limit = min(len(data), 4096) if rng.random() < 0.7 else len(data)  # headers more often than weights
    at = rng.randrange(limit) if limit else 0
    width = rng.choice((1, 2, 4, 8, 32, 500))
    kind = rng.choice(("flip", "truncate", "insert", "double", "delete", "word", "number"))
    if kind == "flip" and data:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :], f"flip at {at}"
    if kind == "truncate":
        return data[:at], f"truncate at {at}"
    if kind == "insert":
        return data[:at] + rng.randbytes(width) + data[at:], f"insert {width} at {at}"
    if kind == "double":
        return data[: at + width] + data[at:], f"double {width} at {at}"
    if kind == "delete":
        return data[:at] + data[at + width :], f"delete {width} at {at}"
    if kind == "number" and (found := list(re.finditer(rb"-?\d+(\.\d+)?", data[:100_000]))):
        match, value = rng.choice(found), rng.choice(NUMBERS)
        return data[: match.start()] + str(value).encode() + data[match.end() :], f"number at {match.start()} is {value}"
    value, size = rng.choice([n for n in NUMBERS if isinstance(n, int)]), rng.choice((4, 8))
    return data[:at] + (value & (1 << 8 * size) - 1).to_bytes(size, "little") + data[at + size :], f"word at {at} is {value}"


def _junk(rng: random.Random, raws: list[str]) -> Any:
    """Return a value of any type; text that json cannot write becomes a placeholder for an entry of `raws`."""
    kind = rng.randrange(5)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(TEXTS)
    if kind == 2:
        raws.append(rng.choice(RAW))
        return f"@RAW{len(raws) - 1}@"
    return rng.choice((None, True, False, [], {}, [None], [[]], {"a": {}}, [{}], {"": 0}, [1, "a"], -0.0))


def change_json(rng: random.Random, name: str, data: bytes) -> tuple[bytes, str]:
    value, raws, done = json.loads(data), list[str](), []
    hints = HINTS.get(Path(name).name, ())
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        box, key = value, None
        while isinstance(box, (dict, list)) and box:
            key = rng.choice(list(box) if isinstance(box, dict) else range(len(box)))
            if not (isinstance(box[key], (dict, list)) and box[key]) or rng.random() < 0.3:
                break
            box = box[key]
        if key is None or not box:
            continue
        kind = rng.choice(("delete", "junk", "junk", "rename", "number", "many", *(("hint",) * 4 if hints else ())))
        if kind == "hint":
            key, values = rng.choice(hints)
            inner = value["model"] if key in ("vocab", "merges") and isinstance(value.get("model"), dict) else value
            inner[key] = rng.choice(values)
            kind = f"hint {str(inner[key])[:40]!r}"
        elif kind == "delete":
            del box[key]
        elif kind == "rename" and isinstance(box, dict):
            box[str(rng.choice((*TEXTS[:12], *box)))] = box.pop(key)
        elif kind == "number":
            box[key] = rng.choice(NUMBERS)
        elif kind == "many":
            box[key] = [box[key]] * rng.choice((2, 1000)) if rng.random() < 0.5 else {str(i): box[key] for i in range(rng.choice((1, 300)))}
        else:
            box[key] = _junk(rng, raws)
            kind = f"junk {raws[-1][:20] if raws else str(box[key])[:30]!r}"
        done.append(f"{str(key)[:40]!r} {kind}")
    if rng.random() < 0.05:
        raws.append(rng.choice(RAW))
        value = f"@RAW{len(raws) - 1}@"
        done.append(f"all is {raws[-1][:20]}")
    text = json.dumps(value)
    for i, raw in enumerate(raws):
        text = text.replace(f'"@RAW{i}@"', raw)
    return text.encode(), ", ".join(done)


def _rows(rng: random.Random, name: str, data: bytes) -> tuple[bytes, str]:
    lines = data.splitlines()
    at = rng.randrange(len(lines))
    lines[at], what = change_json(rng, name, lines[at])
    return b"\n".join(lines) + b"\n", f"line {at}: {what}"


def _lines(rng: random.Random, name: str, data: bytes) -> tuple[bytes, str]:
    """Change a line of TOML, Markdown with YAML, a template or text."""
    if name.endswith(".jinja") and rng.random() < 0.7:
        template = rng.choice(TEMPLATES)
        return template.encode(), f"template {template[:40]!r}"
    lines = data.decode().split("\n")
    at = rng.randrange(len(lines))
    if name.endswith(".md"):
        lines[rng.randrange(1, 4)] = text = rng.choice(YAML)
        return "\n".join(lines).encode(), f"yaml {text[:40]!r}"
    value = rng.choice(TOML)
    head = lines[at].partition("=")[0] or "a"
    lines[at] = rng.choice(
        (
            f"{head}= {value}",
            f"{lines[at]}\n{lines[at]}",
            "",
            f"[{head.strip()}]",
            "[types]",
            f"types = {value}",
            head,
            "\0",
            "[" + "a." * 5000 + "a]",
        )
    )
    return "\n".join(lines).encode("utf-8", "surrogatepass"), f"line {at} is {lines[at][:40]!r}"


def _safetensors(rng: random.Random, name: str, data: bytes) -> tuple[bytes, str]:
    return change_safetensors(rng, data, change_json)


def _gguf(rng: random.Random, name: str, data: bytes) -> tuple[bytes, str]:
    return change_gguf(rng, data)


def _bin(rng: random.Random, name: str, data: bytes) -> tuple[bytes, str]:
    return change_bin(rng)
