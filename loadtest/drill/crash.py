"""`drill crash`: `kill -9` of every kind of process at every recorded step, under a load that checks every answer."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from loader.progress import Progress, no_progress
from loader.rollout.plan import (
    CANARY,
    FLIP,
    REPLAY,
    RETIRE_SERVING,
    RETIRE_SHARDS,
    ROLL,
    STAGE_SERVING,
    STAGE_SHARDS,
    UNDO_STEPS,
    Strategy,
)
from loader.rollout.requests import abort_rollout
from loadtest.drill.fleet import (
    ROLLOUT_TIMEOUT_S,
    FleetReport,
    OracleFleet,
    OracleFleetConfig,
    oracle_fleet,
    polled,
)
from loadtest.drill.load import AnswerCounts, Answers, TimeSpan, count_kinds, counted, overlaps, percentile
from loadtest.drill.oracle import Kind
from loadtest.errors import DrillError

STEP_POLL_S = 0.01
CANARY_SHARE = 0.1
CANARY_BAKE_S = 0.5
MAX_SETTLE_S = 10.0
MAX_LOST_SHARE = 0.001
# How long a fleet is waited for after a restart: longer than it may take, to tell how late it was.
GIVE_UP_S = 4 * MAX_SETTLE_S
REDIS_DOWN_S = 2.0
RESTART_TIMEOUT_S = 30.0
# How long answers are watched after a case has settled.
WATCH_S = 0.5
WARMUP_S = 3.0

Course = Literal["idle", "beside", "undo", "by-replica"]
Victim = Literal["coordinator", "shard-node", "serving", "redis", "redis-emptied"]
COURSES: tuple[Course, ...] = ("idle", "beside", "undo", "by-replica")
PROCESSES: tuple[Victim, ...] = ("coordinator", "shard-node", "serving")
REDIS: tuple[Victim, ...] = ("redis", "redis-emptied")

ABORTED_IN = CANARY
"""The step in which a rollout of the course `undo` is aborted."""
_STEPS: dict[Course, tuple[str, ...]] = {
    "idle": ("",),
    "beside": (STAGE_SHARDS, STAGE_SERVING, REPLAY, CANARY, FLIP, RETIRE_SERVING, RETIRE_SHARDS),
    "undo": UNDO_STEPS,
    "by-replica": (f"{ROLL}0", STAGE_SERVING, REPLAY, FLIP, RETIRE_SERVING, f"{ROLL}1", RETIRE_SHARDS),
}


class CrashCase(NamedTuple):
    """One kill.

    Attributes:
        course: `idle`: no rollout; `beside`: with a canary; `undo`: likewise, aborted in it; `by-replica`.
        step: the step on record when the victim is killed; "" without a rollout.
        victim: what is killed. `redis` comes back with what it had on disk, `redis-emptied` with nothing.
        process: by its name in the fleet; "" for Redis.
    """

    course: Course
    step: str
    victim: Victim
    process: str

    @property
    def strategy(self) -> Strategy:
        """Of the rollout."""
        return "by-replica" if self.course == "by-replica" else "beside"

    def __str__(self) -> str:
        at = f" in step {self.step}" if self.step else ""
        return f"{self.course}: {self.process or self.victim}{at}"


def crash_cases(
    courses: Sequence[Course], victims: Sequence[Victim], shard_nodes: Sequence[str], workers: Sequence[str]
) -> list[CrashCase]:
    """Return all cases; of several processes of a kind, shard nodes or serving processes, each in turn."""
    of_kind = {"coordinator": ["coordinator"], "shard-node": shard_nodes, "serving": workers}
    turns = {victim: itertools.cycle(of_kind.get(victim, [""])) for victim in victims}
    return [
        CrashCase(course, step, victim, next(turns[victim]))
        for course in courses
        for step in _STEPS[course]
        for victim in victims
    ]


class CrashDrillConfig(OracleFleetConfig):
    """A crash drill.

    Attributes:
        victims: what is killed; None for the three kinds of processes, and Redis if it is the registry.
        only_steps: only at these steps; empty for all.
        max_kill_delay_s: the kill comes at a random moment up to so long after a step was seen on record: before what
            it wants is written, or while nodes are at it.
    """

    NAME: ClassVar[str] = "crash"
    workers: int = Field(default=2, ge=1, le=64)
    rate: float = Field(default=100.0, gt=0, le=100_000)
    step_delay_s: float = Field(default=0.15, gt=0, le=60)
    courses: tuple[Course, ...] = COURSES
    victims: tuple[Victim, ...] | None = None
    only_steps: tuple[str, ...] = ()
    max_kill_delay_s: float = Field(default=0.3, ge=0, le=60)
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.registry != "redis" and set(self.victims or ()) & set(REDIS):
            raise ValueError(f"victims {list(self.victims or ())}: Redis can only be killed with --registry redis")
        return self

    def cases(self, shard_nodes: Sequence[str], workers: Sequence[str]) -> list[CrashCase]:
        """Return what is killed, and when."""
        everything = (*PROCESSES, *REDIS) if self.registry == "redis" else PROCESSES
        cases = crash_cases(self.courses, self.victims or everything, shard_nodes, workers)
        return [case for case in cases if not self.only_steps or case.step in self.only_steps]


class CrashResult(AnswerCounts):
    """One case in the report, with the requests out between the kill and the end of the case.

    Attributes:
        after_s: from when the step was seen on record to the kill.
        ended_in: `old` or `new` version, or `neither`.
        rollout: how the rollout ended; "" without one.
        restart_s: from the kill to the start of the successor.
        settled_s: from the start of the successor until all nodes were exactly in one version; None: never.
        stale: right answers of another version than the last one, of requests that were due once it had settled.
        lag: why the fleet is not in one version, if it is not.
        watched: from the kill to the end of a time after settling, in seconds of CLOCK_MONOTONIC.
        live_version: what is wanted live in the end; 0 if nothing is.
    """

    course: str
    step: str
    victim: str
    process: str
    after_s: float
    ended_in: str
    rollout: str
    restart_s: float
    settled_s: float | None
    stale: int = 0
    lag: str
    watched: TimeSpan = Field(exclude=True)
    live_version: int = Field(exclude=True)

    def judged(self, answers: Answers) -> CrashResult:
        """Count in the answers of the whole drill."""
        own = answers[overlaps(answers, [self.watched])]
        stale = 0
        if self.settled_s is not None:
            settled_at = self.watched.begin + self.restart_s + self.settled_s
            after = own[(own["intended"] >= settled_at) & (own["kind"] == Kind.OK)]
            stale = int((after["version"] != self.live_version).sum())
        return self.model_copy(update={**count_kinds(own), "stale": stale})


class CrashReport(FleetReport):
    """What `drill crash --json` writes.

    Attributes:
        settled_s_median, settled_s_max: of the cases that ended exactly in one version.
        stale: right answers of another version than the one in which a case had settled.
        answers_lost_share_shard_node: of the requests out between the kill of a shard node and the end of its case, the
            share that failed; over all cases but those of a rollout by replica.
        answers_lost_share_shard_node_by_replica: likewise, in rollouts by replica. While one replica of a shard is
            being rolled, the other is its only one, so killing that costs answers until it is back.
    """

    COLUMNS = (
        *("course", "step", "victim", "process", "ended_in", "rollout", "restart_s", "settled_s", "answers", "failed"),
    )

    cases: int
    ended_old: int
    ended_new: int
    ended_neither: int
    settled_within_10_s: int
    settled_s_median: float | None
    settled_s_max: float | None
    stale: int
    answers_lost_share_shard_node: float | None
    answers_lost_share_shard_node_by_replica: float | None
    answers_lost_share_redis: float | None
    step_delay_s: float
    results: tuple[CrashResult, ...]


async def run_crash_drill(config: CrashDrillConfig, folder: Path, progress: Progress = no_progress) -> CrashReport:
    """Run the drill; stores, logs and answers go into the folder.

    Raises DrillError if a process is not started again, a step is never on record, or the load fails. What else goes
    wrong is in the report.
    """
    async with oracle_fleet(config, folder, progress) as fleet:
        children = fleet.local.supervisor.children
        shard_nodes = [name for name in children if name.startswith("shard-")]
        cases = config.cases(shard_nodes, [name for name in children if name.startswith("serve-")])
        await asyncio.sleep(WARMUP_S)
        results: list[CrashResult] = []
        draw = random.Random(config.seed)
        for number, case in enumerate(cases):
            progress("kills", number, len(cases))
            results.append(await _run_case(fleet, case, config.max_kill_delay_s * draw.random()))
            fleet.load.check()
            if results[-1].settled_s is None:
                # What a further kill would find says nothing about that kill.
                break
        progress("kills", len(cases), len(cases))
        answers = await fleet.load.stop()
        return make_crash_report(results, answers, {**fleet.facts(), "step_delay_s": config.step_delay_s})


async def _run_case(fleet: OracleFleet, case: CrashCase, delay_s: float) -> CrashResult:
    version = live = await fleet.live_version()
    if case.step:
        version = await fleet.publish_next(differs_from=live)
        canary = (CANARY_SHARE, CANARY_BAKE_S) if case.strategy == "beside" else ()
        await fleet.start_rollout(version, case.strategy, *canary)
        await _until_step(fleet, case)
    seen_at = time.monotonic()
    await asyncio.sleep(delay_s)
    killed_at = time.monotonic()
    await _kill(fleet, case)
    restarted_at = time.monotonic()
    lag = await fleet.until_settled(GIVE_UP_S)
    settled_at = time.monotonic()
    await asyncio.sleep(WATCH_S)
    rollout, wanted = await fleet.rollout(), await fleet.live_version()
    return CrashResult(
        **case._asdict(),
        after_s=killed_at - seen_at,
        ended_in="neither" if lag else ended_in(wanted, live, version),
        rollout=rollout.state if rollout is not None and case.step else "",
        restart_s=restarted_at - killed_at,
        settled_s=None if lag else settled_at - restarted_at,
        lag=lag,
        watched=TimeSpan(killed_at, time.monotonic()),
        live_version=wanted,
    )


def ended_in(live: int, before: int, to_version: int) -> str:
    """Say which version is live after a rollout: `old`, `new` or `neither`. Without one there is only the old one."""
    return {to_version: "new", before: "old"}.get(live, "neither")


async def _until_step(fleet: OracleFleet, case: CrashCase) -> None:
    """Wait until the step is on record. Raises DrillError if the rollout ends without it."""
    is_aborted = case.course != "undo"

    async def is_on_record() -> bool:
        nonlocal is_aborted
        rollout = await fleet.rollout()
        assert rollout is not None
        if not rollout.active:
            raise DrillError(f"{case}: the rollout ended as {rollout.state} before this step: {rollout.reason}")
        if not is_aborted and rollout.step == ABORTED_IN:
            await abort_rollout(fleet.registry, fleet.model, "the drill wants to see it undone")
            is_aborted = True
            return False
        return is_aborted and rollout.step == case.step

    if not await polled(is_on_record, bool, ROLLOUT_TIMEOUT_S, STEP_POLL_S):
        raise DrillError(f"{case}: not on record after {ROLLOUT_TIMEOUT_S:g} s; {await fleet.lag()}")


async def _kill(fleet: OracleFleet, case: CrashCase) -> None:
    """Kills, and returns when the successor is started. Raises DrillError if there is none."""
    if case.victim in REDIS:
        assert fleet.redis is not None
        await fleet.redis.kill()
        await asyncio.sleep(REDIS_DOWN_S)
        await fleet.redis.start(empty=case.victim == "redis-emptied")
        return
    child = fleet.local.supervisor.children[case.process]
    killed = child.pid
    if killed is None:
        raise DrillError(f"{case}: it does not run")
    os.kill(killed, signal.SIGKILL)

    async def is_back() -> bool:
        return child.pid not in (None, killed)

    if not await polled(is_back, bool, RESTART_TIMEOUT_S, STEP_POLL_S):
        raise DrillError(f"{case}: not started again after {RESTART_TIMEOUT_S:g} s")


def make_crash_report(cases: Sequence[CrashResult], answers: Answers, facts: Mapping[str, Any]) -> CrashReport:
    """Draw up the report from the cases, and all answers of the drill."""
    results = [one.judged(answers) for one in cases]
    nodes = [one for one in results if one.victim == "shard-node"]
    settled = np.array([one.settled_s for one in results if one.settled_s is not None])
    ended = [one.ended_in for one in results]
    report = CrashReport(
        cases=len(results),
        ended_old=ended.count("old"),
        ended_new=ended.count("new"),
        ended_neither=ended.count("neither"),
        settled_within_10_s=int((settled <= MAX_SETTLE_S).sum()),
        settled_s_median=percentile(settled, 50),
        settled_s_max=percentile(settled, 100),
        **count_kinds(answers),
        stale=sum(one.stale for one in results),
        answers_lost_share_shard_node=_lost_share([one for one in nodes if one.course != "by-replica"]),
        answers_lost_share_shard_node_by_replica=_lost_share([one for one in nodes if one.course == "by-replica"]),
        answers_lost_share_redis=_lost_share([one for one in results if one.victim in REDIS]),
        results=tuple(results),
        **facts,
    )
    return report.model_copy(update={"problems": tuple(_problems(report))})


def _lost_share(own: Sequence[CrashResult]) -> float | None:
    answers = sum(one.answers for one in own)
    return sum(one.failed for one in own) / answers if answers else None


def _problems(report: CrashReport) -> list[str]:
    found = counted(
        {
            "are mixed": report.mixed,
            "are wrong": report.wrong,
            "name another version than the one that the fleet had settled in": report.stale,
        }
    )
    for one in report.results:
        name = f"{one.course}, step {one.step or 'none'}, {one.process or one.victim} killed"
        if one.ended_in == "neither":
            found.append(f"{name}: ended neither in the old nor in the new version: {one.lag}")
        elif one.settled_s is not None and one.settled_s > MAX_SETTLE_S:
            found.append(f"{name}: settled {one.settled_s:.1f} s after the restart, allowed are {MAX_SETTLE_S:g}")
    lost = report.answers_lost_share_shard_node
    if report.replicas > 1 and lost is not None and lost > MAX_LOST_SHARE:
        found.append(f"{lost:.3%} of answers were lost to killed shard nodes, allowed are {MAX_LOST_SHARE:.1%}")
    if report.answers_lost_share_redis:
        found.append(f"{report.answers_lost_share_redis:.3%} of answers were lost to a killed Redis, allowed are none")
    return found
