"""Which pages of an array are in memory: brought in before somebody waits for them, given back off the hot path.

Through ctypes, which lets go of the interpreter lock while the kernel works: mapping and freeing gigabytes takes long.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

# madvise(2), since Linux 5.14; the mmap module does not name it.
_MADV_POPULATE_READ: Final = 22
_MADV_DONTNEED: Final = 4
_PIECE_BYTES: Final = 32 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.restype = ctypes.c_int
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def populate(array: npt.NDArray[Any], on_bytes: Callable[[int], None] = lambda count: None) -> None:
    """Brings all pages of a mapped array into memory and into this process's page tables, so that no read faults.

    Args:
        array: contiguous.
        on_bytes: told the bytes done since its last call.

    Raises:
        OSError: the kernel could not read a page, for example of a file that has become shorter.
    """
    begin = _address(array)
    begin -= begin % mmap.PAGESIZE
    for address, size_bytes in _pieces(begin, _address(array) + array.nbytes):
        try:
            _advise(address, size_bytes, _MADV_POPULATE_READ)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # An older kernel: reading a byte of each page does the same, one fault at a time.
            flat = array.reshape(-1).view(np.uint8)
            offset = max(0, address - _address(array))
            int(flat[offset : offset + size_bytes : mmap.PAGESIZE].sum(dtype=np.int64))
        on_bytes(size_bytes)


def give_back(array: npt.NDArray[Any], rest: Callable[[], None] = lambda: None) -> None:
    """Gives the pages that lie wholly within an array back to the system, piece by piece.

    The array must be all that lies in them, and nobody may need its content: private memory reads as zeros afterwards.
    Unmapping what is left takes next to no time.

    Args:
        array: contiguous; over mapped memory of its own, not the heap's.
        rest: called between two pieces.
    """
    begin = -(-_address(array) // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (_address(array) + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    for address, size_bytes in _pieces(begin, end):
        _advise(address, size_bytes, _MADV_DONTNEED)
        rest()


def _address(array: npt.NDArray[Any]) -> int:
    if not array.flags.c_contiguous:
        raise ValueError("an array with gaps: its memory is not its own")
    address: int = array.__array_interface__["data"][0]
    return address


def _pieces(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for address in range(begin, end, _PIECE_BYTES):
        yield address, min(_PIECE_BYTES, end - address)


def _advise(address: int, size_bytes: int, advice: int) -> None:
    if _libc.madvise(address, size_bytes, advice) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"madvise {advice} of {size_bytes} bytes: {os.strerror(number)}")
