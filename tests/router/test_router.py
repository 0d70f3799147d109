"""The router gives what a reference gives, and tells where the time went."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.tables import HashMapping, IdentityMapping, TableSpec, VocabularyMapping
from router.errors import PlanError, ShardUnavailableError
from router.feature_schema import FeatureSchema
from router.id_mapping import IdMapper, MappedBags, hashed_rows
from router.router import Router
from shard_node.answer import Forms
from shard_node.bags import Float32Array, KeyedBags
from shard_node.node import LocalShard, ShardNode
from shardrank_testing.snapshots import make_spec, write_snapshot
from shardrank_testing.topologies import (
    Topology,
    decoded_tables,
    expected_feature,
    local_router,
    lookup,
    make_node,
    remote_router,
)

TOPOLOGIES = {
    "1x1": Topology(),
    "1x3": Topology(cards=3),
    "2x2": Topology(shards=2, cards=2),
    "3x1": Topology(shards=3),
    "2x2 small tables replicated": Topology(shards=2, cards=2, replicate_bytes=4096),
    "3x2 all replicated": Topology(shards=3, cards=2, replicate_bytes=1 << 30),
    "table 2x2": Topology(shards=2, cards=2, sharding="table"),
    "mapped 1x1": Topology(memory_budget_bytes=0),
    "mapped 2x2": Topology(shards=2, cards=2, memory_budget_bytes=0),
    "partly mapped 2x1": Topology(shards=2, memory_budget_bytes=8000),
}
DTYPES = ["int8", "int4", "fp16", "fp32"]


class Stored:
    """A snapshot with every pooling, and what its features must answer."""

    def __init__(self, folder: Path, bucketing: str, dtype: str | None) -> None:
        self.spec = make_spec(bucketing=bucketing, dtype=dtype)
        path, tables = write_snapshot(folder, self.spec, seed=3, rows_per_file=256)
        self.snapshot = Snapshot.open(path)
        self.tables = decoded_tables(self.spec, tables)
        self.schema = FeatureSchema.of(self.spec)

    def check(self, router: Router, bags: KeyedBags, embeddings) -> None:
        assert len(embeddings.rejected) == 0
        starts = bags.bag_starts()
        for segment, key in enumerate(bags.keys.tolist()):
            name = self.schema.features[key].name
            edges = bags.offsets[starts[segment] : starts[segment + 1] + 1].tolist()
            rows = [bags.values[a:b].tolist() for a, b in itertools.pairwise(edges)]
            weights = None
            if bags.weights is not None:
                weights = [bags.weights[a:b].tolist() for a, b in itertools.pairwise(edges)]
            expected = expected_feature(self.spec, self.tables, name, rows, weights)
            actual = embeddings.feature(key)
            # A sum's rounding grows with its terms; a mean's and a single row's do not.
            scale = 3.0 * (max([1, *map(len, rows)]) if self.spec.pooling_of(name) == "sum" else 1)
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * scale, err_msg=name)
            assert embeddings.lengths(key).tolist() == [len(bag) for bag in rows]


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> dict[tuple[str, str | None], Stored]:
    kinds = [("hash", None), ("range", None), *(("hash", dtype) for dtype in DTYPES)]
    return {kind: Stored(tmp_path_factory.mktemp("store"), *kind) for kind in kinds}


def random_bags(stored: Stored, rng: np.random.Generator, max_bags: int, max_hotness: int) -> KeyedBags:
    """Raw ids (here: rows) for all features; weights are 1 where a feature is not weighted."""
    schema = stored.schema
    count = len(schema.features)
    bags_per_key = rng.integers(0, max_bags + 1, count).astype(np.int64)
    lengths = rng.integers(0, max_hotness + 1, int(bags_per_key.sum()))
    lengths[rng.random(lengths.size) < 0.2] = 0
    bags = KeyedBags.from_lengths(
        np.arange(count, dtype=np.int32), bags_per_key, lengths, np.zeros(int(lengths.sum()), np.int64)
    )
    limits = [stored.spec.table_of(feature.name).num_embeddings for feature in schema.features]
    values = (rng.random(bags.num_values) * np.repeat(limits, bags.values_per_key())).astype(np.int64)
    weighted = np.repeat([feature.weighted for feature in schema.features], bags.values_per_key())
    weights = np.where(weighted, rng.normal(size=values.size), 1.0).astype(np.float32)
    return KeyedBags(bags.keys, bags.bags_per_key, bags.offsets, values, weights)


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES.keys())
@pytest.mark.parametrize("bucketing", ["hash", "range"])
@pytest.mark.parametrize(("max_bags", "max_hotness"), [(1, 1), (7, 5), (3, 1000), (0, 0), (2048, 1)])
def test_any_topology_gives_the_references_answer(stores, topology, bucketing, max_bags, max_hotness):
    stored = stores[bucketing, None]
    router = local_router(stored.snapshot, topology)
    bags = random_bags(stored, np.random.default_rng(max_bags + max_hotness), max_bags, max_hotness)
    stored.check(router, bags, asyncio.run(lookup(router, stored.snapshot, bags)))


@pytest.mark.parametrize("topology", [Topology(), Topology(shards=2, cards=2)], ids=["1x1", "2x2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_gives_the_references_answer(stores, topology, dtype):
    stored = stores["hash", dtype]
    router = local_router(stored.snapshot, topology)
    for seed in range(5):
        bags = random_bags(stored, np.random.default_rng(seed), 6, 6)
        stored.check(router, bags, asyncio.run(lookup(router, stored.snapshot, bags)))


REMOTE = {
    "1x1": Topology(),
    "2x2": Topology(shards=2, cards=2),
    "3x1 with two replicas": Topology(shards=3, replicate_bytes=4096, replicas=2),
    "partly mapped 2x1": Topology(shards=2, memory_budget_bytes=8000),
}


@pytest.mark.parametrize("topology", REMOTE.values(), ids=REMOTE.keys())
def test_shards_behind_sockets_give_the_references_answer_and_one_of_them_the_same_bits_as_in_process(
    stores, tmp_path, topology
):
    stored = stores["hash", None]
    local = local_router(stored.snapshot, topology)

    async def run() -> None:
        async with remote_router(stored.snapshot, topology, tmp_path) as router:
            for seed in range(4):
                bags = random_bags(stored, np.random.default_rng(seed), 9, 9)
                remote = await lookup(router, stored.snapshot, bags)
                stored.check(router, bags, remote)
                if topology.shards == 1:
                    for ours, theirs in zip(
                        remote.blocks, (await lookup(local, stored.snapshot, bags)).blocks, strict=True
                    ):
                        np.testing.assert_array_equal(ours, theirs)

    asyncio.run(run())


@pytest.mark.parametrize("forms", [Forms(), Forms(float16=True), Forms(stored=True), Forms(stored=True, float16=True)])
def test_shards_answer_in_the_forms_that_a_lookup_takes_and_their_bytes_are_counted(stores, tmp_path, forms):
    stored = stores["hash", None]

    async def run() -> None:
        async with remote_router(stored.snapshot, Topology(shards=2, cards=2), tmp_path) as router:
            for seed, max_hotness in enumerate((1, 2, 9, 9)):
                bags = random_bags(stored, np.random.default_rng(seed), 9, max_hotness)
                exact = await lookup(router, stored.snapshot, bags, forms=Forms())
                embeddings = await lookup(router, stored.snapshot, bags, forms=forms)
                asked, rows, float16, float32 = embeddings.times.wire_bytes()
                assert asked > 0
                assert rows == 0 or forms.stored
                assert rows > 0 or not forms.stored or max_hotness == 9
                assert float16 == 0 or forms.float16
                assert float32 == 0 or not forms.float16
                assert (float16 + float32 > 0) == (max_hotness > 1 or not forms.stored)
                for ours, theirs in zip(embeddings.blocks, exact.blocks, strict=True):
                    # Each of two shards' sums, of at most 9 rows of numbers below 8, to half of its last of 11 bits.
                    np.testing.assert_allclose(ours, theirs, atol=2 * 72 * 2**-11 if forms.float16 else 1e-4)

    asyncio.run(run())


@pytest.mark.parametrize("topology", REMOTE.values(), ids=REMOTE.keys())
@pytest.mark.parametrize("hotness", [1, 2])
def test_rows_that_travel_as_stored_give_the_same_bits_wherever_they_lie(stores, tmp_path, topology, hotness):
    stored = stores["hash", "int4"]
    one_node = local_router(stored.snapshot, Topology())
    # Two int4 rows of 16 numbers take less than a float16 sum; of the narrower tables one does.
    features = ("user", "film", "history") if hotness == 2 else stored.schema.index
    keys = np.array(sorted(stored.schema.index[name] for name in features), np.int32)
    num_bags = 40 * keys.size
    rng = np.random.default_rng(hotness)
    bags = KeyedBags.from_lengths(
        keys,
        np.full(keys.size, 40),
        np.full(num_bags, hotness),
        rng.integers(0, 19, num_bags * hotness),
        rng.normal(size=num_bags * hotness).astype(np.float32),
    )

    async def run() -> None:
        async with remote_router(stored.snapshot, topology, tmp_path) as router:
            remote = await lookup(router, stored.snapshot, bags)
        assert remote.times.stored_bytes > 0
        assert remote.times.float16_bytes == remote.times.float32_bytes == 0
        for ours, theirs in zip(remote.blocks, (await lookup(one_node, stored.snapshot, bags)).blocks, strict=True):
            assert ours.tobytes() == theirs.tobytes()

    asyncio.run(run())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shards=st.integers(1, 4),
    cards=st.integers(1, 3),
    sharding=st.sampled_from([None, "table"]),
    replicate_bytes=st.sampled_from([0, 5000, 20000]),
    budget=st.sampled_from([None, 0, 9000]),
    seed=st.integers(0, 2**32),
)
def test_drawn_topologies_give_the_references_answer(stores, shards, cards, sharding, replicate_bytes, budget, seed):
    stored = stores["hash", None]
    router = local_router(stored.snapshot, Topology(shards, cards, sharding, budget, replicate_bytes))
    rng = np.random.default_rng(seed)
    bags = random_bags(stored, rng, int(rng.integers(1, 5)), int(rng.integers(0, 5)))
    stored.check(router, bags, asyncio.run(lookup(router, stored.snapshot, bags)))


def test_some_of_the_features_can_be_asked_for(stores):
    stored = stores["hash", None]
    router = local_router(stored.snapshot, Topology(shards=2))
    index = stored.schema.index
    keys = np.array(sorted([index["genre"], index["history"]]), np.int32)
    bags = KeyedBags.from_lengths(
        keys, np.array([2, 2], np.int64), np.array([1, 2, 0, 3]), np.arange(6, dtype=np.int64)
    )
    embeddings = asyncio.run(lookup(router, stored.snapshot, bags))
    stored.check(router, bags, embeddings)
    with pytest.raises(KeyError, match="user"):
        embeddings.feature(index["user"])


def test_rejected_ids_are_told_and_other_bags_are_right(stores):
    stored = stores["hash", None]
    router = local_router(stored.snapshot, Topology(shards=2))
    film = stored.schema.index["film"]
    bags = KeyedBags.from_lengths(
        np.array([film], np.int32), np.array([3], np.int64), np.array([1, 1, 1]), np.array([5, 777, 6], np.int64)
    )
    embeddings = asyncio.run(lookup(router, stored.snapshot, bags))
    rejected = embeddings.rejected
    assert (rejected.feature.tolist(), rejected.bag.tolist(), rejected.id.tolist()) == ([film], [1], [777])
    expected = expected_feature(stored.spec, stored.tables, "film", [[5], [6]], None)
    np.testing.assert_allclose(embeddings.feature(film)[[0, 2]], expected, rtol=1e-5)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["identity", "vocabulary", "hash"]),
            st.sampled_from(["default_row", "skip", "reject"]),
            st.sampled_from(["sum", "mean", "none"]),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 3),
    st.integers(0, 2**32),
)
def test_unknown_ids_get_what_their_table_says_under_every_pooling(kinds, shards, seed):
    """Features of one dim share a group; each has its own table, mapping, policy, pooling and weights."""
    rng = np.random.default_rng(seed)
    case = UnknownIds(kinds, rng)
    with tempfile.TemporaryDirectory() as folder:
        path, tables = write_snapshot(Path(folder), case.spec, seed=1, vocabularies=case.vocabularies)
        snapshot = Snapshot.open(path)
        router = local_router(snapshot, Topology(shards=shards))
        embeddings = asyncio.run(lookup(router, snapshot, case.bags))
    rejected = set(zip(embeddings.rejected.feature.tolist(), embeddings.rejected.bag.tolist(), strict=True))
    assert rejected == case.rejected
    for key in case.bags.keys.tolist():
        rows, weights = case.rows[key], case.weights[key]
        name = router.schema.features[key].name
        assert embeddings.lengths(key).tolist() == [len(bag) for bag in rows]
        expected = expected_feature(case.spec, decoded_tables(case.spec, tables), name, rows, weights)
        used = [(key, bag) not in rejected for bag in range(len(rows))]
        if case.spec.pooling_of(name) == "none":
            used = np.repeat(used, [len(bag) for bag in rows])
        np.testing.assert_allclose(embeddings.feature(key)[used], expected[used], rtol=1e-5, atol=1e-4)


class UnknownIds:
    """A drawn model and a batch of which a third of the ids are unknown, with the rows that they must become."""

    def __init__(self, kinds: list[tuple[str, str, str, bool]], rng: np.random.Generator) -> None:
        mappings = {"identity": IdentityMapping(), "vocabulary": VocabularyMapping(), "hash": HashMapping(seed=3)}
        tables, features = [], []
        for number, (mapping, unknown_id, pooling, weighted) in enumerate(kinds):
            name = f"f{number}"
            tables.append(
                TableSpec(
                    name=f"t{number}",
                    num_embeddings=40,
                    embedding_dim=4,
                    feature_names=(name,),
                    pooling=pooling,
                    dtype="fp32",
                    id_mapping=mappings[mapping],
                    unknown_id=unknown_id,
                    default_row=7,
                )
            )
            features.append(FeatureSpec(name=name, side="candidate", weighted=weighted and pooling == "sum"))
        model = DenseModelSpec(kind="mlp")
        self.spec = ModelSpec(model="m", tables=tuple(tables), features=tuple(features), dense_model=model)
        ids = rng.permutation(1000)[:40] + 10**12
        self.vocabularies = {one.name: ids for one in tables if one.id_mapping.kind == "vocabulary"}
        self.rejected: set[tuple[int, int]] = set()
        self.rows: list[list[list[int]]] = []
        self.weights: list[list[list[float]] | None] = []
        raw: list[list[list[int]]] = []
        sent: list[float] = []
        for key, (table, feature) in enumerate(zip(tables, features, strict=True)):
            bags = [rng.integers(0, 60, rng.integers(0, 4)).tolist() for _ in range(3)]
            drawn = [rng.normal(size=len(bag)).round(2).tolist() for bag in bags]
            raw.append([[self._id_of(table, one, ids) for one in bag] for bag in bags])
            self._expect(key, table, feature, bags, drawn)
            sent += [one if feature.weighted else 1.0 for bag in drawn for one in bag]
        flat = [one for bags in raw for bag in bags for one in bag]
        self.bags = KeyedBags.from_lengths(
            np.arange(len(kinds), dtype=np.int32),
            np.full(len(kinds), 3, np.int64),
            np.array([len(bag) for bags in raw for bag in bags], np.int64),
            np.array(flat, np.int64),
            np.array(sent, np.float32) if any(one.weighted for one in features) else None,
        )

    def _id_of(self, table: TableSpec, number: int, ids: np.ndarray) -> int:
        """Numbers below 40 are known."""
        if table.id_mapping.kind == "vocabulary":
            return int(ids[number]) if number < 40 else number
        return number

    def _row_of(self, table: TableSpec, number: int) -> int | None:
        if table.id_mapping.kind == "hash":
            one = np.array([number], np.int64)
            return int(hashed_rows(one, np.array([3], np.uint64), np.array([40], np.uint64))[0])
        return number if number < 40 else None

    def _expect(
        self, key: int, table: TableSpec, feature: FeatureSpec, bags: list[list[int]], drawn: list[list[float]]
    ) -> None:
        rows: list[list[int]] = []
        weights: list[list[float]] = []
        for number, (bag, factors) in enumerate(zip(bags, drawn, strict=True)):
            found = [(self._row_of(table, one), factor) for one, factor in zip(bag, factors, strict=True)]
            if table.unknown_id == "skip":
                found = [(row, factor) for row, factor in found if row is not None]
            elif table.unknown_id == "reject" and any(row is None for row, _ in found):
                self.rejected.add((key, number))
            rows.append([table.default_row if row is None else row for row, _ in found])
            weights.append([factor for _, factor in found])
        self.rows.append(rows)
        self.weights.append(weights if feature.weighted else None)


class DownShard:
    """A shard that no replica answers for, and how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    async def pool(self, model, version, bags, deadline, forms):
        self.asked += 1
        raise ShardUnavailableError("shard 1 of 2: no replica answered")


