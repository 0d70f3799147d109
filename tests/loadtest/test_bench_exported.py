"""The benchmark of exported programs compares two services that give the same scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from loadtest import bench_exported


def test_both_are_asked_and_the_figures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_exported, "ROWS", 300)
    out = tmp_path / "found.json"
    arguments = ["--kind", "mlp", "--rounds", "1", "--seconds", "0.1", "--candidates", "1", "9", "--out", str(out)]
    result = CliRunner().invoke(bench_exported.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    document = json.loads(out.read_text())
    first = document["results"][0]
    assert (first["kind"], first["dtype"]) == ("mlp", "float32")
    assert all(one["built_in_us"] > 0 and one["program_us"] > 0 for one in document["results"])
