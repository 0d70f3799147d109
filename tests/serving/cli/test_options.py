"""Shares and times as people write them."""

from __future__ import annotations

import click
import pytest

from serving.cli.options import seconds, share


@pytest.mark.parametrize(("text", "part"), [("5%", 0.05), ("0.05", 0.05), (" 50 %", 0.5), ("99.9%", 0.999)])
def test_a_share_is_a_percentage_or_a_fraction(text: str, part: float) -> None:
    assert share(text) == pytest.approx(part)


@pytest.mark.parametrize(
    ("text", "time_s"), [("60s", 60), ("2m", 120), ("500ms", 0.5), ("1h", 3600), ("1.5m", 90), ("7", 7), ("0", 0)]
)
def test_a_time_has_a_unit_or_is_in_seconds(text: str, time_s: float) -> None:
    assert seconds(text) == pytest.approx(time_s)


@pytest.mark.parametrize("text", ["-1s", "inf", "nan", "s", "", "5d", "1m30", "5mm", "5sm"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="not a time such as 60s"):
        seconds(text)
