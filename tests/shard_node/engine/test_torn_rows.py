"""Threads pool and answer while rows are rewritten: a row is wholly one of the two patterns, never a bit of each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from loader.deltas.batch import encode_rows
from loader.snapshot.manifest import ModelSpec
from shard_node.answer import add_answers
from shard_node.bags import KeyedBags
from shard_node.engine.base import Engine
from shard_node.engine.reference import ReferenceEngine
from shard_node.split import whole
from shardrank_testing.card_engines import OnCards, engine_params
from shardrank_testing.deltas import delta_spec, encoded, export_state, load_version
from shardrank_testing.snapshots import with_slices
from shardrank_testing.topologies import decoded_tables

ROWS, DIM = 512, 256
SLICES = (64, 64, 128)
ALL_ROWS = np.arange(ROWS, dtype=np.int64)
SPEC = delta_spec(("int8",), rows=ROWS).model_copy(
    update={"tables": (delta_spec(("int8",), rows=ROWS).tables[0].model_copy(update={"embedding_dim": DIM}),)}
)
WRITES, MOST_WRITES = 100, 100_000
TIMEOUT_S = 60.0


def pattern(value: float) -> np.ndarray:
    """Rows whose pooled values are all the same: a row that is half another one has two values."""
    return np.full((ROWS, DIM), value, np.float32)


def engine_of(kind: str | OnCards, spec: ModelSpec, tmp_path) -> Engine:
    state = {"int8": pattern(1.0)}
    if kind == "reference":
        return ReferenceEngine(spec, decoded_tables(spec, state))
    snapshot = export_state(tmp_path, spec, state, 1)
    if isinstance(kind, OnCards):
        return kind.load(snapshot)
    return load_version(snapshot, cards=2 if kind == "two cards" else 1, budget=0 if kind == "mapped" else None).engine


KINDS = ["one card", "two cards", "mapped", "reference", *engine_params()]


@pytest.mark.parametrize("kind", KINDS)
def test_no_pooled_row_is_torn(kind, tmp_path):
    engine = engine_of(kind, SPEC, tmp_path)
    patterns = [encoded(SPEC.tables[0], pattern(value)) for value in (1.0, 1024.0)]
    pool_while_rows_change(kind, engine, lambda number: engine.write_rows(0, ALL_ROWS, patterns[number]), ROWS)


@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_a_row_change_together(kind, tmp_path):
    spec = with_slices(SPEC, {"int8": SLICES})
    engine = engine_of(kind, spec, tmp_path)
    # Of one width and dtype, and of others: slices in one arena, and in several.
    assert len(engine.layout.groups) == len(set(SLICES)) < len(SLICES)
    patterns = [encode_rows(spec.tables[0], ALL_ROWS, pattern(value))[1] for value in (1.0, 1024.0)]
    tables = engine.layout.slices["int8"]
    written = ROWS * len(SLICES)
    pool_while_rows_change(kind, engine, lambda number: engine.write_rows(tables, ALL_ROWS, patterns[number]), written)


def pool_while_rows_change(kind: str | OnCards, engine: Engine, write: Callable[[int], int], written: int) -> None:
    """Pools and answers every row of every table, while `write` puts one of two patterns into all of them."""
    num_tables = len(engine.layout.tables)
    asked = ALL_ROWS[:: 16 if kind == "reference" else 1].copy()
    bags = KeyedBags.from_lengths(
        np.arange(num_tables, dtype=np.int32),
        np.full(num_tables, asked.size),
        np.ones(num_tables * asked.size, np.int64),
        np.tile(asked, num_tables),
    )
    done = threading.Event()
    wrong: list[list[float]] = []
    seen: set[float] = set()
    pools = [0, 0]

    def pooled(number: int) -> list[np.ndarray]:
        if number == 0:
            return engine.pool(bags)
        # One row for each bag: where an engine can, it copies them, and what is pooled later is the copy.
        return add_answers(engine.layout, bags, [whole(bags)], [engine.answer(bags)])

    def read(number: int) -> None:
        while not done.is_set():
            values = np.unique(np.concatenate([block.reshape(-1) for block in pooled(number)]))
            pools[number] += 1
            seen.update(values.tolist())
            if values.size != 1:
                wrong.append(values.tolist())

    with ThreadPoolExecutor(2) as threads:
        readers = [threads.submit(read, number) for number in range(2)]
        writes = 0
        while not any(reader.done() for reader in readers) and (
            writes < WRITES or ((min(pools) < 20 or len(seen) < 2) and writes < MOST_WRITES)
        ):
            assert write(writes % 2) == written
            writes += 1
        done.set()
        for reader in readers:
            reader.result(TIMEOUT_S)
    assert min(pools) >= 20
    assert wrong == []
    assert seen == {1.0, 1024.0}
    engine.close()
