"""Buckets are dealt so that owners have the same load, within the bytes that they have room for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_node.errors import MemoryBudgetError
from shard_node.planning.balance import Owners, deal

buckets = st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 1000)), min_size=1, max_size=64)


@given(
    tables=st.lists(buckets, min_size=1, max_size=4),
    num_owners=st.integers(1, 9),
    even=st.sampled_from(["load", "bytes"]),
)
def test_every_bucket_has_one_owner(tables, num_owners, even):
    loads = [np.array([load for load, _ in table]) for table in tables]
    sizes = [np.array([size for _, size in table], np.int64) for table in tables]
    owners = Owners.empty([10**9] * num_owners)
    given_to = deal(loads, sizes, owners, even=even)
    assert [one.size for one in given_to] == [one.size for one in loads]
    assert all((one >= 0).all() and (one < num_owners).all() for one in given_to)
    used = np.zeros(num_owners, np.int64)
    for owner, size in zip(given_to, sizes, strict=True):
        used += np.bincount(owner, size, num_owners).astype(np.int64)
    assert owners.used.tolist() == used.tolist()
    assert owners.free.tolist() == (10**9 - used).tolist()
    again = deal(loads, sizes, Owners.empty([10**9] * num_owners), even=even)
    assert all((one == other).all() for one, other in zip(given_to, again, strict=True))


@given(
    seed=st.integers(0, 2**32),
    num_owners=st.integers(1, 40),
    num_tables=st.integers(1, 5),
    count=st.sampled_from([256, 4096]),
)
def test_no_owner_exceeds_the_mean_by_more_than_one_bucket(seed, num_owners, num_tables, count):
    rng = np.random.default_rng(seed)
    loads = [rng.pareto(1.05, count) * rng.random() for _ in range(num_tables)]
    sizes = [np.full(count, int(rng.integers(1, 10_000)), np.int64) for _ in range(num_tables)]
    owners = Owners.empty([1 << 60] * num_owners)
    deal(loads, sizes, owners)
    largest = max(float(one.max()) for one in loads)
    assert owners.load.max() <= owners.load.mean() + largest


def test_many_tables_are_even_in_load_and_bytes():
    rng = np.random.default_rng(1)
    loads, sizes = [], []
    for _ in range(200):
        load = rng.pareto(1.05, 4096)
        loads.append(load * (rng.random() / load.sum()))
        sizes.append(np.full(4096, int(rng.integers(1, 5000)) * 144, np.int64))
    owners = Owners.empty([int(sum(size.sum() for size in sizes) / 32 * 1.05)] * 32)
    deal(loads, sizes, owners)
    assert owners.load.max() <= 1.01 * owners.load.mean()
    assert owners.free.min() >= 0
    # Bytes are even where that is asked for, though one bucket has most of the load.
    loads = np.ones(256)
    loads[7] = 1e6
    owners = Owners.empty([1 << 40] * 8)
    deal([loads], [np.full(256, 100, np.int64)], owners, even="bytes")
    assert owners.used.tolist() == [3200] * 8
    # What owners have already counts.
    owners = Owners.empty([1 << 40] * 2)
    owners.give(0, 100.0, 0)
    deal([np.ones(256)], [np.ones(256, np.int64)], owners)
    assert owners.load.tolist() == [178.0, 178.0]


def test_buckets_without_rows_have_an_owner_that_has_rows():
    sizes = np.array([5, 5, 5, 0, 0], np.int64)
    (owner,) = deal([np.zeros(5)], [sizes], Owners.empty([5, 5, 5]))
    assert sorted(owner[:3].tolist()) == [0, 1, 2]
    assert owner[3] == owner[4] == owner[2]


@pytest.mark.parametrize("loads", [np.zeros(4), np.full(4, 10.0)])
def test_what_does_not_fit_is_refused(loads):
    with pytest.raises(MemoryBudgetError, match="left over"):
        deal([loads], [np.full(4, 10, np.int64)], Owners.empty([15, 15, 9]))
