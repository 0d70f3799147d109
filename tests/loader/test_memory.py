"""Pages are brought in and given back, and the heap is settled."""

from __future__ import annotations

import gc
import mmap
import os

import numpy as np
import pytest

from loader.memory import YOUNG_OBJECTS, give_back, map_array, populate, settle_heap


def resident_bytes(array: np.ndarray) -> int:
    """Of the pages of an array alone, by the present bits of /proc/self/pagemap: mappings may be joined with others."""
    first, end = (edge // mmap.PAGESIZE for edge in np.lib.array_utils.byte_bounds(array))
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pages = np.frombuffer(os.pread(pagemap.fileno(), (end - first) * 8, first * 8), np.uint64)
    return int(np.count_nonzero(pages >> np.uint64(63))) * mmap.PAGESIZE


def anonymous(size_bytes: int) -> np.ndarray:
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, np.uint8)


def test_given_back_memory_is_not_resident_and_reads_as_zeros():
    array = anonymous(70 << 20)
    array[:] = 7
    # The kernel may reclaim some of it in the meantime.
    assert resident_bytes(array) >= 35 << 20
    give_back(array)
    assert resident_bytes(array) < 1 << 20
    assert not array.any()


@pytest.mark.parametrize("copy_on_write", [False, True])
def test_a_populated_mapping_is_resident_and_the_file_unchanged(tmp_path, copy_on_write):
    path = tmp_path / "rows"
    content = np.random.default_rng(1).integers(0, 255, 40 << 20, np.uint8)
    path.write_bytes(content.tobytes())
    array = map_array(path, 100, (content.size - 100,), np.uint8, copy_on_write=copy_on_write)
    before = resident_bytes(array)
    populate(array)
    assert before < 10 << 20
    assert resident_bytes(array) >= 40 << 20
    assert np.array_equal(array, content[100:])


def test_a_page_of_a_file_that_became_shorter_is_an_error(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(bytes(8 * mmap.PAGESIZE))
    array = map_array(path, 0, (8 * mmap.PAGESIZE,), np.uint8)
    with path.open("r+b") as file:
        file.truncate(mmap.PAGESIZE)
    with pytest.raises(OSError, match="madvise"):
        populate(array)


def test_settled_objects_are_not_collected_and_later_ones_are():
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
