"""An empty skeleton of the model, a map of names, then one block at a time through accelerate.

The skeleton has no weights: parameters are on the meta device, buffers (rotary frequencies, embedding scales) are
real. `materialize` reads a module's tensors from the source in float32, `release` gives the memory back. Hooks that
load on call are not used: they drop edited weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.codecs._activations import RoundedInputs
from quantkit.errors import PlanError, SourceError, UsageError, name_list
from quantkit.families import family
from quantkit.foreign import foreign
from quantkit.formats._experts import EXPERT, PARTS
from quantkit.formats._packed import PackedStore
from quantkit.formats._safetensors import DTYPES, TensorInfo, require_finite, tensor_bytes
from quantkit.formats.store import TensorStore
from quantkit.source import Source


def pick_device(asked: str) -> torch.device:
    """Return the torch device for `--device`; 'auto' is CUDA, then MPS, then the CPU."""
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(asked)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {asked}: {str(error).splitlines()[0]} Use cpu, cuda, cuda:N, mps or auto.") from None
    return device


def build_skeleton(config: Any, trust_remote_code: bool = False) -> nn.Module:
    """Return the causal language model of a configuration, in eval mode, with its parameters on the meta device."""
    import transformers
    from accelerate import init_empty_weights

    with foreign(f"transformers {transformers.__version__} cannot build this model from its configuration"):
        architectures = config.architectures or []
        cls = getattr(transformers, architectures[0], None) if len(architectures) == 1 else None
        with init_empty_weights(include_buffers=False):
            if cls is not None and hasattr(cls, "_from_config") and not trust_remote_code:
                model = cls._from_config(config, dtype=torch.float32)
            else:
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
        model.tie_weights()
        model.eval()
    skeleton: nn.Module = model
    return skeleton


HEADS = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads", ".v_proj.": "num_key_value_heads"}


class NameMap:
    """Source names and model names, both ways.

    to_model and to_source hold one-to-one pairs; `stacks` maps a parameter that holds all experts of a layer to their
    tensors, part by part; `unused` are source tensors that the model class has no place for (carried through); `tied`
    maps a parameter without a tensor of its own to the one it shares.
    """

    def __init__(self, model: nn.Module, store: TensorStore) -> None:
        wanted = dict(model.state_dict(keep_vars=True))
        self.to_model: dict[str, str] = {}
        self.unused: list[str] = []
        self.stacks: dict[str, dict[str, dict[int, str]]] = {}
        rename, taken = _renamer(model, wanted), set[str]()
        for source in store.names():
            target, merged = rename(source)
            if merged:
                match = EXPERT.fullmatch(source)
                assert match is not None
                self.stacks.setdefault(target, {}).setdefault(PARTS[match["part"]], {})[int(match["index"])] = source
            elif target in wanted and target not in taken:
                self.to_model[source] = target
                taken.add(target)
            else:
                self.unused.append(source)
        self.to_source = {target: source for source, target in self.to_model.items()}
        self.transposed: set[str] = set()
        self.tied = self._ties(wanted)
        self._check(model, wanted, store)

    def _ties(self, wanted: dict[str, Tensor]) -> dict[str, str]:
        owners: dict[int, str] = {}
        for name in sorted(wanted, key=lambda n: n not in self.to_source):
            owners.setdefault(id(wanted[name]), name)
        return {name: owners[id(value)] for name, value in wanted.items() if owners[id(value)] != name}

    def _check(self, model: nn.Module, wanted: dict[str, Tensor], store: TensorStore) -> None:
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        lacking = [n for n in wanted if n in parameters and n not in self.to_source and n not in self.tied and n not in self.stacks]
        if lacking:
            raise SourceError(
                f"The checkpoint lacks {len(lacking)} tensors of {type(model).__name__}: {name_list(lacking)}. "
                f"It holds, without a place for them: {name_list(self.unused) or 'nothing else'}."
            )
        for source, target in self.to_model.items():
            have, want = store.info(source).shape, tuple(wanted[target].shape)
            if isinstance(store, PackedStore) and store.is_packed(source) and _of_conv1d(model, target):
                self.transposed.add(source)
                have = have[::-1]
            if have != want:
                raise SourceError(
                    f"'{source}' has shape {list(have)}, but config.json makes it {list(want)}. "
                    "Its sizes (hidden_size, heads, head_dim, ...) are not those of these weights."
                    + _other_size(model.config, source, have)
                )

        for target, parts in self.stacks.items():
            count = wanted[target].shape[0]
            if any(sorted(members) != list(range(count)) for members in parts.values()):
                raise SourceError(
                    f"'{target}' needs {count} experts, but the checkpoint holds {[len(m) for m in parts.values()]} of its parts."
                )

    def source_module(self, module: str) -> str:
        """Return a module's name on disk, from its weight's."""
        return self.to_source[f"{module}.weight"].removesuffix(".weight")


def _of_conv1d(model: nn.Module, name: str) -> bool:
    return name.endswith(".weight") and is_conv1d(model.get_submodule(name.removesuffix(".weight")))


def _renamer(model: Any, wanted: dict[str, Tensor]) -> Any:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [item for item in mapping if isinstance(item, WeightRenaming)]
    converters = [item for item in mapping if isinstance(item, WeightConverter)]
    prefix = model.base_model_prefix

    def rename(source: str) -> tuple[str, bool]:
        """Return the model's name, and whether the tensor is one expert of a stack."""
        if source in wanted:
            return source, False
        target, converted = rename_source_key(source, renamings, converters, prefix, wanted)
        if converted is not None and (target not in wanted or not EXPERT.fullmatch(source)):
            raise PlanError(
                f"'{source}' is merged with others when transformers loads it, in a way that quantkit does not know; "
                f"it cannot load {type(model).__name__} yet."
            )
        return str(target), converted is not None

    return rename


