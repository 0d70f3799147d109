"""`drill upgrade`: each process of a fleet is replaced by another release's, under load, row updates and rollouts.

The processes before are those of another checkout of this repository; shard nodes or serving processes go first, so
that both pairs of releases meet.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from loader.deltas.publisher import AsyncDeltaPublisher
from loader.progress import Progress
from loadtest.drill.config import Order, UpgradeDrillConfig
from loadtest.drill.fleet import ROLLOUT_TIMEOUT_S, OracleFleet, count_kinds, oracle_fleet, polled
from loadtest.drill.oracle import QUESTIONS_EACH, make_questions, version_rows
from loadtest.drill.report import Judged, Limit, Report, answer_limits
from loadtest.drill.restart import WATCH_S, exit_problems, restart
from loadtest.drill.soak import SoakCourse, roll_out, update_rows
from loadtest.load.result import Rows
from loadtest.servers import THIS_CHECKOUT, checked_checkout, commit_of
from serving.fleet.supervisor import Child

LOOKUPS = 32
# Until the last delta must be in each of these.
VISIBLE_S = 10.0


def code_of(checkout: Path) -> dict[str, str]:
    """Return the environment of processes that run a checkout's code."""
    # Without the second one Python would look in the working directory first.
    return {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}


def upgrade_order(names: Mapping[str, Child], order: Order) -> list[str]:
    """Return the names of the processes as they are replaced, the coordinator before what is upgraded last."""
    first, last = ("shard-", "serve-") if order == "nodes-first" else ("serve-", "shard-")
    return sorted(names, key=lambda name: (name.startswith(last), not name.startswith(first), name))


async def run_drill(config: UpgradeDrillConfig, folder: Path, progress: Progress) -> Report:
    """Run the drill with its files in the folder. Raises DrillError if a process is not ready again."""
    old, course, upgrades = checked_checkout(config.old), SoakCourse(), list[dict[str, Any]]()
    async with oracle_fleet(config, folder, progress, code_of(old)) as fleet:
        works = (update_rows(config, fleet, course), roll_out(config, fleet, course, ends=math.inf))
        tasks = [fleet.load.tasks.create_task(work) for work in works]
        children = fleet.local.supervisor.children
        for name in upgrade_order(children, config.order):
            progress("upgrades", len(upgrades), len(children))
            child, before = children[name], course.counts.copy()
            environment = {**child.spec.environment, **code_of(THIS_CHECKOUT)}
            child.spec = dataclasses.replace(child.spec, environment=environment)
            upgrade = {"process": name, **await restart(child)}
            upgrades.append(upgrade | {what: course.counts[what] - before[what] for what in ("rollouts", "updates")})
        await asyncio.sleep(WATCH_S)
        lag = await polled(fleet.lag, lambda lag: not lag, ROLLOUT_TIMEOUT_S)
        for task in tasks:
            task.cancel()
        progress("upgrades", len(upgrades), len(children))
        figures = {
            "old_commit": commit_of(old),
            "new_commit": commit_of(THIS_CHECKOUT),
            "order": config.order,
            "lookups_with_last_delta": await count_visible(fleet),
            **{name: course.counts[name] for name in ("rollouts", "updates")},
            "upgrades": upgrades,
        }
        problems = [*exit_problems(upgrades), *([f"at the end: {lag}"] if lag else [])]
        return await fleet.report(partial(upgrade_figures, figures), problems)


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


def upgrade_figures(figures: dict[str, Any], answers: Rows) -> Judged:
    """Return the figures with those of answers, and the limits: rollouts and updates must have gone on."""
    figures = {**count_kinds(answers["code"]), **figures}
    done = [Limit(name, figures[name], 1, "at least") for name in ("answers", "rollouts", "updates")]
    done.append(Limit("lookups_with_last_delta", figures["lookups_with_last_delta"], LOOKUPS, "at least"))
    return figures, [*answer_limits(figures), *done]
