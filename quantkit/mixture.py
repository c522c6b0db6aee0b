"""Which type every tensor of a GGUF file gets: a mixture policy from `recipes/`, evaluated by one procedure.

The policies are data and the procedure is llama-quantize's, so both tools choose alike for the same file type. Every
choice says why it was made; a row that a type's blocks do not fill takes the next type that fits, and is listed.

Source: llama.cpp, src/llama-quant.cpp (tensor categories, counters and fallbacks).
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from quantkit.codecs import CODECS, GGML_TYPES
from quantkit.errors import PlanError, UsageError
from quantkit.registry import data_folder

FLOATS = ("F32", "F16", "BF16")
# What a row takes when the blocks of its type do not divide it.
NARROWER = {"IQ4_XS": "IQ4_NL", "Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
NEVER = re.compile(
    r"_norm\.weight|ffn_gate_inp\.weight|ssm_conv1d|shortconv\.conv\.weight|altup|laurel|per_layer_model_proj|attn_rel_b\.weight"
)
ROLES = (
    ("attn_v", ("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight")),
    ("attn_k", ("attn_k.weight",)),
    ("attn_q", ("attn_q.weight",)),
    ("attn_output", ("attn_output.weight",)),
    ("ffn_up", ("ffn_up",)),
    ("ffn_gate", ("ffn_gate",)),
    ("ffn_down", ("ffn_down",)),
)
RULED = ("attn_v", "ffn_down", "attn_output")
CONDITION = re.compile(r"always|more|first-(\d{1,6}|eighth|sixteenth)|gqa4|experts8|not-experts8|imatrix|no-imatrix")


@dataclass(frozen=True)
class Policy:
    """One recipe's [types]: file type id of llama.cpp, base type, rules per role as (conditions, type)."""

    name: str
    file_type: int
    base: str
    rules: dict[str, tuple[tuple[tuple[str, ...], str], ...]] = field(default_factory=dict)

    @property
    def is_float(self) -> bool:
        """Whether the policy only stores floats."""
        return self.base in FLOATS


@dataclass(frozen=True)
class Facts:
    """What a policy asks about a model. layers, heads, kv_heads, experts: counts; tied: no output matrix of its own."""

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    experts: int
    tied: bool


@dataclass(frozen=True)
class Wishes:
    """What the user overrides. tensor_types: (regular expression, type), the first match wins."""

    tensor_types: tuple[tuple[str, str], ...] = ()
    output: str = ""
    embedding: str = ""
    pure: bool = False
    imatrix: bool = False


@dataclass(frozen=True)
class Choice:
    """One tensor's type, and why it is not the base type, if it is not. wanted: the type that did not fit its rows."""

    name: str
    shape: tuple[int, ...]
    type: str
    reason: str = ""
    wanted: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape[:-1]) * int(CODECS[self.type].row_bytes(self.shape[-1]))


@cache
def policies() -> tuple[str, ...]:
    """Return the names of the mixtures that come with quantkit."""
    paths = [path for path in data_folder("recipes").iterdir() if path.suffix == ".toml"]
    return tuple(sorted(path.stem.upper() for path in paths if "types" in tomllib.loads(path.read_text(encoding="utf-8"))))


def load_policy(name: str) -> Policy:
    """Return the policy of a name such as Q4_K_M, or of a TOML file; a UsageError says what is wrong with it."""
    path = Path(name) if name.endswith(".toml") else data_folder("recipes") / f"{name.lower()}.toml"
    if not path.is_file():
        raise UsageError(f"--type '{name}' cannot be. Known: {', '.join(policies())}, or the path of a recipe in TOML.")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))["types"]
        rules = {role: tuple(_parse_rule(rule, path) for rule in table.get(role, [])) for role in RULED}
        policy = Policy(path.stem.upper(), int(table["file_type"]), str(table["base"]), rules)
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UsageError(f"{path} is no recipe: {error}. See recipes/README.md for the keys of [types].") from None
    if unknown := sorted(set(table) - {"file_type", "base", *RULED}):
        raise UsageError(f"{path}: unknown keys {', '.join(unknown)}. Known: file_type, base, {', '.join(RULED)}.")
    _require_type(policy.base, str(path))
    return policy


