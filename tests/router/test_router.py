"""The router gives what a reference gives, in pieces that fit a frame, and measures where the time went."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader.errors import UnavailableError
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.reader import Snapshot
from router.errors import PlanError
from router.feature_schema import FeatureSchema
from router.id_mapping import IdMapper
from router.plan import Plan
from router.router import VALUE_BYTES, Cutter, Router
from shard_node.answer import Answer, ReplyEncoding, add_answers
from shard_node.bags import Bags, CheckedBags
from shard_node.errors import InvalidBagsError
from shard_node.node import LocalShard
from shard_node.split import split, whole
from shardrank_testing.bags import bags_of, pool_by_definition, random_table_bags
from shardrank_testing.errors import raises_kind
from shardrank_testing.nodes import reference_engine
from shardrank_testing.snapshots import make_spec, one_table_spec, write_snapshot
from shardrank_testing.topologies import StoredModel, Topology, local_router, lookup, make_node, remote_router
from shardrank_testing.waiting import Clock

REMOTE = {
    "1x1": Topology(),
    "2x2": Topology(shards=2, cards=2),
    "3x1 with two replicas": Topology(shards=3, replicate_bytes=4096, replicas=2),
    "partly on disk 2x1": Topology(shards=2, memory_budget_bytes=8000),
}
KINDS = [("mixed", None), ("range", None), *(("mixed", dtype) for dtype in ("int8", "int4", "fp16", "fp32"))]


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> dict[tuple[str, str | None], StoredModel]:
    return {
        (bucketing, dtype): StoredModel(tmp_path_factory.mktemp("store"), make_spec(bucketing=bucketing, dtype=dtype))
        for bucketing, dtype in KINDS
    }


def look_up(router: Router, stored: StoredModel, bags: Bags):
    return asyncio.run(lookup(router, stored.snapshot, bags))


def single_ids(stored: StoredModel, feature: str, ids: Sequence[int]) -> Bags:
    """Bags of one id each."""
    return bags_of({stored.schema.index[feature]: [[one] for one in ids]})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=3 * settings.default.max_examples)
@given(
    kind=st.sampled_from(KINDS),
    shards=st.integers(1, 4),
    cards=st.integers(1, 3),
    sharding=st.sampled_from([None, "table"]),
    replicate_bytes=st.sampled_from([0, 5000, 1 << 30]),
    budget=st.sampled_from([None, 0, 9000]),
    sizes=st.tuples(st.sampled_from([0, 1, 4, 1024]), st.sampled_from([0, 1, 4])) | st.just((3, 1000)),
    seed=st.integers(0, 2**32),
)
def test_any_topology_gives_the_references_answer(
    stores, kind, shards, cards, sharding, replicate_bytes, budget, sizes, seed
):
    stored, rng = stores[kind], np.random.default_rng(seed)
    router = local_router(stored.snapshot, Topology(shards, cards, sharding, budget, replicate_bytes))
    some = sorted(rng.choice(7, int(rng.integers(0, 8)), replace=False).tolist())
    for features in (None, some):
        bags = stored.bags(rng, *sizes, features=features)
        stored.check(bags, look_up(router, stored, bags))


@pytest.mark.parametrize("topology", REMOTE.values(), ids=REMOTE.keys())
async def test_shards_behind_sockets_give_the_references_answer(stores, tmp_path, topology):
    """One shard gives the same bits as in this process."""
    stored = stores["mixed", None]
    local = local_router(stored.snapshot, topology)

    async with remote_router(stored.snapshot, topology, tmp_path) as router:
        for seed in range(3):
            bags = stored.bags(np.random.default_rng(seed), 9, 9)
            remote = await lookup(router, stored.snapshot, bags)
            stored.check(bags, remote)
            if topology.shards == 1:
                expected = await lookup(local, stored.snapshot, bags)
                assert [block.tobytes() for block in remote.blocks] == [block.tobytes() for block in expected.blocks]


@pytest.mark.parametrize(
    "forms",
    [
        ReplyEncoding(),
        ReplyEncoding(sums="float16"),
        ReplyEncoding(stored=True),
        ReplyEncoding(stored=True, sums="float16"),
        ReplyEncoding(sums="int8"),
        ReplyEncoding(stored=True, sums="int8"),
    ],
)
async def test_shards_answer_in_the_accepted_forms(stores, tmp_path, forms):
    """Their bytes are counted by form."""
    stored = stores["mixed", None]

    async with remote_router(stored.snapshot, Topology(shards=2, cards=2), tmp_path) as router:
        for seed, max_hotness in enumerate((1, 2, 9, 9)):
            bags = stored.bags(np.random.default_rng(seed), 9, max_hotness)
            exact = await lookup(router, stored.snapshot, bags, forms=ReplyEncoding())
            embeddings = await lookup(router, stored.snapshot, bags, forms=forms)
            requested, rows, *sums = embeddings.times.wire_bytes
            assert requested > 0
            assert rows == 0 or forms.stored
            assert rows > 0 or not forms.stored or max_hotness == 9
            # Of tables with at most eight numbers in a row sums are in float16 where int8 is accepted.
            formats = ["int8", "float16", "float32"]
            sent = [form for form, size in zip(formats, sums, strict=True) if size]
            assert set(sent) <= ({"int8", "float16"} if forms.sums == "int8" else {forms.sums})
            assert bool(sent) == (max_hotness > 1 or not forms.stored)
            assert forms.sums != "int8" or forms.stored or "int8" in sent
            # Each of two shards' sums, of at most 9 rows of numbers below 8, to half of its last of 11 bits, or to half
            # of one of 255 steps.
            far = {"float32": 1e-4, "float16": 2 * 72 * 2**-11, "int8": 2 * 144 / 510}[forms.sums]
            for actual, expected in zip(embeddings.blocks, exact.blocks, strict=True):
                np.testing.assert_allclose(actual, expected, atol=far)


@pytest.mark.parametrize("topology", REMOTE.values(), ids=REMOTE.keys())
@pytest.mark.parametrize("hotness", [1, 2])
async def test_rows_sent_as_stored_give_the_same_bits_everywhere(stores, tmp_path, topology, hotness):
    stored = stores["mixed", "int4"]
    one_node = local_router(stored.snapshot, Topology())
    # Two int4 rows of 16 numbers take less than a float16 sum; of the narrower tables one does.
    features = ("user", "film", "history") if hotness == 2 else stored.schema.index
    keys = np.array(sorted(stored.schema.index[name] for name in features), np.int32)
    num_bags = 40 * keys.size
    rng = np.random.default_rng(hotness)
    bags = Bags.from_lengths(
        keys,
        np.full(keys.size, 40),
        np.full(num_bags, hotness),
        rng.integers(0, 19, num_bags * hotness),
        rng.normal(size=num_bags * hotness).astype(np.float32),
    )

    async with remote_router(stored.snapshot, topology, tmp_path) as router:
        remote = await lookup(router, stored.snapshot, bags)
    assert remote.times.wire_bytes[1] > 0
    assert not any(remote.times.wire_bytes[2:])
    expected = (await lookup(one_node, stored.snapshot, bags)).blocks
    assert [block.tobytes() for block in remote.blocks] == [block.tobytes() for block in expected]


@pytest.mark.parametrize(
    ("policy", "rows"), [("reject", [[5], [0], [6]]), ("default_row", [[5], [7], [6]]), ("skip", [[5], [], [6]])]
)
def test_unknown_ids_get_what_their_table_says(tmp_path, policy, rows):
    spec = make_spec(bucketing="mixed")
    tables = [{**table.model_dump(), "unknown_id": policy, "default_row": 7} for table in spec.tables]
    stored = StoredModel(tmp_path, ModelSpec.model_validate({**spec.model_dump(), "tables": tables}))
    router = local_router(stored.snapshot, Topology(shards=2))
    film, bags = stored.schema.index["film"], single_ids(stored, "film", [5, 777, 6])
    embeddings = look_up(router, stored, bags)
    rejected = embeddings.rejected
    unknown = ([film], [1], [777]) if policy == "reject" else ([], [], [])
    assert (rejected.feature.tolist(), rejected.bag.tolist(), rejected.id.tolist()) == unknown
    expected = pool_by_definition(stored.tables["film"], rows, "sum")
    answered = [0, 2] if policy == "reject" else [0, 1, 2]
    np.testing.assert_allclose(embeddings.feature(film)[answered], expected[answered], rtol=1e-5)
    with pytest.raises(KeyError, match="user"):
        embeddings.feature(stored.schema.index["user"])
    # Without a lookup, ids are mapped to the same rows.
    mapped = router.mapper.map(bags)
    np.testing.assert_array_equal(mapped.bags.values, embeddings.bags.values)
    assert len(mapped.rejected) == len(rejected)


class DownShard:
    """A shard that no replica answers for, and how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def pool(self, model, version, bags, deadline, forms):
        self.calls += 1
        answer = asyncio.get_running_loop().create_future()
        answer.set_exception(UnavailableError("shard 1 of 2: no replica answered", kind="shard_unavailable"))
        return answer


