"""Bytes of a training step: the textbook's figures, what a simulated ring and servers send, and the crossover."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.planning.training import TrainingStep, training_traffic

BOOK = TrainingStep(params=50_000_000, workers=8, servers=1, rows=100_000_000, dim=128, worker_ids=4096)
STEPS = st.builds(
    TrainingStep,
    params=st.integers(1, 10**6),
    workers=st.integers(2, 9),
    servers=st.integers(1, 4),
    rows=st.integers(1, 10**6),
    dim=st.integers(1, 64),
    worker_ids=st.integers(1, 10**6),
)


def test_the_figures_of_the_textbook_come_out():
    found = training_traffic(BOOK)
    assert found["dense"]["all_reduce_link_bytes"] == 0.35e9
    assert found["dense"]["server_link_bytes"] == 3.2e9
    assert found["dense"]["ratio"] == pytest.approx(9.1, abs=0.05)
    table = found["table"]
    assert table["server_bytes"] == pytest.approx(33.554e6, abs=500)
    assert table["all_reduce_bytes"] == 716.8e9
    assert round(table["ratio"]) == 21_362
    assert (table["touched_rows"], round(100 * table["touched_share"], 4)) == (32_768, 0.0328)
    assert (table["crossover_ids"], table["fewer_bytes"]) == (87.5e6, "servers")


def ring_bytes(workers: int, size: float) -> tuple[float, float]:
    """Return the bytes of one link, and of all: reduce-scatter, then all-gather, of a K-th to the next in each turn."""
    sent = [0.0] * workers
    for _ in range(2 * (workers - 1)):
        for worker in range(workers):
            sent[worker] += size / workers
    return max(sent), sum(sent)


@given(STEPS)
def test_bytes_are_those_that_are_sent_one_message_at_a_time(step):
    found = training_traffic(step)
    dense, row = step.params * step.number_bytes, step.dim * step.number_bytes
    dense_link, dense_ring = ring_bytes(step.workers, dense)
    _, table_ring = ring_bytes(step.workers, step.rows * row)
    links, from_table = [0.0] * step.servers, 0
    for _ in range(step.workers):
        for server in range(step.servers):
            links[server] += dense / step.servers + dense / step.servers  # gradients there, weights back
        from_table += step.worker_ids * row + step.worker_ids * row
    assert found["dense"]["all_reduce_link_bytes"] == pytest.approx(dense_link)
    assert found["dense"]["server_link_bytes"] == pytest.approx(max(links))
    assert found["table"]["all_reduce_bytes"] == pytest.approx(table_ring)
    assert found["table"]["server_bytes"] == from_table
    assert found["step"] == {
        "hybrid_bytes": pytest.approx(dense_ring + from_table),
        "all_reduce_bytes": pytest.approx(dense_ring + table_ring),
        "servers_bytes": pytest.approx(sum(links) + from_table),
    }


@given(STEPS)
def test_the_crossover_is_where_both_ways_send_as_much(step):
    table = training_traffic(step)["table"]
    assert (table["fewer_bytes"] == "servers") == (table["server_bytes"] < table["all_reduce_bytes"])


def test_one_worker_alone_reduces_nothing():
    found = training_traffic(BOOK.model_copy(update={"workers": 1}))
    assert (found["dense"]["all_reduce_link_bytes"], found["dense"]["ratio"]) == (0, None)
    assert (found["table"]["all_reduce_bytes"], found["table"]["fewer_bytes"]) == (0, "all-reduce")
