"""Measures every arm in every round, one after the other.

Each time an arm's server is started anew. So what differs from one start to the next (which memory the kernel gives,
which core a thread begins on) is in the rounds, over which confidence intervals are drawn, and not frozen in a ratio;
there is a cold measure in every round; and an arm never shares memory and cores with the servers of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from loadtest.compare.arm_server import HOST, Ports, free_ports, running_arm, server_arguments
from loadtest.compare.config import Arm, CompareConfig, order_of_round
from loadtest.load.config import LoadConfig, RunConfig
from loadtest.load.live import LiveLine
from loadtest.load.merge import make_result
from loadtest.load.processes import Generators, running_generators
from loadtest.load.result import LoadResult
from loadtest.serving_cost.helper_process import HelperProcess
from loadtest.serving_cost.messages import ServerLoad, Weighed
from loadtest.workloads.payloads import Api

REHEARSAL_S = 1.0
ANSWER_SLACK_S = 120.0

Say = Callable[[str], None]


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


def target_of(api: Api, ports: Ports) -> str:
    """Where requests of an API go."""
    return f"grpc://{HOST}:{ports.grpc}" if api in ("grpc", "oip-grpc") else f"http://{HOST}:{ports.http}"


async def measure_rounds(
    config: CompareConfig, load: LoadConfig, snapshot: Path, folder: Path, console: Console, say: Say
) -> dict[Arm, list[ArmRound]]:
    """Measures all rounds.

    Before the first one the first arm's server is started and asked once, and that is thrown away: what the first
    start on a machine pays, reading files from the disk for example, would be in one arm alone.

    Args:
        config: arms and rounds.
        load: what to ask; its target is of no account.
        snapshot: what is served.
        folder: for logs and registries.
        console: for the live line.
        say: told what is measured.

    Returns:
        The rounds of each arm.

    Raises:
        CompareError: a server ended, or did not get ready.
        HelperProcessError: the process that keeps servers busy ended, or a request of its failed.
        LoadError: a load can't be run to its end.
    """
    ports = free_ports(random.Random())
    asked = load.model_copy(update={"target": target_of(load.spoken, ports)})
    found: dict[Arm, list[ArmRound]] = {arm: [] for arm in config.arms}
    async with contextlib.AsyncExitStack() as stack:
        generators = await stack.enter_async_context(running_generators(asked))
        client = stack.enter_context(HelperProcess("loadtest.compare.closed_process", asked))
        measure = _Measure(config, generators, client, snapshot, ports, folder, console)
        stack.push_async_callback(measure.settle)
        say(f"rehearsal: {config.arms[0].name}")
        await measure.rehearse(config.arms[0])
        for number in range(config.rounds):
            for index in order_of_round(len(config.arms), number):
                arm = config.arms[index]
                say(f"round {number + 1} of {config.rounds}: {arm.name}")
                found[arm].append(await measure.arm(arm, number))
    return found


class _Measure:
    """One server after the other, asked by the same processes with the same requests."""

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
        self._asking: asyncio.Task[Weighed] | None = None

    async def settle(self) -> None:
        """Waits until no thread listens to the client: when a signal comes, its server is ended, so that it soon fails.

        Only then may the client be closed: a thread that waits for what is closed meanwhile waits until its time is up.
        """
        if self._asking is not None:
            await asyncio.gather(self._asking, return_exceptions=True)

    async def rehearse(self, arm: Arm) -> None:
        name, arguments = self._start(arm)
        async with running_arm(arm, arguments, self._ports, self._folder / f"{name}.log") as process_ids:
            await self._run(RunConfig(rate=self._config.rate, warmup_s=0, duration_s=REHEARSAL_S, seed=0))
            await self._busy(process_ids, 0.0, REHEARSAL_S)

    async def arm(self, arm: Arm, number: int) -> ArmRound:
        config, seed = self._config, self._config.seed + 2 * number
        name, arguments = self._start(arm)
        async with running_arm(arm, arguments, self._ports, self._folder / f"{name}.log") as process_ids:
            cold = await self._run(RunConfig(rate=config.rate, warmup_s=0, duration_s=config.cold_s, seed=seed))
            warm = await self._run(
                RunConfig(rate=config.rate, warmup_s=config.warmup_s, duration_s=config.duration_s, seed=seed + 1)
            )
            return ArmRound(cold, warm, await self._busy(process_ids, config.warmup_s, config.duration_s))

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
        limit_s = warmup_s + duration_s + ANSWER_SLACK_S
        self._asking = asyncio.create_task(asyncio.to_thread(self._client.ask, load, Weighed, limit_s))
        return await asyncio.shield(self._asking)

    def _start(self, arm: Arm) -> tuple[str, tuple[str, ...]]:
        self._starts += 1
        name = f"{self._starts}"
        registry = self._folder / f"{name}.registry"
        return name, server_arguments(arm, self._config.budgets, self._snapshot, self._ports, registry)

    async def _run(self, run: RunConfig) -> LoadResult:
        with LiveLine(self._console, run) as line:
            measured = await self._generators.run(run, line.update)
        return make_result(self._generators.config, run, self._generators.ready, measured)
