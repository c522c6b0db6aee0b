"""GGUF files as a source: tensors under their Hugging Face names, and the configuration.

The mapping of settings and names is transformers'; what is ours is the header (`_gguf.py`) and the decoders of the
types that quantkit writes. Settings that transformers' mapping leaves at their defaults are set from the file.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.codecs import CODECS, GGML_TYPES, rounded
from quantkit.codecs.affine import Affine
from quantkit.errors import SourceError
from quantkit.foreign import foreign, whole
from quantkit.formats import _safetensors as st
from quantkit.formats._gguf import Header, add_key, read_header
from quantkit.formats._safetensors import TensorInfo
from quantkit.formats.gguf_settings import as_mixtral, set_ends, set_rope, set_sizes, set_windows
from quantkit.tensors import QuantTensor

CODEC_OF = {CODECS[name].type_id: name for name in GGML_TYPES}
SETTINGS = {"head_dim": "attention.key_length", "n_positions": "context_length", "max_position_embeddings": "context_length"}
EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")
MIXTRAL = {"gate": "w1", "down": "w2", "up": "w3"}
LONG = 4096  # keys with more elements are a vocabulary's


class GgufStore:
    """The tensors of one GGUF file as float32 weights under the names of the transformers model."""

    def __init__(self, path: Path, model: Any, config: Any) -> None:
        """Index `path`; model: the skeleton whose names are wanted; config: its configuration."""
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        self.path = path
        self.header = header = read_header(path)
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        architecture = str(header.get("general.architecture", ""))
        self.processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
        names = _model_names(path, architecture, model, self.processor, set(header.tensors))
        self.tensors: dict[str, str] = {}
        self.infos: dict[str, TensorInfo] = {}
        self.expert: dict[str, int] = {}  # which slice of its tensor a name is
        for tensor, entry in header.tensors.items():
            if (match := EXPERTS.fullmatch(tensor)) and f"model.layers.{match[1]}.mlp.experts.gate_up_proj" in shapes:
                for index in range(entry.shape[0]):
                    one = _expert_name(config.model_type, match[1], index, match[2])
                    self.tensors[one], self.expert[one] = tensor, index
                    self.infos[one] = TensorInfo("F32", entry.shape[1:])
                continue
            name = names.get(tensor)
            if name is None and not tensor.startswith("rope_"):
                raise SourceError(f"{path}: no {type(model).__name__} weight corresponds to '{tensor}'.")
            if name is not None:
                if math.prod(entry.shape) != math.prod(shapes[name]):
                    raise SourceError(
                        f"{path}: '{tensor}' has the shape {list(entry.shape)}, but the file's settings make it {list(shapes[name])}. "
                        "The file is damaged, or its settings are not those of its weights."
                    )
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
        tensor = self.tensors[name]
        values = decode(self.header, tensor, self.expert.get(name))
        with foreign(f"{self.path}: '{tensor}' does not fit the file's settings"):
            values = self.processor.process(weights=values, name=tensor, tensor_key_mapping={}, parsed_parameters={}).weights
        return torch.from_numpy(values.copy()).to(torch.float32).reshape(self.infos[name].shape)

    def exact_modules(self) -> dict[str, str]:
        """Return the modules (plain names) whose blocks are symmetric groups of 32 integers, with their type."""
        kinds = {
            name: CODEC_OF.get(self.header.tensors[tensor].type_id, "") for name, tensor in self.tensors.items() if name not in self.expert
        }
        return {name.removesuffix(".weight"): kind for name, kind in kinds.items() if kind in ("Q4_0", "Q8_0") and name.endswith(".weight")}

    def quant(self, module: str) -> QuantTensor:
        """Read one of the exact modules as codes and scales; rows are put back in the model's order."""
        name = f"{module}.weight"
        tensor = self.tensors[name]
        kind = CODEC_OF[self.header.tensors[tensor].type_id]
        shape = self.infos[name].shape
        codes, scale = rounded.to_codes(kind, torch.from_numpy(self.header.read(tensor, None)).reshape(shape[0], -1))

        def ordered(values: Tensor) -> Tensor:
            done = self.processor.process(weights=values.numpy(), name=tensor, tensor_key_mapping={}, parsed_parameters={}).weights
            return torch.from_numpy(done.copy())

        bits = 4 if kind == "Q4_0" else 8
        zero = torch.full(scale.shape, 1 << (bits - 1), dtype=torch.uint8)
        return QuantTensor(ordered(codes), {"scale": ordered(scale), "zero": zero}, Affine(bits, 32, True))

    def raw_rows(self, name: str) -> tuple[Tensor, Any] | None:
        """Return a matrix's blocks as stored, uint8 [rows, bytes], rows in the model's order, and its codec; None if there is none."""
        kind = CODEC_OF.get(self.header.tensors[self.tensors[name]].type_id)
        if kind is None or len(self.infos[name].shape) != 2:
            return None
        expert = self.expert.get(name)
        data = self.header.read(self.tensors[name], expert).reshape(self.infos[name].shape[0], -1)
        if expert is not None:
            return torch.from_numpy(data), CODECS[kind]  # of experts no rows are moved
        done = self.processor.process(weights=data, name=self.tensors[name], tensor_key_mapping={}, parsed_parameters={}).weights
        return torch.from_numpy(done.copy()), CODECS[kind]

    def stored_bytes(self, name: str) -> int:
        """Bytes that a name takes in the file."""
        entry = self.header.tensors[self.tensors[name]]
        return entry.nbytes // entry.shape[0] if name in self.expert else entry.nbytes

    def chunks(self, name: str) -> Iterator[bytes | memoryview]:
        """One decoded tensor's bytes in pieces."""
        return st.tensor_bytes(self.read(name))

    def files(self) -> list[Path]:
        """The file."""
        return [self.path]


