"""The demo as its users run it, on little data."""

from __future__ import annotations

import json
import shlex
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from shardrank_testing.command_line import ANY_PORTS, shardrank
from shardrank_testing.movielens import small_interactions, write_movielens
from shardrank_testing.processes import descendants, is_alive, running, wait_until

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
    assert 0 < report["rows_bytes"] < report["float32_bytes"]


def test_the_demo_reports_from_a_fleet_and_serves_on_until_ctrl_c(movielens: Path, tmp_path: Path) -> None:
    report_file, store = tmp_path / "report.json", tmp_path / "store"
    arguments = ("--movielens", str(movielens), "--epochs", "2", "--store", str(store), "--json", str(report_file))
    with running("demo", *arguments, *ANY_PORTS) as program:
        curl = shlex.split(program.read_until("^curl .*")[0])
        report = json.loads(report_file.read_text())
        check_report(report)
        assert (report["source"], report["ratings"], report["test_ratings"]) == ("movielens-100k", 2500, 500)
        assert (report["shards"], report["cards"], report["version"]) == (2, 2, 1)
        assert "Films for user" in program.output
        assert len(descendants(program.process.pid)) == 5

        # What the printed line does, done without curl.
        over_http = httpx.post(next(one for one in curl if one.startswith("http")), content=curl[curl.index("-d") + 1])
        assert over_http.status_code == 200
        assert len(over_http.json()["scores"]) == 5

        below = descendants(program.process.pid)
        assert program.stop(signal.SIGINT) == 0
        assert not any(map(is_alive, below))
    assert (store / "films" / "1" / "manifest.json").is_file()


@pytest.mark.nightly
def test_the_demo_needs_no_data(tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    arguments = ("--shards", "1", "--once", "--ratings", "2500", "--epochs", "1", "--json", str(report_file))
    result = shardrank("demo", *arguments, *ANY_PORTS)
    report = json.loads(report_file.read_text())
    check_report(report)
    assert (report["source"], report["shards"]) == ("synthetic", 1)
    assert "curl" not in result.stdout


@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_the_demo_is_fed_while_it_serves_and_its_page_shows_what_that_is_worth(tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    arguments = ("--online", "--ratings", "8000", "--ratings-per-s", "1500", "--json", str(report_file))
    with running("demo", *arguments, *ANY_PORTS) as program:
        page = program.read_until(r"live: (http\S+/)")[1]
        seen = dict[str, float]()

        def is_shown() -> bool:
            models = httpx.get(f"{page}status").json()["state"]["models"]
            seen.update({model["model"]: model["quality"]["auc"] for model in models if model["quality"] is not None})
            return len(seen) == 2

        wait_until(is_shown, "both AUCs", timeout_s=60)
        program.read_until("Still serving")
        assert program.stop(signal.SIGINT) == 0
    report = json.loads(report_file.read_text())
    assert (report["ratings"], report["errors"], report["restarts"]) == (8000, 0, {})
    assert 6400 <= report["scored"] <= 6464
    # Of planted tastes more is known with each rating.
    assert report["auc"]["ratings"] > report["auc"]["ratings-frozen"] > 0.5
    assert report["request_p50_ms"] <= report["request_p99_ms"]
