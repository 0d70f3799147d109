"""`shard-node --registry` and `serve --registry`: processes join a fleet, are rolled out to, and leave in order."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest

from loader.snapshot.reader import Snapshot
from router.plan import Plan
from router.shard import ReplicaSource, ReplicatedShard
from serving.config import ServeConfig, ShardNodeConfig
from serving.fleet.config import FleetConfig
from serving.fleet.workers import Membership, worker_config
from serving.shard_server import serve_shard
from shard_node.buckets import NodeIdentity
from shard_node.cuda.card_set import CardSet
from shard_node.errors import CardError
from shard_node.node import ShardNode
from shard_node.wire.address import Address
from shardrank_testing.bags import random_table_bags
from shardrank_testing.command_line import ANY_PORTS
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.processes import WAIT_S, Program, descendants, is_alive, running, wait_until
from shardrank_testing.registered_fleet import nodes, publish, want
from shardrank_testing.serving_api import MODEL, ApiModel, api_request
from shardrank_testing.snapshots import make_spec, write_snapshot


@pytest.fixture
def films(folder: Path) -> Path:
    """Of a model of one version, which is to be live."""
    path, _ = write_snapshot(folder / "store", make_spec(), seed=1)
    publish(folder / "registry", path)
    want(folder / "registry", "films", hold=(1,), live=1)
    return folder / "registry"


def node_flags(folder: Path, name: str) -> list[str]:
    where = ["--registry", f"{folder}/registry", "--store", f"{folder}/store", "--listen", f"unix:{folder}/{name}.sock"]
    return [*where, "--shard", "0/1", "--node-id", name]


async def until(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_until, condition, what)


def are_ready(registry: Path, *names: str) -> bool:
    found = nodes(registry)
    return all(name in found and found[name].has("films", 1, "ready") for name in names)


def test_a_node_that_ends_under_load_fails_no_lookup(folder: Path, films: Path) -> None:
    async def scenario(first: Program) -> None:
        await until(partial(are_ready, films, "a", "b"), "both nodes")
        snapshot = Snapshot.open(folder / "store" / "films" / "1")
        plan = Plan.make(snapshot.spec)
        metrics = await asyncio.to_thread(httpx.get, first.read_until(r"metrics: (http://\S+)")[1])
        assert 'state="live"' in metrics.text
        source = ReplicaSource.fixed([Address(path=f"{folder}/{name}.sock") for name in ("a", "b")])
        shard = ReplicatedShard(plan, 0, snapshot, source)
        # Large enough to be pooled by a thread, not by the event loop.
        bags = random_table_bags(np.random.default_rng(3), plan.layout, 2000, 10)
        answers: set[bytes] = set()
        answered, ended = 0, asyncio.Event()

        async def load() -> None:
            nonlocal answered
            while not ended.is_set():
                answer = await shard.pool("films", 1, bags, time.monotonic() + WAIT_S)
                answers.add(b"".join(block.tobytes() for block in answer.sums))
                answered += 1

        loads = [asyncio.create_task(load()) for _ in range(3)]
        await until(lambda: answered > 20, "lookups by both")
        assert await asyncio.to_thread(first.stop, signal.SIGTERM) == 0
        before = answered
        await until(lambda: answered > before + 20, "lookups by the other")
        ended.set()
        await asyncio.gather(*loads)
        assert len(answers) == 1
        await until(lambda: set(nodes(films)) == {"b"}, "the end of the first")
        await shard.close()

    admin = ("--admin-listen", "127.0.0.1:0")
    with (
        running("shard-node", *node_flags(folder, "a"), *admin) as first,
        running("shard-node", *node_flags(folder, "b")),
    ):
        asyncio.run(scenario(first))


def test_a_node_whose_cards_have_failed_leaves_with_their_error(folder: Path, films: Path) -> None:
    async def scenario() -> None:
        identity = NodeIdentity(shard_index=0, num_shards=1, num_cards=2, sharding="hash")
        cards, node = EmulatedCards(2), ShardNode(identity)
        config = ShardNodeConfig(
            registry=f"{folder}/registry",
            store=folder / "store",
            listen=(f"unix:{folder}/a.sock",),
            shard=(0, 1),
            node_id="a",
            cards=2,
            replicate_bytes=0,
            stage_cpu_share=1,
        )
        program = asyncio.create_task(serve_shard(config, Membership.of(config), node, CardSet(cards), None))
        await until(partial(are_ready, films, "a"), "the node")
        cards.fault = "device 0: cudaErrorIllegalAddress"
        with pytest.raises(CardError, match="cudaErrorIllegalAddress"):
            await asyncio.wait_for(program, WAIT_S)
        cards.fault = ""
        node.close()

    asyncio.run(scenario())
    assert nodes(films) == {}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("shard-node", "{folder}/notify"),
        pytest.param("alone", "@{folder}/notify", marks=pytest.mark.nightly),
        pytest.param("serve", "{folder}/notify", marks=pytest.mark.nightly),
        pytest.param("workers", "@{folder}/notify", marks=pytest.mark.nightly),
    ],
)
def test_systemd_is_notified_once_a_process_is_ready(
    folder: Path, films: Path, api_model: ApiModel, monkeypatch: pytest.MonkeyPatch, command: str, name: str
) -> None:
    """Of several workers the process that supervises them notifies it."""
    name = name.format(folder=folder)
    alone = ("--shard", "0/1", "--listen", f"unix:{folder}/a.sock")
    commands = {
        "shard-node": ("shard-node", *node_flags(folder, "a")),
        "serve": ("serve", "--snapshot", str(api_model.path), *ANY_PORTS),
        "workers": ("serve", "--snapshot", str(api_model.path), *ANY_PORTS, "--workers", "2"),
        "alone": ("shard-node", "--snapshot", str(api_model.path), *alone),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(name.replace("@", "\0"))
        systemd.settimeout(WAIT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        with running(*commands[command]):
            assert systemd.recv(100) == b"READY=1"


REQUEST = api_request(1)


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    return tmp_path / "registry"


def serve_flags(registry: Path, store: Path, *more: str) -> tuple[str, ...]:
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
    with running(*serve_flags(registry, store, "--local", "--node-id", "x", "--dtype", "float32")) as program:
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


@pytest.mark.nightly
def test_workers_are_nodes(versions: dict[int, ApiModel], store: Path, registry: Path) -> None:
    publish(registry, versions[1].path)
    want(registry, MODEL, live=1, hold=(1,), serve=(1,))
    with running(*serve_flags(registry, store, "--local", "--node-id", "x", "--workers", "2")) as program:
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
    with running("--log-level", "info", *serve_flags(registry, store)) as program:
        port = program.read_until(r"listening on 127.0.0.1: HTTP (\d+)")[1]
        answer = httpx.get(f"http://127.0.0.1:{port}/readyz")
        assert answer.status_code == 503
        assert "which models are wanted" in answer.json()["problems"][""]
        assert httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
        assert program.stop() == 0


def test_workers_have_all_settings_but_a_node_id_and_a_folder(tmp_path: Path) -> None:
    """Two that record can't share a folder; its bytes are divided."""
    config = ServeConfig(
        registry="redis://:secret@host", store=tmp_path, local=True, record=tmp_path, workers=2, max_staleness={"a": 3}
    )
    worker = worker_config(config, 1)
    changed = {name for name in ServeConfig.names() if getattr(worker, name) != getattr(config, name)}
    assert changed == {"workers", "node_id", "record", "record_max_mb"}
    assert (worker.record, worker.record_max_mb, worker.workers) == (tmp_path / "1", 128, 1)
    assert worker.node_id.endswith("-1")
    of_fleet = FleetConfig(store=tmp_path, models=("a",), record=tmp_path, record_share=0.5, workers=4)
    worker = of_fleet.serve_config("serve-3")
    assert (worker.record, worker.record_max_mb, worker.record_share) == (tmp_path / "3", 64, 0.5)
    worker.write(file := tmp_path / "worker.toml")
    assert file.stat().st_mode & 0o777 == 0o600
