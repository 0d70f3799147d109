"""Embedding tables of one size for benchmarks, and routers over nodes that hold them."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import uvloop

from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.row_source import RowsFromBlocks
from loader.snapshot.tables import TableSpec
from loader.snapshot.writer import export_snapshot
from router.feature_schema import FeatureSchema
from router.hot_rows import HotRows
from router.id_mapping import IdMapper
from router.plan import Plan
from router.replicas import ReplicatedShard
from router.router import Router
from shard_node.bags import Float32Array, KeyedBags
from shard_node.engine.loading import load_tables
from shard_node.node import Shard, ShardNode
from shard_node.wire.address import Address
from shard_node.wire.client import ShardClient
from shard_node.wire.server import NodeServer

MODEL = "bench"
DISTINCT_ROWS = 1 << 16
"""Rows repeat after so many: random enough to fill codes, few enough to write gigabytes in seconds."""
START_TIMEOUT_S = 300.0


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

    def distinct_rows(self) -> Float32Array:
        """Draw float32 [DISTINCT_ROWS, embedding_dim], the block that every table repeats."""
        rng = np.random.default_rng(7)
        return rng.standard_normal((DISTINCT_ROWS, self.embedding_dim), dtype=np.float32)

    def export(self, store: Path) -> Snapshot:
        """Write and open the snapshot; takes some seconds for each gigabyte."""
        block = self.distinct_rows()

        def blocks() -> Iterator[Float32Array]:
            for first in range(0, self.rows, DISTINCT_ROWS):
                yield block[: self.rows - first]

        spec = self.spec()
        rows = {table.name: RowsFromBlocks(blocks(), self.rows, self.embedding_dim) for table in spec.tables}
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
    node.stage(snapshot.spec.model, snapshot.version, load_tables(snapshot, plan.partition(shard), plan.digest))
    node.flip(snapshot.spec.model, snapshot.version)
    return node


def make_router(snapshot: Snapshot, plan: Plan, shards: Sequence[Shard], hot: HotRows | None = None) -> Router:
    """Make a router over all shards."""
    schema = FeatureSchema.of(snapshot.spec)
    return Router(schema, IdMapper.of_snapshot(snapshot, schema), plan, shards, hot=hot)


class NodeProcess(NamedTuple):
    """A process that runs a shard node."""

    address: Address
    process_id: int

    def connect(self, snapshot: Snapshot, plan: Plan, shard: int = 0) -> ReplicatedShard:
        """Make a connection to it."""
        return ReplicatedShard(plan, shard, snapshot.identity, [ShardClient(self.address)])


@contextmanager
def node_process(snapshot: Path, shard: int = 0, num_shards: int = 1) -> Iterator[NodeProcess]:
    """Run one shard's node in a process behind a Unix socket, one card, one thread."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        address = f"unix:{folder}/node.sock"
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe()
        process = context.Process(target=_serve, args=(snapshot, shard, num_shards, address, sender), daemon=True)
        process.start()
        try:
            if not receiver.poll(START_TIMEOUT_S):
                raise TimeoutError(f"the shard node was not ready within {START_TIMEOUT_S:g} s")
            receiver.recv()
            assert process.pid is not None
            yield NodeProcess(Address.parse(address), process.pid)
        finally:
            process.terminate()
            process.join()


def _serve(path: Path, shard: int, num_shards: int, address: str, ready: Connection) -> None:
    torch.set_num_threads(1)
    snapshot = Snapshot.open(path, verify=False)
    node = make_node(snapshot, Plan.make(snapshot.spec, num_shards), shard)

    async def run() -> None:
        server = NodeServer(node)
        await server.start([Address.parse(address)])
        ready.send("ready")
        await asyncio.Event().wait()

    uvloop.run(run())