def test_with_a_shard_down_what_others_hold_too_is_answered_and_what_only_it_holds_is_not(stores):
    stored = stores["hash", None]
    topology = Topology(shards=2, replicate_bytes=8000)
    plan = topology.plan(stored.spec)
    down, now = DownShard(), 100.0
    up = LocalShard(make_node(stored.snapshot, plan, 0))
    router = Router(stored.schema, IdMapper(stored.schema, {}), plan, [up, down], clock=lambda: now)
    replicated = np.array([stored.schema.index[name] for name in ("genre", "tag")], np.int32)
    ones = np.ones(2, np.int64)
    bags = KeyedBags.from_lengths(np.sort(replicated), ones, ones, np.array([3, 4], np.int64))
    for _ in range(10):
        stored.check(router, bags, asyncio.run(lookup(router, stored.snapshot, bags)))
    assert down.asked == 1
    # A second later it is given another chance.
    now = 101.5
    for _ in range(10):
        stored.check(router, bags, asyncio.run(lookup(router, stored.snapshot, bags)))
    assert down.asked == 2
    films = np.arange(256, dtype=np.int64)
    divided = KeyedBags.from_lengths(
        np.array([stored.schema.index["film"]], np.int32), np.array([256]), np.ones(256, np.int64), films
    )
    with pytest.raises(ShardUnavailableError, match="shard 1 of 2"):
        asyncio.run(lookup(router, stored.snapshot, divided))


