"""What faults that nobody dies of cost, by answers, and what is too much."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loadtest.drill.config import GreyDrillConfig
from loadtest.drill.fleet import ANSWER, KINDS
from loadtest.drill.grey import grey_figures

CASE = {"begin": 10.0, "ended": 20.0, "watched_until": 30.0, "settled_s": 0.5, "lag": "", "refusal": ""}


def figures_of(fault: str, failed_at: tuple[float, ...] = (), **changed: Any) -> tuple[dict[str, Any], list[str]]:
    """The figures of one fault of 20 s with 1,000 answers, and what misses its limit."""
    answers = np.zeros(1000, ANSWER)
    answers["due"] = np.linspace(10.001, 29.98, 1000)
    answers["ended"] = answers["due"] + 0.01
    answers["code"][np.searchsorted(answers["due"], failed_at)] = KINDS.index("failed")
    figures, limits = grey_figures(
        GreyDrillConfig(faults=(fault,), times=1), [{**CASE, "fault": fault, **changed}], answers
    )
    return figures["faults"][fault], [limit.name for limit in limits if not limit.ok]


@pytest.mark.parametrize(
    ("fault", "failed_at", "changed", "missed"),
    [
        ("delay", (11.0,), {}, []),
        ("delay", (11.0, 12.0), {}, ["delay: answered_share"]),
        ("stop-redis", tuple(np.linspace(11, 12, 10)), {}, []),
        ("stop-redis", tuple(np.linspace(11, 12, 11)), {}, ["stop-redis: answered_share"]),
        ("stop-redis", (), {"settled_s": None, "lag": "no version is wanted"}, ["stop-redis: settled_s_max"]),
        ("full-store", (), {"refusal": "No space left on device"}, []),
        ("full-store", (), {}, ["full-store: refused"]),
    ],
)
def test_each_limit_is_kept_by_itself(
    fault: str, failed_at: tuple[float, ...], changed: dict[str, Any], missed: list[str]
):
    figures, too_much = figures_of(fault, failed_at, **changed)
    assert too_much == missed
    assert (figures["answers"], figures["failed"]) == (1000, len(failed_at))


def test_a_fleet_has_not_settled_while_requests_fail():
    figures, missed = figures_of("delay", (27.5,))
    assert figures["settled_s_max"] == pytest.approx(7.5, abs=0.03)
    assert not missed
