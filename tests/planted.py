"""Faults to plant into good artifacts, each with the place that a verification must name."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantkit.formats import _gguf, _safetensors

Plant = Callable[[Path, random.Random], str]
FORMATS: dict[str, tuple[str, ...]] = {
    "gptq": ("--bits", "4", "--group-size", "32"),
    "gptq-asym": ("--asym", "--bits", "4", "--group-size", "32", "--format", "gptq"),
    "gptq-3": ("--bits", "3", "--group-size", "32"),
    "awq": ("--asym", "--bits", "4", "--group-size", "32", "--format", "awq"),
    "compressed": ("--bits", "4", "--group-size", "32", "--format", "compressed-tensors"),
    "int8": ("--bits", "8", "--group-size", "-1", "--activations", "dynamic"),
    "fp8": ("--codec", "fp8"),
    "nf4": ("--codec", "nf4"),
    "mxfp4": ("--codec", "mxfp4"),
}
GGUF_TYPES = ("Q4_0", "Q8_0", "Q4_K_M", "F16")


def _weights(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")]))


def _places(path: Path) -> dict[str, tuple[int, int]]:
    if path.suffix == ".gguf":
        return {e.name: (e.start, e.start + e.nbytes) for e in _gguf.read_header(path).tensors.values()}
    return {name: (entry.start, entry.stop) for name, entry in _safetensors.read_header(path).items()}


def _flip(path: Path, at: int, rng: random.Random) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << rng.randrange(8))]))


def _flip_in(*endings: str) -> Plant:
    def plant(folder: Path, rng: random.Random) -> str:
        path = _weights(folder, rng)
        places = _places(path)
        names = [name for name in places if name.endswith(endings)] or list(places)
        name = rng.choice(names)
        start, stop = places[name]
        _flip(path, rng.randrange(start, stop), rng)
        return name

    return plant


def flip_header(folder: Path, rng: random.Random) -> str:
    """Flip a bit of a weight file's header."""
    path = _weights(folder, rng)
    _flip(path, rng.randrange(8, min(start for start, _ in _places(path).values())), rng)
    return path.name


def drop_tensor(folder: Path, rng: random.Random) -> str:
    """Write a safetensors file again without one of its tensors, or cut a GGUF file."""
    path = _weights(folder, rng)
    if path.suffix == ".gguf":
        raw = path.read_bytes()
        path.write_bytes(raw[: -rng.randrange(64, len(raw) // 2)])
        return path.name
    from safetensors.torch import load_file, save_file

    tensors = load_file(str(path))
    name = rng.choice(sorted(tensors))
    del tensors[name]
    save_file(tensors, str(path), {"format": "pt"})
    return name


def swap_tensors(folder: Path, rng: random.Random) -> str:
    """Exchange the bytes of two tensors of one size, as a writer with a wrong order would."""
    path = _weights(folder, rng)
    by_size: dict[int, list[str]] = {}
    places, raw = _places(path), bytearray(path.read_bytes())
    for name, (start, stop) in places.items():
        by_size.setdefault(stop - start, []).append(name)
    pairs = [(a, b) for names in by_size.values() for a in names for b in names if raw[slice(*places[a])] != raw[slice(*places[b])]]
    a, b = rng.choice(pairs)
    one, two = raw[slice(*places[a])], raw[slice(*places[b])]
    raw[slice(*places[a])], raw[slice(*places[b])] = two, one
    path.write_bytes(raw)
    return a


def edit_config(folder: Path, rng: random.Random) -> str:
    """Change one setting of config.json that changes what a runtime computes."""
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    key, value = rng.choice([("rms_norm_eps", 1e-2), ("num_attention_heads", 2), ("tie_word_embeddings", True), ("rope_parameters", None)])
    config[key] = value
    path.write_text(json.dumps(config))
    return path.name


def edit_quantization(folder: Path, rng: random.Random) -> str:
    """Let config.json lie about how weights are stored: bits, group, zero points, or nothing at all."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    declared = config["quantization_config"]
    if "checkpoint_format" in declared and rng.random() < 0.6:
        declared["checkpoint_format"] = {"gptq": "gptq_v2", "gptq_v2": "gptq"}[declared["checkpoint_format"]]
    elif rng.random() < 0.5:
        del config["quantization_config"]
    else:
        declared["quant_method"] = "gptq" if declared["quant_method"] != "gptq" else "awq"
    path.write_text(json.dumps(config))
    return path.name


def remove_file(*names: str) -> Plant:
    """Return a plant that removes one of these files."""

    def plant(folder: Path, rng: random.Random) -> str:
        name = rng.choice([name for name in names if (folder / name).exists()])
        (folder / name).unlink()
        return name

    return plant


def stray_shard(folder: Path, rng: random.Random) -> str:
    """Leave a weight file of an older run in the folder."""
    shutil.copyfile(_weights(folder, rng), folder / "model-00001-of-00009.safetensors")
    return "model-00001-of-00009.safetensors"


def other_tokenizer(folder: Path, rng: random.Random) -> str:
    """Exchange the ids of two letters."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["e"], vocabulary["a"] = vocabulary["a"], vocabulary["e"]
    path.write_text(json.dumps(content))
    return path.name


FOLDER_FAULTS: dict[str, Plant] = {
    "codes": _flip_in(".qweight", ".weight_packed", ".weight"),
    "scales": _flip_in(".scales", ".weight_scale", ".weight.absmax", ".weight_scale_inv"),
    "zeros and indexes": _flip_in(".qzeros", ".g_idx", ".weight_zero_point", ".weight_shape"),
    "norms": _flip_in("norm.weight"),
    "header": flip_header,
    "dropped tensor": drop_tensor,
    "swapped tensors": swap_tensors,
    "configuration": edit_config,
    "quantization": edit_quantization,
    "missing file": remove_file("chat_template.jinja", "tokenizer.json", "config.json"),
    "stray shard": stray_shard,
    "tokenizer": other_tokenizer,
}
GGUF_FAULTS: dict[str, Plant] = {
    "blocks": _flip_in("weight"),
    "norms": _flip_in("norm.weight"),
    "header": flip_header,
    "cut": drop_tensor,
    "swapped tensors": swap_tensors,
}
