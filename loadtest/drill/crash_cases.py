"""What `drill crash` kills, and when: every process at every recorded step of every kind of rollout. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, slots=True)
class CrashCase:
    """One kill.

    Attributes:
        course: `idle`: no rollout; `beside`: with a canary; `undo`: likewise, aborted in it; `by-replica`.
        step: the step on record when the victim is killed; "" without a rollout.
        victim: what is killed. `redis` comes back with what it had on disk, `redis-emptied` with nothing.
        child: the process, by its name in the fleet; "" for Redis.
    """

    course: Course
    step: str
    victim: Victim
    child: str

    @property
    def strategy(self) -> Strategy:
        """Of the rollout."""
        return "by-replica" if self.course == "by-replica" else "beside"

    def __str__(self) -> str:
        at = f" in step {self.step}" if self.step else ""
        return f"{self.course}: {self.child or self.victim}{at}"


def crash_cases(
    courses: Sequence[Course], victims: Sequence[Victim], shard_nodes: Sequence[str], workers: Sequence[str]
) -> list[CrashCase]:
    """All cases; of several processes of a kind, each in turn.

    Args:
        courses: which.
        victims: what is killed.
        shard_nodes: names of the shard nodes.
        workers: names of the serving processes.
    """
    names: dict[Victim, Sequence[str]] = {
        "coordinator": ("coordinator",),
        "shard-node": shard_nodes,
        "serving": workers,
        "redis": ("",),
        "redis-emptied": ("",),
    }
    killed = dict.fromkeys(names, 0)
    cases = []
    for course in courses:
        for step in _STEPS[course]:
            for victim in victims:
                of_kind = names[victim]
                cases.append(CrashCase(course, step, victim, of_kind[killed[victim] % len(of_kind)]))
                killed[victim] += 1
    return cases
