"""Measure every arm of a comparison in every round.

Each time an arm's server is started anew as users do, measured, and ended. So what differs from one start to the next
(which memory the kernel gives, which core a thread begins on) is in the rounds, over which confidence intervals are
drawn, and not frozen in a ratio; there is a cold measure in every round; and an arm never shares memory and cores with
the servers of the others. In the first round all arms must give the same scores of a few requests.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError, model_validator
from rich.console import Console

from loader.errors import ShardrankError
from loader.snapshot.tables import Frozen
from loadtest.documents import line
from loadtest.errors import LoadError
from loadtest.load.config import MAX_RATE, MAX_RUN_S, OfferedLoad, RunConfig
from loadtest.load.generator import Generators
from loadtest.load.loops import Weighed
from loadtest.load.result import LoadResult
from loadtest.load.run import offered
from loadtest.rounds import in_turn
from loadtest.servers import HOST, LOG_TAIL_BYTES, Server, ServerCommand, check_scores, ports_in, running, summed
from serving.client import Client
from serving.fleet.supervisor import shardrank_command
from shard_node.bags import Float32Array
from shard_node.buckets import Sharding

MAX_ARMS = 16

Dtype: TypeAlias = Literal["float32", "bfloat16"]
Transport: TypeAlias = Literal["unix", "tcp"]
TRANSPORTS: dict[Transport, str] = {"unix": "Unix socket", "tcp": "TCP"}
"""Between serving and shard processes, as names of arms spell it."""
Count: TypeAlias = Annotated[int, Field(ge=1, le=64)]
Gigabytes: TypeAlias = Annotated[float, Field(ge=0)]
CHECKED_REQUESTS = 8
DESCRIBE_TIMEOUT_S = 5.0
REHEARSAL_S = 2.0
TOLERANCES: dict[Dtype, float] = {"float32": 1e-5, "bfloat16": 0.01}
"""Of scores, which are between 0 and 1. Where rows are divided otherwise, parts of a sum are added in another order; in
bfloat16, a sum whose last bit differs may become the next number, 0.4% away, at the input of every layer. Measured with
random models, whose scores spread by 0.03 to 0.05: up to 3e-7 between arms in float32 and 0.0016 in bfloat16."""
HALVES_TOLERANCE = 1e-3
"""Where shards are told to send float16 sums: these differ by one part in 2048. Measured: up to 3e-5 in float32."""
ASKED = "asked"
"""Key of the bytes sent to shards in `wire_bytes`; the other keys are the forms of their replies."""
_DTYPE: TypeAdapter[Dtype] = TypeAdapter(Dtype)


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
        cards: each number of them in the serving process is an arm; the first one is what the others are compared to.
        shards: each number of them is an arm with each of the transports; each shard has the first number of cards.
        cold_s, warmup_s, duration_s: from a server's start; before each measure after that; of such a measure.
        in_flight: requests that are always out while the throughput is measured, in a closed loop.
        shares: percent of the smallest capacity of all arms that each is offered, in an open loop; empty for none.
        seed: of the times; round i of every arm has the same.
        card_memory_gb, hot_gb: of each card; None for the server's default.
        pinned_memory_gb, memory_budget_gb: of all processes of an arm that hold rows; None for no bound on RAM.
        replicate_bytes: tables of at most so many bytes are held whole by every shard; by default none, so that what
            dividing rows costs is not hidden by small tables.
        workers: serving processes of every arm; without shards each holds all rows.
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
    """List what is started for an arm, in this order: its shard nodes, and last what serves.

    The folder gets logs and sockets of this start alone.
    """
    # Without shards each of several serving processes holds all rows, on the same cards.
    holders, sharers = (config.workers, config.workers) if arm.shards is None else (arm.shards, 1)

    def part(total: float | None, parts: int) -> float | None:
        return None if total is None else total / parts

    divided = {
        "snapshot": snapshot,
        "cards": arm.cards,
        "sharding": config.sharding,
        "replicate-bytes": config.replicate_bytes,
    }
    rows = {
        "device": config.device,
        "card-memory-gb": part(config.card_memory_gb, sharers),
        "pinned-memory-gb": part(config.pinned_memory_gb, holders),
        "hot-gb": part(config.hot_gb, sharers),
        "memory-budget-gb": part(config.memory_budget_gb, holders),
        "peer-access": config.peer_access,
    }
    serves = {
        "http-port": 0,
        "grpc-port": 0,
        "workers": config.workers,
        "dtype": config.dtype,
        "wire-dtype": config.wire_dtype,
        "shutdown-delay-s": 0,
    }
    addresses = node_addresses(arm, folder)
    nodes = [
        _command(
            "shard-node", f"shard {number}", folder, divided | rows | {"shard": f"{number}/{arm.shards}", "listen": at}
        )
        for number, at in enumerate(addresses)
    ]
    asked = [text for address in addresses for text in ("--shard", address)]
    return (*nodes, _command("serve", "server", folder, divided | serves | ({} if addresses else rows), *asked))


def _command(verb: str, name: str, folder: Path, flags: Mapping[str, object], *arguments: str) -> ServerCommand:
    given = [text for flag, value in flags.items() if value is not None for text in (f"--{flag}", str(value))]
    # The files have just been written, or the store is trusted.
    line = shardrank_command(verb, "--no-verify", *given, *arguments)
    return ServerCommand(name, line, folder / f"{name.replace(' ', '-')}.log")


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
class ArmScores:
    """What an arm's server answered: scores, float32 [candidates], and the dtype of its dense model."""

    dtype: Dtype
    scores: tuple[Float32Array, ...]


