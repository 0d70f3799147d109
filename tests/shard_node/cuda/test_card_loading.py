"""Loading onto cards: each row goes where its place says, byte for byte, and what is taken is what was said before."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loader.errors import SnapshotCorruptError
from loader.progress import CalledOffError
from loader.snapshot.codecs import codec_for
from loader.snapshot.manifest import FeatureSpec, ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.row_source import rows_of
from loader.snapshot.tables import TableSpec
from loader.snapshot.writer import export_snapshot
from router.plan import Plan
from shard_node.cuda.card_engine import CardEngine
from shard_node.cuda.card_loading import UPLOAD_BYTES, CardTableLoad
from shard_node.cuda.card_set import CardMemory, CardOptions, CardSet
from shard_node.cuda.kernel_params import owners_of
from shard_node.cuda.places import Placer
from shard_node.engine.loading import load_tables
from shard_node.engine.memory import RowMemory
from shard_node.engine.reference import ReferenceEngine
from shard_node.errors import InvalidBagsError, MemoryBudgetError
from shard_node.node import LoadedTables
from shard_node.partition import Partition
from shardrank_testing.bags import assert_blocks_equal, random_table_bags
from shardrank_testing.card_plans import DTYPES
from shardrank_testing.deltas import assert_stored, delta_spec
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.kernel_arena import Pooled, Run, pool_bags
from shardrank_testing.snapshots import (
    DEFAULT_DENSE_MODEL,
    num_buckets,
    plain_buckets,
    random_tables,
    restate_file,
    write_snapshot,
)
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
    rows = tables.engine.memory()
    for card in range(3):
        in_rows = sum(use.size_bytes for use in rows if use.card == card and use.tier != "pinned")
        assert load.card_bytes[card] == load.plan.bytes(card).total + 4 * (32 + 8 * 5)
        assert in_rows == load.plan.bytes(card).total
    assert [use.size_bytes for use in rows if use.tier == "pinned"] == [load.pinned_bytes]
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


def hot_rows(tables: LoadedTables, name: str) -> list[int]:
    plan = tables.engine.plan
    places = Placer(plan).places(tables.engine.layout.index[name])
    return np.flatnonzero(owners_of(places, plan.num_cards) == plan.num_cards).tolist()


@pytest.mark.parametrize("in_snapshot", [False, True])
def test_rows_with_most_lookups_are_hot(tmp_path, in_snapshot):
    """Counts of the snapshot take precedence over observed ones."""
    counts = {"int8": counts_of(WANTED)}
    path = export_snapshot(
        tmp_path,
        SPEC,
        rows={name: rows_of(rows) for name, rows in random_tables(SPEC, 1).items()},
        dense={"weight": torch.zeros(1)},
        access_counts=counts if in_snapshot else None,
    )
    others = {"int8": counts_of(np.arange(6))}
    observed = others if in_snapshot else counts | {"int4": np.full(9, 7, np.uint32), "none": np.ones(5, np.uint32)}
    snapshot = Snapshot.open(path)
    tables = load(snapshot, CardSet(EmulatedCards(3), SIX_HOT_ROWS), observed=observed)
    assert hot_rows(tables, "int8") == WANTED.tolist()
    assert in_snapshot or sum(split.hot_rows for split in tables.engine.plan.splits) == WANTED.size
    assert_stored(tables.engine, snapshot)


def assert_nothing_held(
    card_set: CardSet, memory: RowMemory, before: list[int], refused: pytest.ExceptionInfo[Exception]
) -> None:
    """All is free again, even while the error is referenced, with every frame that it went through."""
    assert refused.tb is not None
    assert set(card_set.memory.held_bytes) == {0}
    assert memory.held_bytes == 0
    assert card_set.cards.free_bytes() == before


def test_loading_called_off_at_any_step_frees_all(snapshot):
    cards = EmulatedCards(2, deferred=True)
    card_set, memory = CardSet(cards, CardOptions(**MIXED)), RowMemory()
    before = cards.free_bytes()
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
        with pytest.raises(CalledOffError) as refused:
            load.run(load.take(memory), call_off)
        assert_nothing_held(card_set, memory, before, refused)


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
    before = cards.free_bytes()
    with pytest.raises(MemoryBudgetError, match="bytes wanted") as refused:
        load.run(claim)
    assert_nothing_held(card_set, memory, before, refused)
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
def test_damaged_rows_are_refused_by_file_and_row(tmp_path, options, damage: Callable, message):
    folder, _ = write_snapshot(tmp_path, SPEC, seed=1, rows_per_file=256)
    if damage is plant_nan:
        damage(folder)
    snapshot = Snapshot.open(folder)
    cards = EmulatedCards(2)
    card_set, memory = CardSet(cards, CardOptions(**options)), RowMemory()
    before = cards.free_bytes()
    load = prepare(snapshot, card_set)
    if damage is not plant_nan:
        damage(folder)
    with pytest.raises(SnapshotCorruptError, match=message) as refused:
        load.run(load.take(memory))
    assert_nothing_held(card_set, memory, before, refused)


def model_of(*tables: TableSpec) -> ModelSpec:
    features = tuple(FeatureSpec(name=one.feature_names[0], side="candidate") for one in tables)
    return ModelSpec(model="m", tables=tables, features=features, dense_model=DEFAULT_DENSE_MODEL)


def table_of(name: str, rows: int, **more) -> TableSpec:
    return TableSpec(name=name, num_embeddings=rows, embedding_dim=8, feature_names=(f"f.{name}",), **more)


def load_partition(snapshot: Snapshot, partition: Partition, options: CardOptions) -> CardEngine:
    card_set = CardSet(EmulatedCards(partition.num_cards), options)
    one = CardTableLoad(snapshot, partition, "", card_set, upload_bytes=1 << 14)
    engine = one.run(one.take(RowMemory())).engine
    assert isinstance(engine, CardEngine)
    return engine


def pool_rows(engine: CardEngine, card: int, table: int, rows: np.ndarray) -> Pooled:
    """Each row alone, asked of the kernel, past the checks that an engine makes before."""
    (arena,) = (one for one in engine._arenas if one.group.first_table <= table < one.group.end_table)
    run = Run(table - arena.group.first_table, [rows], "none")
    return pool_bags(engine.card_set.cards, card, arena.params[card], arena.format, [run])


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    return model_of(
        *(
            table_of(
                f"t{number}",
                draw(st.integers(1, 1500) | st.integers(4097, 9000)),
                dtype=draw(st.sampled_from(DTYPES)),
                bucketing=draw(st.sampled_from(["mixed", "hash", "range"])),
            )
            for number in range(draw(st.integers(1, 3)))
        )
    )


@given(spec=models(), data=st.data())
def test_rows_of_a_node_are_found_and_others_counted(spec, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    num_cards = data.draw(st.integers(1, 4))
    # Some of the buckets, all, or those of one card.
    first, last = data.draw(st.sampled_from([(-1, num_cards), (0, num_cards), (-1, 1), (0, 1), (-1, 0)]))
    rows_bytes = sum(48 * one.num_embeddings for one in spec.tables)
    options = CardOptions(
        card_memory_gb=(rows_bytes * data.draw(st.sampled_from([0.0, 0.2, 0.5, 3.0])) + (1 << 16)) / 1e9,
        hot_gb=data.draw(st.sampled_from([0.0, rows_bytes / 20e9, rows_bytes / 1e9, None])),
        pinned_memory_gb=1.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        snapshot = Snapshot.open(write_snapshot(Path(folder), spec, seed=1, rows_per_file=4096)[0])
        layout_tables = Plan.make(spec).layout.tables
        cards = tuple(rng.integers(first, last, num_buckets(one)).astype(np.int16) for one in layout_tables)
        engine = load_partition(snapshot, Partition(num_cards, cards), options)
        card = data.draw(st.integers(0, num_cards - 1))
        for number, table in enumerate(layout_tables):
            codec = codec_for(table.dtype, table.embedding_dim)
            every, rows = np.arange(table.num_embeddings), rng.permutation(table.num_embeddings)
            here = cards[number][plain_buckets(table)] >= 0
            written = codec.encode(rng.standard_normal((table.num_embeddings, 8)).astype(np.float32))
            for stored in (snapshot.read_rows(table.name, 0, table.num_embeddings), written):
                if stored is written:
                    assert engine.write_rows(number, every, stored) == here.sum()
                pooled = pool_rows(engine, card, number, rows)
                expected = np.where(here[:, None], codec.decode(stored), 0)
                np.testing.assert_allclose(pooled.out, expected[rows], rtol=1e-6, atol=1e-6)
                assert (pooled.outside, pooled.not_here) == (0, np.count_nonzero(~here))
        engine.close()
