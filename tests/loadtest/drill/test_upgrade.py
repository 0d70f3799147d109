from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from loadtest.drill.cli import drill
from loadtest.drill.load import failed
from loadtest.drill.oracle import OK, Kind, OracleShape, make_questions
from loadtest.drill.upgrade import (
    SINGLE,
    ClosedLoopLoad,
    Order,
    UpgradeDrillConfig,
    UpgradeStep,
    make_report,
    plan,
    run_upgrade_drill,
)
from loadtest.errors import LoadConfigError
from loadtest.servers import THIS_CHECKOUT
from shard_node.answer import travel_as_stored
from shard_node.bags import TableLayout

CONFIG = UpgradeDrillConfig(old=THIS_CHECKOUT)


def step(**changed: Any) -> UpgradeStep:
    facts: dict[str, Any] = {
        "transport": "tcp",
        "order": "nodes-first",
        "step": "upgrade serve-1",
        "nodes": "4 new",
        "serving": "2 new",
        "answers": 7,
        "stored_bytes": 10,
        "float16_bytes": 20,
        "float32_bytes": 30,
    }
    return UpgradeStep(**facts | changed)


def test_every_process_is_upgraded_once_and_a_node_of_each_shard_dies_at_the_end():
    nodes, servers = ["node-0-0", "node-0-1", "node-1-0", "node-1-1"], ["serve-0", "serve-1"]
    orders: dict[Order, list[str]] = {"nodes-first": nodes + servers, "serving-first": servers + nodes}
    for order, expected in orders.items():
        steps = plan(order)
        assert steps[0] == ("begin", "")
        assert [name for what, name in steps if what == "upgrade"] == expected
        deaths = [("kill -9", "node-0-0"), ("start", "node-0-0"), ("kill -9", "node-1-1"), ("start", "node-1-1")]
        assert steps[-4:] == deaths


def test_a_report_adds_its_steps_up_and_passes_if_all_answers_are_right():
    report = make_report(CONFIG, [step(nodes="4 old", stored_bytes=0, float16_bytes=0), step()], [])
    assert (report.problems, report.answers, report.failed) == ((), 14, 0)
    assert str(THIS_CHECKOUT) not in report.model_dump_json()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"failed": 1}, "1 answers failed"),
        ({"wrong": 2}, "2 answers wrong"),
        ({"mixed": 3}, "3 answers mixed"),
        ({"answers": 0}, "tcp, nodes-first, upgrade serve-1: nothing was answered"),
        ({"stored_bytes": 0}, "were not used, though all processes are new"),
        ({"float16_bytes": 0}, "were not used, though all processes are new"),
    ],
)
def test_one_answer_that_is_not_right_or_a_form_that_is_not_used_is_a_problem(changed: dict[str, Any], said: str):
    (problem,) = make_report(CONFIG, [step(), step(**changed)], []).problems
    assert said in problem


def test_a_known_problem_stays_one():
    assert make_report(CONFIG, [step()], [], ["node-0-0: ended badly"]).problems == ("node-0-0: ended badly",)


def test_a_server_that_is_taken_out_gets_no_request_and_what_it_was_asked_is_counted():
    asked: list[str] = []
    load = ClosedLoopLoad()

    def answering(name: str, is_right: bool) -> Any:
        async def ask(number: int) -> Any:
            asked.append(name)
            await asyncio.sleep(0)
            return (1, lambda: OK) if is_right else failed("refused")

        return [ask] * 4

    async def run() -> None:
        load.servers = {"a": answering("a", True), "b": answering("b", False)}
        async with load.asking(2):
            for _ in range(500):
                await asyncio.sleep(0)
            del load.servers["b"]
            asked.clear()
            for _ in range(500):
                await asyncio.sleep(0)
            assert set(asked) == {"a"}
            assert len(asked) > 50

    asyncio.run(run())
    assert load.kinds[Kind.OK] > 50
    assert load.kinds[Kind.FAILED] >= 20
    assert load.details[0] == "failed b: refused"
    counts = load.take()
    assert counts["failed"] + 50 < counts["answers"]
    assert load.take() == {"answers": 0, "failed": 0, "mixed": 0, "wrong": 0}


def test_questions_have_rows_that_travel_as_stored_and_others_that_do_not():
    spec = OracleShape().spec()
    layout = TableLayout.of(spec)
    single = make_questions(spec, 50, single=SINGLE)["rank"]
    names = list(single[0].features)
    counts = np.concatenate([one.counts for one in single])
    for place, name in enumerate(names):
        assert (counts[:, place].max() == 1) == (name in SINGLE)
    assert layout.groups
    for table in layout.groups:
        one_each, many = np.array([40]), np.array([200])
        assert travel_as_stored(table, one_each, one_each).all()
        assert not travel_as_stored(table, many, one_each).any()


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path):
    with pytest.raises(LoadConfigError, match="not a checkout"):
        asyncio.run(run_upgrade_drill(UpgradeDrillConfig(old=tmp_path), tmp_path))
    result = CliRunner().invoke(drill, ["upgrade"])
    assert result.exit_code != 0
    assert "--old" in result.output


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_fleet_is_upgraded_and_its_nodes_die_under_load_without_a_failed_answer(tmp_path: Path):
    options = [
        "--transport",
        "unix",
        "--order",
        "nodes-first",
        "--settle-s",
        "0.5",
        "--in-flight",
        "1",
        "--items",
        "6000",
    ]
    files = ["--json", str(tmp_path / "upgrade.json"), "--keep", str(tmp_path / "kept")]
    result = CliRunner().invoke(drill, ["upgrade", "--old", str(THIS_CHECKOUT), *options, *files])
    assert result.exit_code == 0, (result.output, result.exception)
    report = json.loads((tmp_path / "upgrade.json").read_text())
    assert [report[key] for key in ("failed", "mixed", "wrong", "problems")] == [0, 0, 0, []]
    steps = report["steps"]
    assert [one["step"] for one in steps] == [f"{what} {name}".strip() for what, name in plan("nodes-first")]
    assert all(one["answers"] > 0 for one in steps)
    assert (steps[1]["nodes"], steps[1]["serving"]) == ("3 old, 1 new", "2 old")
    assert (steps[-2]["nodes"], steps[-1]["nodes"]) == ("3 new", "4 new")
    assert min(steps[-1]["stored_bytes"], steps[-1]["float16_bytes"]) > 0
    # Each process' log is kept, of both of its lives.
    assert (tmp_path / "kept" / "0" / "serve-1.log").stat().st_size > 0
