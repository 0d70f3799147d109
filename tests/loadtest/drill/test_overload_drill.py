"""What `drill overload` says of the records of a client, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from loadtest.drill.cli import drill
from loadtest.drill.overload import (
    SHED,
    SHED_UNTOLD,
    Asked,
    OverloadDrillConfig,
    OverloadReport,
    Phase,
    Worked,
    judge,
    phase_times,
)
from loadtest.load.closed_loop import CpuTime, Weighed

CONFIG = OverloadDrillConfig(seconds=10, normal_s=4, deadline_ms=100)
OK, TOLD, UNTOLD, FAILED = 0, 1, 2, 3
ASKED = Asked({OK: "ok", TOLD: SHED, UNTOLD: SHED_UNTOLD, FAILED: "http_504"}, cpu_s=2.0)
CAPACITY = 100.0


def weighed(rate: float = CAPACITY, client_cpu_s: float = 1.0) -> Weighed:
    return Weighed(round(10 * rate), 10.0, {"serve": CpuTime(9.0, 1.0)}, client_cpu_s, 1.0, 2.0)


def due_in(begin: float, seconds: float, rate: float, seconds_each: float, code: int) -> np.ndarray:
    """Requests at even times that all took as long: rows of due, turn, sent, ended, code."""
    due = begin + np.arange(round(seconds * rate)) / rate
    return np.stack([due, due + 0.001, due + 0.001, due + seconds_each, np.full(due.size, code)], axis=1)


NORMAL = [due_in(0, 4, 50, 0.010, OK), due_in(14, 4, 50, 0.009, OK)]
GOOD = [due_in(4, 10, 95, 0.080, OK), due_in(4, 10, 205, 0.020, TOLD)]


def report_of(*parts: np.ndarray, asked: Asked = ASKED, client_cpu_s: float = 1.0) -> OverloadReport:
    closed = weighed(client_cpu_s=client_cpu_s), weighed(90.0)
    return judge(CONFIG, (0, 1), closed, np.concatenate(parts), asked, Worked(500, 9.0, 9.5))


def missed(report: OverloadReport) -> set[str]:
    assert len(report.problems) == sum(not one.ok for one in report.checks.values())
    return {name for name, one in report.checks.items() if not one.ok}


def test_what_is_refused_in_time_and_answered_in_time_passes():
    report = report_of(*NORMAL, *GOOD)
    assert report.problems == ()
    assert (report.capacity, report.offered, report.goodput, report.batch_ms) == (100.0, 300.0, 95.0, 18.0)
    assert (report.requests, report.admitted, report.in_time, report.refused) == (3000, 950, 950, 2050)
    assert report.p99_ms_admitted == pytest.approx(80.0)
    assert report.p99_ms_refused == pytest.approx(20.0)
    assert report.lag_p99_ms == pytest.approx(1.0)
    assert (report.client_cores, report.steady_after_s, dict(report.failed)) == (0.2, 0.0, {})
    assert (report.cpu_ms_at_capacity, report.cpu_ms_overloaded) == (10.0, 10.0)
    assert report.checks["offered"].value == pytest.approx(3.0)
    assert report.checks["goodput"].value == pytest.approx(0.95)


def test_each_figure_that_is_missed_is_a_problem():
    late = due_in(4, 10, 2, 0.101, OK)
    assert missed(report_of(*NORMAL, *GOOD, late)) == {"p99 admitted, ms"}
    assert missed(report_of(*NORMAL, *GOOD, due_in(4, 10, 2, 0.02, FAILED))) == {"p99 admitted, ms"}
    assert missed(report_of(*NORMAL, *GOOD, due_in(4, 10, 3, 0.024, TOLD))) == {"p99 refused, ms"}
    assert missed(report_of(*NORMAL, *GOOD, due_in(4, 0.1, 10, 0.02, UNTOLD))) == {"retry-after"}
    assert missed(report_of(*NORMAL, due_in(4, 10, 89, 0.08, OK), GOOD[1])) == {"goodput"}
    assert missed(report_of(*NORMAL, GOOD[0], due_in(4, 10, 180, 0.02, TOLD))) == {"offered"}
    assert missed(report_of(*NORMAL, *GOOD, asked=Asked(ASKED.kinds, cpu_s=9.5))) == {"client cores"}
    busy = report_of(*NORMAL, *GOOD, client_cpu_s=9.9)
    assert [one.partition(":")[0] for one in busy.problems] == ["capacity"]


def test_it_is_steady_from_the_second_on_in_which_nothing_is_refused_late_or_slow():
    before = NORMAL[0]
    for code, took_s in ((TOLD, 0.001), (OK, 0.101), (OK, 0.011)):
        # Until 1.45 s after; so the window that begins at 1.5 s is the first that is steady.
        trouble = due_in(14, 1.45, 50, took_s, code)
        assert report_of(before, *GOOD, trouble, due_in(15.45, 2.55, 50, 0.009, OK)).steady_after_s == 1.5
    assert missed(report_of(before, *GOOD, due_in(14, 4, 50, 0.001, TOLD))) == {"steady after, s"}
    assert report_of(before, *GOOD, due_in(14, 4, 50, 0.001, TOLD)).steady_after_s is None


def test_phases_follow_each_other_at_their_rates():
    times = np.concatenate(list(phase_times((Phase(rate=200, seconds=5), Phase(rate=2000, seconds=5)), seed=3)))
    assert (np.diff(times) >= 0).all()
    assert 0 < times[0] < times[-1] < 10
    slow = int((times < 5).sum())
    # Poisson: 1000 and 10,000, give or take six standard deviations.
    assert abs(slow - 1000) < 190
    assert abs(times.size - slow - 10_000) < 600


@pytest.mark.timeout(300)
def test_a_server_is_overloaded_and_the_report_has_every_figure(tmp_path: Path):
    # So many times what it can do that some are refused, however busy the machine is while capacity is found; and with
    # so short a deadline that a few that wait are enough.
    options = ["--seconds", "1", "--factor", "20", "--normal-s", "1", "--capacity-s", "1", "--rows", "1000"]
    options += ["--deadline-ms", "20"]
    result = CliRunner().invoke(drill, ["overload", *options, "--json", str(tmp_path / "overload.json")])
    assert result.exit_code in (0, 1), (result.output, result.exception)
    report = json.loads((tmp_path / "overload.json").read_text())
    # How much a busy machine answers is not what is tested here.
    assert report["requests"] == report["admitted"] + report["refused"] > 0
    assert report["refused"] > 0
    assert report["checks"]["retry-after"]["value"] == 1.0
    assert report["batch_ms"] > 0
    assert result.exit_code == bool(report["problems"])
    assert len(set(report["cores"])) == 2
