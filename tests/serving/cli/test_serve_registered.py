"""`shardrank serve --registry`: a real process that is rolled out to and ends as it should, and its workers."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import numpy as np
import pytest

from serving.cli.serve import serve, worker_arguments
from shardrank_testing.command_line import ANY_PORTS
from shardrank_testing.processes import Program, descendants, is_alive, running, wait_until
from shardrank_testing.registered_fleet import nodes, publish, want
from shardrank_testing.serving_api import MODEL, ApiModel, api_request

REQUEST = api_request(1)


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    return tmp_path / "registry"


def flags(registry: Path, store: Path, *more: str) -> tuple[str, ...]:
    return ("serve", "--registry", str(registry), "--store", str(store), *more, *ANY_PORTS)


def live_version(program: Program) -> int:
    answer = program.rank(MODEL, REQUEST)
    assert answer.status_code == 200, answer.text
    return answer.json()["version"]


def assert_scores(program: Program, model: ApiModel) -> None:
    np.testing.assert_allclose(program.rank(MODEL, REQUEST).json()["scores"], model.scores(REQUEST), rtol=1e-4)


def test_a_process_with_rows_is_rolled_out_to_and_leaves_on_sigterm(
    versions: dict[int, ApiModel], store: Path, registry: Path
) -> None:
    publish(registry, *(model.path for model in versions.values()))
    want(registry, MODEL, live=1, hold=(1,), serve=(1,), follow=(1,))
    with running(*flags(registry, store, "--local", "--node-id", "x", "--dtype", "float32")) as program:
        assert live_version(program) == 1
        assert_scores(program, versions[1])
        record = nodes(registry)["x"]
        assert (record.kind, record.process_id, record.live) == ("serving", program.process.pid, {MODEL: 1})
        assert record.address == program.url
        want(registry, MODEL, hold=(1, 2), serve=(1, 2))
        wait_until(lambda: nodes(registry)["x"].has(MODEL, 2, "ready"), "version 2 to be ready")
        want(registry, MODEL, live=2)
        wait_until(lambda: live_version(program) == 2, "the flip")
        assert_scores(program, versions[2])
        assert httpx.get(f"{program.url}/readyz").status_code == 200
        assert program.stop() == 0
        assert nodes(registry) == {}


def test_workers_are_nodes(versions: dict[int, ApiModel], store: Path, registry: Path) -> None:
    publish(registry, versions[1].path)
    want(registry, MODEL, live=1, hold=(1,), serve=(1,))
    with running(*flags(registry, store, "--local", "--node-id", "x", "--workers", "2")) as program:
        assert live_version(program) == 1
        announced = nodes(registry)
        assert sorted(announced) == ["x-0", "x-1"]
        assert {node.address for node in announced.values()} == {program.url}
        below = descendants(program.process.pid)
        assert {node.process_id for node in announced.values()} <= set(below)
        assert program.stop(signal.SIGINT) == 0
        assert not any(is_alive(pid) for pid in below)
        assert nodes(registry) == {}


def test_without_a_desired_model_it_listens_and_is_not_ready(store: Path, registry: Path) -> None:
    with running("--log-level", "info", *flags(registry, store)) as program:
        port = program.read_until(r"listening on 127.0.0.1: HTTP (\d+)")[1]
        answer = httpx.get(f"http://127.0.0.1:{port}/readyz")
        assert answer.status_code == 503
        assert "which models are wanted" in answer.json()["problems"][""]
        assert httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
        assert program.stop() == 0


def test_workers_are_given_every_flag_but_the_registry(tmp_path: Path) -> None:
    kept = ["--model", "films", "--local", "--no-verify", "--max-staleness", "films=30", "--cards", "2"]
    kept += ["--memory-budget-gb", "1.5", "--store", str(tmp_path)]
    given = serve.make_context("serve", ["--registry", "redis://:secret@host", *kept, "--workers", "2"]).params
    arguments = worker_arguments(given, None)
    assert "secret" not in " ".join(arguments)
    found = serve.make_context("serve", ["--registry", "r", *arguments]).params
    assert {name for name in given if found[name] != given[name]} <= {"registry", "workers", "node_id"}
