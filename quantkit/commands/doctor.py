"""`quantkit doctor`: what this machine computes with, operation by operation, and what stands in the way."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from quantkit import __version__
from quantkit.backends import KERNELS
from quantkit.backends.cuda import nvrtc
from quantkit.backends.cuda.launch import launcher, missing_device
from quantkit.commands._infer_options import DoctorOptions
from quantkit.document import print_json
from quantkit.errors import BackendError
from quantkit.report import Eye, mib

LIBRARIES = (
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "numpy",
    "numba",
    "gguf",
    "cuda-core",
    "compressed-tensors",
    "flash-attn",
)
SAME_COMMAND = ("llm-quantkit",)  # distributions that install a command of our name


@dataclass(frozen=True)
class Answer:
    """What a backend says: whether it computes here, why not, and the operations it has kernels for."""

    name: str
    works: bool
    reason: str
    operations: list[str]


def doctor(asked: DoctorOptions) -> None:
    """Print what is here, what each backend can do and why not, conflicts, and what would help."""
    versions = {name: found for name in LIBRARIES if (found := _version(name))}
    answers = [_reference(), _cpu(), _cuda()]
    problems = _problems(versions)
    with Eye() as eye:
        eye.totals({"quantkit": f"{__version__}, Python {sys.version.split()[0]}, {Path(sys.argv[0]).resolve()}"})
        eye.totals({"libraries": ", ".join(f"{name} {found}" for name, found in versions.items())})
        memory = psutil.virtual_memory()
        eye.totals({"machine": f"{psutil.cpu_count()} CPUs, {mib(memory.total)} of memory, {mib(memory.available)} free"})
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            eye.totals({f"cuda:{index}": f"{device.name}, {mib(device.total_memory)}, compute capability {device.major}.{device.minor}"})
        for answer in answers:
            eye.totals({answer.name: f"{'yes' if answer.works else 'no'}: {answer.reason}"})
            if answer.operations:
                eye.totals({f"  {len(answer.operations)} operations": ", ".join(answer.operations)})
        for text in problems:
            eye.notice(text)
    if asked.json:
        rows = [{"backend": a.name, "works": a.works, "reason": a.reason, "operations": a.operations} for a in answers]
        print_json({"command": "doctor", "versions": versions, "backends": rows, "problems": problems})


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _operations(backend: str) -> list[str]:
    return [name.partition("/")[2] for name in KERNELS.names() if name.startswith(f"{backend}/")]


def _reference() -> Answer:
    return Answer("reference", True, f"PyTorch on {torch.get_num_threads()} threads, every operation", [])


def _cpu() -> Answer:
    from quantkit.backends.cpu import _jit, packing

    kept = (
        "kept on disk" if _jit.is_kept(packing) else "compiled anew in each process: neither its folder nor the user's cache can be written"
    )
    return Answer("cpu", True, f"Numba, {kept}", _operations("cpu"))


def _cuda() -> Answer:
    try:
        version = nvrtc.version()
        if not torch.cuda.is_available():
            nvrtc.compile_module("pack", nvrtc.ARCHITECTURES[0])
            return Answer("cuda", False, f"{missing_device()} (NVRTC {version} compiles the kernels here)", [])
        found = launcher(torch.cuda.current_device())
    except BackendError as error:
        return Answer("cuda", False, str(error), [])
    return Answer("cuda", True, f"NVRTC {version}, {found.architecture}", _operations("cuda"))


def _problems(versions: dict[str, str]) -> list[str]:
    """Return what stands in the way of somebody, a line each."""
    problems = []
    for name in SAME_COMMAND:
        if found := _version(name):
            problems.append(f"{name} {found} installs a command named quantkit too; which one runs is chance: pip uninstall {name}")
    on_path, here = shutil.which("quantkit"), Path(sys.executable).parent
    if on_path and Path(on_path).parent.resolve() != here.resolve():
        problems.append(f"the quantkit on PATH is {on_path}, of another environment than {sys.executable}")
    if torch.cuda.is_available() and "cuda-core" not in versions:
        problems.append(f"there is a GPU, but its kernels need cuda-core: {nvrtc.INSTALL}")
    return problems
