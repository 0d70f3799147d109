"""What a crash drill found: case by case, and together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from loadtest.drill.answers import Answers
from loadtest.drill.crash_cases import CrashCase
from loadtest.drill.swap_report import Span, overlaps, percentile
from loadtest.drill.verdict import Kind

MAX_SETTLE_S = 10.0
MAX_LOST_SHARE = 0.001


@dataclass(frozen=True, slots=True)
class CrashCourse:
    """How one case went. Times are seconds of CLOCK_MONOTONIC.

    Attributes:
        case: what was killed, and when.
        after_s: how long after the step was seen on record.
        killed_at, restarted_at: when it was killed, and when its successor was started.
        settled_at: when the fleet was exactly in one version again; None if that did not come about.
        watched_until: the end of a time after that in which all answers must be of that version.
        from_version, to_version: live when it was killed or before the rollout, and what the rollout was to make live.
        live_version: what is wanted live in the end; 0 if nothing is.
        rollout_state: how the rollout ended; "" without one.
        lag: why the fleet is not in one version, if it is not.
    """

    case: CrashCase
    after_s: float
    killed_at: float
    restarted_at: float
    settled_at: float | None
    watched_until: float
    from_version: int
    to_version: int
    live_version: int
    rollout_state: str
    lag: str


class CrashResult(BaseModel):
    """One case in the report.

    Attributes:
        course, step, victim, process: of `CrashCase`.
        after_s: from when the step was seen on record to the kill.
        ended_in: `old` or `new` version, or `neither`.
        rollout: how the rollout ended; "" without one.
        restart_s: from the kill to the start of the successor.
        settled_s: from the start of the successor until all nodes were exactly in one version; None: never.
        answers, failed, mixed, wrong: of the requests out between the kill and the end of the case.
        stale: right answers of another version than the last one, of requests that were due once it had settled.
        lag: why the fleet is not in one version, if it is not.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    course: str
    step: str
    victim: str
    process: str
    after_s: float
    ended_in: str
    rollout: str
    restart_s: float
    settled_s: float | None
    answers: int
    failed: int
    mixed: int
    wrong: int
    stale: int
    lag: str


class CrashReport(BaseModel):
    """What `drill crash --json` writes.

    Attributes:
        cases: kills.
        ended_old, ended_new, ended_neither: in which version the fleet was afterwards.
        settled_within_10_s: cases that ended exactly in one version within 10 s of the restart.
        settled_s_median, settled_s_max: of the cases that did end so.
        answers, failed, mixed, wrong: over the whole drill.
        stale: right answers of another version than the one in which a case had settled.
        answers_lost_share_shard_node: of the requests out between the kill of a shard node and the end of its case, the
            share that failed; over all cases but those of a rollout by replica.
        answers_lost_share_shard_node_by_replica: likewise, in rollouts by replica. While one replica of a shard is
            being rolled, the other is its only one, so killing that costs answers until it is back.
        answers_lost_share_redis: likewise, for a killed Redis.
        registry, shards, replicas, cards, workers, rate, step_delay_s: what ran.
        results: case by case.
        details: the first answers that were not right.
        problems: why the drill did not pass; empty if it did.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cases: int
    ended_old: int
    ended_new: int
    ended_neither: int
    settled_within_10_s: int
    settled_s_median: float | None
    settled_s_max: float | None
    answers: int
    failed: int
    mixed: int
    wrong: int
    stale: int
    answers_lost_share_shard_node: float | None
    answers_lost_share_shard_node_by_replica: float | None
    answers_lost_share_redis: float | None
    registry: str
    shards: int
    replicas: int
    cards: int
    workers: int
    rate: float
    step_delay_s: float
    results: tuple[CrashResult, ...]
    details: tuple[str, ...]
    problems: tuple[str, ...]


def crash_result(course: CrashCourse, answers: Answers) -> CrashResult:
    """One case, with the answers of the whole drill."""
    own = answers[overlaps(answers, [Span(course.killed_at, course.watched_until)])]
    kinds = np.bincount(own["kind"], minlength=len(Kind))
    settled_s, stale = None, 0
    if course.settled_at is not None:
        settled_s = course.settled_at - course.restarted_at
        after = own[(own["intended"] >= course.settled_at) & (own["kind"] == Kind.OK)]
        stale = int((after["version"] != course.live_version).sum())
    # Without a rollout there is one version, the old one.
    ended_in = {course.to_version: "new", course.from_version: "old"}.get(course.live_version, "neither")
    return CrashResult(
        course=course.case.course,
        step=course.case.step,
        victim=course.case.victim,
        process=course.case.child,
        after_s=course.after_s,
        ended_in="neither" if settled_s is None else ended_in,
        rollout=course.rollout_state,
        restart_s=course.restarted_at - course.killed_at,
        settled_s=settled_s,
        answers=len(own),
        failed=int(kinds[Kind.FAILED]),
        mixed=int(kinds[Kind.MIXED]),
        wrong=int(kinds[Kind.WRONG]),
        stale=stale,
        lag=course.lag,
    )


def make_crash_report(courses: Sequence[CrashCourse], answers: Answers, facts: dict[str, Any]) -> CrashReport:
    """Draws up the report.

    Args:
        courses: how the cases went.
        answers: all of the drill.
        facts: the remaining fields of the report, as they are: what ran, and details.
    """
    results = [crash_result(course, answers) for course in courses]
    kinds = np.bincount(answers["kind"], minlength=len(Kind))
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
        answers=len(answers),
        failed=int(kinds[Kind.FAILED]),
        mixed=int(kinds[Kind.MIXED]),
        wrong=int(kinds[Kind.WRONG]),
        stale=sum(one.stale for one in results),
        answers_lost_share_shard_node=_lost(results, {"shard-node"}, by_replica=False),
        answers_lost_share_shard_node_by_replica=_lost(results, {"shard-node"}, by_replica=True),
        answers_lost_share_redis=_lost(results, {"redis", "redis-emptied"}),
        results=tuple(results),
        problems=(),
        **facts,
    )
    return report.model_copy(update={"problems": tuple(_problems(report))})


def _lost(results: Sequence[CrashResult], victims: set[str], *, by_replica: bool | None = None) -> float | None:
    own = [
        one
        for one in results
        if one.victim in victims and (by_replica is None or (one.course == "by-replica") == by_replica)
    ]
    answers = sum(one.answers for one in own)
    return sum(one.failed for one in own) / answers if answers else None


def _problems(report: CrashReport) -> list[str]:
    found = [
        f"{count} answers {what}"
        for count, what in (
            (report.mixed, "are mixed"),
            (report.wrong, "are wrong"),
            (report.stale, "name another version than the one that the fleet had settled in"),
        )
        if count
    ]
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
