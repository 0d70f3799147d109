"""Measures one arm in one round: its server is started, asked cold, warm and as fast as it answers, and ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.console import Console

from loader.manifest import Frozen
from loadtest.compare.agreement import CHECKED_REQUESTS, ArmScores, served_dtype
from loadtest.compare.arm_commands import Ports, server_commands
from loadtest.compare.arm_server import HOST, running_arm
from loadtest.compare.config import Arm, CompareConfig
from loadtest.compare.hosts import running_hosts
from loadtest.compare.messages import ScoresAsked
from loadtest.load.config import RunConfig
from loadtest.load.live import LiveLine
from loadtest.load.merge import make_result
from loadtest.load.processes import Generators
from loadtest.load.result import LoadResult
from loadtest.serving_cost.helper_process import HelperProcess
from loadtest.serving_cost.messages import Scores, ServerLoad, Weighed

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


class ArmMeasure:
    """One server after the other, asked by the same processes with the same requests.

    Args:
        config: what all arms have alike.
        generators: send at a rate.
        client: keeps a server busy, and tells its scores.
        snapshot: what is served.
        ports: where.
        folder: for logs and registries.
        console: for the live line.
    """

    def __init__(
        self,
        config: CompareConfig,
        generators: Generators,
        client: HelperProcess,
        snapshot: Path,
        ports: Ports,
        folder: Path,
        console: Console,
    ) -> None:
        self._config = config
        self._generators = generators
        self._client = client
        self._snapshot = snapshot
        self._ports = ports
        self._folder = folder
        self._console = console
        self._starts = 0
        self._asking: asyncio.Task[Frozen] | None = None

    async def settle(self) -> None:
        """Waits until no thread listens to the client: when a signal comes, its server is ended, so that it soon fails.

        Only then may the client be closed: a thread that waits for what is closed meanwhile waits until its time is up.
        """
        if self._asking is not None:
            await asyncio.gather(self._asking, return_exceptions=True)

    async def rehearse(self, arm: Arm) -> None:
        """Starts a server and asks it a little; nothing is kept."""
        async with self._serving(arm) as process_ids:
            await self._run(RunConfig(rate=self._config.rate, warmup_s=0, duration_s=REHEARSAL_S, seed=0))
            await self._busy(process_ids, 0.0, REHEARSAL_S)

    async def arm(self, arm: Arm, number: int, scored: Callable[[ArmScores], None] | None = None) -> ArmRound:
        """Measures an arm.

        Args:
            arm: which.
            number: of the round, from 0.
            scored: told the server's scores of a few requests; None to ask for none. That comes last, so that no
                measure of such a round has seen other requests than those of the others.

        Raises:
            CompareError: as `measure_rounds`, or what `scored` raises.
            HelperProcessError, LoadError: as `measure_rounds`.
        """
        config, seed = self._config, self._config.seed + 2 * number
        async with self._serving(arm) as process_ids:
            cold = await self._run(RunConfig(rate=config.rate, warmup_s=0, duration_s=config.cold_s, seed=seed))
            warm = await self._run(
                RunConfig(rate=config.rate, warmup_s=config.warmup_s, duration_s=config.duration_s, seed=seed + 1)
            )
            busy = await self._busy(process_ids, config.warmup_s, config.duration_s)
            if scored is not None:
                scored(await self._scores(arm))
            return ArmRound(cold, warm, busy)

    async def _scores(self, arm: Arm) -> ArmScores:
        ready, ports = self._generators.ready[0], self._ports
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
            http_port=self._ports.http,
            grpc_port=self._ports.grpc,
            in_flight=self._config.in_flight,
            warmup_s=warmup_s,
            seconds=duration_s,
            process_ids=process_ids,
        )
        return await self._ask(load, Weighed, warmup_s + duration_s + ANSWER_SLACK_S)

    async def _ask(self, question: Frozen, answer: type[Answer], limit_s: float) -> Answer:
        asking = asyncio.create_task(asyncio.to_thread(self._client.ask, question, answer, limit_s))
        self._asking = asking
        return await asyncio.shield(asking)

    @contextlib.asynccontextmanager
    async def _serving(self, arm: Arm) -> AsyncIterator[tuple[int, ...]]:
        """An arm's server, newly started, with hosts of its own if it has some. Gives the ids of its processes."""
        self._starts += 1
        folder = self._folder / f"{self._starts}"
        folder.mkdir()
        config = self._config
        with contextlib.ExitStack() as stack:
            count = arm.shards if config.hosts else None
            hosts = stack.enter_context(running_hosts(count, config.delay_ms)) if count else ()
            commands = server_commands(arm, config, self._snapshot, self._ports, folder, hosts)
            async with running_arm(arm, commands, self._ports) as process_ids:
                yield process_ids

    async def _run(self, run: RunConfig) -> LoadResult:
        with LiveLine(self._console, run) as line:
            measured = await self._generators.run(run, line.update)
        return make_result(self._generators.config, run, self._generators.ready, measured)
