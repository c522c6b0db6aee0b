"""GGUF files as a source: tensors under their Hugging Face names, and the tokenizer the file describes.

The container and its decoders are the gguf package's, configuration and vocabulary transformers'; what is ours is
reading one tensor at a time and the pre-tokenizer, which transformers rebuilds for only a few models. An unknown
`tokenizer.ggml.pre` is an error: a wrong split of digits costs perplexity without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import SourceError
from quantkit.formats import _safetensors as st
from quantkit.formats._safetensors import TensorInfo

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {"llama-bpe": WORDS + r"\p{N}{1,3}" + TAIL, "qwen2": WORDS + r"\p{N}" + TAIL}
SPLITS |= {"llama3": SPLITS["llama-bpe"], "llama-v3": SPLITS["llama-bpe"], "deepseek-r1-qwen": SPLITS["qwen2"]}
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")
BYTE_LEVEL = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone")


class GgufStore:
    """The tensors of one GGUF file as float32 weights under the names of the transformers model."""

    def __init__(self, path: Path, model: Any, config: Any) -> None:
        """Index `path`; model: the skeleton whose names are wanted; config: its configuration."""
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        self.path = path
        reader = open_reader(path)
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        architecture = str(reader.fields["general.architecture"].contents())
        self.processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
        names = _model_names(path, architecture, model, self.processor, {tensor.name for tensor in reader.tensors})
        self.vocabulary = {
            key: str(reader.fields[f"tokenizer.ggml.{key}"].contents()) if f"tokenizer.ggml.{key}" in reader.fields else ""
            for key in ("model", "pre")
        }
        self.tensors: dict[str, Any] = {}
        self.infos: dict[str, TensorInfo] = {}
        for tensor in reader.tensors:
            name = names.get(tensor.name)
            if name is None and not tensor.name.startswith("rope_"):
                raise SourceError(f"{path}: no {type(model).__name__} weight corresponds to '{tensor.name}'.")
            if name is not None:
                self.tensors[name] = tensor
                self.infos[name] = TensorInfo("F32", shapes[name])

    def names(self) -> list[str]:
        """Names, in the order of the file."""
        return list(self.tensors)

    def info(self, name: str) -> TensorInfo:
        """Always float32: what the blocks decode to."""
        return self.infos[name]

    def read(self, name: str) -> Tensor:
        """Decode one tensor to float32 and undo what the file's architecture did to it (Q/K order, norm offset)."""
        from gguf import dequantize

        tensor = self.tensors[name]
        values = self.processor.process(
            weights=dequantize(tensor.data, tensor.tensor_type), name=tensor.name, tensor_key_mapping={}, parsed_parameters={}
        ).weights
        return torch.from_numpy(values.copy()).to(torch.float32).reshape(self.infos[name].shape)

    def chunks(self, name: str) -> Iterator[bytes | memoryview]:
        """One decoded tensor's bytes in pieces."""
        return st.tensor_bytes(self.read(name))

    def files(self) -> list[Path]:
        """The file."""
        return [self.path]


def _model_names(path: Path, architecture: str, model: Any, processor: Any, wanted: set[str]) -> dict[str, str]:
    """Return GGUF name -> model name: one look at gguf's table, or transformers' slower search for odd families."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    ids = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
    names: dict[str, str] = {}
    if architecture in ids:
        table = get_tensor_name_map(ids[architecture], model.config.get_text_config().num_hidden_layers)
        for name in model.state_dict():
            stem, dot, suffix = processor.preprocess_name(name).rpartition(".")
            if (known := table.get_name(stem)) is not None:
                names[f"{known}{dot}{suffix}"] = name
    if {name for name in wanted if not name.startswith("rope_")} <= set(names):
        return names
    try:
        return dict(get_gguf_hf_weights_map(model, processor))
    except NotImplementedError as error:
        raise SourceError(f"{path}: {error}") from None


def check_magic(path: Path) -> None:
    """Raise a SourceError if a file does not begin as a GGUF file does."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise SourceError(f"{path} is not a GGUF file (its first four bytes say so). Download it again.")


def open_reader(path: Path) -> Any:
    """Return gguf's reader for `path`; a SourceError says what is wrong with the file."""
    from gguf import GGUFReader

    check_magic(path)
    try:
        reader = GGUFReader(str(path))
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise SourceError(f"{path} is damaged or truncated ({error}). Download it again.") from None
    seen: set[str] = set()
    for tensor in reader.tensors:
        if tensor.name in seen:
            raise SourceError(f"{path} holds '{tensor.name}' twice.")
        seen.add(tensor.name)
    return reader


def load_config(path: Path) -> Any:
    """Return the transformers configuration of a GGUF file."""
    from transformers import AutoConfig

    check_magic(path)
    try:
        config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    except (ValueError, KeyError) as error:
        raise SourceError(f"{path}: transformers cannot read this architecture ({error}).") from None
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def load_tokenizer(path: Path, model: str, pre: str) -> Any:
    """Return the tokenizer of a GGUF file; model, pre: its `tokenizer.ggml.model` and `tokenizer.ggml.pre`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    if model == "gpt2":
        set_pre_tokenizer(tokenizer.backend_tokenizer, pre or "gpt-2", path)
    return tokenizer


def set_pre_tokenizer(backend: Any, pre: str, path: Path) -> None:
    """Give a tokenizers.Tokenizer the pre-tokenizer of llama.cpp's name `pre`; unknown names are a SourceError."""
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in SPLITS)
    if pre in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[pre]), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif pre in SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif pre in BYTE_LEVEL:
        backend.pre_tokenizer = byte_level
    else:
        known = ", ".join(sorted([*SPLITS, *SINGLE_DIGITS, *BYTE_LEVEL]))
        raise SourceError(
            f"{path} uses the pre-tokenizer '{pre}', which quantkit does not know, and guessing would change the "
            f"tokens. Start from the original checkpoint instead. Known: {known}."
        )
