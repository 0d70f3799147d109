"""Real servers: a whole comparison, and the scores of every API."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from loadtest.compare import ArmMeasure, CompareConfig, ServedArm, compared_snapshot, served_dtype
from loadtest.errors import LoadError
from loadtest.load.config import OfferedLoad
from loadtest.load.generator import Generators, open_payloads
from loadtest.page import read_reported
from loadtest.rounds import Comparison
from loadtest.workloads.payloads import APIS
from serving.embedded import Ranker

TINY = ("--workload", "merlin-tiny:0.0001", "--candidates", "3", "--requests", "20", "--device", "cpu")
SHORT = ("--rounds", "1", "--rate", "20", "--cold", "0.5", "--warmup", "0", "--duration", "0.5", "--in-flight", "4")
ARMS = ("--cards", "1", "--shards", "2", "--transport", "unix,tcp", "--shares", "50")
NAMES = ["1 card", "2 shards, Unix socket", "2 shards, TCP"]
ONE = ServedArm(cards=1)


@pytest.mark.timeout(300)
def test_every_arm_is_measured_and_a_page_is_written(tmp_path: Path):
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
    turns = [line for line in done.stderr.splitlines() if line.startswith(("rehearsal", "round"))]
    assert turns == [f"{turn}: {name}" for turn in ("rehearsal", "round 1 of 1") for name in NAMES]
    assert [(arm.name, len(arm.runs), len(arm.cold_runs)) for arm in found.arms] == [(name, 1, 1) for name in NAMES]
    assert found.setup["dense model in"] == "float32"
    assert found.setup["same scores"].startswith("of 8 requests, to ")
    for run in (run for arm in found.arms for run in arm.runs):
        # Constant arrivals: as many requests for each arm, and every one answered right.
        assert (run.due, run.answered, run.errors) == (10, 10, {})
    names = [measure.name for measure in found.measures]
    assert names[:3] == ["p50, warm", "p99, warm", "p99.9, warm"]
    assert names[4:7] == ["p50, cold", "p99, cold", "p99.9, cold"]
    assert names[8:14] == [
        "p50, 1 in flight", "p99, 1 in flight", "p50 at 50% of capacity", "p99 at 50% of capacity",
        "throughput, 4 in flight", "CPU of a request, 4 in flight",
    ]  # fmt: skip
    in_nodes = next(measure for measure in found.measures if measure.name == "CPU of a request, nodes")
    assert [value > 0 for value in in_nodes.middle] == [False, True, True]
    page = html_file.read_text()
    assert all(name in done.stdout and name in page for name in names)


def test_a_server_has_the_models_scores_over_every_api(tmp_path: Path):
    loads = {
        api: OfferedLoad(
            target=f"{'grpc' if 'grpc' in api else 'http'}://127.0.0.1:1",
            api=api,
            workload="merlin-tiny:0.0001",
            candidates="3",
            requests=2,
        )
        for api in APIS
    }
    config = CompareConfig(device="cpu", dtype="float32")
    snapshot = compared_snapshot(config, loads["json"], tmp_path / "store")
    model, (_, payloads) = snapshot.parent.name, open_payloads(loads["json"])
    with Ranker.open(snapshot, dtype="float32") as ranker:
        expected = ranker.rank(json.loads(payloads[1].body))["scores"]
    with Generators() as generators:
        measure = ArmMeasure(config, loads["json"], generators, snapshot, tmp_path, Console(quiet=True))
        with measure.serving(ONE) as server:
            assert served_dtype(ONE, server.http_port, model) == "float32"
            with pytest.raises(LoadError, match=r"1 card does not describe its model at .* 'none' is not"):
                served_dtype(ONE, server.http_port, "none")
            for api, load in loads.items():
                found = generators.scores(load.model_copy(update={"target": server.target(api)}), 1)
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6, err_msg=api)
            nowhere = loads["oip-grpc"].model_copy(update={"target": f"grpc://127.0.0.1:{server.http_port}"})
            with pytest.raises(LoadError, match="oip-grpc: no scores of request 1: "):
                generators.scores(nowhere, 1)
