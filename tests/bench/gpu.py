"""Every CUDA kernel on a GPU: checked against the reference on fresh random inputs, timed against its floor and against plain PyTorch.

    python tests/bench/gpu.py [--json FILE] [--seed N]

The floor is bytes moved / the bandwidth that a copy on this device reaches; kernels whose floor is arithmetic say so. Needs torch, numpy,
cuda-core and this repository; takes under four minutes. Exits 1 if a result is not the reference's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from quantkit.backends.cuda import nvrtc
from quantkit.backends.cuda.launch import CudaLauncher, Launcher
from quantkit.backends.cuda.ops import Ops
from quantkit.codecs import CODECS
from quantkit.codecs.affine import Affine
from quantkit.formats import _bits
from quantkit.infer import cache_int8
from quantkit.infer.attention import Pages
from quantkit.infer.linear import planes_of
from quantkit.methods._rounding import make_search, round_reference
from quantkit.methods.gptq import columns_reference
from quantkit.tensors import QuantTensor

AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
REPEATS = 20


@dataclass
class Row:
    """One line of the table: milliseconds of the kernel, of its floor and of the reference, and whether the results agree."""

    operation: str
    size: str
    kernel: float
    floor: float
    reference: float
    bound: str
    right: bool

    def line(self) -> str:
        """Return the row as text."""
        floor = f"{self.floor:9.4f} {self.kernel / self.floor:6.2f}x" if self.floor else " " * 17
        times = f"{self.kernel:9.4f} {floor} {self.reference:10.3f} {self.bound:<10}"
        return f"{self.operation:<22} {self.size:<16} {times} {'ok' if self.right else 'WRONG'}"


class Bench:
    """Times work on one launcher's device."""

    def __init__(self, on: Launcher, repeats: int) -> None:
        self.ops, self.device, self.repeats = Ops(on), on.device, repeats
        self.rows: list[Row] = []
        source = torch.empty(1 << (28 if self.device.type == "cuda" else 22), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        self.bandwidth = 2 * source.nbytes / (self.seconds(lambda: target.copy_(source), repeats) or 1.0)

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any], repeats: int) -> float:
        """Return the median seconds of a call; the device is idle before and after."""
        work()
        spent = []
        for _ in range(repeats):
            self.sync()
            began = time.perf_counter()
            work()
            self.sync()
            spent.append(time.perf_counter() - began)
        return sorted(spent)[len(spent) // 2] if spent else 0.0

    def add(self, operation: str, size: str, moved: float, kernel: Callable[[], Any], reference: Callable[[], Any], tolerance: float = 0.0,
            bound: str = "memory") -> None:  # fmt: skip
        """Check and time one operation."""
        found, wanted = kernel(), reference()
        pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
        right = all(agree(a, b, tolerance) for a, b in pairs)
        slow = self.seconds(reference, 1)
        floor = 1e3 * moved / self.bandwidth if bound == "memory" else 0.0
        self.rows.append(Row(operation, size, 1e3 * self.seconds(kernel, self.repeats), floor, 1e3 * slow, bound, right))
        print(self.rows[-1].line(), flush=True)


def agree(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    """Tell whether results are equal, or within a share of the largest."""
    wanted = wanted.to(found.device)
    if not tolerance:
        return torch.equal(found, wanted)
    return bool((found.double() - wanted.double()).abs().max() <= tolerance * wanted.double().abs().max())


def run(bench: Bench, n: int, rows: int, seed: int) -> None:
    """Run all operations on so many columns and rows."""
    torch.manual_seed(seed)
    device, ops = bench.device, bench.ops
    for name, bits, order, last in (
        ("pack gptq", 2, _bits.IN_ORDER, False), ("pack gptq", 3, _bits.IN_ORDER, False), ("pack gptq", 4, _bits.IN_ORDER, False),
        ("pack gptq", 8, _bits.IN_ORDER, False), ("pack-quantized", 4, _bits.IN_ORDER, True), ("pack awq", 4, AWQ, True),
    ):  # fmt: skip
        codes = torch.randint(0, 1 << bits, (n, n), dtype=torch.uint8, device=device)
        values, back = (codes, False) if order == AWQ else (codes.T, True)
        given = (values, bits, order, last)
        words = _bits.pack_reference(*given)
        moved = n * n * (1 + bits / 8)
        bench.add(name, f"{n}x{n} {bits} bits", moved, lambda g=given: ops.pack_fields(*g), lambda g=given: _bits.pack_reference(*g))
        given = (words.T if last else words, bits, order, back)
        bench.add(
            f"un{name}", f"{n}x{n} {bits} bits", moved, lambda g=given: ops.unpack_fields(*g), lambda g=given: _bits.unpack_reference(*g)
        )
    weight, x = torch.randn(rows, 128, device=device), torch.randn(1024, 128, device=device)
    inverse = torch.linalg.inv((x.T @ x / 1024 + 0.01 * torch.eye(128, device=device)).double())
    factor = torch.linalg.cholesky(inverse, upper=True).float().contiguous()
    importance = torch.rand(128, device=device) + 0.1
    for symmetric in (True, False):
        loop = (weight, factor, importance, Affine(4, 64, symmetric), 64, make_search(symmetric, True, True))
        word = "symmetric" if symmetric else "asymmetric"
        size, moved = f"{rows}x128 {word[:5]}", 13 * rows * 128
        bench.add("column loop", size, moved, partial(ops.gptq_columns, *loop), partial(columns_reference, *loop), bound="arithmetic")
    wide, energy, half = (
        torch.randn(rows, n, device=device),
        torch.rand(n, device=device) + 0.1,
        torch.randn(n // 64, 64, 128, device=device),
    )
    tiles = half @ half.transpose(1, 2) / 64
    rounding = (wide, Affine(4, 64, False), make_search(False, True, True), energy, tiles)
    size, kernel = f"{rows}x{n}", partial(ops.round_affine, *rounding)
    bench.add("round, searched", size, 5 * rows * n, kernel, partial(round_reference, *rounding), bound="arithmetic")
    for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0"):
        codec = CODECS[kind]
        moved, bound = rows * n * (4 + codec.bits_per_weight / 8), "memory" if kind == "Q8_0" else "arithmetic"
        bench.add(kind, f"{rows}x{n}", moved, lambda c=codec: ops.encode(c, wide), lambda c=codec: c.encode(wide.cpu()), bound=bound)
        if codec.weighted:
            weights = (wide[:64], energy)
            bench.add(f"{kind} weighted", f"64x{n}", 0, lambda c=codec: ops.encode(c, *weights),
                      lambda c=codec: c.encode(*(part.cpu() for part in weights)), bound="arithmetic")  # fmt: skip
    products(bench, n)
    pages(bench)


def products(bench: Bench, n: int) -> None:
    """Run the products of decoding."""
    device, ops = bench.device, bench.ops
    codes = torch.randint(0, 16, (n, n), dtype=torch.uint8)
    scale, zero = (torch.randn(n, n // 64) * 0.1).half().float(), torch.full((n, n // 64), 8, dtype=torch.uint8)
    groups = QuantTensor(codes, {"scale": scale, "zero": zero}, Affine(4, 64, True))
    planes = planes_of(groups)
    assert planes is not None
    planes = type(planes)(planes.bits, planes.group, planes.packed.to(device), planes.scale.to(device), None, None, planes.middle)
    plain = groups.dequantize().to(device)
    for rows in (1, 8):
        x = torch.randn(rows, n, device=device, dtype=torch.bfloat16)
        bench.add(
            "4-bit groups",
            f"{rows}x{n}x{n}",
            planes.nbytes,
            lambda x=x: ops.multiply_groups(x, planes),
            lambda x=x: x.float() @ plain.T,
            1e-3,
        )
        for kind in ("Q4_K", "Q6_K", "Q8_0"):
            packed = CODECS[kind].encode(torch.randn(n, n))
            values, packed = CODECS[kind].decode(packed).to(device), packed.to(device)
            bench.add(f"{kind} product", f"{rows}x{n}x{n}", packed.nbytes, lambda x=x, k=kind, p=packed: ops.multiply_blocks(k, x, p),
                      lambda x=x, v=values: x.float() @ v.T, 1e-3)  # fmt: skip


def pages(bench: Bench) -> None:
    """Run the cache's kernels."""
    device, ops, heads, size, count = bench.device, bench.ops, 8, 128, 64 if bench.device.type == "cuda" else 2
    tail = torch.randn(2, heads, 64, size, device=device, dtype=torch.float16)
    shapes = ((heads, size, 64), (heads, 64, size), (heads, size), (heads, 64))
    kinds = (torch.int8, torch.int8, torch.float16, torch.float16)
    held = Pages(*(torch.zeros(count, *shape, dtype=kind, device=device) for shape, kind in zip(shapes, kinds, strict=True)))
    for page in range(count):
        cache_int8._encode(held, page, torch.randn_like(tail))

    def encode() -> tuple[Tensor, ...]:
        cache_int8._encode(held, 0, tail)
        return held.keys[0], held.values[0], held.key_scale[0], held.value_scale[0]  # type: ignore[index]

    bench.add("quantize page", f"{heads}x64x{size}", 3 * tail.numel(), lambda: ops.quantize_page(tail), encode)
    table = torch.randperm(count)

    def gather() -> tuple[Tensor, Tensor]:
        parts = [cache_int8._decode(held, page) for page in table.tolist()]
        keys, values = torch.cat([key.transpose(1, 2) for key, _ in parts], 1), torch.cat([value for _, value in parts], 1)
        return keys.to(torch.bfloat16), values.to(torch.bfloat16)

    bench.add("gather pages", f"{count} pages", 3 * 2 * count * heads * 64 * size, lambda: ops.gather_pages(held, table), gather)


def main() -> int:
    """Run on the GPU at hand; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", default="", help="also write the table to this file")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--columns", type=int, default=4096)
    asked = parser.parse_args()
    began = time.perf_counter()
    on = CudaLauncher(torch.device("cuda", 0))
    bench = Bench(on, REPEATS)
    what = f"{torch.cuda.get_device_name(0)}, {on.architecture}, NVRTC {nvrtc.version()}"
    print(f"{what}, copies at {bench.bandwidth / 1e9:,.0f} GB/s, seed {asked.seed}")
    print(f"{'operation':<22} {'size':<16} {'kernel ms':>9} {'floor ms':>9} {'':>7} {'torch ms':>10} bound      result")
    run(bench, asked.columns, asked.columns, asked.seed)
    wrong = [row.operation for row in bench.rows if not row.right]
    print(f"{len(bench.rows)} operations in {time.perf_counter() - began:.0f} s; wrong: {', '.join(wrong) or 'none'}")
    if asked.json:
        table = {"device": torch.cuda.get_device_name(0), "bandwidth": bench.bandwidth, "rows": [asdict(row) for row in bench.rows]}
        Path(asked.json).write_text(json.dumps(table, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
