"""`drill restart`: each process of a fleet ends on SIGTERM and comes back, as in a rolling update; no request may fail.

The next one is restarted as soon as the one before is ready, which shard nodes say at /readyz of their admin port.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from loader.progress import Progress
from loadtest.drill.config import RestartDrillConfig
from loadtest.drill.fleet import READY_TIMEOUT_S, count_kinds, oracle_fleet, polled
from loadtest.drill.report import Judged, Report, answer_limits
from loadtest.drill.soak import SoakCourse, update_rows
from loadtest.errors import LoadError
from loadtest.load.result import Rows
from serving.fleet.supervisor import Child, describe_exit

# As terminationGracePeriodSeconds of the shard nodes' pods.
GRACE_S = 60.0
POLL_S = 0.02
# How long answers are watched after the last restart.
WATCH_S = 1.0


async def run_drill(config: RestartDrillConfig, folder: Path, progress: Progress) -> Report:
    """Run the drill with its files in the folder. Raises LoadError if a process is not ready again."""
    course, restarts = SoakCourse(), list[dict[str, Any]]()
    async with oracle_fleet(config, folder, progress) as fleet:
        updating = fleet.load.tasks.create_task(update_rows(config, fleet, course))
        children = fleet.local.supervisor.children
        for name, child in children.items():
            progress("restarts", len(restarts), len(children))
            restarts.append({"process": name, **await restart(child)})
        await asyncio.sleep(WATCH_S)
        updating.cancel()
        progress("restarts", len(restarts), len(children))
        figures = {"updates": course.counts["updates"], "restarts": restarts}
        return await fleet.report(partial(restart_figures, figures), exit_problems(restarts))


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


def exit_problems(restarts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return which processes did not end as they should after SIGTERM."""
    ended = ((each["process"], each["exit_code"]) for each in restarts)
    return [f"{name}: after SIGTERM it ended with {describe_exit(code)}" for name, code in ended if code]


def restart_figures(figures: dict[str, Any], answers: Rows) -> Judged:
    """Return the figures with those of answers, and the limits."""
    figures = {**count_kinds(answers["code"]), **figures}
    return figures, answer_limits(figures)
