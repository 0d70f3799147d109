"""The benchmark of traces: its collector takes what servers send, and its figure is the ratio of processor times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.bench_traces import Spent, TracesBenchConfig, _Bench, collecting
from shard_node.trace_export import TraceConfig, open_sink
from shard_node.tracing import Span, SpanContext


def test_its_collector_takes_what_a_server_sends():
    outcomes: dict[str, int] = {}
    with collecting() as found:
        sink = open_sink(TraceConfig(endpoint=found.url), outcomes.__setitem__)
        sink.put(Span("a", "internal", SpanContext.new(), None, 1.0, 2.0, {}))
        sink.close()
    assert outcomes == {"exported": 1}
    assert found.posts == 1
    assert found.size_bytes > 0


def test_rounds_are_compared_by_what_all_requests_of_a_side_took():
    nobody: Any = None
    bench = _Bench(TracesBenchConfig(), Path(), Path(), nobody, nobody, {"exported": 5, "dropped": 1}, print)
    off = [Spent(cpu_s=1.0, requests=1000, seconds=4.0), Spent(cpu_s=2.0, requests=1000, seconds=4.0)]
    on = [Spent(cpu_s=1.02, requests=1000, seconds=4.0), Spent(cpu_s=2.02, requests=1000, seconds=4.0)]
    found = bench._comparison("local", "json", off, on)
    cpu = found.measures[0]
    assert cpu.values == ((1000.0, 2000.0), (1020.0, 2020.0))
    assert cpu.ratios[1].value == pytest.approx((1.02 * 1.01) ** 0.5)
    assert found.invalid_because == ("1 spans were dropped",)
    without = _Bench(TracesBenchConfig(), Path(), Path(), nobody, nobody, {}, print)._comparison(
        "local", "json", off, on
    )
    assert without.invalid_because == ("no span was exported",)
