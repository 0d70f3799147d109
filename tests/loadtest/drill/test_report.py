"""Reports as people see them, and as files have them."""

from __future__ import annotations

import pytest

from loadtest.drill.config import Limit, Report, execute, make_report


def test_records_and_figures_are_shown(capsys: pytest.CaptureFixture[str]):
    figures = {
        "kills": [
            {"who": "shard-0-0", "settled_s": 3.5, "n": []},
            {"who": "serve-0", "settled_s": None, "n": []},
        ],
        "by_api": {"grpc rank": {"who": 3, "settled_s": 1.0}},
        "wide": [{f"column{number}": number for number in range(20)}],
        "p99_ms_steady": 4.125,
        "lost_share": 0.00123,
        "memory_bytes": 12_345_678,
        "went_live": True,
    }
    limits = [Limit("failed", 2, 0), Limit("wrong", 0, 0)]
    report = make_report(figures, limits, ["1.5 failed http rank: timeout"], ["serve-0 ended"])

    async def run(*_: object) -> Report:
        return report

    assert execute(run, None, None) == 1
    printed = capsys.readouterr().out
    lines = [line.rstrip() for line in printed.splitlines()]
    for expected in (
        "p99_ms_steady 4.125, lost_share 0.12%, memory_bytes 12.3 MB, went_live yes",
        "  shard-0-0         3.5",
        "  serve-0",
        "by_api.grpc rank: who 3, settled_s 1",
        "wide: " + ", ".join(f"column{number} {number}" for number in range(20)),
        "problem: serve-0 ended",
        "problem: failed: 2; it must be at most 0",
        "  1.5 failed http rank: timeout",
        "not passed",
    ):
        assert expected in lines
    assert "wrong:" not in printed
    assert report.model_dump(mode="json").keys() == {*figures, "problems", "details", "checks"}


@pytest.mark.parametrize(
    ("limit", "ok"),
    [
        (Limit("p99", 2.0, 2.0), True),
        (Limit("p99", 2.1, 2.0), False),
        (Limit("goodput", 0.9, 0.9, "at least"), True),
        (Limit("goodput", 0.8, 0.9, "at least"), False),
        (Limit("p99", None, 2.0), False),
        (Limit("goodput", None, 0.9, "at least"), False),
        (Limit("p99", float("nan"), 2.0), False),
    ],
)
def test_limits(limit: Limit, ok: bool):
    assert limit.ok == ok
    assert bool(make_report({}, [limit], ()).problems) != ok
