"""Measure every arm in every round: its server is started, asked cold, warm and as fast as it answers, and ended.

Each time an arm's server is started anew. So what differs from one start to the next (which memory the kernel gives,
which core a thread begins on) is in the rounds, over which confidence intervals are drawn, and not frozen in a ratio;
there is a cold measure in every round; and an arm never shares memory and cores with the servers of the others. In the
first round all arms must give the same scores of a few requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from loader.snapshot.manifest import Frozen
from loadtest.compare.closed_process import ScoresAsked
from loadtest.compare.config import CompareConfig, Dtype, ServedArm, order_of_round
from loadtest.compare.errors import ArmsDisagreeError, ArmServerError
from loadtest.compare.server import ASK_TIMEOUT_S, HOST, Ports, free_ports, running_arm, running_hosts, server_commands
from loadtest.load.config import LoadConfig, RunConfig
from loadtest.load.live import LiveLine
from loadtest.load.merge import make_result
from loadtest.load.processes import Generators, running_generators
from loadtest.load.result import LoadResult
from loadtest.serving_cost.helper_process import HelperProcess
from loadtest.serving_cost.messages import Scores, ServerLoad, Weighed
from loadtest.workloads.payloads import GRPC_APIS, Api
from serving.client import AsyncClient, ClientError
from shard_node.bags import Float32Array

CHECKED_REQUESTS = 8
TOLERANCES: dict[Dtype, float] = {"float32": 1e-5, "bfloat16": 0.01}
"""Of scores, which are between 0 and 1. Where rows are divided otherwise, parts of a sum are added in another order; in
bfloat16, a sum whose last bit differs may become the next number, 0.4% away, at the input of every layer. Measured with
random models, whose scores spread by 0.03 to 0.05: up to 3e-7 between arms in float32 and 0.0016 in bfloat16."""

_DTYPE: TypeAdapter[Dtype] = TypeAdapter(Dtype)


@dataclass(frozen=True, slots=True)
class ArmScores:
    """What an arm's server answered.

    Attributes:
        dtype: that its dense model is computed in.
        scores: float32 [candidates] of each request that was asked.
    """

    dtype: Dtype
    scores: tuple[Float32Array, ...]


async def served_dtype(arm: ServedArm, http_port: int, model: str) -> Dtype:
    """Ask in which dtype a server computes its dense model.

    Raises:
        ArmServerError: it does not say.
    """
    address = f"http://{HOST}:{http_port}"
    try:
        async with AsyncClient(address, timeout_ms=int(1000 * ASK_TIMEOUT_S)) as client:
            description = await client.describe(model)
        return _DTYPE.validate_python(description.dense_model.dtype)
    except (ClientError, ValidationError) as error:
        raise ArmServerError(f"the server with {arm.name} does not describe its model at {address}: {error}") from error


def check_agreement(first: ServedArm, expected: ArmScores, arm: ServedArm, found: ArmScores) -> None:
    """Compare an arm's answers with the first one's.

    Args:
        first: the first arm.
        expected: its answers.
        arm: another one.
        found: its answers to the same requests.

    Raises:
        ArmsDisagreeError: naming arm, request and difference.
    """
    if found.dtype != expected.dtype:
        raise ArmsDisagreeError(
            f"{arm.name}: its dense model is computed in {found.dtype}, that of {first.name} in {expected.dtype}; "
            "choose one with --dtype"
        )
    allowed = TOLERANCES[expected.dtype]
    for number, (one, other) in enumerate(zip(expected.scores, found.scores, strict=True)):
        if one.shape != other.shape:
            raise ArmsDisagreeError(
                f"{arm.name}, request {number}: {other.size} scores, but {one.size} with {first.name}"
            )
        differences = np.abs(other - one)
        candidate = int(differences.argmax())
        # A NaN is not within any tolerance.
        if not differences[candidate] <= allowed:
            raise ArmsDisagreeError(
                f"{arm.name}, request {number}, candidate {candidate}: its score is {other[candidate]:.6f}, but "
                f"{one[candidate]:.6f} with {first.name}; they differ by {differences[candidate]:.3g}, allowed is "
                f"{allowed:g} in {expected.dtype}"
            )


def largest_difference(answers: Sequence[ArmScores]) -> float:
    """Find the largest difference between the first arm's scores and any other's."""
    first = answers[0].scores
    return max(
        (float(np.abs(other - one).max()) for arm in answers[1:] for one, other in zip(first, arm.scores, strict=True)),
        default=0.0,
    )


REHEARSAL_S = 1.0
ANSWER_SLACK_S = 120.0

Answer = TypeVar("Answer", bound=Frozen)


@dataclass(frozen=True, slots=True)
class ArmRound:
    """What was measured of one arm in one round.

    Attributes:
        cold: the first requests after the server's start.
        warm: those after the warm-up.
        busy: with a fixed number of requests always out.
    """

    cold: LoadResult
    warm: LoadResult
    busy: Weighed


@dataclass(slots=True)
class ArmMeasure:
    """Measure one server after the other, asked by the same processes with the same requests.

    Attributes:
        config: what all arms have alike.
        generators: send at a rate.
        client: keeps a server busy, and tells its scores.
        snapshot: what is served.
        ports: where.
        folder: for logs and registries.
        console: for the live line.
    """

    config: CompareConfig
    generators: Generators
    client: HelperProcess
    snapshot: Path
    ports: Ports
    folder: Path
    console: Console
    _starts: int = field(default=0, init=False)
    _asking: asyncio.Task[Frozen] | None = field(default=None, init=False)

    async def settle(self) -> None:
        """Wait until no thread listens to the client: when a signal comes, its server is ended, so that it soon fails.

        Only then may the client be closed: a thread that waits for what is closed meanwhile waits until its time is up.
        """
        if self._asking is not None:
            await asyncio.gather(self._asking, return_exceptions=True)

    async def rehearse(self, arm: ServedArm) -> None:
        """Start a server and ask it a little; nothing is kept."""
        async with self._serving(arm) as process_ids:
            await self._run(RunConfig(rate=self.config.rate, warmup_s=0, duration_s=REHEARSAL_S, seed=0))
            await self._busy(process_ids, 0.0, REHEARSAL_S)

    async def arm(self, arm: ServedArm, number: int, scored: Callable[[ArmScores], None] | None = None) -> ArmRound:
        """Measure an arm.

        Args:
            arm: which.
            number: of the round, from 0.
            scored: told the server's scores of a few requests; None to ask for none. That comes last, so that no
                measure of such a round has seen other requests than those of the others.

        Raises:
            CompareError: as `measure_rounds`, or what `scored` raises.
            HelperProcessError, LoadError: as `measure_rounds`.
        """
        config, seed = self.config, self.config.seed + 2 * number
        async with self._serving(arm) as process_ids:
            cold = await self._run(RunConfig(rate=config.rate, warmup_s=0, duration_s=config.cold_s, seed=seed))
            warm = await self._run(
                RunConfig(rate=config.rate, warmup_s=config.warmup_s, duration_s=config.duration_s, seed=seed + 1)
            )
            busy = await self._busy(process_ids, config.warmup_s, config.duration_s)
            if scored is not None:
                scored(await self._scores(arm))
            return ArmRound(cold, warm, busy)

    async def _scores(self, arm: ServedArm) -> ArmScores:
        ready, ports = self.generators.ready[0], self.ports
        asked = [
            ScoresAsked(http_port=ports.http, grpc_port=ports.grpc, request=one)
            for one in range(min(CHECKED_REQUESTS, ready.requests))
        ]
        told = [await self._ask(one, Scores, ANSWER_SLACK_S) for one in asked]
        scores = tuple(np.array(one.scores, np.float32) for one in told)
        return ArmScores(await served_dtype(arm, ports.http, ready.model), scores)

    async def _busy(self, process_ids: tuple[int, ...], warmup_s: float, duration_s: float) -> Weighed:
        load = ServerLoad(
            host=HOST,
            http_port=self.ports.http,
            grpc_port=self.ports.grpc,
            in_flight=self.config.in_flight,
            warmup_s=warmup_s,
            seconds=duration_s,
            process_ids=process_ids,
        )
        return await self._ask(load, Weighed, warmup_s + duration_s + ANSWER_SLACK_S)

    async def _ask(self, question: Frozen, answer: type[Answer], limit_s: float) -> Answer:
        asking = asyncio.create_task(asyncio.to_thread(self.client.ask, question, answer, limit_s))
        self._asking = asking
        return await asyncio.shield(asking)

    @contextlib.asynccontextmanager
    async def _serving(self, arm: ServedArm) -> AsyncIterator[tuple[int, ...]]:
        """Start an arm's server, with hosts of its own if it has some; gives the ids of its processes."""
        self._starts += 1
        folder = self.folder / f"{self._starts}"
        folder.mkdir()
        config = self.config
        with contextlib.ExitStack() as stack:
            count = arm.shards if config.hosts else None
            hosts = stack.enter_context(running_hosts(count, config.delay_ms)) if count else ()
            commands = server_commands(arm, config, self.snapshot, self.ports, folder, hosts)
            async with running_arm(arm, commands, self.ports) as process_ids:
                yield process_ids

    async def _run(self, run: RunConfig) -> LoadResult:
        with LiveLine(self.console, run) as line:
            measured = await self.generators.run(run, line.update)
        return make_result(self.generators.config, run, self.generators.ready, measured)


Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all arms answered alike.

    Attributes:
        requests: that each was asked.
        dtype: that the dense model is computed in.
        largest_difference: between the first arm's scores and any other's.
    """

    requests: int
    dtype: Dtype
    largest_difference: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """What was measured.

    Attributes:
        rounds: of each arm, in the order of the table.
        agreed: scores of the first round.
    """

    rounds: dict[ServedArm, list[ArmRound]]
    agreed: Agreed


def target_of(api: Api, ports: Ports) -> str:
    """Say where requests of an API go."""
    return f"grpc://{HOST}:{ports.grpc}" if api in GRPC_APIS else f"http://{HOST}:{ports.http}"


async def measure_rounds(
    config: CompareConfig, load: LoadConfig, snapshot: Path, folder: Path, console: Console, say: Say
) -> Measurements:
    """Measure all rounds.

    Before the first one the first arm's server is started and asked once, and that is thrown away: what the first
    start on a machine pays, reading files from the disk for example, would be in one arm alone.

    Args:
        config: arms and rounds.
        load: what to ask; its target is of no account.
        snapshot: what is served.
        folder: for logs and registries.
        console: for the live line.
        say: told what is measured.

    Raises:
        CompareError: a server ended, or did not get ready; arms disagree; or hosts can't be made.
        HelperProcessError: the process that keeps servers busy ended, or a request of its failed.
        LoadError: a load can't be run to its end.
    """
    ports = free_ports(random.Random())
    asked = load.model_copy(update={"target": target_of(load.spoken, ports)})
    found: dict[ServedArm, list[ArmRound]] = {arm: [] for arm in config.arms}
    scores: dict[ServedArm, ArmScores] = {}

    def agree(arm: ServedArm, answered: ArmScores) -> None:
        scores[arm] = answered
        check_agreement(config.arms[0], scores[config.arms[0]], arm, answered)

    async with contextlib.AsyncExitStack() as stack:
        generators = await stack.enter_async_context(running_generators(asked))
        client = stack.enter_context(HelperProcess("loadtest.compare.closed_process", asked))
        measure = ArmMeasure(config, generators, client, snapshot, ports, folder, console)
        stack.push_async_callback(measure.settle)
        say(f"rehearsal: {config.arms[0].name}")
        await measure.rehearse(config.arms[0])
        for number in range(config.rounds):
            for index in order_of_round(len(config.arms), number):
                arm = config.arms[index]
                say(f"round {number + 1} of {config.rounds}: {arm.name}")
                found[arm].append(await measure.arm(arm, number, partial(agree, arm) if number == 0 else None))
    first = scores[config.arms[0]]
    return Measurements(found, Agreed(len(first.scores), first.dtype, largest_difference(list(scores.values()))))
