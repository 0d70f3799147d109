"""Compare cards and shards: a model that is served, measured and compared arm by arm.

Each time an arm's server is started anew as users do, measured, and ended. So what differs from one start to the next
(which memory the kernel gives, which core a thread begins on) is in the rounds, over which confidence intervals are
drawn, and not frozen in a ratio; there is a cold measure in every round; and an arm never shares memory and cores with
the servers of the others. In the first round all arms must give the same scores of a few requests.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import methodcaller
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError, model_validator
from rich.console import Console

from loader.errors import ConfigError, ShardrankError
from loader.progress import Progress, no_progress
from loader.snapshot.reader import Snapshot
from loader.snapshot.store import Store
from loader.snapshot.tables import Frozen
from loadtest.documents import check_writable, line
from loadtest.errors import LoadError
from loadtest.load.config import MAX_RATE, MAX_RUN_S, OfferedLoad, RunConfig
from loadtest.load.generator import Generators
from loadtest.load.loops import TIMEOUT_KINDS, Weighed, not_busy_because
from loadtest.load.result import LoadResult
from loadtest.load.run import checked, finish, offered
from loadtest.rounds import COUNTED, FORM, SHARES, Arm, Better, Comparison, Measure, compare_rounds, rotated
from loadtest.servers import HOST, Server, ServerCommand, check_scores, running_server, stopping_on_signals, summed
from loadtest.workloads.catalog import FilmsWorkload, open_workload
from loadtest.workloads.payloads import FORMS, GRPC_APIS
from loadtest.workloads.prepare import prepare_workload
from router.plan import Plan
from serving.cli.output import progress_bars
from serving.client import Client
from serving.fleet.supervisor import shardrank_command
from serving.training.dataset import with_bucketing
from shard_node.bags import Float32Array
from shard_node.buckets import Sharding
from shard_node.cuda.card_set import DeviceChoice

MAX_ARMS = 16

Dtype: TypeAlias = Literal["float32", "bfloat16"]
Transport: TypeAlias = Literal["unix", "tcp"]
TRANSPORTS: dict[Transport, str] = {"unix": "Unix socket", "tcp": "TCP"}
"""Between serving and shard processes, as names of arms spell it."""
Count: TypeAlias = Annotated[int, Field(ge=1, le=64)]
Gigabytes: TypeAlias = Annotated[float, Field(ge=0)]
Row: TypeAlias = tuple[str, Literal["ms", "/s", "B"]]
"""Name and unit of a measure."""
CHECKED_REQUESTS = 8
DESCRIBE_TIMEOUT_S = 5.0
REHEARSAL_S = 2.0
TOLERANCES: dict[Dtype, float] = {"float32": 1e-5, "bfloat16": 0.01}
"""Of scores, which are between 0 and 1. Where rows are divided otherwise, parts of a sum are added in another order; in
bfloat16, a sum whose last bit differs may become the next number, 0.4% away, at the input of every layer. Measured with
random models, whose scores spread by 0.03 to 0.05: up to 3e-7 between arms in float32 and 0.0016 in bfloat16."""
HALVES_TOLERANCE = 1e-3
"""Where shards are told to send float16 sums: these differ by one part in 2048. Measured: up to 3e-5 in float32."""
TO_SHARDS = "to shards"
"""Key of the bytes sent to shards in `wire_bytes`; the other keys are the forms of their replies."""


class ServedArm(Frozen):
    """What is compared: cards of each process that has rows, the serving one (`shards` is None) or shard processes."""

    cards: int
    shards: int | None = None
    transport: Transport = "unix"

    @property
    def name(self) -> str:
        """Write it as `2 cards`, `2 shards, Unix socket`, or `2 shards of 4 cards, TCP`."""
        cards = f"{self.cards} card{'s' if self.cards > 1 else ''}"
        if self.shards is None:
            return cards
        each = "" if self.cards == 1 else f" of {cards}"
        return f"{self.shards} shard{'s' if self.shards > 1 else ''}{each}, {TRANSPORTS[self.transport]}"


class CompareConfig(Frozen):
    """Which arms, how each is measured, and what all of them are served with. GB are 10^9 bytes.

    Attributes:
        cards, shards: each number is an arm, of shards with each of the transports and the first number of cards.
        cold_s, warmup_s, duration_s: from a server's start; before each measure after that; of such a measure.
        shares: percent of the smallest capacity of all arms that each is offered; empty for none.
        seed: of the times; round i of every arm has the same.
        card_memory_gb, hot_gb: of each card; None for the server's default.
        pinned_memory_gb, memory_budget_gb: of all processes of an arm that hold rows; None for no bound on RAM.
    """

    cards: tuple[Count, ...] = Field(default=(1, 2, 4), min_length=1)
    shards: tuple[Count, ...] = ()
    transports: tuple[Transport, ...] | None = Field(default=None, min_length=1)
    rounds: int = Field(default=6, ge=1, le=1000)
    rate: float = Field(default=50.0, gt=0, le=MAX_RATE)
    cold_s: float = Field(default=2.0, gt=0, le=MAX_RUN_S)
    warmup_s: float = Field(default=2.0, ge=0, le=MAX_RUN_S)
    duration_s: float = Field(default=10.0, gt=0, le=MAX_RUN_S)
    in_flight: int = Field(default=32, ge=1, le=4096)
    shares: tuple[Annotated[int, Field(ge=1, le=100)], ...] = (30, 60, 80)
    seed: int = Field(default=0, ge=0, lt=2**31)
    device: str = "auto"
    card_memory_gb: float | None = Field(default=None, gt=0)
    hot_gb: Gigabytes | None = None
    pinned_memory_gb: Gigabytes = 16.0
    memory_budget_gb: Gigabytes | None = None
    peer_access: Literal["auto", "required"] = "auto"
    replicate_bytes: int = Field(default=0, ge=0)
    sharding: Sharding = "hash"
    workers: Count = 1
    dtype: Literal["auto"] | Dtype = "auto"
    wire_dtype: Literal["auto", "float32", "float16"] = "auto"

    @model_validator(mode="after")
    def _arms_fit(self) -> Self:
        arms = self.arms
        if len(set(arms)) != len(arms) or not 2 <= len(arms) <= MAX_ARMS:
            raise ValueError(
                f"cards: {list(self.cards)}, and shards: {list(self.shards)} with each transport, are {len(arms)} "
                f"arms; a comparison has 2 to {MAX_ARMS} different ones"
            )
        if self.transports is not None and not self.shards:
            raise ValueError(f"transports: {list(self.transports)} are between shards, of which there are none")
        if len(set(self.shares)) != len(self.shares):
            raise ValueError(f"shares: {list(self.shares)} are not different percents")
        return self

    def tolerance(self, dtype: Dtype) -> float:
        """Choose how far scores of arms may be from each other, by the dtypes of dense models and of shards' sums."""
        return max(TOLERANCES[dtype], HALVES_TOLERANCE if self.shards and self.wire_dtype == "float16" else 0.0)

    @property
    def arms(self) -> tuple[ServedArm, ...]:
        """List the arms in the order of the table; the first is the baseline."""
        return (
            *(ServedArm(cards=cards) for cards in self.cards),
            *(
                ServedArm(cards=self.cards[0], shards=shards, transport=transport)
                for shards in self.shards
                for transport in self.transports or ("unix",)
            ),
        )


