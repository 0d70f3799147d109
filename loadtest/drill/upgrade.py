"""`drill upgrade`: one process after the other is replaced by another release's, under a load that checks every answer.

The processes before are those of another checkout of this repository. At the end a node of each shard is killed. There
are two serving processes, each at addresses of its own: the load leaves one before it is replaced, as a balancer would.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

import httpx
import torch
from pydantic import Field

from loader.errors import ShardrankError
from loader.progress import Progress, no_progress
from loader.snapshot.tables import Frozen
from loadtest.compare.arms import Transport
from loadtest.drill.fleet import FIRST_VERSION, READY_TIMEOUT_S, REPLICATE_BYTES, polled
from loadtest.drill.load import API_PATTERN, MAX_DETAIL_CHARS, TIMEOUT_MS, AnswerCounts, Ask, counted, oracle_ask
from loadtest.drill.oracle import Kind, Method, OracleShape, OracleWriter, Question, make_questions
from loadtest.drill.processes import child_process, ended
from loadtest.drill.running import Report
from loadtest.errors import DrillError
from loadtest.servers import HOST, THIS_CHECKOUT, checked_checkout, commit_of, summed
from serving.client import AsyncClient, RetryPolicy
from serving.fleet.supervisor import describe_exit, shardrank_command
from shard_node.answer import WIRE_FORMS
from shard_node.wire.address import Address
from shard_node.wire.client import ShardClient

Release: TypeAlias = Literal["old", "new"]
Order: TypeAlias = Literal["nodes-first", "serving-first"]

SHARDS = REPLICAS = SERVERS = 2
SINGLE = ("user", "topic", "tag")
"""Features whose bags have one id, so that rows of their tables travel as they are stored, and others as sums."""
QUESTIONS_EACH = 128
MAX_DETAILS = 20
STOP_TIMEOUT_S = 30.0
# Ports that are given to nobody who doesn't ask for one by number: they must be free again after a process has ended.
_PORTS = range(20_000, 32_000)


class UpgradeDrillConfig(Frozen):
    """An upgrade drill.

    Attributes:
        old: folder of the checkout that runs before.
        orders: what is upgraded first.
        settle_s: under load after each step; only these times' bytes are counted.
        in_flight: requests that are always out.
    """

    NAME: ClassVar[str] = "upgrade"
    old: Path
    transports: tuple[Transport, ...] = Field(default=("unix", "tcp"), min_length=1)
    orders: tuple[Order, ...] = Field(default=("nodes-first", "serving-first"), min_length=1)
    settle_s: float = Field(default=3.0, gt=0, le=600)
    in_flight: int = Field(default=2, ge=1, le=256)
    shape: OracleShape = OracleShape()


class UpgradeStep(AnswerCounts):
    """What was answered from the begin of a step to the begin of the next.

    Attributes:
        nodes, serving: how many of them ran which release after the step.
        stored_bytes, float16_bytes, float32_bytes: of shards' answers in each form, as serving processes counted them
            in the time after the step; a release that does not count has none.
    """

    transport: Transport
    order: Order
    step: str
    nodes: str
    serving: str
    stored_bytes: int
    float16_bytes: int
    float32_bytes: int


class UpgradeReport(Report, AnswerCounts):
    """What `drill upgrade --json` writes.

    Attributes:
        old_commit, new_commit: as `git describe` names what was run, with `-dirty` where files differ from it.
        steps: in the order in which they were done.
    """

    old_commit: str
    new_commit: str
    in_flight: int
    settle_s: float
    steps: tuple[UpgradeStep, ...]


def make_report(
    config: UpgradeDrillConfig, steps: Sequence[UpgradeStep], details: Sequence[str], problems: Sequence[str] = ()
) -> UpgradeReport:
    """Judge what was seen, beside the problems that are known already."""
    counts = {name: sum(getattr(step, name) for step in steps) for name in AnswerCounts.model_fields}
    found = counted({name: counts[name] for name in ("failed", "mixed", "wrong")})
    for step in steps:
        name = f"{step.transport}, {step.order}, {step.step}"
        if not step.answers:
            found.append(f"{name}: nothing was answered")
        is_new = "old" not in step.nodes + step.serving
        if is_new and not (step.stored_bytes and step.float16_bytes):
            found.append(f"{name}: stored rows or float16 sums were not used, though all processes are new")
    return UpgradeReport(
        problems=(*problems, *found),
        details=tuple(details),
        old_commit=commit_of(config.old),
        new_commit=commit_of(THIS_CHECKOUT),
        in_flight=config.in_flight,
        settle_s=config.settle_s,
        steps=tuple(steps),
        **counts,
    )


class ClosedLoopLoad:
    """Asks one server after the other, and judges every answer.

    Attributes:
        servers: asks of those that are asked now, by name; one that is taken out gets no further requests.
        kinds: of the answers since they were last taken.
        details: of the first answers that are not right.
    """

    def __init__(self) -> None:
        self.servers: dict[str, Sequence[Ask]] = {}
        self.kinds: Counter[Kind] = Counter()
        self.details: list[str] = []
        self._numbers = itertools.count()
        self._is_over = False

    @contextlib.asynccontextmanager
    async def asking(self, in_flight: int) -> AsyncIterator[None]:
        """Ask while the block runs; then wait for the answers that are out."""
        workers = [asyncio.create_task(self._work()) for _ in range(in_flight)]
        try:
            yield
        finally:
            self._is_over = True
            await asyncio.gather(*workers)

    def take(self) -> dict[str, int]:
        """Return the fields of `AnswerCounts`, of the answers since the last call."""
        kinds, self.kinds = self.kinds, Counter()
        return {"answers": kinds.total(), **{kind.name.lower(): kinds[kind] for kind in Kind if kind is not Kind.OK}}

    async def _work(self) -> None:
        while not self._is_over:
            turn, place = divmod(next(self._numbers), len(API_PATTERN))
            server = list(self.servers)[turn % len(self.servers)]
            _, judged = await self.servers[server][API_PATTERN[place]](turn)
            verdict = judged()
            self.kinds[verdict.kind] += 1
            if verdict.kind is not Kind.OK and len(self.details) < MAX_DETAILS:
                self.details.append(f"{verdict.kind.name.lower()} {server}: {verdict.detail[:MAX_DETAIL_CHARS]}")


@dataclass(slots=True)
class _Fleet:
    """Processes of two releases that serve one snapshot, and what they are asked.

    Attributes:
        nodes: addresses of shard nodes by name, `node-SHARD-REPLICA`.
        ports: of HTTP and gRPC, by name of serving process.
        releases: that each process has or had last.
        processes: those that run.
    """

    config: UpgradeDrillConfig
    snapshot: Path
    folder: Path
    stack: contextlib.AsyncExitStack
    load: ClosedLoopLoad
    questions: Mapping[Method, list[Question]]
    nodes: dict[str, str]
    ports: dict[str, tuple[int, int]]
    releases: dict[str, Release] = field(default_factory=dict)
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    async def start(self, name: str, release: Release) -> None:
        """Start a process of a release, wait until it answers, and ask it if it serves. Raises DrillError."""
        checkout = THIS_CHECKOUT if release == "new" else self.config.old
        command, log = shardrank_command(*self._arguments(name, release)), self.folder / f"{name}.log"
        process = await self.stack.enter_async_context(child_process(command, log, checkout))
        self.processes[name], self.releases[name] = process, release
        answers = self._node_answers if name in self.nodes else self._server_answers
        if not await polled(lambda: answers(name), bool, READY_TIMEOUT_S):
            raise DrillError(f"{name}, {release}: does not answer after {READY_TIMEOUT_S:g} s; its log: {log}")
        if name in self.ports:
            self.load.servers[name] = self._asks(name)

    async def stop(self, name: str, how: signal.Signals) -> int:
        """Ask a serving process no longer, end a process, and return its exit code. Raises DrillError."""
        self.load.servers.pop(name, None)
        process = self.processes.pop(name)
        process.send_signal(how)
        try:
            return await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            raise DrillError(f"{name}: still runs {STOP_TIMEOUT_S:g} s after {how.name}") from None

    async def bytes_by_form(self) -> Counter[str]:
        """Read what serving processes have counted so far. Raises DrillError if a process has ended by itself."""
        total: Counter[str] = Counter()
        for name in self.processes:
            self._check(name)
        async with httpx.AsyncClient(timeout=10) as client:
            for name in self.ports:
                text = (await client.get(f"http://{HOST}:{self.ports[name][0]}/metrics")).text
                found = summed(text, "shardrank_shard_answer_bytes_total", "form")
                total.update({form: int(count) for form, count in found.items()})
        return total

    def mix(self, names: Mapping[str, object]) -> str:
        """Say how many of these processes run which release."""
        running = Counter(self.releases[name] for name in names if name in self.processes)
        return ", ".join(f"{count} {release}" for release, count in sorted(running.items(), reverse=True))

    def _arguments(self, name: str, release: Release) -> tuple[str, ...]:
        common = ("--snapshot", str(self.snapshot), "--replicate-bytes", str(REPLICATE_BYTES), "--no-verify")
        if name in self.nodes:
            shard = f"{name.split('-')[1]}/{SHARDS}"
            return ("shard-node", *common, "--shard", shard, "--listen", self.nodes[name])
        http_port, grpc_port = self.ports[name]
        by_shard = [self.nodes[f"node-{shard}-0"] + "," + self.nodes[f"node-{shard}-1"] for shard in range(SHARDS)]
        shards = [text for addresses in by_shard for text in ("--shard", addresses)]
        # A release that sends float32 sums alone does not know the flag.
        wire = ("--wire-dtype", "float16") if release == "new" else ()
        ports = ("--http-port", str(http_port), "--grpc-port", str(grpc_port))
        return ("serve", *common, *shards, *ports, "--dtype", "float32", *wire)

    async def _node_answers(self, name: str) -> bool:
        self._check(name)
        client = ShardClient(Address.parse(self.nodes[name]))
        try:
            await client.info()
        except ShardrankError:
            return False
        finally:
            await client.close()
        return True

    async def _server_answers(self, name: str) -> bool:
        self._check(name)
        async with httpx.AsyncClient(timeout=10) as client:
            try:
                return (await client.get(f"http://{HOST}:{self.ports[name][0]}/readyz")).status_code == 200
            except httpx.TransportError:
                return False

    def _check(self, name: str) -> None:
        if (code := self.processes[name].returncode) is not None:
            raise ended(code, self.folder / f"{name}.log")

    def _asks(self, name: str) -> list[Ask]:
        """Open clients of a process that has just been started, and return what asks it over each API."""
        clients = []
        for scheme, port in zip(("http", "grpc"), self.ports[name], strict=True):
            # No request is sent a second time, whatever happens to it.
            retry = RetryPolicy(max_attempts=1)
            clients.append(AsyncClient(f"{scheme}://{HOST}:{port}", timeout_ms=TIMEOUT_MS, retry=retry))
            self.stack.push_async_callback(clients[-1].close)
        methods: tuple[Method, ...] = ("rank", "lookup")
        model = self.config.shape.model
        return [oracle_ask(model, [client], self.questions[method]) for method in methods for client in clients]


async def run_upgrade_drill(
    config: UpgradeDrillConfig, folder: Path, progress: Progress = no_progress
) -> UpgradeReport:
    """Upgrade a fleet of its own for each transport and order.

    Raises:
        LoadConfigError: `old` is no checkout of this repository.
        ShardrankError: a process does not come up, or ends by itself.
    """
    config = config.model_copy(update={"old": checked_checkout(config.old)})
    torch.set_num_threads(1)
    writer = OracleWriter(config.shape)
    snapshot = await asyncio.to_thread(writer.write, folder / "store", FIRST_VERSION)
    questions = make_questions(writer.spec, QUESTIONS_EACH, single=SINGLE)
    steps: list[UpgradeStep] = []
    details: list[str] = []
    problems: list[str] = []
    num_steps = len(config.transports) * len(config.orders) * len(plan("nodes-first"))
    for number, (transport, order) in enumerate(itertools.product(config.transports, config.orders)):
        own = folder / str(number)
        own.mkdir()
        async with contextlib.AsyncExitStack() as stack:
            load = ClosedLoopLoad()
            fleet = _Fleet(config, snapshot, own, stack, load, questions, *_addresses(transport, own))
            for name in (*fleet.nodes, *fleet.ports):
                await fleet.start(name, "old")
            async with load.asking(config.in_flight):
                for what, name in plan(order):
                    problems += await _done(fleet, what, name)
                    before = await fleet.bytes_by_form()
                    await asyncio.sleep(config.settle_s)
                    spent = await fleet.bytes_by_form() - before
                    steps.append(
                        UpgradeStep(
                            transport=transport,
                            order=order,
                            step=f"{what} {name}".strip(),
                            nodes=fleet.mix(fleet.nodes),
                            serving=fleet.mix(fleet.ports),
                            **{f"{form}_bytes": spent[form] for form in WIRE_FORMS},
                            **load.take(),
                        )
                    )
                    progress("upgrading", len(steps), num_steps)
            # Those that were out when the last step ended are of that step.
            more = {key: getattr(steps[-1], key) + count for key, count in load.take().items()}
            steps[-1] = steps[-1].model_copy(update=more)
            details += load.details
    return make_report(config, steps, details[:MAX_DETAILS], problems)


def plan(order: Order) -> list[tuple[str, str]]:
    """List the steps, what is done to which process: an upgrade of each, then the death of a node of each shard."""
    nodes = [f"node-{shard}-{replica}" for shard in range(SHARDS) for replica in range(REPLICAS)]
    servers = [f"serve-{number}" for number in range(SERVERS)]
    names = nodes + servers if order == "nodes-first" else servers + nodes
    killed = [f"node-{shard}-{shard % REPLICAS}" for shard in range(SHARDS)]
    deaths = [(what, name) for name in killed for what in ("kill -9", "start")]
    return [("begin", ""), *(("upgrade", name) for name in names), *deaths]


async def _done(fleet: _Fleet, what: str, name: str) -> list[str]:
    """Do a step, and return what was not as it must be."""
    problems = []
    if what == "kill -9":
        await fleet.stop(name, signal.SIGKILL)
    if what == "upgrade" and (code := await fleet.stop(name, signal.SIGTERM)):
        problems.append(f"{name}: after SIGTERM it ended with {describe_exit(code)}")
    if what in ("upgrade", "start"):
        await fleet.start(name, "new")
    return problems


def _addresses(transport: Transport, folder: Path) -> tuple[dict[str, str], dict[str, tuple[int, int]]]:
    """Choose where nodes listen, and the ports of serving processes."""
    with contextlib.ExitStack() as stack:
        ports = _free_ports(stack)
        names = [name for what, name in plan("nodes-first") if what == "upgrade"]
        nodes = {
            name: f"unix:{folder / name}.sock" if transport == "unix" else f"{HOST}:{next(ports)}"
            for name in names
            if name.startswith("node-")
        }
        return nodes, {name: (next(ports), next(ports)) for name in names if name not in nodes}


def _free_ports(stack: contextlib.ExitStack) -> Iterator[int]:
    """Find ports that are free, and hold them until the stack is left."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with contextlib.suppress(OSError):
            stack.enter_context(socket.create_server((HOST, port)))
            yield port
    raise DrillError(f"no port of {HOST} from {_PORTS.start} to {_PORTS.stop} is free")
