"""What `drill overload` says of the records of a client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loadtest.drill.config import OverloadDrillConfig
from loadtest.drill.overload import SHED, UNAVAILABLE, overload_figures, phase_times
from loadtest.load.loops import Weighed
from loadtest.load.result import ROW, Done, Records

CONFIG = OverloadDrillConfig(seconds=10, normal_s=4, deadline_ms=100)
KINDS = ("ok", SHED, UNAVAILABLE, "http_504")
OK, WITH_RETRY_AFTER, WITHOUT, FAILED = range(4)
CAPACITY = 100.0


def weighed(rate: float = CAPACITY) -> Weighed:
    return Weighed(round(10 * rate), 10.0, {"serve": 10.0}, 1.0, 1.0, 2.0)


def due_in(begin: float, seconds: float, rate: float, seconds_each: float, code: int) -> np.ndarray:
    """Requests at even times that all took as long."""
    rows = np.zeros(round(seconds * rate), ROW)
    rows["due"] = begin + np.arange(rows.size) / rate
    rows["turn"] = rows["sent"] = rows["due"] + 0.001
    rows["ended"], rows["code"] = rows["due"] + seconds_each, code
    return rows


NORMAL = [due_in(0, 4, 50, 0.010, OK), due_in(14, 4, 50, 0.009, OK)]
ADMITTED, REFUSED = due_in(4, 10, 95, 0.080, OK), due_in(4, 10, 205, 0.020, WITH_RETRY_AFTER)


def figures_of(*parts: np.ndarray, cpu_s: float = 2.0) -> tuple[dict[str, Any], list[str]]:
    """The figures, and what misses its limit."""
    done = Done(Records(np.concatenate(parts), KINDS), cpu_s, connections=9)
    figures, limits = overload_figures(CONFIG, (weighed(), weighed(90.0)), done, np.array([500, 9.0, 9.5]))
    return figures, [limit.name for limit in limits if not limit.ok]


def test_figures_of_a_server_that_refuses_in_time():
    figures, missed = figures_of(*NORMAL, ADMITTED, REFUSED)
    assert missed == []
    expected = {"capacity": 100.0, "offered": 300.0, "goodput": 95.0, "batch_ms": 18.0, "requests": 3000}
    expected |= {"admitted": 950, "in_time": 950, "refused": 2050, "p99_ms_admitted": 80.0, "p99_ms_refused": 20.0}
    expected |= {"lag_p99_ms": 1.0, "client_cores": 0.2, "steady_after_s": 0.0}
    expected |= {"cpu_ms_at_capacity": 10.0, "cpu_ms_overloaded": 10.0}
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    assert figures["failed"] == {}


@pytest.mark.parametrize(
    ("parts", "cpu_s", "problem"),
    [
        ([ADMITTED, REFUSED, due_in(4, 10, 2, 0.101, OK)], 2.0, "p99 admitted, ms"),
        ([ADMITTED, REFUSED, due_in(4, 10, 2, 0.02, FAILED)], 2.0, "p99 admitted, ms"),
        ([ADMITTED, REFUSED, due_in(4, 10, 3, 0.024, WITH_RETRY_AFTER)], 2.0, "p99 refused, ms"),
        ([ADMITTED, REFUSED, due_in(4, 0.1, 10, 0.02, WITHOUT)], 2.0, "retry-after"),
        ([due_in(4, 10, 87, 0.08, OK), REFUSED], 2.0, "goodput"),
        ([ADMITTED, due_in(4, 10, 180, 0.02, WITH_RETRY_AFTER)], 2.0, "offered"),
        ([ADMITTED, REFUSED, due_in(14, 4, 50, 0.001, WITH_RETRY_AFTER)], 2.0, "steady after, s"),
        ([ADMITTED, REFUSED], 9.5, "client cores"),
    ],
)
def test_each_limit_is_kept_by_itself(parts: list[np.ndarray], cpu_s: float, problem: str):
    assert figures_of(*NORMAL, *parts, cpu_s=cpu_s)[1] == [problem]


@pytest.mark.parametrize(("code", "took_s"), [(WITH_RETRY_AFTER, 0.001), (OK, 0.101), (OK, 0.011)])
def test_it_is_steady_when_nothing_is_refused_late_or_slow(code: int, took_s: float):
    # Until 1.45 s after; so the window that begins at 1.5 s is the first that is steady.
    after = [due_in(14, 1.45, 50, took_s, code), due_in(15.45, 2.55, 50, 0.009, OK)]
    assert figures_of(NORMAL[0], ADMITTED, REFUSED, *after)[0]["steady_after_s"] == 1.5


def test_phases_follow_each_other_at_their_rates():
    times = np.array([*phase_times(((200, 5), (2000, 5)), seed=3)])
    assert (np.diff(times) >= 0).all()
    assert 0 < times[0] < times[-1] < 10
    slow = int((times < 5).sum())
    # Poisson: 1000 and 10,000, give or take six standard deviations.
    assert abs(slow - 1000) < 190
    assert abs(times.size - slow - 10_000) < 600
