"""`drill upgrade`: one process after the other is replaced by another release's, under a load that checks every answer.

The processes before are those of another checkout of this repository. At the end a node of each shard is killed. There
are two serving processes, each at addresses of its own: the load leaves one before it is replaced, as a balancer would.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import httpx

from loader.errors import ShardrankError
from loader.progress import Progress
from loadtest.drill.answers import answer_problems, count_kinds
from loadtest.drill.config import Order, Transport, UpgradeDrillConfig
from loadtest.drill.fleet import FIRST_VERSION, REPLICATE_BYTES
from loadtest.drill.load import (
    API_PATTERN,
    GRPC_CHANNELS,
    MAX_DETAILS,
    TIMEOUT_MS,
    OracleRequests,
    api_of,
    describe,
    verdict_of,
)
from loadtest.drill.oracle import Kind, OracleWriter
from loadtest.drill.processes import check_running, child_process, free_ports
from loadtest.drill.report import Report
from loadtest.load.closed_loop import ClosedLoop
from loadtest.load.senders import Failure, Outgoing, Sender
from loadtest.servers import HOST, THIS_CHECKOUT, checked_checkout, commit_of, summed
from serving.fleet.supervisor import Child, describe_exit, shardrank_command
from shard_node.answer import WIRE_FORMS
from shard_node.wire.address import Address
from shard_node.wire.client import ShardClient

Release: TypeAlias = Literal["old", "new"]

SHARDS = REPLICAS = SERVERS = 2
NODES = tuple(f"node-{shard}-{replica}" for shard in range(SHARDS) for replica in range(REPLICAS))
SERVING = tuple(f"serve-{number}" for number in range(SERVERS))
SINGLE = ("user", "topic", "tag")
"""Features whose bags have one id, so that rows of their tables travel as they are stored, and others as sums."""
QUESTIONS_EACH = 128
STOP_TIMEOUT_S = 30.0


def plan_steps(order: Order) -> list[tuple[str, str]]:
    """List the steps, what is done to which process: an upgrade of each, then the death of a node of each shard."""
    names = NODES + SERVING if order == "nodes-first" else SERVING + NODES
    killed = [f"node-{shard}-{shard % REPLICAS}" for shard in range(SHARDS)]
    deaths = [(what, name) for name in killed for what in ("kill -9", "start")]
    return [("begin", ""), *(("upgrade", name) for name in names), *deaths]


@dataclass(slots=True)
class UpgradeLoad:
    """A closed loop that asks one server after the other, and what was answered.

    Attributes:
        senders: of the serving processes that are asked now, HTTP and gRPC, by name; one that is removed gets no
            further requests.
        kinds: of the answers since `count` was last called.
        details: of the first answers that are not right.
    """

    senders: dict[str, tuple[Sender, Sender]] = field(default_factory=dict)
    kinds: list[Kind] = field(default_factory=list)
    details: list[str] = field(default_factory=list)

    def route(self, number: int) -> Sender:
        """Choose the server in turn, and the API of the request's number."""
        by_server = list(self.senders.values())
        return by_server[number // len(API_PATTERN) % len(by_server)][api_of(number) % 2]

    def record(self, request: Outgoing, failure: Failure | None) -> None:
        """Count one answer."""
        verdict = verdict_of(request, failure)
        self.kinds.append(verdict.kind)
        if verdict.kind is not Kind.OK and len(self.details) < MAX_DETAILS:
            self.details.append(describe(request, verdict))

    def count(self) -> dict[str, int]:
        """Return how many answers of each kind there were since the last call."""
        kinds, self.kinds = self.kinds, []
        return count_kinds(kinds)


@dataclass(slots=True)
class UpgradeFleet:
    """Processes of two releases that serve one snapshot, and their load.

    Attributes:
        folder: of logs.
        addresses: where nodes listen, by name.
        ports: of HTTP and gRPC, by name of serving process.
        releases: of each process, the current or the last one.
        children: that run.
    """

    old: Path
    snapshot: Path
    folder: Path
    stack: contextlib.AsyncExitStack
    requests: OracleRequests
    load: UpgradeLoad
    addresses: dict[str, str]
    ports: dict[str, tuple[int, int]]
    releases: dict[str, Release] = field(default_factory=dict)
    children: dict[str, Child] = field(default_factory=dict)

    async def start(self, name: str, release: Release) -> None:
        """Start a process of a release, wait until it answers, and ask it if it serves. Raises ChildFailedError."""
        checkout = THIS_CHECKOUT if release == "new" else self.old
        command = shardrank_command(*self._arguments(name, release))
        answers = self._node_answers if name in NODES else self._server_answers
        process = child_process(name, command, self.folder, lambda: answers(name), checkout)
        self.children[name], self.releases[name] = await self.stack.enter_async_context(process), release
        if name in self.ports:
            http, grpc = self.ports[name]
            urls = (f"http://{HOST}:{http}", f"grpc://{HOST}:{grpc}")
            senders = [await self.requests.sender(url, GRPC_CHANNELS) for url in urls]
            for sender in senders:
                self.stack.push_async_callback(sender.close)
            self.load.senders[name] = (senders[0], senders[1])

    async def stop(self, name: str, how: signal.Signals) -> int:
        """Ask a serving process no longer, end a process, and return its exit code."""
        self.load.senders.pop(name, None)
        child = self.children.pop(name)
        if how is signal.SIGKILL:
            child.kill()
        else:
            await child.stop(STOP_TIMEOUT_S)
        return await child.wait()

    async def bytes_by_form(self) -> Counter[str]:
        """Read what serving processes have counted so far. Raises ChildFailedError if a process has ended by itself."""
        for child in self.children.values():
            check_running(child)
        total: Counter[str] = Counter()
        async with httpx.AsyncClient(timeout=10) as client:
            for port, _ in self.ports.values():
                metrics = (await client.get(f"http://{HOST}:{port}/metrics")).text
                counts = summed(metrics, "shardrank_shard_answer_bytes_total", "form")
                total.update({form: int(count) for form, count in counts.items()})
        return total

    def count_releases(self, names: Sequence[str]) -> str:
        """Say how many of these processes run which release."""
        running = Counter(self.releases[name] for name in names if name in self.children)
        return ", ".join(f"{count} {release}" for release, count in sorted(running.items(), reverse=True))

    def _arguments(self, name: str, release: Release) -> tuple[str, ...]:
        common = ("--snapshot", str(self.snapshot), "--replicate-bytes", str(REPLICATE_BYTES), "--no-verify")
        if name in NODES:
            shard = f"{name.split('-')[1]}/{SHARDS}"
            return ("shard-node", *common, "--shard", shard, "--listen", self.addresses[name])
        http_port, grpc_port = self.ports[name]
        replicas = [self.addresses[node] for node in NODES]
        shards = [",".join(replicas[first : first + REPLICAS]) for first in range(0, len(replicas), REPLICAS)]
        flags = [text for addresses in shards for text in ("--shard", addresses)]
        # A release that sends float32 sums alone does not know the flag.
        wire = ("--wire-dtype", "float16") if release == "new" else ()
        ports = ("--http-port", str(http_port), "--grpc-port", str(grpc_port))
        return ("serve", *common, *flags, *ports, "--dtype", "float32", *wire)

    async def _node_answers(self, name: str) -> bool:
        client = ShardClient(Address.parse(self.addresses[name]))
        try:
            await client.info()
        except ShardrankError:
            return False
        finally:
            await client.close()
        return True

    async def _server_answers(self, name: str) -> bool:
        async with httpx.AsyncClient(timeout=10) as client:
            try:
                return (await client.get(f"http://{HOST}:{self.ports[name][0]}/readyz")).status_code == 200
            except httpx.TransportError:
                return False


async def run_drill(config: UpgradeDrillConfig, folder: Path, progress: Progress) -> Report:
    """Upgrade a fleet of its own for each transport and order.

    Raises:
        LoadConfigError: `old` is no checkout of this repository.
        ShardrankError: a process does not come up, or ends by itself.
    """
    old = checked_checkout(config.old)
    snapshot = await asyncio.to_thread(OracleWriter(config).write, folder / "store", FIRST_VERSION)
    requests = OracleRequests(config, QUESTIONS_EACH, SINGLE)
    steps: list[dict[str, Any]] = []
    details: list[str] = []
    problems: list[str] = []
    passes = list(itertools.product(config.transports, config.orders))
    for number, (transport, order) in enumerate(passes):
        logs, load = folder / str(number), UpgradeLoad()
        logs.mkdir()
        async with contextlib.AsyncExitStack() as stack:
            fleet = UpgradeFleet(old, snapshot, logs, stack, requests, load, *_addresses(transport, logs))
            for name in (*NODES, *SERVING):
                await fleet.start(name, "old")
            async with ClosedLoop(
                load.route, load.record, in_flight=config.in_flight, begin=time.monotonic(), timeout_s=TIMEOUT_MS / 1000
            ).running():
                for what, name in plan_steps(order):
                    problems += await _do(fleet, what, name)
                    step = {"transport": transport, "order": order, "step": f"{what} {name}".strip()}
                    steps.append(step | await _settled(fleet, config.settle_s))
                    progress("upgrading", len(steps), len(passes) * len(plan_steps(order)))
        # Those that were in flight when the last step ended are of that step.
        steps[-1] |= {kind: steps[-1][kind] + count for kind, count in load.count().items()}
        details += load.details
    figures = {
        **{kind: sum(step[kind] for step in steps) for kind in count_kinds([])},
        "old_commit": commit_of(old),
        "new_commit": commit_of(THIS_CHECKOUT),
        "in_flight": config.in_flight,
        "settle_s": config.settle_s,
        "steps": steps,
    }
    problems += upgrade_problems(figures)
    return Report(figures=figures, problems=tuple(problems), details=tuple(details[:MAX_DETAILS]))


async def _do(fleet: UpgradeFleet, what: str, name: str) -> list[str]:
    """Do a step, and return what was not as it must be."""
    problems = []
    if what == "kill -9":
        await fleet.stop(name, signal.SIGKILL)
    if what == "upgrade" and (code := await fleet.stop(name, signal.SIGTERM)):
        problems.append(f"{name}: after SIGTERM it ended with {describe_exit(code)}")
    if what in ("upgrade", "start"):
        await fleet.start(name, "new")
    return problems


async def _settled(fleet: UpgradeFleet, seconds: float) -> dict[str, Any]:
    """Wait under load; what was answered since the step before, and the bytes of shards' answers of these seconds."""
    before = await fleet.bytes_by_form()
    await asyncio.sleep(seconds)
    counted = await fleet.bytes_by_form() - before
    return {
        "nodes": fleet.count_releases(NODES),
        "serving": fleet.count_releases(SERVING),
        **{f"{form}_bytes": counted[form] for form in WIRE_FORMS},
        **fleet.load.count(),
    }


def upgrade_problems(figures: Mapping[str, Any]) -> list[str]:
    """Return what must not be."""
    problems = answer_problems(figures)
    for step in figures["steps"]:
        name = f"{step['transport']}, {step['order']}, {step['step']}"
        if not step["answers"]:
            problems.append(f"{name}: nothing was answered")
        is_new = "old" not in step["nodes"] + step["serving"]
        if is_new and not (step["stored_bytes"] and step["float16_bytes"]):
            problems.append(f"{name}: stored rows or float16 sums were not used, though all processes are new")
    return problems


def _addresses(transport: Transport, folder: Path) -> tuple[dict[str, str], dict[str, tuple[int, int]]]:
    """Choose where nodes listen, and the ports of serving processes."""
    ports = free_ports(len(NODES) + 2 * SERVERS)
    nodes = {
        name: f"unix:{folder / name}.sock" if transport == "unix" else f"{HOST}:{port}"
        for name, port in zip(NODES, ports, strict=False)
    }
    pairs = zip(ports[-SERVERS:], ports[-2 * SERVERS : -SERVERS], strict=True)
    return nodes, dict(zip(SERVING, pairs, strict=True))
