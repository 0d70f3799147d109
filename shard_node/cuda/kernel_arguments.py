"""How structures get into a launch: `cuLaunchKernel` takes an array of pointers to them, one a parameter."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

MAX_PARAMETER_BYTES = 4096
"""Of all parameters of one launch together, on every device and by every compiler that there is."""


def pointers_to(params: Sequence[ctypes.Structure]) -> ctypes.Array[ctypes.c_void_p]:
    """The addresses of the structures, in order. They and the array must live until the launch has returned."""
    return (ctypes.c_void_p * len(params))(*map(ctypes.addressof, params))
