"""Rows in a snapshot's row files, read at random past the page cache: only their sectors, many at a time.

All reads of a batch are one io_submit(2), and one io_getevents(2) waits for them: a fixed number of calls, whatever the
number of rows. An error is that of a row; on a mapped page it would end the process. Measured: 1.5 times as many rows a
second as by `preadv` on the best number of threads, for a quarter of the CPU (docs/decisions/row-tiers.md).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import platform
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import LifoQueue
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from loader.errors import ConfigError, file_errors
from loader.snapshot.buckets import starts_of
from shard_node.bags import Int64Array
from shard_node.errors import RowReadError

logger = logging.getLogger(__name__)

MAX_READS: Final = 512
"""That a thread has in flight."""
MAX_THREADS: Final = 8
"""Of this process, that read at a time; others wait for one of them. The system has 65,536 reads, by default."""
BUFFER_BYTES: Final = 2 << 20
"""For the sectors that a thread reads at a time."""
# io_setup, io_submit, io_getevents, io_destroy: the C library has no names for them (each architecture's unistd.h).
_CALLS: Final = {"x86_64": (206, 209, 208, 207), "aarch64": (0, 2, 4, 1)}
# struct iocb and struct io_event of linux/aio_abi.h, little-endian; opcode 0 is a pread.
_REQUEST: Final = np.dtype(
    [
        *(("data", "<u8"), ("key", "<u4"), ("flags", "<u4"), ("opcode", "<u2"), ("priority", "<i2"), ("file", "<u4")),
        *(("buffer", "<u8"), ("size", "<u8"), ("offset", "<i8"), ("reserved", "<u8"), ("more", "<u8")),
    ]
)
_RESULT: Final = np.dtype([("data", "<u8"), ("request", "<u8"), ("size", "<i8"), ("more", "<i8")])
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class RowFile(NamedTuple):
    """Where consecutive rows are stored: the offset of the first one's first byte, and how many they are."""

    path: Path
    offset: int
    num_rows: int


class _Reads:
    """A kernel context for one thread at a time, with its requests, results and a buffer."""

    def __init__(self) -> None:
        try:
            setup, self._submit, self._wait, self._destroy = _CALLS[platform.machine()]
        except KeyError:
            raise ConfigError(f"rows on disk: {platform.machine()} is not one of {sorted(_CALLS)}") from None
        context = ctypes.c_ulong(0)
        if _libc.syscall(setup, MAX_READS, ctypes.byref(context)) != 0:
            problem = f"rows on disk: io_setup of {MAX_READS} reads: {os.strerror(ctypes.get_errno())}"
            raise RowReadError(f"{problem}; it may be shut off, or fs.aio-max-nr too low")
        self._context = ctypes.c_ulong(context.value)
        self.buffer = np.frombuffer(mmap.mmap(-1, BUFFER_BYTES), np.uint8)
        self.requests, self._results = np.zeros(MAX_READS, _REQUEST), np.zeros(MAX_READS, _RESULT)
        self.requests["data"] = numbers = np.arange(MAX_READS)
        self._pointers = self.requests.ctypes.data + numbers * _REQUEST.itemsize
        self.is_idle = True

    def destroy(self) -> None:
        """Wait for reads that are in flight, and give the context back."""
        _libc.syscall(self._destroy, self._context)

    def run(self, count: int) -> Int64Array:
        """Make the first requests, and wait for all; return the bytes that each read, or its errno below 0."""
        sizes, submitted, ended, self.is_idle = np.zeros(count, np.int64), 0, 0, False
        while submitted < count:
            first = ctypes.c_void_p(self._pointers.ctypes.data + 8 * submitted)
            number = _libc.syscall(self._submit, self._context, ctypes.c_long(count - submitted), first)
            if number <= 0:
                sizes[submitted:] = -ctypes.get_errno() or -errno.EAGAIN
                break
            submitted += number
        # What was submitted writes into the buffers until it has ended, whatever became of the others.
        while ended < submitted:
            left = ctypes.c_long(submitted - ended)
            first = ctypes.c_void_p(self._results.ctypes.data + _RESULT.itemsize * ended)
            number = _libc.syscall(self._wait, self._context, left, left, first, None)
            if number < 0 and ctypes.get_errno() != errno.EINTR:
                raise RowReadError(f"io_getevents: {os.strerror(ctypes.get_errno())}")
            ended += max(number, 0)
        self.is_idle = True
        results = self._results[:ended]
        sizes[results["data"].view(np.int64)] = results["size"]
        return sizes


