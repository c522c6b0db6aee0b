"""How much faster the CPU kernels pack, unpack and run GPTQ's column loop than the plain PyTorch reference, on two threads.

    python tests/bench/packing.py [--size 2048] [--threads 2]

The same results are asserted; each time is the best of five.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from quantkit.backends import KERNELS
from quantkit.codecs.affine import Affine
from quantkit.formats import _bits
from quantkit.methods._rounding import make_search
from quantkit.methods.gptq import columns_reference

AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
LAYOUTS = {  # bits, order, whether the stream runs along the rows of the codes, words last
    "gptq 2 bits": (2, _bits.IN_ORDER, False), "gptq 3 bits": (3, _bits.IN_ORDER, False), "gptq 4 bits": (4, _bits.IN_ORDER, False),
    "gptq 8 bits": (8, _bits.IN_ORDER, False), "pack-quantized 4 bits": (4, _bits.IN_ORDER, True),
    "pack-quantized 8 bits": (8, _bits.IN_ORDER, True), "awq": (4, AWQ, True),
}  # fmt: skip


def best(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the least of five times, and the result."""
    found, least = work(), float("inf")
    for _ in range(5):
        began = time.perf_counter()
        found = work()
        least = min(least, time.perf_counter() - began)
    return least, found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    size = asked.size
    pack, unpack = KERNELS["cpu/pack_fields"](asked.threads), KERNELS["cpu/unpack_fields"](asked.threads)
    print(f"{size} x {size} codes, {asked.threads} threads; milliseconds of the reference, of the kernel, their ratio")
    for name, (bits, order, last) in LAYOUTS.items():
        codes = torch.randint(0, 1 << bits, (size, size), dtype=torch.uint8)
        values = codes if name == "awq" else codes.T
        slow, wanted = best(lambda values=values, bits=bits, order=order, last=last: _bits.pack_reference(values, bits, order, last))
        fast, found = best(lambda values=values, bits=bits, order=order, last=last: pack(values, bits, order, last))
        assert torch.equal(found, wanted)
        words, back = (wanted.T if last else wanted), name != "awq"
        slow_back, codes_again = best(
            lambda words=words, bits=bits, order=order, back=back: _bits.unpack_reference(words, bits, order, back)
        )
        fast_back, found = best(lambda words=words, bits=bits, order=order, back=back: unpack(words, bits, order, back))
        assert torch.equal(found, codes) and torch.equal(codes_again, codes)
        print(f"{name:<24} pack {1e3 * slow:7.2f} {1e3 * fast:7.2f} {slow / fast:6.1f}x   "
              f"unpack {1e3 * slow_back:7.2f} {1e3 * fast_back:7.2f} {slow_back / fast_back:6.1f}x")  # fmt: skip
    kernel, codec = KERNELS["cpu/gptq_columns"](asked.threads), Affine(4, 64, True)
    weight = torch.randn(size, 128)
    x = torch.randn(1024, 128)
    factor = torch.linalg.cholesky(torch.linalg.inv(x.T @ x / 1024 + 0.01 * torch.eye(128)), upper=True)
    given = (weight, factor, torch.ones(128), codec, 64, make_search(True, True, True))
    slow, wanted = best(lambda: columns_reference(*given))
    fast, found = best(lambda: kernel(*given))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    print(f"column loop, {size} rows of a span of 128, same codes: {1e3 * slow:.1f} -> {1e3 * fast:.1f} ms, {slow / fast:.1f}x")


if __name__ == "__main__":
    main()
