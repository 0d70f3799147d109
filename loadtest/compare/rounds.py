"""Measure every arm in every round: its server is started, asked cold, warm and as fast as it answers, and ended.

Each time an arm's server is started anew. So what differs from one start to the next (which memory the kernel gives,
which core a thread begins on) is in the rounds, over which confidence intervals are drawn, and not frozen in a ratio;
there is a cold measure in every round; and an arm never shares memory and cores with the servers of the others. In the
first round all arms must give the same scores of a few requests.
"""

from __future__ import annotations

import contextlib
import itertools
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from loadtest.compare.arms import CompareConfig, Dtype, ServedArm, server_commands
from loadtest.compare.hosts import running_hosts
from loadtest.errors import ScoresDifferError, ServerFailedError
from loadtest.load.config import OfferedLoad, RunConfig
from loadtest.load.messages import Weighed
from loadtest.load.processes import Generators
from loadtest.load.result import LoadResult
from loadtest.load.run import offered
from loadtest.load.show import line
from loadtest.servers import HOST, LOG_TAIL_BYTES, Server, check_scores, in_turn, ports_in, running
from serving.client import Client, ClientError
from shard_node.bags import Float32Array

CHECKED_REQUESTS = 8
ASK_TIMEOUT_S = 5.0
REHEARSAL_S = 1.0
TOLERANCES: dict[Dtype, float] = {"float32": 1e-5, "bfloat16": 0.01}
"""Of scores, which are between 0 and 1. Where rows are divided otherwise, parts of a sum are added in another order; in
bfloat16, a sum whose last bit differs may become the next number, 0.4% away, at the input of every layer. Measured with
random models, whose scores spread by 0.03 to 0.05: up to 3e-7 between arms in float32 and 0.0016 in bfloat16."""

_DTYPE: TypeAdapter[Dtype] = TypeAdapter(Dtype)


@dataclass(frozen=True, slots=True)
class ArmScores:
    """What an arm's server answered: scores, float32 [candidates], and the dtype of its dense model."""

    dtype: Dtype
    scores: tuple[Float32Array, ...]


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all arms answered alike: to how many requests, in which dtype, and how far scores are from the first's."""

    requests: int
    dtype: Dtype
    largest_difference: float


@dataclass(frozen=True, slots=True)
class ArmRound:
    """What was measured of an arm in a round: from its server's start, after the warm-up, and kept busy."""

    cold: LoadResult
    warm: LoadResult
    busy: Weighed


@dataclass(frozen=True, slots=True)
class Measurements:
    """What was measured: the rounds of each arm, in the order of the table, and scores of the first round."""

    rounds: dict[ServedArm, list[ArmRound]]
    agreed: Agreed


def served_dtype(arm: ServedArm, http_port: int, model: str) -> Dtype:
    """Ask in which dtype a server computes its dense model. Raises ServerFailedError if it does not say."""
    address = f"http://{HOST}:{http_port}"
    try:
        with Client(address, timeout_ms=int(1000 * ASK_TIMEOUT_S)) as client:
            description = client.describe(model)
        return _DTYPE.validate_python(description.dense_model.dtype)
    except (ClientError, ValidationError) as error:
        message = f"the server with {arm.name} does not describe its model at {address}: {error}"
        raise ServerFailedError(message) from error


def check_agreement(first: ServedArm, expected: ArmScores, arm: ServedArm, found: ArmScores) -> None:
    """Compare an arm's answers with the first one's. Raises ScoresDifferError, naming arm, request and difference."""
    if found.dtype != expected.dtype:
        raise ScoresDifferError(
            f"{arm.name}: its dense model is computed in {found.dtype}, that of {first.name} in {expected.dtype}; "
            "choose one with --dtype"
        )
    for number, (one, other) in enumerate(zip(expected.scores, found.scores, strict=True)):
        who = f"{arm.name} against {first.name} in {expected.dtype}, request {number}"
        check_scores(who, other, one, TOLERANCES[expected.dtype])


