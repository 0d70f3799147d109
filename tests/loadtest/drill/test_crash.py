"""Which processes `drill crash` kills when, when a fleet is in one version, and what is a problem."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loader.registry.fleet import Canary, NodeRecord, VersionReport, WantedModel
from loader.rollout.plan import Rollout
from loadtest.drill.config import PROCESSES, REDIS_VICTIMS, CrashDrillConfig
from loadtest.drill.crash import STEPS, CrashCase, crash_cases, crash_figures
from loadtest.drill.fleet import ANSWER, KINDS, unsettled

NAMES = ("coordinator", "shard-0-0", "shard-1-0", "serve-0", "serve-1")


def test_every_process_dies_in_every_step_of_every_rollout():
    cases = crash_cases(CrashDrillConfig(), NAMES)
    assert {name: len(steps) for name, steps in STEPS.items()} == {"idle": 1, "beside": 7, "undo": 3, "by-replica": 7}
    expected = [(course, step, victim) for course, steps in STEPS.items() for step in steps for victim in PROCESSES]
    assert [case[:3] for case in cases] == expected
    assert {case.process for case in cases} == set(NAMES)


def test_redis_is_killed_where_it_is_the_registry():
    config = CrashDrillConfig(registry="redis", courses=("beside",), steps=("flip",))
    assert [case.victim for case in crash_cases(config, NAMES)] == [*PROCESSES, *REDIS_VICTIMS]


FLIP = CrashCase("beside", "flip", "shard-node", "shard-0-0")
ROLLED = FLIP._replace(course="by-replica")


def result(case: CrashCase = FLIP, **changed: Any) -> dict[str, Any]:
    figures = {"ended_in": "new", "rollout": "done", "restart_s": 0.5, "settled_s": 3.5, "after_s": 0.1, "lag": ""}
    times = {"killed_at": 10.0, "watched_until": 15.0}
    return {**case._asdict(), **figures, **times, "live_version": 2, **changed}


def figures_of(*results: dict[str, Any], failed: int = 0, mixed: int = 0) -> tuple[dict[str, Any], list[str]]:
    """The figures, and what misses its limit."""
    answers = np.zeros(4000, ANSWER)
    answers["due"] = np.linspace(9.0, 16.0, 4000)
    answers["ended"] = answers["due"] + 0.001
    answers["version"] = 2
    answers["code"][1000 : 1000 + failed] = KINDS.index("failed")
    answers["code"][2000 : 2000 + mixed] = KINDS.index("mixed")
    figures, limits = crash_figures(CrashDrillConfig(), results, answers)
    return figures, [limit.name for limit in limits if not limit.ok]


def test_answers_of_another_version_than_the_settled_are_stale():
    figures, missed = figures_of(result(), result(ended_in="old", live_version=1))
    assert [case["ended_in"] for case in figures["results"]] == ["new", "old"]
    assert figures["results"][0]["stale"] == 0 < figures["results"][1]["stale"] == figures["stale"]
    assert [figures[f"ended_{which}"] for which in ("old", "new", "neither")] == [1, 1, 0]
    assert figures["settled_s_max"] == 3.5
    assert missed == ["stale"]


@pytest.mark.parametrize(
    ("case", "answers", "problems"),
    [
        (result(), {}, []),
        (result(), {"mixed": 3}, ["mixed"]),
        # Of about 2800 answers.
        (result(), {"failed": 2}, []),
        (result(), {"failed": 20}, ["answers_lost_share_shard_node"]),
        (result(ROLLED), {"failed": 20}, []),
        (result(ROLLED), {"failed": 40}, ["answers_lost_share_shard_node_by_replica"]),
        (result(CrashCase("beside", "flip", "serving", "serve-0")), {"failed": 20}, []),
        (result(CrashCase("beside", "flip", "redis", "")), {"failed": 1}, ["answers_lost_share_redis"]),
        (result(settled_s=10.1), {}, ["beside, step flip, shard-0-0 killed: settled_s"]),
        (
            result(settled_s=None, ended_in="neither", lag="serve-0: has nothing"),
            {},
            [f"{FLIP}: settled_s (serve-0: has nothing)", "ended_neither"],
        ),
    ],
)
def test_each_limit_is_kept_by_itself(case: dict[str, Any], answers: dict[str, int], problems: list[str]):
    assert figures_of(case, **answers)[1] == problems


PIDS = {"shard-0-0": 10, "serve-0": 20}


def node(name: str, *versions: tuple[int, str], process_id: int = 0, live: int | None = 2) -> NodeRecord:
    reports = [{"model": "oracle", "version": version, "state": state} for version, state in versions]
    return NodeRecord(
        node_id=name,
        kind="serving" if name == "serve-0" else "shard",
        process_id=process_id or PIDS[name],
        address="unix:/x",
        live={"oracle": live} if name == "serve-0" and live is not None else {},
        versions=tuple(map(VersionReport.model_validate, reports)),
    )


WANTED = WantedModel(model="oracle", epoch=9, live=2, hold=(2,), serve=(2,), follow=(2,))
SHARD, SERVING = node("shard-0-0", (2, "ready")), node("serve-0", (2, "ready"))
VERSIONS = {"from_version": 1, "to_version": 2, "delta_base": 2, "last_delta": 0}
STARTED = {"steps": ("stage_shards", "flip", "retire_shards"), "started_at": 0, "step_began_at": 0}
ROLLOUT = Rollout.model_validate({"model": "oracle", "epoch": 1, "rollout_id": "0" * 32, **VERSIONS, **STARTED})


@pytest.mark.parametrize(
    ("wanted", "rollout", "nodes", "reason"),
    [
        ({}, None, (SHARD, SERVING), ""),
        ({}, ROLLOUT.model_copy(update={"state": "done"}), (SHARD, SERVING), ""),
        ({}, ROLLOUT, (SHARD, SERVING), "the rollout is running in step stage_shards"),
        ({"live": None}, None, (SHARD, SERVING), "no version is wanted"),
        ({"hold": (1, 2)}, None, (SHARD, SERVING), "more than version 2 is wanted"),
        ({"serve": (1, 2)}, None, (SHARD, SERVING), "more than version 2 is wanted"),
        ({"node_hold": {"shard-0-0": (1,)}}, None, (SHARD, SERVING), "more than version 2 is wanted"),
        ({"canary": Canary(version=3, share=0.5)}, None, (SHARD, SERVING), "more than version 2 is wanted"),
        ({}, None, (SHARD,), "serve-0: its process 20 has not announced itself"),
        # What a killed process announced last is still there for some seconds.
        ({}, None, (SHARD, node("serve-0", (2, "ready"), process_id=19)), "serve-0: its process 20 has not"),
        ({}, None, (SHARD, node("serve-0", (2, "ready"), live=1)), "answers with version 1"),
        ({}, None, (SHARD, node("serve-0", (2, "ready"), live=None)), "answers with version None"),
        ({}, None, (node("shard-0-0"), SERVING), "not just version 2 ready"),
        ({}, None, (node("shard-0-0", (1, "draining"), (2, "ready")), SERVING), "not just version 2 ready"),
        ({}, None, (node("shard-0-0", (2, "staging")), SERVING), "not just version 2 ready"),
    ],
)
def test_when_a_fleet_is_in_one_version(
    wanted: dict[str, Any], rollout: Rollout | None, nodes: tuple[NodeRecord, ...], reason: str
):
    lag = unsettled("oracle", WANTED.model_copy(update=wanted), rollout, nodes, PIDS)
    assert (reason in lag) if reason else not lag