class _ReadPool:
    """What threads of this process read with."""

    def __init__(self) -> None:
        self._idle, self._lock, self._count = LifoQueue[_Reads](), threading.Lock(), 0
        # A child process has no use of its parent's.
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._idle, self._lock, self._count = LifoQueue(), threading.Lock(), 0

    @contextmanager
    def reading(self) -> Iterator[_Reads]:
        """Yield one that no other thread uses, which may have to be waited for. Raises RowReadError."""
        with self._lock:
            if self._idle.empty() and self._count < MAX_THREADS:
                try:
                    self._idle.put(_Reads())
                    self._count += 1
                except RowReadError:
                    if not self._count:
                        raise
        reads = self._idle.get()
        try:
            yield reads
        finally:
            if not reads.is_idle:
                # Interrupted: its buffer is still written to.
                reads.destroy()
                reads = _Reads()
            self._idle.put(reads)


_pool = _ReadPool()


class RowFiles:
    """Rows of one width in files, numbered by their positions in all of them. Thread-safe.

    Raises SnapshotError if a file can't be opened.
    """

    def __init__(self, files: Sequence[RowFile], row_bytes: int) -> None:
        self.files, self._row_bytes = tuple(files), row_bytes
        self.starts = starts_of(np.array([file.num_rows for file in files]))
        self._offsets = np.array([file.offset for file in files], np.int64)
        with ExitStack() as opened:
            self._descriptors = np.array([_open(file.path, opened) for file in files], np.uint32)
            self._sector = _sector_bytes(int(self._descriptors[0]), self.files[0].path) if files else mmap.PAGESIZE
            # The longest that a row's sectors can be.
            self._span = (2 * self._sector - 2 + row_bytes) // self._sector * self._sector
            self._max_reads = min(MAX_READS, BUFFER_BYTES // self._span)
            if not self._max_reads:
                limit = BUFFER_BYTES - 2 * mmap.PAGESIZE
                raise ConfigError(f"rows on disk: of {row_bytes} bytes; at most {limit} are read")
            with _pool.reading():
                pass  # A load is refused where nothing can be read.
            self._opened = opened.pop_all()
        self._lock = threading.Lock()
        self._counts = np.zeros(3, np.int64)

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return int(self.starts[-1])

    def read(self, positions: Int64Array) -> npt.NDArray[np.uint8]:
        """Read rows, int64 [n], as they are stored: uint8 [n, row_bytes]. Raises RowReadError, which names the file."""
        rows = np.empty((positions.size, self._row_bytes), np.uint8)
        if positions.size:
            with _pool.reading() as reads:
                for begin in range(0, positions.size, self._max_reads):
                    piece = slice(begin, begin + self._max_reads)
                    self._read(reads, positions[piece], rows[piece])
        return rows

    def _read(self, reads: _Reads, positions: Int64Array, target: npt.NDArray[np.uint8]) -> None:
        count = positions.size
        file = self.starts.searchsorted(positions, side="right") - 1
        first_byte = self._offsets[file] + (positions - self.starts[file]) * self._row_bytes
        skipped = first_byte & (self._sector - 1)
        needed = skipped + self._row_bytes
        requests = reads.requests[:count]
        requests["file"], requests["offset"] = self._descriptors[file], first_byte - skipped
        requests["size"] = -(-needed // self._sector) * self._sector
        requests["buffer"] = reads.buffer.ctypes.data + np.arange(count) * self._span
        sizes = reads.run(count)
        failed = (sizes < needed).nonzero()[0]
        with self._lock:
            self._counts += count, int(sizes.clip(0).sum()), failed.size
        if failed.size:
            first = int(failed[0])
            size, path = int(sizes[first]), self.files[int(file[first])].path
            reason = (
                os.strerror(-size) if size < 0 else f"the file ends {int(needed[first]) - size} bytes before its end"
            )
            raise RowReadError(f"{path}: the row at byte {first_byte[first]} of {self._row_bytes} bytes: {reason}")
        # Rows may begin at any byte: one item at each.
        shape, kind = (reads.buffer.size - self._row_bytes + 1,), f"V{self._row_bytes}"
        items: npt.NDArray[np.void] = np.ndarray(shape, kind, reads.buffer, strides=(1,))
        target.view(kind).reshape(-1)[:] = items[np.arange(count) * self._span + skipped]

    def counts(self) -> Int64Array:
        """Return how many reads there were, their bytes, and how many failed: int64 [3]."""
        with self._lock:
            return self._counts.copy()

    def forget_pages(self) -> None:
        """Let the system drop what it has of the files in its page cache, which reads do not use."""
        for descriptor in self._descriptors.tolist():
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the files. Nobody may be reading."""
        self._opened.close()


def _open(path: Path, opened: ExitStack) -> int:
    with file_errors(path, "read"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # A file system without direct reads: these go through the page cache, one after the other.
            logger.warning("%s: no direct reads here: rows on disk are read through the page cache", path)
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    opened.callback(os.close, descriptor)
    return descriptor


def _sector_bytes(descriptor: int, path: Path) -> int:
    """Return the size at whose multiples direct reads may begin: 512 bytes, or a page."""
    with file_errors(path, "read"):
        try:
            os.preadv(descriptor, [memoryview(mmap.mmap(-1, mmap.PAGESIZE))[:512]], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return mmap.PAGESIZE
    return 512
