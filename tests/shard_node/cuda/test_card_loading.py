"""Loading onto cards: each row goes where its place says, byte for byte, and what is taken is what was said before."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loader.errors import SnapshotCorruptError
from loader.progress import CalledOffError
from loader.snapshot.reader import Snapshot
from loader.snapshot.row_source import rows_of
from loader.snapshot.writer import export_snapshot
from router.plan import Plan
from shard_node.cuda.card_loading import UPLOAD_BYTES, CardTableLoad
from shard_node.cuda.card_set import CardMemory, CardOptions, CardSet
from shard_node.cuda.kernel_params import owners_of
from shard_node.cuda.places import Placer
from shard_node.engine.loading import load_tables
from shard_node.engine.memory import RowMemory
from shard_node.engine.reference import ReferenceEngine
from shard_node.errors import InvalidBagsError, MemoryBudgetError
from shard_node.node import LoadedTables
from shardrank_testing.bags import assert_blocks_equal, random_table_bags
from shardrank_testing.deltas import assert_stored, delta_spec, stored_rows
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.snapshots import one_table_spec, random_tables, restate_file, write_snapshot
from shardrank_testing.topologies import decoded_tables

SPEC = delta_spec(rows=700)
SMALL_UPLOAD_BYTES = 2048
# Rows of SPEC take some 60 KB on cards, and their places 11 KB on each.
MIXED = {"card_memory_gb": 24e-6, "pinned_memory_gb": 70e-6, "hot_gb": 2e-6}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Snapshot, dict[str, np.ndarray]]:
    path, tables = write_snapshot(tmp_path_factory.mktemp("store"), SPEC, seed=1, rows_per_file=256)
    return Snapshot.open(path), tables


@pytest.fixture(scope="module")
def snapshot(written) -> Snapshot:
    return written[0]


def prepare(snapshot: Snapshot, card_set: CardSet, upload_bytes: int = SMALL_UPLOAD_BYTES, **more) -> CardTableLoad:
    plan = Plan.make(snapshot.spec, cards_per_shard=len(card_set.cards.cards), replicate_bytes=0)
    return CardTableLoad(snapshot, plan.partition(0), plan.digest, card_set, upload_bytes=upload_bytes, **more)


def load(snapshot: Snapshot, card_set: CardSet, **more) -> LoadedTables:
    one = prepare(snapshot, card_set, **more)
    return one.run(one.take(RowMemory()))


def free_bytes(cards: EmulatedCards) -> list[int]:
    """Of each card, and of pinned memory."""
    return [*(card.free_bytes() for card in cards.cards), cards.space.free_bytes(None)]


def tiers_of(tables: LoadedTables) -> set[str]:
    return {use.tier for use in tables.engine.memory()}


@given(
    num_cards=st.integers(1, 8),
    card_bytes=st.integers(11_600, 40_000),
    pinned_bytes=st.integers(70_000, 80_000),
    hot_bytes=st.none() | st.integers(0, 20_000),
    upload_bytes=st.sampled_from([512, 1000, 4096, UPLOAD_BYTES]),
    deferred=st.booleans(),
)
def test_every_copy_of_every_row_is_where_its_place_says(
    written, num_cards, card_bytes, pinned_bytes, hot_bytes, upload_bytes, deferred
):
    snapshot, tables = written
    options = CardOptions(
        card_memory_gb=card_bytes / 1e9,
        pinned_memory_gb=pinned_bytes / 1e9,
        hot_gb=None if hot_bytes is None else hot_bytes / 1e9,
    )
    loaded = load(snapshot, CardSet(EmulatedCards(num_cards, deferred=deferred), options), upload_bytes=upload_bytes)
    assert_stored(loaded.engine, snapshot)
    reference = ReferenceEngine(SPEC, decoded_tables(SPEC, tables))
    bags = random_table_bags(np.random.default_rng(card_bytes), reference.layout, 20, 6, weighted=True)
    assert_blocks_equal(loaded.engine.pool(bags), reference.pool(bags), scale=20.0)
    loaded.close()


def test_cards_of_any_kind_pool_what_was_loaded(written, cards):
    snapshot, tables = written
    reference = ReferenceEngine(SPEC, decoded_tables(SPEC, tables))
    for num_cards, options in itertools.product((1, 3), ({}, MIXED)):
        loaded = load(snapshot, CardSet(cards(num_cards), CardOptions(**options)))
        assert_stored(loaded.engine, snapshot)
        bags = random_table_bags(np.random.default_rng(2), reference.layout, 50, 5)
        assert_blocks_equal(loaded.engine.pool(bags), reference.pool(bags), scale=10.0)
        loaded.close()


def test_what_loading_takes_is_to_the_byte_what_it_said_before(snapshot):
    cards = EmulatedCards(3)
    card_set = CardSet(cards, CardOptions(**MIXED))
    one = prepare(snapshot, card_set)
    before = free_bytes(cards)
    claim = one.take(RowMemory())
    assert free_bytes(cards) == before
    assert card_set.memory.held_bytes == tuple(size + 2 * SMALL_UPLOAD_BYTES for size in one.card_bytes)
    taken = [size + 2 * SMALL_UPLOAD_BYTES for size in (*one.card_bytes, one.pinned_bytes)]
    steps = 0

    def look(what: str, done: int, total: int) -> None:
        nonlocal steps
        if what == "load":
            if done == 0:  # before there are buffers
                return
            steps += 1
            assert [was - now for was, now in zip(before, free_bytes(cards), strict=True)] == taken

    tables = one.run(claim, look)
    assert steps > 10
    assert card_set.memory.held_bytes == one.card_bytes
    rows = tables.engine.memory()
    for card in range(3):
        in_rows = sum(use.size_bytes for use in rows if use.card == card and use.tier != "pinned")
        assert one.card_bytes[card] == one.plan.bytes(card).total + 4 * (32 + 8 * 5)
        assert in_rows == one.plan.bytes(card).total
    assert [use.size_bytes for use in rows if use.tier == "pinned"] == [one.pinned_bytes]
    tables.close()
    assert card_set.memory.held_bytes == (0, 0, 0)
    assert free_bytes(cards) == before


def test_a_version_that_does_not_fit_is_refused_with_the_numbers_and_takes_nothing(snapshot):
    cards = EmulatedCards(2, total_bytes=100_000, num_devices=1)
    card_set = CardSet(cards, CardOptions(card_memory_gb=60e-6), CardMemory(cards, reserve_bytes=0))
    one = prepare(snapshot, card_set)
    memory = RowMemory()
    wanted = sum(one.card_bytes)
    assert wanted > 100_000
    with pytest.raises(
        MemoryBudgetError, match=rf"rows take {wanted} bytes of device 0 \(cards 0, 1\), but 100000 are free"
    ):
        one.take(memory)
    assert (card_set.memory.held_bytes, memory.held_bytes) == ((0, 0), 0)
    assert cards.cards[0].free_bytes() == 100_000


def test_pinned_rows_are_counted_with_the_rows_of_cpu_engines(snapshot):
    card_set = CardSet(EmulatedCards(2), CardOptions(**MIXED))
    one = prepare(snapshot, card_set)
    assert one.pinned_bytes > 0
    with pytest.raises(MemoryBudgetError, match=f"rows take {one.pinned_bytes} bytes .* {one.pinned_bytes - 1} are"):
        one.take(RowMemory(cap_bytes=one.pinned_bytes - 1))
    assert card_set.memory.held_bytes == (0, 0)
    memory = RowMemory(cap_bytes=one.pinned_bytes)
    tables = one.run(one.take(memory))
    assert memory.held_bytes == one.pinned_bytes
    tables.close()
    assert memory.held_bytes == 0


def test_a_memory_budget_bounds_what_is_pinned(snapshot):
    card_set = CardSet(EmulatedCards(2), CardOptions(**MIXED))
    needed = prepare(snapshot, card_set, memory_budget_bytes=10**9).pinned_bytes
    assert needed > 9900
    with pytest.raises(MemoryBudgetError, match=r"and pinned memory 5000: \d+ bytes of \d+ rows are left over"):
        prepare(snapshot, card_set, memory_budget_bytes=5000)


def test_without_peer_access_no_row_is_on_one_card_only(snapshot):
    card_set = CardSet(EmulatedCards(2, peer_access=False), CardOptions(card_memory_gb=30e-6))
    tables = load(snapshot, card_set)
    assert not tables.engine.plan.slots[:, :2].any()
    assert {"hot", "pinned"} <= tiers_of(tables)
    assert_stored(tables.engine, snapshot)


def test_a_card_that_can_not_even_hold_the_places_is_an_error_before_anything_is_taken(snapshot):
    # All but 5,000 bytes of rows can be pinned, so one table has to be divided; its places are more than a card has.
    options = CardOptions(card_memory_gb=2.7e-6, pinned_memory_gb=63.5e-6, hot_gb=0)
    with pytest.raises(MemoryBudgetError, match="may take 2700 bytes, but places take"):
        prepare(snapshot, CardSet(EmulatedCards(2), options))


def test_tables_that_lie_whole_at_one_owner_have_no_places_and_answer_all_the_same(written):
    snapshot, tables = written
    # Room for every copy of every row: all tables are hot in full.
    loaded = load(snapshot, CardSet(EmulatedCards(2), CardOptions(card_memory_gb=1e-3)))
    engine = loaded.engine
    assert [one.only_owner for one in engine.plan.places] == [2] * len(engine.plan.places)
    # A kernel that read a place would read from address 0.
    assert [params.places for arena in engine._arenas for params in arena.params] == [0] * 2 * len(engine._arenas)
    bags = random_table_bags(np.random.default_rng(7), engine.layout, 60, 6)
    expected = ReferenceEngine(SPEC, decoded_tables(SPEC, tables)).pool(bags)
    assert_blocks_equal(engine.pool(bags), expected, scale=10.0)
    loaded.close()


def test_a_plan_for_another_number_of_cards_is_refused(snapshot):
    plan = Plan.make(SPEC, cards_per_shard=2)
    with pytest.raises(InvalidBagsError, match=r"the partition is for 2 cards, but there are 3 \("):
        load_tables(snapshot, plan.partition(0), plan.digest, card_set=CardSet(EmulatedCards(3)))


@pytest.mark.parametrize("bucketing", ["hash", "range"])
def test_rows_of_another_node_are_on_no_card(tmp_path, bucketing):
    spec = one_table_spec(2000, 16, bucketing=bucketing)
    snapshot = Snapshot.open(write_snapshot(tmp_path, spec, seed=3, rows_per_file=512)[0])
    plan = Plan.make(spec, 3, bucketing, 2, 0)
    held = []
    for shard in range(3):
        card_set = CardSet(EmulatedCards(2), CardOptions(card_memory_gb=13e-6, pinned_memory_gb=1e-3, hot_gb=1e-6))
        one = CardTableLoad(snapshot, plan.partition(shard), plan.digest, card_set, upload_bytes=SMALL_UPLOAD_BYTES)
        tables = one.run(one.take(RowMemory()))
        assert tiers_of(tables) >= {"card", "hot", "pinned"}
        stored = stored_rows(tables.engine, "items")
        buckets = np.arange(2000) % 256 if bucketing == "hash" else np.arange(2000) >> 3
        here = plan.partition(shard).card_of_bucket[0][buckets] >= 0
        expected = np.where(here[:, None], snapshot.read_rows("items", 0, 2000), 0)
        np.testing.assert_array_equal(stored, expected)
        held.append(int(here.sum()))
    assert sum(held) == 2000


@pytest.mark.parametrize(("num_cards", "shard"), [(1, 1), (3, 1), (40, 0)])
def test_a_node_with_no_row_of_a_table_and_cards_with_no_bucket_are_loaded_too(tmp_path, num_cards, shard):
    spec = one_table_spec(5)
    snapshot = Snapshot.open(write_snapshot(tmp_path, spec, seed=3)[0])
    plan = Plan.make(spec, 2, "table", num_cards, 0)
    cards = EmulatedCards(num_cards)
    before = free_bytes(cards)
    tables = load_tables(snapshot, plan.partition(shard), plan.digest, card_set=CardSet(cards))
    expected = snapshot.read_rows("items", 0, 5) if shard == 0 else np.zeros((5, 16), np.uint8)
    np.testing.assert_array_equal(stored_rows(tables.engine, "items"), expected)
    tables.close()
    assert free_bytes(cards) == before


@pytest.mark.parametrize("observed", [False, True])
def test_progress_tells_every_byte_of_every_row_once(snapshot, observed):
    told: list[tuple[str, int, int]] = []
    counts = {"int8": np.arange(700, dtype=np.uint32)} if observed else None
    one = prepare(snapshot, CardSet(EmulatedCards(2), CardOptions(**MIXED)), observed=counts)
    one.run(one.take(RowMemory()), lambda *step: told.append(step))
    row_bytes = {"int8": 12, "int4": 7, "fp16": 16, "fp32": 40}
    total = sum(table.num_embeddings * row_bytes[table.name] for table in SPEC.tables)
    assert {what for what, _, _ in told} == {"load"}
    assert told[-1] == ("load", total, total)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


WANTED = np.array([3, 77, 255, 256, 600, 699])
SIX_HOT_ROWS = CardOptions(card_memory_gb=60e-6, hot_gb=16 * WANTED.size / 1e9)


def counts_of(rows: np.ndarray) -> np.ndarray:
    counts = np.zeros(700, np.uint32)
    counts[rows] = 1000
    return counts


def hot_rows(tables: LoadedTables, name: str) -> list[int]:
    plan = tables.engine.plan
    places = Placer(plan).places(tables.engine.layout.index[name])
    return np.flatnonzero(owners_of(places, plan.num_cards) == plan.num_cards).tolist()


def test_rows_that_were_seen_to_be_looked_up_are_hot(snapshot):
    observed = {"int8": counts_of(WANTED), "int4": np.full(9, 7, np.uint32), "none such": np.ones(5, np.uint32)}
    tables = load(snapshot, CardSet(EmulatedCards(3), SIX_HOT_ROWS), observed=observed)
    assert hot_rows(tables, "int8") == WANTED.tolist()
    assert sum(split.hot_rows for split in tables.engine.plan.splits) == WANTED.size
    assert_stored(tables.engine, snapshot)


def test_what_the_snapshot_says_of_its_rows_goes_before_what_was_seen(tmp_path):
    path = export_snapshot(
        tmp_path,
        SPEC,
        rows={name: rows_of(rows) for name, rows in random_tables(SPEC, 1).items()},
        dense={"weight": torch.zeros(1)},
        access_counts={"int8": counts_of(WANTED)},
    )
    snapshot = Snapshot.open(path)
    tables = load(snapshot, CardSet(EmulatedCards(3), SIX_HOT_ROWS), observed={"int8": counts_of(np.arange(6))})
    assert hot_rows(tables, "int8") == WANTED.tolist()
    assert_stored(tables.engine, snapshot)


def nothing_is_held(
    card_set: CardSet, memory: RowMemory, before: list[int], refused: pytest.ExceptionInfo[Exception]
) -> None:
    """All is free again, even while somebody holds the error, with every frame that it went through."""
    assert refused.tb is not None
    assert set(card_set.memory.held_bytes) == {0}
    assert memory.held_bytes == 0
    assert free_bytes(card_set.cards) == before


def test_whenever_loading_is_called_off_everything_is_given_back(snapshot):
    cards = EmulatedCards(2, deferred=True)
    card_set, memory = CardSet(cards, CardOptions(**MIXED)), RowMemory()
    before = free_bytes(cards)
    one = prepare(snapshot, card_set)
    steps: list[str] = []
    one.run(one.take(memory), lambda what, done, total: steps.append(what)).close()
    assert set(steps) == {"load"}
    assert len(steps) > 10
    for last in range(len(steps)):
        left = iter(range(last))

        def call_off(what: str, done: int, total: int, left: iter = left) -> None:
            if next(left, None) is None:
                raise CalledOffError("called off")

        one = prepare(snapshot, card_set)
        with pytest.raises(CalledOffError) as refused:
            one.run(one.take(memory), call_off)
        nothing_is_held(card_set, memory, before, refused)


def fill_the_device(cards: EmulatedCards) -> object:
    return cards.cards[1].allocate(cards.cards[1].free_bytes() - 1000)


def pin_all_memory(cards: EmulatedCards) -> object:
    return cards.allocate_pinned(cards.space.free_bytes(None) - 30_000)


@pytest.mark.parametrize(
    ("options", "take"),
    [(MIXED, fill_the_device), ({}, fill_the_device), (MIXED, pin_all_memory), ({}, pin_all_memory)],
)
def test_memory_that_somebody_else_took_meanwhile_is_an_error_that_leaves_nothing_behind(snapshot, options, take):
    cards = EmulatedCards(2, total_bytes=32 << 20, pinned_bytes=32 << 20)
    card_set, memory = CardSet(cards, CardOptions(**options)), RowMemory()
    one = prepare(snapshot, card_set)
    claim = one.take(memory)
    taken = take(cards)
    before = free_bytes(cards)
    with pytest.raises(MemoryBudgetError, match="bytes wanted") as refused:
        one.run(claim)
    nothing_is_held(card_set, memory, before, refused)
    assert taken.size_bytes > 0


def lose_the_last_file(folder: Path) -> None:
    sorted((folder / "tables" / "fp32").iterdir())[-1].unlink()


def plant_nan(folder: Path) -> None:
    path = sorted((folder / "tables" / "int8").iterdir())[2]
    content = bytearray(path.read_bytes())
    # Row 690 is the 1st of its bucket in the third file, which has rows 512 to 699: position 178 of 188.
    begin = len(content) - (188 - 178) * 12
    content[begin + 4 : begin + 8] = np.float32(np.nan).tobytes()
    path.write_bytes(content)
    restate_file(folder, str(path.relative_to(folder)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [(lose_the_last_file, "rows-00002"), (plant_nan, "table 'int8', row 690: decodes to NaN or inf")],
)
@pytest.mark.parametrize(
    "options",
    [{}, MIXED, {"card_memory_gb": 12e-6, "pinned_memory_gb": 70e-6}],
    ids=["cards", "mixed", "mostly pinned"],
)
def test_rows_that_can_not_be_served_are_refused_by_file_and_row(tmp_path, options, damage: Callable, message):
    folder, _ = write_snapshot(tmp_path, SPEC, seed=1, rows_per_file=256)
    if damage is plant_nan:
        damage(folder)
    snapshot = Snapshot.open(folder)
    cards = EmulatedCards(2)
    card_set, memory = CardSet(cards, CardOptions(**options)), RowMemory()
    before = free_bytes(cards)
    one = prepare(snapshot, card_set)
    if damage is not plant_nan:
        damage(folder)
    with pytest.raises(SnapshotCorruptError, match=message) as refused:
        one.run(one.take(memory))
    nothing_is_held(card_set, memory, before, refused)
