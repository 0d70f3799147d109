"""The demo as its users run it, on little data."""

from __future__ import annotations

import json
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from google.protobuf import json_format

from serving.proto.shardrank.v1 import ranking_pb2, ranking_pb2_grpc
from shardrank_testing.command_line import ANY_PORTS, shardrank
from shardrank_testing.movielens import small_interactions, write_movielens
from shardrank_testing.processes import descendants, is_alive, running

FIELDS = {
    "auc_fp32", "auc_served", "auc_item_mean", "max_score_diff", "requests", "errors", "http_p50_ms", "http_p99_ms",
    "grpc_p50_ms", "grpc_p99_ms", "snapshot_bytes", "float32_bytes", "shards", "cards", "version",
}  # fmt: skip


@pytest.fixture(scope="module")
def movielens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_movielens(tmp_path_factory.mktemp("ml") / "small", small_interactions(num_ratings=2500))


def check_report(report: dict[str, Any]) -> None:
    assert report.keys() >= FIELDS
    assert report["errors"] == 0
    assert report["scores_identical"] is True
    assert report["auc_served"] == pytest.approx(report["auc_fp32"], abs=0.005)
    assert 0 < report["max_score_diff"] < 0.02
    assert report["http_p50_ms"] <= report["http_p99_ms"]
    assert report["snapshot_bytes"] > 0
    assert report["float32_bytes"] > 0


def test_the_demo_reports_from_a_fleet_and_serves_on_until_ctrl_c(movielens: Path, tmp_path: Path) -> None:
    report_file, store = tmp_path / "report.json", tmp_path / "store"
    arguments = ("--movielens", str(movielens), "--epochs", "2", "--store", str(store), "--json", str(report_file))
    with running("demo", *arguments, *ANY_PORTS) as program:
        curl = shlex.split(program.read_until("^curl .*")[0])
        grpcurl = shlex.split(program.read_until("^grpcurl .*")[0])
        report = json.loads(report_file.read_text())
        check_report(report)
        assert (report["source"], report["ratings"], report["test_ratings"]) == ("movielens-100k", 2500, 500)
        assert (report["shards"], report["cards"], report["version"], report["local"]) == (2, 2, 1, False)
        assert "Films for user" in program.output
        assert re.search("^2 shards, plan [0-9a-f]{12}$", program.output, re.MULTILINE)
        assert len(descendants(program.process.pid)) == 5

        # What the printed lines do, done without curl and grpcurl.
        over_http = httpx.post(next(one for one in curl if one.startswith("http")), content=curl[curl.index("-d") + 1])
        assert over_http.status_code == 200
        message = json_format.Parse(grpcurl[grpcurl.index("-d") + 1], ranking_pb2.RankRequest())
        with grpc.insecure_channel(grpcurl[-2]) as channel:
            over_grpc = ranking_pb2_grpc.RankingServiceStub(channel).Rank(message, timeout=10)
        assert list(over_grpc.scores) == np.float32(over_http.json()["scores"]).tolist()

        below = descendants(program.process.pid)
        assert program.stop(signal.SIGINT) == 0
        assert not any(map(is_alive, below))
    assert (store / "films" / "1" / "manifest.json").is_file()


def test_the_local_demo_needs_no_other_process_and_no_data(tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    arguments = ("--local", "--once", "--ratings", "2500", "--epochs", "1", "--json", str(report_file), *ANY_PORTS)
    result = shardrank("demo", *arguments)
    report = json.loads(report_file.read_text())
    check_report(report)
    assert (report["source"], report["local"], report["shards"]) == ("synthetic", True, 1)
    assert "curl" not in result.stdout
