"""NVRTC from its wheel, which compiles for real cards and needs none itself."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ARCHITECTURES = ("sm_80", "sm_90")
OPTIONS_OF_CUPY = (b"-ftz=true", b"--device-as-default-execution-space")
"""That CuPy adds to those which it is given."""

_REPORT = re.compile(
    r"Function properties for (?P<kernel>\w+)\s*\n[^\n]*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill "
    r"stores, (?P<loads>\d+) bytes spill loads\s*\n[^\n]*?Used (?P<registers>\d+) registers"
)


@dataclass(frozen=True)
class Resources:
    """What each thread of a kernel takes, as the assembler says.

    Attributes:
        registers: how many.
        local_bytes: what is not in registers, the stack and spills: 0, as it is to be.
    """

    registers: int
    local_bytes: int


def resources(source: Path, architecture: str) -> dict[str, Resources]:
    """Compiles for `sm_..` and reads the resource report, by kernel. Skips the test where there is no NVRTC.

    Raises:
        RuntimeError: the source does not compile; with what the compiler says.
    """
    return {
        found["kernel"]: Resources(
            int(found["registers"]), sum(int(found[name]) for name in ("stack", "stores", "loads"))
        )
        for found in _REPORT.finditer(_log(source, architecture))
    }


def _log(source: Path, architecture: str) -> str:
    # NVRTC opens its other library by name, which is found only if it has been opened by path before.
    libraries = _nvrtc_libraries()
    held = ctypes.CDLL(str(libraries["libnvrtc-builtins"]), mode=ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(str(libraries["libnvrtc"]))
    program = ctypes.c_void_p()
    _ok(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), b"kernels.cu", 0, None, None))
    options = (
        f"--gpu-architecture={architecture}".encode(),
        b"-std=c++17",
        b"--ptxas-options=-v",
        *OPTIONS_OF_CUPY,
    )
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    _ok(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
    log = ctypes.create_string_buffer(size.value)
    _ok(nvrtc.nvrtcGetProgramLog(program, log))
    _ok(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))
    del held
    if failed:
        raise RuntimeError(f"NVRTC can't compile {source}:\n{log.value.decode()}")
    return log.value.decode()


def _nvrtc_libraries() -> dict[str, Path]:
    try:
        files = importlib.metadata.files("nvidia-cuda-nvrtc") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = {file.name.partition(".so")[0]: Path(str(file.locate())) for file in files if ".so" in file.name}
    if {"libnvrtc", "libnvrtc-builtins"} <= set(found):
        return found
    # The test extra names it, so that CI never goes without.
    if os.environ.get("CI"):
        raise RuntimeError("CI is set, but nvidia-cuda-nvrtc is not installed")
    pytest.skip("needs nvidia-cuda-nvrtc, which the test extra installs")


def _ok(result: int) -> None:
    if result:
        raise RuntimeError(f"NVRTC: error {result}")
