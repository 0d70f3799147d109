"""What the lookup benchmark measures on: a real snapshot of the wanted size, loaded every way that is compared."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import uvloop

from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec, TableSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.row_source import RowsFromBlocks
from loader.snapshot.writer import export_snapshot
from router.feature_schema import FeatureSchema
from router.id_mapping import IdMapper
from router.plan import Plan
from router.replicas import ReplicatedShard
from router.router import Router
from shard_node.bags import Float32Array, Int64Array, KeyedBags
from shard_node.engine.arena import Arena, allocate_rows, row_bytes_of
from shard_node.engine.loading import load_tables
from shard_node.node import LocalShard, Shard, ShardNode
from shard_node.wire.address import Address
from shard_node.wire.client import ShardClient
from shard_node.wire.server import NodeServer

MODEL = "bench"
# Rows repeat after this many: random enough to fill codes, small enough to make gigabytes in seconds.
DISTINCT_ROWS = 1 << 16
SERVER_START_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the tables: `num_tables` of equal size, `table_bytes` together, one feature each."""

    embedding_dim: int
    num_tables: int
    table_bytes: int

    @property
    def rows_per_table(self) -> int:
        """Rows of each table."""
        return max(1, self.table_bytes // row_bytes_of("int8", self.embedding_dim) // self.num_tables)

    def spec(self) -> ModelSpec:
        """The model: int8 rows, ids that are rows."""
        names = [f"f{number:02d}" for number in range(self.num_tables)]
        return ModelSpec(
            model=MODEL,
            tables=tuple(
                TableSpec(
                    name=name,
                    num_embeddings=self.rows_per_table,
                    embedding_dim=self.embedding_dim,
                    feature_names=(name,),
                )
                for name in names
            ),
            features=tuple(FeatureSpec(name=name, side="candidate") for name in names),
            dense_model=DenseModelSpec(kind="mlp"),
        )


def distinct_rows(embedding_dim: int) -> Float32Array:
    """float32 [DISTINCT_ROWS, embedding_dim], the block that every table repeats."""
    rows: Float32Array = np.random.default_rng(7).standard_normal((DISTINCT_ROWS, embedding_dim), dtype=np.float32)
    return rows


def write_snapshot(store: Path, shape: Shape) -> Path:
    """Exports the shape's snapshot; takes some seconds for each gigabyte."""
    block = distinct_rows(shape.embedding_dim)

    def blocks() -> Iterator[Float32Array]:
        for first in range(0, shape.rows_per_table, DISTINCT_ROWS):
            yield block[: shape.rows_per_table - first]

    rows = {
        table.name: RowsFromBlocks(blocks(), table.num_embeddings, table.embedding_dim) for table in shape.spec().tables
    }
    return export_snapshot(store, shape.spec(), rows=rows, dense={"unused": torch.zeros(1)})


def make_node(snapshot: Snapshot, num_cards: int) -> tuple[Plan, ShardNode]:
    """The whole model on one node."""
    plan = Plan.make(snapshot.spec, cards_per_shard=num_cards)
    node = ShardNode(plan.identity(0))
    node.stage(MODEL, snapshot.version, load_tables(snapshot, plan.partition(0), plan.digest))
    node.flip(MODEL, snapshot.version)
    return plan, node


def make_router(snapshot: Snapshot, plan: Plan, shard: Shard) -> Router:
    """A router over one shard."""
    schema = FeatureSchema.of(snapshot.spec)
    return Router(schema, IdMapper(schema, {}), plan, [shard])


def local_router(snapshot: Snapshot, num_cards: int) -> Router:
    """The embedded default: the node is in this process."""
    plan, node = make_node(snapshot, num_cards)
    return make_router(snapshot, plan, LocalShard(node))


@contextmanager
def node_process(snapshot_path: Path) -> Iterator[Address]:
    """A shard node in a process of its own behind a Unix socket, one card, one thread."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        address = f"unix:{folder}/node.sock"
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(snapshot_path, address, theirs), daemon=True)
        process.start()
        try:
            if not ours.poll(SERVER_START_TIMEOUT_S):
                raise TimeoutError(f"the shard node was not ready within {SERVER_START_TIMEOUT_S} s")
            ours.recv()
            yield Address.parse(address)
        finally:
            process.terminate()
            process.join()


def _serve(snapshot_path: Path, address: str, ready: Connection) -> None:
    torch.set_num_threads(1)
    _, node = make_node(Snapshot.open(snapshot_path, verify=False), 1)

    async def run() -> None:
        server = NodeServer(node)
        await server.start([Address.parse(address)])
        ready.send("ready")
        await asyncio.Event().wait()

    uvloop.run(run())


def remote_router(snapshot: Snapshot, address: Address) -> Router:
    """A router whose only shard is behind a socket."""
    plan = Plan.make(snapshot.spec)
    shard = ReplicatedShard(plan, 0, snapshot.identity, [ShardClient(address)])
    return make_router(snapshot, plan, shard)


def bare_arena(snapshot: Snapshot, shape: Shape) -> Arena:
    """All tables in one arena, for calling the torch op with nothing around it."""
    rows = allocate_rows(shape.rows_per_table * shape.num_tables, row_bytes_of("int8", shape.embedding_dim))
    for number, table in enumerate(snapshot.spec.tables):
        first = number * shape.rows_per_table
        for begin in range(0, shape.rows_per_table, DISTINCT_ROWS):
            count = min(DISTINCT_ROWS, shape.rows_per_table - begin)
            rows[first + begin : first + begin + count] = snapshot.read_rows(table.name, begin, count)
    return Arena("int8", shape.embedding_dim, rows, 0, "ram")


def float32_table(shape: Shape) -> torch.nn.EmbeddingBag:
    """The same rows in float32, all tables in one, as `nn.EmbeddingBag` users have them."""
    rows = shape.rows_per_table * shape.num_tables
    weight = torch.empty(rows, shape.embedding_dim)
    block = torch.from_numpy(distinct_rows(shape.embedding_dim))
    for table in range(shape.num_tables):
        part = weight[table * shape.rows_per_table : (table + 1) * shape.rows_per_table]
        for first in range(0, part.shape[0], DISTINCT_ROWS):
            part[first : first + DISTINCT_ROWS] = block[: part.shape[0] - first]
    return torch.nn.EmbeddingBag.from_pretrained(weight, mode="sum", include_last_offset=True)


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch in the forms that the compared calls take.

    Attributes:
        bags: raw ids by feature, for the router.
        slots: int64 [n], rows in the order of all tables one after the other, for calls on one arena.
    """

    bags: KeyedBags
    slots: Int64Array


def make_batch(shape: Shape, rng: np.random.Generator, batch: int, hotness: int) -> Batch:
    """Uniform ids: the worst case for caches."""
    num_bags = shape.num_tables * batch
    values = rng.integers(0, shape.rows_per_table, num_bags * hotness)
    bags = KeyedBags.from_lengths(
        np.arange(shape.num_tables, dtype=np.int32),
        np.full(shape.num_tables, batch, np.int64),
        np.full(num_bags, hotness, np.int64),
        values,
    )
    base = np.arange(shape.num_tables, dtype=np.int64) * shape.rows_per_table
    return Batch(bags, values + np.repeat(base, batch * hotness))
