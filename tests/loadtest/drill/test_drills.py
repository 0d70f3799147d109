from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from loadtest.drill.broken import BrokenDrillConfig, run_broken_drill
from loadtest.drill.cli import drill
from loadtest.drill.crash import CrashDrillConfig, run_crash_drill
from loadtest.drill.oracle import OracleShape

# Small enough for a test, large enough that rows are divided over shards and cards.
SMALL = OracleShape(items=6000, users=2000, tags=100)


@pytest.mark.timeout(300)
def test_swaps_under_load_cost_no_answer_and_the_report_says_so(tmp_path: Path):
    options = ["--swaps", "2", "--rate", "60", "--replicas", "1", "--items", "6000", "--pause-s", "1"]
    # How fast a busy machine answers is not what is tested here.
    options += ["--max-ratio-p99", "1000", "--json", str(tmp_path / "swap.json"), "--keep", str(tmp_path / "kept")]
    result = CliRunner().invoke(drill, ["swap", *options])
    assert result.exit_code == 0, (result.output, result.exception)
    report = json.loads((tmp_path / "swap.json").read_text())
    assert report["swaps"] == 2
    assert report["answers"] > 150
    assert [report[key] for key in ("failed", "mixed", "wrong", "stale")] == [0, 0, 0, 0]
    assert all(api["answers"] > 0 for api in report["by_api"].values())
    assert min(report["answers_steady"], report["answers_during_swap"]) > 0
    assert report["rss_mb_before"] > 100
    assert "passed" in result.output


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_fleet_whose_redis_and_a_shard_node_are_killed_at_the_flip_ends_in_one_version(tmp_path: Path):
    config = CrashDrillConfig(
        shape=SMALL,
        shards=1,
        registry="redis",
        workers=1,
        rate=40,
        courses=("beside",),
        only_steps=("flip",),
        victims=("shard-node", "redis"),
    )
    report = asyncio.run(run_crash_drill(config, tmp_path))
    assert report.cases == 2
    assert report.ended_old + report.ended_new == 2
    assert (report.mixed, report.wrong, report.stale) == (0, 0, 0)
    assert [one.process for one in report.results] == ["shard-0-0", ""]


@pytest.mark.timeout(300)
def test_broken_snapshots_are_refused_and_the_old_version_serves_on(tmp_path: Path):
    config = BrokenDrillConfig(
        shape=SMALL, shards=1, replicas=1, workers=1, truncations=5, bit_flips=20, damaged_in_store=1
    )
    report = asyncio.run(run_broken_drill(config, tmp_path))
    assert report.problems == ()
    assert report.tried == report.refused == 5 + 20 + 2 + 12 + 1 + 2
    assert report.groups["wrong golden scores"].refused_by_rollout == 1
    assert report.groups["bit flipped in the store"].refused_by_rollout == 1
    assert report.groups["bit flipped before publishing"].refused_by_publish == 20
    unchecked = [group for name, group in report.groups.items() if name.endswith("on record unchecked")]
    assert [group.refused_by_rollout for group in unchecked] == [1] * 6
    assert report.control_went_live


def test_options_that_make_no_sense_are_refused_by_name(tmp_path: Path):
    def told(*arguments: str) -> str:
        result = CliRunner().invoke(drill, list(arguments))
        assert result.exit_code != 0
        return result.output + str(result.exception)

    assert "rate" in told("swap", "--rate", "1000000")
    assert "nosuchfolder" in told("swap", "--json", str(tmp_path / "nosuchfolder" / "x.json"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "is not empty" in told("broken", "--keep", str(tmp_path / "full"))
    assert "Redis can only be killed with --registry redis" in told("crash", "--victim", "redis")
