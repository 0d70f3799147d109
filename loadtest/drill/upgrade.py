"""`drill restart` and `drill upgrade`: each process of a fleet ends on SIGTERM and comes back; no request may fail.

The next one is restarted as soon as the one before is ready, which shard nodes say at /readyz of their admin port. In
an upgrade the processes before are those of another checkout of this repository; shard nodes or serving processes go
first, so that both pairs of releases meet.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import re
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from loader.deltas.publisher import AsyncDeltaPublisher
from loader.progress import Progress
from loadtest.drill.config import Judged, Limit, Order, Report, RestartDrillConfig, UpgradeDrillConfig, answer_limits
from loadtest.drill.fleet import READY_TIMEOUT_S, ROLLOUT_TIMEOUT_S, OracleFleet, count_kinds, oracle_fleet, polled
from loadtest.drill.oracle import QUESTIONS_EACH, make_questions, version_rows
from loadtest.drill.soak import SoakCourse, run_rollouts, update_rows
from loadtest.errors import LoadError
from loadtest.load.result import Rows
from loadtest.servers import THIS_CHECKOUT, checked_checkout, commit_of
from serving.fleet.supervisor import Child, describe_exit

# As terminationGracePeriodSeconds of the shard nodes' pods.
GRACE_S = 60.0
POLL_S = 0.02
# How long answers are watched after the last restart.
WATCH_S = 1.0
LOOKUPS = 32
# Until the last delta must be in each of these.
VISIBLE_S = 10.0


def upgrade_order(names: Mapping[str, Child], order: Order) -> list[str]:
    """Return the names of the processes as they are replaced, the coordinator before what is upgraded last."""
    first, last = ("shard-", "serve-") if order == "nodes-first" else ("serve-", "shard-")
    return sorted(names, key=lambda name: (name.startswith(last), not name.startswith(first), name))


async def run_drill(config: RestartDrillConfig | UpgradeDrillConfig, folder: Path, progress: Progress) -> Report:
    """Run the drill with its files in the folder. Raises LoadError if a process is not ready again."""
    course, restarts, environments = SoakCourse(), list[dict[str, Any]](), [dict[str, str]()] * 2
    upgrade = config if isinstance(config, UpgradeDrillConfig) else None
    if upgrade is not None:
        # Without the second variable Python would look in the working directory first.
        checkouts = checked_checkout(upgrade.old), THIS_CHECKOUT
        environments = [{"PYTHONPATH": str(path), "PYTHONSAFEPATH": "1"} for path in checkouts]
    async with oracle_fleet(config, folder, progress, environments[0]) as fleet:
        children, works = fleet.local.supervisor.children, [update_rows(config, fleet, course)]
        if upgrade is not None:
            works.append(run_rollouts(upgrade, fleet, course, ends=math.inf))
        tasks = [fleet.load.tasks.create_task(work) for work in works]
        for name in list(children) if upgrade is None else upgrade_order(children, upgrade.order):
            progress("restarts", len(restarts), len(children))
            child, before = children[name], course.counts.copy()
            environment = {**child.spec.environment, **environments[1]}
            child.spec = dataclasses.replace(child.spec, environment=environment)
            restarts.append({"process": name, **await restart(child)})
            if upgrade is not None:
                restarts[-1] |= {what: course.counts[what] - before[what] for what in ("rollouts", "updates")}
        await asyncio.sleep(WATCH_S)
        lag = "" if upgrade is None else await polled(fleet.lag, lambda lag: not lag, ROLLOUT_TIMEOUT_S)
        for task in tasks:
            task.cancel()
        progress("restarts", len(restarts), len(children))
        figures: dict[str, Any] = {"updates": course.counts["updates"]}
        if upgrade is None:
            figures["restarts"] = restarts
        else:
            figures |= {
                "old_commit": commit_of(upgrade.old.resolve()),
                "new_commit": commit_of(THIS_CHECKOUT),
                "order": upgrade.order,
                "lookups_with_last_delta": await count_visible(fleet),
                "rollouts": course.counts["rollouts"],
                "upgrades": restarts,
            }
        codes = ((done["process"], done["exit_code"]) for done in restarts)
        problems = [f"{name}: after SIGTERM it ended with {describe_exit(code)}" for name, code in codes if code]
        return await fleet.report(partial(restart_figures, figures), problems + ([f"at the end: {lag}"] if lag else []))


async def restart(child: Child) -> dict[str, Any]:
    """End a process by SIGTERM, and wait until its successor is ready. Returns the figures of the report."""
    begin, process_id, log_bytes = time.monotonic(), child.last_pid, child.log_path.stat().st_size
    code = await child.stop(GRACE_S)
    ended = time.monotonic()

    async def is_ready() -> bool:
        if not child.spec.name.startswith("shard-"):
            return child.last_pid != process_id and child.state == "ready"
        url = re.search(rb"^metrics: (\S+)/metrics$", child.log_path.read_bytes()[log_bytes:], re.MULTILINE)
        try:
            async with httpx.AsyncClient(trust_env=False) as http:
                return url is not None and (await http.get(f"{url[1].decode()}/readyz")).is_success
        except httpx.HTTPError:
            return False

    if not await polled(is_ready, bool, READY_TIMEOUT_S, POLL_S):
        raise LoadError(f"{child.spec.name}: not ready {READY_TIMEOUT_S:g} s after its end")
    return {"exit_code": code, "ended_s": ended - begin, "ready_s": time.monotonic() - ended}


async def count_visible(fleet: OracleFleet) -> int:
    """Change a row that no question has, and return how many of `LOOKUPS` answers have it, at the latest in time."""
    live, (table,) = await fleet.live_version(), (table for table in fleet.spec.tables if table.name == "users")
    questions = itertools.chain.from_iterable(make_questions(fleet.spec, QUESTIONS_EACH).values())
    used = {row for question in questions for bag in question.bags.get("user", ()) for row in bag}
    row = min(set(range(len(used) + 1)) - used)
    changed = 3.0 * version_rows(table, live, np.array([row]))
    publisher = AsyncDeltaPublisher(fleet.registry.registry, fleet.spec.model, live)
    await publisher.publish(table.name, [row], changed)
    url = f"{fleet.server.target('json')}/v1/models/{fleet.spec.model}:lookup"

    async def look_up() -> bool:
        # Each over its own connection, for any serving process and any replica.
        async with httpx.AsyncClient(trust_env=False) as http:
            answer = (await http.post(url, json={"sparse": {"user": [[row]]}})).json()
        return answer.get("version") == live and np.array_equal(answer["embeddings"]["user"], changed)

    async def count() -> int:
        return sum([await look_up() for _ in range(LOOKUPS)])

    return await polled(count, LOOKUPS.__eq__, VISIBLE_S)


def restart_figures(figures: dict[str, Any], answers: Rows) -> Judged:
    """Return the figures with those of answers, and the limits; of an upgrade, also of what must have gone on."""
    figures = {**count_kinds(answers["code"]), **figures}
    least = {"answers": 1, "rollouts": 1, "updates": 1, "lookups_with_last_delta": LOOKUPS}
    done = [Limit(name, figures[name], count, "at least") for name, count in least.items() if "upgrades" in figures]
    return figures, [*answer_limits(figures), *done]
