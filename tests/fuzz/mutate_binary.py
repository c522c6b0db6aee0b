"""Mutations of the headers of safetensors and GGUF files that keep the rest of the file valid, so that readers get past the first check."""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from pools import NUMBERS, TEMPLATES, TEXTS


def change_safetensors(
    rng: random.Random, data: bytes, change_json: Callable[[random.Random, str, bytes], tuple[bytes, str]]
) -> tuple[bytes, str]:
    length = int.from_bytes(data[:8], "little")
    head, body = data[8 : 8 + length], data[8 + length :]
    if rng.random() < 0.1:
        value = rng.choice((0, 1, 2**31, 2**63, 2**64 - 1, length - 1, length + 1, 10**8, len(data)))
        return value.to_bytes(8, "little") + head + body, f"header length {value}"
    if rng.random() < 0.4:
        head, what = change_json(rng, "", head)
        return len(head).to_bytes(8, "little") + head + body, f"header: {what}"
    header = json.loads(head)
    if rng.random() < 0.04:  # many names, the last of them twice
        empty, count = json.dumps({"dtype": "F32", "shape": [0], "data_offsets": [len(body)] * 2}), rng.choice((100, 20_000))
        names = [f'"x.{i}":{empty}' for i in range(count)] + [f'"x.{count - rng.choice((0, 1))}":{empty}']
        head = head.rstrip()[:-1] + b"," + ",".join(names).encode() + b"}"
        return len(head).to_bytes(8, "little") + head + body, f"{count} more names"
    entry = header[tensor := rng.choice([key for key in header if key != "__metadata__"])]
    kind = rng.choice(("dtype", "shape", "reshape", "offsets", "name"))
    if kind == "dtype":
        entry["dtype"] = rng.choice(("F64", "F32", "F16", "I32", "U8", "I8", "BOOL", "F8_E4M3", "F8_E8M0", "I64", "x", "F4", None, [], 5))
    elif kind == "shape":
        entry["shape"] = rng.choice(
            (
                rng.choice(
                    ([], [0], [-1], [2**63, 2**63], [0, 2**64], [-1, -entry["data_offsets"][1]], ["1"], [1.5], [True], None, 5, "12")
                ),
                [*entry["shape"], 1],
                [1, *entry["shape"]],
                [*entry["shape"], 0, 2**70],
                entry["shape"][::-1],
                [1] * 2000,
            )
        )
    elif kind == "reshape":
        entry["shape"] = rng.choice(
            ([prod(entry["shape"])], [prod(entry["shape"]), 1], [1] * 70 + entry["shape"], [2, prod(entry["shape"]) // 2])
        )
    elif kind == "offsets":
        start, stop = entry["data_offsets"]
        entry["data_offsets"] = rng.choice(
            (
                [0, 0],
                [stop, start],
                [-8, stop - start - 8],
                [2**63, 2**63 + stop - start],
                [start],
                [start, stop, 0],
                ["0", "1"],
                [1e400, 0],
                [start + 1, stop + 1],
                None,
            )
        )
    else:
        header[
            rng.choice(
                (
                    *TEXTS,
                    "__metadata__",
                    tensor.replace("weight", "qweight"),
                    tensor + ".absmax",
                    tensor.replace("0", "9" * 30),
                    tensor.replace("layers.0", "layers.1"),
                )
            )
        ] = header.pop(tensor)
    if rng.random() < 0.3:  # an empty tensor beside them, whose shape the file does not bound
        header["extra"] = {
            "dtype": rng.choice(("F32", "I32")),
            "shape": rng.choice(([0], [0, 2**62], [2**62, 0, 2**62], [0] * 100)),
            "data_offsets": [len(body)] * 2,
        }
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + body, f"{tensor} {kind} {str(entry.get(kind, entry['shape']))[:60]}"


SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def change_gguf(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """Change a count, length, type, dimension, offset or value of a valid GGUF file, with its data where the header says or not."""
    keys, infos, end = _gguf_parts(data)
    body, head = data[-(-end // 32) * 32 :], bytearray(data[:24])
    kind = rng.choice(
        ("field", "field", "value", "value", "value", "drop key", "double key", "drop info", "double info", "info", "info", "alignment")
    )
    what = kind
    count = [len(infos), len(keys)]
    if kind == "field":
        at, size = rng.choice(((4, 4), (8, 8), (16, 8))) if rng.random() < 0.2 else (0, 0)
        value = rng.choice([n for n in NUMBERS if isinstance(n, int)])
        if not size:
            at, size = rng.randrange(24, end - 8), rng.choice((4, 8))
        return data[:at] + (value & (1 << 8 * size) - 1).to_bytes(size, "little") + data[at + size :], f"field at {at} is {value}"
    if kind in ("value", "alignment"):
        at = rng.randrange(len(keys))
        key, _ = keys[at]
        if kind == "alignment":
            keys.append((b"general.alignment", struct.pack("<II", 4, rng.choice((0, 1, 16, 64, 31, 2**31)))))
        else:
            keys[at] = (key, content := _gguf_value(rng))
            what = f"{key.decode()} is {content[:40].hex()} ({len(content)} bytes)"
    elif kind in ("drop key", "double key"):
        at = rng.randrange(len(keys))
        what += f" {keys[at][0].decode()}"
        keys = (
            keys[:at] + keys[at + 1 :]
            if kind == "drop key"
            else [*keys, (rng.choice((keys[at][0], b"", b"a" * 70000, b"\xff", b"llama.x")), keys[at][1])]
        )
    elif kind in ("drop info", "double info"):
        at = rng.randrange(len(infos))
        what += f" {infos[at][0].decode()}"
        infos = (
            infos[:at] + infos[at + 1 :]
            if kind == "drop info"
            else [*infos, (rng.choice((infos[at][0], b"", b"x.weight", b"blk.99.attn_q.weight")), *infos[at][1:])]
        )
    else:
        at = rng.randrange(len(infos))
        tensor, dims, type_id, offset = infos[at]
        part = rng.choice(("name", "dims", "type", "offset"))
        other = rng.choice(
            (
                b"",
                b"x" * 300,
                b"rope_freqs.weight",
                b"blk.0.ffn_gate_exps.weight",
                b"blk.7.attn_q.weight",
                b"\xff\xfe",
                b"token_embd.weight",
                b"blk.0.attn_q.bias",
            )
        )
        shapes = (
            dims[::-1],
            (*dims, 1),
            (1, *dims),
            (prod(dims),),
            (2**32, 2**32),
            (0,),
            (2**63, 2),
            (1,) * 5,
            (32,),
            (*dims, 0),
            (2**64 - 1,),
        )
        infos[at] = (
            other if part == "name" else tensor,
            rng.choice(shapes) if part == "dims" else dims,
            rng.choice((*range(42), 2**31, 2**32 - 1)) if part == "type" else type_id,
            rng.choice((0, 1, 32, 2**63, 2**64 - 32, offset + 32)) if part == "offset" else offset,
        )
        what = f"{part} of {tensor.decode()}: {infos[at][1:]}"
    head[8:24] = struct.pack("<QQ", *((len(infos), len(keys)) if rng.random() < 0.9 else count))
    out = bytes(head) + b"".join(_text(key) + value for key, value in keys)
    out += b"".join(
        _text(n) + struct.pack("<I", len(d)) + struct.pack(f"<{len(d)}Q", *d) + struct.pack("<IQ", t, o) for n, d, t, o in infos
    )
    return out + bytes(-len(out) % 32) + body, what


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _gguf_value(rng: random.Random) -> bytes:
    """Return type and value of a key, of any type."""
    texts = (
        b"",
        b"x",
        b"\xff",
        b"llama",
        b"gpt2",
        b"gpt-2",
        b"/etc/passwd",
        b"qwen2",
        b"mixtral",
        b"a" * 70000,
        b"\xc3",
        b"t5",
        b"\0",
        b"imatrix",
        *(t.encode() for t in TEMPLATES),
    )
    kind = rng.choice((4, 4, 5, 6, 7, 8, 8, 8, 9, 9, 10, 11, 12, 0))
    if kind == 8:
        return struct.pack("<I", 8) + _text(rng.choice(texts))
    if kind == 9 and rng.random() < 0.5:
        items = [rng.choice(texts[:13]) for _ in range(rng.choice((0, 1, 5, 320)))]
        return struct.pack("<IIQ", 9, 8, len(items)) + b"".join(map(_text, items))
    if kind == 9:
        element, count = rng.choice((*SIZES, 9, 13)), rng.choice((0, 1, 2, 320, 5000))
        return struct.pack("<IIQ", 9, element, count) + rng.randbytes(count * SIZES.get(element, 4))
    number = rng.choice((0, 1, 2, 3, 32, 33, 300, 10**5, 2**31 - 1, 2**31, 2**32 - 1))
    if kind in (6, 12):
        return struct.pack("<I" + ("f" if kind == 6 else "d"), kind, rng.choice((0.0, -1.0, float("nan"), float("inf"), 1e38)))
    return struct.pack("<I", kind) + (number * rng.choice((1, 1, 2**32 + 1))).to_bytes(16, "little")[: SIZES[kind]]


Info = tuple[bytes, tuple[int, ...], int, int]


def _gguf_parts(data: bytes) -> tuple[list[tuple[bytes, bytes]], list[Info], int]:
    """Return keys (name, type and value), tensor infos (name, dims, type, offset) and the end of the header of a valid file."""
    tensors, count = struct.unpack_from("<QQ", data, 8)
    at = 24

    def text() -> bytes:
        nonlocal at
        length = struct.unpack_from("<Q", data, at)[0]
        at += 8 + length
        return data[at - length : at]

    keys, infos = list[tuple[bytes, bytes]](), list[Info]()
    for _ in range(count):
        key, start = text(), at
        kind = struct.unpack_from("<I", data, at)[0]
        at += 4
        if kind == 8:
            text()
        elif kind == 9:
            element, number = struct.unpack_from("<IQ", data, at)
            at += 12
            for _ in range(number):
                at = (text(), at)[1] if element == 8 else at + SIZES[element]
        else:
            at += SIZES[kind]
        keys.append((key, data[start:at]))
    for _ in range(tensors):
        name = text()
        dims = struct.unpack_from("<I", data, at)[0]
        shape = struct.unpack_from(f"<{dims}Q", data, at + 4)
        infos.append((name, shape, *struct.unpack_from("<IQ", data, at + 4 + 8 * dims)))
        at += 16 + 8 * dims
    return keys, infos, at


def change_bin(rng: random.Random) -> tuple[bytes, str]:
    """Return a file of torch.save that the weights-only loader takes but that is no checkpoint of plain tensors."""
    tensor = torch.zeros(4, 4)
    odd: dict[str, Any] = {
        "list": [tensor],
        "tensor": tensor,
        "number keys": {3: tensor},
        "complex": {"a": tensor.to(torch.complex64)},
        "uint16": {"a": tensor.to(torch.uint16)},
        "sparse": {"a": tensor.to_sparse()},
        "quantized": {"a": torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)},
        "meta": {"a": tensor.to("meta")},
        "nested": {"a": torch.nested.nested_tensor([tensor, tensor])},
        "expanded": {"a": torch.zeros(1).expand(12_000, 12_000)},
        "empty": {},
        "number": {"a": 5},
    }
    kind = rng.choice(list(odd))
    torch.save(odd[kind], buffer := io.BytesIO())
    return buffer.getvalue(), f"torch.save of {kind}"
