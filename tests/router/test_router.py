"""The router gives what a reference gives, and measures where the time went."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader.snapshot.manifest import ModelSpec
from router.errors import PlanError, ShardUnavailableError
from router.feature_schema import FeatureSchema
from router.id_mapping import IdMapper, MappedBags
from router.router import Router
from shard_node.answer import Forms
from shard_node.bags import Float32Array, KeyedBags
from shard_node.node import LocalShard, ShardNode
from shardrank_testing.snapshots import make_spec
from shardrank_testing.topologies import (
    StoredModel,
    Topology,
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
    "partly mapped 2x1": Topology(shards=2, memory_budget_bytes=8000),
}
REMOTE = {
    "1x1": Topology(),
    "2x2": Topology(shards=2, cards=2),
    "3x1 with two replicas": Topology(shards=3, replicate_bytes=4096, replicas=2),
    "partly mapped 2x1": Topology(shards=2, memory_budget_bytes=8000),
}
DTYPES = ["int8", "int4", "fp16", "fp32"]


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> dict[tuple[str, str | None], StoredModel]:
    kinds = [("hash", None), ("range", None), *(("hash", dtype) for dtype in DTYPES)]
    return {
        (bucketing, dtype): StoredModel(tmp_path_factory.mktemp("store"), make_spec(bucketing=bucketing, dtype=dtype))
        for bucketing, dtype in kinds
    }


def look_up(router: Router, stored: StoredModel, bags: KeyedBags):
    return asyncio.run(lookup(router, stored.snapshot, bags))


def bags_of(stored: StoredModel, feature: str, ids: list[int]) -> KeyedBags:
    """Bags of one id each."""
    key = np.array([stored.schema.index[feature]], np.int32)
    return KeyedBags.from_lengths(key, np.array([len(ids)]), np.ones(len(ids), np.int64), np.array(ids, np.int64))


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES.keys())
@pytest.mark.parametrize("bucketing", ["hash", "range"])
def test_any_topology_gives_the_references_answer(stores, topology, bucketing):
    stored = stores[bucketing, None]
    router = local_router(stored.snapshot, topology)
    for max_bags, max_hotness in ((1, 1), (7, 5), (3, 1000), (0, 0), (1024, 1)):
        bags = stored.bags(np.random.default_rng(max_bags + max_hotness), max_bags, max_hotness)
        stored.check(bags, look_up(router, stored, bags))


@pytest.mark.parametrize("topology", [Topology(), Topology(shards=2, cards=2)], ids=["1x1", "2x2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_gives_the_references_answer(stores, topology, dtype):
    stored = stores["hash", dtype]
    router = local_router(stored.snapshot, topology)
    for seed in range(3):
        bags = stored.bags(np.random.default_rng(seed), 6, 6)
        stored.check(bags, look_up(router, stored, bags))


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
    stored, rng = stores["hash", None], np.random.default_rng(seed)
    router = local_router(stored.snapshot, Topology(shards, cards, sharding, budget, replicate_bytes))
    some = sorted(rng.choice(7, int(rng.integers(0, 8)), replace=False).tolist())
    for features in (None, some):
        bags = stored.bags(rng, int(rng.integers(1, 5)), int(rng.integers(0, 5)), features=features)
        stored.check(bags, look_up(router, stored, bags))


@pytest.mark.parametrize("topology", REMOTE.values(), ids=REMOTE.keys())
def test_shards_behind_sockets_give_the_references_answer(stores, tmp_path, topology):
    """One shard gives the same bits as in this process."""
    stored = stores["hash", None]
    local = local_router(stored.snapshot, topology)

    async def run() -> None:
        async with remote_router(stored.snapshot, topology, tmp_path) as router:
            for seed in range(3):
                bags = stored.bags(np.random.default_rng(seed), 9, 9)
                remote = await lookup(router, stored.snapshot, bags)
                stored.check(bags, remote)
                if topology.shards == 1:
                    expected = await lookup(local, stored.snapshot, bags)
                    assert [block.tobytes() for block in remote.blocks] == [
                        block.tobytes() for block in expected.blocks
                    ]

    asyncio.run(run())


@pytest.mark.parametrize("forms", [Forms(), Forms(float16=True), Forms(stored=True), Forms(stored=True, float16=True)])
def test_shards_answer_in_the_accepted_forms(stores, tmp_path, forms):
    """Their bytes are counted by form."""
    stored = stores["hash", None]

    async def run() -> None:
        async with remote_router(stored.snapshot, Topology(shards=2, cards=2), tmp_path) as router:
            for seed, max_hotness in enumerate((1, 2, 9, 9)):
                bags = stored.bags(np.random.default_rng(seed), 9, max_hotness)
                exact = await lookup(router, stored.snapshot, bags, forms=Forms())
                embeddings = await lookup(router, stored.snapshot, bags, forms=forms)
                requested, rows, float16, float32 = embeddings.times.wire_bytes()
                assert requested > 0
                assert rows == 0 or forms.stored
                assert rows > 0 or not forms.stored or max_hotness == 9
                assert float16 == 0 or forms.float16
                assert float32 == 0 or not forms.float16
                assert (float16 + float32 > 0) == (max_hotness > 1 or not forms.stored)
                for actual, expected in zip(embeddings.blocks, exact.blocks, strict=True):
                    # Each of two shards' sums, of at most 9 rows of numbers below 8, to half of its last of 11 bits.
                    np.testing.assert_allclose(actual, expected, atol=2 * 72 * 2**-11 if forms.float16 else 1e-4)

    asyncio.run(run())


@pytest.mark.parametrize("topology", REMOTE.values(), ids=REMOTE.keys())
@pytest.mark.parametrize("hotness", [1, 2])
def test_rows_sent_as_stored_give_the_same_bits_everywhere(stores, tmp_path, topology, hotness):
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
        expected = (await lookup(one_node, stored.snapshot, bags)).blocks
        assert [block.tobytes() for block in remote.blocks] == [block.tobytes() for block in expected]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("policy", "rows"), [("reject", [[5], [0], [6]]), ("default_row", [[5], [7], [6]]), ("skip", [[5], [], [6]])]
)
def test_unknown_ids_get_what_their_table_says(tmp_path, policy, rows):
    spec = make_spec(bucketing="mixed")
    tables = [{**table.model_dump(), "unknown_id": policy, "default_row": 7} for table in spec.tables]
    stored = StoredModel(tmp_path, ModelSpec.model_validate({**spec.model_dump(), "tables": tables}))
    router = local_router(stored.snapshot, Topology(shards=2))
    film, bags = stored.schema.index["film"], bags_of(stored, "film", [5, 777, 6])
    embeddings = look_up(router, stored, bags)
    rejected = embeddings.rejected
    unknown = ([film], [1], [777]) if policy == "reject" else ([], [], [])
    assert (rejected.feature.tolist(), rejected.bag.tolist(), rejected.id.tolist()) == unknown
    expected = expected_feature(stored.spec, stored.tables, "film", rows, None)
    answered = [0, 2] if policy == "reject" else [0, 1, 2]
    np.testing.assert_allclose(embeddings.feature(film)[answered], expected[answered], rtol=1e-5)
    with pytest.raises(KeyError, match="user"):
        embeddings.feature(stored.schema.index["user"])
    # Without a lookup, ids are mapped to the same rows.
    mapped = router.map(bags)
    np.testing.assert_array_equal(mapped.bags.values, embeddings.bags.values)
    assert len(mapped.rejected) == len(rejected)


class DownShard:
    """A shard that no replica answers for, and how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    async def pool(self, model, version, bags, deadline, forms):
        self.calls += 1
        raise ShardUnavailableError("shard 1 of 2: no replica answered")