def server_commands(arm: ServedArm, config: CompareConfig, snapshot: Path, folder: Path) -> tuple[ServerCommand, ...]:
    """List an arm's shard nodes, and last what serves; the folder gets logs and sockets of this start alone."""
    # Without shards each of several serving processes holds all rows, on the same cards.
    holders, sharers = (config.workers, config.workers) if arm.shards is None else (arm.shards, 1)
    budgets = {
        "card-memory-gb": (config.card_memory_gb, sharers),
        "pinned-memory-gb": (config.pinned_memory_gb, holders),
        "hot-gb": (config.hot_gb, sharers),
        "memory-budget-gb": (config.memory_budget_gb, holders),
    }
    rows: dict[str, object] = {flag: total / parts for flag, (total, parts) in budgets.items() if total is not None}
    rows |= {"device": config.device, "peer-access": config.peer_access}

    def command(verb: str, name: str, flags: Mapping[str, object], *arguments: str) -> ServerCommand:
        flags = {
            "snapshot": snapshot,
            "cards": arm.cards,
            "sharding": config.sharding,
            "replicate-bytes": config.replicate_bytes,
            **flags,
        }
        given = [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]
        # The files have just been written, or the store is trusted.
        line = shardrank_command(verb, "--no-verify", *given, *arguments)
        return ServerCommand(name, line, folder / f"{name.replace(' ', '-')}.log")

    addresses = node_addresses(arm, folder)
    nodes = [
        command("shard-node", f"shard {number}", rows | {"shard": f"{number}/{arm.shards}", "listen": address})
        for number, address in enumerate(addresses)
    ]
    serves = {
        "http-port": 0,
        "grpc-port": 0,
        "workers": config.workers,
        "dtype": config.dtype,
        "wire-dtype": config.wire_dtype,
        "shutdown-delay-s": 0,
        **({} if addresses else rows),
    }
    shards = [text for address in addresses for text in ("--shard", address)]
    return (*nodes, command("serve", "server", serves, *shards))


