"""Hosts with a network between them: network namespaces (ip-netns(8)) on one machine, each with a link to it.

A link is a veth pair: one end here, the other one in the host's namespace. Hosts have no way to each other; shard nodes
need none. netem (tc-netem(8)) delays what an end sends, so half of a delay on each end adds all of it to a round trip.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest.errors import HostsError, NoNetemError
from serving.fleet.process import STOP_SIGNALS

NAMESPACES = Path("/var/run/netns")
LINKS = Path("/sys/class/net")
NETWORK = ipaddress.IPv4Network("198.18.0.0/15")
"""RFC 2544: for benchmarks of networks, and so nobody's."""
BLOCK_PREFIX = 25
INSIDE = "eth0"
# netem drops what is beyond this many packets; its own default, 1000, would be full with some ten milliseconds of load.
QUEUE_PACKETS = 100_000
COMMAND_TIMEOUT_S = 30.0
_UNKNOWN_QDISC = ("qdisc kind is unknown", "No such file or directory")

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace, and its link to this machine.

    Attributes:
        namespace: its name, `shardrank-<process id>-<number>`.
        link: name of this machine's end, `sr<process id>-<number>`; the other end is `eth0`.
        near: address of this machine's end.
        address: of the host's.
    """

    namespace: str
    link: str
    near: str
    address: str

    def inside(self, command: Command) -> Command:
        """Make a command line that runs there, as the very process that is started."""
        # Not `ip netns exec`: it mounts a new /sys, in which a process does not find the limits of its control group.
        return ("nsenter", f"--net={NAMESPACES / self.namespace}", "--", *command)


def name_hosts(count: int, process_id: int, taken: Collection[str]) -> tuple[Host, ...]:
    """Choose names and addresses of hosts.

    Args:
        count: how many, up to 64.
        process_id: is part of all names.
        taken: addresses that this machine has; none of the block of 128 that hosts get is among them.

    Raises:
        HostsError: no block of addresses is free.
    """
    blocks = list(NETWORK.subnets(new_prefix=BLOCK_PREFIX))
    used = {ipaddress.IPv4Address(one) for one in taken}
    # By process id, so that runs that begin at once don't choose the same one.
    turned = (blocks[(process_id + place) % len(blocks)] for place in range(len(blocks)))
    block = next((one for one in turned if not any(address in one for address in used)), None)
    if block is None:
        raise HostsError(f"this machine has addresses in every block of {NETWORK}; hosts need one that is free")
    return tuple(
        Host(
            namespace=f"shardrank-{process_id}-{number}",
            link=f"sr{process_id}-{number}",
            near=str(block[2 * number]),
            address=str(block[2 * number + 1]),
        )
        for number in range(count)
    )


def link_commands(host: Host) -> list[Command]:
    """List what makes a host and its link."""
    within = ("ip", "-n", host.namespace)
    # RFC 3021: two ends need no more than a /31.
    return [
        ("ip", "netns", "add", host.namespace),
        ("ip", "link", "add", host.link, "type", "veth", "peer", "name", INSIDE, "netns", host.namespace),
        ("ip", "address", "add", f"{host.near}/31", "dev", host.link),
        ("ip", "link", "set", host.link, "up"),
        (*within, "address", "add", f"{host.address}/31", "dev", INSIDE),
        (*within, "link", "set", INSIDE, "up"),
        (*within, "link", "set", "lo", "up"),
    ]


def delay_commands(host: Host, delay_ms: float) -> list[Command]:
    """List what delays a host's packets, by half on each end of its link."""
    netem = ("root", "netem", "limit", str(QUEUE_PACKETS), "delay", f"{delay_ms * 500:.3f}us")
    return [
        ("tc", "qdisc", "add", "dev", host.link, *netem),
        ("tc", "-n", host.namespace, "qdisc", "add", "dev", INSIDE, *netem),
    ]


@contextlib.contextmanager
def running_hosts(count: int, delay_ms: float | None = None) -> Iterator[tuple[Host, ...]]:
    """Keep hosts there while the block runs. What is started in them must have ended before.

    Raises:
        HostsError: they can't be made, or not removed.
        NoNetemError: the kernel can't delay.
    """
    taken = [one.address for ends in psutil.net_if_addrs().values() for one in ends if one.family == socket.AF_INET]
    hosts = name_hosts(count, os.getpid(), taken)
    with contextlib.ExitStack() as stack:
        for host in hosts:
            if (NAMESPACES / host.namespace).exists():
                raise HostsError(
                    f"network namespace {host.namespace!r} is there already, left by a process that was killed; "
                    f"`ip netns delete {host.namespace}` removes it"
                )
            # Before it is made: making it takes several steps, after any of which the rest may fail. The link is
            # removed first: the kernel would remove it some time after the namespace.
            stack.callback(_remove, NAMESPACES / host.namespace, ("ip", "netns", "delete", host.namespace))
            stack.callback(_remove, LINKS / host.link, ("ip", "link", "delete", host.link))
            for command in link_commands(host):
                _run(command)
            for command in [] if delay_ms is None else delay_commands(host, delay_ms):
                _run_netem(command, delay_ms)
        yield hosts


def check_hosts(delay_ms: float | None) -> None:
    """Make a host, as a comparison would, and remove it.

    Raises:
        HostsError: as `running_hosts`; or a program is missing.
        NoNetemError: likewise.
    """
    programs = ("ip", "nsenter") if delay_ms is None else ("ip", "nsenter", "tc")
    if missing := [one for one in programs if shutil.which(one) is None]:
        raise HostsError(f"hosts need {', '.join(missing)}, of the packages iproute2 and util-linux")
    with running_hosts(1, delay_ms):
        pass


def _remove(there: Path, command: Command) -> None:
    if there.exists():
        _run(command)


def _run_netem(command: Command, delay_ms: float | None) -> None:
    try:
        _run(command)
    except HostsError as error:
        if any(text in str(error) for text in _UNKNOWN_QDISC):
            raise NoNetemError(
                f"a delay of {delay_ms:g} ms between hosts: this kernel has no netem (module sch_netem); {error}"
            ) from error
        raise


def _run(command: Command) -> None:
    """Run a command to its end, whatever signal comes: half of it would be left."""
    line = " ".join(command)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        # In a session of its own, so that a terminal's Ctrl-C does not end it half-way.
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostsError(f"`{line}`: {error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if done.returncode:
        denied = any(text in done.stderr for text in ("not permitted", "ermission denied"))
        hint = "; hosts need root's rights" if denied else ""
        raise HostsError(f"`{line}` answered: {done.stderr.strip()}{hint}")
