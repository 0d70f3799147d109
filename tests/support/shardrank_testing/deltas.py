"""Deltas in tests: a published version, its loaded tables, and what rows are stored in them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.deltas.batch import DeltaBatch, checked_rows, encode_checked
from loader.deltas.chain import (
    DIGEST_BYTES,
    HEADS_BYTES,
    NOTHING,
    NUM_PARTITIONS,
    Commit,
    Tail,
    encode_commit,
    entry_digest,
    is_commit,
    partitions_of,
)
from loader.description import ModelDescription
from loader.registry import open_registry
from loader.registry.fleet import FleetRegistry, delta_stream
from loader.registry.registry import Registry, StreamEntry
from loader.snapshot.codecs import RowCodec
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.publishing import register
from loader.snapshot.reader import Snapshot
from loader.snapshot.tables import RowDtype, TableSpec
from router.plan import Plan
from shard_node.agent.delta_follower import DeltaFollower
from shard_node.cuda.card_engine import CardEngine
from shard_node.cuda.card_set import CardSet
from shard_node.engine.arena import NOT_HERE
from shard_node.engine.cpu import CpuEngine
from shard_node.engine.loading import load_tables
from shard_node.node import LoadedTables
from shardrank_testing.card_bytes import rows_on_cards
from shardrank_testing.divided import DividedModel, divided_model
from shardrank_testing.snapshots import model_of, table_of, write_snapshot

MODEL = "fresh"


def encode_rows(table: TableSpec, rows: Any, values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Changed rows of a table and how they are stored, as a publisher makes them."""
    numbers, floats = checked_rows(table.name, table.num_embeddings, table.embedding_dim, rows, values)
    return numbers, encode_checked(table, floats, f"table {table.name!r}", numbers)


def delta_spec(dtypes: tuple[RowDtype, ...] = ("int8", "int4", "fp16", "fp32"), rows: int = 300) -> ModelSpec:
    """One table per dtype, named after it, alternately in `range` and `mixed` order, dims 4, 6, 8, …"""
    order = ("range", "mixed")
    return model_of(
        [
            table_of(dtype, rows + 7 * number, 4 + 2 * number, dtype=dtype, bucketing=order[number % 2])
            for number, dtype in enumerate(dtypes)
        ],
        MODEL,
    )


def export_state(
    store: Path,
    spec: ModelSpec,
    state: dict[str, np.ndarray],
    version: int,
    last_delta: int | None = None,
    delta_base: int | None = None,
) -> Snapshot:
    """A snapshot of these float32 rows."""
    options = {"version": version, "last_delta": last_delta, "delta_base": delta_base, "rows_per_file": 256}
    return Snapshot.open(write_snapshot(store, spec, tables=state, **options)[0])


def all_divisions(seed: int) -> DividedModel:
    """One table of each way to divide one, and a plain one.

    `item` hot and cold, both of its dim; `film` in one part; `mixed` in blocks of 8 and 4 columns; `composed` of
    quotients and remainders; `narrow` projected; `plain`. Half of the rows of `item` and `film` are pruned.
    """

    def table(name: str, **fields: Any) -> dict[str, Any]:
        base = {"name": name, "num_embeddings": 600, "embedding_dim": 8, "feature_names": [f"f_{name}"]}
        return {**base, **fields}

    tables = [
        table("item", dtype={"hot": "fp16", "cold": "int4", "hot_share": 0.1}),
        table("film", num_embeddings=300),
        table("mixed", num_embeddings=200, blocks=[{"share": 0.25}, {"dim": 4}]),
        table("composed", id_mapping={"kind": "quotient_remainder", "buckets": 40}),
        table("narrow", embedding_dim=4, project_to=8),
        table("plain"),
    ]
    features = [{"name": one["feature_names"][0], "side": "candidate"} for one in tables]
    model = {"model": MODEL, "tables": tables, "features": features, "dense_model": {"kind": "mlp"}}
    return divided_model(ModelDescription.model_validate(model), pruned=("item", "film"), seed=seed)


def heads_of(tail: Tail) -> dict[int, bytes]:
    """The digest of the last part of each partition that has one."""
    digests = (tail.heads[at : at + DIGEST_BYTES] for at in range(0, HEADS_BYTES, DIGEST_BYTES))
    return {partition: digest for partition, digest in enumerate(digests) if digest != NOTHING}


def joined(heads: dict[int, bytes]) -> bytes:
    """The digests of all partitions, one behind the other."""
    return b"".join(heads.get(partition, NOTHING) for partition in range(NUM_PARTITIONS))


async def read_entry(registry: Registry, stream: str, entry: StreamEntry, tail: Tail | None) -> tuple[DeltaBatch, Tail]:
    """The whole delta of an entry of either format, checked to follow `tail`, if given, and where the stream ends."""
    heads = {} if tail is None else heads_of(tail)
    if not is_commit(entry.payload):
        batch = DeltaBatch.decode(entry.payload)
        assert batch.sequence == entry.sequence
        return batch, Tail(entry.sequence, entry_digest(entry.payload), joined(heads))
    commit = Commit.decode(entry.payload)
    assert commit.sequence == entry.sequence
    assert tail is None or (commit.previous, commit.predecessor) == (tail.sequence, tail.digest)
    every = np.ones(NUM_PARTITIONS, np.bool_)
    ranges = [(entry.sequence, *ends) for ends in commit.ranges(every)]
    whole, digests = commit.decode_parts(every, await registry.read_rows(stream, ranges), heads)
    assert whole is not None
    return whole, Tail(entry.sequence, commit.digest, joined({**heads, **digests}))