@dataclass(frozen=True, slots=True)
class ArmRound:
    """What was measured of an arm in a round, in this order; `wire` is of `busy`, see `wire_bytes`."""

    cold: LoadResult
    warm: LoadResult
    alone: Weighed
    shares: tuple[LoadResult, ...]
    busy: Weighed
    wire: Mapping[str, float]


@dataclass(slots=True)
class Measurements:
    """What was measured of each arm: rounds, answers a second in the rehearsal, and scores in the first round."""

    rounds: dict[ServedArm, list[ArmRound]] = field(default_factory=dict)
    capacity: dict[ServedArm, float] = field(default_factory=dict)
    scores: dict[ServedArm, ArmScores] = field(default_factory=dict)

    def check_agreement(self, arm: ServedArm, config: CompareConfig) -> None:
        """Compare an arm's scores with the first one's. Raises LoadError: arm, request and difference."""
        first, expected = next(iter(self.scores.items()))
        found = self.scores[arm]
        if found.dtype != expected.dtype:
            raise LoadError(
                f"{arm.name}: its dense model is computed in {found.dtype}, that of {first.name} in {expected.dtype}; "
                "choose one with --dtype"
            )
        for number, (scores, other) in enumerate(zip(found.scores, expected.scores, strict=True)):
            who = f"{arm.name} against {first.name} in {expected.dtype}, request {number}"
            check_scores(who, scores, other, tolerance_of(config, expected.dtype))

    @property
    def largest_difference(self) -> float:
        """The largest difference between the first arm's scores and any other's."""
        first, *others = (np.concatenate(answered.scores) for answered in self.scores.values())
        return max((float(np.abs(scores - first).max()) for scores in others), default=0.0)


def rates_of(shares: Sequence[int], capacity: Mapping[ServedArm, float]) -> tuple[float, ...]:
    """Return shares, in percent, of the smallest capacity, in requests a second of three digits."""
    return tuple(float(f"{share / 100 * min(capacity.values()):.3g}") for share in shares)


def served_dtype(arm: ServedArm, http_port: int, model: str) -> Dtype:
    """Return the dtype in which a server computes its dense model. Raises LoadError if it does not say."""
    address = f"http://{HOST}:{http_port}"
    try:
        with Client(address, timeout_ms=int(1000 * DESCRIBE_TIMEOUT_S)) as client:
            return _DTYPE.validate_python(client.describe(model).dense_model.dtype)
    except (ShardrankError, ValidationError) as error:
        message = f"the server with {arm.name} does not describe its model at {address}: {error}"
        raise LoadError(message) from error


def tolerance_of(config: CompareConfig, dtype: Dtype) -> float:
    """Choose how far scores of arms may be from each other, by the dtypes of dense models and of shards' sums."""
    has_halves = bool(config.shards) and config.wire_dtype == "float16"
    return max(TOLERANCES[dtype], HALVES_TOLERANCE if has_halves else 0.0)


