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
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import httpx

from loader.errors import ShardrankError
from loader.progress import Progress
from loadtest.drill.answers import answer_limits, count_kinds
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
from loadtest.drill.oracle import Kind, oracle_spec, write_oracle
from loadtest.drill.processes import check_running, child_process, free_ports
from loadtest.drill.report import Limit, Report, make_report
from loadtest.load.loops import ClosedLoop
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
class UpgradeFleet:
    """Processes of two releases that serve one snapshot, and what was answered.

    Attributes:
        folder: of logs.
        addresses: where nodes listen, by name.
        ports: of HTTP and gRPC, by name of serving process.
        releases: of each process, the current or the last one.
        children: that run.
        senders: of the serving processes that are asked now, HTTP and gRPC; one that is removed gets no more requests.
        kinds: of the answers since `count_answers` was last called.
        details: of the first answers that are not right.
    """

    old: Path
    snapshot: Path
    folder: Path
    stack: contextlib.AsyncExitStack
    requests: OracleRequests
    addresses: dict[str, str]
    ports: dict[str, tuple[int, int]]
    releases: dict[str, Release] = field(default_factory=dict)
    children: dict[str, Child] = field(default_factory=dict)
    senders: dict[str, list[Sender]] = field(default_factory=dict)
    kinds: list[Kind] = field(default_factory=list)
    details: list[str] = field(default_factory=list)

    async def start(self, name: str, release: Release) -> None:
        """Start a process of a release, wait until it answers, and ask it if it serves. Raises ChildFailedError."""
        checkout = THIS_CHECKOUT if release == "new" else self.old
        command = shardrank_command(*self._arguments(name, release))
        process = child_process(name, command, self.folder, lambda: self._answers(name), checkout)
        self.children[name], self.releases[name] = await self.stack.enter_async_context(process), release
        if name in SERVING:
            urls = [
                f"{scheme}://{HOST}:{port}" for scheme, port in zip(("http", "grpc"), self.ports[name], strict=True)
            ]
            senders = [await self.requests.sender(url, GRPC_CHANNELS) for url in urls]
            for sender in senders:
                self.stack.push_async_callback(sender.close)
            self.senders[name] = senders

    async def stop(self, name: str, how: signal.Signals) -> int:
        """Ask a serving process no longer, end a process, and return its exit code."""
        self.senders.pop(name, None)
        child = self.children.pop(name)
        if how is signal.SIGKILL:
            child.kill()
        else:
            await child.stop(STOP_TIMEOUT_S)
        return await child.wait()

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

    def count_answers(self) -> dict[str, int]:
        """Return how many answers of each kind there were since the last call."""
        kinds, self.kinds = self.kinds, []
        return count_kinds(kinds)

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

    async def _answers(self, name: str) -> bool:
        try:
            if name in SERVING:
                async with httpx.AsyncClient(timeout=10) as http:
                    return (await http.get(f"http://{HOST}:{self.ports[name][0]}/readyz")).status_code == 200
            async with contextlib.AsyncExitStack() as stack:
                client = ShardClient(Address.parse(self.addresses[name]))
                stack.push_async_callback(client.close)
                await client.info()
        except (ShardrankError, httpx.TransportError):
            return False
        return True


async def run_drill(config: UpgradeDrillConfig, folder: Path, progress: Progress) -> Report:
    """Upgrade a fleet of its own for each transport and order.

    Raises:
        LoadConfigError: `old` is no checkout of this repository.
        ShardrankError: a process does not come up, or ends by itself.
    """
    config = config.model_copy(update={"old": checked_checkout(config.old)})
    snapshot = await asyncio.to_thread(write_oracle, oracle_spec(config), folder / "store", FIRST_VERSION)
    requests = OracleRequests(config, QUESTIONS_EACH, SINGLE)
    steps: list[dict[str, Any]] = []
    details: list[str] = []
    problems: list[str] = []
    passes = list(itertools.product(config.transports, config.orders))
    for number, (transport, order) in enumerate(passes):
        logs = folder / str(number)
        logs.mkdir()
        async with contextlib.AsyncExitStack() as stack:
            fleet = UpgradeFleet(config.old, snapshot, logs, stack, requests, *_addresses(transport, logs))
            for name in (*NODES, *SERVING):
                await fleet.start(name, "old")
            async with _load(fleet, config.in_flight):
                for what, name in plan_steps(order):
                    problems += await _do(fleet, what, name)
                    step = {"transport": transport, "order": order, "step": f"{what} {name}".strip()}
                    steps.append(step | await _settle(fleet, config.settle_s))
                    progress("upgrading", len(steps), len(passes) * len(plan_steps(order)))
        # Those that were in flight when the last step ended are of that step.
        steps[-1] |= {kind: steps[-1][kind] + count for kind, count in fleet.count_answers().items()}
        details += fleet.details
    figures = {
        **{kind: sum(step[kind] for step in steps) for kind in count_kinds([])},
        "old_commit": commit_of(config.old),
        "new_commit": commit_of(THIS_CHECKOUT),
        "in_flight": config.in_flight,
        "settle_s": config.settle_s,
        "steps": steps,
    }
    return make_report(figures, upgrade_limits(figures), details[:MAX_DETAILS], problems)


@contextlib.asynccontextmanager
async def _load(fleet: UpgradeFleet, in_flight: int) -> AsyncIterator[None]:
    """Ask serving processes while the block runs. Raises what it raises, and not the group of the loop's tasks."""
    begin, timeout_s = time.monotonic(), TIMEOUT_MS / 1000
    try:
        async with ClosedLoop(
            fleet.route, fleet.record, in_flight=in_flight, begin=begin, timeout_s=timeout_s
        ).running():
            yield
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


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


async def _settle(fleet: UpgradeFleet, seconds: float) -> dict[str, Any]:
    """Wait under load; what was answered since the step before, and the bytes of shards' answers of these seconds."""
    before = await fleet.bytes_by_form()
    await asyncio.sleep(seconds)
    counted = await fleet.bytes_by_form() - before
    return {
        "nodes": fleet.count_releases(NODES),
        "serving": fleet.count_releases(SERVING),
        **{f"{form}_bytes": counted[form] for form in WIRE_FORMS},
        **fleet.count_answers(),
    }


def upgrade_limits(figures: Mapping[str, Any]) -> list[Limit]:
    """Return what decides the verdict: once all processes are new, stored rows and float16 sums must be used."""
    limits = answer_limits(figures)
    for step in figures["steps"]:
        is_new = "old" not in step["nodes"] + step["serving"]
        for name in ("answers", "stored_bytes", "float16_bytes") if is_new else ("answers",):
            title = f"{step['transport']}, {step['order']}, {step['step']}: {name}"
            limits.append(Limit(title, step[name], 1, "at least"))
    return limits


def _addresses(transport: Transport, folder: Path) -> tuple[dict[str, str], dict[str, tuple[int, int]]]:
    """Choose where nodes listen, and the ports of serving processes."""
    ports = free_ports(len(NODES) + 2 * SERVERS)
    nodes = {
        name: f"unix:{folder / name}.sock" if transport == "unix" else f"{HOST}:{port}"
        for name, port in zip(NODES, ports, strict=False)
    }
    pairs = zip(ports[-SERVERS:], ports[-2 * SERVERS : -SERVERS], strict=True)
    return nodes, dict(zip(SERVING, pairs, strict=True))
