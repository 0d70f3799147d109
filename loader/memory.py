"""Allocate memory for rows, map files as arrays, bring pages in, give them back, and settle the heap.

Through ctypes, which releases the interpreter lock while the kernel works: mapping and freeing gigabytes takes long.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import math
import mmap
import os
import sys
import weakref
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
# Named by the mmap module since Python 3.13; this is Linux's value.
_MAP_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_MAP_FAILED = ctypes.c_void_p(-1).value

# madvise(2), since Linux 5.14; the mmap module does not name it.
_MADV_POPULATE_READ: Final = 22
_MADV_DONTNEED: Final = 4
_PIECE_BYTES: Final = 32 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD_BYTES = 32 << 20  # DEFAULT_MMAP_THRESHOLD_MAX of 64-bit machines
# Objects with references to others that are made and not freed until the youngest ones are looked at.
YOUNG_OBJECTS = 50_000


class _MappedPages:
    # Arrays keep the owner of their interface, which unmaps when the last is gone.

    def __init__(self, address: int, size_bytes: int, array_interface: dict[str, Any]) -> None:
        self.__array_interface__ = array_interface
        # Not at exit: other threads may still read, and the process's end unmaps everything.
        weakref.finalize(self, _libc.munmap, address, size_bytes).atexit = False


def map_array(
    path: Path, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike, *, copy_on_write: bool = False
) -> npt.NDArray[Any]:
    """Return a read-only array of `shape` over a file's bytes from `offset` on; at least one element.

    With `copy_on_write` pages that are written become memory of this process, and the file stays as it is. Raises
    OSError if the file can't be opened or mapped, ValueError if it ends before the array does.
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


def populate(array: npt.NDArray[Any]) -> None:
    """Read all pages of a contiguous mapped array into this process's page tables, so that no read faults.

    Raises OSError if the kernel could not read a page, such as one of a file that became shorter.
    """
    first = _address(array)
    for address in range(first - first % mmap.PAGESIZE, first + array.nbytes, _PIECE_BYTES):
        size_bytes = min(_PIECE_BYTES, first + array.nbytes - address)
        try:
            _advise(address, size_bytes, _MADV_POPULATE_READ)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # An older kernel: reading a byte of each page does the same, one fault at a time.
            offset = max(0, address - first)
            pages = array.reshape(-1).view(np.uint8)[offset : offset + size_bytes : mmap.PAGESIZE]
            int(pages.sum(dtype=np.int64))


def give_back(array: npt.NDArray[Any]) -> None:
    """Free the pages that are all within a contiguous array over mapped memory, piece by piece.

    Its content is lost: private memory reads as zeros afterwards. Unmapping the remainder takes next to no time.
    """
    begin = -(-_address(array) // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (_address(array) + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    for address in range(begin, end, _PIECE_BYTES):
        _advise(address, min(_PIECE_BYTES, end - address), _MADV_DONTNEED)


def _address(array: npt.NDArray[Any]) -> int:
    if not array.flags.c_contiguous:
        raise ValueError("an array with gaps: its memory is not its own")
    return int(array.__array_interface__["data"][0])


def _advise(address: int, size_bytes: int, advice: int) -> None:
    if _libc.madvise(address, size_bytes, advice) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"madvise {advice} of {size_bytes} bytes: {os.strerror(number)}")


def settle_heap() -> None:
    """Collect once and freeze what is left. Called once, with all modules imported, before the first request.

    Python's collector stops every thread while it goes over the oldest generation: with PyTorch and the APIs imported
    80 ms, the longest stall of a swap. Frozen objects are not gone over, and young collections become rare.

    glibc's malloc at first returns blocks of some megabytes to the kernel, and every batch then pays for their pages
    again, until a block of 32 MiB was freed (https://man7.org/linux/man-pages/man3/mallopt.3.html).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Other C libraries have none, and other ways.
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _MMAP_THRESHOLD_BYTES)


def allocate_rows(num_rows: int, row_bytes: int, *, is_reserved: bool = False) -> npt.NDArray[np.uint8]:
    """Allocates zeroed memory for rows, uint8 [num_rows, row_bytes], in huge pages where the kernel grants them.

    It is private anonymous memory, given back to the system when the last view of it is gone. With `is_reserved` most
    of it may never be used, so that the kernel need not have as much.
    """
    size_bytes = num_rows * row_bytes
    if size_bytes < HUGE_PAGE_BYTES:
        return np.zeros((num_rows, row_bytes), np.uint8)
    padded = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_NORESERVE if is_reserved else 0)
    memory = mmap.mmap(-1, padded, flags=flags)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        # A kernel built without transparent huge pages says EINVAL; small pages hold the same rows.
        logger.info("no huge pages for %d bytes of rows: %s", size_bytes, error)
    return np.frombuffer(memory, np.uint8, count=size_bytes).reshape(num_rows, row_bytes)
