"""The steps of `drill upgrade`, and what is a problem in them."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.drill.config import Order
from loadtest.drill.fleet import count_kinds
from loadtest.drill.upgrade import NODES, SERVING, plan_steps, upgrade_limits


@pytest.mark.parametrize(("order", "names"), [("nodes-first", NODES + SERVING), ("serving-first", SERVING + NODES)])
def test_each_process_is_upgraded_and_two_nodes_die(order: Order, names: tuple[str, ...]):
    begin, *steps = plan_steps(order)
    assert (begin, steps[:6]) == (("begin", ""), [("upgrade", name) for name in names])
    assert steps[6:] == [(what, name) for name in ("node-0-0", "node-1-1") for what in ("kill -9", "start")]


STEP = {"transport": "tcp", "order": "nodes-first", "step": "upgrade serve-1", "nodes": "4 new", "serving": "2 new"}
STEP |= {"answers": 7, "stored_bytes": 10, "float16_bytes": 20, "float32_bytes": 30}
OLD = {**STEP, "nodes": "4 old", "stored_bytes": 0, "float16_bytes": 0}


@pytest.mark.parametrize(
    ("step", "problems"),
    [
        (STEP, []),
        (OLD, []),
        ({**STEP, "answers": 0}, ["tcp, nodes-first, upgrade serve-1: answers"]),
        # All processes are new, so they must be used.
        ({**STEP, "stored_bytes": 0}, ["tcp, nodes-first, upgrade serve-1: stored_bytes"]),
        ({**STEP, "float16_bytes": 0}, ["tcp, nodes-first, upgrade serve-1: float16_bytes"]),
    ],
)
def test_each_limit_is_kept_by_itself(step: dict[str, Any], problems: list[str]):
    for kind, more in ((0, []), (1, ["failed"])):
        limits = upgrade_limits({**count_kinds([kind]), "steps": [STEP, step]})
        assert [limit.name for limit in limits if not limit.ok] == [*more, *problems]
