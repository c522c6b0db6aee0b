"""The valid files that the fuzzer mutates: a tiny Llama in every container, importance matrices, recipes, calibration data."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from quantkit import cli
from quantkit.corpus import data_folder
from quantkit.formats import _sentencepiece as sp

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 4}
WIDE = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_key_value_heads": 4}  # blocks of 128
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}{% endfor %}"
README = "---\nlicense: mit\nlanguage: [en, de]\nbase_model: a/b\ntags:\n- x\ndatasets: [c/d]\n---\n# A model\n"
ROWS = (
    {"text": "The quick brown fox, 12 times.", "n": 1},
    {"messages": [{"role": "user", "content": "Hi"}, {"from": "gpt", "value": "Ho, ho."}]},
    {"content": "ça va? " * 8},
)
PACKED = {
    "gptq": ("--format", "gptq"),
    "awq": ("--format", "awq"),
    "ct": ("--format", "compressed-tensors"),
    "fp8": ("--format", "fp8", "--codec", "fp8"),
    "bnb": ("--format", "bitsandbytes", "--codec", "nf4"),
    "nvfp4": ("--format", "compressed-tensors", "--codec", "nvfp4"),
}


def make_seeds(root: Path) -> dict[str, Path]:
    """Make every seed under `root` and return kind -> folder or file."""
    sys.path.insert(0, str(data_folder("recipes").parent / "tests"))
    from conftest import TEXT, make_model  # type: ignore[import-not-found]

    root.mkdir(parents=True)
    plain = make_model(root / "plain", dtype=torch.bfloat16, **TINY)
    _finish(plain)
    found = {"plain": plain}
    (root / "corpus-text.txt").write_text(TEXT[:4000] + "<|document|>" + TEXT[:200], encoding="utf-8")
    (root / "corpus-rows.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS * 4), encoding="utf-8")
    _parquet(root / "corpus-table.parquet")
    for name in ("corpus-text.txt", "corpus-rows.jsonl", "corpus-table.parquet"):
        found[name.partition(".")[0]] = root / name
    for kind, flags in PACKED.items():
        source = plain if kind != "fp8" else make_model(root / "wide", dtype=torch.bfloat16, **WIDE)
        _run("rtn", source, "-o", root / kind, "--group-size", "32", "--quiet", *flags)
        found[kind] = root / kind
    found["sp"] = _with_pieces(plain, root / "sp")
    found["bin"] = _with_bin(plain, root / "bin")
    for kind, source, kind_of_file in (("gguf", "plain", "Q8_0"), ("gguf-q4", "plain", "Q4_0"), ("gguf-sp", "sp", "F16")):
        found[kind] = root / f"{kind}.gguf"
        _run("export-gguf", found[source], "-o", found[kind], "--type", kind_of_file, "--quiet")
    for kind, suffix in (("imatrix-dat", ".dat"), ("imatrix-gguf", ".gguf")):
        found[kind] = root / f"{kind}{suffix}"
        _run("imatrix", plain, "-o", found[kind], "--calibration", root / "corpus-text.txt", "--samples", 2, "--seq-len", 32, "--quiet")
    for name in ("q4_k_m", "q3_k_l", "iq4_xs"):
        found[f"recipe-{name}"] = Path(shutil.copyfile(data_folder("recipes") / f"{name}.toml", root / f"{name}.toml"))
    return found


def _run(*words: object) -> None:
    before, sys.argv = sys.argv, ["quantkit", *map(str, words)]
    try:
        cli.main()
    finally:
        sys.argv = before


def _finish(folder: Path) -> None:
    """Split the weights into two shards with an index, and add the side files of a published model."""
    from safetensors.torch import load_file, save_file

    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"model-0000{1 + (number % 2)}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in sorted(set(where.values())):
        save_file({name: tensors[name] for name in where if where[name] == file}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (folder / "README.md").write_text(README, encoding="utf-8")
    settings = {"bos_token_id": 1, "eos_token_id": [2, 3], "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    (folder / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _with_pieces(plain: Path, folder: Path) -> Path:
    """Return a copy whose vocabulary is SentencePiece's: tokenizer.model, tokenizer.json with byte_fallback, added_tokens.json."""
    shutil.copytree(plain, folder)
    pieces = [sp.Piece(b"<unk>", 0.0, sp.UNKNOWN), sp.Piece(b"<s>", 0.0, sp.CONTROL), sp.Piece(b"</s>", 0.0, sp.CONTROL)]
    pieces += [sp.Piece(f"<0x{byte:02X}>".encode(), 0.0, sp.BYTE) for byte in range(256)]
    pieces += [sp.Piece(word.encode(), -float(i)) for i, word in enumerate(("▁t", "he", "▁", "t", "h", "e", "a"))]
    sp.write_pieces(folder / "tokenizer.model", pieces, True)
    described = json.loads((plain / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = {piece.text.decode(): i for i, piece in enumerate(pieces)}
    described["model"] |= {"vocab": vocab, "merges": [["▁", "t"], ["h", "e"]], "byte_fallback": True, "unk_token": "<unk>"}
    described["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
    described["decoder"] = described["pre_tokenizer"]
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    (folder / "added_tokens.json").write_text(json.dumps({"<extra>": 270}), encoding="utf-8")
    return folder


def _with_bin(plain: Path, folder: Path) -> Path:
    """Return a copy whose weights are one pytorch_model.bin."""
    from safetensors.torch import load_file

    shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    tensors = {name: value for path in sorted(plain.glob("*.safetensors")) for name, value in load_file(path).items()}
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


def _parquet(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": [f"Row {i} of the table." for i in range(40)], "n": list(range(40))}), path)
