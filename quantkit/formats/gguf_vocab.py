"""A checkpoint's tokenizer as GGUF keys: tokens, kinds, scores or merges, special ids, chat template.

Byte-level BPE needs the name of its pre-tokenizer, which llama.cpp keeps as code: it is found by comparing the rules in
tokenizer.json with the known ones. An unknown rule is an error, because a wrong one costs quality without a word.

Source: llama.cpp's converter and vocabulary (conversion/base.py, src/llama-vocab.cpp); special ids by the gguf package.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.corpus import bos_prefix
from quantkit.errors import PlanError, SourceError
from quantkit.families import GgufFamily
from quantkit.foreign import foreign, mapping, parse_json
from quantkit.formats import _sentencepiece as sp
from quantkit.formats._gguf import Header, add_key
from quantkit.formats.gguf_tokenizer import BYTE_LEVEL, SINGLE_DIGITS, SPLITS

LOOKS_SPECIAL = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
ADDED_SCORE = -1000.0


@dataclass
class Vocabulary:
    """model: "gpt2" or "llama"; kinds: token types; scores only for "llama"; notices: what the user should know.

    adds_bos: whether the tokenizer puts its beginning token in front of a text.
    """

    model: str
    pre: str
    tokens: list[bytes | str] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    adds_bos: bool = False


def load_vocabulary(folder: Path, tokenizer: Any, size: int, pre: str = "") -> Vocabulary:
    """Return the vocabulary of a checkpoint folder, padded to `size` tokens; pre: the pre-tokenizer, if the user named it."""
    vocabulary = _load(folder, tokenizer, size, pre)
    vocabulary.adds_bos = bool(bos_prefix(tokenizer))
    return vocabulary


def _load(folder: Path, tokenizer: Any, size: int, pre: str) -> Vocabulary:
    if (folder / "tokenizer.model").is_file():
        return _from_pieces(folder, size)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise SourceError(f"{folder} has neither a tokenizer.model nor a tokenizer.json.")
    with foreign(f"{folder}: its tokenizer cannot be described"):
        described = json.loads(backend.to_str())
    if described["model"].get("type") != "BPE":
        raise PlanError(f"{folder}: a {described['model'].get('type')} tokenizer cannot be written to GGUF; BPE and SentencePiece can.")
    if described["model"].get("byte_fallback"):
        return _from_fallback(tokenizer, described, size)
    own = _read(folder / "tokenizer.json")
    names = {str(entry.get("content")) for entry in own.get("added_tokens") or [] if isinstance(entry, dict)}
    names |= set(mapping(mapping(own.get("model"), "tokenizer.json: model").get("vocab"), "tokenizer.json: vocab"))
    for i, entry in mapping(_read(folder / "tokenizer_config.json").get("added_tokens_decoder"), "added_tokens_decoder").items():
        names.add(str(entry.get("content", i)) if isinstance(entry, dict) else str(entry))
    return _from_bytes(tokenizer, described, size, pre or find_pre_tokenizer(described), names)


def _from_pieces(folder: Path, size: int) -> Vocabulary:
    pieces = sp.read_pieces(folder / "tokenizer.model")
    vocabulary = _padded(size)
    for i, piece in enumerate(pieces[:size]):
        vocabulary.tokens[i], vocabulary.scores[i], vocabulary.kinds[i] = piece.text, piece.score, piece.kind
    added = _read(folder / "added_tokens.json")
    for text, i in added.items():
        _set_added(vocabulary, int(i), text, sp.USER_DEFINED)
    where = folder / "tokenizer_config.json"
    for number, entry in mapping(_read(where).get("added_tokens_decoder"), f"{where}: added_tokens_decoder").items():
        special = entry.get("special") or _looks_special(entry["content"])
        _set_added(vocabulary, int(number), entry["content"], sp.CONTROL if special else sp.USER_DEFINED)
    for entry in _read(folder / "tokenizer.json").get("added_tokens") or []:  # where transformers 5 keeps the added ones
        i, text = int(entry["id"]), entry["content"]
        if i >= size or vocabulary.tokens[i] not in (text.encode(), text.replace("▁", " ").encode()):
            special = entry.get("special") or _looks_special(text)
            _set_added(vocabulary, i, text, sp.CONTROL if special else sp.USER_DEFINED)
    if len(pieces) > size:
        vocabulary.notices.append(f"tokenizer.model has {len(pieces)} pieces, the model {size} rows: the rest is left out")
    return vocabulary


def _padded(size: int) -> Vocabulary:
    tokens: list[bytes | str] = [f"[PAD{i}]".encode() for i in range(size)]
    return Vocabulary("llama", "default", tokens, [sp.UNUSED] * size, [-10000.0] * size)


def _set_added(vocabulary: Vocabulary, i: int, text: str, kind: int) -> None:
    if not 0 <= i < len(vocabulary.tokens):
        vocabulary.notices.append(f"the added token {text!r} has the id {i}, beyond the model's rows: left out")
        return
    if kind == sp.USER_DEFINED:
        text = text.replace("▁", " ")
    vocabulary.tokens[i], vocabulary.scores[i], vocabulary.kinds[i] = text.encode(), ADDED_SCORE, kind


def _from_fallback(tokenizer: Any, described: dict[str, Any], size: int) -> Vocabulary:
    """SentencePiece without its own file: the order of merges stands in for the scores."""
    vocabulary = _padded(size)
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(described["model"]["merges"]):
        ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
    unknown = described["model"].get("unk_token")
    for text, i in described["model"]["vocab"].items():
        byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        kind = sp.BYTE if byte else sp.UNKNOWN if text == unknown else sp.NORMAL
        vocabulary.tokens[i], vocabulary.kinds[i], vocabulary.scores[i] = (
            text.encode(),
            kind,
            -float(ranks.get(text, 0 if byte else len(ranks))),
        )
    for i, token in tokenizer.added_tokens_decoder.items():
        if vocabulary.kinds[i] != sp.UNKNOWN:
            special = token.special or _looks_special(token.content)
            _set_added(vocabulary, i, token.content, sp.CONTROL if special else sp.USER_DEFINED)
    vocabulary.notices.append("no tokenizer.model: scores are made from the order of merges")
    return vocabulary


def _from_bytes(tokenizer: Any, described: dict[str, Any], size: int, pre: str, names: set[str]) -> Vocabulary:
    """Byte-level BPE; names: the tokens that the checkpoint's own files have."""
    if not described["model"].get("merges"):
        raise SourceError("tokenizer.json has no merges, without which llama.cpp loads nothing: they were lost when it was saved.")
    by_id = {i: token for token, i in tokenizer.get_vocab().items()}
    model = described["model"]
    spaced = [merge for merge in model["merges"] if not isinstance(merge, str) and any(" " in part for part in merge)]
    if spaced:
        raise PlanError(f"GGUF writes a merge as two pieces with a space between; {spaced[0]} has one inside a piece, so it cannot go in.")
    invented = [i for i in by_id if i >= size and i in tokenizer.added_tokens_decoder and by_id[i] not in names]
    vocabulary = Vocabulary("gpt2", pre)
    if invented:
        vocabulary.notices.append(f"transformers adds tokens that the checkpoint has no rows for, left out: {[by_id[i] for i in invented]}")
        by_id = {i: token for i, token in by_id.items() if i not in invented}
    if by_id and max(by_id) >= size:
        raise SourceError(
            f"The tokenizer has the id {max(by_id)}, but the model only {size} rows. Resize the embedding, or use the right tokenizer."
        )
    added = tokenizer.added_tokens_decoder
    for i in range(size):
        token, kind = by_id.get(i, f"[PAD{i}]"), sp.NORMAL if i in by_id else sp.UNUSED
        if i in added and i in by_id:
            if not added[i].normalized:  # llama.cpp expects such tokens as they come out
                token = tokenizer.decode(tokenizer.encode(token, add_special_tokens=False))
            special = added[i].special or _looks_special(token)
            kind = sp.CONTROL if special else sp.USER_DEFINED
            token = token if special else token.replace("▁", " ")
        vocabulary.tokens.append(token)
        vocabulary.kinds.append(kind)
    return vocabulary