def wire_bytes(before: str, after: str) -> dict[str, float]:
    """Return the bytes to and from shards for each request answered between two metrics pages of a serving process.

    Keys are the forms of replies (such as `float16`) and `ASKED`. Empty where no bytes were sent, as without shards.
    """

    def grown(sample: str, label: str) -> dict[str, float]:
        old, new = summed(before, sample, label), summed(after, sample, label)
        return {value: count - old.get(value, 0.0) for value, count in new.items()}

    sent = grown("shardrank_shard_answer_bytes_total", "form")
    sent[ASKED] = sum(grown("shardrank_shard_request_bytes_total", "").values())
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
    _starts: int = field(default=0, init=False)

    def rehearse(self, arm: ServedArm) -> float:
        """Start a server and keep it busy for a moment. Returns its answers a second. Raises LoadError."""
        config, seconds = self.config, min(REHEARSAL_S, self.config.duration_s)
        with self.serving(arm) as server:
            self._run(server, RunConfig(rate=config.rate, warmup_s=0, duration_s=seconds))
            return self._busy(server, config.in_flight, seconds, seconds).requests_per_s

    def measure(self, arm: ServedArm, number: int, rates: Sequence[float]) -> tuple[ArmRound, ArmScores | None]:
        """Measure an arm in a round, from 0, with the rates of its shares of capacity.

        Scores are asked in the first round alone, and last, so that no measure of such a round has seen other requests
        than those of the others. Raises LoadError.
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
                return arm_round, None
            load = self._load(server)
            ready = self.generators.prepare(load)[0]
            scores = [self.generators.scores(load, asked) for asked in range(min(CHECKED_REQUESTS, ready.requests))]
            return arm_round, ArmScores(served_dtype(arm, server.http_port, ready.model), tuple(scores))

    def _load(self, server: Server) -> OfferedLoad:
        return self.load.model_copy(update={"target": server.target(self.load.spoken)})

    def _run(self, server: Server, run: RunConfig) -> LoadResult:
        return offered(self.generators, self._load(server), run, self.console)

    def _busy(self, server: Server, in_flight: int, warmup_s: float, seconds: float) -> Weighed:
        return self.generators.busy(self._load(server), in_flight, warmup_s, seconds, server.process_ids)

    @contextlib.contextmanager
    def serving(self, arm: ServedArm) -> Iterator[Server]:
        """Start an arm's server, and end it with the block."""
        self._starts += 1
        folder = self.folder / f"{self._starts}"
        folder.mkdir()
        commands = server_commands(arm, self.config, self.snapshot, folder)
        log = commands[-1].log

        def why_not_ready() -> str:
            if (ports := ports_in(log)) is None:
                return "it has not said where it serves"
            try:
                urllib.request.urlopen(f"http://{HOST}:{ports[0]}/readyz", timeout=DESCRIBE_TIMEOUT_S).close()
            except urllib.error.HTTPError as error:
                return error.read(LOG_TAIL_BYTES).decode("utf-8", "replace") or str(error)
            except OSError as error:
                return str(error)
            return ""

        with running(arm.name, commands, why_not_ready) as started:
            ports = ports_in(log)
            assert ports is not None
            yield Server(*ports, started.process_ids)
            started.check()


def measure_rounds(
    config: CompareConfig, load: OfferedLoad, snapshot: Path, folder: Path, console: Console
) -> Measurements:
    """Measure all rounds.

    Before the first one is a rehearsal: the first arm is started and asked, since what the first start on a machine
    pays, reading files from the disk for example, would be in one arm alone; and each other one, if arms are to be
    offered shares of their capacity.

    Raises:
        LoadError: a server ended, or did not get ready; arms disagree; a load can't be run.
    """
    measurements = Measurements({arm: [] for arm in config.arms})
    with Generators(load.processes) as generators:
        measure = ArmMeasure(config, load, generators, snapshot, folder, console)
        for arm in config.arms if config.shares else config.arms[:1]:
            line(console, f"rehearsal: {arm.name}")
            measurements.capacity[arm] = measure.rehearse(arm)
        rates = rates_of(config.shares, measurements.capacity)
        for number in range(config.rounds):
            for arm in in_turn(config.arms, number):
                line(console, f"round {number + 1} of {config.rounds}: {arm.name}")
                arm_round, scores = measure.measure(arm, number, rates)
                measurements.rounds[arm].append(arm_round)
                if scores is not None:
                    measurements.scores[arm] = scores
                    measurements.check_agreement(arm, config)
    return measurements
