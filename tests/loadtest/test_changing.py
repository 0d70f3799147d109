"""Latency while things change: every change happens to a real fleet, and a comparison of them all."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import numpy as np
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from click.testing import CliRunner

from loader.registry.fleet import delta_stream
from loader.snapshot.reader import Snapshot
from loadtest import changing
from loadtest.changing import Change, Changes, served_fleet
from loadtest.cli import loadtest
from loadtest.peers.run import write_model
from loadtest.workloads.catalog import BenchShape

SHAPE_MODEL = "bench-mlp"
SHAPE = BenchShape(features=3, context_features=2, embedding_dim=8, rows=500, dense=3, context_dense=2)


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="module")
def changes(portal, tmp_path_factory) -> Iterator[Changes]:
    """What may happen to a fleet of one shard with two replicas, for measurements of two seconds."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(changing, "SETTLE_S", 0.1)
        snapshot = Snapshot.open(write_model(tmp_path_factory.mktemp("changing"), SHAPE, [1])[0])
        fleet = stack.enter_context(portal.wrap_async_context_manager(served_fleet(snapshot, 1, 2, 1)))
        changes = Changes(fleet, snapshot, 500, 2.0)
        portal.call(changes.settle)
        yield changes


def go_on(portal: BlockingPortal, change: Change, seconds: float) -> None:
    ended = portal.call(asyncio.Event)
    going_on, _ = portal.start_task(change, ended)
    time.sleep(seconds)
    portal.call(ended.set)
    going_on.result(60)


def test_swaps_go_to_versions_that_were_there_before(portal, changes):
    before = portal.call(changes.fleet.live_version)
    go_on(portal, changes.swaps, 0.1)
    after = portal.call(changes.fleet.live_version)
    assert after > before
    assert portal.call(changes.lag) == ""


def test_changed_rows_are_applied_before_anything_else_is_measured(portal, changes):
    live, registry = portal.call(changes.fleet.live_version), changes.fleet.registry
    go_on(portal, changes.row_updates, 0.5)
    portal.call(changes.settle)
    last = portal.call(registry.registry.bounds, delta_stream(SHAPE_MODEL, live)).last
    assert last >= 1
    applied = [one.delta_sequence for node in portal.call(registry.nodes) for one in node.versions]
    assert max(applied) == last


def test_answers_are_of_the_last_dense_step(portal, changes):
    go_on(portal, changes.dense_steps, 0.1)
    portal.call(changes.settle)
    url = f"{changes.fleet.server.target('json')}/v1/models/{SHAPE_MODEL}:rank"
    rng = np.random.default_rng(0)
    names = [f"feature-{number:03d}" for number in range(3)]
    context = {"sparse": {name: rng.integers(0, 500, 2).tolist() for name in names[:2]}, "dense": [0.1, 0.2]}
    candidates = {"sparse": {names[2]: [[1], [2, 3]]}, "dense": [[0.5], [0.1]]}
    answer = httpx.post(url, json={"context": context, "candidates": candidates}).json()
    assert answer["dense_step"] == 1
    assert len(answer["scores"]) == 2


def test_processes_take_turns_in_being_killed_and_restarted(portal, changes):
    before = changes.fleet.process_ids()
    go_on(portal, changes.kill, 0.8)
    portal.call(changes.settle)
    killed = {name for name, number in changes.fleet.process_ids().items() if number != before[name]}
    assert killed == {"shard-0-0"}
    before = changes.fleet.process_ids()
    go_on(portal, changes.restarts, 0.1)
    portal.call(changes.settle)
    restarted = {name for name, number in changes.fleet.process_ids().items() if number != before[name]}
    assert restarted == {"coordinator"}
    assert [changes.next_of("shard-"), changes.next_of("shard-")] == ["shard-0-1", "shard-0-0"]


@pytest.mark.nightly
def test_a_comparison_has_every_change_and_no_failed_request(tmp_path):
    file = tmp_path / "changing.json"
    given = ["--rounds", "1", "--seconds", "3", "--rows", "20000", "--rows-per-s", "2000", "--workers", "2"]
    done = CliRunner().invoke(loadtest, ["changing", *given, "--json", str(file)])
    assert done.exit_code in (0, 1), done.output
    document = json.loads(file.read_text())
    (table,) = document["tables"].values()
    changes = ["steady", "swaps", "2,000 changed rows/s", "dense steps every 2 s", "restarts", "kill -9 of a replica"]
    assert list(table["subjects"]) == changes
    for measures in table["subjects"].values():
        assert measures["failed"]["values"] == [0.0]
        assert 0 < measures["p50"]["median"] <= measures["p99"]["median"] <= measures["p99.9"]["median"]
    # The generator, which shares the cores, may have been late; nothing else may be wrong.
    assert all("generator" in problem or "sends used" in problem for problem in document["problems"])


def test_a_missing_environment_is_named_before_anything_is_written(tmp_path):
    done = CliRunner().invoke(loadtest, ["changing", "--triton", "--env-dir", str(tmp_path)])
    assert done.exit_code == 1
    assert "has no environment for triton" in str(done.exception)
