"""The CUDA kernels on the CPU: compiled as C++ behind tests/shim/cuda_shim.h, launched like on a GPU."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.backends.cuda.launch import Argument, Wide
from quantkit.backends.cuda.nvrtc import source

SHIM = Path(__file__).parent / "shim"
COMPILER = shutil.which("g++")
FLAGS = (
    "-std=c++17",
    "-O2",
    "-ffp-contract=off",
    "-fno-fast-math",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wextra",
    "-Wno-unused-function",
    "-Werror",
)


def build(module: str, folder: Path, text: str | None = None, flags: Sequence[str] = ()) -> Path:
    """Compile a kernel file, or its changed text, into a library in `folder`; one launcher for each kernel."""
    text = source(module) if text is None else text
    lines = ['#include "cuda_shim.h"', text, 'extern "C" {']
    for kernel in re.findall(r"^QK_KERNEL[^(]*\([^)]*\)\s+(\w+)\(", text, re.MULTILINE):
        lines.append(
            f"const char *launch_{kernel}(const unsigned *grid, unsigned threads, void **arguments, unsigned seed)"
            f"{{ return qk_shim::launch({kernel}, grid, threads, arguments, seed); }}"
        )
    path = folder / f"{module}.cpp"
    path.write_text("\n".join([*lines, "}"]))
    library = path.with_suffix(".so")
    subprocess.run([str(COMPILER), *FLAGS, *flags, f"-I{SHIM}", "-o", str(library), str(path)], check=True, capture_output=True, text=True)
    return library


class ShimLauncher:
    """Launches kernels as fibers in a permuted order; outputs begin as bytes of 255."""

    device = torch.device("cpu")

    def __init__(self, folder: Path, seed: int = 0, changed: dict[str, str] | None = None, flags: Sequence[str] = ()) -> None:
        self.folder, self.seed, self.changed, self.flags = folder, seed, changed or {}, flags
        self.library = cache(self._library)

    def _library(self, module: str) -> Any:
        return ctypes.CDLL(str(build(module, self.folder, self.changed.get(module), self.flags)))

    def launch(self, module: str, kernel: str, grid: tuple[int, int], threads: int, arguments: Sequence[Argument]) -> None:
        """See `quantkit.backends.cuda.launch.Launcher`."""
        held: list[Any] = []
        for value in arguments:
            if value is None or isinstance(value, Tensor):
                held.append(ctypes.c_void_p(0 if value is None else value.data_ptr()))
            elif isinstance(value, Wide):
                held.append(ctypes.c_int64(value))
            else:
                held.append(ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int32(value))
        places = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        run = getattr(self.library(module), f"launch_{kernel}")
        run.restype = ctypes.c_char_p
        error = run((ctypes.c_uint * 2)(*grid), threads, places, self.seed)
        if error:
            raise RuntimeError(f"{kernel}: {error.decode()}")

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """See `quantkit.backends.cuda.launch.Launcher`."""
        found = torch.empty(shape, dtype=dtype)
        found.view(-1).view(torch.uint8).fill_(255)
        return found
