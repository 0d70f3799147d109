"""A plan says who owns which rows, and finds the owner of each value of a batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.snapshot.manifest import ModelSpec
from loader.snapshot.tables import TableSpec
from router.errors import PlanError
from router.plan import REPLICATED, BucketOwners, Plan, table_bytes
from shard_node.bags import Bags
from shard_node.buckets import NodeIdentity
from shardrank_testing import topologies
from shardrank_testing.bags import bags_of_random_rows
from shardrank_testing.snapshots import num_buckets, plain_bucket, plain_buckets, sharding_of


def spec_of(rows: list[int], bucketing: str = "mixed") -> ModelSpec:
    return topologies.spec_of(*((count, 8) for count in rows), bucketing=bucketing)


def rows_by_bucket(table: TableSpec) -> np.ndarray:
    return np.bincount(plain_buckets(table), minlength=num_buckets(table))


row_counts = st.lists(st.integers(1, 5000), min_size=1, max_size=5)


@given(
    row_counts,
    st.sampled_from(["mixed", "range"]),
    st.booleans(),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 8192),
)
def test_every_row_is_on_one_card_of_its_owner_or_on_every_shard(
    rows, bucketing, by_table, shards, cards, replicate_bytes
):
    spec = spec_of(rows, bucketing)
    plan = Plan.make(
        spec,
        num_shards=shards,
        sharding="table" if by_table else sharding_of(spec),
        cards_per_shard=cards,
        replicate_bytes=replicate_bytes,
    )
    partitions = [plan.partition(shard) for shard in range(shards)]
    for number, table in enumerate(plan.layout.tables):
        holds = np.stack([partition.card_of_bucket[number] >= 0 for partition in partitions])
        used = rows_by_bucket(table) > 0
        owner = plan.shard_of_bucket[number]
        if (owner == REPLICATED).all():
            assert shards > 1
            assert table_bytes(table) <= replicate_bytes
            assert holds[:, used].all()
        else:
            assert (holds.sum(axis=0)[used] == 1).all()
            assert (holds.argmax(axis=0)[used] == owner[used]).all()
        for partition in partitions:
            assert partition.num_cards == cards


def cards_of(plan: Plan, shard: int) -> list[int]:
    """The card of each table that is not divided, -1 where the shard has none of it."""
    partition = plan.partition(shard)
    assert all((cards == cards[0]).all() and cards.dtype == np.int16 for cards in partition.card_of_bucket)
    return [int(cards[0]) for cards in partition.card_of_bucket]


def test_undivided_tables_go_to_the_emptiest_owner_largest_first():
    spec = spec_of([100, 5000, 3000, 2900, 2500])
    plan = Plan.make(spec, num_shards=2, sharding="table", cards_per_shard=2, replicate_bytes=0)
    assert [owners.tolist() for owners in plan.shard_of_bucket] == [[shard] * 4096 for shard in (1, 0, 1, 1, 0)]
    assert [cards_of(plan, shard) for shard in range(2)] == [[-1, 0, -1, -1, 1], [1, -1, 0, 1, -1]]
    copied = Plan.make(spec, num_shards=2, cards_per_shard=2, replicate_bytes=1 << 30)
    assert [owners.tolist() for owners in copied.shard_of_bucket] == [[REPLICATED] * 4096] * 5
    assert [cards_of(copied, shard) for shard in range(2)] == [[1, 0, 1, 1, 0]] * 2
    # What goes elsewhere takes no card's room.
    mixed = Plan.make(spec, num_shards=2, sharding="table", cards_per_shard=2, replicate_bytes=2600 * 16)
    assert [owners[0] for owners in mixed.shard_of_bucket] == [REPLICATED, 0, 1, 1, REPLICATED]
    assert [cards_of(mixed, shard) for shard in range(2)] == [[1, 0, -1, -1, 1], [0, -1, 0, 1, 1]]


def test_small_tables_are_replicated_up_to_the_limit():
    """Not where there is one shard only."""
    spec = spec_of([65_536, 65_537])
    assert [table_bytes(table) for table in spec.tables] == [1 << 20, (1 << 20) + 16]
    for plan in (Plan.make(spec, 2), Plan.make(spec, 2, "hash", 1, 1 << 20)):
        assert (plan.shard_of_bucket[0] == REPLICATED).all()
        assert (plan.shard_of_bucket[1] >= 0).all()
    assert {owners.dtype for owners in plan.shard_of_bucket} == {np.dtype(np.int16)}
    default = Plan.make(spec)
    assert [owners.tolist() for owners in default.shard_of_bucket] == [[0] * 4096] * 2
    assert (default.num_shards, default.cards_per_shard, default.sharding) == (1, 1, "hash")


@pytest.mark.parametrize("bucketing", ["mixed", "range"])
def test_divided_tables_have_these_owners(bucketing):
    spec = spec_of([1 << 20], bucketing)
    plan = Plan.make(spec, num_shards=4, sharding=sharding_of(spec), cards_per_shard=2, replicate_bytes=0)
    buckets = np.arange(num_buckets(spec.tables[0]))
    if bucketing == "mixed":
        # Neighbouring buckets are on different shards, and neighbouring ones of a shard on different cards.
        shards, cards = buckets % 4, buckets // 4 % 2
    else:
        shards, cards = buckets // 64, buckets // 32 % 2
    assert plan.shard_of_bucket[0].dtype == np.int16
    assert plan.shard_of_bucket[0].tolist() == shards.tolist()
    for shard in range(4):
        (card_of_bucket,) = plan.partition(shard).card_of_bucket
        assert card_of_bucket.dtype == np.int16
        assert card_of_bucket.tolist() == np.where(shards == shard, cards, -1).tolist()


def test_buckets_without_rows_belong_to_the_last_owner():
    spec = spec_of([6], "range")
    plan = Plan.make(spec, num_shards=2, sharding="range", cards_per_shard=2, replicate_bytes=0)
    assert plan.shard_of_bucket[0].tolist() == [0, 0, 0] + [1] * 253
    cards = [plan.partition(shard).card_of_bucket[0].tolist() for shard in range(2)]
    assert cards == [[0, 0, 1] + [-1] * 253, [-1] * 3 + [0, 0, 1] + [1] * 250]


def test_the_digest_depends_on_owners_and_not_on_cards():
    spec = spec_of([5000, 3000])
    plan = Plan.make(spec, num_shards=2, replicate_bytes=0)
    assert plan.digest == Plan.make(spec, num_shards=2, cards_per_shard=4, replicate_bytes=0).digest
    assert plan.identity(1) == NodeIdentity(shard_index=1, num_shards=2, num_cards=1, sharding="hash")
    others = [
        Plan.make(spec, num_shards=3, replicate_bytes=0),
        Plan.make(spec, num_shards=2, sharding="table", replicate_bytes=0),
        Plan.make(spec, num_shards=2, replicate_bytes=1 << 30),
        Plan.make(spec_of([5000, 3001]), num_shards=2, replicate_bytes=0),
        Plan.make(spec_of([5000, 3000], "range"), num_shards=2, sharding="range", replicate_bytes=0),
    ]
    assert len({plan.digest, *(other.digest for other in others)}) == 6
    # Nodes and routers of other releases must agree on it.
    assert plan.digest == "bccc8a2c5346dd241f42b0b4fc99fd3fab2a11c922113bb25e730c5547d24de3"


@pytest.mark.parametrize(
    ("bucketing", "sharding", "message"),
    [
        ("mixed", "range", "'range', but table 't0' is stored with 'mixed'; use sharding 'hash'"),
        ("range", "hash", "'mixed', but table 't0' is stored with 'range'; use sharding 'range'"),
    ],
)
def test_a_bucketing_that_can_not_be_divided_is_refused(bucketing, sharding, message):
    """It may be of any kind where a table is on one shard, or on all."""
    spec = spec_of([5000], bucketing)
    refusal = f"^sharding '{sharding}' needs tables stored with bucketing {message} or 'table', or re-export it$"
    with pytest.raises(PlanError, match=refusal):
        Plan.make(spec, num_shards=2, sharding=sharding, replicate_bytes=0)
    assert (Plan.make(spec, num_shards=1, sharding=sharding, replicate_bytes=0).shard_of_bucket[0] == 0).all()
    assert (Plan.make(spec, num_shards=2, sharding=sharding).shard_of_bucket[0] == REPLICATED).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda spec: Plan.make(spec, num_shards=0), r"num_shards is 0, allowed is 1\.\.1024"),
        (lambda spec: Plan.make(spec, num_shards=1025), r"num_shards is 1025, allowed is 1\.\.1024"),
        (lambda spec: Plan.make(spec, cards_per_shard=0), r"cards_per_shard is 0, allowed is 1\.\.64"),
        (lambda spec: Plan.make(spec, cards_per_shard=65), r"cards_per_shard is 65, allowed is 1\.\.64"),
        (lambda spec: Plan.make(spec, 2).partition(2), r"shard_index is 2, allowed is 0\.\.1"),
        (lambda spec: Plan.make(spec, 2).partition(-1), r"shard_index is -1, allowed is 0\.\.1"),
        (lambda spec: Plan.make(spec, 2).identity(2), r"shard_index is 2, allowed is 0\.\.1"),
    ],
)
def test_numbers_out_of_range_are_refused(make, message):
    with pytest.raises(PlanError, match=f"^{message}$"):
        make(spec_of([10]))


def bags_of(plan: Plan, rng: np.random.Generator, keys: list[int]) -> Bags:
    counts = rng.integers(0, 40, len(keys))
    num_rows = [plan.layout.tables[key].num_embeddings for key in keys]
    return bags_of_random_rows(rng, np.array(keys, np.int32), counts, np.ones(int(counts.sum()), np.int64), num_rows)


def expected_owners(plan: Plan, bags: Bags, up: list[int], turn: int) -> list[int]:
    owners, starts = [], bags.value_starts().tolist()
    for segment, key in enumerate(bags.keys.tolist()):
        table = plan.layout.tables[key]
        for row in bags.values[starts[segment] : starts[segment + 1]].tolist():
            owner = int(plan.shard_of_bucket[key][plain_bucket(table, row)])
            owners.append(up[(key + turn) % len(up)] if owner == REPLICATED else owner)
    return owners


@given(
    sizes=st.lists(st.sampled_from([3, 255, 256, 1000, 70_000, 1 << 20]), min_size=1, max_size=4),
    bucketing=st.sampled_from(["mixed", "range"]),
    by_table=st.booleans(),
    shards=st.sampled_from([2, 3, 4, 5, 7, 255, 256, 257, 1000]),
    replicate_bytes=st.sampled_from([0, 4096, 1 << 30]),
    turn=st.integers(0, 2**70),
    seed=st.integers(0, 2**32),
)
def test_every_value_has_the_owner_of_its_bucket(sizes, bucketing, by_table, shards, replicate_bytes, turn, seed):
    spec = spec_of(sizes, bucketing)
    plan = Plan.make(spec, shards, "table" if by_table else sharding_of(spec), replicate_bytes=replicate_bytes)
    rng = np.random.default_rng(seed)
    up = sorted(rng.choice(shards, rng.integers(1, shards + 1), replace=False).tolist())
    bags = bags_of(plan, rng, [key for key in range(len(sizes)) if rng.random() < 0.8])
    owners = BucketOwners(plan).of(bags, lambda: np.array(up, np.int16), turn)
    assert owners.dtype == (np.uint8 if shards <= 255 else np.uint16)
    assert owners.tolist() == expected_owners(plan, bags, up, turn)


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_shards_that_are_up_matter_only_to_replicated_tables(shards):
    plan = Plan.make(spec_of([100_000, 100_000]), shards, replicate_bytes=0)
    bags = bags_of(plan, np.random.default_rng(1), [0, 1])

    def nobody():
        raise AssertionError("called")

    assert BucketOwners(plan).of(bags, nobody, 0).tolist() == expected_owners(plan, bags, [0], 0)
