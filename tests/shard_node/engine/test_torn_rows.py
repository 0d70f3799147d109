"""Threads pool and answer while rows are rewritten: a row is wholly one of the two patterns, never a bit of each."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shard_node.answer import add_answers
from shard_node.bags import KeyedBags
from shard_node.engine.base import Engine
from shard_node.engine.reference import ReferenceEngine
from shard_node.split import whole
from shardrank_testing.card_engines import OnCards, engine_params
from shardrank_testing.deltas import delta_spec, encoded, export_state, load_version
from shardrank_testing.topologies import decoded_tables

ROWS, DIM = 512, 256
SPEC = delta_spec(("int8",), rows=ROWS).model_copy(
    update={"tables": (delta_spec(("int8",), rows=ROWS).tables[0].model_copy(update={"embedding_dim": DIM}),)}
)
WRITES, MOST_WRITES = 300, 100_000
TIMEOUT_S = 60.0


def pattern(value: float) -> np.ndarray:
    """Rows whose pooled values are all the same: a row that is half another one has two values."""
    return np.full((ROWS, DIM), value, np.float32)


def engine_of(kind: str | OnCards, tmp_path) -> Engine:
    state = {"int8": pattern(1.0)}
    if kind == "reference":
        return ReferenceEngine(SPEC, decoded_tables(SPEC, state))
    snapshot = export_state(tmp_path, SPEC, state, 1)
    if isinstance(kind, OnCards):
        return kind.load(snapshot)
    return load_version(snapshot, cards=2 if kind == "two cards" else 1, budget=0 if kind == "mapped" else None).engine


@pytest.mark.parametrize("kind", ["one card", "two cards", "mapped", "reference", *engine_params()])
def test_no_pooled_row_is_torn_and_no_pool_sees_half_a_write(kind, tmp_path):
    engine = engine_of(kind, tmp_path)
    rows = np.arange(ROWS, dtype=np.int64)
    patterns = [encoded(SPEC.tables[0], pattern(value)) for value in (1.0, 1024.0)]
    asked = rows[:: 16 if kind == "reference" else 1].copy()
    bags = KeyedBags.from_lengths(np.zeros(1, np.int32), np.array([asked.size]), np.ones(asked.size, np.int64), asked)
    done = threading.Event()
    wrong: list[list[float]] = []
    seen: set[float] = set()
    pools = [0, 0]

    def pooled(number: int) -> np.ndarray:
        if number == 0:
            return engine.pool(bags)[0]
        # One row for each bag: where an engine can, it copies them, and what is pooled later is the copy.
        return add_answers(engine.layout, bags, [whole(bags)], [engine.answer(bags)])[0]

    def read(number: int) -> None:
        while not done.is_set():
            values = np.unique(pooled(number))
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
            assert engine.write_rows(0, rows, patterns[writes % 2]) == ROWS
            writes += 1
        done.set()
        for reader in readers:
            reader.result(TIMEOUT_S)
    assert min(pools) >= 20
    assert wrong == []
    assert seen == {1.0, 1024.0}
    engine.close()
