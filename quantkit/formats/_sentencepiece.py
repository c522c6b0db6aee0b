"""The few fields of a SentencePiece model file that a vocabulary needs, read and written.

A `tokenizer.model` is a protocol buffer: field 1, repeated, is a piece (1 text, 2 score as float, 3 kind); field 2 the
trainer's settings, field 3 the normalizer's. Hugging Face's tokenizer.json has no place for scores, so this file is
what carries them from a GGUF file to a checkpoint and back.

Source: sentencepiece_model.proto of SentencePiece, and the protocol buffers' wire format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import SourceError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
KINDS = range(BYTE + 1)  # 0 says nothing
VARINT, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5


@dataclass(frozen=True)
class Piece:
    """One token: its text, score and kind."""

    text: bytes
    score: float = 0.0
    kind: int = NORMAL


def read_pieces(path: Path) -> list[Piece]:
    """Return the pieces of a `tokenizer.model`; a SourceError if it is none."""
    try:
        pieces = [_piece(bytes(value)) for field, value in _fields(path.read_bytes()) if field == 1 and isinstance(value, bytes)]
    except (IndexError, struct.error, ValueError) as error:
        raise SourceError(f"{path} is no SentencePiece model ({error}).") from None
    if not pieces:
        raise SourceError(f"{path} holds no pieces: it is no SentencePiece model.")
    return pieces


def write_pieces(path: Path, pieces: list[Piece], add_space_prefix: bool) -> None:
    """Write a byte-fallback BPE model."""
    body = b"".join(_message(1, _encode_piece(piece)) for piece in pieces)
    trainer = _number(3, 2) + _number(4, len(pieces)) + _number(35, 1)  # model_type BPE, vocab_size, byte_fallback
    normalizer = _message(1, b"identity") + _number(3, int(add_space_prefix)) + _number(4, 0) + _number(5, 1)
    path.write_bytes(body + _message(2, trainer) + _message(3, normalizer))


def _piece(data: bytes) -> Piece:
    text, score, kind = b"", 0.0, NORMAL
    for field, value in _fields(data):
        if field == 1 and isinstance(value, bytes):
            text = value
        elif field == 2 and isinstance(value, bytes):
            score = struct.unpack("<f", value)[0]
        elif field == 3 and isinstance(value, int):
            kind = value
    return Piece(text, score, kind)


def _encode_piece(piece: Piece) -> bytes:
    kind = b"" if piece.kind == NORMAL else _number(3, piece.kind)
    return _message(1, piece.text) + b"\x15" + struct.pack("<f", piece.score) + kind


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of a message; four and eight byte numbers stay bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == VARINT:
            number, at = _varint(data, at)
            yield tag >> 3, number
            continue
        length = {EIGHT_BYTES: 8, FOUR_BYTES: 4}.get(wire)
        if wire == BYTES:
            length, at = _varint(data, at)
        if length is None or length > len(data) - at:
            raise ValueError(f"wire type {wire} at byte {at}")
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number without an end")


def _pack(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _pack(field << 3) + _pack(value)


def _message(field: int, data: bytes) -> bytes:
    return _pack(field << 3 | BYTES) + _pack(len(data)) + data
