"""Policies for hot rows are compared on the same lookups, by hit rates that are summed up and not drawn."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from loadtest.hot.policies import DrawnLookups, Lru, PolicyResult, Shifted, main


@given(st.lists(st.lists(st.integers(0, 29), max_size=40), max_size=8), st.integers(1, 12))
def test_lru_holds_what_a_cache_that_moves_each_row_to_its_front_holds(batches, capacity):
    lru, cache = Lru(30, capacity), OrderedDict()
    for rows in batches:
        lru.observe(np.array(rows, np.int64))
        for row in rows:
            cache[row] = None
            cache.move_to_end(row)
            if len(cache) > capacity:
                cache.popitem(last=False)
    assert set(lru.top(capacity)) == set(cache)


def test_a_hit_rate_is_what_is_drawn():
    lookups = DrawnLookups(np.random.default_rng(0), 5_000, 1.1)
    drawn = lookups.draw(200_000)
    assert lookups.hit_rate(np.arange(5_000)) == pytest.approx(100)
    for rows in (lookups.top(50), np.arange(2_500)):
        assert np.isin(drawn, rows).mean() * 100 == pytest.approx(lookups.hit_rate(rows), abs=1)


@pytest.mark.parametrize("part", [0.2, 1.0])
def test_a_shift_moves_its_part_of_the_rows_and_leaves_the_law(part):
    lookups = DrawnLookups(np.random.default_rng(0), 5_000, 0.6)
    shifted = lookups.shifted(part)
    moved = (lookups.top(5_000) != shifted.top(5_000)).mean()
    assert moved == pytest.approx(part, abs=0.03)
    np.testing.assert_array_equal(np.sort(shifted.top(5_000)), np.arange(5_000))
    assert shifted.hit_rate(shifted.top(100)) == pytest.approx(lookups.hit_rate(lookups.top(100)))


def test_back_means_for_good():
    assert Shifted.within([30, 5, 1.9, 2.1, 2.0, 1]) == 4
    assert Shifted.within([0.5, 0.4]) == 0
    assert Shifted.within([30, 5]) is None


def test_the_learning_policy_is_close_to_the_best_and_lru_is_not(tmp_path: Path):
    file = tmp_path / "hot.json"
    options = {"rows": 20_000, "capacities": 500, "zipf": 1.1, "before": 100, "after": 20, "seeds": 7, "json": file}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    done = CliRunner().invoke(main, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    result = PolicyResult.model_validate_json(file.read_text())
    (steady,) = result.steady
    assert steady.learning_behind <= 1 < 5 < steady.lru_behind
    complete, some = result.shifted
    assert complete.learning_behind[20] == pytest.approx(complete.counted_behind[20], abs=1)
    assert complete.static_behind > 30
    # Most of what was learned still holds.
    assert some.learning_behind[10] < complete.learning_behind[10]
    assert "counted since" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("--capacities 100000 --rows 1000", "100000 is not within 1 to 999"), ("--shifts 2", "2 is not in"),
     ("--zipf a", "'a' is not numbers")],
)  # fmt: skip
def test_what_can_not_be_compared_is_refused(arguments, message):
    done = CliRunner().invoke(main, arguments.split(), env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert message in done.output