def test_with_a_shard_down_replicated_rows_are_answered(stores):
    """What only that shard holds is not."""
    stored = stores["mixed", None]
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
    with raises_kind("shard_unavailable", match="shard 1 of 2"):
        look_up(router, stored, single_ids(stored, "film", range(256)))
    with pytest.raises(PlanError, match="the plan has 2 shards, but 0 were given"):
        Router(stored.schema, None, plan, [])


def slow(call: Callable[..., Any], clock: Clock, seconds: float) -> Callable[..., Any]:
    def called(*arguments: Any) -> Any:
        clock.now += seconds
        return call(*arguments)

    return called


@pytest.mark.parametrize(("shards", "wait_s"), [(1, 5.0), (2, 10.0)])
def test_mapping_and_waiting_are_measured_apart(stores, shards, wait_s):
    stored, clock = stores["mixed", None], Clock()
    plan, mapper = Topology(shards=shards).plan(stored.spec), IdMapper(stored.schema, {})
    nodes = [make_node(stored.snapshot, plan, shard) for shard in range(shards)]
    mapper.map = slow(mapper.map, clock, 2.0)
    for node in nodes:
        node.answer = slow(node.answer, clock, 5.0)
    router = Router(stored.schema, mapper, plan, [LocalShard(node) for node in nodes], clock)
    times = look_up(router, stored, single_ids(stored, "film", range(256))).times
    assert (times.map_s, times.split_s, times.shard_wait_s, times.add_s) == (2.0, 0.0, wait_s, 0.0)


