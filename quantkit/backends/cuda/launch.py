"""Kernels on torch's tensors: compiled for the device at hand, launched on torch's stream."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.backends.cuda import nvrtc
from quantkit.errors import BackendError

OLDEST = (8, 0)
Argument = Tensor | int | float | None


class Wide(int):
    """A 64-bit integer argument."""


class Launcher(Protocol):
    """What runs a kernel: a GPU, or the tests' CPU."""

    device: torch.device

    def launch(self, module: str, kernel: str, grid: tuple[int, int], threads: int, arguments: Sequence[Argument]) -> None:
        """Run a kernel; tensors (contiguous or not) become their addresses, None a null pointer, int 32 bits, `Wide` 64, float 32."""

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return memory for an output."""


class CudaLauncher:
    """Launches on one CUDA device; a BackendError says why it cannot."""

    def __init__(self, device: torch.device) -> None:
        self.core = nvrtc.toolkit()
        if not torch.cuda.is_available():
            raise BackendError(missing_device())
        self.device = device
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < OLDEST:
            raise BackendError(f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; the kernels need 8.0")
        self.architecture = f"sm_{major}{minor}"
        self.number = torch.cuda.current_device() if device.index is None else device.index
        self.kernels: dict[tuple[str, str], Any] = {}
        # A driver that is too old, or a compiler that fails, shows here and not in the middle of a run.
        self.cubins = {module: nvrtc.load_cubin(module, self.architecture) for module in nvrtc.MODULES}
        try:
            self._kernel("pack", "pack_fields")
        except Exception as error:  # the driver's own error, whatever its class
            raise BackendError(f"the driver does not load the kernels ({str(error).splitlines()[0]}): update it") from None

    def _kernel(self, module: str, kernel: str) -> Any:
        if (module, kernel) not in self.kernels:
            code = self.core.ObjectCode.from_cubin(self.cubins[module], name=module)
            self.core.Device(self.number).set_current()
            self.kernels[module, kernel] = code.get_kernel(kernel)
        return self.kernels[module, kernel]

    def launch(self, module: str, kernel: str, grid: tuple[int, int], threads: int, arguments: Sequence[Argument]) -> None:
        """See `Launcher`."""
        values: list[Any] = []
        for value in arguments:
            if value is None or isinstance(value, Tensor):
                values.append(0 if value is None else value.data_ptr())
            elif isinstance(value, Wide):
                values.append(ctypes.c_int64(value))
            else:
                values.append(ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int32(value))
        with torch.cuda.device(self.number):
            stream = self.core.Stream.from_handle(torch.cuda.current_stream().cuda_stream)
            config = self.core.LaunchConfig(grid=(*grid, 1), block=(threads, 1, 1))
            self.core.launch(stream, config, self._kernel(module, kernel), *values)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """See `Launcher`."""
        return torch.empty(shape, dtype=dtype, device=self.device)


def missing_device() -> str:
    """Return why torch sees no CUDA device."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch"
    return f"torch {torch.__version__} sees no CUDA device: no GPU, or a driver older than CUDA {torch.version.cuda} needs"


@lru_cache
def launcher(index: int) -> CudaLauncher:
    """Return the launcher of a CUDA device, made once."""
    return CudaLauncher(torch.device("cuda", index))
