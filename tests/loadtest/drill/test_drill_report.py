"""Reports as people see them."""

from __future__ import annotations

import pytest

from loader.snapshot.tables import Frozen
from loadtest.drill.running import Report, show_report


class Kill(Frozen):
    who: str
    settled_s: float | None
    lag: str = "long text"


class Kills(Report):
    COLUMNS = ("who", "settled_s")

    kills: tuple[Kill, ...]
    by_api: dict[str, dict[str, int]]
    p99_ms_steady: float
    lost_share: float | None
    memory_bytes: int
    passed: bool


def test_a_report_is_shown_as_tables_of_its_records_and_its_values_with_their_units(capsys: pytest.CaptureFixture[str]):
    show_report(
        Kills(
            kills=(Kill(who="shard-0-0", settled_s=3.5), Kill(who="serve-0", settled_s=None)),
            by_api={"grpc rank": {"who": 3}},
            p99_ms_steady=4.125,
            lost_share=0.00123,
            memory_bytes=12_345_678,
            passed=True,
        )
    )
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert ["shard-0-0", "3.50", "s"] in lines
    assert ["serve-0", "-"] in lines
    assert ["grpc", "rank", "3"] in lines
    assert ["p99_ms_steady", "4.12", "ms"] in lines
    assert ["lost_share", "0.123%"] in lines
    assert ["memory_bytes", "12.3", "MB"] in lines
    assert ["passed", "yes"] in lines
    assert "long text" not in printed
