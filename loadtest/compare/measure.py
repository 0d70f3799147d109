"""Measure every arm of a comparison in every round.

Each time an arm's server is started anew, measured, and ended. So what differs from one start to the next (which memory
the kernel gives, which core a thread begins on) is in the rounds, over which confidence intervals are drawn, and not
frozen in a ratio; there is a cold measure in every round; and an arm never shares memory and cores with the servers of
the others. In the first round all arms must give the same scores of a few requests.
"""

from __future__ import annotations

import contextlib
import itertools
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from loadtest.compare.arms import CompareConfig, Dtype, ServedArm, server_commands
from loadtest.errors import ScoresDifferError, ServerFailedError
from loadtest.load.closed_loop import Weighed
from loadtest.load.config import OfferedLoad, RunConfig
from loadtest.load.generator import Generators
from loadtest.load.result import LoadResult
from loadtest.load.run import offered
from loadtest.rounds import in_turn
from loadtest.servers import HOST, LOG_TAIL_BYTES, Server, check_scores, ports_in, running, summed
from loadtest.tables import line
from serving.client import Client, ClientError
from shard_node.bags import Float32Array

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


@dataclass(frozen=True, slots=True)
class ArmScores:
    """What an arm's server answered: scores, float32 [candidates], and the dtype of its dense model."""

    dtype: Dtype
    scores: tuple[Float32Array, ...]


@dataclass(frozen=True, slots=True)
class ArmRound:
    """What was measured of an arm in a round, in this order.

    Attributes:
        cold: from its server's start.
        warm: after the warm-up, as all that follows.
        alone: one request after the other.
        shares: at each of the shares of capacity.
        busy: kept busy.
        wire: bytes between serving process and shards for each request that was answered while busy; see `wire_bytes`.
    """

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
        """Compare an arm's scores with the first one's. Raises ScoresDifferError: arm, request and difference."""
        first, expected = next(iter(self.scores.items()))
        found = self.scores[arm]
        if found.dtype != expected.dtype:
            raise ScoresDifferError(
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
    """Return the dtype in which a server computes its dense model. Raises ServerFailedError if it does not say."""
    address = f"http://{HOST}:{http_port}"
    try:
        with Client(address, timeout_ms=int(1000 * DESCRIBE_TIMEOUT_S)) as client:
            return _DTYPE.validate_python(client.describe(model).dense_model.dtype)
    except (ClientError, ValidationError) as error:
        message = f"the server with {arm.name} does not describe its model at {address}: {error}"
        raise ServerFailedError(message) from error


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
            return ArmRound(*runs, alone, shares, busy, wire), None if number else self._scores(arm, server)

    def _scores(self, arm: ServedArm, server: Server) -> ArmScores:
        load = self._load(server)
        ready = self.generators.prepare(load)[0]
        numbers = range(min(CHECKED_REQUESTS, ready.requests))
        scores = tuple(self.generators.scores(load, number) for number in numbers)
        return ArmScores(served_dtype(arm, server.http_port, ready.model), scores)

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
