"""Rows on cards: each is at its place, byte for byte; loading allocates what was planned; versions come and go."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.errors import SnapshotCorruptError
from loader.progress import CalledOffError
from loader.snapshot.codecs import RowCodec
from loader.snapshot.reader import Snapshot
from router.plan import Plan
from shard_node.access_counts import SAMPLE_EVERY
from shard_node.bags import TableLayout
from shard_node.buckets import NodeIdentity, Partition
from shard_node.cuda import card_rows as placer_module
from shard_node.cuda.card_loading import UPLOAD_BYTES, CardTableLoad
from shard_node.cuda.card_rows import Placer
from shard_node.cuda.card_set import CardMemory, CardOptions, CardSet
from shard_node.cuda.kernel_params import (
    MAX_CARDS,
    NOT_HERE,
    encode_places,
    max_slots,
    owners_of,
)
from shard_node.engine.loading import load_tables
from shard_node.engine.memory import RowMemory
from shard_node.errors import InvalidBagsError, MemoryBudgetError
from shard_node.node import LoadedTables, ShardNode
from shard_node.planning import card_plan
from shard_node.planning.card_plan import HOT, CardBudget, CardPlan
from shard_node.planning.hotness import Hotness
from shardrank_testing.agents import NodeUnderTest, running_node
from shardrank_testing.bags import assert_blocks_equal, bags_of, random_table_bags
from shardrank_testing.card_plans import models, one_table_layout, places_of, plan_inputs, slots_of, strides
from shardrank_testing.deltas import MODEL, assert_stored, delta_spec, load_version
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.kernel_arena import Run, load_partition, pool_bags
from shardrank_testing.reference import ReferenceEngine
from shardrank_testing.snapshots import num_buckets, plain_buckets, restate_file, write_snapshot
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
    loading = prepare(snapshot, card_set, **more)
    return loading.run(loading.take(RowMemory()))


@given(
    num_cards=st.integers(1, 8),
    card_bytes=st.integers(11_600, 40_000),
    pinned_bytes=st.integers(70_000, 80_000),
    hot_bytes=st.none() | st.integers(0, 20_000),
    upload_bytes=st.sampled_from([512, 1000, 4096, UPLOAD_BYTES]),
    deferred=st.booleans(),
)
def test_every_copy_of_every_row_is_at_its_place(
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


def test_loading_allocates_just_the_planned_bytes(snapshot):
    cards = EmulatedCards(3)
    card_set = CardSet(cards, CardOptions(**MIXED))
    load = prepare(snapshot, card_set)
    before = cards.free_bytes()
    claim = load.take(RowMemory())
    assert cards.free_bytes() == before
    assert card_set.memory.held_bytes == tuple(size + 2 * SMALL_UPLOAD_BYTES for size in load.card_bytes)
    planned = [size + 2 * SMALL_UPLOAD_BYTES for size in (*load.card_bytes, load.pinned_bytes)]
    steps = 0

    def check(phase: str, done: int, total: int) -> None:
        nonlocal steps
        if phase == "load" and done:  # at 0 there are no buffers yet
            steps += 1
            assert [was - now for was, now in zip(before, cards.free_bytes(), strict=True)] == planned

    tables = load.run(claim, check)
    assert steps > 10
    assert card_set.memory.held_bytes == load.card_bytes
    plan, expected = load.plan, []
    for card in range(3):
        assert load.card_bytes[card] == plan.bytes(card).total + 4 * (32 + 8 * 5)
        expected += [(card, "card", plan.bytes(card).card + plan.places_bytes), (card, "hot", plan.bytes(card).hot)]
    expected.append((0, "pinned", load.pinned_bytes))
    assert all(size for _, _, size in expected)
    assert [(use.card, use.tier, use.size_bytes) for use in tables.engine.memory()] == expected
    tables.close()
    assert card_set.memory.held_bytes == (0, 0, 0)
    assert cards.free_bytes() == before


def test_what_does_not_fit_is_refused_with_the_numbers(snapshot):
    cards = EmulatedCards(2, total_bytes=100_000, num_devices=1)
    card_set = CardSet(cards, CardOptions(card_memory_gb=60e-6), CardMemory(cards, reserve_bytes=0))
    load, memory = prepare(snapshot, card_set), RowMemory()
    size = sum(load.card_bytes)
    with pytest.raises(MemoryBudgetError, match=rf"rows take {size} bytes of device 0 \(cards 0, 1\), but 100000 are"):
        load.take(memory)
    assert (card_set.memory.held_bytes, memory.held_bytes) == ((0, 0), 0)
    card_set = CardSet(EmulatedCards(2), CardOptions(**MIXED))
    with pytest.raises(MemoryBudgetError, match=r"and pinned memory 5000: \d+ bytes of \d+ rows are left over"):
        prepare(snapshot, card_set, memory_budget_bytes=5000)
    load = prepare(snapshot, card_set)
    # Pinned rows are counted with the rows of CPU engines.
    with pytest.raises(MemoryBudgetError, match=f"rows take {load.pinned_bytes} bytes .* {load.pinned_bytes - 1} are"):
        load.take(RowMemory(cap_bytes=load.pinned_bytes - 1))
    assert card_set.memory.held_bytes == (0, 0)
    memory = RowMemory(cap_bytes=load.pinned_bytes)
    tables = load.run(load.take(memory))
    assert memory.held_bytes == load.pinned_bytes
    tables.close()
    assert memory.held_bytes == 0
    # All but 5,000 bytes of rows can be pinned, so a table has to be divided; its places are more than a card has.
    options = CardOptions(card_memory_gb=2.7e-6, pinned_memory_gb=63.5e-6, hot_gb=0)
    with pytest.raises(MemoryBudgetError, match="may take 2700 bytes, but places take"):
        prepare(snapshot, CardSet(EmulatedCards(2), options))
    plan = Plan.make(SPEC, cards_per_shard=2)
    with pytest.raises(InvalidBagsError, match=r"the partition is for 2 cards, but there are 3 \("):
        load_tables(snapshot, plan.partition(0), plan.digest, card_set=CardSet(EmulatedCards(3)))


def test_tables_at_one_owner_need_no_places(written):
    snapshot, tables = written
    # Room for every copy of every row: all tables are hot in full.
    loaded = load(snapshot, CardSet(EmulatedCards(2), CardOptions(card_memory_gb=1e-3)))
    engine = loaded.engine
    assert [places.only_owner for places in engine.plan.places] == [2] * len(engine.plan.places)
    # A kernel that read a place would read from address 0.
    assert [params.places for arena in engine._arenas for params in arena.params] == [0] * 2 * len(engine._arenas)
    bags = random_table_bags(np.random.default_rng(7), engine.layout, 60, 6)
    expected = ReferenceEngine(SPEC, decoded_tables(SPEC, tables)).pool(bags)
    assert_blocks_equal(engine.pool(bags), expected, scale=10.0)
    loaded.close()


WANTED = np.array([3, 77, 255, 256, 600, 699])
SIX_HOT_ROWS = CardOptions(card_memory_gb=60e-6, hot_gb=16 * WANTED.size / 1e9)


def counts_of(rows: np.ndarray) -> np.ndarray:
    counts = np.zeros(700, np.uint32)
    counts[rows] = 1000
    return counts


def hot_rows(plan: CardPlan, name: str) -> list[int]:
    places = places_of(plan, plan.layout.index[name])
    return np.flatnonzero(owners_of(places, plan.num_cards) == plan.num_cards).tolist()


@pytest.mark.parametrize("in_snapshot", [False, True])
def test_rows_with_most_lookups_are_hot(tmp_path, in_snapshot):
    """Counts of the snapshot take precedence over observed ones."""
    counts = {"int8": counts_of(WANTED)}
    path, _ = write_snapshot(tmp_path, SPEC, seed=1, access_counts=counts if in_snapshot else None)
    others = {"int8": counts_of(np.arange(6))}
    observed = others if in_snapshot else counts | {"int4": np.full(9, 7, np.uint32), "none": np.ones(5, np.uint32)}
    snapshot = Snapshot.open(path)
    tables = load(snapshot, CardSet(EmulatedCards(3), SIX_HOT_ROWS), observed=observed)
    assert hot_rows(tables.engine.plan, "int8") == WANTED.tolist()
    assert in_snapshot or tables.engine.plan.tier_rows[:, :, HOT].sum() == WANTED.size
    assert_stored(tables.engine, snapshot)


@contextlib.contextmanager
def refused_without_trace(card_set: CardSet, memory: RowMemory, error: type[Exception], match: str) -> Iterator[None]:
    """All is free again, even while the error is referenced, with every frame that it went through."""
    before = card_set.cards.free_bytes()
    with pytest.raises(error, match=match) as refused:
        yield
    assert refused.tb is not None
    assert set(card_set.memory.held_bytes) == {0}
    assert memory.held_bytes == 0
    assert card_set.cards.free_bytes() == before


def test_loading_called_off_at_any_step_frees_all(snapshot):
    card_set, memory = CardSet(EmulatedCards(2, deferred=True), CardOptions(**MIXED)), RowMemory()
    load = prepare(snapshot, card_set)
    steps: list[str] = []
    load.run(load.take(memory), lambda phase, done, total: steps.append(phase)).close()
    assert len(steps) > 10
    for last in range(0, len(steps), 3):
        left = iter(range(last))

        def call_off(phase: str, done: int, total: int, left: iter = left) -> None:
            if next(left, None) is None:
                raise CalledOffError("called off")

        load = prepare(snapshot, card_set)
        with refused_without_trace(card_set, memory, CalledOffError, "called off"):
            load.run(load.take(memory), call_off)


@pytest.mark.parametrize("options", [MIXED, {}], ids=["mixed", "cards"])
@pytest.mark.parametrize("tier", ["card", "pinned"])
def test_memory_that_was_allocated_meanwhile_is_an_error(snapshot, options, tier):
    cards = EmulatedCards(2, total_bytes=32 << 20, pinned_bytes=32 << 20)
    card_set, memory = CardSet(cards, CardOptions(**options)), RowMemory()
    load = prepare(snapshot, card_set)
    claim = load.take(memory)
    if tier == "card":
        taken = cards.cards[1].allocate(cards.cards[1].free_bytes() - 1000)
    else:
        taken = cards.allocate_pinned(cards.space.free_bytes(None) - 30_000)
    with refused_without_trace(card_set, memory, MemoryBudgetError, "bytes wanted"):
        load.run(claim)
    assert taken.size_bytes > 0


def lose_the_last_file(folder: Path) -> None:
    sorted((folder / "tables" / "int8").iterdir())[-1].unlink()


def plant_nan(folder: Path) -> None:
    path = sorted((folder / "tables" / "int8").iterdir())[2]
    content = bytearray(path.read_bytes())
    # Row 690 is at position 178 of 188 in the third file, which has rows 512 to 699.
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
def test_damaged_rows_are_refused_by_file_and_row(tmp_path, options, damage: Callable, message):
    folder, _ = write_snapshot(tmp_path, SPEC, seed=1, rows_per_file=256)
    if damage is plant_nan:
        damage(folder)
    snapshot = Snapshot.open(folder)
    card_set, memory = CardSet(EmulatedCards(2), CardOptions(**options)), RowMemory()
    load = prepare(snapshot, card_set)
    if damage is not plant_nan:
        damage(folder)
    with refused_without_trace(card_set, memory, SnapshotCorruptError, message):
        load.run(load.take(memory))


@given(spec=models(st.integers(1, 1500) | st.integers(4097, 9000), max_tables=3), data=st.data())
def test_rows_of_a_node_are_found_and_others_counted(spec, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    num_cards = data.draw(st.integers(1, 4))
    # Some of the buckets, all, or those of one card.
    first, last = data.draw(st.sampled_from([(-1, num_cards), (0, num_cards), (-1, 1), (0, 1), (-1, 0)]))
    layout = TableLayout.of(spec)
    num_rows = sum(table.num_embeddings for table in layout.tables)
    rows_bytes = sum(n * table.num_embeddings for n, table in zip(strides(layout), layout.tables, strict=True))
    options = CardOptions(
        # Places take 4 bytes of each card, and up to 32 KB for the buckets of a table.
        card_memory_gb=(rows_bytes * data.draw(st.sampled_from([0.0, 0.2, 0.5, 3.0])) + 4 * num_rows + 1e5) / 1e9,
        hot_gb=data.draw(st.sampled_from([0.0, rows_bytes / 20e9, rows_bytes / 1e9, None])),
        pinned_memory_gb=1.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        snapshot = Snapshot.open(write_snapshot(Path(folder), spec, seed=1, rows_per_file=4096)[0])
        cards = tuple(rng.integers(first, last, num_buckets(one)).astype(np.int16) for one in layout.tables)
        engine = load_partition(snapshot, Partition(num_cards, cards), EmulatedCards(num_cards), options)
        card = data.draw(st.integers(0, num_cards - 1))
        for number, table in enumerate(layout.tables):
            codec = RowCodec(table.dtype, table.embedding_dim)
            every, rows = np.arange(table.num_embeddings), rng.permutation(table.num_embeddings)
            here = cards[number][plain_buckets(table)] >= 0
            written = codec.encode(rng.standard_normal((table.num_embeddings, table.embedding_dim)).astype(np.float32))
            for stored in (snapshot.read_rows(table.name, 0, table.num_embeddings), written):
                if stored is written:
                    assert engine.write_rows(number, every, stored) == here.sum()
                # Each row alone, asked of the kernel, past the checks that an engine makes before.
                (arena,) = (one for one in engine._arenas if one.group.first_table <= number < one.group.end_table)
                run = Run(number - arena.group.first_table, [rows], "none")
                pooled = pool_bags(engine.card_set.cards, card, arena.params[card], arena.format, [run])
                expected = np.where(here[:, None], codec.decode(stored), 0)
                np.testing.assert_allclose(pooled.out, expected[rows], rtol=1e-6, atol=1e-6)
                assert (pooled.outside, pooled.not_here) == (0, np.count_nonzero(~here))
        engine.close()


TIMEOUT_S = 30.0


def test_a_retired_version_frees_all_its_memory(written, cards):
    snapshot, tables = written
    made = cards(3)
    card_set = CardSet(made, CardOptions(**MIXED))
    node = ShardNode(NodeIdentity(shard_index=0, num_shards=1, num_cards=3, sharding="hash"))
    bags = random_table_bags(np.random.default_rng(8), TableLayout.of(SPEC), 30, 5, weighted=True)
    expected = ReferenceEngine(SPEC, decoded_tables(SPEC, tables)).pool(bags)
    before = made.free_bytes() if isinstance(made, EmulatedCards) else None
    node.generations.stage(MODEL, 1, load_version(snapshot, card_set=card_set))
    one = card_set.memory.held_bytes
    node.generations.stage(MODEL, 2, load_version(snapshot, card_set=card_set))
    assert card_set.memory.held_bytes == tuple(2 * size for size in one)
    for version in (1, 2):
        assert_blocks_equal(node.pool(MODEL, version, bags), expected, scale=20.0)
    assert node.generations.retire(MODEL, 1).retired.wait(TIMEOUT_S)
    assert card_set.memory.held_bytes == one
    assert_blocks_equal(node.pool(MODEL, 2, bags), expected, scale=20.0)
    assert node.generations.retire(MODEL, 2).retired.wait(TIMEOUT_S)
    assert card_set.memory.held_bytes == (0, 0, 0)
    assert before is None or made.free_bytes() == before


@given(inputs=plan_inputs(), piece_rows=st.integers(1, 700))
def test_every_row_has_its_planned_owner_and_the_next_slot(inputs, piece_rows):
    plan = CardPlan.make(*inputs)
    placer = Placer(plan)
    for number, table in enumerate(plan.layout.tables):
        places = places_of(plan, number)
        assert (places.dtype, places.shape) == (np.uint32, (table.num_embeddings,))
        owners = owners_of(places, plan.num_cards)
        for owner in range(plan.num_cards + 2):
            slots = slots_of(places[owners == owner], plan.num_cards)
            assert slots.tolist() == list(range(plan.slots[number, owner]))
        card = plan.partition.card_of_bucket[number][plain_buckets(table)]
        np.testing.assert_array_equal(places == NOT_HERE, card < 0)
        on_card = owners < plan.num_cards
        np.testing.assert_array_equal(owners[on_card], card[on_card])
        hot, pinned = (owners == plan.num_cards).sum(), (owners == plan.num_cards + 1).sum()
        assert plan.tier_rows[number].sum(axis=0).tolist() == [hot, on_card.sum(), pinned]
        if (only := plan.places[number].only_owner) is not None:
            assert (owners == only).all()
            assert slots_of(places, plan.num_cards).tolist() == list(range(table.num_embeddings))
        pieces = list(placer.pieces(number, piece_rows))
        assert [first for first, _ in pieces] == list(range(0, table.num_embeddings, piece_rows))
        np.testing.assert_array_equal(np.concatenate([piece for _, piece in pieces]), places)


@pytest.mark.parametrize("num_cards", range(1, MAX_CARDS + 1))
def test_no_place_is_a_code(num_cards):
    owners = np.arange(num_cards + 2)
    places = encode_places(owners, np.full(owners.size, max_slots(num_cards) - 1, np.int64), num_cards)
    assert places.max() < NOT_HERE - 1  # which kernels use too
    np.testing.assert_array_equal(owners_of(places, num_cards), owners)
    assert set(slots_of(places, num_cards).tolist()) == {max_slots(num_cards) - 1}
    assert owners_of(np.array([NOT_HERE], np.uint32), num_cards).tolist() == [num_cards + 2]


def test_rows_beyond_the_slots_of_a_place_go_to_pinned_memory():
    rows = 2**30 + 5
    layout = one_table_layout(rows)
    partition = Partition(1, (np.zeros(4096, np.int16),))
    hotness = Hotness()
    with pytest.raises(MemoryBudgetError, match=r"6 rows are left over.* at most 1073741823 rows of one table"):
        CardPlan.make(layout, partition, CardBudget((2**40,), 0), hotness)
    plan = CardPlan.make(layout, partition, CardBudget((2**40,), 2**40), hotness)
    assert plan.tier_rows.sum(axis=1).tolist() == [[0, 2**30 - 1, 6]]


@given(inputs=plan_inputs(), limit=st.integers(300, 1500))
def test_no_owner_exceeds_the_slots_of_a_place(inputs, limit):
    layout, partition, budget, hotness = inputs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card_plan, "max_slots", lambda num_cards: limit)
        try:
            plan = CardPlan.make(layout, partition, budget, hotness)
        except MemoryBudgetError:  # more rows than cards and pinned memory have slots for
            return
    assert plan.slots.max() <= limit
    assert all(plan.bytes(card).total <= budget.card_bytes[card] for card in range(plan.num_cards))


def test_row_numbers_near_2_to_the_32_are_placed():
    # Only some rows are asked for. The last ones count as the first of their level, which are on cards.
    rows = 2**32 - 1
    layout = one_table_layout(rows, bucketing="mixed")
    # Every second row is on this node.
    buckets = np.arange(4096)
    partition = Partition(64, (np.where(buckets % 2, -1, buckets // 2 % 64).astype(np.int16),))
    budget = CardBudget((4 * 2**31 + 8 * 4096 + 16 * 2**25,) * 64, 2**40, 16 * 2**18)
    plan = CardPlan.make(layout, partition, budget, Hotness(zipf=1.05))
    card_rows = 64 * (2**25 - 2**18)
    # The only row that a table of 2^32 rows has more is on this node.
    assert plain_buckets(layout.tables[0], [rows])[0] % 2 == 0
    assert plan.tier_rows.sum(axis=1).tolist() == [[2**18, card_rows, 2**31 - 1 - 2**18 - card_rows]]
    walk = placer_module._Walk(plan, 0)
    for first, is_hot in ((0, True), (2**24, False), (rows - 1001, False)):
        places = walk.place(first, first + 1000)
        of_rows = plain_buckets(layout.tables[0], range(first, first + 1000))
        is_held = of_rows % 2 == 0
        assert (places[~is_held] == NOT_HERE).all()
        expected = 64 if is_hot else of_rows[is_held] // 2 % 64
        assert (owners_of(places[is_held], 64) == expected).all()


async def test_an_agent_places_a_version_by_the_lookups_before(tmp_path):
    """And reports its memory by tier."""
    hottest = [5, 300, 999]
    cards = EmulatedCards(2)
    card_set = CardSet(cards, CardOptions(card_memory_gb=24e-6, pinned_memory_gb=1e-3, hot_gb=3 * 32 / 1e9))
    before = cards.free_bytes()
    async with running_node(str(tmp_path / "registry"), tmp_path / "store", card_set) as under:
        for version in (1, 2, 3):
            await under.publish(version)
        await under.want("films", hold=(1,), live=1)
        await under.announced("films", 1, "ready")
        await under.want("films", hold=(1, 3))
        await under.announced("films", 3, "ready")
        assert hot_users(under, 3) != hottest  # no row was looked up by then
        bags = bags_of({under.node.generations.payload("films", 1).engine.layout.index["user"]: [3 * hottest]})
        for _ in range(SAMPLE_EVERY):
            under.node.pool("films", 1, bags)
        (looked_up,) = (one for one in under.node.info().lookups if one.rows)
        assert (looked_up.table, looked_up.tier, looked_up.rows) == ("user", "card", 9 * SAMPLE_EVERY)
        await under.want("films", hold=(1, 2))
        report = await under.announced("films", 2, "ready")
        assert hot_users(under, 2) == hottest
        memory = [use for use in under.node.info().memory if use.version == 2]
        tiers = {(card, tier) for card in range(2) for tier in ("card", "hot")} | {(0, "pinned")}
        assert {(use.card, use.tier) for use in memory} == tiers
        assert report.memory_bytes == sum(use.size_bytes for use in memory)
        await under.want("films", hold=(2,), live=2)
        await under.announced("films", 1, None)
    assert card_set.memory.held_bytes == (0, 0)
    assert cards.free_bytes() == before


def hot_users(under: NodeUnderTest, version: int) -> list[int]:
    with under.node.generations.lease("films", version) as lease:
        return hot_rows(lease.payload.engine.plan, "user")
