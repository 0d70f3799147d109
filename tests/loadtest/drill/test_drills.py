"""One small run of each drill by its command; the exit code, and figures that only a real run has."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from loadtest.drill import drill
from loadtest.servers import THIS_CHECKOUT

# Large enough that rows are divided over shards and cards.
SMALL = "--items 6000 "
ONE_NODE = "--shards 1 --replicas 1 --cards 1 "
NOT_RIGHT = ("failed", "mixed", "wrong")
FORGERIES = {
    "NaN as the scale of an int8 row": r"'items', row \d+: decodes to NaN or inf",
    "NaN in a float32 row": r"'users', row \d+: decodes to NaN or inf",
    "NaN in a float16 row": r"'tags', row \d+: decodes to NaN or inf",
    "NaN as a weight of the dense model": "dense.safetensors: tensor 'mlp.layers.0.bias' holds NaN or inf",
    "files of a table are missing": "/tables/users/rows.*: missing",
}

pytestmark = pytest.mark.timeout(300)


def run(folder: Path, arguments: str, *, exit_codes: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """The report of a drill."""
    file = folder / "report.json"
    result = CliRunner().invoke(drill, [*arguments.split(), "--json", str(file)])
    assert result.exit_code in exit_codes, (result.output, result.exception)
    report: dict[str, Any] = json.loads(file.read_text())
    assert (result.exit_code == 1) == bool(report["problems"])
    return report


@pytest.mark.parametrize(
    "rows",
    ["", "--keyed --upserts-per-s 500 --max-ratio-p99-upserts 1000 "],
)
@pytest.mark.nightly
def test_swap(tmp_path: Path, rows: str):
    # How fast a busy machine answers is not what is tested here.
    report = run(tmp_path, f"swap {SMALL}{rows}--swaps 2 --rate 10 --replicas 1 --pause-s 3 --max-ratio-p99 1000")
    assert report["swaps"] == 2
    assert ("answers_during_upserts" in report) == bool(rows)
    assert report.get("answers_during_upserts", 1) > 0
    assert 0 < report.get("deltas_applied_per_s", 10) <= 40
    assert report["answers"] > 24
    assert [report[key] for key in (*NOT_RIGHT, "stale")] == [0, 0, 0, 0]
    assert min(report["answers_steady"], report["answers_during_swap"]) > 0
    assert report["rss_mb_before"] > 100


@pytest.mark.nightly
def test_broken(tmp_path: Path):
    counts = "--truncations 5 --bit-flips 20 --damaged-in-store 1"
    report = run(tmp_path, f"broken {ONE_NODE}{counts} --keep {tmp_path / 'kept'}")
    assert report["tried"] == report["refused"] == 5 + 20 + 2 + 12 + 1
    groups = report["groups"]
    assert groups["wrong golden scores"]["refused_by_rollout"] == 1
    assert groups["bit flipped in the store"]["refused_by_rollout"] == 1
    assert groups["bit flipped before publishing"]["refused_by_publish"] == 20
    unchecked = [group for name, group in groups.items() if name.endswith("on record unchecked")]
    assert [group["refused_by_rollout"] for group in unchecked] == [1] * 6
    for group, reason in FORGERIES.items():
        assert re.search(reason, groups[group]["examples"][0]), groups[group]
    assert report["control_went_live"]
    assert (tmp_path / "kept" / "serve-0.log").stat().st_size > 0


@pytest.mark.nightly
@pytest.mark.parametrize("rows", ["", "--keyed "])
def test_restart(tmp_path: Path, rows: str):
    report = run(tmp_path, f"restart {SMALL}{rows}--shards 1 --cards 1 --rate 40")
    assert report["answers"] > 200
    assert [report[key] for key in NOT_RIGHT] == [0, 0, 0]
    restarts = report["restarts"]
    assert [each["process"] for each in restarts] == ["coordinator", "shard-0-0", "shard-0-1", "serve-0", "serve-1"]
    assert all(each["exit_code"] == 0 < each["ready_s"] for each in restarts)
    assert report["updates"] > 0
    assert report["delta_formats"] == [2, 2]
    assert [report[name] for name in ("updates_lost", "old_publisher_refused", "lookups_with_last_delta")] == [0, 0, 32]


@pytest.mark.nightly
def test_grey(tmp_path: Path):
    """How much a busy machine sheds is not what is tested here."""
    faults = "--fault stop-coordinator --fault lose-replies --times 1 --seconds 1"
    report = run(tmp_path, f"grey {SMALL}--rate 20 {faults}", exit_codes=(0, 1))
    assert [report[key] for key in ("mixed", "wrong")] == [0, 0]
    assert [(result["where"], result["lag"]) for result in report["results"]] == [
        ("coordinator", ""),
        ("shard-0-1", ""),
    ]
    assert min(fault["answered_share"] for fault in report["faults"].values()) > 0.5


@pytest.mark.nightly
def test_overload(tmp_path: Path):
    """Some is refused, even if the client begins two seconds late, as it does on a busy machine."""
    arguments = "overload --seconds 2 --factor 6 --normal-s 4 --capacity-s 1 --rows 1000 --deadline-ms 20"
    report = run(tmp_path, arguments, exit_codes=(0, 1))
    assert report["requests"] == report["admitted"] + report["refused"] > 0
    assert report["refused"] > 0
    assert report["checks"]["retry-after"]["value"] == 1.0
    assert report["batch_ms"] > 0
    assert len(set(report["cores"])) == 2


@pytest.mark.nightly
def test_crash(tmp_path: Path):
    victims = "--victim shard-node --victim redis --victim redis-emptied"
    report = run(
        tmp_path,
        f"crash {SMALL}--shards 1 --workers 1 --registry redis --rate 40 --course beside --step flip {victims}",
    )
    assert report["cases"] == report["ended_old"] + report["ended_new"] == 3
    assert (report["mixed"], report["wrong"], report["stale"]) == (0, 0, 0)
    assert [result["process"] for result in report["results"]] == ["shard-0-0", "", ""]


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="small disks are mounted")
def test_grey_with_every_fault(tmp_path: Path):
    report = run(tmp_path, f"grey {SMALL}--rate 20 --times 1", exit_codes=(0, 1))
    assert [report[key] for key in ("mixed", "wrong")] == [0, 0]
    assert [result["lag"] for result in report["results"]] == [""] * 12
    refusals = {result["fault"]: result["refusal"] for result in report["results"] if result["refusal"]}
    assert "No space left on device" in refusals["full-store"]
    assert "MemoryBudgetError" in refusals["memory-version"]
    assert "no memory for the next delta" in refusals["memory-deltas"]


@pytest.mark.nightly
def test_soak(tmp_path: Path):
    """So short a time shows nothing of memory."""
    work = "--rollout-every-s 2 --updates 10 --max-mb-per-min 1000"
    report = run(tmp_path, f"soak {SMALL}{ONE_NODE}--minutes 0.2 --rate 20 {work}", exit_codes=(0, 1))
    assert [report[key] for key in NOT_RIGHT] == [0, 0, 0]
    assert report["restarted"] == []
    assert min(report["rollouts"], report["updates"], report["answers"] - 10) > 0
    assert {trend["process"] for trend in report["trends"]} == {"coordinator", "shard-0-0", "serve-0"}
    assert not [problem for problem in report["problems"] if "request" in problem]


@pytest.mark.nightly
def test_upgrade(tmp_path: Path):
    small = "--shards 1 --cards 1 --rate 40 --registry redis"
    report = run(tmp_path, f"upgrade {SMALL}{small} --old {THIS_CHECKOUT} --keep {tmp_path / 'kept'}")
    assert [report[key] for key in NOT_RIGHT] == [0, 0, 0]
    upgrades = report["upgrades"]
    assert [each["process"] for each in upgrades] == ["shard-0-0", "shard-0-1", "coordinator", "serve-0", "serve-1"]
    assert all(each["exit_code"] == 0 < each["ready_s"] for each in upgrades)
    assert min(report["rollouts"], report["updates"], report["lookups_with_last_delta"]) > 0
    assert report["updates_lost"] == 0
    # Each process' log is kept, of both of its lives.
    assert (tmp_path / "kept" / "serve-1.log").stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("swap --rate 1000000", "rate"),
        ("swap --json nosuchfolder/x.json", "nosuchfolder"),
        ("crash --victim redis", "Redis can only be killed with --registry redis"),
        ("upgrade", "--old"),
        ("upgrade --old .", "not a checkout"),
        ("broken --keep .", "is not empty"),
    ],
)
def test_senseless_options_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(drill, arguments.split())
    assert result.exit_code != 0
    assert message in result.output + str(result.exception)