def test_the_turn_of_replicated_tables_never_overflows(stores):
    stored = stores["hash", None]
    router = local_router(stored.snapshot, Topology(shards=2, replicate_bytes=1 << 30))
    router._turn = itertools.count(2**31 - 1)
    bags = random_bags(stored, np.random.default_rng(1), 3, 3)
    for _ in range(3):
        stored.check(router, bags, asyncio.run(lookup(router, stored.snapshot, bags)))


def test_a_router_needs_a_shard_for_each_of_the_plan(stores):
    stored = stores["hash", None]
    router = local_router(stored.snapshot, Topology(shards=2))
    with pytest.raises(PlanError, match="the plan has 2 shards, but 0 were given"):
        Router(stored.schema, None, router.plan, [])


def test_ids_are_mapped_without_asking_a_shard_to_what_a_lookup_asks_for(tmp_path):
    path, _ = write_snapshot(tmp_path, make_spec())
    snapshot = Snapshot.open(path)
    router = local_router(snapshot, Topology())
    lengths = np.array([1, 2, 0, 3], np.int64)
    rows = np.array([7, 3, 3, 1, 0, 2], np.int64)
    bags = KeyedBags.from_lengths(np.array([0, 1], np.int32), np.array([2, 2], np.int64), lengths, rows)
    mapped = router.map(bags)
    assert not len(mapped.rejected)
    asked = asyncio.run(lookup(router, snapshot, bags)).bags
    for one in (mapped.bags, asked):
        np.testing.assert_array_equal(one.values, rows)
        np.testing.assert_array_equal(one.offsets, bags.offsets)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class SlowMapper(IdMapper):
    """Takes 2 s."""

    def __init__(self, schema: FeatureSchema, clock: Clock) -> None:
        super().__init__(schema, {})
        self._clock = clock

    def map(self, bags: KeyedBags) -> MappedBags:
        self._clock.now += 2.0
        return super().map(bags)


