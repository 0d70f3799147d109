"""`drill crash`: `kill -9` of every kind of process at every recorded step, under a load that checks every answer."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from loader.progress import Progress, no_progress
from loader.registry.fleet import WantedModel
from loader.rollout.requests import abort_rollout
from loadtest.drill.crash_cases import ABORTED_IN, COURSES, PROCESSES, REDIS, Course, CrashCase, Victim, crash_cases
from loadtest.drill.crash_report import MAX_SETTLE_S, CrashCourse, CrashReport, make_crash_report
from loadtest.drill.errors import DrillError
from loadtest.drill.load_process import running_load
from loadtest.drill.oracle_fleet import OracleFleet, OracleFleetConfig, oracle_fleet

STEP_POLL_S = 0.01
CANARY_SHARE = 0.1
CANARY_BAKE_S = 0.5


class CrashDrillConfig(OracleFleetConfig):
    """A crash drill.

    Attributes:
        courses: kinds of rollouts that are interrupted.
        victims: what is killed; None for the three kinds of processes, and Redis if it is the registry.
        only_steps: only at these steps; empty for all.
        max_kill_delay_s: the kill comes at a random moment up to so long after a step was seen on record: before what
            it wants is written, or while nodes are at it.
        seed: of these moments.
        redis_down_s: how long a killed Redis stays away.
        restart_timeout_s: a process that is not started again by then ends the drill.
        give_up_s: how long a fleet is waited for after a restart. More than 10 s, to tell how late it was.
        watch_s: how long answers are watched after a case has settled.
        warmup_s: time under load before the first kill.
    """

    workers: int = Field(default=2, ge=1, le=64)
    rate: float = Field(default=100.0, gt=0, le=100_000)
    step_delay_s: float = Field(default=0.15, gt=0, le=60)
    courses: tuple[Course, ...] = COURSES
    victims: tuple[Victim, ...] | None = None
    only_steps: tuple[str, ...] = ()
    max_kill_delay_s: float = Field(default=0.3, ge=0, le=60)
    seed: int = 0
    redis_down_s: float = Field(default=2.0, ge=0, le=60)
    restart_timeout_s: float = Field(default=30.0, gt=0)
    give_up_s: float = Field(default=4 * MAX_SETTLE_S, gt=0)
    watch_s: float = Field(default=0.5, ge=0)
    warmup_s: float = Field(default=3.0, ge=0, le=600)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.registry != "redis" and set(self.victims or ()) & set(REDIS):
            raise ValueError(f"victims {list(self.victims or ())}: Redis can only be killed with --registry redis")
        return self

    def cases(self, shard_nodes: Sequence[str], workers: Sequence[str]) -> list[CrashCase]:
        """What is killed, and when.

        Args:
            shard_nodes: their names.
            workers: names of the serving processes.
        """
        everything = (*PROCESSES, *REDIS) if self.registry == "redis" else PROCESSES
        cases = crash_cases(self.courses, self.victims or everything, shard_nodes, workers)
        return [case for case in cases if not self.only_steps or case.step in self.only_steps]


async def run_crash_drill(
    config: CrashDrillConfig,
    folder: Path,
    progress: Progress = no_progress,
) -> CrashReport:
    """Runs the drill.

    Args:
        config: what to do.
        folder: where the stores, logs and answers go.
        progress: told the cases done.

    Raises:
        DrillError: a process was not started again, a step was never on record, or the load failed. What else goes
            wrong is in the report.
        ShardrankError: the fleet did not come up, or a version can't be published.
    """
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(oracle_fleet(config, folder, progress))
        load = await stack.enter_async_context(running_load(fleet.load_config(folder / "crash.answers")))
        names = list(fleet.local.supervisor.children)
        cases = config.cases([n for n in names if n.startswith("shard-")], [n for n in names if n.startswith("serve-")])
        await asyncio.sleep(config.warmup_s)
        courses: list[CrashCourse] = []
        draw = random.Random(config.seed)
        for number, case in enumerate(cases):
            progress("kills", number, len(cases))
            courses.append(await _run_case(config, fleet, case, config.max_kill_delay_s * draw.random()))
            load.check()
            if courses[-1].settled_at is None:
                # What a further kill would find says nothing about that kill.
                break
        progress("kills", len(cases), len(cases))
        answers = await load.stop()
        shape = config.model_dump(
            include={"registry", "shards", "replicas", "cards", "workers", "rate", "step_delay_s"}
        )
        return make_crash_report(courses, answers, {**shape, "details": tuple(load.details())})


async def _run_case(config: CrashDrillConfig, fleet: OracleFleet, case: CrashCase, delay_s: float) -> CrashCourse:
    live = await fleet.live_version()
    version = live
    if case.step:
        version = await fleet.publish_next(differs_from=live)
        await _begin_rollout(fleet, case, version)
        await _until_step(config, fleet, case)
    seen_at = time.monotonic()
    await asyncio.sleep(delay_s)
    killed_at = time.monotonic()
    await _kill(config, fleet, case)
    restarted_at = time.monotonic()
    lag = await fleet.until_settled(config.give_up_s)
    settled_at = None if lag else time.monotonic()
    await asyncio.sleep(config.watch_s)
    wanted: WantedModel | None = await fleet.registry.wanted_model(fleet.model)
    rollout = await fleet.rollout()
    return CrashCourse(
        case=case,
        after_s=killed_at - seen_at,
        killed_at=killed_at,
        restarted_at=restarted_at,
        settled_at=settled_at,
        watched_until=time.monotonic(),
        from_version=live,
        to_version=version,
        live_version=0 if wanted is None or wanted.live is None else wanted.live,
        rollout_state=rollout.state if rollout is not None and case.step else "",
        lag=lag,
    )


async def _begin_rollout(fleet: OracleFleet, case: CrashCase, version: int) -> None:
    with_canary = case.strategy == "beside"
    await fleet.start_rollout(
        version,
        case.strategy,
        canary_share=CANARY_SHARE if with_canary else None,
        bake_s=CANARY_BAKE_S if with_canary else 0.0,
    )


async def _until_step(config: CrashDrillConfig, fleet: OracleFleet, case: CrashCase) -> None:
    """Waits until the step is on record. Raises DrillError if the rollout ends without it."""
    deadline = time.monotonic() + config.rollout_timeout_s
    aborted = case.course != "undo"
    while True:
        rollout = await fleet.rollout()
        assert rollout is not None
        if not aborted and rollout.step == ABORTED_IN:
            await abort_rollout(fleet.registry, fleet.model, "the drill wants to see it undone")
            aborted = True
        elif rollout.step == case.step and aborted and rollout.active:
            return
        if not rollout.active:
            raise DrillError(f"{case}: the rollout ended as {rollout.state} before this step: {rollout.reason}")
        if time.monotonic() > deadline:
            raise DrillError(f"{case}: not on record after {config.rollout_timeout_s:g} s; {await fleet.lag()}")
        await asyncio.sleep(STEP_POLL_S)


async def _kill(config: CrashDrillConfig, fleet: OracleFleet, case: CrashCase) -> None:
    """Kills, and returns when the successor is started. Raises DrillError if there is none."""
    if case.victim in REDIS:
        assert fleet.redis is not None
        await fleet.redis.kill()
        await asyncio.sleep(config.redis_down_s)
        await fleet.redis.restart(empty=case.victim == "redis-emptied")
        return
    child = fleet.local.supervisor.children[case.child]
    killed = child.pid
    if killed is None:
        raise DrillError(f"{case}: it does not run")
    os.kill(killed, signal.SIGKILL)
    deadline = time.monotonic() + config.restart_timeout_s
    while child.pid in (None, killed):
        if time.monotonic() > deadline:
            raise DrillError(f"{case}: not started again after {config.restart_timeout_s:g} s")
        await asyncio.sleep(STEP_POLL_S)
