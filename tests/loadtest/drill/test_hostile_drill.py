from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from loadtest.drill.cli import drill
from loadtest.drill.hostile.catalog import ATTACKS


@pytest.mark.timeout(120)
def test_two_attacks_on_a_real_server_are_reported_one_by_one(tmp_path: Path):
    report_file = tmp_path / "hostile.json"
    options = ["--quick", "--rows", "2000", "--seconds", "1", "--steady-s", "1", "--settle-s", "0", "--rate", "20"]
    options += ["--only", "json-exponent", "--only", "h2-ping", "--json", str(report_file)]
    result = CliRunner().invoke(drill, ["hostile", *options])
    # Whether it passes depends on how busy the machine is.
    assert result.exit_code in (0, 1), (result.output, result.exception)
    report = json.loads(report_file.read_text())
    message, flood = report["attacks"]
    assert (message["name"], message["messages"], message["ended_by"]) == ("json-exponent", 1, "HTTP 400")
    assert message["bytes_sent"] > 1_000_000
    assert flood["messages"] > 500
    assert flood["seen"]["ends"]
    assert flood["valid_requests"] >= 15
    assert flood["steady_p99_ms"] == report["steady_p99_ms"] > 0
    assert flood["memory_peak_bytes"] >= flood["memory_before_bytes"] > 50e6
    assert 0 < flood["longest_stall_ms"] < 60_000
    assert report["fuzz"] == []


def test_an_attack_that_does_not_exist_is_refused(tmp_path: Path):
    result = CliRunner().invoke(drill, ["hostile", "--only", "none"])
    assert result.exit_code != 0
    assert "there are grpc-outputs" in str(result.exception)


def test_half_a_server_is_refused():
    result = CliRunner().invoke(drill, ["hostile", "--http", "127.0.0.1:1"])
    assert "go together" in str(result.exception)


def test_attacks_are_listed():
    result = CliRunner().invoke(drill, ["hostile", "--list"])
    assert result.exit_code == 0
    assert any(line.startswith("h2-rapid-reset ") for line in result.output.splitlines())
    assert len(result.output.splitlines()) == len(ATTACKS)
