"""What a drill against broken snapshots found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from loadtest.drill.answers import Answers
from loadtest.drill.swap_report import percentile
from loadtest.drill.verdict import Kind

EXAMPLES = 3
Refusal = Literal["publish", "rollout", "none"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One broken snapshot.

    Attributes:
        group: what kind of damage.
        what: the damage.
        refused_by: `publish` or the `rollout`; `none` if it went live.
        reason: what was told.
    """

    group: str
    what: str
    refused_by: Refusal
    reason: str


class GroupResult(BaseModel):
    """All broken snapshots of one kind.

    Attributes:
        tried: how many.
        refused_by_publish, refused_by_rollout, accepted: what became of them.
        examples: the first damages with the reasons that were told.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tried: int
    refused_by_publish: int
    refused_by_rollout: int
    accepted: int
    examples: tuple[str, ...]


class BrokenReport(BaseModel):
    """What `drill broken --json` writes.

    Attributes:
        tried, refused, accepted: broken snapshots.
        answers, failed, mixed, wrong: requests during all that.
        other_versions: right answers that named another version than the one that was live throughout.
        p99_ms: of all answers, from when a request was due.
        disk_full_means: how a full disk was made.
        control_went_live: whether the sound snapshot at the end was published and rolled out.
        groups: by kind of damage.
        registry, shards, replicas, cards, workers, rate: what ran.
        details: the first answers that were not right.
        problems: why the drill did not pass; empty if it did.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tried: int
    refused: int
    accepted: int
    answers: int
    failed: int
    mixed: int
    wrong: int
    other_versions: int
    p99_ms: float | None
    disk_full_means: str
    control_went_live: bool
    groups: dict[str, GroupResult]
    registry: str
    shards: int
    replicas: int
    cards: int
    workers: int
    rate: float
    details: tuple[str, ...]
    problems: tuple[str, ...]


def make_broken_report(
    attempts: Sequence[Attempt], answers: Answers, control_begun: float, version: int, facts: dict[str, Any]
) -> BrokenReport:
    """Draws up the report.

    Args:
        attempts: all broken snapshots.
        answers: all of the drill.
        control_begun: when the sound snapshot at the end was begun, in seconds of CLOCK_MONOTONIC.
        version: the one that was live until then.
        facts: the remaining fields of the report, as they are.
    """
    kinds = np.bincount(answers["kind"], minlength=len(Kind))
    before = answers[(answers["ended"] < control_begun) & (answers["kind"] == Kind.OK)]
    accepted = [one for one in attempts if one.refused_by == "none"]
    report = BrokenReport(
        tried=len(attempts),
        refused=len(attempts) - len(accepted),
        accepted=len(accepted),
        answers=len(answers),
        failed=int(kinds[Kind.FAILED]),
        mixed=int(kinds[Kind.MIXED]),
        wrong=int(kinds[Kind.WRONG]),
        other_versions=int((before["version"] != version).sum()),
        p99_ms=percentile(1e3 * (answers["ended"] - answers["intended"]), 99),
        groups={group: _group(attempts, group) for group in dict.fromkeys(one.group for one in attempts)},
        problems=(),
        **facts,
    )
    problems = [f"accepted: {one.group}: {one.what}" for one in accepted]
    problems += [
        f"{count} answers {what}"
        for count, what in (
            (report.failed, "failed"),
            (report.mixed, "are mixed"),
            (report.wrong, "are wrong"),
            (report.other_versions, f"named another version than {version}"),
        )
        if count
    ]
    if not report.control_went_live:
        problems.append("the sound snapshot at the end did not go live, so refusals prove nothing")
    return report.model_copy(update={"problems": tuple(problems)})


def _group(attempts: Sequence[Attempt], group: str) -> GroupResult:
    own = [one for one in attempts if one.group == group]
    by = [one.refused_by for one in own]
    return GroupResult(
        tried=len(own),
        refused_by_publish=by.count("publish"),
        refused_by_rollout=by.count("rollout"),
        accepted=by.count("none"),
        examples=tuple(f"{one.what}: {one.reason}" for one in own[:EXAMPLES]),
    )