def _looks_special(token: str) -> bool:
    pairs = (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))
    return token in LOOKS_SPECIAL or any(token.startswith(a) and token.endswith(b) for a, b in pairs)


def find_pre_tokenizer(described: dict[str, Any]) -> str:
    """Return llama.cpp's name of the pre-tokenizer in a tokenizer.json; a PlanError if it is none that is known."""
    steps = _steps(described.get("pre_tokenizer"))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and steps[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        pattern = steps[0]["pattern"].get("Regex", "")
        for name, known in SPLITS.items():
            if pattern == known:
                return name
    raise PlanError(
        f"tokenizer.json splits text by a rule that quantkit does not know ({', '.join(kinds) or 'none'}), and a guess would change "
        f"the tokens. Name llama.cpp's rule with --pre-tokenizer NAME, such as {', '.join([*SPLITS, *SINGLE_DIGITS[:1], *BYTE_LEVEL[:1]])}."
    )


def _steps(described: dict[str, Any] | None) -> list[dict[str, Any]]:
    if described is None:
        return []
    return [step for part in described.get("pretokenizers", []) for step in _steps(part)] or [described]


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = parse_json(path.read_bytes(), path)
    return value if isinstance(value, dict) else {}


def add_vocabulary(writer: Any, vocabulary: Vocabulary, folder: Path, family: GgufFamily) -> list[str]:
    """Add the vocabulary's keys; return notices."""
    from gguf import SpecialVocab

    class Special(SpecialVocab):  # type: ignore[misc]
        """The package's reader of special ids, which ends with an error at the -1 that some write for none."""

        def _set_special_token(self, typ: str, tid: Any) -> None:
            if type(tid) is int and tid >= 0:
                super()._set_special_token(typ, tid)

    notices = list(vocabulary.notices)
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.kinds)
    with foreign(f"{folder}: its special tokens cannot be read"):
        special = Special(folder, load_merges=vocabulary.model == "gpt2", n_vocab=len(vocabulary.tokens))
    special.chat_template = None  # ours below: the package's order of named templates changes from run to run
    notices += _add_ends(special, folder, len(vocabulary.tokens))
    special.add_special_token.setdefault("bos", vocabulary.adds_bos)  # llama.cpp's default hangs on the pre-tokenizer
    special.add_to_gguf(writer, quiet=True)
    _add_templates(writer, chat_template(folder, notices))
    prefix = _read(folder / "tokenizer_config.json").get("add_prefix_space")
    if family.no_prefix_space and vocabulary.model == "llama":
        writer.add_add_space_prefix(False)
    elif prefix is not None and family.arch == "llama":
        writer.add_add_space_prefix(bool(prefix))
    return notices


