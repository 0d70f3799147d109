"""Hosts in network namespaces: made, reached, delayed where the kernel can, and always removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from click.testing import CliRunner

from loadtest.compare.cli import compare_cards
from loadtest.compare.hosts import (
    BLOCK_PREFIX,
    LINKS,
    NAMESPACES,
    NETWORK,
    Host,
    check_hosts,
    delay_commands,
    link_commands,
    name_hosts,
    running_hosts,
)
from loadtest.errors import HostsError, NoNetemError
from loadtest.report.comparison import Comparison
from loadtest.report.page import read_reported
from shardrank_testing.processes import Program, running, wait_until

TINY = ("--workload", "merlin-tiny:0.0001", "--candidates", "3", "--requests", "20", "--device", "cpu")
SHORT = ("--rounds", "1", "--rate", "20", "--cold", "0.5", "--warmup", "0", "--duration", "0.5", "--in-flight", "4")
SHARDS = ("--cards", "1", "--shards", "2", "--shares", "", "--hosts")
COMPARE = ("loadtest", "compare-cards", *SHARDS, *TINY, *SHORT, "--timeout-ms", "10000")
ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    print("listening", flush=True)
    while True:
        with server.accept()[0] as connection:
            connection.sendall(connection.recv(64))
"""


def why_not(*command: str) -> str:
    """Why this machine can't run a command in a new network namespace; empty if it can."""
    if shutil.which("unshare") is None or shutil.which("nsenter") is None or shutil.which(command[0]) is None:
        return f"unshare, nsenter or {command[0]} is missing"
    done = subprocess.run(("unshare", "--net", "--mount", *command), capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


NO_HOSTS = why_not("ip", "link", "add", "one", "type", "veth", "peer", "name", "other")
NO_NETEM = NO_HOSTS or why_not("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
needs_hosts = pytest.mark.skipif(bool(NO_HOSTS), reason=f"no network namespaces here: {NO_HOSTS}")


def left_of(process_id: int) -> list[str]:
    """Namespaces and links of a process that are there."""
    namespaces = NAMESPACES.glob(f"shardrank-{process_id}-*")
    return sorted(path.name for path in (*namespaces, *LINKS.glob(f"sr{process_id}-*")))


@contextlib.contextmanager
def echo_on(host: Host) -> Iterator[subprocess.Popen[str]]:
    command = host.inside((sys.executable, "-c", ECHO, host.address))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "listening\n"
            yield process
        finally:
            process.kill()


def echoed(host: Host) -> tuple[bytes, str, float]:
    """What comes back from a host, from which address it was asked, and the seconds after the connection was there."""
    with socket.create_connection((host.address, 7000), timeout=20) as connection:
        began = time.perf_counter()
        connection.sendall(b"pooled")
        return connection.recv(64), connection.getsockname()[0], time.perf_counter() - began


def test_hosts_are_named_by_process_and_have_addresses_that_nobody_else_has():
    hosts = name_hosts(64, 4194303, ["10.0.0.1"])
    addresses = [IPv4Address(one) for host in hosts for one in (host.near, host.address)]
    assert len(set(addresses)) == 128
    assert all(one in NETWORK for one in addresses)
    assert (hosts[63].namespace, hosts[63].link) == ("shardrank-4194303-63", "sr4194303-63")
    # The kernel's limit, less its zero.
    assert all(len(host.link) <= 15 for host in hosts)
    others = name_hosts(64, 4194303, [hosts[5].near])
    assert not {host.address for host in hosts} & {host.address for host in others}


def test_without_a_free_block_of_addresses_there_are_no_hosts():
    taken = [str(block[1]) for block in NETWORK.subnets(new_prefix=BLOCK_PREFIX)]
    assert name_hosts(1, 1, taken[1:])[0].near == "198.18.0.0"
    with pytest.raises(HostsError, match=r"in every block of 198\.18\.0\.0/15"):
        name_hosts(1, 1, taken)


def test_half_of_a_delay_is_made_at_each_end_of_a_link():
    host = Host("shardrank-7-0", "sr7-0", "198.18.3.128", "198.18.3.129")
    assert [" ".join(command) for command in delay_commands(host, 0.5)] == [
        "tc qdisc add dev sr7-0 root netem limit 100000 delay 250.000us",
        "tc -n shardrank-7-0 qdisc add dev eth0 root netem limit 100000 delay 250.000us",
    ]
    assert not any("netem" in command for command in link_commands(host))


@needs_hosts
def test_each_host_is_reached_over_its_own_link_and_none_is_left_after_an_error():
    def ask_and_fail() -> None:
        with running_hosts(2) as hosts:
            assert left_of(os.getpid()) == sorted(name for host in hosts for name in (host.namespace, host.link))
            for host in hosts:
                with echo_on(host) as process:
                    # The very process that was started, so that it is watched and ends with whoever started it.
                    inside = os.readlink(f"/proc/{process.pid}/ns/net")
                    assert inside != os.readlink("/proc/self/ns/net")
                    assert echoed(host)[:2] == (b"pooled", host.near)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ask_and_fail()
    assert left_of(os.getpid()) == []


@needs_hosts
def test_a_namespace_that_is_left_is_named_and_not_taken():
    name = f"shardrank-{os.getpid()}-1"
    subprocess.run(("ip", "netns", "add", name), check=True)
    try:
        message = f"'{name}' is there already.*`ip netns delete {name}` removes it"
        with pytest.raises(HostsError, match=message), running_hosts(2):
            raise AssertionError("the second one's name is taken")
        assert left_of(os.getpid()) == [name]
    finally:
        subprocess.run(("ip", "netns", "delete", name), check=True)


@pytest.mark.skipif(bool(NO_NETEM), reason=f"this kernel can't delay packets: {NO_NETEM}")
def test_a_round_trip_to_a_host_takes_the_delay():
    with running_hosts(1, delay_ms=50) as (host,), echo_on(host):
        answer, _, seconds = echoed(host)
    assert answer == b"pooled"
    assert seconds >= 0.05


@needs_hosts
@pytest.mark.skipif(not NO_NETEM, reason="this kernel can delay packets")
def test_a_delay_that_the_kernel_can_not_make_is_refused_before_anything_is_written(tmp_path: Path):
    with pytest.raises(NoNetemError, match=r"a delay of 1 ms between hosts: this kernel has no netem .*`tc qdisc add"):
        check_hosts(1.0)
    arguments = (*SHARDS, *TINY, *SHORT, "--delay-ms", "1", "--store", str(tmp_path / "store"))
    result = CliRunner().invoke(compare_cards, arguments)
    assert isinstance(result.exception, NoNetemError)
    assert not (tmp_path / "store").exists()
    assert left_of(os.getpid()) == []


@pytest.mark.skipif(shutil.which("setpriv") is None or shutil.which("ip") is None, reason="no setpriv, or no ip")
def test_without_roots_rights_hosts_are_refused_and_the_message_says_what_is_missing():
    powerless = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()
    code = "from loadtest.compare.hosts import check_hosts; check_hosts(None)"
    done = subprocess.run((*powerless, sys.executable, "-c", code), capture_output=True, text=True, check=False)
    told = done.stderr.splitlines()[-1]
    assert told.startswith("loadtest.errors.HostsError: `ip netns add shardrank-")
    assert told.endswith("hosts need root's rights")


@needs_hosts
@pytest.mark.timeout(300)
def test_shards_on_hosts_are_compared_and_give_the_same_scores(tmp_path: Path):
    json_file = tmp_path / "hosts.json"
    command = (sys.executable, "-m", "serving.cli", *COMPARE, "--arrivals", "constant", "--workers", "2")
    command = (*command, "--json", str(json_file))
    process = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    found = read_reported(json_file)
    assert isinstance(found, Comparison), process.stderr
    # 1 if this machine was so busy that the generator itself was late, which the comparison says.
    assert process.returncode == (0 if found.valid else 1), process.stderr
    assert [arm.name for arm in found.arms] == ["1 card", "2 shards, TCP"]
    assert [(run.due, run.errors) for arm in found.arms for run in (*arm.cold_runs, *arm.runs)] == [(10, {})] * 4
    assert found.setup["serving processes"] == "2"
    assert found.setup["network"] == "a veth pair for each host, no delay made"
    assert found.setup["same scores"].startswith("of 8 requests, to ")


@needs_hosts
def test_ctrl_c_ends_a_comparison_and_leaves_no_host(tmp_path: Path):
    with running(*COMPARE, "--shards", "1", "--store", str(tmp_path)) as program:
        process_id = program.process.pid
        program.read_until("round 1 of 1: 1 shard, TCP")
        wait_until(lambda: nodes_on(program) == 1, "a shard node runs on its host")
        assert left_of(process_id) == [f"shardrank-{process_id}-0", f"sr{process_id}-0"]
        assert program.stop(signal.SIGINT) == 130, program.output
        assert left_of(process_id) == []


@needs_hosts
def test_of_a_comparison_that_was_killed_no_process_is_left_and_its_hosts_are_found_by_name(tmp_path: Path):
    with running(*COMPARE, "--shards", "1", "--store", str(tmp_path)) as program:
        process_id = program.process.pid
        program.read_until("round 1 of 1: 1 shard, TCP")
        try:
            # Long before that, a node has asked the kernel to be killed with its parent.
            wait_until(lambda: is_listening(program), "a shard node listens on its host")
            program.process.kill()
            wait_until(lambda: nodes_on(program) == 0, "the node has ended")
            assert left_of(process_id) == [f"shardrank-{process_id}-0", f"sr{process_id}-0"]
        finally:
            subprocess.run(("ip", "netns", "delete", f"shardrank-{process_id}-0"), check=True)
        wait_until(lambda: left_of(process_id) == [], "the link has gone with its namespace")


def nodes_on(program: Program) -> int:
    """Processes in the program's first host."""
    told = ("ip", "netns", "pids", f"shardrank-{program.process.pid}-0")
    return len(subprocess.run(told, capture_output=True, text=True, check=False).stdout.split())


def is_listening(program: Program) -> bool:
    """Whether a shard node listens on the program's first host."""
    host = Host(f"shardrank-{program.process.pid}-0", "", "", "")
    told = subprocess.run(host.inside(("cat", "/proc/net/tcp")), capture_output=True, text=True, check=False)
    # proc(5): the local port in hexadecimal, and 0A for a socket that listens.
    return any(" 0A " in line and ":1B58 " in line for line in told.stdout.splitlines())
