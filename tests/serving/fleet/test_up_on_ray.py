"""`shardrank up --on ray` on a real cluster of three local Ray nodes, under load."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from loader.errors import ShardrankError, UnavailableError
from loader.registry.fleet import NodeRecord
from serving.client import Client
from serving.training.trainer import train_version
from shardrank_testing.command_line import ANY_PORTS, shardrank
from shardrank_testing.movielens import small_interactions
from shardrank_testing.processes import descendants, is_alive, running, wait_until
from shardrank_testing.registered_fleet import nodes

pytest.importorskip("ray", reason="Ray is not installed: pip install 'shardrank[ray]'")
pytestmark = pytest.mark.timeout(600)

IN_FLIGHT = 4
TIMEOUT_MS = 30_000
RANKED = {"user_id": 1, "history": [2, 3]}, {"film_id": [4, 5, 6], "genre": [[1], [2], [3]]}
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
    """What became of requests: version and scores of those that were answered, and the errors of the others.

    A request goes to one serving process after the other, as a balancer's would that knows them from the registry. One
    that is not reached, for all the client's own attempts, costs a turn at the next. Before each other one there is a
    pause: the load leaves room for what is started, on a busy machine too.
    """

    answers: list[tuple[int, tuple[float, ...]]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def send(self, clients: Sequence[Client]) -> None:
        error = "no serving process is announced"
        for client in clients:
            try:
                result = client.rank("films", *RANKED)
            except UnavailableError as unavailable:
                error = str(unavailable)
            except ShardrankError as refused:
                error = f"{type(refused).__name__}: {refused}"
                break
            else:
                self.answers.append((result.version, tuple(result.scores.round(4).tolist())))
                return
        self.failed.append(error)

    def versions(self) -> list[int]:
        """Return the versions that answered; each has one set of scores."""
        versions = sorted({version for version, _ in self.answers})
        assert len(set(self.answers)) == len(versions)
        return versions


@contextlib.contextmanager
def load_on(registry: str, pause_s: float = 0.02) -> Iterator[Load]:
    load, stop = Load(), threading.Event()

    def work(number: int) -> None:
        with contextlib.ExitStack() as stack:
            clients: dict[str, Client] = {}
            while not stop.wait(pause_s):
                serving = [node for node in nodes(registry).values() if node.kind == "serving" and not node.draining]
                for node in serving:
                    if node.address not in clients:
                        clients[node.address] = stack.enter_context(Client(node.address, timeout_ms=TIMEOUT_MS))
                # Half of the threads begin with the last.
                load.send([clients[node.address] for node in serving[:: 1 if number % 2 else -1]])

    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        sending = [threads.submit(work, number) for number in range(IN_FLIGHT)]
        try:
            yield load
        finally:
            stop.set()
        for sent in sending:
            sent.result()


def until(condition: Callable[[], bool], what: str) -> None:
    wait_until(condition, what, timeout_s=240.0)


@dataclass
class Deployed:
    cluster: Any
    store: Path
    registry: str

    def arguments(self, *more: object) -> tuple[object, ...]:
        where = ("--on", "ray", "--address", self.cluster.address, "--registry", self.registry)
        return ("up", "--store", self.store, *where, *ANY_PORTS, "--replicate-bytes", 0, *more)

    def up(self, *more: object) -> str:
        return shardrank(*self.arguments("--workers", 2, "--detach", *more)).output

    def nodes(self) -> dict[str, NodeRecord]:
        return nodes(self.registry)

    def hosts(self) -> dict[str, int]:
        """Return by node the raylet below which it runs: its actor's parent; replicas have different ones."""
        below = {raylet: set(descendants(raylet)) for raylet in self.raylets()}
        hosts = {}
        for name, node in self.nodes().items():
            (hosts[name],) = [raylet for raylet, processes in below.items() if node.process_id in processes]
        for group in ("shard-0-of-2", "shard-1-of-2", "serve"):
            assert hosts[f"{group}-0"] != hosts[f"{group}-1"]
        return hosts

    def raylets(self) -> list[int]:
        return [raylet_of(node) for node in self.cluster.list_all_nodes()]


def raylet_of(node: Any) -> int:
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


def test_a_lost_host_costs_at_most_one_request_of_a_thousand(deployed: Deployed) -> None:
    """Replicas of a shard are on different hosts."""
    before = deployed.nodes()
    shards = [name for name in before if name.startswith("shard-")]
    assert sorted(shards) == [f"shard-{shard}-of-2-{replica}" for shard in range(2) for replica in range(2)]
    hosts = deployed.hosts()
    # The head stays: it is where a cluster keeps what it knows.
    victim = next(one for one in deployed.cluster.worker_nodes if raylet_of(one) in hosts.values())
    raylet = raylet_of(victim)
    lost = {name for name, host in hosts.items() if host == raylet}
    assert lost
    with load_on(deployed.registry) as load:
        until(lambda: len(load.answers) > 200, "answers before the loss")
        for pid in (raylet, *descendants(raylet)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deployed.cluster.remove_node(victim, allow_graceful=False)

        def back() -> bool:
            now = deployed.nodes()
            return now.keys() >= before.keys() and all(
                now[name].process_id != before[name].process_id and now[name].has("films", 1, "ready") for name in lost
            )

        until(back, f"{sorted(lost)} to be started on other hosts")
        count = len(load.answers)
        until(lambda: len(load.answers) > max(1000, count + 200), "answers after it")
    assert len(load.failed) <= len(load.answers) / 999, load.failed[:5]
    assert load.versions() == [1]
    deployed.hosts()


def test_a_new_version_goes_to_four_shards_without_a_failed_request(deployed: Deployed) -> None:
    more = ("--shards", 4, "--replicas", 1)
    with load_on(deployed.registry, pause_s=0.1) as load:
        assert "films: its live version is on 2 shards, the next one that is rolled out on 4" in deployed.up(*more)
        shardrank("publish", deployed.store / "films" / "2", "--registry", deployed.registry)
        shardrank("rollout", "start", "films", 2, "--registry", deployed.registry, "--follow")
        ended = deployed.up(*more).splitlines()[-1]
        count = len(load.answers)
        until(lambda: len(load.answers) > count + 100, "answers by four shards alone")
    assert sorted(ended.removeprefix("ended: ").split(", ")) == [
        f"shard-{shard}-of-2-{replica}" for shard in range(2) for replica in range(2)
    ]
    shards = {name: node for name, node in deployed.nodes().items() if node.kind == "shard"}
    assert sorted(shards) == [f"shard-{shard}-of-4-0" for shard in range(4)]
    assert load.failed == []
    assert load.versions() == [1, 2]


def test_down_ends_every_process_of_the_fleet(deployed: Deployed) -> None:
    processes = [node.process_id for node in deployed.nodes().values()]
    done = shardrank("down", "--registry", deployed.registry, "--address", deployed.cluster.address)
    assert "serve-0, serve-1, shard-0-of-" in done.output
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