def _add_ends(special: Any, folder: Path, size: int) -> list[str]:
    """Give the further ids that end a text a place: end of turn, then end of message."""
    ids: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        given = _read(folder / name).get("eos_token_id")
        ids += given if isinstance(given, list) else [given]
    known = special.special_token_ids
    for kind in [kind for kind, i in known.items() if type(i) is not int or not 0 <= i < size]:
        ids.append(known.pop(kind))
    numbers = list(dict.fromkeys(i for i in ids if type(i) is int))
    wanted = [i for i in numbers if 0 <= i < size]
    notices = [f"eos_token_id {i} is no token: ignored" for i in numbers if not 0 <= i < size]
    if wanted and "eos" not in known:
        known["eos"] = int(wanted[0])
    rest = [i for i in wanted if i not in known.values()]
    for kind in ("eot", "eom"):
        if rest and kind not in known:
            known[kind] = rest.pop(0)
    if rest:
        notices.append(f"GGUF has no place for more ids that end a text: {rest} are left out")
    return notices


def _add_templates(writer: Any, template: Any) -> None:
    """Add a chat template, or several: the one named default, and the others under their names."""
    with foreign("The chat templates of tokenizer_config.json are no list of names and templates"):
        named = {"default": template} if isinstance(template, str) else {str(t["name"]): str(t["template"]) for t in template or []}
    others = sorted(name for name in named if name != "default")
    for name in others:
        writer.add_string(f"tokenizer.chat_template.{re.sub(r'[^A-Za-z0-9]', '_', name)}", named[name])
    if others:
        writer.add_array("tokenizer.chat_templates", [re.sub(r"[^A-Za-z0-9]", "_", name) for name in others])
    if "default" in named:
        writer.add_string("tokenizer.chat_template", named["default"])


