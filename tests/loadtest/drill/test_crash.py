from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from loader.registry.fleet import Canary, NodeRecord, VersionReport, WantedModel
from loader.rollout.plan import Rollout, plan_steps
from loadtest.drill.crash import (
    COURSES,
    PROCESSES,
    REDIS,
    CrashCase,
    CrashDrillConfig,
    CrashReport,
    CrashResult,
    crash_cases,
    ended_in,
    make_crash_report,
)
from loadtest.drill.fleet import unsettled
from loadtest.drill.load import RECORD, TimeSpan
from loadtest.drill.oracle import Kind

NODES = ("shard-0-0", "shard-1-0")
WORKERS = ("serve-0", "serve-1")
FACTS: dict[str, Any] = {
    "registry": "directory",
    "shards": 2,
    "replicas": 2,
    "cards": 2,
    "workers": 2,
    "rate": 10.0,
    "step_delay_s": 0.25,
    "details": (),
}


def test_every_step_of_every_rollout_is_interrupted_by_the_death_of_every_kind_of_process():
    cases = crash_cases(COURSES, PROCESSES, NODES, WORKERS)
    for steps, course in (
        (plan_steps("beside", canary=True, bake=True), "beside"),
        (plan_steps("by-replica", canary=False, bake=False, early_groups=1, groups=2), "by-replica"),
        (("unflip", "retire_serving", "retire_shards"), "undo"),
        (("",), "idle"),
    ):
        own = [case for case in cases if case.course == course]
        assert {case.step for case in own} == set(steps)
        assert len(own) == len(steps) * len(PROCESSES)
        assert {case.strategy for case in own} == {"by-replica" if course == "by-replica" else "beside"}
    killed = [case.process for case in cases]
    assert set(killed) == {"coordinator", *NODES, *WORKERS}


def test_redis_is_killed_only_where_it_is_the_registry():
    config = CrashDrillConfig(registry="redis", courses=("beside",), only_steps=("flip",))
    victims = [case.victim for case in config.cases(NODES, WORKERS)]
    assert victims == [*PROCESSES, *REDIS]
    with pytest.raises(ValidationError, match="only be killed with --registry redis"):
        CrashDrillConfig(victims=("redis",))


def course(case: CrashCase, **change: Any) -> CrashResult:
    settled: dict[str, Any] = {
        "after_s": 0.1,
        "ended_in": "new",
        "rollout": "done",
        "restart_s": 0.5,
        "settled_s": 3.5,
        "lag": "",
        "watched": TimeSpan(10.0, 15.0),
        "live_version": 2,
    }
    return CrashResult(**case._asdict(), **{**settled, **change})


SHARD_NODE = CrashCase("beside", "flip", "shard-node", "shard-0-0")


def report_of(*courses: CrashResult, failed: int = 0, mixed: int = 0, version: int = 2) -> CrashReport:
    answers = np.zeros(4000, RECORD)
    answers["intended"] = np.linspace(9.0, 16.0, 4000)
    answers["ended"] = answers["intended"] + 0.001
    answers["version"] = version
    answers["kind"][1000 : 1000 + failed] = Kind.FAILED
    answers["kind"][2000 : 2000 + mixed] = Kind.MIXED
    return make_crash_report(courses, answers, FACTS)


def test_a_case_that_ends_in_the_new_version_in_time_is_no_problem():
    report = report_of(course(SHARD_NODE), course(SHARD_NODE, ended_in="old", live_version=1), version=2)
    # The second one's answers are of version 2, though the fleet had settled in 1.
    assert [one.ended_in for one in report.results] == ["new", "old"]
    assert report.results[0].stale == 0
    assert report.results[1].stale > 0
    assert (report.ended_old, report.ended_new, report.ended_neither) == (1, 1, 0)
    assert report.settled_s_max == pytest.approx(3.5)
    assert report.settled_within_10_s == 2
    assert len(report.problems) == 1
    assert "settled in" in report.problems[0]


def test_a_fleet_that_is_late_or_in_neither_version_is_a_problem():
    late = report_of(course(SHARD_NODE, settled_s=10.1))
    assert late.problems == ("beside, step flip, shard-0-0 killed: settled 10.1 s after the restart, allowed are 10",)
    never = report_of(course(SHARD_NODE, ended_in="neither", settled_s=None, lag="serve-0: has nothing"))
    assert never.ended_neither == 1
    assert never.problems == (
        "beside, step flip, shard-0-0 killed: ended neither in the old nor in the new version: serve-0: has nothing",
    )


