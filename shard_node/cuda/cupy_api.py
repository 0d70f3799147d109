"""What is used of CuPy. The only module that imports it.

Thin calls of CUDA's runtime and driver, which take and give plain integers; the compiler; and arrays that hand memory
to torch by DLPack. CuPy's own pools, streams and current stream are not used by the engine. CuPy and torch share each
device's primary context, so the streams, events and memory of one are valid in the other.
"""

from __future__ import annotations

from typing import Any, Final

import cupy
import numpy as np
import torch
from cupy.cuda import compiler, driver, nvrtc, runtime

from shard_node.errors import CardError, CardsUnavailableError

__all__ = ["CUDA_ERRORS", "NOT_READY", "OUT_OF_MEMORY", "PEER_ACCESS_ALREADY_ENABLED", "driver", "runtime"]

CUDA_ERRORS: Final = (runtime.CUDARuntimeError, driver.CUDADriverError)
# Of cudaError_t and CUresult, which number them alike where both have them. CuPy has no names for them.
OUT_OF_MEMORY: Final = 2
NOT_READY: Final = 600
PEER_ACCESS_ALREADY_ENABLED: Final = 704


def usable_devices() -> int:
    """How many devices this process sees, at least 1. Their compute capability is not looked at.

    Raises:
        CardsUnavailableError: naming what is missing.
    """
    if torch.version.cuda is None:
        raise CardsUnavailableError(f"torch {torch.__version__} is built without CUDA: install one with it")
    try:
        count = int(runtime.getDeviceCount())
    except RuntimeError as error:
        raise CardsUnavailableError(
            f"no device can be used: {error}. CuPy {cupy.__version__} is built for CUDA "
            f"{runtime.runtimeGetVersion() // 1000}; a driver for CUDA 12 needs cupy-cuda12x in its place"
        ) from error
    if count == 0 or not torch.cuda.is_available():
        raise CardsUnavailableError(f"no device can be used: CuPy sees {count}, torch {torch.cuda.device_count()}")
    try:
        nvrtc.getVersion()
    except (RuntimeError, OSError, ImportError) as error:
        raise CardsUnavailableError(f"the compiler of kernels (NVRTC) can't be loaded: {error}") from error
    return count


def compiled(source: str, names: tuple[str, ...], device: int) -> dict[str, Any]:
    """The kernels of a source for the current device: compiled, or taken from CuPy's cache on disk.

    Args:
        source: CUDA C++17 without includes.
        names: of its kernels, `extern "C"`.
        device: for messages.

    Returns:
        By name: objects with the CUfunction as `ptr`. The code is unloaded with the last of them.

    Raises:
        CardError: it does not compile. The message has the compiler's log.
    """
    module = cupy.RawModule(code=source, options=("-std=c++17",), backend="nvrtc")
    try:
        return {name: module.get_function(name).kernel for name in names}
    except (compiler.CompileException, OSError, RuntimeError) as error:
        raise CardError(f"device {device}: the kernels can't be compiled: {error}") from error


def view(address: int, size_bytes: int, owner: object, device: int) -> torch.Tensor:
    """Memory of a device, or pinned memory, as torch sees it; by DLPack.

    Args:
        address: of the first byte.
        size_bytes: at least 1.
        owner: kept as long as the tensor.
        device: that the tensor is to be on.

    Returns:
        uint8 [size_bytes].
    """
    memory = cupy.cuda.UnownedMemory(address, size_bytes, owner, device)
    array = cupy.ndarray((size_bytes,), dtype=np.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0))
    # -1: no order is asked for. Else CuPy would make torch's stream wait for CuPy's, which ends a capture.
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(array.__dlpack__(stream=-1))
    return tensor