def find_blocks(model: Any) -> tuple[str, nn.ModuleList]:
    """Return name and list of the decoder blocks: the longest ModuleList, by parameters, of the text decoder."""
    model_type = str(model.config.model_type)
    if path := family(model_type).blocks:
        return path, model.get_submodule(path)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    inside = {id(module) for module in decoder.modules()}
    lists = [(n, m) for n, m in lists if id(m) in inside]
    if not lists:
        raise PlanError(f"No list of blocks was found in {type(model).__name__}; add a row to families.py.")
    return max(lists, key=lambda pair: sum(p.numel() for p in pair[1].parameters()))


def is_linear(module: nn.Module) -> bool:
    """Tell whether a module is a linear layer: torch's Linear, or GPT-2's Conv1D (whose weight is [in, out])."""
    return type(module) is nn.Linear or is_conv1d(module)


def is_expert_stack(module: Any) -> bool:
    """Tell whether a module is transformers' stack of gated experts: [experts, 2 * width, in] and [experts, out, width]."""
    stacks = (getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None))
    return hasattr(module, "act_fn") and all(isinstance(stack, nn.Parameter) and stack.dim() == 3 for stack in stacks)


def is_conv1d(module: nn.Module) -> bool:
    """Tell whether a module is transformers' Conv1D."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _other_size(config: Any, name: str, shape: tuple[int, ...]) -> str:
    """Return which head_dim would fit a projection's rows, if one would."""
    text = config.get_text_config()
    kind = next((key for part, key in HEADS.items() if part in name), "")
    heads = getattr(text, kind, None)
    if not heads or shape[0] % heads:
        return ""
    return f" Its {shape[0]} rows are {heads} heads of {shape[0] // heads}: is head_dim {shape[0] // heads} missing?"


def head_size(config: Any) -> int:
    """Return the columns of an attention head."""
    config = config.get_text_config()
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