class SlowNode(ShardNode):
    """Takes 5 s, and then fails as often as it is told to."""

    def __init__(self, node: ShardNode, clock: Clock, failures: int = 0) -> None:
        super().__init__(node.identity)
        self.generations = node.generations
        self._clock = clock
        self._failures = failures

    def pool_with_sequence(self, model: str, version: int, bags: KeyedBags) -> tuple[list[Float32Array], int]:
        self._clock.now += 5.0
        if self._failures:
            self._failures -= 1
            raise ShardUnavailableError("no replica answered")
        return super().pool_with_sequence(model, version, bags)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    return Snapshot.open(write_snapshot(tmp_path_factory.mktemp("store"), make_spec(bucketing="hash"), seed=3)[0])


def slow_router(snapshot: Snapshot, topology: Topology, failures: int = 0) -> Router:
    clock, plan = Clock(), topology.plan(snapshot.spec)
    schema = FeatureSchema.of(snapshot.spec)
    shards = [
        LocalShard(SlowNode(make_node(snapshot, plan, shard), clock, failures if shard else 0))
        for shard in range(topology.shards)
    ]
    return Router(schema, SlowMapper(schema, clock), plan, shards, clock)


def bags_of(snapshot: Snapshot, feature: str, count: int) -> KeyedBags:
    key = FeatureSchema.of(snapshot.spec).index[feature]
    ones = np.ones(count, np.int64)
    return KeyedBags.from_lengths(np.array([key], np.int32), np.array([count]), ones, np.arange(count))


