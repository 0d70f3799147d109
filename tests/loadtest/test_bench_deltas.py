"""The benchmark of deltas applies what a real trainer publishes and compares windows of both kinds."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from loadtest import bench_deltas


@pytest.mark.parametrize("hot_rows_gb", [0.0, 0.00003])
def test_a_short_run_applies_rows_and_reports_both_kinds_of_windows(tmp_path, monkeypatch, hot_rows_gb):
    monkeypatch.setattr(bench_deltas, "WINDOW_S", 0.5)
    file = tmp_path / "deltas.json"
    arguments = ["--json", str(file), "--seconds", "0.5", "--rows", "2000", "--dim", "8", "--rows-per-s", "1000"]
    arguments += ["--hot-rows-gb", f"{hot_rows_gb:.5f}"]
    result = CliRunner().invoke(bench_deltas.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    report = json.loads(file.read_text())["results"]
    assert report["deltas_applied"] > 0
    assert (report["rows"] < 2000) == (hot_rows_gb > 0)
    assert report["deltas_refused"] == 0
    assert report["rows_per_s_applied"] > 0
    assert min(report["lookups"].values()) > 0
    for quantile in ("p50", "p99"):
        times = report[f"{quantile}_ms"]
        assert report[f"ratio_{quantile}"] == pytest.approx(times["with_deltas"] / times["without_deltas"])
