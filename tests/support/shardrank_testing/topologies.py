"""Fleets of every shape over one snapshot, in this process or behind real sockets, and what they must answer."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from loader.snapshot.codecs import RowCodec
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.tables import Bucketing, TableSpec
from router.feature_schema import FeatureSchema
from router.hot_rows import HotRows, HotSet
from router.id_mapping import IdMapper
from router.plan import Plan
from router.router import Embeddings, Router
from router.shard import ReplicaSource, ReplicatedShard
from shard_node.access_counts import TABLE_SHIFT
from shard_node.answer import EXACT, ReplyEncoding
from shard_node.bags import Bags, Int64Array, TableLayout
from shard_node.cuda.card_set import CardSet
from shard_node.engine.loading import load_tables
from shard_node.node import LocalShard, Shard, ShardNode
from shard_node.wire.address import Address
from shardrank_testing.bags import bags_of_random_rows, by_bag, pool_by_definition
from shardrank_testing.card_engines import OnCards
from shardrank_testing.nodes import serving
from shardrank_testing.snapshots import model_of, sharding_of, table_of, write_snapshot


def spec_of(*tables: tuple[int, int], bucketing: Bucketing = "mixed") -> ModelSpec:
    """A model of tables of so many rows and columns, each of one candidate feature."""
    return model_of([table_of(f"t{n}", rows, dim, bucketing=bucketing) for n, (rows, dim) in enumerate(tables)])


@dataclass(frozen=True)
class Topology:
    """How a snapshot is served: over how many shards and cards, divided how, in which tier."""

    shards: int = 1
    cards: int = 1
    sharding: str | None = None  # None: as the tables are stored
    memory_budget_bytes: int | None = None
    replicate_bytes: int = 0
    replicas: int = 1
    on: OnCards | None = None  # of each shard, as many as `cards`; None: in RAM

    def plan(self, spec: ModelSpec) -> Plan:
        return Plan.make(
            spec,
            num_shards=self.shards,
            sharding=self.sharding or sharding_of(spec),
            cards_per_shard=self.cards,
            replicate_bytes=self.replicate_bytes,
        )


def make_node(
    snapshot: Snapshot,
    plan: Plan,
    shard: int,
    memory_budget_bytes: int | None = None,
    card_set: CardSet | None = None,
) -> ShardNode:
    node = ShardNode(plan.identity(shard))
    tables = load_tables(
        snapshot, plan.partition(shard), plan.digest, memory_budget_bytes=memory_budget_bytes, card_set=card_set
    )
    node.generations.stage(snapshot.spec.model, snapshot.version, tables)
    node.generations.flip(snapshot.spec.model, snapshot.version)
    return node


def make_router(snapshot: Snapshot, plan: Plan, shards: list[Shard], hot: HotRows | None = None) -> Router:
    schema = FeatureSchema.of(snapshot.spec)
    return Router(schema, IdMapper.of_snapshot(snapshot, schema), plan, shards, hot=hot)


def local_router(snapshot: Snapshot, topology: Topology, hot: HotRows | None = None) -> Router:
    plan = topology.plan(snapshot.spec)
    nodes = []
    for shard in range(plan.num_shards):
        card_set = None if topology.on is None else topology.on.card_set(snapshot.spec)
        nodes.append(make_node(snapshot, plan, shard, topology.memory_budget_bytes, card_set))
    return make_router(snapshot, plan, [LocalShard(node) for node in nodes], hot)


@asynccontextmanager
async def remote_router(
    snapshot: Snapshot, topology: Topology, folder: Path, hot: HotRows | None = None
) -> AsyncIterator[Router]:
    """The same over Unix sockets, in this process's loop."""
    plan = topology.plan(snapshot.spec)
    shards: list[Shard] = []
    async with AsyncExitStack() as stack:
        for shard in range(plan.num_shards):
            addresses = []
            for replica in range(topology.replicas):
                node = make_node(snapshot, plan, shard, topology.memory_budget_bytes)
                address = Address(path=f"{folder}/{shard}-{replica}.sock")
                server = await stack.enter_async_context(serving(address, node))
                addresses.append(server.addresses[0])
            shards.append(ReplicatedShard(plan, shard, snapshot, ReplicaSource.fixed(addresses)))
            stack.push_async_callback(shards[-1].close)
        yield make_router(snapshot, plan, shards, hot)


def decoded_rows(table: TableSpec, rows: np.ndarray) -> np.ndarray:
    """What rows of a table are worth once stored: the dtype's own rounding is no error of whoever serves them."""
    columns = np.split(rows, list(itertools.accumulate(table.slice_dims))[:-1], axis=1)
    codecs = [RowCodec(table.dtype, dim) for dim in table.slice_dims]
    return np.concatenate([codec.decode(codec.encode(one)) for codec, one in zip(codecs, columns, strict=True)], axis=1)


