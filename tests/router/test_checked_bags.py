"""The router tells engines of its own process which values it has checked, and only those."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from loader.snapshot.manifest import ModelSpec
from loader.snapshot.reader import Snapshot
from router.feature_schema import FeatureSchema
from router.id_mapping import IdMapper
from router.plan import Plan
from router.router import Router
from shard_node.bags import CheckedBags, Float32Array, KeyedBags
from shard_node.errors import InvalidBagsError
from shard_node.node import LocalShard, ShardNode
from shardrank_testing.snapshots import make_spec, write_snapshot
from shardrank_testing.topologies import lookup, make_node


class RecordingNode(ShardNode):
    """A node in this process that keeps what it was asked for."""

    def __init__(self, node: ShardNode) -> None:
        super().__init__(node.identity)
        self.generations = node.generations
        self.asked: list[KeyedBags] = []

    def pool_with_sequence(self, model: str, version: int, bags: KeyedBags) -> tuple[list[Float32Array], int]:
        self.asked.append(bags)
        return super().pool_with_sequence(model, version, bags)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    return Snapshot.open(write_snapshot(tmp_path_factory.mktemp("store"), make_spec())[0])


def router_of(spec: ModelSpec, snapshot: Snapshot) -> tuple[Router, RecordingNode]:
    """A router by one description over a node that holds another's tables, in this process."""
    schema = FeatureSchema.of(spec)
    node = RecordingNode(make_node(snapshot, Plan.make(snapshot.spec), 0))
    return Router(schema, IdMapper(schema, {}), Plan.make(spec), [LocalShard(node)]), node


@pytest.mark.parametrize("policy", ["reject", "default_row", "skip"])
def test_values_called_checked_are_rows(snapshot, policy):
    spec = snapshot.spec
    tables = [{**table.model_dump(), "unknown_id": policy} for table in spec.tables]
    router, node = router_of(ModelSpec.model_validate({**spec.model_dump(), "tables": tables}), snapshot)
    rng, num_features = np.random.default_rng(8), len(spec.features)
    for _ in range(30):
        keys = np.sort(rng.permutation(num_features)[: rng.integers(1, num_features + 1)]).astype(np.int32)
        bags_per_key = rng.integers(0, 4, keys.size)
        lengths = rng.integers(0, 4, bags_per_key.sum())
        ids = rng.choice([0, 18, 19, 776, 777, 2**40, 2**63 - 1], lengths.sum())
        asyncio.run(lookup(router, snapshot, KeyedBags.from_lengths(keys, bags_per_key, lengths, ids)))
    assert len(node.asked) == 30
    for asked in node.asked:
        assert isinstance(asked, CheckedBags)
        plain = KeyedBags(asked.keys, asked.bags_per_key, asked.offsets, asked.values, asked.weights)
        asked.layout.check(plain)


def test_a_node_with_other_tables_checks_for_itself(snapshot):
    spec, num_films = snapshot.spec, snapshot.spec.table_of("film").num_embeddings
    tables = [{**table.model_dump(), "num_embeddings": 4 * table.num_embeddings} for table in spec.tables]
    router, _ = router_of(ModelSpec.model_validate({**spec.model_dump(), "tables": tables}), snapshot)
    film, one = np.array([router.schema.index["film"]], np.int32), np.ones(1, np.int64)

    def look_up(row: int) -> None:
        asyncio.run(lookup(router, snapshot, KeyedBags(film, one, np.array([0, 1]), row * one)))

    look_up(num_films - 1)
    with pytest.raises(InvalidBagsError, match=f"row {num_films} "):
        look_up(num_films)
