"""Latency while things change: every change happens to a real fleet, and a comparison of them all."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator

import httpx
import numpy as np
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from click.testing import CliRunner

from loader.registry.fleet import delta_stream
from loader.snapshot.reader import Snapshot
from loader.stores import open_store
from loadtest import changing
from loadtest.changing import Changes, going_on
from loadtest.cli import loadtest
from loadtest.drill.config import UpdatingDrillConfig
from loadtest.drill.fleet import ServedFleet, served_fleet
from loadtest.peers.run import write_model
from loadtest.workloads.catalog import BenchShape

pytestmark = pytest.mark.nightly
SHAPE_MODEL = "bench-mlp"
SHAPE = BenchShape(features=3, context_features=2, embedding_dim=8, rows=500, dense=3, context_dense=2)


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory) -> Snapshot:
    return Snapshot.open(write_model(tmp_path_factory.mktemp("changing"), SHAPE, [1])[0])


@pytest.fixture(scope="module")
def fleet(portal, snapshot, tmp_path_factory) -> Iterator[ServedFleet]:
    """One shard with two replicas."""
    settings = UpdatingDrillConfig(shards=1, replicas=2, workers=1)
    given = settings.model_dump(include={"shards", "replicas", "workers", "shard_node", "serve"})
    folder = tmp_path_factory.mktemp("served")
    open_store(folder / "models").put(snapshot.path, snapshot.identity)
    starting = served_fleet(folder / "models", snapshot.spec, registry=str(folder / "registry"), **given)
    with portal.wrap_async_context_manager(starting) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def changes(portal, fleet, snapshot) -> Iterator[Changes]:
    """What may happen to it, for measurements of two seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changing, "SETTLE_S", 0.1)
        changes = Changes(fleet, snapshot, 500, 2.0)
        portal.call(changes.settle)
        yield changes


def go_on(portal: BlockingPortal, change: Callable[[asyncio.Event], Awaitable[None]], seconds: float) -> None:
    with going_on(portal, change):
        time.sleep(seconds)


def test_swaps_go_to_versions_that_were_there_before(portal, fleet, changes):
    for _ in range(2):
        before = portal.call(fleet.live_version)
        go_on(portal, changes.swaps, 0.1)
        assert portal.call(fleet.live_version) > before
        # Versions that are over are dropped, and new ones made.
        portal.call(changes.settle)
        assert portal.call(changes.lag) == ""


def test_changed_rows_are_applied_before_anything_else_is_measured(portal, fleet, changes):
    live, registry = portal.call(fleet.live_version), fleet.registry
    with changes.row_updates(portal):
        time.sleep(0.5)
    portal.call(changes.settle)
    last = portal.call(registry.registry.bounds, delta_stream(SHAPE_MODEL, live)).last
    assert last >= 1
    applied = [one.delta_sequence for node in portal.call(registry.nodes) for one in node.versions]
    assert max(applied) == last


def test_answers_are_of_the_last_dense_step(portal, fleet, changes):
    go_on(portal, changes.dense_steps, 0.1)
    portal.call(changes.settle)
    url = f"{fleet.server.target('json')}/v1/models/{SHAPE_MODEL}:rank"
    rng = np.random.default_rng(0)
    names = [f"feature-{number:03d}" for number in range(3)]
    context = {"sparse": {name: rng.integers(0, 500, 2).tolist() for name in names[:2]}, "dense": [0.1, 0.2]}
    candidates = {"sparse": {names[2]: [[1], [2, 3]]}, "dense": [[0.5], [0.1]]}
    answer = httpx.post(url, json={"context": context, "candidates": candidates}).json()
    assert answer["dense_step"] == 1
    assert len(answer["scores"]) == 2


def test_processes_take_turns_in_being_killed_and_restarted(portal, fleet, changes):
    before = fleet.process_ids()
    go_on(portal, changes.kill, 0.8)
    portal.call(changes.settle)
    killed = {name for name, number in fleet.process_ids().items() if number != before[name]}
    assert killed == {"shard-0-0"}
    before = fleet.process_ids()
    go_on(portal, changes.restarts, 0.1)
    portal.call(changes.settle)
    restarted = {name for name, number in fleet.process_ids().items() if number != before[name]}
    assert restarted == {"coordinator"}


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
