"""What a process has made until it begins to serve stays for its life: the garbage collector need not look at it again.

Python's collector stops every thread while it goes over the oldest generation. With PyTorch and the APIs imported that
is about 200,000 objects and 80 ms, and loading a version makes enough new ones to begin it: it was the longest stall
of a swap. Frozen objects are not gone over (https://docs.python.org/3/library/gc.html#gc.freeze).

What requests make is freed by its reference counts. A young collection every 700 objects, the interpreter's default,
finds nothing and costs each request about one, so it is made rare; what is in cycles waits that much longer.

What a batch has taken for its arrays is kept for the next one. glibc's malloc begins by giving blocks of some megabytes
back to the kernel as they are freed, and every batch then pays for each of their pages again. It stops that by itself
once a block of 32 MiB was freed, which a server may never do: so it is told to begin where it would end
(https://man7.org/linux/man-pages/man3/mallopt.3.html, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD).
"""

from __future__ import annotations

import ctypes
import gc

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# DEFAULT_MMAP_THRESHOLD_MAX of 64-bit machines, and the twice of it that goes with it.
MMAP_THRESHOLD_BYTES = 32 << 20
TRIM_THRESHOLD_BYTES = 2 * MMAP_THRESHOLD_BYTES
# Objects with references to others that are made and not freed until the youngest ones are looked at.
YOUNG_OBJECTS = 50_000


def settle_heap() -> None:
    """Collects once and freezes what is left. Called once, with all modules imported, before the first request."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Other C libraries have none, and other ways.
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
