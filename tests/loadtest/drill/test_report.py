"""Reports as people see them, and as files have them."""

from __future__ import annotations

import pytest

from loadtest.drill.report import Report, show


def test_records_and_figures_are_shown(capsys: pytest.CaptureFixture[str]):
    kills = [{"who": "shard-0-0", "settled_s": 3.5, "lag": "long text"}, {"who": "serve-0", "settled_s": None}]
    report = Report(
        figures={
            "kills": kills,
            "by_api": {"grpc rank": {"who": 3, "settled_s": 1.0}},
            "p99_ms_steady": 4.125,
            "lost_share": 0.00123,
            "memory_bytes": 12_345_678,
            "went_live": True,
        },
        problems=("2 answers failed",),
        details=("1.5 failed http rank: timeout",),
        columns=("who", "settled_s"),
    )
    show(report)
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    for expected in (
        ["shard-0-0", "3.5"],
        ["serve-0", "-"],
        ["grpc", "rank", "3", "1"],
        ["p99_ms_steady", "4.125"],
        ["lost_share", "0.123%"],
        ["memory_bytes", "12.3", "MB"],
        ["went_live", "yes"],
        ["problem:", "2", "answers", "failed"],
        ["1.5", "failed", "http", "rank:", "timeout"],
        ["not", "passed"],
    ):
        assert expected in lines
    assert "long text" not in printed
    assert report.model_dump(mode="json").keys() == {*report.figures, "problems", "details"}
