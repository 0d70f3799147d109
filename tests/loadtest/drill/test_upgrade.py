"""In which order `drill upgrade` replaces processes, and what is a problem in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loadtest.drill.config import Order
from loadtest.drill.fleet import ANSWER
from loadtest.drill.upgrade import LOOKUPS, restart_figures, upgrade_order

NODES = ["shard-0-0", "shard-0-1", "shard-1-0"]
SERVING = ["serve-0", "serve-1"]


@pytest.mark.parametrize(
    ("order", "names"),
    [
        ("nodes-first", [*NODES, "coordinator", *SERVING]),
        ("serving-first", [*SERVING, "coordinator", *NODES]),
    ],
)
def test_one_kind_is_upgraded_before_the_other(order: Order, names: list[str]):
    assert upgrade_order(dict.fromkeys(["coordinator", *NODES, *SERVING]), order) == names


DONE = {
    "delta_formats": [1, 2],
    "last_delta_format": 2,
    "rollouts": 1,
    "updates": 1,
    "updates_lost": 0,
    "lookups_with_last_delta": LOOKUPS,
    "old_publisher_refused": 1,
}
MISSED = [
    {},
    {"updates_lost": 1},
    {"updates": 0},
    {"lookups_with_last_delta": LOOKUPS - 1},
    {"old_publisher_refused": 0},
    {"last_delta_format": 1},
    {"rollouts": 0},
]


@pytest.mark.parametrize("changed", MISSED)
def test_each_limit_is_kept_by_itself(changed: dict[str, Any]):
    for code, more in ((0, []), (1, ["failed"]), (2, ["mixed"]), (3, ["wrong"])):
        answers = np.zeros(2, ANSWER)
        answers["code"][1] = code
        _, limits = restart_figures({**DONE, **changed}, answers)
        assert [limit.name for limit in limits if not limit.ok] == [*more, *changed]


def test_an_old_publisher_may_go_on_while_the_format_is_the_same():
    figures = {**DONE, "delta_formats": [2, 2], "old_publisher_refused": 0}
    assert all(limit.ok for limit in restart_figures(figures, np.zeros(2, ANSWER))[1])