def node_addresses(arm: ServedArm, folder: Path) -> tuple[str, ...]:
    """Choose where an arm's shard nodes listen, the first one's first."""
    shards = range(arm.shards or 0)
    if arm.transport == "unix":
        return tuple(f"unix:{folder / f'{number}.sock'}" for number in shards)
    # All are held until all are chosen. If another program takes one before its node does, the node ends and says why.
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((HOST, 0))) for _ in shards]
        return tuple(f"{HOST}:{listening.getsockname()[1]}" for listening in sockets)


@dataclass(frozen=True, slots=True)
class ArmRound:
    """What was measured of an arm in a round, in this order; `wire` is of `busy`, see `wire_bytes`.

    Of the first round also the dtype of the dense model, and scores of some requests, float32 [candidates] each.
    """

    cold: LoadResult
    warm: LoadResult
    alone: Weighed
    shares: tuple[LoadResult, ...]
    busy: Weighed
    wire: Mapping[str, float]
    dtype: Dtype = "float32"
    scores: tuple[Float32Array, ...] = ()


@dataclass(slots=True)
class Measurements:
    """What was measured of each arm: rounds, and answers a second in the rehearsal."""

    rounds: dict[ServedArm, list[ArmRound]] = field(default_factory=dict)
    capacity: dict[ServedArm, float] = field(default_factory=dict)

    def check_agreement(self, arm: ServedArm, config: CompareConfig) -> None:
        """Compare an arm's scores with the first one's. Raises LoadError: arm, request and difference."""
        first = config.arms[0]
        expected, measured = self.rounds[first][0], self.rounds[arm][0]
        dtype, tolerance = expected.dtype, config.tolerance(expected.dtype)
        if measured.dtype != dtype:
            raise LoadError(
                f"{arm.name}: its dense model is computed in {measured.dtype}, that of {first.name} in {dtype}; "
                "choose one with --dtype"
            )
        for number, (scores, right) in enumerate(zip(measured.scores, expected.scores, strict=True)):
            check_scores(f"{arm.name} against {first.name} in {dtype}, request {number}", scores, right, tolerance)

    def rates(self, shares: Sequence[int]) -> tuple[float, ...]:
        """Return shares, in percent, of the smallest capacity, in requests a second of three digits."""
        return tuple(float(f"{share / 100 * min(self.capacity.values()):.3g}") for share in shares)


