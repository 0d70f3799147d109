"""`shardrank up --on ray` on a real cluster of three local Ray nodes, under load; `-s` shows the share answered."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from loader.registry.fleet import FleetRegistry, NodeRecord
from loader.registry.opening import open_registry
from serving.cli import main
from serving.client import AsyncClient, ClientError, UnavailableError
from serving.training.trainer import train_version
from shardrank_testing.movielens import small_interactions
from shardrank_testing.processes import descendants, is_alive, running
from shardrank_testing.registries import with_open

pytest.importorskip("ray", reason="Ray is not installed: pip install 'shardrank[ray]'")
pytestmark = pytest.mark.timeout(600)

IN_FLIGHT = 4
TIMEOUT_MS = 30_000
PATIENCE_S = 240.0
LIGHT = {
    # Nothing is told to the makers of Ray, and no worker is started before there is an actor for it.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}
# A lost node is noticed within seconds, as a busy machine allows.
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 5}


@dataclass
class Load:
    """What became of requests: by version those that were answered, and the errors of the others.

    A request goes to one serving process after the other, as a balancer's would that knows them from the registry. One
    that is not reached, for all the client's own attempts, costs a turn at the next. Before each other one there is a
    pause: the load leaves room for what is started, on a busy machine too.
    """

    registry: str
    pause_s: float
    answered: Counter[int] = field(default_factory=Counter)
    scores: dict[int, set[tuple[float, ...]]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    async def run(self) -> None:
        clients: dict[str, AsyncClient] = {}
        there: list[str] = []
        turns = itertools.count()

        async def asks() -> None:
            while not self.stop.is_set():
                turn, order = next(turns), list(there)
                await self._ask([clients[order[(turn + one) % len(order)]] for one in range(len(order))])
                await asyncio.sleep(self.pause_s)

        fleet = FleetRegistry(open_registry(self.registry))

        async def look() -> None:
            nodes = await fleet.nodes()
            there[:] = [one.address for one in nodes if one.kind == "serving" and not one.draining]
            clients.update({one: AsyncClient(one, timeout_ms=TIMEOUT_MS) for one in there if one not in clients})

        await look()
        asking = [asyncio.create_task(asks()) for _ in range(IN_FLIGHT)]
        while not self.stop.is_set():
            await look()
            await asyncio.sleep(0.1)
        await asyncio.gather(*asking)
        for client in clients.values():
            await client.close()
        await fleet.registry.close()

    async def _ask(self, clients: list[AsyncClient]) -> None:
        error = "no serving process is announced"
        for client in clients:
            try:
                result = await client.rank(
                    "films", {"user_id": 1, "history": [2, 3]}, {"film_id": [4, 5, 6], "genre": [[1], [2], [3]]}
                )
            except UnavailableError as unavailable:
                error = str(unavailable)
            except ClientError as refused:
                error = f"{type(refused).__name__}: {refused}"
                break
            else:
                self.answered[result.version] += 1
                self.scores.setdefault(result.version, set()).add(tuple(result.scores.round(4).tolist()))
                return
        self.failed.append(error)

    def tell(self, what: str) -> None:
        asked = self.answered.total() + len(self.failed)
        sys.stdout.write(f"\n{what}: answered {self.share:.4%} of {asked} requests, by version {dict(self.answered)}\n")

    @property
    def share(self) -> float:
        return self.answered.total() / (self.answered.total() + len(self.failed))


@contextlib.contextmanager
def load_on(registry: str, pause_s: float = 0.02) -> Iterator[Load]:
    load = Load(registry, pause_s)
    thread = threading.Thread(target=lambda: asyncio.run(load.run()))
    thread.start()
    try:
        yield load
    finally:
        load.stop.set()
        thread.join()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s for {what}"
        time.sleep(0.1)


def shardrank(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(one) for one in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@dataclass
class Deployed:
    cluster: Any
    store: Path
    registry: str

    def arguments(self, *more: object) -> tuple[object, ...]:
        where = ("--on", "ray", "--address", self.cluster.address, "--registry", self.registry)
        ports = ("--http-port", 0, "--grpc-port", 0)
        return ("up", "--store", self.store, *where, *ports, "--replicate-bytes", 0, *more)

    def up(self, *more: object) -> str:
        return shardrank(*self.arguments("--workers", 2, "--detach", *more))

    def nodes(self) -> dict[str, NodeRecord]:
        found = with_open(self.registry, lambda registry: FleetRegistry(registry).nodes())
        return {node.node_id: node for node in found}

    def host_of(self, node: NodeRecord) -> int:
        """The raylet below which a process runs: its actor's parent."""
        (raylet,) = [one for one in self.raylets() if node.process_id in descendants(one)]
        return raylet

    def raylets(self) -> list[int]:
        return [_raylet(node) for node in self.cluster.list_all_nodes()]