@given(st.integers(0, 2**32), st.integers(1, 4000), st.integers(1, 3), st.booleans())
def test_pieces_add_up_to_the_whole_within_their_bytes(seed, piece_bytes, num_owners, weighted):
    engine, rng = reference_engine(), np.random.default_rng(seed)
    layout = engine.layout
    bags = random_table_bags(rng, layout, 12, 6, weighted)
    owner = rng.integers(0, num_owners, bags.num_values).astype(np.uint8)
    parts = [whole(bags)] if num_owners == 1 else split(bags, owner, range(num_owners))
    key_of_bag = np.repeat(bags.keys, bags.bags_per_key)
    pieces = []
    for part in parts:
        of_part = Cutter(layout, piece_bytes).cut(part)
        np.testing.assert_array_equal(np.concatenate([piece.bag_index for piece in of_part]), part.bag_index)
        np.testing.assert_array_equal(np.concatenate([piece.positions for piece in of_part]), part.positions)
        for piece in of_part:
            piece.bags.validate()
            assert (piece.owner, piece.shares_no_bag) == (part.owner, part.shares_no_bag)
            np.testing.assert_array_equal(piece.bags.values, bags.values[piece.positions])
            assert (piece.bags.weights is None) != weighted
            keys = np.repeat(piece.bags.keys, piece.bags.bags_per_key)
            np.testing.assert_array_equal(keys, key_of_bag[piece.bag_index])
            answer_bytes = int((layout.bag_bytes[piece.bags.keys] * piece.bags.bags_per_key).sum())
            assert piece.bags.num_bags == 1 or answer_bytes + piece.bags.num_values * VALUE_BYTES <= piece_bytes
        pieces += of_part
        assert Cutter(layout).cut(part)[0] is part
    added = add_answers(layout, bags, pieces, [Answer(engine.pool(piece.bags)) for piece in pieces])
    for actual, expected in zip(added, engine.pool(bags), strict=True):
        # Weights are not whole numbers, so the order in which owners are added shows in the last bits.
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-3 if weighted and num_owners > 1 else 0)


