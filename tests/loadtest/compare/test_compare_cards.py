"""A whole comparison: real servers, one after the other, and a real load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.report.results import read_reported
from loadtest.rounds import Comparison

TINY = ("--workload", "merlin-tiny:0.0001", "--candidates", "3", "--requests", "20", "--device", "cpu")
SHORT = ("--rounds", "1", "--rate", "20", "--cold", "0.5", "--warmup", "0", "--duration", "0.5", "--in-flight", "4")
ARMS = ("--cards", "1", "--shards", "2", "--transport", "unix,tcp", "--shares", "50")
NAMES = ["1 card", "2 shards, Unix socket", "2 shards, TCP"]


@pytest.mark.timeout(300)
def test_the_command_measures_every_arm_in_every_round_and_writes_the_comparison_and_a_page(tmp_path: Path):
    json_file, html_file = tmp_path / "cards.json", tmp_path / "cards.html"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "serving.cli", "loadtest", "compare-cards", *ARMS, *TINY, *SHORT),
            *("--arrivals", "constant", "--timeout-ms", "10000", "--dtype", "float32"),
            *("--json", str(json_file), "--html", str(html_file)),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    found = read_reported(json_file)
    assert isinstance(found, Comparison), done.stderr
    # 1 if this machine was so busy that the generator itself was late, which the comparison says.
    assert done.returncode == (0 if found.valid else 1), done.stderr
    assert found.valid == (not found.invalid_because)
    told = [line for line in done.stderr.splitlines() if line.startswith(("rehearsal", "round"))]
    assert told == [f"{turn}: {name}" for turn in ("rehearsal", "round 1 of 1") for name in NAMES]
    assert [(arm.name, len(arm.runs), len(arm.cold_runs)) for arm in found.arms] == [(name, 1, 1) for name in NAMES]
    assert found.setup["dense model in"] == "float32"
    assert found.setup["same scores"].startswith("of 8 requests, to ")
    for run in (run for arm in found.arms for run in arm.runs):
        # Constant arrivals: as many requests for each arm, and every one answered right.
        assert (run.due, run.answered, run.errors) == (10, 10, {})
    names = [one.name for one in found.measures]
    assert names[:3] == ["p50, warm", "p99, warm", "p99.9, warm"]
    assert names[4:7] == ["p50, cold", "p99, cold", "p99.9, cold"]
    assert names[8:14] == [
        "p50, 1 in flight",
        "p99, 1 in flight",
        "p50 at 50% of capacity",
        "p99 at 50% of capacity",
        "throughput, 4 in flight",
        "CPU of a request, 4 in flight",
    ]
    in_nodes = next(one for one in found.measures if one.name == "CPU of a request, nodes")
    assert [value > 0 for value in in_nodes.middle] == [False, True, True]
    assert all(name in done.stdout for name in names)
    page = html_file.read_text()
    assert page.startswith("<!doctype html>")
    assert all(name in page for name in names)
