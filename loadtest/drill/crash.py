"""`drill crash`: processes are killed at every recorded step of a rollout; the fleet must end in one version."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from loader.progress import Progress
from loader.rollout.guards import GuardLimits
from loader.rollout.plan import Rollout, Step, plan_steps
from loader.rollout.requests import abort_rollout
from loader.snapshot.publishing import rows_bytes_of
from loadtest.drill.config import PROCESSES, REDIS_VICTIMS, Course, CrashDrillConfig, Judged, Limit, Report, Victim
from loadtest.drill.fleet import ROLLOUT_TIMEOUT_S, OracleFleet, TimeSpan, count_kinds, oracle_fleet, overlaps, polled
from loadtest.drill.oracle import oracle_spec
from loadtest.errors import LoadError
from loadtest.load.result import OK, Rows

STEP_POLL_S = 0.01
MAX_RECOVERY_S = 10.0
# How long a fleet is waited for after a restart: longer than it may take, to tell how late it was.
GIVE_UP_S = 4 * MAX_RECOVERY_S
RESTART_TIMEOUT_S = 30.0
# How long answers are watched after a case has settled.
WATCH_S = 0.5

PREFIXES: dict[str, str] = {"coordinator": "coordinator", "shard-node": "shard-", "serving": "serve-"}
"""Of names of processes."""
STEPS: dict[Course, tuple[str, ...]] = {
    "idle": ("",),
    "beside": plan_steps("beside", canary=True, bake=True),
    "undo": Step.UNDO,
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
    victims = config.victims or (PROCESSES + REDIS_VICTIMS if config.registry == "redis" else PROCESSES)
    turns = {
        victim: itertools.cycle([name for name in processes if name.startswith(PREFIXES.get(victim, "-"))] or [""])
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
    """Run the drill with its files in the folder. Raises LoadError if a process or a step does not come."""
    # One replica has most of its rows on disk; those with keys never are.
    on_disk = {"memory_budget_gb": rows_bytes_of(oracle_spec(config)) / 16e9}
    processes = {} if config.keyed else {"shard-0-1": on_disk}
    async with oracle_fleet(config, folder, progress, processes=processes) as fleet:
        cases = crash_cases(config, list(fleet.local.supervisor.children))
        results: list[dict[str, Any]] = []
        draw = random.Random(config.seed)
        for case in cases:
            progress("kills", len(results), len(cases))
            results.append(await _run_case(fleet, case, config.max_kill_delay_s * draw.random()))
            if results[-1]["lag"]:
                # What a further kill would show says nothing about that kill.
                break
        progress("kills", len(cases), len(cases))
        return await fleet.report(partial(crash_figures, config, results))


async def _run_case(fleet: OracleFleet, case: CrashCase, delay_s: float) -> dict[str, Any]:
    """Return the figures of the report but those of answers; times are of CLOCK_MONOTONIC, version 0 is none."""
    version = before = await fleet.live_version()
    if case.step:
        version = await fleet.publish_next(differs_from=before)
        by_replica, canary = {"strategy": "by-replica"}, {"canary_share": 0.1, "bake_s": 0.5}
        options = by_replica if case.course == "by-replica" else {**canary, "guards": GuardLimits(min_requests=0)}
        await fleet.start_rollout(version, **options)
        if case.course == "undo":
            await _until_step(fleet, case, Step.CANARY)
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
    def is_enough(last: Rollout | None) -> bool:
        return last is None or not last.active or last.step == step

    rollout = await polled(fleet.rollout, is_enough, ROLLOUT_TIMEOUT_S, STEP_POLL_S)
    if rollout is None or not rollout.active or rollout.step != step:
        raise LoadError(f"{case}: step {step} was not on record; {await fleet.lag()}; {rollout}")


async def _kill(fleet: OracleFleet, case: CrashCase) -> None:
    child = fleet.redis if fleet.redis and not case.process else fleet.local.supervisor.children[case.process]
    if (killed := child.pid) is None:
        raise LoadError(f"{case}: it does not run")
    child.kill()
    await child.wait()
    if case.victim == "redis-emptied":
        shutil.rmtree(fleet.folder / "redis")
        (fleet.folder / "redis").mkdir()

    async def is_back() -> bool:
        return child.pid not in (None, killed)

    if not await polled(is_back, bool, RESTART_TIMEOUT_S, STEP_POLL_S):
        raise LoadError(f"{case}: not started again after {RESTART_TIMEOUT_S:g} s")


def crash_figures(config: CrashDrillConfig, cases: Sequence[Mapping[str, Any]], answers: Rows) -> Judged:
    """Return what the cases and all answers say, and the limits; a killed serving process may fail its requests."""
    results: list[dict[str, Any]] = []
    limits: list[Limit] = []
    for case in cases:
        seen = answers[overlaps(answers, [TimeSpan(case["killed_at"], case["watched_until"])])]
        settled_at = math.inf if case["lag"] else case["killed_at"] + case["restart_s"] + case["settled_s"]
        is_other = (seen["code"] == OK) & (seen["version"] != case["live_version"])
        stale = int((is_other & (seen["due"] >= settled_at)).sum())
        results.append({**case, **count_kinds(seen["code"]), "stale": stale})
        name, lag = CrashCase(*(case[key] for key in CrashCase._fields)), case["lag"]
        limits.append(Limit(f"{name}: settled_s{lag and f' ({lag})'}", case["settled_s"], MAX_RECOVERY_S))
    settled = [result["settled_s"] for result in results if result["settled_s"] is not None]
    outcomes = [result["ended_in"] for result in results]

    def lost_share(victims: Sequence[Victim], *courses: Course) -> float | None:
        chosen = [result for result in results if result["victim"] in victims and result["course"] in courses]
        total = sum(result["answers"] for result in chosen)
        return sum(result["failed"] for result in chosen) / total if total else None

    figures: dict[str, Any] = {
        "cases": len(results),
        **{f"ended_{which}": outcomes.count(which) for which in ("old", "new", "neither")},
        "settled_s_max": max(settled, default=None),
        **count_kinds(answers["code"]),
        "stale": sum(result["stale"] for result in results),
        "answers_lost_share_shard_node": lost_share(("shard-node",), "idle", "beside", "undo"),
        "answers_lost_share_shard_node_by_replica": lost_share(("shard-node",), "by-replica"),
        "answers_lost_share_redis": lost_share(REDIS_VICTIMS, *STEPS),
        "results": results,
    }
    limits += [Limit(name, figures[name], 0) for name in ("mixed", "wrong", "stale", "ended_neither")]
    allowed = {"answers_lost_share_shard_node": 0.001 if config.replicas > 1 else 1.0, "answers_lost_share_redis": 0.0}
    # With memory for one version only a third replica has either of them while one is rolled and one is lost.
    is_covered = config.replicas > 2 or "max_memory_gb" not in config.shard_node
    allowed["answers_lost_share_shard_node_by_replica"] = 0.01 if is_covered else 1.0
    limits += [Limit(name, figures[name], limit) for name, limit in allowed.items() if figures[name] is not None]
    return figures, limits
