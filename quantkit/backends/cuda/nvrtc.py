"""From a `.cu` file to a cubin: NVRTC through cuda-core, once for each GPU architecture, then from the cache.

Needs the extra `cuda` (cuda-core, cuda-bindings, the NVRTC wheel): no compiler on the machine, no build on installation, no GPU. A
cubin that lies beside the source as NAME.sm_XX.cubin, made ahead of time with nvcc, is taken as it is.
"""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import BackendError
from quantkit.registry import data_folder

ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100")
MODULES = ("pack", "columns", "k_quants", "matvec", "cache")
HEADER = "quantkit.cuh"
CACHE = "~/.cache/quantkit/kernels"
INSTALL = "pip install 'quantkit[cuda]'"


@dataclass(frozen=True)
class Built:
    """A compiled file: its cubin, and what the assembler says of each kernel (empty if it came from the cache)."""

    cubin: bytes
    log: str


def source(module: str) -> str:
    """Return the text of a kernel file, the shared header in the place of its include."""
    folder = data_folder("kernels")
    text = (folder / f"{module}.cu").read_text(encoding="utf-8")
    header = (folder / HEADER).read_text(encoding="utf-8").replace("#pragma once\n", "")
    return text.replace(f'#include "{HEADER}"\n', header)


def toolkit() -> Any:
    """Return the package cuda.core; a BackendError says what to install."""
    try:
        import cuda.core
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise BackendError(f"cuda-core is not installed, or incomplete ({error}): {INSTALL}") from None
    try:
        nvrtc.nvrtcVersion()
    except Exception as error:  # the library is looked for on its first use; each release raises something else
        raise BackendError(f"NVRTC does not load ({str(error).splitlines()[0]}): {INSTALL}") from None
    return cuda.core


def version() -> str:
    """Return NVRTC's version."""
    toolkit()
    from cuda.bindings import nvrtc

    return ".".join(str(part) for part in nvrtc.nvrtcVersion()[1:])


def compile_module(module: str, architecture: str) -> Built:
    """Compile a kernel file; a BackendError holds the compiler's first complaint. A warning is one too: none are expected."""
    core, log = toolkit(), io.StringIO()
    options = core.ProgramOptions(name=f"{module}.cu", std="c++17", arch=architecture, fma=False, ptxas_options=["-v"])
    try:
        found = core.Program(source(module), "c++", options).compile("cubin", logs=log)
    except Exception as error:  # whatever the package raises, its text is the compiler's
        lines = [line.strip() for line in f"{error}\n{log.getvalue()}".splitlines() if "error:" in line.lower()]
        raise BackendError(f"{module}.cu does not compile for {architecture}: {lines[0] if lines else error}") from None
    if re.search(r"\bwarning\b", log.getvalue(), re.IGNORECASE):
        raise BackendError(f"{module}.cu compiles for {architecture} with warnings: {log.getvalue().strip()}")
    return Built(bytes(found.code), log.getvalue())


def load_cubin(module: str, architecture: str, cache: Path | None = None) -> bytes:
    """Return a kernel file's cubin: made ahead of time, from the cache, or compiled now and kept there if the cache can be written."""
    ahead = data_folder("kernels") / f"{module}.{architecture}.cubin"
    if ahead.is_file():
        return ahead.read_bytes()
    key = hashlib.sha256(f"{version()}\n{architecture}\n{source(module)}".encode()).hexdigest()[:32]
    path = (cache or Path(CACHE).expanduser()) / f"{module}-{architecture}-{key}.cubin"
    if path.is_file():
        return path.read_bytes()
    built = compile_module(module, architecture).cubin
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(built)
        temporary.replace(path)
    except OSError:
        pass  # compiled anew next time
    return built


@dataclass(frozen=True)
class Resources:
    """What one kernel takes: registers of a thread, bytes spilled, bytes of shared memory of a block."""

    kernel: str
    registers: int
    spilled: int
    shared: int


def resources(log: str) -> list[Resources]:
    """Read the assembler's report, kernel by kernel."""
    found = []
    for part in log.split("Compiling entry function '")[1:]:
        spills = sum(int(count) for count in re.findall(r"(\d+) bytes spill", part))
        registers, shared = re.search(r"Used (\d+) registers", part), re.search(r"(\d+) bytes smem", part)
        found.append(Resources(part.split("'")[0], int(registers[1]) if registers else 0, spills, int(shared[1]) if shared else 0))
    return sorted(found, key=lambda row: row.kernel)
