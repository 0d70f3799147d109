"""`drill restart` and `drill upgrade`: each process of a fleet ends on SIGTERM and comes back; no request may fail.

The next one is restarted as soon as the one before is ready, which shard nodes say at /readyz of their admin port. In
an upgrade the processes before are those of another checkout of this repository; shard nodes or serving processes go
first, so that both pairs of releases meet; the publisher of row updates comes last.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
import time
from collections.abc import Mapping
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import httpx

from loader.deltas.chain import FORMAT, is_commit
from loader.progress import Progress
from loader.registry.fleet import delta_stream
from loadtest.drill.config import Judged, Limit, Order, Report, RestartDrillConfig, UpgradeDrillConfig, answer_limits
from loadtest.drill.fleet import READY_TIMEOUT_S, ROLLOUT_TIMEOUT_S, OracleFleet, count_kinds, oracle_fleet, polled
from loadtest.drill.soak import SoakCourse, run_rollouts
from loadtest.drill.trainer import Trainer, running_trainer
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
    async with (
        oracle_fleet(config, folder, progress, environments[0]) as fleet,
        running_trainer(fleet, config, course.counts, environments[0]) as (trainer, training),
    ):
        children, rolling = fleet.local.supervisor.children, None
        if upgrade is not None:
            rolling = fleet.load.tasks.create_task(run_rollouts(upgrade, fleet, course, ends=math.inf))
        for name in list(children) if upgrade is None else upgrade_order(children, upgrade.order):
            progress("restarts", len(restarts), len(children))
            child, before = children[name], course.counts.copy()
            environment = {**child.spec.environment, **environments[1]}
            child.spec = dataclasses.replace(child.spec, environment=environment)
            restarts.append({"process": name, **await restart(child)})
            if upgrade is not None:
                restarts[-1] |= {what: course.counts[what] - before[what] for what in ("rollouts", "updates")}
        await asyncio.sleep(WATCH_S)
        codes = ((done["process"], done["exit_code"]) for done in restarts)
        problems = [f"{name}: after SIGTERM it ended with {describe_exit(code)}" for name, code in codes if code]
        figures: dict[str, Any] = {"restarts": restarts}
        if upgrade is not None and rolling is not None:
            if lag := await polled(fleet.lag, lambda lag: not lag, ROLLOUT_TIMEOUT_S):
                problems.append(f"at the end: {lag}")
            rolling.cancel()
            commits = {"old_commit": commit_of(upgrade.old.resolve()), "new_commit": commit_of(THIS_CHECKOUT)}
            figures = {**commits, "order": upgrade.order, "rollouts": course.counts["rollouts"], "upgrades": restarts}
        figures |= await replace_publisher(fleet, trainer, training, environments[1])
        progress("restarts", len(restarts), len(children))
        return await fleet.report(partial(restart_figures, figures), problems)


async def replace_publisher(
    fleet: OracleFleet, trainer: Trainer, training: asyncio.Task[None], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Have the new release publish after the old one, which tries once more, and read all back. Returns figures."""
    await asyncio.sleep(WATCH_S)
    trainer.start(environment)
    await asyncio.sleep(WATCH_S)

    async def last_format() -> int:
        stream = delta_stream(fleet.spec.model, await fleet.live_version())
        last = (await fleet.registry.registry.bounds(stream)).last
        return max([1 + is_commit(entry.payload) for entry in await fleet.registry.registry.read(stream, last - 1)])

    # A publisher that finds all nodes new changes the format, once they have been for a while.
    await polled(last_format, FORMAT.__eq__, READY_TIMEOUT_S)
    refusal = ""
    try:
        await trainer.update(trainer.processes[0])
    except LoadError as error:
        refusal = str(error)
    trainer.is_over = True
    await training
    formats, kept = list[int](), set[tuple[int, int]]()
    for version in sorted({version for version, _ in trainer.acknowledged}):
        stream, after = delta_stream(fleet.spec.model, version), 0
        formats.clear()
        while deltas := await fleet.registry.registry.read(stream, after):
            after = deltas[-1].sequence
            kept |= {(version, delta.sequence) for delta in deltas}
            formats += (1 + is_commit(delta.payload) for delta in deltas)
    differing = await polled(partial(count_differing, fleet, trainer), lambda counts: not any(counts), VISIBLE_S)
    return {
        "old_publisher_refused": int(bool(refusal)),
        "old_publisher_refusal": refusal,
        "delta_formats": [formats[0], formats[-1]],
        "last_delta_format": formats[-1],
        "lookups_with_last_delta": differing.count(0),
        "updates": len(trainer.acknowledged),
        "updates_lost": len(trainer.acknowledged - kept) + max(differing),
    }


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


async def count_differing(fleet: OracleFleet, trainer: Trainer) -> list[int]:
    """Return how many changed rows are not as they were published last, in each of `LOOKUPS` answers."""
    url, live = f"{fleet.server.target('json')}/v1/models/{fleet.spec.model}:lookup", await fleet.live_version()
    changed, counts = trainer.changed[live], list[int]()
    body = {"sparse": {name: [[row] for row in rows] for name, rows in changed.items()}}
    for _ in range(LOOKUPS):
        # Each over its own connection, for any serving process and any replica.
        async with httpx.AsyncClient(trust_env=False) as http:
            embeddings = (await http.post(url, json=body)).json().get("embeddings", {})
        pairs = (zip_longest(rows.values(), embeddings.get(name, ())) for name, rows in changed.items())
        counts.append(sum(expected != values for expected, values in chain.from_iterable(pairs)))
    return counts


def restart_figures(figures: dict[str, Any], answers: Rows) -> Judged:
    """Return the figures with those of answers, and the limits, also of what must have gone on."""
    figures = {**count_kinds(answers["code"]), **figures}
    # What an old publisher appended behind a change of formats would be read by no node.
    least = {"answers": 1, "updates": 1, "lookups_with_last_delta": LOOKUPS, "last_delta_format": FORMAT}
    least |= {"old_publisher_refused": int(len(set(figures["delta_formats"])) > 1)}
    least |= {"rollouts": 1} if "rollouts" in figures else {}
    done = [Limit(name, figures[name], count, "at least") for name, count in least.items()]
    return figures, [*answer_limits(figures, "updates_lost"), *done]