class Loader:
    """The skeleton of one source, and its weights on demand."""

    def __init__(self, source: Source, device: torch.device) -> None:
        self.source = source
        self.device = device
        self.model: Any = build_skeleton(source.config(), source.trust_remote_code)
        self.names = NameMap(self.model, source.store)
        self.block_path, self.blocks = find_blocks(self.model)
        self.returns_tuple = False  # whether a block returns a tuple; found by the first recording
        for module in self.model.modules():
            for key, buffer in module.named_buffers(recurse=False):
                if not buffer.is_meta:
                    module.register_buffer(key, buffer.to(device), persistent=key not in module._non_persistent_buffers_set)

        self._round_inputs()

    def _round_inputs(self) -> None:
        """Let the linears of an artifact that rounds its inputs at run time do so here."""
        store = self.source.store
        if not isinstance(store, PackedStore):
            return
        for module in store.modules:
            found, name = store.activation(module), self.names.to_model.get(f"{module}.weight")
            if found is not None and name is not None:
                linear = self.model.get_submodule(name.removesuffix(".weight"))
                linear.forward = RoundedInputs(linear, found[0], None if found[1] is None else found[1].to(self.device))

    def notices(self, fate: str) -> list[str]:
        """Return what to say of tensors that the model has no place for; fate: what becomes of them."""
        unused = self.names.unused
        return [f"{len(unused)} tensors that the model has no place for are {fate}: {name_list(unused)}"] if unused else []

    def block_name(self, index: int) -> str:
        """Return the full module name of a block."""
        return f"{self.block_path}.{index}"

    def outer_names(self, head: bool) -> list[str]:
        """Return the model names outside the blocks that text needs: embeddings and norms, and the head if asked."""
        decoder = self.model.get_decoder() if hasattr(self.model, "get_decoder") else self.model.base_model
        text = {id(module) for module in decoder.modules()}
        names = []
        output = self.model.get_output_embeddings()
        for module_name, module in self.model.named_modules():
            if f"{module_name}.".startswith(f"{self.block_path}."):
                continue
            is_head = output is not None and module is output
            if id(module) in text or (head and is_head):
                names += [f"{module_name}.{key}".lstrip(".") for key in _own_names(module)]
        return names

    def all_names(self) -> list[str]:
        """Return the model names of every tensor that text needs."""
        names = self.outer_names(head=True)
        return names + [name for index in range(len(self.blocks)) for name in self.block_names(index)]

    def materialize(self, names: Iterable[str]) -> None:
        """Read these tensors (model names) from the source, in float32 on the device; NaN and Inf are a SourceError."""
        from accelerate.utils import set_module_tensor_to_device

        for name in names:
            owner = self.names.tied.get(name, name)
            if owner not in self.names.to_source and owner not in self.names.stacks:
                continue
            if self.model.get_parameter_or_buffer(owner).is_meta:
                value = self._read_stack(owner) if owner in self.names.stacks else self.read(self.names.to_source[owner])
                set_module_tensor_to_device(self.model, owner, self.device, value=value, dtype=value.dtype)
            if owner != name:
                module, _, key = name.rpartition(".")
                setattr(self.model.get_submodule(module), key, self.model.get_parameter(owner))

    def read(self, source_name: str) -> Tensor:
        """Return one source tensor, floats as float32; NaN or Inf in it is a SourceError."""
        value = self.source.store.read(source_name)
        if source_name in self.names.transposed:  # packed as [out, in], but a Conv1D holds [in, out]
            value = value.T.contiguous()
        if not value.is_floating_point():
            return value
        value = value.to(torch.float32)
        if not torch.isfinite(value.sum()):
            require_finite(source_name, value)
        return value

    def _read_stack(self, name: str) -> Tensor:
        """Return all experts of a layer, float32 [experts, out, in]; gate's rows above up's where they are fused."""
        parts = [self.names.stacks[name][part] for part in ("gate", "up", "down") if part in self.names.stacks[name]]
        stacked = torch.empty(self.model.get_parameter(name).shape)
        for index in range(len(stacked)):
            torch.cat([self.read(members[index]) for members in parts], out=stacked[index])
        return stacked

    def info(self, source_name: str) -> TensorInfo:
        """Return dtype code and shape of a source tensor, the shape as the model's module has it."""
        info = self.source.store.info(source_name)
        return TensorInfo(info.dtype, info.shape[::-1]) if source_name in self.names.transposed else info

    def chunks(self, source_name: str, wanted: TensorInfo) -> Iterator[bytes | memoryview]:
        """Yield a source tensor's bytes in the wanted dtype; a value that dtype cannot hold is a SourceError."""
        if wanted == self.source.store.info(source_name) and source_name not in self.names.transposed:
            yield from self.source.store.chunks(source_name)
            return
        value = self.read(source_name).to(DTYPES[wanted.dtype])
        if value.is_floating_point() and (count := int(torch.isinf(value).sum())):
            raise SourceError(f"'{source_name}' has {count} values that {wanted.dtype} cannot hold. Use --dtype bfloat16 or float32.")
        yield from tensor_bytes(value)

    def release(self, names: Iterable[str]) -> None:
        """Put these tensors (model names) back on the meta device."""
        from accelerate.utils import set_module_tensor_to_device

        for name in names:
            module, _, key = name.rpartition(".")
            if key in self.model.get_submodule(module)._parameters:
                set_module_tensor_to_device(self.model, name, "meta")

    def block_names(self, index: int) -> list[str]:
        """Return the model names of a block's tensors."""
        prefix = self.block_name(index)
        return [f"{prefix}.{key}" for key in self.blocks[index].state_dict()]

    def sources_of(self, module: str) -> list[str]:
        """Return the source tensors of a linear's weight, or of a stack of experts."""
        if module in self.names.stacks:
            return [source for members in self.names.stacks[module].values() for source in members.values()]
        return [self.names.to_source[module if module in self.names.to_source else f"{module}.weight"]]

    def expert_modules(self, index: int) -> dict[tuple[str, str, int], str]:
        """Return (stack's name in the block, part, expert) -> the full name of the module that the checkpoint has it as."""
        found: dict[tuple[str, str, int], str] = {}
        prefix = f"{self.block_name(index)}."
        for target, parts in self.names.stacks.items():
            if target.startswith(prefix):
                stack = target.removeprefix(prefix).rpartition(".")[0]
                found |= {(stack, part, n): source.removesuffix(".weight") for part, held in parts.items() for n, source in held.items()}
        return found

    def linear_names(self) -> list[str]:
        """Return the full names of the linear layers of all blocks."""
        return [f"{self.block_name(index)}.{name}" for index in range(len(self.blocks)) for name in self.linears(index)]

    def linears(self, index: int) -> dict[str, nn.Module]:
        """Return a block's linear layers by their name inside the block."""
        return {name: module for name, module in self.blocks[index].named_modules() if is_linear(module)}


def _own_names(module: nn.Module) -> list[str]:
    return [*(key for key, _ in module.named_parameters(recurse=False)), *module._buffers]


def matches(patterns: Iterable[str], name: str) -> bool:
    """Tell whether any of the regular expressions is found in a name; one that is none is a UsageError."""
    try:
        return any(re.search(pattern, name) for pattern in patterns)
    except re.error as error:
        raise UsageError(f"'{error.pattern!s}' is no regular expression ({error}).") from None
