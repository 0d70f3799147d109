"""The kernel that changes rows: `write_rows`."""

from __future__ import annotations

import numpy as np
import pytest

from shardrank_testing.card_sets import CardFactory, card_factory
from shardrank_testing.kernel_arena import NOWHERE, KernelArena, Run, fetch

DTYPES = ["int8", "int4", "fp16", "fp32"]


@pytest.fixture(params=["emulated", pytest.param("logical", marks=pytest.mark.gpu)])
def cards(request) -> CardFactory:
    return card_factory(request.param)


def contents(arena: KernelArena) -> list[np.ndarray]:
    """All rows of all owners: of each card its own and its copies of hot ones; then the pinned ones."""
    fetched = [
        fetch(arena.cards, card, memory[card.number]) for card in arena.cards.cards for memory in (arena.own, arena.hot)
    ]
    return [*fetched, arena.pinned.array.copy()]


def with_rows(arena: KernelArena, before: np.ndarray, owner: int, table: int, rows: np.ndarray, relaid: np.ndarray):
    """What an owner's bytes have to be after rows were written."""
    after = before.copy()
    for row, content in zip(rows.tolist(), relaid, strict=True):
        if row < arena.owners[table].size and arena.owners[table][row] == owner:
            at = int(arena.starts[table, owner]) + int(arena.slots[table][row]) * arena.format.stride
            after[at : at + arena.format.stride] = content
    return after


@pytest.mark.parametrize("writes_host", [False, True])
@pytest.mark.parametrize(("dtype", "dim"), [("int8", 64), ("int8", 5), ("int4", 36), ("fp16", 100), ("fp32", 1)])
def test_a_card_writes_its_rows_and_hot_copies(cards, dtype, dim, writes_host):
    rng = np.random.default_rng(dim)
    made = cards(3)
    owners = [rng.integers(-2, 5, count) for count in (3, 90, 40)]
    tables = [rng.standard_normal((one.size, dim)).astype(np.float32) for one in owners]
    arena = KernelArena(made, dtype, tables, owners)
    rows = rng.permutation(90)[:70]
    relaid = rng.integers(0, 256, (rows.size, arena.format.stride)).astype(np.uint8)
    before = contents(arena)
    arena.write(1, 1, rows, relaid, writes_host)
    expected = list(before)
    expected[2] = with_rows(arena, before[2], 1, 1, rows, relaid)
    expected[3] = with_rows(arena, before[3], 3, 1, rows, relaid)
    if writes_host:
        expected[6] = with_rows(arena, before[6], 4, 1, rows, relaid)
    for actual, wanted in zip(contents(arena), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_written_rows_pool_like_loaded_ones(cards, dtype):
    rng = np.random.default_rng(4)
    made = cards(4)
    owners = [rng.integers(0, 6, count) for count in (50, 200)]
    old, new = ([rng.standard_normal((one.size, 20)).astype(np.float32) for one in owners] for _ in range(2))
    arena, fresh = KernelArena(made, dtype, old, owners), KernelArena(made, dtype, new, owners)
    for table, one in enumerate(owners):
        for card in range(4):
            arena.write(card, table, np.arange(one.size), arena.format.relay(fresh.stored[table]), card == 2)
    for written, exported in zip(contents(arena), contents(fresh), strict=True):
        np.testing.assert_array_equal(written, exported)
    runs = [Run(table, [rng.integers(0, one.size, 9) for _ in range(5)]) for table, one in enumerate(owners)]
    np.testing.assert_array_equal(arena.pool(3, runs).raw, fresh.pool(3, runs).raw)


def test_rows_not_here_or_outside_are_not_written(cards):
    arena = KernelArena(cards(1), "fp32", [np.ones((4, 8), np.float32)], [np.array([NOWHERE, 0, NOWHERE, 1])])
    before = contents(arena)
    rows = np.array([0, 2, 4, 5, 2**31, 2**32 - 1])
    arena.write(0, 0, rows, np.full((rows.size, 32), 7, np.uint8), True)
    for actual, wanted in zip(contents(arena), before, strict=True):
        np.testing.assert_array_equal(actual, wanted)