def test_with_a_shard_down_replicated_rows_are_answered(stores):
    """What only that shard holds is not."""
    stored = stores["hash", None]
    plan = Topology(shards=2, replicate_bytes=8000).plan(stored.spec)
    down, now = DownShard(), 100.0
    up = LocalShard(make_node(stored.snapshot, plan, 0))
    router = Router(stored.schema, IdMapper(stored.schema, {}), plan, [up, down], clock=lambda: now)
    features = sorted(stored.schema.index[name] for name in ("genre", "tag"))
    bags = stored.bags(np.random.default_rng(1), 2, features=features)
    for seconds in (0.0, 1.5):
        # After a second it is given another chance.
        now += seconds
        for _ in range(10):
            stored.check(bags, look_up(router, stored, bags))
        assert down.calls == (2 if seconds else 1)
    with pytest.raises(ShardUnavailableError, match="shard 1 of 2"):
        look_up(router, stored, bags_of(stored, "film", list(range(256))))
    with pytest.raises(PlanError, match="the plan has 2 shards, but 0 were given"):
        Router(stored.schema, None, plan, [])


class SlowMapper(IdMapper):
    """Takes 2 s."""

    def map(self, bags: KeyedBags) -> MappedBags:
        self.clock.now += 2.0
        return super().map(bags)


class SlowNode(ShardNode):
    """Takes 5 s."""

    def pool_with_sequence(self, model: str, version: int, bags: KeyedBags) -> tuple[list[Float32Array], int]:
        self.clock.now += 5.0
        return super().pool_with_sequence(model, version, bags)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("shards", "wait_s"), [(1, 5.0), (2, 10.0)])
def test_mapping_and_waiting_are_measured_apart(stores, shards, wait_s):
    stored, clock = stores["hash", None], Clock()
    plan = Topology(shards=shards).plan(stored.spec)
    nodes = []
    for shard in range(shards):
        node = SlowNode(plan.identity(shard))
        node.generations, node.clock = make_node(stored.snapshot, plan, shard).generations, clock
        nodes.append(LocalShard(node))
    mapper = SlowMapper(FeatureSchema.of(stored.spec), {})
    mapper.clock = clock
    router = Router(stored.schema, mapper, plan, nodes, clock)
    times = look_up(router, stored, bags_of(stored, "film", list(range(256)))).times
    assert (times.map_s, times.split_s, times.shard_wait_s, times.add_s) == (2.0, 0.0, wait_s, 0.0)
