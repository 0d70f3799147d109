"""What a shard node tells of rows that it pooled: no later delta than they have, and that of the same generation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from router.plan import Plan
from shard_node.answer import EXACT, FLOAT32_SUMS, ReplyEncoding, add_answers
from shard_node.bags import TableLayout
from shard_node.errors import GenerationNotFoundError, InvalidBagsError
from shard_node.freshness import FORKED_AGE_MS, UNKNOWN_AGE_MS
from shard_node.node import DeltaPosition, LoadedTables, ShardNode
from shard_node.split import whole
from shardrank_testing.bags import bags_of
from shardrank_testing.deltas import delta_spec, encoded, export_state, load_version

SPEC = delta_spec(("fp32",), rows=4)
MODEL, VERSION = SPEC.model, 1
WAIT_S = 30.0
BAGS = bags_of({0: [[0], [1], [2], [3]]})


def rows(sequence: int) -> np.ndarray:
    """What rows hold after so many deltas."""
    return np.full((4, 4), sequence, np.float32)


def apply(tables: LoadedTables, sequence: int) -> None:
    """As a follower does: the rows first, then the number."""
    tables.engine.write_rows(0, np.arange(4), encoded(SPEC.tables[0], rows(sequence)))
    tables.deltas.applied(sequence, 0.0, 4, 0.0)


@pytest.fixture
def tables(tmp_path) -> Callable[[], LoadedTables]:
    snapshot = export_state(tmp_path, SPEC, {"fp32": rows(0)}, VERSION)
    return lambda: load_version(snapshot)


@pytest.fixture
def node(tables) -> Iterator[ShardNode]:
    found = ShardNode(Plan.make(SPEC).identity(0))
    found.generations.stage(MODEL, VERSION, tables())
    found.generations.flip(MODEL, VERSION)
    yield found
    found.close()


def meanwhile(monkeypatch, loaded: LoadedTables, happens: Callable[[], None]) -> None:
    """Has something happen once, when the rows are about to be looked at."""
    left = [happens]

    def after(look_up):
        def looked_up(bags, **forms):
            if left:
                left.pop()()
            return look_up(bags, **forms)

        return looked_up

    for name in ("pool", "answer"):
        monkeypatch.setattr(loaded.engine, name, after(getattr(loaded.engine, name)))


def answered(node: ShardNode, forms: ReplyEncoding = FLOAT32_SUMS) -> tuple[np.ndarray, int]:
    answer = node.answer(MODEL, VERSION, BAGS, forms)
    return add_answers(TableLayout.of(SPEC), BAGS, [whole(BAGS)], [answer])[0], answer.sequence


by_every_way = pytest.mark.parametrize("ask", [answered, partial(answered, forms=EXACT)], ids=["sums", "stored"])


@by_every_way
def test_rows_come_with_their_last_applied_delta(node, ask):
    loaded = node.generations.payload(MODEL, VERSION)
    for sequence in (0, 1, 7):
        if sequence:
            apply(loaded, sequence)
        sums, reported = ask(node)
        np.testing.assert_array_equal(sums, rows(sequence))
        assert reported == sequence == node.generations.payload(MODEL, VERSION).deltas.sequence


def test_answers_have_the_age_of_their_rows(node):
    deltas = node.generations.payload(MODEL, VERSION).deltas
    assert node.answer(MODEL, VERSION, BAGS).age_ms == UNKNOWN_AGE_MS
    deltas.seen(0, time.time() - 3)
    assert 3000 <= node.answer(MODEL, VERSION, BAGS).age_ms < 60_000
    deltas.now = replace(deltas.now, forked=True)
    assert node.answer(MODEL, VERSION, BAGS, EXACT).age_ms == FORKED_AGE_MS


@by_every_way
def test_a_delta_during_a_lookup_is_not_reported(node, monkeypatch, ask):
    loaded = node.generations.payload(MODEL, VERSION)
    apply(loaded, 3)
    meanwhile(monkeypatch, loaded, lambda: apply(loaded, 4))
    sums, reported = ask(node)
    # Rows may be newer than what is reported, never older.
    np.testing.assert_array_equal(sums, rows(4))
    assert reported == 3


@by_every_way
def test_rows_and_their_delta_are_of_one_generation(node, tables, monkeypatch, ask):
    loaded = node.generations.payload(MODEL, VERSION)
    apply(loaded, 5)
    retiring = []

    def retire() -> None:
        # A lookup keeps its rows: they are not freed, and no others get their version's number.
        retiring.append(node.generations.retire(MODEL, VERSION))
        assert (retiring[0].state, retiring[0].leases) == ("draining", 1)

    meanwhile(monkeypatch, loaded, retire)
    sums, sequence = ask(node)
    np.testing.assert_array_equal(sums, rows(5))
    assert sequence == 5
    assert retiring[0].retired.wait(WAIT_S)
    node.generations.stage(MODEL, VERSION, tables())
    sums, sequence = ask(node)
    np.testing.assert_array_equal(sums, rows(0))
    assert sequence == 0
    # A lookup that fails keeps no generation.
    with pytest.raises(GenerationNotFoundError, match="version 2 of model"):
        node.answer(MODEL, 2, BAGS)
    with pytest.raises(InvalidBagsError):
        node.answer(MODEL, VERSION, BAGS.with_values(np.full(4, 99), None))
    assert [generation.leases for generation in node.generations.all()] == [0]


def test_a_position_is_behind_until_all_deltas_are_applied():
    position = DeltaPosition(delta_base=3, last_delta=7)
    assert (position.sequence, position.now.published_at) == (7, None)
    assert position.now.age_ms(100.0) == UNKNOWN_AGE_MS
    position = DeltaPosition(1, 0)
    position.seen(2, 100.0)
    position.seen(3, 101.0)
    assert (position.now.fresh_at, position.now.lag) == (None, 3)
    for sequence in (1, 2, 3):
        position.applied(sequence, 90.0 + sequence, 10, 102.0)
    position.seen(3, 103.0)
    progress = position.now
    assert (progress.fresh_at, progress.lag, progress.rows) == (103.0, 0, 30)
    assert progress.published_at == 93.0


def test_a_position_catches_up_with_the_first_look():
    """Deltas that are published later do not count, and nothing makes it fall behind again."""
    position = DeltaPosition(1, 0)
    assert not position.now.has_caught_up
    position.seen(2, 100.0)
    found = []
    for sequence in (1, 2, 3):
        position.seen(9, 101.0)
        found.append(position.now.has_caught_up)
        position.applied(sequence, 90.0, 10, 102.0)
    assert [*found, position.now.has_caught_up] == [False, False, True, True]


def test_age_counts_from_the_last_complete_moment():
    """A reason stays until the next delta is applied."""
    position = DeltaPosition(1, 0)
    position.seen(0, 100.0)
    assert position.now.age_ms(100.5) == 500
    position.seen(5, 110.0)
    position.refused("corrupt")
    position.seen(5, 110.0)
    assert (position.now.reason, position.now.refused) == ("corrupt", 1)
    assert position.now.age_ms(110.0) == 10_000
    position.applied(1, 104.0, 1, 111.0)
    assert position.now.reason == ""
    assert position.now.age_ms(111.0) == 7000
    # A publisher's clock that is ahead makes nothing fresher than now.
    position.applied(2, 500.0, 1, 112.0)
    assert position.now.age_ms(112.0) == 0
    assert position.now.published_at == 500.0