def chat_template(folder: Path, notices: list[str]) -> Any:
    """Return the chat template, or a list of named ones; the .jinja file wins over tokenizer_config.json, as in transformers."""
    inside = _read(folder / "tokenizer_config.json").get("chat_template")
    path = folder / "chat_template.jinja"
    if not path.is_file():
        older = _read(folder / "chat_template.json").get("chat_template")
        if inside is None and older is None:
            notices.append("the checkpoint has no chat template")
        return inside if inside is not None else older
    with foreign(f"{path} is no text"):
        template = path.read_bytes().decode("utf-8")
    if inside is not None and inside != template:
        notices.append("chat_template.jinja and tokenizer_config.json differ: the .jinja file is used")
    named = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if not named:
        return template
    others = [{"name": p.stem, "template": p.read_bytes().decode("utf-8")} for p in named]
    return [{"name": "default", "template": template}, *others]


def copy_vocabulary(writer: Any, header: Header) -> None:
    """Add the tokenizer's keys of another GGUF file as they are."""
    for name, key in header.keys.items():
        if name.startswith("tokenizer."):
            add_key(writer, name, key)


def save_extras(header: Header, folder: Path) -> None:
    """Write what transformers' tokenizer files do not carry of a GGUF vocabulary: flags, and SentencePiece's scores."""
    path = folder / "tokenizer_config.json"
    settings = _read(path)
    for ours, theirs in (("add_bos_token", "add_bos_token"), ("add_eos_token", "add_eos_token"), ("add_prefix_space", "add_space_prefix")):
        if (key := header.keys.get(f"tokenizer.ggml.{theirs}")) is not None:
            settings[ours] = key.value
    for ours, theirs in (("unk", "unknown"), ("sep", "seperator"), ("pad", "padding"), ("cls", "cls"), ("mask", "mask")):
        if f"tokenizer.ggml.{theirs}_token_id" not in header.keys:
            settings.pop(f"{ours}_token", None)  # transformers invents some
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if header.get("tokenizer.ggml.model") == "llama":
        tokens, scores, kinds = (header.get(f"tokenizer.ggml.{name}") for name in ("tokens", "scores", "token_type"))
        if not all(isinstance(part, list) and len(part) == len(tokens) for part in (tokens, scores, kinds)):
            raise SourceError(f"{header.path}: its tokens, scores and token types are no lists of one length. The file is damaged.")
        if strange := [kind for kind in kinds if kind not in sp.KINDS]:
            raise SourceError(f"{header.path}: {strange[0]!r} is no type of a token. The file is damaged.")
        with foreign(f"{header.path}: its tokens make no SentencePiece model"):
            pieces = [
                sp.Piece(token.encode("utf-8", "surrogateescape"), score, kind)
                for token, score, kind in zip(tokens, scores, kinds, strict=True)
            ]
            sp.write_pieces(folder / "tokenizer.model", pieces, bool(header.get("tokenizer.ggml.add_space_prefix", True)))
