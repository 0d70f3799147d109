"""What a process has made until it begins to serve stays for its life: the garbage collector need not look at it again.

Python's collector stops every thread while it goes over the oldest generation. With PyTorch and the APIs imported that
is about 200,000 objects and 80 ms, and loading a version makes enough new ones to begin it: it was the longest stall
of a swap. Frozen objects are not gone over (https://docs.python.org/3/library/gc.html#gc.freeze).
"""

from __future__ import annotations

import gc


def settle_heap() -> None:
    """Collects once and freezes what is left. Called once, with all modules imported, before the first request."""
    gc.collect()
    gc.freeze()