def test_a_fleet_has_ended_in_the_version_that_is_live_if_that_is_one_of_the_rollout():
    assert [ended_in(live, before=1, to_version=2) for live in (1, 2, 7, 0)] == ["old", "new", "neither", "neither"]
    assert ended_in(1, before=1, to_version=1) == "old"


def test_what_only_the_judge_needs_is_not_in_the_report():
    assert {"watched", "live_version"}.isdisjoint(report_of(course(SHARD_NODE)).model_dump()["results"][0])


def test_mixed_answers_and_answers_lost_to_a_shard_node_are_problems():
    assert report_of(course(SHARD_NODE), mixed=3).problems == ("3 answers are mixed",)
    few = report_of(course(SHARD_NODE), failed=2)
    assert few.answers_lost_share_shard_node == pytest.approx(2 / few.results[0].answers)
    assert few.problems == ()
    many = report_of(course(SHARD_NODE), failed=20)
    assert many.problems == ("0.700% of answers were lost to killed shard nodes, allowed are 0.1%",)
    by_replica = report_of(course(CrashCase("by-replica", "flip", "shard-node", "shard-0-0")), failed=20)
    assert by_replica.answers_lost_share_shard_node is None
    assert by_replica.answers_lost_share_shard_node_by_replica == pytest.approx(many.answers_lost_share_shard_node)
    serving = report_of(course(CrashCase("beside", "flip", "serving", "serve-0")), failed=20)
    assert serving.problems == ()
    redis = report_of(course(CrashCase("beside", "flip", "redis", "")), failed=1)
    assert redis.problems == ("0.035% of answers were lost to a killed Redis, allowed are none",)


# What "exactly in one version" means.

PIDS = {"shard-0-0": 10, "serve-0": 20}


def node(name: str, *versions: tuple[int, str], pid: int | None = None, live: int | None = 2) -> NodeRecord:
    serving = name.startswith("serve")
    return NodeRecord(
        node_id=name,
        kind="serving" if serving else "shard",
        process_id=PIDS[name] if pid is None else pid,
        address="unix:/x",
        live={"oracle": live} if serving and live is not None else {},
        versions=tuple(
            VersionReport.model_validate({"model": "oracle", "version": version, "state": state})
            for version, state in versions
        ),
    )


WANTED = WantedModel(model="oracle", epoch=9, live=2, hold=(2,), serve=(2,), follow=(2,))
SETTLED = (node("shard-0-0", (2, "ready")), node("serve-0", (2, "ready")))


def lag(wanted: WantedModel | None = WANTED, *nodes: NodeRecord, rollout: Rollout | None = None) -> str:
    return unsettled("oracle", wanted, rollout, nodes or SETTLED, PIDS)


def test_a_fleet_of_which_every_node_has_the_live_version_alone_is_settled():
    assert lag() == ""


def test_a_fleet_that_wants_or_has_anything_else_is_not():
    assert lag(None) == "no version is wanted"
    assert "more than version 2 is wanted" in lag(WANTED.model_copy(update={"hold": (1, 2)}))
    assert "more than version 2 is wanted" in lag(WANTED.model_copy(update={"serve": (1, 2)}))
    assert "more than version 2 is wanted" in lag(WANTED.model_copy(update={"node_hold": {"shard-0-0": (1,)}}))
    assert "more than version 2 is wanted" in lag(WANTED.model_copy(update={"canary": Canary(version=3, share=0.5)}))
    rolling = Rollout(
        model="oracle",
        epoch=1,
        rollout_id="0" * 32,
        from_version=1,
        to_version=2,
        delta_base=2,
        last_delta=0,
        steps=("stage_shards", "flip", "retire_shards"),
        started_at=0,
        step_began_at=0,
    )
    assert lag(WANTED, rollout=rolling) == "the rollout is running in step stage_shards"
    assert lag(WANTED, rollout=rolling.model_copy(update={"state": "done"})) == ""


def test_a_node_that_is_gone_lags_and_so_does_one_that_has_another_version():
    shard, serving = SETTLED
    assert lag(WANTED, shard) == "serve-0: its process 20 has not announced itself"
    # What a killed process announced last is still there for some seconds.
    assert lag(WANTED, shard, node("serve-0", (2, "ready"), pid=19)) == lag(WANTED, shard)
    assert "answers with version 1" in lag(WANTED, shard, node("serve-0", (2, "ready"), live=1))
    assert "answers with version None" in lag(WANTED, shard, node("serve-0", (2, "ready"), live=None))
    for versions in ((), ((1, "ready"),), ((1, "draining"), (2, "ready")), ((2, "staging"),)):
        assert "not just version 2 ready" in lag(WANTED, node("shard-0-0", *versions), serving)
