"""Who computes: faster twins of single operations. A backend is asked and answers with a kernel and the reason.

The reference of an operation is plain PyTorch and lives with the codec or method that needs it; a backend is handed
to methods and formats by the pipeline, so nothing selects a kernel by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from quantkit.registry import Row, Table

KERNELS = Table(
    "kernel",
    [
        Row("cpu/gptq_columns", "GPTQ's column loop in Numba", "quantkit.backends.cpu.columns:gptq_columns"),
        Row("cpu/packed_linear", "Numba on bit planes", "quantkit.backends.cpu.linear:packed_linear"),
        Row("cpu/paged_step", "Numba, write and attend in one call", "quantkit.backends.cpu.attend:paged_step"),
        Row("cpu/attend", "Numba, page by page", "quantkit.backends.cpu.attend:attend"),
        Row("cpu/round_affine", "rounding on searched grids in Numba", "quantkit.backends.cpu.rounding:round_affine"),
        *(
            Row(f"cpu/{name}", "Numba, blocks as SIMD lanes", f"quantkit.backends.cpu.{module}:{name.lower()}")
            for module, names in (
                ("rounded", ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")),
                ("k_quants", ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")),
                ("nonlinear", ("IQ4_NL", "IQ4_XS", "MXFP4")),
            )
            for name in names
        ),
    ],
)


class Backend:
    """Picks kernels for one device. `reference` forces plain PyTorch everywhere."""

    def __init__(self, device: torch.device, threads: int, reference: bool = False) -> None:
        self.device = device
        self.threads = threads
        self.reference = reference
        self.reasons: dict[str, str] = {}

    def op(self, name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
        """Return the fastest kernel of an operation for this device, or its reference; `reasons` says why."""
        key = f"{self.device.type}/{name}"
        if self.reference:
            self.reasons[name] = "reference: asked for"
        elif key in KERNELS.names():
            kernel: Callable[..., Any] = KERNELS[key](self.threads)
            self.reasons[name] = f"{key}: {KERNELS.rows[key].summary}{_compiled_anew(key)}"
            return kernel
        else:
            self.reasons[name] = f"reference: no kernel for {self.device.type}"
        return reference


def _compiled_anew(key: str) -> str:
    """Say if a kernel's code cannot be kept: each process then compiles it again."""
    from quantkit.backends.cpu import _jit

    module = sys.modules[KERNELS.rows[key].target.partition(":")[0]]
    return "" if _jit.is_kept(module) else ", compiled anew each time because no cache folder can be written"