async def register_version(registry: Registry, snapshot: Snapshot) -> None:
    """Puts a snapshot on record, as `shardrank publish` does."""
    await register(FleetRegistry(registry), snapshot, clock=time.time)


def load_version(
    snapshot: Snapshot,
    cards: int = 1,
    budget: int | None = None,
    shards: int = 1,
    shard: int = 0,
    card_set: CardSet | None = None,
):
    """Its tables on a node of so many cards; rows beyond `budget` bytes are on disk."""
    if card_set is not None:
        cards = len(card_set.cards.cards)
    sharding = "table" if shards > 1 else "hash"
    plan = Plan.make(snapshot.spec, num_shards=shards, sharding=sharding, cards_per_shard=cards, replicate_bytes=0)
    return load_tables(snapshot, plan.partition(shard), plan.digest, memory_budget_bytes=budget, card_set=card_set)


def follow(registry: Registry, snapshot: Snapshot, tables: LoadedTables, **options) -> DeltaFollower:
    """The follower of a version's tables."""
    rows = tables.engine, tables.deltas, tables.partition
    return DeltaFollower(FleetRegistry(registry), snapshot.spec.model, snapshot.version, *rows, **options)


def stored_rows(engine: CpuEngine | CardEngine, table: str) -> npt.NDArray[np.uint8]:
    """The bytes of all rows of a table as they lie in an engine's arenas, in row order; zeros where it has none."""
    number = engine.layout.index[table]
    if isinstance(engine, CardEngine):
        for stream in engine._rows.order.streams:
            stream.synchronize()
        return rows_on_cards(engine, number)
    spec = engine.layout.tables[number]
    rows = np.arange(spec.num_embeddings, dtype=np.int64)
    is_local = engine._placement.locate_rows(number, rows)[0] != NOT_HERE
    out = np.zeros((rows.size, RowCodec(spec.dtype, spec.embedding_dim).row_bytes), np.uint8)
    out[is_local] = engine.read_rows(number, rows[is_local])
    return out


def assert_stored(engine: CpuEngine | CardEngine, snapshot: Snapshot) -> None:
    """Every row of an engine that holds all rows is, byte for byte, the snapshot's."""
    for table in snapshot.spec.stored_tables:
        expected = snapshot.read_rows(table.name, 0, table.num_embeddings)
        np.testing.assert_array_equal(stored_rows(engine, table.name), expected, err_msg=table.name)


def make_batch(spec: ModelSpec, table: str, sequence: int, rows, values) -> DeltaBatch:
    """A delta of a spec's table."""
    one = next(one for one in spec.tables if one.name == table)
    numbers, stored = encode_rows(one, rows, values)
    return DeltaBatch(
        model=spec.model,
        delta_base=1,
        base_version=1,
        sequence=sequence,
        published_at=1000.0 + sequence,
        table=table,
        dtype=one.dtype,
        embedding_dim=one.embedding_dim,
        rows=numbers,
        stored=stored,
        column_dims=one.column_dims,
    )


@dataclass(frozen=True)
class Written:
    """An entry of a stream: its delta, the bytes beside it (None in format 1), and where the stream ends with it."""

    batch: DeltaBatch
    payload: bytes
    rows: bytes | None
    tail: Tail


class StreamWriter:
    """A stream as it might be: entries of either format, which can be lost again. `put` writes it to a registry."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.entries: list[Written] = []

    @property
    def last(self) -> int:
        return self.entries[-1].tail.sequence if self.entries else 0

    def write(self, table: str, rows: Any, values: Any, sequence: int | None = None, form: int = 2) -> None:
        """Add a delta, of the next number unless another one is given."""
        tail = self.entries[-1].tail if self.entries else Tail()
        batch = make_batch(self.spec, table, sequence or tail.sequence + 1, rows, values)
        if form == 1:
            payload = batch.encode()
            self.entries.append(Written(batch, payload, None, Tail(batch.sequence, entry_digest(payload), tail.heads)))
        else:
            of_table = next(each for each in self.spec.tables if each.name == table)
            partitions = partitions_of(of_table, batch.rows)
            self.entries.append(Written(batch, *encode_commit(batch, partitions, tail, token=1)))

    async def put(self, registry: Registry, begin: int = 0, end: int | None = None) -> None:
        """Append its entries from `begin` to `end` to the model's stream."""
        stream, before = delta_stream(self.spec.model, 1), None
        for number, entry in enumerate(self.entries[:end]):
            put = StreamEntry(entry.tail.sequence, entry.payload)
            if number >= begin and entry.rows is None:
                await registry.append(stream, put.sequence, put.payload)
            elif number >= begin:
                await registry.commit(stream, put, entry.rows, before)
            before = put


def encoded(table: TableSpec, values: np.ndarray) -> npt.NDArray[np.uint8]:
    """Rows as a table stores them."""
    return RowCodec(table.dtype, table.embedding_dim).encode(np.asarray(values, np.float32))


def published_rows(registry: str | Path, tables: Iterable[str]) -> dict[str, dict[int, np.ndarray]]:
    """Return the float32 rows of all deltas of version 1, by table and number, as they were published last."""

    async def read() -> dict[str, dict[int, np.ndarray]]:
        opened, tail = open_registry(registry), None
        rows: dict[str, dict[int, np.ndarray]] = {name: {} for name in tables}
        for entry in await opened.read(delta_stream(MODEL, 1), 0, max_entries=10_000, max_bytes=1 << 30):
            batch, tail = await read_entry(opened, delta_stream(MODEL, 1), entry, tail)
            rows[batch.table] |= dict(zip(batch.rows.tolist(), batch.stored.copy().view(np.float32), strict=True))
        await opened.close()
        return rows

    return asyncio.run(read())