def _expert_name(model_type: str, layer: str, index: int, part: str) -> str:
    """Return a checkpoint's name of one expert's weight; Mixtral's are of their own kind."""
    if model_type == "mixtral":
        return f"model.layers.{layer}.block_sparse_moe.experts.{index}.{MIXTRAL[part]}.weight"
    return f"model.layers.{layer}.mlp.experts.{index}.{part}_proj.weight"


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
    if {name for name in wanted if not name.startswith("rope_") and not EXPERTS.fullmatch(name)} <= set(names):
        return names
    with foreign(f"{path}: its tensors cannot be named"):
        return dict(get_gguf_hf_weights_map(model, processor))


def decode(header: Header, tensor: str, index: int | None = None) -> Any:
    """Return one tensor of a file, or slice `index` of it, float32 with its torch shape, as a numpy array."""
    entry, data = header.tensors[tensor], header.read(tensor, index)
    shape = entry.shape if index is None else entry.shape[1:]
    codec = CODEC_OF.get(entry.type_id)
    if codec is None:
        from gguf import GGMLQuantizationType, dequantize

        try:
            return dequantize(data, GGMLQuantizationType(entry.type_id)).reshape(shape)
        except NotImplementedError:
            raise SourceError(f"{header.path}: '{tensor}' has the type {entry.type_id}, which quantkit cannot decode.") from None
    return CODECS[codec].decode(torch.from_numpy(data)).reshape(shape).numpy()


def load_config(path: Path) -> Any:
    """Return the transformers configuration of a GGUF file."""
    from transformers import AutoConfig

    header = read_header(path)  # transformers believes what the file says
    if header.get("split.count", 1) != 1:
        pieces = header.get("split.count")
        raise SourceError(f"{path} is one of {pieces} pieces of a model. Put them together first (llama-gguf-split --merge).")
    arch = str(header.get("general.architecture", ""))
    blocks = whole(header.get(f"{arch}.block_count", 0), f"{path}: {arch}.block_count")
    if blocks > len(header.tensors):
        raise SourceError(f"{path} claims {blocks} blocks but holds {len(header.tensors)} tensors. The file is damaged.")
    with tempfile.TemporaryDirectory() as scratch, foreign(f"{path}: transformers cannot read its settings"):
        _write_sketch(header, Path(scratch) / "sketch.gguf")
        config = AutoConfig.from_pretrained(scratch, gguf_file="sketch.gguf")
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config = as_mixtral(config, header)
        text = config.get_text_config()
        for attribute, suffix in SETTINGS.items():
            if (value := header.get(f"{arch}.{suffix}")) is not None and hasattr(text, attribute):
                setattr(text, attribute, value)
        if (embedding := header.tensors.get("token_embd.weight")) is not None:
            text.vocab_size = embedding.shape[0]
        if "output.weight" in header.tensors:
            text.tie_word_embeddings = config.tie_word_embeddings = False
        set_sizes(text, header, arch)
        set_rope(text, header, arch, lambda name: decode(header, name))
        set_windows(text, header, arch)
        set_ends(config, header)
    return config


def _write_sketch(header: Header, path: Path) -> None:
    """Write the file's settings and tensor names without its tokens and data, whose parsing takes the gguf package long."""
    import numpy as np
    from gguf import GGUFWriter

    writer = GGUFWriter(str(path), str(header.get("general.architecture", "")))
    for name, key in header.keys.items():
        elements = len(key.value) if isinstance(key.value, list) else 1
        if name not in ("general.architecture", "general.alignment") and 0 < elements <= LONG:
            add_key(writer, name, key)
    for tensor in header.tensors:
        writer.add_tensor(tensor, np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
