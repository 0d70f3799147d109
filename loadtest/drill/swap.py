"""`drill swap`: one version after the other, A and B in turn, under a load that checks every answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field

from loader.progress import Progress, no_progress
from loader.rollout.plan import Strategy
from loader.snapshot.publishing import rows_bytes_of
from loadtest.drill.errors import DrillError
from loadtest.drill.load_process import RunningLoad, running_load
from loadtest.drill.memory import BYTES_PER_MB, MemorySample, sample_memory
from loadtest.drill.oracle_fleet import OracleFleet, OracleFleetConfig, oracle_fleet
from loadtest.drill.swap_report import MAX_RATIO_P99, Span, Swap, SwapReport, make_swap_report


class SwapDrillConfig(OracleFleetConfig):
    """A swap drill.

    Attributes:
        swaps: how many.
        strategy: of the rollouts.
        warmup_swaps: of them, those before memory is first read; they count in everything else.
        warmup_s: time under load before the first swap; latencies of its answers count neither as steady nor as during.
        pause_s: steady time between two swaps, after the publishing of the next version.
        max_ratio_p99: p99 during swaps to steady; more is a problem.
    """

    swaps: int = Field(default=100, ge=1, le=100_000)
    strategy: Strategy = "beside"
    warmup_swaps: int = Field(default=4, ge=0)
    warmup_s: float = Field(default=5.0, ge=0, le=600)
    pause_s: float = Field(default=3.0, gt=0, le=600)
    max_ratio_p99: float = Field(default=MAX_RATIO_P99, ge=1)


@dataclass(slots=True)
class _Course:
    """What happened when."""

    swaps: list[Swap] = field(default_factory=list)
    apart: list[Span] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)


async def run_swap_drill(
    config: SwapDrillConfig,
    folder: Path,
    progress: Progress = no_progress,
) -> SwapReport:
    """Runs the drill.

    Args:
        config: what to do.
        folder: where the stores, logs and answers go.
        progress: told the swaps done.

    Raises:
        DrillError: a rollout did not end as `done`, or the load failed. What answers say is in the report.
        ShardrankError: the fleet did not come up, or a version can't be published.
    """
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(oracle_fleet(config, folder, progress))
        load = await stack.enter_async_context(running_load(fleet.load_config(folder / "swap.answers")))
        course = await _swap_again_and_again(config, fleet, load, progress)
        retries = await fleet.retries()
        answers = await load.stop()
        facts = {
            "rows_mb": rows_bytes_of(fleet.writer.spec) / BYTES_PER_MB,
            "registry": config.registry,
            "shards": config.shards,
            "replicas": config.replicas,
            "cards": config.cards,
            "workers": config.workers,
            "rate": config.rate,
            "strategy": config.strategy,
            "retries": retries,
            "details": tuple(load.details()),
        }
        return make_swap_report(
            answers, course.swaps, course.apart, course.memory, facts, max_ratio_p99=config.max_ratio_p99
        )


async def _swap_again_and_again(
    config: SwapDrillConfig, fleet: OracleFleet, load: RunningLoad, progress: Progress
) -> _Course:
    course = _Course()
    live = await fleet.live_version()
    warmup_swaps = min(config.warmup_swaps, config.swaps - 1)
    with _apart(course):
        # The first requests of a process find everything cold; that is the fleet's start, not a swap.
        await asyncio.sleep(config.warmup_s)
    for number in range(config.swaps):
        progress("swaps", number, config.swaps)
        with _apart(course):
            if number >= warmup_swaps:
                course.memory.append(await asyncio.to_thread(sample_memory, number, fleet.process_ids()))
            version = await fleet.publish_next(differs_from=live)
        await asyncio.sleep(config.pause_s)
        await _swap(config, fleet, live, version, course)
        live = version
        load.check()
    with _apart(course):
        course.memory.append(await asyncio.to_thread(sample_memory, config.swaps, fleet.process_ids()))
    progress("swaps", config.swaps, config.swaps)
    await asyncio.sleep(config.pause_s)
    return course


@contextmanager
def _apart(course: _Course) -> Iterator[None]:
    """What the drill does here takes time of the cores that it shares with the fleet, as no swap would."""
    begin = time.monotonic()
    yield
    course.apart.append(Span(begin, time.monotonic()))


async def _swap(config: SwapDrillConfig, fleet: OracleFleet, live: int, version: int, course: _Course) -> None:
    begin = time.monotonic()
    await fleet.start_rollout(version, config.strategy)
    rollout = await fleet.until_rollout_ends()
    course.swaps.append(Swap(Span(begin, time.monotonic()), live, version))
    if rollout.state != "done":
        raise DrillError(f"the rollout of version {version} ended as {rollout.state}: {rollout.reason}")