def decoded_tables(spec: ModelSpec, tables: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the rows of all tables are worth once stored."""
    return {table.name: decoded_rows(table, tables[table.name]) for table in spec.tables}


class StoredModel:
    """A snapshot of a model with random rows, and what lookups in it must give.

    Attributes:
        rows: float32 rows by table, as exported.
        tables: what they are worth once stored.
        bags: makes random bags of some features, or of all.
    """

    def __init__(self, folder: Path, spec: ModelSpec, seed: int = 3, **more: Any) -> None:
        self.spec = spec
        path, self.rows = write_snapshot(folder, spec, seed=seed, **{"rows_per_file": 256} | more)
        self.snapshot = Snapshot.open(path)
        self.tables = decoded_tables(spec, self.rows)
        self.schema = FeatureSchema.of(spec)
        self.layout = TableLayout.of(spec)
        self.bags = partial(random_feature_bags, self.schema)

    def check(self, bags: Bags, embeddings: Embeddings) -> None:
        """Assert that an answer has the pooled rows as stored."""
        assert len(embeddings.rejected) == 0
        for segment, key in enumerate(bags.keys.tolist()):
            name = self.schema.features[key].name
            pooling, table = self.spec.pooling_of(name), self.tables[self.spec.table_of(name).name]
            rows = by_bag(bags.values, bags, segment)
            weights = None if bags.weights is None else by_bag(bags.weights, bags, segment)
            expected = pool_by_definition(table, rows, pooling, weights)
            # A sum's rounding grows with its terms; a mean's and a single row's do not.
            scale = 3.0 * (max([1, *map(len, rows)]) if pooling == "sum" else 1)
            np.testing.assert_allclose(embeddings.feature(key), expected, rtol=1e-5, atol=1e-5 * scale, err_msg=name)
            assert embeddings.lengths(key).tolist() == list(map(len, rows))


def random_feature_bags(
    schema: FeatureSchema,
    rng: np.random.Generator,
    max_bags: int = 5,
    max_hotness: int = 5,
    min_hotness: int = 0,
    features: list[int] | None = None,
) -> Bags:
    """Return random bags of rows of some features, or of all, by flat index."""
    keys = np.array(range(len(schema.features)) if features is None else features, np.int32)
    bags_per_key = rng.integers(0, max_bags + 1, keys.size).astype(np.int64)
    lengths = rng.integers(min_hotness, max_hotness + 1, int(bags_per_key.sum()))
    if not min_hotness:
        lengths[rng.random(lengths.size) < 0.2] = 0
    limits = [schema.spec.table_of(schema.features[key].name).num_embeddings for key in keys.tolist()]
    bags = bags_of_random_rows(rng, keys, bags_per_key, lengths, limits, weighted=True)
    weighted = np.repeat([schema.features[key].weighted for key in keys.tolist()], bags.values_per_key())
    return bags.with_values(bags.values, np.where(weighted, bags.weights, 1.0).astype(np.float32))


def lookup(router: Router, snapshot: Snapshot, bags: Bags, timeout_s: float = 60.0, forms: ReplyEncoding = EXACT):
    """One lookup, as a coroutine."""
    return router.lookup(snapshot.spec.model, snapshot.version, bags, time.monotonic() + timeout_s, forms)


def hot_keys(layout: TableLayout, rows: dict[str, list[int]]) -> Int64Array:
    """Keys of rows by table, ascending."""
    keys = [(layout.index[table] << TABLE_SHIFT) + row for table, own in rows.items() for row in own]
    return np.unique(np.array(keys, np.int64))


def hold(hot: HotRows, snapshot: Snapshot, keys: Int64Array) -> None:
    """Have a tier hold these rows, as the snapshot has them."""
    pending = HotSet(hot.layout, keys)
    hot.begin(pending)
    stored = []
    for group in hot.layout.groups:
        parts = [np.zeros((0, group.row_bytes), np.uint8)]
        for number in range(group.first_table, group.end_table):
            table = hot.layout.tables[number]
            rows = keys[keys >> TABLE_SHIFT == number] & 0xFFFFFFFF
            parts.append(snapshot.read_rows(table.name, 0, table.num_embeddings)[rows])
        stored.append(np.concatenate(parts))
    hot.fill(pending, np.arange(keys.size), stored)
    before = hot.use(pending)
    while before.users:
        time.sleep(0.001)
    before.close()
