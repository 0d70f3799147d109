from __future__ import annotations

import ctypes
import gc
import subprocess
import sys

import pytest

from loader.memory import YOUNG_OBJECTS, settle_heap

# Three arrays of 3 MB at a time, as a batch of a few hundred thousand ids has them, again and again.
BATCHES = """
import resource, sys
import numpy as np
from loader.memory import settle_heap
if sys.argv[1] == "settled":
    settle_heap()

def batch():
    held = [np.ones(400_000) for _ in range(3)]

for _ in range(5):
    batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    batch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    command = [sys.executable, "-c", BATCHES, how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="a C library without mallopt")
def test_the_memory_of_one_batch_is_there_for_the_next() -> None:
    assert page_faults("settled") < 1000
    # The test can fail: as malloc begins, each batch takes its 9 MB from the kernel anew.
    assert page_faults("as it begins") > 20_000


def test_what_was_there_is_not_gone_over_again_and_what_comes_later_still_is():
    class Node:
        pass

    kept = Node()
    kept.itself = kept
    thresholds = gc.get_threshold()
    gc.set_threshold(700)
    try:
        settle_heap()
        assert gc.get_freeze_count() > 10_000
        assert gc.get_threshold()[0] == YOUNG_OBJECTS
        assert not any(found is kept for found in gc.get_objects())
        later = Node()
        later.itself = later
        del later
        assert gc.collect() >= 1
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
