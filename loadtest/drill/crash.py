"""`drill crash`: processes are killed at every recorded step of a rollout; the fleet must end in one version."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loader.progress import Progress
from loader.rollout.guards import GuardLimits
from loader.rollout.plan import CANARY, UNDO_STEPS, Rollout, plan_steps
from loader.rollout.requests import abort_rollout
from loadtest.drill.config import PROCESSES, REDIS_VICTIMS, Course, CrashDrillConfig, Victim
from loadtest.drill.fleet import ROLLOUT_TIMEOUT_S, OracleFleet, oracle_fleet, polled
from loadtest.drill.load import Answers, TimeSpan, count_kinds, overlaps, percentile
from loadtest.drill.oracle import Kind
from loadtest.drill.report import Judged, Limit, Report
from loadtest.errors import DrillError

STEP_POLL_S = 0.01
CANARY_SHARE = 0.1
CANARY_BAKE_S = 0.5
MAX_SETTLE_S = 10.0
MAX_LOST_SHARE = 0.001
# How long a fleet is waited for after a restart: longer than it may take, to tell how late it was.
GIVE_UP_S = 4 * MAX_SETTLE_S
RESTART_TIMEOUT_S = 30.0
# How long answers are watched after a case has settled.
WATCH_S = 0.5
WARMUP_S = 3.0

STEPS: dict[Course, tuple[str, ...]] = {
    "idle": ("",),
    "beside": plan_steps("beside", canary=True, bake=True),
    "undo": UNDO_STEPS,
    "by-replica": plan_steps("by-replica", canary=False, bake=False, early_groups=1, groups=2),
}
"""Those of `undo` are of a rollout that is aborted in its canary."""


class CrashCase(NamedTuple):
    """One kill: the rollout, its step on record ("" without one), and the process by its name ("" for Redis)."""

    course: Course
    step: str
    victim: Victim
    process: str

    def __str__(self) -> str:
        return f"{self.course}, step {self.step or 'none'}, {self.process or self.victim} killed"


def crash_cases(config: CrashDrillConfig, processes: Sequence[str]) -> list[CrashCase]:
    """Return all cases; of several processes of a kind, shard nodes or serving processes, each in turn."""
    prefixes = {"coordinator": "coordinator", "shard-node": "shard-", "serving": "serve-"}
    victims = config.victims or (PROCESSES + REDIS_VICTIMS if config.registry == "redis" else PROCESSES)
    turns = {
        victim: itertools.cycle([name for name in processes if name.startswith(prefixes.get(victim, "-"))] or [""])
        for victim in victims
    }
    return [
        CrashCase(course, step, victim, next(turns[victim]))
        for course in config.courses
        for step in STEPS[course]
        if not config.steps or step in config.steps
        for victim in victims
    ]


async def run_drill(config: CrashDrillConfig, folder: Path, progress: Progress) -> Report:
    """Run the drill with its files in the folder. Raises DrillError if a process or a step does not come."""
    async with oracle_fleet(config, folder, progress) as fleet:
        cases = crash_cases(config, list(fleet.local.supervisor.children))
        await asyncio.sleep(WARMUP_S)
        results: list[dict[str, Any]] = []
        draw = random.Random(config.seed)
        for case in cases:
            progress("kills", len(results), len(cases))
            results.append(await _run_case(fleet, case, config.max_kill_delay_s * draw.random()))
            fleet.load.process.check()
            if results[-1]["lag"]:
                # What a further kill would show says nothing about that kill.
                break
        progress("kills", len(cases), len(cases))
        return fleet.report(*crash_figures(config, results, await fleet.load.stop()))


async def _run_case(fleet: OracleFleet, case: CrashCase, delay_s: float) -> dict[str, Any]:
    """Return the figures of the report but those of answers; times are of CLOCK_MONOTONIC, version 0 is none."""
    version = before = await fleet.live_version()
    if case.step:
        version = await fleet.publish_next(differs_from=before)
        if case.course == "by-replica":
            await fleet.start_rollout(version, "by-replica")
        else:
            guards = GuardLimits(min_requests=0)
            await fleet.start_rollout(version, canary_share=CANARY_SHARE, bake_s=CANARY_BAKE_S, guards=guards)
        if case.course == "undo":
            await _until_step(fleet, case, CANARY)
            await abort_rollout(fleet.registry, fleet.spec.model, "the drill wants to see it undone")
        await _until_step(fleet, case, case.step)
    seen_at = time.monotonic()
    await asyncio.sleep(delay_s)
    killed_at = time.monotonic()
    await _kill(fleet, case)
    restarted_at = time.monotonic()
    lag = await polled(fleet.lag, lambda reason: not reason, GIVE_UP_S)
    settled_at = time.monotonic()
    await asyncio.sleep(WATCH_S)
    rollout, live = await fleet.rollout(), await fleet.live_version()
    return {
        **case._asdict(),
        "ended_in": "neither" if lag else {version: "new", before: "old"}.get(live, "neither"),
        "rollout": rollout.state if rollout is not None and case.step else "",
        "restart_s": restarted_at - killed_at,
        "settled_s": None if lag else settled_at - restarted_at,
        "after_s": killed_at - seen_at,
        "lag": lag,
        "live_version": live,
        "killed_at": killed_at,
        "watched_until": time.monotonic(),
    }


async def _until_step(fleet: OracleFleet, case: CrashCase, step: str) -> None:
    """Wait until a step is on record. Raises DrillError if the rollout ends without it."""

    def is_enough(last: Rollout | None) -> bool:
        return last is None or not last.active or last.step == step

    rollout = await polled(fleet.rollout, is_enough, ROLLOUT_TIMEOUT_S, STEP_POLL_S)
    if rollout is None or not rollout.active or rollout.step != step:
        raise DrillError(f"{case}: step {step} was not on record; {await fleet.lag()}; {rollout}")


async def _kill(fleet: OracleFleet, case: CrashCase) -> None:
    """Kill -9, and return when the successor is started. Raises DrillError if there is none."""
    redis = fleet.redis
    child = redis.child if redis and not case.process else fleet.local.supervisor.children[case.process]
    if (killed := child.pid) is None:
        raise DrillError(f"{case}: it does not run")
    child.kill()
    await child.wait()
    if redis and case.victim == "redis-emptied":
        redis.empty()

    async def is_back() -> bool:
        return child.pid not in (None, killed)

    if not await polled(is_back, bool, RESTART_TIMEOUT_S, STEP_POLL_S):
        raise DrillError(f"{case}: not started again after {RESTART_TIMEOUT_S:g} s")


def crash_figures(config: CrashDrillConfig, cases: Sequence[Mapping[str, Any]], answers: Answers) -> Judged:
    """Return what the cases and all answers say, and the limits; a killed serving process may fail its requests."""
    results: list[dict[str, Any]] = []
    limits: list[Limit] = []
    for case in cases:
        seen = answers[overlaps(answers, [TimeSpan(case["killed_at"], case["watched_until"])])]
        settled_at = math.inf if case["lag"] else case["killed_at"] + case["restart_s"] + case["settled_s"]
        is_other = (seen["kind"] == Kind.OK) & (seen["version"] != case["live_version"])
        stale = int((is_other & (seen["intended"] >= settled_at)).sum())
        results.append({**case, **count_kinds(seen["kind"]), "stale": stale})
        name, lag = CrashCase(*(case[key] for key in CrashCase._fields)), case["lag"]
        limits.append(Limit(f"{name}: settled_s{lag and f' ({lag})'}", case["settled_s"], MAX_SETTLE_S))
    settled = [result["settled_s"] for result in results if result["settled_s"] is not None]
    ended = [result["ended_in"] for result in results]

    def lost_share(victims: Sequence[Victim], *courses: Course) -> float | None:
        chosen = [result for result in results if result["victim"] in victims and result["course"] in courses]
        total = sum(result["answers"] for result in chosen)
        return sum(result["failed"] for result in chosen) / total if total else None

    of_nodes, of_redis = lost_share(("shard-node",), "idle", "beside", "undo"), lost_share(REDIS_VICTIMS, *STEPS)
    figures = {
        "cases": len(results),
        **{f"ended_{which}": ended.count(which) for which in ("old", "new", "neither")},
        "settled_within_10_s": sum(settled_s <= MAX_SETTLE_S for settled_s in settled),
        "settled_s_median": percentile(settled, 50),
        "settled_s_max": percentile(settled, 100),
        **count_kinds(answers["kind"]),
        "stale": sum(result["stale"] for result in results),
        "answers_lost_share_shard_node": of_nodes,
        # While one replica of a shard is being rolled, the other is its only one, so killing that costs answers.
        "answers_lost_share_shard_node_by_replica": lost_share(("shard-node",), "by-replica"),
        "answers_lost_share_redis": of_redis,
        "results": results,
        "step_delay_s": config.step_delay_s,
    }
    limits += [Limit(name, figures[name], 0) for name in ("mixed", "wrong", "stale", "ended_neither")]
    if of_nodes is not None:
        most = MAX_LOST_SHARE if config.replicas > 1 else 1.0
        limits.append(Limit("answers_lost_share_shard_node", of_nodes, most))
    if of_redis is not None:
        limits.append(Limit("answers_lost_share_redis", of_redis, 0.0))
    return figures, limits
