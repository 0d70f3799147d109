"""The tier's benchmarks drive real nodes, and what they tell is what the router counted."""

from __future__ import annotations

import json

from click.testing import CliRunner

from loadtest.hot import shards as hot_shards


def test_both_arms_of_a_request_are_measured_at_the_hit_rates_that_are_wanted(tmp_path):
    file = tmp_path / "cost.json"
    sizes = ["--tables", "2", "--rows", "30000", "--hot-rows", "500", "--bags", "20", "--turns", "1"]
    result = CliRunner().invoke(hot_shards.main, ["cost", "--json", str(file), *sizes], catch_exceptions=False)
    assert result.exit_code == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(one["hotness"], one["hit_rate"]) for one in rows] == [
        (hotness, rate) for hotness in (1, 20) for rate in (0.0, 0.5, 0.9)
    ]
    for one in rows:
        assert one["values"] == 2 * 20 * one["hotness"]
        assert min(one["off_ms"], one["on_ms"]) > 0
        assert one["on_kb"] == one["off_kb"] if one["hit_rate"] == 0 else one["on_kb"] < one["off_kb"]
