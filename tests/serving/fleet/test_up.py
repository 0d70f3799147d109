"""`shardrank up` and `shardrank serve` as their users meet them: real processes, ports, kills, and rollouts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from serving.training.trainer import train_version
from shardrank_testing.command_line import ANY_PORTS, shardrank
from shardrank_testing.movielens import small_interactions
from shardrank_testing.processes import Program, command_line, descendants, is_alive, running, wait_until
from shardrank_testing.snapshots import rewrite_manifest

SHAPE = ("--shards", "2", "--cards", "2", "--workers", "2", "--replicate-bytes", "0", *ANY_PORTS)
# Many candidates, so that every shard has some of the rows.
REQUEST: dict[str, Any] = {
    "context": {"sparse": {"user_id": [1], "history": [2, 3]}},
    "candidates": {"sparse": {"film_id": list(range(1, 41)), "genre": 40 * [[1]]}},
    "timeout_ms": 5000,
}


@pytest.fixture(scope="module", autouse=True)
def run_directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # A fleet that fails or is killed leaves its logs behind; here they are to go with the test's own files.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("t")))
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("up")
    for seed in range(3):
        train_version(small_interactions(num_ratings=2000), folder, seed=seed, epochs=1)
    return folder


@pytest.fixture
def other_store(store: Path, tmp_path: Path) -> Path:
    """A store of the first version alone, to be damaged."""
    shutil.copytree(store / "films" / "1", tmp_path / "store" / "films" / "1")
    return tmp_path / "store"


@pytest.fixture(scope="module")
def fleet(store: Path) -> Iterator[Program]:
    with running(
        "--log-level", "info", "up", "--store", str(store), "--version", "1", *SHAPE, is_forked=False
    ) as program:
        _ = program.url, program.grpc_target
        yield program


def damage_rows(version: Path) -> str:
    """Change a bit of a version's rows. Returns the file's name."""
    rows = next(version.glob("tables/*/rows-*.safetensors"))
    content = bytearray(rows.read_bytes())
    content[-1] ^= 1
    rows.write_bytes(content)
    return rows.name


def rank(program: Program, connection: httpx.Client | None = None) -> httpx.Response:
    return program.rank("films", REQUEST, connection)


def processes_of(program: Program, pattern: str) -> list[int]:
    return [pid for pid in descendants(program.process.pid) if re.search(pattern, command_line(pid))]


def wait_for_end(pid: int) -> None:
    # Reaped by its supervisor: before that, threads of it may still hold a listening socket.
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the process to be gone")


def test_every_process_is_ready_before_the_ports_are_printed(fleet: Program) -> None:
    for name in ("coordinator", "shard-0-0", "shard-1-0", "serve-0", "serve-1"):
        assert f"{name} is ready\n" in fleet.output
    assert re.search(r"^films version \d+: 2 shards, plan [0-9a-f]{12}$", fleet.output, re.MULTILINE)
    assert "films: version 1 is live, the store's latest is 3;" in fleet.output
    answers = [rank(fleet) for _ in range(8)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({re.sub(r'"age_ms":\d+', "", answer.text) for answer in answers}) == 1
    assert answers[0].json()["version"] == 1
    assert "a process starts slower" not in fleet.output
    # What only supervises has no use for it.
    assert "libtorch" not in Path(f"/proc/{fleet.process.pid}/maps").read_text()


def test_processes_share_the_memory_of_their_imports(fleet: Program) -> None:
    """Started by exec, each of the five that import torch has 160 MB of its own for that."""
    pids = [fleet.process.pid, *descendants(fleet.process.pid)]
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    assert sum(int(re.findall(r"\nPss: +(\d+) kB", rollup)[0]) for rollup in rollups) < 800_000


def test_metrics_of_all_workers_are_added_up(fleet: Program) -> None:
    def answered() -> float:
        text = httpx.get(f"{fleet.url}/metrics").text
        return sum(
            float(line.split()[-1])
            for line in text.splitlines()
            if line.startswith("shardrank_requests_total{") and 'method="rank"' in line and 'status="ok"' in line
        )

    before = answered()
    for _ in range(16):
        rank(fleet)
    assert answered() == before + 16


def test_a_killed_shard_node_costs_503_until_it_is_back(fleet: Program) -> None:
    scores = rank(fleet).json()["scores"]
    (node,) = processes_of(fleet, r" shard-node .*/shard-0-0\.toml ")
    os.kill(node, signal.SIGKILL)
    statuses = []
    # The node takes longer to start than a request to fail, so the first ones meet no node.
    while (answer := rank(fleet)).status_code != 200:
        statuses.append(answer.status_code)
        assert answer.json()["error"]["kind"]
        assert len(statuses) < 100_000
    assert set(statuses) == {503}
    assert answer.json()["scores"] == scores
    assert processes_of(fleet, r" shard-node .*/shard-0-0\.toml ") != [node]
    # The workers find out one after the other.
    wait_until(lambda: {rank(fleet).status_code for _ in range(16)} == {200}, "every worker to see it")


def test_a_killed_worker_is_replaced_and_the_others_go_on(fleet: Program) -> None:
    killed, _ = processes_of(fleet, " serve ")
    os.kill(killed, signal.SIGKILL)
    wait_for_end(killed)
    assert rank(fleet).status_code == 200
    fleet.read_until(r"serve-\d serves again \(restart 1\)")
    assert {rank(fleet).status_code for _ in range(8)} == {200}


@contextmanager
def requests_all_the_time(program: Program) -> Iterator[list[tuple[int, Any, Any]]]:
    """Status, version and scores of one request after the other, while the block runs.

    They go over one connection, to one worker: two take up a version one after the other.
    """
    answers: list[tuple[int, Any, Any]] = []
    stop = threading.Event()

    def run() -> None:
        with httpx.Client() as connection:
            while not stop.is_set():
                answer = rank(program, connection)
                document = answer.json()
                answers.append((answer.status_code, document.get("version"), tuple(document.get("scores", ()))))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield answers
    finally:
        stop.set()
        thread.join()


def test_a_version_is_rolled_out_and_back_under_requests(fleet: Program, store: Path) -> None:
    with requests_all_the_time(fleet) as answers:
        shardrank("publish", store / "films" / "2")
        shardrank("rollout", "start", "films", 2, "--store", store, "--follow")
        assert rank(fleet).json()["version"] == 2
        shardrank("rollback", "films", "--store", store, "--follow")
        assert rank(fleet).json()["version"] == 1
    assert {status for status, _, _ in answers} == {200}
    # Each version has one set of scores, but for the rounding of batches of one and of two requests, and the three
    # phases follow each other.
    first, second = (np.array([scores for _, version, scores in answers if version == one]) for one in (1, 2))
    assert max(np.ptp(scores, axis=0).max() for scores in (first, second)) < 2e-3
    assert np.abs(first[0] - second[0]).max() > 2e-2
    changes = [version for position, (_, version, _) in enumerate(answers) if answers[position - 1][1] != version]
    assert changes in ([2, 1], [1, 2, 1])


def test_a_damaged_version_is_refused_and_the_old_one_serves_on(fleet: Program, store: Path) -> None:
    shardrank("publish", store / "films" / "3")
    file = damage_rows(store / "films" / "3")
    with requests_all_the_time(fleet) as answers:
        result = shardrank("rollout", "start", "films", 3, "--store", store, "--follow", code=1)
    assert file in result.stderr
    assert "version 1 is live" in result.stderr
    assert file in shardrank("rollout", "status", "films", "--store", store).output.replace("\n", "")
    assert {(status, version) for status, version, _ in answers} == {(200, 1)}


@pytest.mark.nightly
def test_what_was_rolled_out_is_live_again_after_a_restart(fleet: Program, store: Path) -> None:
    # The last test of this fleet.
    shardrank("rollout", "start", "films", 2, "--store", store, "--follow")
    below = descendants(fleet.process.pid)
    assert len(below) == 6
    assert fleet.stop(signal.SIGTERM) == 0
    assert fleet.output.endswith("stopped\n")
    assert not any(map(is_alive, below))
    logs = re.search(r"^logs: (.+)$", fleet.output, re.MULTILINE)
    assert logs is not None
    # One of its processes was killed above.
    assert Path(logs[1], "shard-0-0.log").is_file()
    with running("up", "--store", str(store), *SHAPE) as again:
        assert rank(again).json()["version"] == 2
        assert "films: version 2 is live, the store's latest is 3;" in again.output
        # A second fleet would take this one's place in the registry.
        assert "runs with registry" in shardrank("up", "--store", store, *SHAPE, code=1).stderr
        below = descendants(again.process.pid)
        again.process.kill()
        wait_until(lambda: not any(map(is_alive, below)), "the children to die")
    # Nodes that were killed are waited for until they have expired; another shape is then no contradiction.
    with running("up", "--store", str(store), "--shards", "1", "--version", "1", *ANY_PORTS) as last:
        assert rank(last).json()["version"] == 1
        assert last.stop(signal.SIGTERM) == 0
    logs = re.search(r"^logs: (.+)$", last.output, re.MULTILINE)
    assert logs is not None
    assert not Path(logs[1]).exists()


def test_logs_are_kept_in_json_with_a_line_for_each_request(other_store: Path, tmp_path: Path) -> None:
    flags = ("--log-format", "json", "--access-log", "--log-dir", str(tmp_path / "logs"), "--admin-port", "0")
    with running("up", "--store", str(other_store), "--shards", "1", *flags, *ANY_PORTS) as program:
        headers = {"x-request-id": "id-1"}
        assert httpx.post(f"{program.url}/v1/models/films:rank", json=REQUEST, headers=headers).status_code == 200
        assert httpx.post(f"{program.url}/v1/models/tapes:rank", json=REQUEST).status_code == 404
        with grpc.insecure_channel(program.grpc_target) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary("/shardrank.v1.RankingService/Rank")(b"", metadata=[("x-request-id", "id-2")])
        assert httpx.get(program.read_until(r"status page: (http\S+/)")[1]).status_code == 200
        assert program.stop() == 0
    assert all(map(json.loads, program.output.splitlines()))
    texts = {path.stem: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert texts.keys() == {"coordinator", "shard-0-0", "serve-0"}
    lines = [json.loads(line) for text in texts.values() for line in text.splitlines()]
    first, *others = [line for line in lines if line["logger"] == "shardrank.access"]
    assert (first["model"], first["version"], first["candidates"], first["request_id"]) == ("films", 1, 40, "id-1")
    assert [(line["status"], line["error"], line.get("request_id")) for line in others] == [
        (404, "model_not_found", None),
        ("INVALID_ARGUMENT", "invalid_field", "id-2"),
    ]


@pytest.mark.nightly
def test_one_of_two_replicas_may_die(other_store: Path) -> None:
    """A node does not come back with damaged files; with both replicas gone there is no answer."""
    shape = ("--shards", "1", "--replicas", "2", "--replicate-bytes", "0")
    with running("up", "--store", str(other_store), *shape, *ANY_PORTS) as program:
        assert rank(program).status_code == 200
        first, second = processes_of(program, " shard-node ")
        file = damage_rows(other_store / "films" / "1")
        os.kill(first, signal.SIGKILL)
        assert {rank(program).status_code for _ in range(20)} == {200}
        program.read_until(rf"restart 1 of shard-0-\d failed: .*{file}: SHA-256 is")
        assert rank(program).status_code == 200
        os.kill(second, signal.SIGKILL)
        wait_for_end(second)
        answer = rank(program)
        assert (answer.status_code, answer.json()["error"]["kind"]) == (503, "shard_unavailable")


@pytest.mark.nightly
def test_a_version_that_misses_its_golden_scores_is_not_served(other_store: Path) -> None:
    # A tolerance that quantised rows can't meet.
    rewrite_manifest(other_store / "films" / "1", lambda manifest: manifest["golden"].update(tolerance=1e-9))
    error, log = shardrank("up", "--store", other_store, "--shards", "1", *ANY_PORTS, code=1).stderr.splitlines()[-2:]
    assert error.startswith("error: serve-0 does not serve: version 1 of 'films': ")
    assert "golden scores differ by up to" in error
    assert Path(log.removeprefix("its log: ")).is_file()


@pytest.mark.parametrize("command", ["serve", "up", "demo --once"])
def test_a_port_that_another_server_has_is_refused_not_shared(other_store: Path, command: str) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = shardrank(*command.split(), "--store", other_store, "--http-port", port, "--grpc-port", 0, code=1)
    assert result.stderr.splitlines()[-1] == (
        f"error: can't bind 127.0.0.1 port {port}: Address already in use; "
        "use --http-port 0 / --grpc-port 0 for free ones"
    )
    assert [path.name for path in (other_store / "films").iterdir()] == ["1"]


def test_serve_alone_has_the_rows_and_obeys_its_limits(other_store: Path, tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text('dtype = "int8"\nranking_replicas = 2\n[limits]\nmax_candidates = 1\n')
    flags = ("--config", str(settings), "--dtype", "float32", *ANY_PORTS)
    with running("serve", "--snapshot", str(other_store / "films" / "1"), *flags) as program:
        refused = rank(program)
        assert refused.status_code == 400
        assert "max_candidates = 1" in refused.json()["error"]["message"]
        one = REQUEST | {"candidates": {"sparse": {"film_id": [4], "genre": [[1]]}}}
        assert len(program.rank("films", one).json()["scores"]) == 1
        assert httpx.get(f"{program.url}/v1/models/films").json()["dense_model"]["dtype"] == "float32"
        assert program.stop(signal.SIGINT) == 0


@pytest.mark.nightly
def test_processes_take_the_newest_version_that_passes_and_models_that_come_later(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store / "films" / "1", tmp_path / "store" / "films" / "1")
    shutil.copytree(store / "films" / "1", tmp_path / "store" / "films" / "2")
    rewrite_manifest(
        tmp_path / "store" / "films" / "2", lambda bad: (bad.update(version=2), bad["golden"].update(tolerance=1e-9))
    )
    shutil.copytree(store / "films" / "2", tmp_path / "incoming" / "shop" / "2")
    rewrite_manifest(tmp_path / "incoming" / "shop" / "2", lambda manifest: manifest["spec"].update(model="shop"))
    place = ("--store", str(tmp_path / "store"))
    with running("serve", *place, *ANY_PORTS) as alone:
        assert rank(alone).json()["version"] == 1
        assert (
            "version 2 of films is refused, version 1 is wanted instead: model 'films' version 2: golden"
            in alone.output
        )
    with running("up", *place, "--shards", "2", *ANY_PORTS) as program:
        assert rank(program).json()["version"] == 1
        assert "version 2 of films is refused, version 1 is wanted instead: RankingModelError: " in program.output
        first, second = json.loads(shardrank("versions", *place, "--json").stdout)["versions"]
        assert (first["uses"], first["nodes"]) == (["live"], 3)
        assert second["uses"][0].startswith("refused: RankingModelError: model 'films' version 2: golden scores differ")
        shardrank("publish", tmp_path / "incoming" / "shop" / "2", *place)
        shardrank("rollout", "start", "shop", 2, *place, "--follow")
        assert program.rank("shop", REQUEST).json()["version"] == 2
        assert program.stop(signal.SIGTERM) == 0
    with running("up", *place, "--model", "films", "--shards", "1", *ANY_PORTS) as films_only:
        assert rank(films_only).json()["version"] == 1
        refused = shardrank("rollout", "start", "shop", 2, *place, code=1)
        assert "started for other models are serve-0, shard-0-0: restart them with --model shop too" in refused.stderr
