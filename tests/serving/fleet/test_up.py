"""`shardrank up` and `shardrank serve` as their users meet them: real processes, real ports, real kills."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from serving.training.trainer import train_version
from shardrank_testing.movielens import small_interactions
from shardrank_testing.processes import Program, command_line, descendants, is_alive, running, wait_until
from shardrank_testing.snapshots import rewrite_manifest

ANY_PORTS = ("--http-port", "0", "--grpc-port", "0")


@pytest.fixture(scope="module", autouse=True)
def run_directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # A fleet that fails or is killed leaves its logs behind; here they are to go with the test's own files.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("t")))
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("up")
    train_version(small_interactions(num_ratings=2000), folder, seed=0, epochs=1)
    return folder


@pytest.fixture(scope="module")
def request_document() -> dict[str, Any]:
    from serving.training.dataset import FilmsDataset, evaluation_requests, films_spec

    interactions = small_interactions(num_ratings=2000)
    spec = films_spec(interactions)
    requests = evaluation_requests(FilmsDataset.split(interactions, seed=0), spec).requests
    # Many candidates, so that every shard has some of the rows.
    one = requests.request(int(requests.num_candidates.argmax()))
    ids = {name: values.tolist() for name, values in one.values.items()}
    genres = np.split(one.values["genre"], np.cumsum(one.lengths["genre"])[:-1])
    return {
        "context": {"sparse": {"user_id": ids["user_id"], "history": ids["history"]}},
        "candidates": {"sparse": {"film_id": ids["film_id"], "genre": [bag.tolist() for bag in genres]}},
        "timeout_ms": 2000,
    }


class Fleet:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.url = program.read_until(r"(http://127.0.0.1:\d+)")[1]
        self.grpc_port = int(program.read_until(r"gRPC: 127.0.0.1:(\d+)")[1])

    def rank(self, document: dict[str, Any]) -> httpx.Response:
        # One connection for each request, so that the kernel spreads them over the workers.
        return httpx.post(f"{self.url}/v1/models/films:rank", json=document, timeout=20)

    def pid_of(self, pattern: str) -> int:
        found = [pid for pid in descendants(self.program.process.pid) if re.search(pattern, command_line(pid))]
        assert len(found) == 1, found
        return found[0]


@pytest.fixture(scope="module")
def fleet(store: Path) -> Iterator[Fleet]:
    shape = ("--shards", "2", "--cards", "2", "--workers", "2", "--replicate-bytes", "0")
    with running("--log-level", "info", "up", "--store", str(store), *shape, *ANY_PORTS, is_forked=False) as program:
        yield Fleet(program)


def test_every_process_is_ready_before_the_ports_are_printed(fleet: Fleet, request_document: dict[str, Any]) -> None:
    for name in ("coordinator", "shard-0-0", "shard-1-0", "serve-0", "serve-1"):
        assert f"{name} is ready\n" in fleet.program.output
    assert re.search(r"^on every shard: none; split over 2 shards: .*films", fleet.program.output, re.MULTILINE)
    answers = [fleet.rank(request_document) for _ in range(8)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.text for answer in answers}) == 1
    assert answers[0].json()["version"] == 1
    assert "started by exec" not in fleet.program.output
    # What only supervises has no use for it.
    assert "libtorch" not in Path(f"/proc/{fleet.program.process.pid}/maps").read_text()


def test_metrics_of_all_workers_are_added_up(fleet: Fleet, request_document: dict[str, Any]) -> None:
    def answered() -> float:
        text = httpx.get(f"{fleet.url}/metrics").text
        return sum(
            float(line.split()[-1])
            for line in text.splitlines()
            if line.startswith("shardrank_requests_total{") and 'method="rank"' in line and 'status="ok"' in line
        )

    before = answered()
    for _ in range(16):
        fleet.rank(request_document)
    assert answered() == before + 16


def test_a_killed_shard_node_costs_503_until_it_is_back(fleet: Fleet, request_document: dict[str, Any]) -> None:
    scores = fleet.rank(request_document).json()["scores"]
    node = fleet.pid_of(r" shard-node .*--shard 0/2 ")
    os.kill(node, signal.SIGKILL)
    statuses = []
    # The node takes longer to start than a request to fail, so the first ones meet no node.
    while (answer := fleet.rank(request_document)).status_code != 200:
        statuses.append(answer.status_code)
        assert answer.json()["error"]["kind"]
        assert len(statuses) < 100_000
    assert set(statuses) == {503}
    assert answer.json()["scores"] == scores
    assert fleet.pid_of(r" shard-node .*--shard 0/2 ") != node
    # The workers find out one after the other.
    wait_until(lambda: {fleet.rank(request_document).status_code for _ in range(16)} == {200}, "every worker to see it")


def test_a_killed_worker_is_replaced_and_the_others_go_on(fleet: Fleet, request_document: dict[str, Any]) -> None:
    pids = [pid for pid in descendants(fleet.program.process.pid) if " serve " in command_line(pid)]
    assert len(pids) == 2
    os.kill(pids[0], signal.SIGKILL)
    # Reaped by its supervisor: before that, threads of it may still hold the listening socket.
    wait_until(lambda: not Path(f"/proc/{pids[0]}").exists(), "the worker to be gone")
    assert fleet.rank(request_document).status_code == 200
    fleet.program.read_until(r"serve-\d serves again \(restart 1\)")
    assert {fleet.rank(request_document).status_code for _ in range(8)} == {200}


def test_sigterm_ends_the_fleet_with_code_0_and_no_orphans(fleet: Fleet) -> None:
    # The last test of this fleet.
    below = descendants(fleet.program.process.pid)
    assert len(below) == 6
    assert fleet.program.stop(signal.SIGTERM) == 0
    assert fleet.program.output.endswith("stopped\n")
    assert not any(map(is_alive, below))
    logs = re.search(r"^logs: (.+)$", fleet.program.output, re.MULTILINE)
    assert logs is not None
    assert not Path(logs[1]).exists()


def test_of_two_replicas_one_may_die_a_node_does_not_come_back_with_damaged_files_and_no_child_is_left(
    store: Path, request_document: dict[str, Any], tmp_path: Path
) -> None:
    shutil.copytree(store, tmp_path / "store", ignore=shutil.ignore_patterns(".registry"))
    shape = ("--shards", "1", "--replicas", "2", "--replicate-bytes", "0")
    with running("up", "--store", str(tmp_path / "store"), *shape, *ANY_PORTS) as program:
        served = Fleet(program)
        assert served.rank(request_document).status_code == 200
        below = descendants(program.process.pid)
        assert len(below) == 5
        nodes = [pid for pid in below if " shard-node " in command_line(pid)]
        rows = next((tmp_path / "store" / "films" / "1").glob("tables/*/rows-*.safetensors"))
        content = bytearray(rows.read_bytes())
        content[-1] ^= 1
        rows.write_bytes(content)
        os.kill(nodes[0], signal.SIGKILL)
        assert {served.rank(request_document).status_code for _ in range(20)} == {200}
        program.read_until(rf"restart 1 of shard-0-\d failed: .*{rows.name}: SHA-256 is")
        assert served.rank(request_document).status_code == 200
        os.kill(nodes[1], signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{nodes[1]}").exists(), "the second node to be gone")
        answer = served.rank(request_document)
        assert answer.status_code == 503
        assert answer.json()["error"]["kind"] == "shard_unavailable"
        below = descendants(program.process.pid)
        program.process.kill()
        wait_until(lambda: not any(map(is_alive, below)), "the children to die")


def shardrank(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serving.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_version_that_misses_its_golden_scores_is_not_served_and_its_worker_says_why(
    store: Path, tmp_path: Path
) -> None:
    shutil.copytree(store, tmp_path / "store", ignore=shutil.ignore_patterns(".registry"))
    # A tolerance that quantised rows can't meet.
    rewrite_manifest(tmp_path / "store" / "films" / "1", lambda manifest: manifest["golden"].update(tolerance=1e-9))
    result = shardrank("up", "--store", str(tmp_path / "store"), "--shards", "1", *ANY_PORTS)
    assert result.returncode == 1
    first, last = result.stderr.splitlines()
    assert first.startswith("error: serve-0 does not serve: version 1 of 'films': ")
    assert "golden scores differ by up to" in first
    assert Path(last.removeprefix("its log: ")).is_file()
    assert "Traceback" not in result.stderr


def test_a_plan_that_the_snapshot_does_not_allow_is_refused_before_anything_starts(store: Path) -> None:
    result = shardrank("up", "--store", str(store), "--sharding", "range", "--replicate-bytes", "0", *ANY_PORTS)
    assert result.returncode == 1
    assert "error: sharding 'range' needs tables stored with that bucketing" in result.stderr


def test_a_port_that_another_server_has_is_refused_not_shared(store: Path) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for command in ("serve", "up"):
            result = shardrank(command, "--store", str(store), "--http-port", str(port), "--grpc-port", "0")
            assert result.returncode == 1
            assert f"error: can't bind 127.0.0.1 port {port}: Address already in use" in result.stderr


def test_serve_alone_holds_the_rows_itself_and_obeys_its_limits(
    store: Path, request_document: dict[str, Any], tmp_path: Path
) -> None:
    limits = tmp_path / "limits.json"
    limits.write_text(json.dumps({"max_candidates": 1}))
    arguments = ("--limits", str(limits), "--dtype", "float32", "--ranking-replicas", "2")
    with running("serve", "--snapshot", str(store / "films" / "1"), *arguments, *ANY_PORTS) as program:
        served = Fleet(program)
        refused = served.rank(request_document)
        assert refused.status_code == 400
        assert "max_candidates = 1" in refused.json()["error"]["message"]
        one = {
            "context": request_document["context"],
            "candidates": {"sparse": {name: ids[:1] for name, ids in request_document["candidates"]["sparse"].items()}},
        }
        assert len(served.rank(one).json()["scores"]) == 1
        assert httpx.get(f"{served.url}/v1/models/films").json()["dense_model"]["dtype"] == "float32"
        assert program.stop(signal.SIGINT) == 0