async def test_what_is_too_large_for_a_frame_travels_in_pieces(tmp_path):
    spec = one_table_spec(100, embedding_dim=4096)
    path, _ = write_snapshot(tmp_path, spec, seed=1)
    wide = Snapshot.open(path)
    # Of 6,000 bags 16 KiB each come back: more than one frame may hold.
    rows = np.arange(18_000, dtype=np.int64) % 100
    bags = Bags.from_lengths(np.array([0], np.int32), np.array([6000], np.int64), np.full(6000, 3), rows)
    expected = await lookup(local_router(wide, Topology()), wide, bags)
    async with remote_router(wide, Topology(), tmp_path) as router:
        embeddings = await lookup(router, wide, bags)
    np.testing.assert_array_equal(embeddings.blocks[0], expected.blocks[0])
    assert embeddings.times.wire_bytes[1:] == (0, 0, 0, 6000 * 4096 * 4)


def router_of(stored: StoredModel, **changes: Any) -> tuple[Router, list[Bags]]:
    """A router by a description with changed tables over a node with the stored ones, and the bags sent to the node."""
    tables = [{**table.model_dump(), **changes} for table in stored.spec.tables]
    spec = ModelSpec.model_validate({**stored.spec.model_dump(), "tables": tables})
    schema, node, sent = FeatureSchema.of(spec), make_node(stored.snapshot, Plan.make(stored.spec), 0), []
    pool = node.answer
    node.answer = lambda model, version, bags: sent.append(bags) or pool(model, version, bags)
    return Router(schema, IdMapper(schema, {}), Plan.make(spec), [LocalShard(node)]), sent


@pytest.mark.parametrize("policy", ["reject", "default_row", "skip"])
def test_values_called_checked_are_rows(stores, policy):
    stored = stores["mixed", None]
    router, sent = router_of(stored, unknown_id=policy)
    rng, num_features = np.random.default_rng(8), len(stored.spec.features)
    for _ in range(30):
        keys = np.sort(rng.permutation(num_features)[: rng.integers(1, num_features + 1)]).astype(np.int32)
        bags_per_key = rng.integers(0, 4, keys.size)
        lengths = rng.integers(0, 4, bags_per_key.sum())
        ids = rng.choice([0, 18, 19, 776, 777, 2**40, 2**63 - 1], lengths.sum())
        look_up(router, stored, Bags.from_lengths(keys, bags_per_key, lengths, ids))
    assert len(sent) == 30
    for bags in sent:
        assert isinstance(bags, CheckedBags)
        bags.layout.check(Bags(bags.keys, bags.bags_per_key, bags.offsets, bags.values, bags.weights))


def test_a_node_with_other_tables_checks_for_itself(stores):
    stored = stores["mixed", None]
    num_films = stored.spec.table_of("film").num_embeddings
    router, _ = router_of(stored, num_embeddings=4 * num_films)
    look_up(router, stored, single_ids(stored, "film", [num_films - 1]))
    with pytest.raises(InvalidBagsError, match=f"row {num_films} "):
        look_up(router, stored, single_ids(stored, "film", [num_films]))