def largest_difference(answers: Sequence[ArmScores]) -> float:
    """Find the largest difference between the first arm's scores and any other's."""
    first = answers[0].scores
    pairs = itertools.chain.from_iterable(zip(first, arm.scores, strict=True) for arm in answers[1:])
    return max((float(np.abs(other - one).max()) for one, other in pairs), default=0.0)


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

    def rehearse(self, arm: ServedArm) -> None:
        """Start a server and ask it a little; nothing is kept."""
        with self.serving(arm) as server:
            load = self._load(server)
            self._run(load, RunConfig(rate=self.config.rate, warmup_s=0, duration_s=REHEARSAL_S, seed=0))
            self.generators.busy(load, self.config.in_flight, 0.0, REHEARSAL_S, server.process_ids)

    def arm(self, arm: ServedArm, number: int) -> tuple[ArmRound, ArmScores | None]:
        """Measure an arm in a round, from 0.

        Scores are asked in the first round alone, and last, so that no measure of such a round has seen other requests
        than those of the others. Raises LoadError.
        """
        config, seed = self.config, self.config.seed + 2 * number
        cold = RunConfig(rate=config.rate, warmup_s=0, duration_s=config.cold_s, seed=seed)
        warm = RunConfig(rate=config.rate, warmup_s=config.warmup_s, duration_s=config.duration_s, seed=seed + 1)
        with self.serving(arm) as server:
            load = self._load(server)
            runs = self._run(load, cold), self._run(load, warm)
            busy = self.generators.busy(load, config.in_flight, config.warmup_s, config.duration_s, server.process_ids)
            return ArmRound(*runs, busy), self._scores(arm, server) if number == 0 else None

    def _scores(self, arm: ServedArm, server: Server) -> ArmScores:
        load = self._load(server)
        ready = self.generators.prepare(load)[0]
        asked = range(min(CHECKED_REQUESTS, ready.requests))
        scores = tuple(self.generators.scores(load, number) for number in asked)
        return ArmScores(served_dtype(arm, server.http_port, ready.model), scores)

    def _load(self, server: Server) -> OfferedLoad:
        return self.load.model_copy(update={"target": server.target(self.load.spoken)})

    def _run(self, load: OfferedLoad, run: RunConfig) -> LoadResult:
        return offered(self.generators, load, run, self.console)

    @contextlib.contextmanager
    def serving(self, arm: ServedArm) -> Iterator[Server]:
        """Start an arm's server, with hosts of its own if it has some, and end it with the block."""
        self._starts += 1
        folder = self.folder / f"{self._starts}"
        folder.mkdir()
        config = self.config
        with contextlib.ExitStack() as stack:
            count = arm.shards if config.hosts else None
            hosts = stack.enter_context(running_hosts(count, config.delay_ms)) if count else ()
            commands = server_commands(arm, config, self.snapshot, folder, hosts)
            log = commands[-1].log
            started = stack.enter_context(running(arm.name, commands, lambda: _why_not_ready(log)))
            ports = ports_in(log)
            assert ports is not None
            yield Server(*ports, started.process_ids)
            started.check()


def _why_not_ready(log: Path) -> str:
    if (ports := ports_in(log)) is None:
        return "it has not said where it serves"
    try:
        with urllib.request.urlopen(f"http://{HOST}:{ports[0]}/readyz", timeout=ASK_TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        return error.read(LOG_TAIL_BYTES).decode("utf-8", "replace") or str(error)
    except OSError as error:
        return str(error)


def measure_rounds(
    config: CompareConfig, load: OfferedLoad, snapshot: Path, folder: Path, console: Console
) -> Measurements:
    """Measure all rounds.

    Before the first one the first arm's server is started and asked once, and that is thrown away: what the first
    start on a machine pays, reading files from the disk for example, would be in one arm alone.

    Raises:
        LoadError: a server ended, or did not get ready; arms disagree; hosts can't be made; a load can't be run.
    """
    first = config.arms[0]
    found: dict[ServedArm, list[ArmRound]] = {arm: [] for arm in config.arms}
    scores: dict[ServedArm, ArmScores] = {}
    with Generators(load.processes) as generators:
        measure = ArmMeasure(config, load, generators, snapshot, folder, console)
        line(console, f"rehearsal: {first.name}")
        measure.rehearse(first)
        for number in range(config.rounds):
            for arm in in_turn(config.arms, number):
                line(console, f"round {number + 1} of {config.rounds}: {arm.name}")
                of_arm, answered = measure.arm(arm, number)
                found[arm].append(of_arm)
                if answered is not None:
                    scores[arm] = answered
                    check_agreement(first, scores[first], arm, answered)
    expected = scores[first]
    return Measurements(found, Agreed(len(expected.scores), expected.dtype, largest_difference(list(scores.values()))))
