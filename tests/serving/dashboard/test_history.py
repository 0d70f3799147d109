"""What is kept of the last minutes, against counts that are added up here."""

from __future__ import annotations

import numpy as np
import pytest

from loader.registry.fleet import LATENCY_BOUNDS_MS, HotReport, NodeRecord, VersionReport, VersionStats
from loader.rollout.guards import percentile_ms
from serving.dashboard.history import QUANTILES, History, percentiles_ms

SLOT_S = 5.0


def node(counts: dict[int, int], *, name: str = "serve-0", process: int = 1, hits: int = 0) -> NodeRecord:
    """A serving process that has answered so many requests of each version, all in the same bucket."""
    versions = [
        VersionReport(
            model="films",
            version=version,
            state="ready",
            stats=VersionStats(requests=count, errors=count // 10, latency_counts=(0, 0, count)),
            hot=HotReport(lookups=2 * hits, hits=hits) if hits else None,
        )
        for version, count in counts.items()
    ]
    return NodeRecord(node_id=name, kind="serving", process_id=process, address="", versions=tuple(versions))


def requests(history: History, version: int = 1) -> list[int | None]:
    (found,) = [one["requests"] for one in history.document()["tracks"] if one["version"] == version]
    return found


def test_each_slot_has_what_was_counted_in_it():
    history = History(num_slots=4)
    for second, count in enumerate(range(100, 122)):
        closed = history.observe([node({1: count}, hits=count)], 1000.0 + second)
        assert closed == (second in (5, 10, 15, 20))
    # The first slot was seen from its beginning, but what was counted before is not of it; the last is not full.
    assert requests(history) == [5, 5, 5]
    told = history.document(last_only=True)
    assert (told["slot"], told["slot_s"], told["tracks"][0]["requests"]) == (203, SLOT_S, [5])
    recent = history.recent("films", 1)
    assert recent is not None
    assert (recent["requests_per_s"], recent["hit_rate"]) == (1.0, 0.5)
    assert recent["p50"] == recent["p99"] == LATENCY_BOUNDS_MS[2]


def test_a_process_that_starts_anew_and_one_that_comes_count_from_nothing():
    history = History(num_slots=4)
    history.observe([node({1: 50})], 0.0)
    history.observe([node({1: 60})], 6.0)
    # The process is another one, a version was staged anew, and another node has come.
    history.observe([node({1: 7}, process=2)], 7.0)
    history.observe([node({1: 3}, process=2), node({1: 4}, name="serve-1")], 8.0)
    history.observe([], 11.0)
    assert requests(history)[-1] == 10 + 7 + 3 + 4


@pytest.mark.parametrize("seed", range(3))
def test_percentiles_are_those_of_the_guards(seed):
    random = np.random.default_rng(seed)
    counts = random.poisson(0.4, (20, len(LATENCY_BOUNDS_MS) + 1)).astype(np.int64)
    counts[0] = 0
    counts[1, :-1] = 0
    for quantile, found in zip(QUANTILES, percentiles_ms(counts), strict=True):
        assert found == [percentile_ms(row, quantile) for row in counts.tolist()]
