"""`shardrank serve --registry`: flags, and a real process that is rolled out to and ends as it should."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from click.testing import CliRunner

from loader.registry.fleet import FleetRegistry, WantedModel
from loader.registry.opening import open_registry
from loader.snapshot.publishing import register
from loader.snapshot.reader import Snapshot
from serving.cli import main
from serving.cli.serve import serve, worker_arguments
from shardrank_testing.processes import Program, descendants, is_alive, running, wait_until
from shardrank_testing.serving_api import MODEL, ApiModel, api_request, write_api_model

ANY_PORTS = ("--http-port", "0", "--grpc-port", "0")


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[int, ApiModel]:
    store = tmp_path_factory.mktemp("store")
    return {version: write_api_model(store, version, seed=version) for version in (1, 2)}


def with_registry(folder: Path, work: Callable[[FleetRegistry], Awaitable[Any]]) -> Any:
    async def program() -> Any:
        registry = open_registry(folder)
        try:
            return await work(FleetRegistry(registry))
        finally:
            await registry.close()

    return asyncio.run(program())


def want(folder: Path, **changes: Any) -> None:
    def change(now: WantedModel | None) -> WantedModel:
        return (now or WantedModel(model=MODEL, epoch=1)).model_copy(update=changes)

    with_registry(folder, lambda fleet: fleet.update_wanted(MODEL, change))


def publish(folder: Path, model: ApiModel) -> None:
    with_registry(folder, lambda fleet: register(fleet, Snapshot.open(model.path), clock=time.time))


def nodes(folder: Path) -> dict[str, Any]:
    return {one.node_id: one for one in with_registry(folder, lambda fleet: fleet.nodes())}


def rank(url: str) -> tuple[int, list[float]]:
    answer = httpx.post(f"{url}/v1/models/{MODEL}:rank", json=api_request(1) | {"timeout_ms": 2000}, timeout=20)
    assert answer.status_code == 200, answer.text
    return answer.json()["version"], answer.json()["scores"]


def url_of(program: Program) -> str:
    return program.read_until(r"HTTP: (http://127.0.0.1:\d+)")[1]


def test_a_process_with_its_own_rows_is_rolled_out_to_and_leaves_on_sigterm(versions, tmp_path) -> None:
    store, registry = versions[1].path.parent.parent, tmp_path / "registry"
    for model in versions.values():
        publish(registry, model)
    want(registry, live=1, hold=(1,), serve=(1,), follow=(1,))
    fleet = ("--registry", str(registry), "--store", str(store), "--local", "--node-id", "serve-x")
    with running("serve", *fleet, "--dtype", "float32", *ANY_PORTS) as program:
        url = url_of(program)
        version, scores = rank(url)
        assert version == 1
        np.testing.assert_allclose(scores, versions[1].scores(api_request(1)), rtol=1e-4)
        record = nodes(registry)["serve-x"]
        assert (record.kind, record.process_id, record.live) == ("serving", program.process.pid, {MODEL: 1})
        assert record.address == url
        want(registry, hold=(1, 2), serve=(1, 2))
        wait_until(lambda: state(registry, 2) == "ready", "version 2 to be ready")
        want(registry, live=2)
        wait_until(lambda: rank(url)[0] == 2, "the flip")
        np.testing.assert_allclose(rank(url)[1], versions[2].scores(api_request(1)), rtol=1e-4)
        assert httpx.get(f"{url}/readyz").status_code == 200
        assert program.stop() == 0
        assert "serve-x" not in nodes(registry)


def state(registry: Path, version: int) -> str | None:
    report = nodes(registry)["serve-x"].report(MODEL, version)
    return None if report is None else report.state


def test_workers_are_nodes_of_their_own(versions, tmp_path) -> None:
    store, registry = versions[1].path.parent.parent, tmp_path / "registry"
    publish(registry, versions[1])
    want(registry, live=1, hold=(1,), serve=(1,))
    fleet = ("--registry", str(registry), "--store", str(store), "--local", "--node-id", "serve-x")
    with running("serve", *fleet, "--workers", "2", *ANY_PORTS) as program:
        url = url_of(program)
        assert rank(url)[0] == 1
        told = nodes(registry)
        assert sorted(told) == ["serve-x-0", "serve-x-1"]
        assert {one.address for one in told.values()} == {url}
        below = descendants(program.process.pid)
        assert {one.process_id for one in told.values()} <= set(below)
        assert program.stop(signal.SIGINT) == 0
        assert not any(is_alive(pid) for pid in below)
        assert nodes(registry) == {}


def test_without_a_wanted_model_it_listens_and_says_why_it_is_not_ready(versions, tmp_path) -> None:
    store, registry = versions[1].path.parent.parent, tmp_path / "registry"
    with running(
        "--log-level", "info", "serve", "--registry", str(registry), "--store", str(store), *ANY_PORTS
    ) as program:
        port = program.read_until(r"listening on 127.0.0.1: HTTP (\d+)")[1]
        answer = httpx.get(f"http://127.0.0.1:{port}/readyz")
        assert answer.status_code == 503
        assert "which models are wanted" in answer.json()["problems"][""]
        assert httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
        assert program.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--registry", "r"), "--registry needs --store"),
        (("--registry", "r", "--store", "s", "--version", "3"), "--version: not with --registry"),
        (("--registry", "r", "--store", "s", "--shard", "h:1"), "--shard: not with --registry"),
        (("--registry", "r", "--store", "s", "--cards", "2"), "--cards: with --registry only for --local rows"),
        (("--store", "s", "--local"), "--local: only with --registry"),
        (("--store", "s", "--max-staleness", "films=3"), "--max-staleness: only with --registry"),
        (("--store", "s", "--model", "a", "--model", "b"), "Several --model need --registry"),
        (("--store", "s", "--shard", "h:1", "--memory-budget-gb", "1"), "--memory-budget-gb is for rows in this"),
        (("--registry", "r", "--store", "s", "--max-staleness", "films=soon"), "seconds must be a number above 0"),
    ],
)
def test_flags_that_contradict_each_other_are_usage_errors(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(main, ["serve", *arguments], prog_name="shardrank")
    assert result.exit_code == 2
    assert message in re.sub(r"\s+", " ", result.output)


def test_workers_are_given_every_flag_but_the_registry(tmp_path) -> None:
    flags = [
        "--registry",
        "redis://:secret@host",
        "--store",
        str(tmp_path),
        "--model",
        "films",
        "--local",
        "--no-verify",
    ]
    flags += ["--max-staleness", "films=30", "--cards", "2", "--memory-budget-gb", "1.5", "--workers", "2"]
    options = serve.make_context("serve", flags).params
    arguments = worker_arguments(options, None)
    assert "secret" not in " ".join(arguments)
    text = " ".join(arguments)
    assert serve.make_context("serve", ["--registry", "r", *arguments]).params["max_staleness"] == (("films", "30"),)
    for part in ("--no-verify", "--model films", "--max-staleness films=30", "--local", "--cards 2"):
        assert part in text
    assert "--memory-budget-gb 1.5" in text
    assert "--advertise" not in text
