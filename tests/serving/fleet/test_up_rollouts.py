"""Rollouts on a fleet that `shardrank up` runs: real processes under real requests, by the commands that users type."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from click.testing import CliRunner, Result

from serving.cli import main
from serving.training.trainer import train_version
from shardrank_testing.movielens import small_interactions
from shardrank_testing.processes import Program, command_line, descendants, is_alive, running, wait_until

ANY_PORTS = ("--http-port", "0", "--grpc-port", "0")
SHAPE = ("--shards", "2", "--replicas", "1", "--workers", "1", "--replicate-bytes", "0", *ANY_PORTS)
DOCUMENT = {
    "context": {"sparse": {"user_id": [1], "history": [2, 3]}},
    "candidates": {"sparse": {"film_id": [4, 5, 6], "genre": [[1], [2], [3]]}},
    "timeout_ms": 5000,
}


@pytest.fixture(scope="module", autouse=True)
def run_directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("t")))
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rolled")
    for seed in range(3):
        train_version(small_interactions(num_ratings=2000), folder, seed=seed, epochs=1)
    return folder


@pytest.fixture(scope="module")
def fleet(store: Path) -> Iterator[Program]:
    with running("--log-level", "info", "up", "--store", str(store), "--version", "1", *SHAPE) as program:
        program.read_until(r"gRPC: ")
        yield program


def url_of(program: Program) -> str:
    found = re.search(r"HTTP: (http://127.0.0.1:\d+)", program.output)
    assert found is not None
    return found[1]


def shardrank(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments], catch_exceptions=False)


def rank(url: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/models/films:rank", json=DOCUMENT, timeout=20)


@contextmanager
def requests_all_the_time(url: str) -> Iterator[list[tuple[int, Any, Any]]]:
    """Status, version and scores of one request after the other, while the block runs."""
    answers: list[tuple[int, Any, Any]] = []
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            answer = rank(url)
            document = answer.json()
            answers.append((answer.status_code, document.get("version"), tuple(document.get("scores", ()))))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield answers
    finally:
        stop.set()
        thread.join()


def test_a_version_is_published_rolled_out_and_rolled_back_under_requests(fleet: Program, store: Path) -> None:
    url = url_of(fleet)
    assert "films: version 1 is live, the store's latest is 3;" in fleet.output
    with requests_all_the_time(url) as answers:
        assert shardrank("publish", store / "films" / "2").exit_code == 0
        started = shardrank("rollout", "start", "films", 2, "--store", store, "--follow")
        assert started.exit_code == 0, started.output
        assert rank(url).json()["version"] == 2
        back = shardrank("rollback", "films", "--store", store, "--follow")
        assert back.exit_code == 0, back.output
        assert rank(url).json()["version"] == 1
    assert {status for status, _, _ in answers} == {200}
    # Each version has one set of scores, but for the rounding of batches of one and of two requests, and the three
    # phases follow each other.
    first, second = (np.array([scores for _, version, scores in answers if version == one]) for one in (1, 2))
    assert max(np.ptp(scores, axis=0).max() for scores in (first, second)) < 2e-3
    assert np.abs(first[0] - second[0]).max() > 2e-2
    changes = [version for position, (_, version, _) in enumerate(answers) if answers[position - 1][1] != version]
    assert changes in ([2, 1], [1, 2, 1])


def test_a_damaged_version_is_refused_with_the_file_and_the_old_one_serves_on(fleet: Program, store: Path) -> None:
    assert shardrank("publish", store / "films" / "3").exit_code == 0
    rows = next((store / "films" / "3").glob("tables/*/rows-*.safetensors"))
    content = bytearray(rows.read_bytes())
    content[-1] ^= 1
    rows.write_bytes(content)
    with requests_all_the_time(url_of(fleet)) as answers:
        result = shardrank("rollout", "start", "films", 3, "--store", store, "--follow")
    assert result.exit_code == 1, result.output
    assert rows.name in result.stderr
    assert "version 1 is live" in result.stderr
    assert rows.name in shardrank("rollout", "status", "films", "--store", store).output.replace("\n", "")
    assert {(status, version) for status, version, _ in answers} == {(200, 1)}


def test_a_killed_coordinator_is_replaced_and_goes_on(fleet: Program, store: Path) -> None:
    def coordinators() -> list[int]:
        below = descendants(fleet.process.pid)
        return [pid for pid in below if " coordinator " in command_line(pid)]

    (first,) = coordinators()
    os.kill(first, signal.SIGKILL)
    result = shardrank("rollout", "start", "films", 2, "--store", store, "--follow")
    assert result.exit_code == 0, result.output
    (second,) = coordinators()
    assert first != second
    assert rank(url_of(fleet)).json()["version"] == 2


def test_what_was_rolled_out_is_live_again_after_a_restart_of_everything(fleet: Program, store: Path) -> None:
    # The last test of this fleet.
    below = descendants(fleet.process.pid)
    assert fleet.stop(signal.SIGTERM) == 0
    assert not any(map(is_alive, below))
    with running("up", "--store", str(store), *SHAPE) as again:
        again.read_until("gRPC: ")
        assert "films: version 2 is live, the store's latest is 3;" in again.output
        assert rank(url_of(again)).json()["version"] == 2
        # A second fleet would take this one's place in the registry.
        second = CliRunner().invoke(main, ["up", "--store", str(store), *SHAPE])
        assert second.exit_code == 1
        assert "runs with registry" in second.stderr
        below = descendants(again.process.pid)
        again.process.kill()
        wait_until(lambda: not any(map(is_alive, below)), "the children to die")
    # Nodes that were killed are waited for until they have expired; another shape is then no contradiction.
    other = ("--shards", "1", "--version", "1", *ANY_PORTS)
    with running("up", "--store", str(store), *other) as last:
        last.read_until("gRPC: ")
        assert rank(url_of(last)).json()["version"] == 1
        assert last.stop(signal.SIGTERM) == 0
