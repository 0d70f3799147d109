"""Arrays over mapped files that keep no file descriptor.

`numpy.memmap` and, before Python 3.13, `mmap.mmap` hold a duplicate of the descriptor for as long as the mapping lives,
so that a snapshot of a thousand row files would cost a thousand of them. POSIX needs none: `mmap` is called directly.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
# Named by the mmap module since Python 3.13; this is Linux's value.
_MAP_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_MAP_FAILED = ctypes.c_void_p(-1).value


class _MappedPages:
    """Owns a mapping and gives it to NumPy; arrays keep their owner, and the pages are unmapped with the last of them.

    Attributes:
        __array_interface__: NumPy's array interface, version 3
            (https://numpy.org/doc/stable/reference/arrays.interface.html).
    """

    def __init__(self, address: int, size_bytes: int, array_interface: dict[str, Any]) -> None:
        self.__array_interface__ = array_interface
        # Not at exit: other threads may still read, and the process's end unmaps everything.
        weakref.finalize(self, _libc.munmap, address, size_bytes).atexit = False


def map_array(
    path: Path, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike, *, copy_on_write: bool = False
) -> npt.NDArray[Any]:
    """An array of `shape` over a file's bytes from `offset` on; at least one element.

    Args:
        path: the file.
        offset: of the first element, in bytes.
        shape: of the array.
        dtype: of its elements.
        copy_on_write: it can be written to; a page that is written becomes memory of this process, and the file stays
            as it is. Otherwise the array is read-only.

    Raises:
        OSError: the file can't be opened or mapped.
        ValueError: the file ends before the array does.
    """
    item = np.dtype(dtype)
    end = offset + item.itemsize * math.prod(shape)
    first_page = offset - offset % mmap.ALLOCATIONGRANULARITY
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        file_bytes = os.fstat(descriptor).st_size
        if file_bytes < end:  # reading such pages would end the process
            raise ValueError(f"the file has {file_bytes} bytes, the array ends at {end}")
        size_bytes = end - first_page
        protection, flags = mmap.PROT_READ, mmap.MAP_SHARED
        if copy_on_write:
            # Without a reserve: a few pages will be written, and a file may be larger than the memory.
            protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE
        address = _libc.mmap(None, size_bytes, protection, flags, descriptor, first_page)
        if address is None or address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(descriptor)
    interface = {
        "version": 3,
        "shape": shape,
        "typestr": item.str,
        "data": (address + offset - first_page, not copy_on_write),
    }
    return np.asarray(_MappedPages(address, size_bytes, interface))