def _parse_rule(rule: str, path: Path) -> tuple[tuple[str, ...], str]:
    conditions, _, kind = rule.partition(":")
    _require_type(kind.strip(), f"{path}: '{rule}'")
    for condition in conditions.split():
        if not CONDITION.fullmatch(condition):
            raise UsageError(f"{path}: '{condition}' is no condition. See recipes/README.md.")
    return tuple(conditions.split()), kind.strip()


def _require_type(kind: str, where: str) -> None:
    if kind not in GGML_TYPES:
        raise UsageError(f"{where}: unknown type '{kind}'. Known: {', '.join(GGML_TYPES)}.")


def parse_tensor_types(texts: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return (regular expression, type) of each REGEX=TYPE."""
    pairs = []
    for text in texts:
        pattern, equals, kind = text.rpartition("=")
        if not equals or not pattern:
            raise UsageError(f"--tensor-type '{text}' is not REGEX=TYPE, such as 'ffn_down=Q6_K'.")
        _require_type(kind.upper(), f"--tensor-type '{text}'")
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"--tensor-type '{pattern}' is no regular expression ({error}).") from None
        pairs.append((pattern.lower(), kind.upper()))
    return tuple(pairs)


def order(names: list[str]) -> list[str]:
    """Return tensor names as llama-quantize writes them: outside the layers first, then layer by layer, by name."""
    return sorted(names, key=lambda name: (_layer(name), name.encode()))


def _layer(name: str) -> int:
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else -1


def eligible(name: str, shape: tuple[int, ...]) -> bool:
    """Tell whether a tensor is quantized at all; others stay in float32."""
    dims = len(shape) - next((i for i, n in enumerate(shape) if n > 1), len(shape))
    return dims >= 2 and name.endswith("weight") and not NEVER.search(name) and name not in ("position_embd.weight", "token_types.weight")


def role_of(name: str) -> str:
    """Return a tensor's role: output, token_embd, one of ROLES, or other."""
    if name == "output.weight":
        return "output"
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return "token_embd"
    return next((role for role, parts in ROLES if any(part in name for part in parts)), "other")


def choose(shapes: dict[str, tuple[int, ...]], policy: Policy, facts: Facts, wishes: Wishes) -> list[Choice]:
    """Return a choice for every tensor, in the order of the file. shapes: torch's, row length last."""
    seen: Counter[str] = Counter()
    total = sum(role_of(name) == "attn_v" for name in shapes)
    choices = []
    for name in order(list(shapes)):
        shape = shapes[name]
        if not eligible(name, shape):
            choices.append(Choice(name, shape, "F32", "not quantized"))
            continue
        kind, reason, fixed = _wanted(name, shape, policy, facts, wishes, seen, total)
        choices.append(_fit(name, shape, kind, reason, fixed))
        _require_importance(name, choices[-1], policy, wishes)
    return choices


def _wanted(
    name: str, shape: tuple[int, ...], policy: Policy, facts: Facts, wishes: Wishes, seen: Counter[str], total: int
) -> tuple[str, str, bool]:
    """Return (type, reason, whether it must not fall back)."""
    role = role_of(name)
    if role == "token_embd" and wishes.embedding:
        return wishes.embedding, "--embedding-type", True
    if role == "output" and wishes.output:
        return wishes.output, "--output-type", True
    for pattern, kind in wishes.tensor_types:
        if re.search(pattern, name):
            return kind, f"--tensor-type {pattern}", False
    if policy.is_float or wishes.pure:
        return policy.base, "", False
    kind, reason = _mixed(name, shape, policy, facts, wishes, seen, total)
    return kind, reason, False


def _mixed(
    name: str, shape: tuple[int, ...], policy: Policy, facts: Facts, wishes: Wishes, seen: Counter[str], total: int
) -> tuple[str, str]:
    role, base = role_of(name), policy.base
    if role == "output" or (role == "token_embd" and facts.tied):
        if wishes.output:
            return wishes.output, "--output-type"
        if base == "MXFP4" or shape[-1] % CODECS[base].block:
            return "Q8_0", "output matrix"
        return (base, "") if base == "Q8_0" else ("Q6_K", "output matrix")
    if base == "MXFP4":
        return (base, "") if len(shape) == 3 else ("Q8_0", "no expert")
    if role == "attn_v":
        return _attention_value(policy, facts, wishes, seen, total)
    if role == "attn_k" and facts.experts == 8:
        return "Q8_0", "eight experts"
    if role == "ffn_down":
        index = _layer(name) if facts.experts > 1 else seen["ffn_down"]
        seen["ffn_down"] += 1
        return _apply(policy, "ffn_down", index, facts.layers, facts, wishes)
    if role == "attn_output":
        return _apply(policy, role, 0, 0, facts, wishes)
    return base, ""


def _attention_value(policy: Policy, facts: Facts, wishes: Wishes, seen: Counter[str], total: int) -> tuple[str, str]:
    index = seen["attn_v"]
    seen["attn_v"] += 1
    kind, reason = _apply(policy, "attn_v", index, total, facts, wishes)
    grouped = facts.architecture == "qwen2" or (facts.architecture == "llama" and facts.heads != facts.kv_heads)
    if facts.layers == 80 and grouped and kind in ("Q3_K", "Q4_K"):
        kind, reason = "Q5_K", "80 layers with grouped heads"
    return ("Q8_0", "eight experts") if facts.experts == 8 else (kind, reason)


def _apply(policy: Policy, role: str, index: int, count: int, facts: Facts, wishes: Wishes) -> tuple[str, str]:
    """Return the type of the first rule of a role whose conditions hold for tensor `index` of `count`, or the base."""
    holds = {
        "always": True,
        "more": index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2,
        "first-eighth": index < count // 8,
        "first-sixteenth": index < count // 16,
        "gqa4": facts.heads // max(facts.kv_heads, 1) >= 4,
        "experts8": facts.experts == 8,
        "not-experts8": facts.experts != 8,
        "imatrix": wishes.imatrix,
        "no-imatrix": not wishes.imatrix,
    }

    def true(condition: str) -> bool:
        return holds[condition] if condition in holds else index < int(condition.removeprefix("first-"))

    for conditions, kind in policy.rules.get(role, ()):
        if all(true(condition) for condition in conditions):
            return kind, " ".join(conditions)
    return policy.base, ""


def _fit(name: str, shape: tuple[int, ...], kind: str, reason: str, fixed: bool) -> Choice:
    """Return the choice with a type whose blocks divide the rows."""
    columns = shape[-1]
    if columns % CODECS[kind].block == 0:
        return Choice(name, shape, kind, reason)
    if fixed:
        raise PlanError(f"{reason} {kind}: blocks of {CODECS[kind].block} do not divide the {columns} columns of {name}.")
    other = NARROWER.get(kind, kind)
    if columns % CODECS[other].block:
        other = "F16"
    return Choice(name, shape, other, f"{columns} columns are no multiple of {CODECS[kind].block}", kind)


def _require_importance(name: str, choice: Choice, policy: Policy, wishes: Wishes) -> None:
    needs = policy.name == "Q2_K_S" and choice.type == "Q2_K" and role_of(name) not in ("token_embd", "output")
    if needs and not wishes.imatrix:
        raise PlanError(f"{policy.name} makes {name} Q2_K, which needs an importance matrix: add --imatrix FILE or --imatrix auto.")