def served_dtype(arm: ServedArm, http_port: int, model: str) -> Dtype:
    """Return the dtype in which a server computes its dense model. Raises LoadError if it does not say."""
    address = f"http://{HOST}:{http_port}"
    try:
        with Client(address, timeout_ms=int(1000 * DESCRIBE_TIMEOUT_S)) as client:
            return TypeAdapter(Dtype).validate_python(client.describe(model).dense_model.dtype)
    except (ShardrankError, ValidationError) as error:
        raise LoadError(f"the server with {arm.name} does not describe its model at {address}: {error}") from error


def wire_bytes(before: str, after: str) -> dict[str, float]:
    """Return the bytes to and from shards for each request answered between two metrics pages of a serving process.

    Keys are the forms of replies (such as `float16`) and `TO_SHARDS`. Empty where no bytes were sent.
    """

    def grown(sample: str, label: str) -> dict[str, float]:
        old, new = summed(before, sample, label), summed(after, sample, label)
        return {value: count - old.get(value, 0.0) for value, count in new.items()}

    sent = grown("shardrank_shard_answer_bytes_total", "form")
    sent[TO_SHARDS] = sum(grown("shardrank_shard_request_bytes_total", "").values())
    answered = grown("shardrank_requests_total", "status").get("ok", 0.0)
    return {form: size / answered for form, size in sent.items() if size and answered}