def _raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("ray")
    for seed in range(2):
        train_version(small_interactions(num_ratings=2000), folder / "store", seed=seed, epochs=1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LIGHT.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        size = {"num_cpus": 16, "object_store_memory": 80_000_000, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={**size, "_system_config": HEALTH})
        fleet = Deployed(cluster, folder / "store", str(folder / "registry"))
        try:
            cluster.add_node(**size)
            cluster.add_node(**size)
            said = fleet.up("--version", 1, "--shards", 2, "--replicas", 2)
            assert said.count("HTTP: http://") == 2
            yield fleet
        finally:
            below = [pid for raylet in fleet.raylets() for pid in descendants(raylet)]
            session = cluster.head_node.get_session_dir_path()
            cluster.shutdown()
            until(lambda: not any(map(is_alive, below)), "every process of the cluster to end")
            shutil.rmtree(session, ignore_errors=True)


def test_replicas_of_a_shard_are_on_different_hosts_and_a_lost_host_costs_at_most_one_request_of_a_thousand(
    deployed: Deployed,
) -> None:
    before = deployed.nodes()
    shards = [name for name in before if name.startswith("shard-")]
    assert sorted(shards) == [f"shard-{shard}-of-2-{replica}" for shard in range(2) for replica in range(2)]
    hosts = {name: deployed.host_of(node) for name, node in before.items()}
    for group in ("shard-0-of-2", "shard-1-of-2", "serve"):
        assert hosts[f"{group}-0"] != hosts[f"{group}-1"]
    # The head stays: it is where a cluster keeps what it knows.
    victim = next(one for one in deployed.cluster.worker_nodes if _raylet(one) in hosts.values())
    lost = {name for name, host in hosts.items() if host == _raylet(victim)}
    assert lost
    with load_on(deployed.registry) as load:
        until(lambda: load.answered.total() > 200, "answers before the loss")
        for pid in (_raylet(victim), *descendants(_raylet(victim))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deployed.cluster.remove_node(victim, allow_graceful=False)

        def back() -> bool:
            now = deployed.nodes()
            return now.keys() >= before.keys() and all(
                now[name].process_id != before[name].process_id and now[name].has("films", 1, "ready") for name in lost
            )

        until(back, f"{sorted(lost)} to be started on other hosts")
        count = load.answered.total()
        until(lambda: load.answered.total() > max(1000, count + 200), "answers after it")
    load.tell("a host is lost")
    assert load.share >= 0.999, load.failed[:5]
    assert {version: len(scores) for version, scores in load.scores.items()} == {1: 1}
    hosts = {name: deployed.host_of(node) for name, node in deployed.nodes().items()}
    for group in ("shard-0-of-2", "shard-1-of-2", "serve"):
        assert hosts[f"{group}-0"] != hosts[f"{group}-1"]


def test_a_new_version_goes_from_two_shards_to_four_without_a_failed_request(deployed: Deployed) -> None:
    more = ("--shards", 4, "--replicas", 1)
    with load_on(deployed.registry, pause_s=0.1) as load:
        assert "films: its live version is on 2 shards, the next one that is rolled out on 4" in deployed.up(*more)
        shardrank("publish", deployed.store / "films" / "2", "--registry", deployed.registry)
        shardrank("rollout", "start", "films", 2, "--registry", deployed.registry, "--follow")
        ended = deployed.up(*more).splitlines()[-1]
        count = load.answered.total()
        until(lambda: load.answered.total() > count + 100, "answers by four shards alone")
    assert sorted(ended.removeprefix("ended: ").split(", ")) == [
        f"shard-{shard}-of-2-{replica}" for shard in range(2) for replica in range(2)
    ]
    shards = {name: node for name, node in deployed.nodes().items() if node.kind == "shard"}
    assert sorted(shards) == [f"shard-{shard}-of-4-0" for shard in range(4)]
    load.tell("2 to 4 shards")
    assert load.failed == []
    assert {version: len(scores) for version, scores in load.scores.items()} == {1: 1, 2: 1}


def test_down_ends_every_process_of_the_fleet(deployed: Deployed) -> None:
    processes = [node.process_id for node in deployed.nodes().values()]
    said = shardrank("down", "--registry", deployed.registry, "--address", deployed.cluster.address)
    assert "serve-0, serve-1, shard-0-of-" in said
    assert not any(map(is_alive, processes))
    assert deployed.nodes() == {}


def test_a_fleet_that_is_not_detached_ends_with_its_command(deployed: Deployed) -> None:
    shape = ("--shards", 1, "--workers", 1, "--version", 1)
    with running(*map(str, deployed.arguments(*shape))) as program:
        program.read_until("HTTP: ")
        processes = [node.process_id for node in deployed.nodes().values()]
        assert len(processes) == 2
        assert program.stop(signal.SIGTERM) == 0
    assert program.output.endswith("stopped\n")
    assert not any(map(is_alive, processes))
    assert deployed.nodes() == {}