@pytest.mark.parametrize(("shards", "wait_s"), [(1, 5.0), (2, 10.0)])
def test_mapping_and_waiting_are_told_apart(snapshot, shards, wait_s) -> None:
    router = slow_router(snapshot, Topology(shards=shards))
    times = asyncio.run(lookup(router, snapshot, bags_of(snapshot, "film", 256))).times
    assert (times.map_s, times.split_s, times.shard_wait_s, times.add_s) == (2.0, 0.0, wait_s, 0.0)


def test_waiting_for_a_shard_that_failed_counts_too(snapshot) -> None:
    router = slow_router(snapshot, Topology(shards=2, replicate_bytes=1 << 30), failures=1)
    # Tables that all shards have take turns over them, so one of two lookups begins at the failing one.
    waits = [asyncio.run(lookup(router, snapshot, bags_of(snapshot, "film", 8))).times.shard_wait_s for _ in range(2)]
    assert sorted(waits) == [5.0, 10.0]


def test_real_times_are_above_zero_and_no_lookup_has_anothers(snapshot) -> None:
    plan = Topology(shards=2).plan(snapshot.spec)
    schema = FeatureSchema.of(snapshot.spec)
    shards = [LocalShard(make_node(snapshot, plan, shard)) for shard in range(2)]
    router = Router(schema, IdMapper(schema, {}), plan, shards)
    bags = bags_of(snapshot, "film", 256)
    first, second = (asyncio.run(lookup(router, snapshot, bags)).times for _ in range(2))
    assert first is not second
    assert min(first.map_s, first.split_s, first.shard_wait_s, first.add_s) > 0