@dataclass(slots=True)
class ArmMeasure:
    """Measure one server after the other, asked by the same processes with the same requests."""

    config: CompareConfig
    load: OfferedLoad
    generators: Generators
    snapshot: Path
    folder: Path
    console: Console

    def rehearse(self, arm: ServedArm) -> float:
        """Start a server and keep it busy for a moment. Returns its answers a second. Raises LoadError."""
        config, seconds = self.config, min(REHEARSAL_S, self.config.duration_s)
        with self.serving(arm) as server:
            self._run(server, RunConfig(rate=config.rate, warmup_s=0, duration_s=seconds))
            return self._busy(server, config.in_flight, seconds, seconds).requests_per_s

    def measure(self, arm: ServedArm, number: int, rates: Sequence[float]) -> ArmRound:
        """Measure an arm in a round, from 0, with the rates of its shares of capacity. Raises LoadError.

        Scores are requested last, so that no measure of the first round has seen other requests than the others have.
        """
        config = self.config
        seeds = itertools.count(config.seed + (2 + len(rates)) * number)
        cold = RunConfig(rate=config.rate, warmup_s=0, duration_s=config.cold_s, seed=next(seeds))
        warm = RunConfig(rate=config.rate, warmup_s=config.warmup_s, duration_s=config.duration_s, seed=next(seeds))
        with self.serving(arm) as server:
            runs = self._run(server, cold), self._run(server, warm)
            alone = self._busy(server, 1, config.warmup_s, config.duration_s)
            shares = tuple(
                self._run(server, warm.model_copy(update={"rate": rate, "seed": next(seeds)})) for rate in rates
            )
            before = server.metrics()
            busy = self._busy(server, config.in_flight, config.warmup_s, config.duration_s)
            wire = wire_bytes(before, server.metrics())
            arm_round = ArmRound(*runs, alone, shares, busy, wire)
            if number:
                return arm_round
            load = self._load(server)
            ready = self.generators.prepare(load)[0]
            checked_requests = range(min(CHECKED_REQUESTS, ready.requests))
            scores = tuple(self.generators.scores(load, request) for request in checked_requests)
            return replace(arm_round, dtype=served_dtype(arm, server.http_port, ready.model), scores=scores)

    def _load(self, server: Server) -> OfferedLoad:
        return self.load.model_copy(update={"target": server.target(self.load.spoken)})

    def _run(self, server: Server, run: RunConfig) -> LoadResult:
        return offered(self.generators, self._load(server), run, self.console)

    def _busy(self, server: Server, in_flight: int, warmup_s: float, seconds: float) -> Weighed:
        return self.generators.busy(self._load(server), in_flight, warmup_s, seconds, server.process_ids)

    def serving(self, arm: ServedArm) -> contextlib.AbstractContextManager[Server]:
        """Start an arm's server, and end it with the block."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        return running_server(arm.name, server_commands(arm, self.config, self.snapshot, folder))


def measure_rounds(
    config: CompareConfig, load: OfferedLoad, snapshot: Path, folder: Path, console: Console
) -> Measurements:
    """Measure all rounds.

    In the rehearsal before, the first arm is started and asked, since what the first start on a machine pays, such as
    reading files from the disk, would be in one arm alone; and all others, if arms are offered shares of capacity.
    Raises LoadError: a server ended, or did not get ready; arms disagree; a load can't be run.
    """
    measurements = Measurements({arm: [] for arm in config.arms})
    with Generators(load.processes) as generators:
        measure = ArmMeasure(config, load, generators, snapshot, folder, console)
        for arm in config.arms if config.shares else config.arms[:1]:
            line(console, f"rehearsal: {arm.name}")
            measurements.capacity[arm] = measure.rehearse(arm)
        rates = measurements.rates(config.shares)
        for number in range(config.rounds):
            for arm in rotated(config.arms, number):
                line(console, f"round {number + 1} of {config.rounds}: {arm.name}")
                measurements.rounds[arm].append(measure.measure(arm, number, rates))
                if not number:
                    measurements.check_agreement(arm, config)
    return measurements


def compared_snapshot(config: CompareConfig, load: OfferedLoad, store: Path, progress: Progress = no_progress) -> Path:
    """Find the workload's model in a store: its latest version there, or else one that is written.

    Raises ConfigError: the store's model has other tables or features. PlanError: it is stored in another order.
    """
    assert isinstance(load.workload, str)
    workload = open_workload(
        load.workload, context_features=load.context_features, movielens=load.movielens, split_seed=load.split_seed
    )
    expected = workload.spec
    if not Store(store).versions(expected.model):
        prepare_workload(
            load.workload,
            store,
            context_features=load.context_features,
            movielens=load.movielens,
            # What is trained on ratings must not learn those that are asked for.
            seed=load.split_seed if isinstance(workload, FilmsWorkload) else load.seed,
            bucketing="range" if config.sharding == "range" else "mixed",
            progress=progress,
        )
    folder = Store(store).snapshot_path(expected.model)
    spec = Snapshot.open(folder, verify=False).spec
    for what in ("tables", "features"):
        # Rows may be stored in another order: which is right depends on the sharding.
        if getattr(with_bucketing(spec, "mixed"), what) != getattr(with_bucketing(expected, "mixed"), what):
            raise ConfigError(
                f"{folder}: its {what} are not those of the workload {load.workload!r}; name another --store, or "
                "the workload and --context-features that it was prepared with"
            )
    for arm in config.arms:
        # What a server would refuse later.
        Plan.make(spec, arm.shards or 1, config.sharding, arm.cards, config.replicate_bytes)
    return folder.resolve()


def compared(config: CompareConfig, load: OfferedLoad, measurements: Measurements) -> Comparison:
    """Compute ratios to the first arm, as `compare_rounds`."""
    run = measurements.rounds[config.arms[0]][0].warm
    *first, last = (arm.name for arm in config.arms)
    arms, reasons = [], []
    for served, rounds in measurements.rounds.items():
        runs, cold_runs = tuple(measured.warm for measured in rounds), tuple(measured.cold for measured in rounds)
        figures = [_figures(config, measured) for measured in rounds]
        arms.append((Arm(name=served.name, runs=runs, cold_runs=cold_runs), figures))
        for number, measured in enumerate(rounds, 1):
            reasons += [f"{served.name}, round {number}, {reason}" for reason in _reasons(config, measured)]
    measures: list[Measure[Mapping[Row, float | None]]] = []
    for name, unit in dict.fromkeys(row for _, of_arm in arms for figures in of_arm for row in figures):
        # Bytes and processor time by role are of shards, and bytes of some forms alone.
        everywhere = not name.startswith(("bytes", "CPU of a request, serve", "CPU of a request, nodes"))
        better: Better = "higher" if unit == "/s" else "lower"
        measures.append(Measure(name, unit, better, methodcaller("get", (name, unit)), everywhere))
    return compare_rounds(
        arms,
        measures,
        title=f"{', '.join(first)} and {last}: {load.workload}",
        setup=_setup(config, load, measurements),
        invalid_because=reasons,
        machine=run.machine,
        versions=run.versions,
        seed=config.seed,
    )


def _figures(config: CompareConfig, measured: ArmRound) -> dict[Row, float | None]:
    """Return what a round of an arm says, over all requests that were due; None for a percentile that failed."""
    figures: dict[Row, float | None] = {}
    busy = measured.busy
    for phase, run in (("warm", measured.warm), ("cold", measured.cold)):
        for name, field_name in (("p50", "p50_ms"), ("p99", "p99_ms"), ("p99.9", "p999_ms")):
            figures[f"{name}, {phase}", "ms"] = getattr(run.latency_of_due, field_name)
        figures[f"throughput at {config.rate:g}/s, {phase}", "/s"] = run.throughput
    figures["p50, 1 in flight", "ms"] = measured.alone.p50_ms
    figures["p99, 1 in flight", "ms"] = measured.alone.p99_ms
    for share, run in zip(config.shares, measured.shares, strict=True):
        figures[f"p50 at {share}% of capacity", "ms"] = run.latency_of_due.p50_ms
        figures[f"p99 at {share}% of capacity", "ms"] = run.latency_of_due.p99_ms
    figures[f"throughput, {config.in_flight} in flight", "/s"] = busy.requests_per_s
    figures[f"CPU of a request, {config.in_flight} in flight", "ms"] = busy.cpu_ms
    for role, cpu in busy.server_cpu.items() if config.shards else ():
        figures[f"CPU of a request, {role}", "ms"] = sum(cpu) / busy.requests * 1e3
        figures[f"CPU of a request, {role}, kernel", "ms"] = cpu.kernel_s / busy.requests * 1e3
    replies = {form: size for form, size in sorted(measured.wire.items()) if form != TO_SHARDS}
    if measured.wire:
        figures["bytes of a request, back", "B"] = sum(replies.values())
        figures |= {(f"bytes of a request, back as {form}", "B"): size for form, size in replies.items()}
        figures["bytes of a request, to shards", "B"] = measured.wire.get(TO_SHARDS)
    return figures


def _reasons(config: CompareConfig, arm_round: ArmRound) -> Iterator[str]:
    names = ("cold", "warm", *(f"{share}% of capacity" for share in config.shares))
    for name, run in zip(names, (arm_round.cold, arm_round.warm, *arm_round.shares), strict=True):
        yield from (f"{name}: {reason}" for reason in run.invalid_because)
        if run.latency_of_due.p99_ms is None and run.errors:
            kinds = ", ".join(f"{kind} {count}" for kind, count in run.errors.items())
            advice = ""
            if run.errors.keys() <= TIMEOUT_KINDS:
                advice = (
                    f": not answered within {run.timeout_ms:g} ms. Offer less (--rate, --shares), give requests longer "
                    "(--timeout-ms), or make them smaller (--candidates)"
                )
            yield f"{name}: {sum(run.errors.values())} of {run.due} requests failed ({kinds}){advice}"
    yield from not_busy_because(arm_round.busy)


def _setup(config: CompareConfig, load: OfferedLoad, measurements: Measurements) -> dict[str, str]:
    rounds = measurements.rounds[config.arms[0]]
    run, dtype = rounds[0].warm, rounds[0].dtype
    first, *others = (np.concatenate(of_arm[0].scores) for of_arm in measurements.rounds.values())
    difference = max(float(np.abs(scores - first).max()) for scores in others)

    def counted(phase: Literal["warm", "cold"]) -> str:
        # Arms have as many requests as each other in a round, rounds of Poisson arrivals differ.
        due = {getattr(arm_round, phase).due for arm_round in rounds}
        return f"{min(due)} to {max(due)}" if len(due) > 1 else f"{min(due)}"

    def gigabytes(size: float | None) -> str | None:
        return None if size is None else f"{size:g} GB"

    capacity = measurements.capacity
    slowest = min(capacity, key=capacity.__getitem__)
    rates = ", ".join(f"{rate:g}" for rate in measurements.rates(config.shares))
    shares = (
        f"{', '.join(map(str, config.shares))}% of the {capacity[slowest]:.0f}/s that {slowest.name} answered in the "
        f"rehearsal, the least of all arms: {rates}/s, open loop"
    )
    transports = " and ".join(dict.fromkeys(TRANSPORTS[arm.transport] for arm in config.arms if arm.shards is not None))
    given: dict[str, object] = {
        "workload": run.workload,
        "model": run.model,
        "api": run.api,
        "distinct requests": run.requests,
        FORM: FORMS[load.varied],
        "arrivals": run.arrivals,
        "rate": f"{config.rate:g}/s",
        "throughput": f"closed loop, {config.in_flight} requests always out",
        "alone": "closed loop, one request always out",
        SHARES: shares if config.shares else None,
        "cold": f"the first {config.cold_s:g} s after the server's start",
        "warm": f"{config.duration_s:g} s after {config.warmup_s:g} s of warm-up",
        "serving processes": config.workers,
        "sums of shards in": config.wire_dtype if config.shards else None,
        "dense model in": dtype if config.dtype == dtype else f"{dtype} ({config.dtype})",
        "same scores": f"of {len(rounds[0].scores)} requests, to {difference:.2g}; "
        f"allowed is {config.tolerance(dtype):g}",
        "rows": "in each serving process"
        + (f"; or in shard processes on this machine, asked over {transports}" if transports else ""),
        "sharding": config.sharding,
        "device": config.device,
        "memory of each card": gigabytes(config.card_memory_gb),
        "hot rows of each card": gigabytes(config.hot_gb),
        "pinned host memory, all processes": gigabytes(config.pinned_memory_gb),
        "RAM for rows, all processes": gigabytes(config.memory_budget_gb),
        "peer access": config.peer_access,
        "replicated tables": f"up to {config.replicate_bytes} bytes" if config.shards else None,
        COUNTED: f"{counted('warm')} warm, {counted('cold')} cold",
        "timeout": f"{load.timeout_ms:g} ms",
        "seed of the requests": load.seed,
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def execute(store: Path | None, json_file: Path | None, html_file: Path | None, **given: object) -> int:
    """Run a comparison of what is given as fields of `CompareConfig` and `OfferedLoad`.

    Returns the exit code: 1 if a run can't be believed. Raises click.UsageError, naming the option that does not fit;
    ShardrankError: it can't be run to its end, or a file can't be written.
    """
    # Until a server has its port: the settings are checked before anything is started.
    target = "grpc://127.0.0.1:1" if given["api"] in GRPC_APIS else "http://127.0.0.1:1"
    config, load = checked(CompareConfig, given), checked(OfferedLoad, {**given, "target": target})
    DeviceChoice.parse(config.device)
    check_writable(json_file, html_file)
    with stopping_on_signals(), tempfile.TemporaryDirectory(prefix="shardrank-compare-") as temporary:
        folder = Path(temporary)
        with progress_bars() as bars:
            snapshot = compared_snapshot(config, load, store or folder / "store", bars)
        comparison = compared(config, load, measure_rounds(config, load, snapshot, folder, Console(stderr=True)))
    return finish(comparison, json_file, html_file)
