"""`drill upgrade`: one process after the other is replaced by another release's, under a load that checks every answer.

The processes before are those of another checkout of this repository. At the end a node of each shard is killed. There
are two serving processes, each at addresses of its own: the load leaves one before it is replaced, as a balancer would.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import httpx
import numpy as np

from loader.errors import ShardrankError
from loader.progress import Progress
from loadtest.drill.config import Order, UpgradeDrillConfig
from loadtest.drill.fleet import FIRST_VERSION, REPLICATE_BYTES, OracleRecorder, count_kinds, drill_process, free_ports
from loadtest.drill.oracle import APIS, TIMEOUT_MS, OracleRequests, api_of, oracle_spec, write_oracle
from loadtest.drill.report import Limit, Report, answer_limits, make_report
from loadtest.load.loops import ClosedLoop
from loadtest.load.senders import Sender
from loadtest.servers import HOST, THIS_CHECKOUT, Server, checked_checkout, commit_of, summed
from serving.fleet.supervisor import ChildSpec, NotYetError, Supervisor, describe_exit, shardrank_command
from shard_node.answer import WIRE_FORMS
from shard_node.wire.address import Address
from shard_node.wire.client import ShardClient

Release: TypeAlias = Literal["old", "new"]

NODES = ("node-0-0", "node-0-1", "node-1-0", "node-1-1")
"""Two replicas of two shards."""
SERVING = ("serve-0", "serve-1")
SINGLE = ("user", "topic", "tag")
"""Features whose bags have one id, so that rows of their tables travel as they are stored, and others as sums."""


def plan_steps(order: Order) -> list[tuple[str, str]]:
    """List the steps, what is done to which process: an upgrade of each, then the death of a node of each shard."""
    names = NODES + SERVING if order == "nodes-first" else SERVING + NODES
    deaths = [(what, name) for name in ("node-0-0", "node-1-1") for what in ("kill -9", "start")]
    return [("begin", ""), *(("upgrade", name) for name in names), *deaths]


@dataclass(slots=True)
class UpgradeFleet:
    """Processes of two releases that serve one snapshot, by name, and what was answered.

    Attributes:
        releases: the current or the last one of each process.
        senders: of the serving processes that are asked now, HTTP and gRPC; one that is removed gets no more requests.
    """

    old: Path
    snapshot: Path
    logs: Path
    stack: contextlib.AsyncExitStack
    requests: OracleRequests
    addresses: dict[str, str]
    servers: dict[str, Server]
    releases: dict[str, Release] = field(default_factory=dict)
    processes: dict[str, Supervisor] = field(default_factory=dict)
    senders: dict[str, list[Sender]] = field(default_factory=dict)
    recorder: OracleRecorder = field(default_factory=OracleRecorder)

    async def start(self, name: str, release: Release) -> None:
        """Start a process of a release, wait until it answers, and ask it if it serves. Raises FleetError."""
        # Without the second one Python would look in the working directory first.
        code = {"PYTHONPATH": str(THIS_CHECKOUT if release == "new" else self.old), "PYTHONSAFEPATH": "1"}
        spec = ChildSpec(name, self._command(name, release), lambda process_id: self._probe(name), code)
        self.processes[name] = await self.stack.enter_async_context(drill_process(spec, self.logs))
        self.releases[name] = release
        if name in SERVING:
            targets = self.servers[name].target("json"), self.servers[name].target("grpc")
            self.senders[name] = [await self.requests.sender(target) for target in targets]
            for sender in self.senders[name]:
                self.stack.push_async_callback(sender.close)

    async def do(self, what: str, name: str) -> list[str]:
        """Do a step, and return what was not as it must be. A serving process is left before it ends."""
        problems = []
        if what in ("upgrade", "kill -9"):
            self.senders.pop(name, None)
            supervisor = self.processes.pop(name)
            child = supervisor.children[name]
            if what == "kill -9":
                child.kill()
            await supervisor.stop()
            if (code := await child.wait()) and what == "upgrade":
                problems.append(f"{name}: after SIGTERM it ended with {describe_exit(code)}")
        if what in ("upgrade", "start"):
            await self.start(name, "new")
        return problems

    async def settle(self, seconds: float) -> dict[str, Any]:
        """Wait under load; return which release runs where, and the bytes of shards' answers meanwhile."""
        before = await self.bytes_by_form()
        await asyncio.sleep(seconds)
        counted = await self.bytes_by_form() - before
        releases: dict[str, str] = {}
        for kind, names in (("nodes", NODES), ("serving", SERVING)):
            running = Counter(self.releases[name] for name in names if name in self.processes)
            releases[kind] = ", ".join(f"{count} {release}" for release, count in sorted(running.items(), reverse=True))
        return releases | {f"{form}_bytes": counted[form] for form in WIRE_FORMS}

    def route(self, number: int) -> Sender:
        """Choose the server in turn, and the API of the request's number."""
        by_server = list(self.senders.values())
        return by_server[number // len(APIS) % len(by_server)][api_of(number) % 2]

    async def bytes_by_form(self) -> Counter[str]:
        """Read what serving processes have counted so far. Raises FleetError if a process has ended by itself."""
        for name, supervisor in self.processes.items():
            child = supervisor.children[name]
            if child.pid is None:
                raise child.failure("has ended by itself")
        total: Counter[str] = Counter()
        for server in self.servers.values():
            metrics = await asyncio.to_thread(server.metrics)
            counts = summed(metrics, "shardrank_shard_answer_bytes_total", "form")
            total.update({form: int(count) for form, count in counts.items()})
        return total

    def _command(self, name: str, release: Release) -> tuple[str, ...]:
        flags = ["--snapshot", str(self.snapshot), "--replicate-bytes", str(REPLICATE_BYTES), "--no-verify"]
        if name in NODES:
            flags += ["--shard", f"{name.split('-')[1]}/2", "--listen", self.addresses[name]]
            return shardrank_command("shard-node", *flags)
        for replicas in (NODES[:2], NODES[2:]):
            flags += ["--shard", ",".join(self.addresses[replica] for replica in replicas)]
        flags += ["--http-port", str(self.servers[name].http_port), "--grpc-port", str(self.servers[name].grpc_port)]
        # A release that sends float32 sums alone does not know the flag.
        wire = ("--wire-dtype", "float16") if release == "new" else ()
        return shardrank_command("serve", *flags, "--dtype", "float32", *wire)

    async def _probe(self, name: str) -> None:
        """Raise NotYetError unless it answers."""
        try:
            if name in SERVING:
                async with httpx.AsyncClient() as http:
                    (await http.get(f"{self.servers[name].target('json')}/readyz")).raise_for_status()
            else:
                client = ShardClient(Address.parse(self.addresses[name]))
                async with contextlib.AsyncExitStack() as stack:
                    stack.push_async_callback(client.close)
                    await client.info()
        except (httpx.HTTPError, ShardrankError) as error:
            raise NotYetError(str(error)) from error


async def run_drill(config: UpgradeDrillConfig, folder: Path, progress: Progress) -> Report:
    """Upgrade a fleet for each transport and order. Raises ShardrankError if a process does not come up, or ends."""
    old = checked_checkout(config.old)
    snapshot = await asyncio.to_thread(write_oracle, oracle_spec(config), folder / "store", FIRST_VERSION)
    requests = OracleRequests(config, SINGLE)
    steps: list[dict[str, Any]] = []
    details: list[str] = []
    problems: list[str] = []
    passes = list(itertools.product(config.transports, config.orders))
    for number, (transport, order) in enumerate(passes):
        logs = folder / str(number)
        logs.mkdir()
        async with contextlib.AsyncExitStack() as stack:
            ports = iter(free_ports(len(NODES) + 2 * len(SERVING)))
            servers = {name: Server(next(ports), next(ports), ()) for name in SERVING}
            paths = {name: f"unix:{logs / name}.sock" for name in NODES}
            addresses = paths if transport == "unix" else {name: f"{HOST}:{next(ports)}" for name in NODES}
            fleet = UpgradeFleet(old, snapshot, logs, stack, requests, addresses, servers)
            for name in (*NODES, *SERVING):
                await fleet.start(name, "old")
            timing = {"begin": 0.0, "timeout_s": TIMEOUT_MS / 1000}
            loop = ClosedLoop(fleet.route, fleet.recorder.add, in_flight=config.in_flight, **timing)
            counts: list[int] = []
            try:
                async with loop.running():
                    for what, name in plan_steps(order):
                        problems += await fleet.do(what, name)
                        title = {"transport": transport, "order": order, "step": f"{what} {name}".strip()}
                        steps.append(title | await fleet.settle(config.settle_s))
                        counts.append(len(fleet.recorder))
                        progress("upgrading", len(steps), len(passes) * len(plan_steps(order)))
            except ExceptionGroup as group:
                raise group.exceptions[0] from None
        answers, _, examples = fleet.recorder.records()
        # Those that were in flight when the last step ended are of that step.
        for step, codes in zip(steps[-len(counts) :], np.split(answers["code"], counts[:-1]), strict=True):
            step.update(count_kinds(codes))
        details += examples
    figures = {
        **{kind: sum(step[kind] for step in steps) for kind in count_kinds([])},
        "old_commit": commit_of(old),
        "new_commit": commit_of(THIS_CHECKOUT),
        **config.model_dump(include={"in_flight", "settle_s"}),
        "steps": steps,
    }
    return make_report(figures, upgrade_limits(figures), details, problems)


def upgrade_limits(figures: Mapping[str, Any]) -> list[Limit]:
    """Return what decides the verdict: once all processes are new, stored rows and float16 sums must be used."""
    limits = answer_limits(figures)
    for step in figures["steps"]:
        is_new = "old" not in step["nodes"] + step["serving"]
        for name in ("answers", "stored_bytes", "float16_bytes") if is_new else ("answers",):
            title = f"{step['transport']}, {step['order']}, {step['step']}: {name}"
            limits.append(Limit(title, step[name], 1, "at least"))
    return limits
