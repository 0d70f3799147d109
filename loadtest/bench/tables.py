"""Embedding tables of one size for benchmarks, and routers over nodes that hold them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.row_source import rows_of
from loader.snapshot.tables import TableSpec
from loader.snapshot.writer import export_snapshot
from loadtest.servers import ServerCommand, running
from router.feature_schema import FeatureSchema
from router.hot_rows import HotRows
from router.id_mapping import IdMapper
from router.plan import Plan
from router.replicas import ReplicatedShard
from router.router import Router
from serving.fleet.supervisor import shardrank_command
from shard_node.bags import Float32Array, KeyedBags
from shard_node.engine.loading import load_tables
from shard_node.node import Shard, ShardNode
from shard_node.wire.address import Address
from shard_node.wire.client import ShardClient

MODEL = "bench"
DISTINCT_ROWS = 1 << 16
"""Rows repeat after so many: random enough to fill codes, few enough to write gigabytes in seconds."""


@dataclass(frozen=True, slots=True)
class UniformTables:
    """So many tables of equal size, one feature each: int8 rows, whose numbers are the ids."""

    count: int
    rows: int
    embedding_dim: int

    def spec(self) -> ModelSpec:
        """Describe the model."""
        names = [f"f{number:02d}" for number in range(self.count)]
        return ModelSpec(
            model=MODEL,
            tables=tuple(
                TableSpec(name=name, num_embeddings=self.rows, embedding_dim=self.embedding_dim, feature_names=(name,))
                for name in names
            ),
            features=tuple(FeatureSpec(name=name, side="candidate") for name in names),
            dense_model=DenseModelSpec(kind="mlp"),
        )

    def all_rows(self) -> Float32Array:
        """Draw float32 [rows, embedding_dim], the same for every table."""
        drawn = np.random.default_rng(7).standard_normal((DISTINCT_ROWS, self.embedding_dim), dtype=np.float32)
        return np.resize(drawn, (self.rows, self.embedding_dim))

    def export(self, store: Path) -> Snapshot:
        """Write and open the snapshot; takes some seconds for each gigabyte."""
        spec = self.spec()
        rows = dict.fromkeys((table.name for table in spec.tables), rows_of(self.all_rows()))
        return Snapshot.open(export_snapshot(store, spec, rows=rows, dense={"unused": torch.zeros(1)}), verify=False)

    def draw(self, rng: np.random.Generator, bags: int, hotness: int, rows: int | None = None) -> KeyedBags:
        """Draw uniform ids, the worst case for caches, of the first `rows` rows, for so many bags of each table."""
        num_bags = self.count * bags
        return KeyedBags.from_lengths(
            np.arange(self.count, dtype=np.int32),
            np.full(self.count, bags, np.int64),
            np.full(num_bags, hotness, np.int64),
            rng.integers(0, rows or self.rows, num_bags * hotness),
        )


def make_node(snapshot: Snapshot, plan: Plan, shard: int = 0) -> ShardNode:
    """Load one shard of a model on a node."""
    node = ShardNode(plan.identity(shard))
    node.generations.stage(
        snapshot.spec.model, snapshot.version, load_tables(snapshot, plan.partition(shard), plan.digest)
    )
    node.generations.flip(snapshot.spec.model, snapshot.version)
    return node


def make_router(snapshot: Snapshot, plan: Plan, shards: Sequence[Shard], hot: HotRows | None = None) -> Router:
    """Make a router over all shards."""
    schema = FeatureSchema.of(snapshot.spec)
    return Router(schema, IdMapper.of_snapshot(snapshot, schema), plan, shards, hot=hot)


@contextmanager
def node_process(snapshot: Snapshot, plan: Plan, shard: int = 0) -> Iterator[tuple[Shard, tuple[int, ...]]]:
    """Run one shard's node, as users start it, behind a Unix socket; yield a connection to it and its process ids."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        socket = Path(folder, "node.sock")
        address = f"unix:{socket}"
        flags = {"snapshot": snapshot.path, "shard": f"{shard}/{plan.num_shards}", "listen": address}
        given = [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]
        line = shardrank_command("shard-node", "--no-verify", "--device", "cpu", *given)
        command = ServerCommand(f"shard {shard}", line, Path(folder, "node.log"))
        with running("nodes", [command], lambda: "" if socket.exists() else "it does not listen") as node:
            client = ShardClient(Address.parse(address))
            yield ReplicatedShard(plan, shard, snapshot.identity, [client]), node.process_ids
