"""Where a fleet's processes run and end: groups on a Ray cluster, without Ray; parents, signals, and shared ports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from serving.errors import FleetError
from serving.fleet.config import FleetConfig
from serving.fleet.local_fleet import socket_path
from serving.fleet.process import PARENT_PID_VARIABLE
from serving.fleet.ray_fleet import HOST, check_hosts, connected, groups_of, missing_of, shards_of
from serving.fleet.workers import connectable_host, shared_port
from shard_node.wire.address import MAX_UNIX_PATH_BYTES

SHAPE = {"shards": 2, "replicas": 3, "workers": 2}
WHERE = {"registry": "redis://r/0", "on": "ray", "host": HOST}
CONFIG = FleetConfig.model_validate({"store": Path("/models"), "models": ("films",), **SHAPE, **WHERE})


def test_each_shard_has_a_group_whose_nodes_claim_cards_and_memory() -> None:
    groups = groups_of(CONFIG.model_copy(update={"cpus": 2.0, "device": "cuda", "cards": 4, "max_memory_gb": 1.0}))
    assert list(groups) == ["coordinator", "shard-0-of-2", "shard-1-of-2", "serve"]
    assert [[one.name for one in processes] for processes in list(groups.values())[2:]] == [
        ["shard-1-of-2-0", "shard-1-of-2-1", "shard-1-of-2-2"],
        ["serve-0", "serve-1"],
    ]
    node, serving = groups["shard-1-of-2"][0], groups["serve"][1]
    assert (node.claims, serving.claims) == ({"CPU": 2.0, "GPU": 4.0, "memory": 1e9}, {"CPU": 2.0})
    found = tomllib.loads(node.settings)
    assert (node.command, found["node_id"], found["shard"]) == ("shard-node", "shard-1-of-2-0", "1/2")
    assert (found["listen"], found["registry"]) == (["{host}:0"], "redis://r/0")
    assert (serving.command, tomllib.loads(serving.settings)["host"]) == ("serve", "{host}")


def test_fewer_hosts_than_a_group_needs_are_refused_by_what_they_lack() -> None:
    groups = groups_of(CONFIG.model_copy(update={"device": "cuda"}))
    hosts = [{"CPU": 8.0, "GPU": 1.0}] * 3
    check_hosts(groups, hosts)
    with pytest.raises(
        FleetError, match=r"shard-0-of-2: 3 processes .* 1 CPU, 1 GPU each; of the 3 hosts .* 2 have that"
    ):
        check_hosts(groups, [*hosts[:2], {"CPU": 8.0}])


def test_of_a_running_fleet_only_whole_groups_are_missing() -> None:
    groups = groups_of(CONFIG)
    running = [one.name for group, processes in groups.items() for one in processes if group != "shard-1-of-2"]
    assert list(missing_of(groups, [*running, "shard-0-of-8-0"])) == ["shard-1-of-2"]
    with pytest.raises(FleetError, match=r"serve runs as \['serve-0'\], asked for is \['serve-0', 'serve-1'\]"):
        missing_of(groups, ["serve-0"])


def test_names_tell_of_how_many_shards_a_node_holds_one() -> None:
    assert [shards_of(name) for name in ("shard-1-of-16-0", "serve-0", "coordinator-0")] == [16, None, None]


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FleetError, match=r"pip install 'shardrank\[ray\]'"), connected(None, "r"):
        pass


@pytest.mark.parametrize(
    ("address", "why"), [("10.0.0.1", "is not HOST:PORT"), ("127.0.0.1:1", "no Ray cluster answers")]
)
def test_an_address_at_which_no_cluster_answers_is_refused_at_once(address: str, why: str) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'shardrank[ray]'")
    with pytest.raises(FleetError, match=why), connected(address, "r"):
        pass


def test_ray_is_not_imported_before_a_cluster_is_asked_for() -> None:
    program = "import serving.fleet.ray_fleet, sys; print({'ray', 'torch'} & sys.modules.keys())"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "set()\n"
    )


CHILD = """
import os, signal
from serving.fleet.process import die_with_parent
die_with_parent(os.environ)
print(os.getpid(), flush=True)
signal.pause()
"""
# Starts the child above, then waits to be killed.
PARENT = f"""
import os, signal, subprocess, sys
environment = dict(os.environ, {PARENT_PID_VARIABLE}=str(os.getpid()))
subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environment)
signal.pause()
"""


def test_a_child_dies_with_a_parent_that_was_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout as output:
        child = int(output.readline())
        os.kill(child, 0)
        parent.kill()
        parent.wait()
        # The pipe closes when the last process that holds it is gone: that is the child.
        assert output.read() == ""


def test_a_child_whose_supervisor_is_gone_does_not_start() -> None:
    environment = {**os.environ, PARENT_PID_VARIABLE: "1234567890"}
    result = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stdout == ""


def test_a_shared_port_can_be_bound_again_with_reuseport_but_not_without() -> None:
    with shared_port("127.0.0.1", 0) as port:
        with socket.socket() as worker:
            worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            worker.bind(("127.0.0.1", port))
            worker.listen()
            # The holder never listens, so every connection reaches the worker.
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", port), timeout=5):
                    worker.accept()[0].close()
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))


def test_a_socket_path_that_the_kernel_would_cut_is_refused(tmp_path: Path) -> None:
    room = MAX_UNIX_PATH_BYTES - len(str(tmp_path)) - 1
    assert socket_path(tmp_path, "x" * room) == str(tmp_path / ("x" * room))
    with pytest.raises(FleetError, match="has 108 bytes, at most 107"):
        socket_path(tmp_path, "x" * (room + 1))


@pytest.mark.parametrize(("host", "expected"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.0.0.7", "10.0.0.7")])
def test_a_wildcard_address_is_asked_over_loopback(host: str, expected: str) -> None:
    assert connectable_host(host) == expected


SIGNALLED = """
import asyncio, sys
from serving.fleet.process import StopRequestedError, run_until_signalled

async def program():
    try:
        print("running", flush=True)
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        print("put away", flush=True)

try:
    run_until_signalled(program)
except StopRequestedError as stop:
    print(stop, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_program_clean_up_before_it_ends(number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", SIGNALLED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == "running\n"
        process.send_signal(number)
        assert output.read() == f"put away\n{number.name}\n"
    assert process.wait() == 0
