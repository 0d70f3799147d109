"""How far behind, and how stale: what is told follows from what was seen and applied."""

from __future__ import annotations

import pytest

from shard_node.node import DeltaPosition


def test_a_position_is_behind_until_all_deltas_are_applied():
    position = DeltaPosition(delta_base=3, last_delta=7)
    assert (position.sequence, position.snapshot().published_at) == (7, None)
    assert position.snapshot().staleness_s(100.0) is None
    position = DeltaPosition(1, 0)
    position.seen(2, 100.0)
    position.seen(3, 101.0)
    assert (position.snapshot().fresh_at, position.snapshot().lag) == (None, 3)
    for sequence in (1, 2, 3):
        position.applied(sequence, 90.0 + sequence, 10, 102.0)
    position.seen(3, 103.0)
    progress = position.snapshot()
    assert (progress.fresh_at, progress.lag, progress.batches, progress.rows) == (103.0, 0, 3, 30)
    assert progress.published_at == 93.0


def test_staleness_counts_from_the_last_complete_moment():
    position = DeltaPosition(1, 0)
    position.seen(0, 100.0)
    assert position.snapshot().staleness_s(100.5) == pytest.approx(0.5)
    position.seen(5, 110.0)
    assert position.snapshot().staleness_s(110.0) == pytest.approx(10.0)
    position.applied(1, 104.0, 1, 111.0)
    assert position.snapshot().staleness_s(111.0) == pytest.approx(7.0)
    # A publisher's clock that is ahead makes nothing fresher than now.
    position.applied(2, 500.0, 1, 112.0)
    assert position.snapshot().staleness_s(112.0) == 0.0
    assert position.snapshot().published_at == 500.0


def test_a_reason_stays_until_the_next_delta_is_applied():
    position = DeltaPosition(1, 0)
    position.seen(1, 100.0)
    position.refused("corrupt")
    position.seen(1, 101.0)
    assert (position.snapshot().reason, position.snapshot().refused) == ("corrupt", 1)
    position.applied(1, 100.0, 1, 102.0)
    assert position.snapshot().reason == ""
