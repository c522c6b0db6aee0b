"""Who computes: faster twins of single operations. A backend is asked and answers with a kernel and the reason.

The reference of an operation is plain PyTorch and lives with the codec or method that needs it; a backend is handed
to methods and formats by the pipeline, so nothing selects a kernel by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from quantkit.errors import BackendError
from quantkit.registry import Row, Table

KERNELS = Table(
    "kernel",
    [
        Row("cpu/gptq_columns", "GPTQ's column loop in Numba", "quantkit.backends.cpu.columns:gptq_columns"),
        Row("cpu/pack_fields", "Numba, one pass", "quantkit.backends.cpu.packing:pack_fields"),
        Row("cpu/unpack_fields", "Numba, one pass", "quantkit.backends.cpu.packing:unpack_fields"),
        Row("cpu/packed_linear", "Numba on bit planes", "quantkit.backends.cpu.linear:packed_linear"),
        Row("cpu/program", "Numba, a recorded step in one call", "quantkit.backends.cpu.program:program"),
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
        *(
            Row(f"cuda/{name}", "CUDA, compiled by NVRTC", f"quantkit.backends.cuda.ops:{name.lower()}")
            for name in ("gptq_columns", "round_affine", "pack_fields", "unpack_fields", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
        ),
    ],
)


class Backend:
    """Picks kernels for one device. `reference` forces plain PyTorch everywhere; must: a backend that cannot is an error, no fallback.

    reasons: operation -> which kernel computes it, and why; notices: what could not be had, once each.
    """

    def __init__(self, device: torch.device, threads: int, reference: bool = False, must: bool = False) -> None:
        self.device, self.threads, self.reference, self.must = device, threads, reference, must
        self.reasons: dict[str, str] = {}
        self.notices: list[str] = []

    def op(self, name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
        """Return the fastest kernel of an operation for this device, or its reference; `reasons` says why."""
        key = f"{self.device.type}/{name}"
        if self.reference:
            self.reasons[name] = "reference: asked for"
        elif key not in KERNELS.names():
            self.reasons[name] = f"reference: no kernel for {self.device.type}"
        else:
            try:
                kernel: Callable[..., Any] = KERNELS[key](self.threads)
            except BackendError as error:
                self._without(name, error)
            else:
                self.reasons[name] = f"{key}: {KERNELS.rows[key].summary}{_compiled_anew(key)}"
                return kernel
        return reference

    def _without(self, name: str, error: BackendError) -> None:
        if self.must:
            raise BackendError(f"--backend {self.device.type}: {error}") from None
        self.reasons[name] = f"reference: {error}"
        notice = f"plain PyTorch instead of {self.device.type.upper()} kernels: {error}"
        if notice not in self.notices:
            self.notices.append(notice)


@lru_cache
def kernels(device: torch.device) -> Backend:
    """Return the backend of what has no run of its own, such as reading a file."""
    return Backend(device, torch.get_num_threads())


def _compiled_anew(key: str) -> str:
    """Say if a kernel's code cannot be kept: each process then compiles it again."""
    if not key.startswith("cpu/"):
        return ""
    from quantkit.backends.cpu import _jit

    module = sys.modules[KERNELS.rows[key].target.partition(":")[0]]
    return "" if _jit.is_kept(module) else ", compiled anew each time because no cache folder can be written"
