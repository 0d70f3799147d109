"""What `drill overload` says of the records of a client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loadtest.drill.config import OverloadDrillConfig
from loadtest.drill.overload import SHED, UNAVAILABLE, Worked, overload_figures, overload_problems, phase_times
from loadtest.load.closed_loop import CpuTime, Weighed
from loadtest.load.recorder import ROW, Done, Records

CONFIG = OverloadDrillConfig(seconds=10, normal_s=4, deadline_ms=100)
KINDS = ("ok", SHED, UNAVAILABLE, "http_504")
OK, WITH_RETRY_AFTER, WITHOUT, FAILED = range(4)
CAPACITY = 100.0


def weighed(rate: float = CAPACITY, client_cpu_s: float = 1.0) -> Weighed:
    return Weighed(round(10 * rate), 10.0, {"serve": CpuTime(9.0, 1.0)}, client_cpu_s, 1.0, 2.0)


def due_in(begin: float, seconds: float, rate: float, seconds_each: float, code: int) -> np.ndarray:
    """Requests at even times that all took as long."""
    rows = np.zeros(round(seconds * rate), ROW)
    rows["due"] = begin + np.arange(rows.size) / rate
    rows["turn"] = rows["sent"] = rows["due"] + 0.001
    rows["ended"], rows["code"] = rows["due"] + seconds_each, code
    return rows


NORMAL = [due_in(0, 4, 50, 0.010, OK), due_in(14, 4, 50, 0.009, OK)]
ADMITTED, REFUSED = due_in(4, 10, 95, 0.080, OK), due_in(4, 10, 205, 0.020, WITH_RETRY_AFTER)


def figures_of(*parts: np.ndarray, cpu_s: float = 2.0) -> dict[str, Any]:
    done = Done(Records(np.concatenate(parts), KINDS), cpu_s, connections=9)
    return overload_figures(CONFIG, (weighed(), weighed(90.0)), done, Worked(500, 9.0, 9.5))


def test_figures_of_a_server_that_refuses_in_time():
    figures = figures_of(*NORMAL, ADMITTED, REFUSED)
    assert overload_problems(figures, [weighed()]) == []
    expected = {"capacity": 100.0, "offered": 300.0, "goodput": 95.0, "batch_ms": 18.0, "requests": 3000}
    expected |= {"admitted": 950, "in_time": 950, "refused": 2050, "p99_ms_admitted": 80.0, "p99_ms_refused": 20.0}
    expected |= {"lag_p99_ms": 1.0, "client_cores": 0.2, "steady_after_s": 0.0}
    expected |= {"cpu_ms_at_capacity": 10.0, "cpu_ms_overloaded": 10.0}
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    assert figures["failed"] == {}
    assert [figures["checks"][name]["value"] for name in ("offered", "goodput")] == pytest.approx([3.0, 0.95])


@pytest.mark.parametrize(
    ("parts", "missed"),
    [
        ([ADMITTED, REFUSED, due_in(4, 10, 2, 0.101, OK)], "p99 admitted, ms"),
        ([ADMITTED, REFUSED, due_in(4, 10, 2, 0.02, FAILED)], "p99 admitted, ms"),
        ([ADMITTED, REFUSED, due_in(4, 10, 3, 0.024, WITH_RETRY_AFTER)], "p99 refused, ms"),
        ([ADMITTED, REFUSED, due_in(4, 0.1, 10, 0.02, WITHOUT)], "retry-after"),
        ([due_in(4, 10, 89, 0.08, OK), REFUSED], "goodput"),
        ([ADMITTED, due_in(4, 10, 180, 0.02, WITH_RETRY_AFTER)], "offered"),
        ([ADMITTED, REFUSED, due_in(14, 4, 50, 0.001, WITH_RETRY_AFTER)], "steady after, s"),
    ],
)
def test_each_figure_that_is_missed_is_a_problem(parts: list[np.ndarray], missed: str):
    (problem,) = overload_problems(figures_of(*NORMAL, *parts), [weighed()])
    assert problem.startswith(f"{missed}: ")


def test_a_busy_client_is_a_problem():
    (problem,) = overload_problems(figures_of(*NORMAL, ADMITTED, REFUSED, cpu_s=9.5), [weighed()])
    assert problem == "client cores: 0.95; it must be at most 0.9"
    (problem,) = overload_problems(figures_of(*NORMAL, ADMITTED, REFUSED), [weighed(client_cpu_s=9.9)])
    assert problem.startswith("capacity: ")


@pytest.mark.parametrize(("code", "took_s"), [(WITH_RETRY_AFTER, 0.001), (OK, 0.101), (OK, 0.011)])
def test_it_is_steady_when_nothing_is_refused_late_or_slow(code: int, took_s: float):
    # Until 1.45 s after; so the window that begins at 1.5 s is the first that is steady.
    after = [due_in(14, 1.45, 50, took_s, code), due_in(15.45, 2.55, 50, 0.009, OK)]
    assert figures_of(NORMAL[0], ADMITTED, REFUSED, *after)["steady_after_s"] == 1.5


def test_phases_follow_each_other_at_their_rates():
    times = np.concatenate(list(phase_times(((200, 5), (2000, 5)), seed=3)))
    assert (np.diff(times) >= 0).all()
    assert 0 < times[0] < times[-1] < 10
    slow = int((times < 5).sum())
    # Poisson: 1000 and 10,000, give or take six standard deviations.
    assert abs(slow - 1000) < 190
    assert abs(times.size - slow - 10_000) < 600
