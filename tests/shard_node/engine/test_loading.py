"""Which tables stay in the mapped snapshot, and the memory that the others take."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_node.engine.arena import HUGE_PAGE_BYTES, allocate_rows
from shard_node.engine.loading import choose_tiers
from shard_node.errors import InvalidBagsError
from shard_node.partition import Partition


@given(st.lists(st.integers(0, 1000), min_size=1), st.integers(0, 5000))
def test_the_smallest_tables_that_fit_the_budget_are_in_ram(sizes, budget):
    tiers = choose_tiers(sizes, budget)
    in_ram = [size for size, tier in zip(sizes, tiers, strict=True) if tier == "ram"]
    mapped = [size for size, tier in zip(sizes, tiers, strict=True) if tier == "mapped"]
    assert sum(in_ram) <= budget
    assert not mapped or not in_ram or max(in_ram) <= min(mapped)
    # Not one table more than needed was left out.
    assert not mapped or sum(in_ram) + min(mapped) > budget
    assert choose_tiers(sizes, None) == ["ram"] * len(sizes)


@pytest.mark.parametrize("size", [72, HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES + 72])
def test_allocated_rows_are_zero_contiguous_and_writable(size):
    rows = allocate_rows(size // 72, 72)
    assert rows.shape == (size // 72, 72)
    assert rows.flags.c_contiguous
    assert not rows.any()
    rows[-1] = 7
    assert rows[-1].tolist() == [7] * 72


@pytest.mark.parametrize(
    ("cards", "message"),
    [((np.full(256, 2, np.int16),), r"within -1\.\.1"), ((np.full(4096, -2, np.int16),), r"within -1\.\.1")],
)
def test_a_partition_that_names_no_card_is_refused(cards, message):
    with pytest.raises(InvalidBagsError, match=message):
        Partition(2, cards)
