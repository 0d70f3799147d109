"""Workers that share a port have as many connections as each other, by real processes and sockets."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardrank_testing.dealt_workers import Workers


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Workers]:
    # Longer than a socket's address may be.
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    workers = Workers(folder, 3)
    yield workers
    workers.close()


def test_connections_are_dealt_out_evenly_and_refilled_where_they_end(three: Workers) -> None:
    with contextlib.ExitStack() as kept:
        with contextlib.ExitStack() as short:
            assert sorted(three.connect(short, 30).values()) == [10, 10, 10]
        # Those have gone; what comes is even again, however they went.
        time.sleep(0.2)
        assert sorted(three.connect(kept, 31).values()) == [10, 10, 11]


def test_what_a_dead_worker_had_goes_to_the_others_and_its_successor_catches_up(three: Workers) -> None:
    with contextlib.ExitStack() as kept:
        assert sorted(three.connect(kept, 6).values()) == [2, 2, 2]
        process, _ = three.running[1]
        process.kill()
        process.join()
        assert sorted(three.connect(kept, 6).items()) == [(0, 3), (2, 3)]
        three.running[1] = three.start(1)
        found = three.connect(kept, 8)
        assert found[1] >= 5
        assert found.total() == 8


def test_a_worker_that_stops_loses_no_connection(three: Workers) -> None:
    process, stop = three.running[0]
    with contextlib.ExitStack() as kept:
        found = three.connect(kept, 9)
        stop.set()
        found += three.connect(kept, 60)
        process.join(20)
        assert process.exitcode == 0
        found += three.connect(kept, 9)
    assert found.total() == 78
    assert abs(found[1] - found[2]) <= 1
