"""The open loop against servers that stall, fail and hang up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time

import grpc
import numpy as np
import psutil
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from loadtest.load.config import OfferedLoad, RunConfig
from loadtest.load.generator import offer
from loadtest.load.loops import PreciseTimer, arrival_times
from loadtest.load.result import Done, LoadResult, Ready, Recorder, make_result
from loadtest.workloads.catalog import open_workload
from loadtest.workloads.payloads import MAX_POOL_BYTES, Pool, drawn_payloads
from shardrank_testing.loaded_server import CANDIDATES, Reply, loaded_grpc_server, loaded_http_server

SERVERS = {"json": loaded_http_server, "grpc": loaded_grpc_server}
WORKLOAD = open_workload("merlin-tiny:0.001", candidates=str(CANDIDATES))
HOLD, BUSY = Reply(then="hold"), Reply(status=503)


def load(
    port: int,
    api: str = "json",
    *,
    rate: float = 200,
    duration_s: float = 0.5,
    lead_s: float = 0.05,
    pool_class: type[Pool] = Pool,
    **options: object,
) -> LoadResult:
    """Run a load in this process; times out after 5 s, unless told otherwise."""
    target = f"{'http' if api == 'json' else 'grpc'}://127.0.0.1:{port}"
    config = OfferedLoad(**{"target": target, "arrivals": "constant", "timeout_ms": 5000, **options})
    run = RunConfig(rate=rate, duration_s=duration_s, warmup_s=0)
    pool = pool_class(api, "m", itertools.islice(drawn_payloads(WORKLOAD, api, 0), 4), MAX_POOL_BYTES)

    async def measured() -> Done:
        times = arrival_times(config.arrivals, rate, run.until_s)
        return await offer(config, pool, times, Recorder(time.monotonic() + lead_s), cpu_s=(0, run.until_s))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        done = runner.run(measured())
    return make_result(config, run, [Ready(requests=4, model="m", workload="w")], 0.0, [done])


def test_grpc_connections_are_open_before_the_first_request():
    seen: list[int] = []

    def plan(number: int = 0) -> Reply:
        found = psutil.Process().net_connections("tcp")
        is_open = [at.status == psutil.CONN_ESTABLISHED and at.laddr.port == server.port for at in found]
        seen.append(sum(is_open))
        return Reply()

    with loaded_grpc_server(plan) as server:
        result = load(server.port, "grpc", duration_s=0.2, lead_s=0.5, grpc_channels=16)
        plan()
    assert (seen[0], seen[-1]) == (16, 0)
    assert (result.errors, result.answered) == ({}, 40)


@pytest.mark.parametrize("api", ["json", "grpc"])
@pytest.mark.parametrize("varied", [True, False])
def test_requests_are_sent_once_with_new_headers_if_varied(api, varied):
    with SERVERS[api]() as server:
        result = load(server.port, api, varied=varied)
    assert (result.due, result.sent, result.answered, server.requests) == (100, 100, 100, 100)
    assert (result.errors, result.throughput, result.varied) == ({}, 200, varied)
    assert result.latency == result.latency_of_due
    assert result.service.p99_ms <= result.latency.p99_ms
    for name in ("traceparent", "x-request-id"):
        # The pool has 4 requests: each was sent 25 times.
        assert len({head.get(name) for head in server.heads}) == (100 if varied else 1)


@pytest.mark.parametrize(("api", "connections"), [("json", 512), ("json", 1), ("grpc", 4)])
def test_a_stall_is_in_the_latency_of_all_requests_due_meanwhile(api, connections):
    """The whole server stops at a request, as a garbage collection or a swap would make it."""

    def plan(number: int) -> Reply:
        time.sleep(0.3 if number == 60 else 0)
        return Reply()

    with SERVERS[api](plan) as server:
        result = load(server.port, api, rate=100, duration_s=2, max_connections=connections)
    assert result.answered == 200
    # One request each 10 ms meets the stall with 300, 290, ... ms of it left. p99 of 200 is the third highest.
    assert result.latency.p99_ms >= 280
    # A busy machine only adds: what is below is what it would have to add to a request without a stall.
    assert result.latency.p50_ms < 100
    if connections == 1:
        # The others waited for the connection, which is neither service time nor the generator's lateness.
        assert result.generator.processes[0].connections == server.most_connections == 1
        assert result.service.p99_ms < 280 or result.service.p90_ms < 100
        assert result.generator.lag_p99_ms < 280


KINDS = {
    1: Reply(status=503, body=b'{"error": {"kind": "overloaded"}}'),
    2: Reply(status=404),
    3: Reply(body=b"not JSON"),
    4: Reply(body=b'{"scores": [0.5]}'),
    5: Reply(then="hang_up"),
    6: Reply(then="noise"),
    7: BUSY,
}
GRPC_KINDS = {
    1: Reply(grpc_status=grpc.StatusCode.UNAVAILABLE),
    2: Reply(grpc_status=grpc.StatusCode.INVALID_ARGUMENT),
    3: HOLD,
}


@pytest.mark.parametrize(
    ("api", "replies", "options", "errors"),
    [
        ("json", KINDS, {}, {"bad_answer": 2, "connection": 2, "http_404": 1, "http_503": 2}),
        ("grpc", GRPC_KINDS, {"timeout_ms": 500}, {"grpc_unavailable": 1, "grpc_invalid_argument": 1, "timeout": 1}),
        ("json", {3: HOLD, 7: HOLD}, {"timeout_ms": 300}, {"timeout": 2}),
        ("json", dict.fromkeys(range(100), Reply(then="last")), {}, {}),
        (
            "json",
            dict.fromkeys(range(100), HOLD),
            {"timeout_ms": 700, "max_in_flight": 5},
            {"timeout": 5, "too_many_in_flight": 95},
        ),
    ],
)
def test_failures_are_counted_by_kind(api, replies, options, errors):
    with SERVERS[api](lambda number: replies.get(number, Reply())) as server:
        result = load(server.port, api, **options)
    assert result.errors == errors
    assert result.due == 100 == result.answered + sum(errors.values())
    assert result.sent == server.requests == 100 - errors.get("too_many_in_flight", 0)
    assert (result.latency_of_due.p99_ms is None) == (sum(errors.values()) > 1)
    if replies is KINDS:
        assert any("overloaded" in example for example in result.error_examples)
        assert any("1 scores for a request of 3 candidates" in example for example in result.error_examples)
    if replies.get(0) == Reply(then="last"):
        assert result.generator.processes[0].connections == 100


def test_requests_wait_for_one_of_few_connections():
    with loaded_http_server(lambda number: HOLD if number < 2 else Reply()) as server:
        result = load(server.port, rate=100, duration_s=0.4, timeout_ms=200, slo_ms=100, max_connections=2)
    # The server may see a new one before an old one's end; without the limit there would be 20.
    assert server.most_connections <= 3
    # The two that are held time out, and with them some that could never be sent.
    assert result.errors.keys() == {"timeout"}
    assert result.due == 40 == result.answered + result.errors["timeout"]
    assert result.sent == server.requests >= result.answered + 2


@pytest.mark.parametrize("hang_up", [True, False])
def test_without_a_server_every_request_fails(hang_up):
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(loaded_http_server(hang_up_at_once=True))
        if not hang_up:
            stack.close()
        result = load(server.port)
    assert sum(result.errors.values()) == 100
    assert result.errors.keys() <= ({"connect", "connection"} if hang_up else {"connect"})


def test_a_run_of_a_late_generator_is_not_valid(monkeypatch):
    class BusyPool(Pool):
        """Takes 250 ms of the generator's process for one answer."""

        reads = itertools.count()

        def scores(self, answer: bytes) -> list[float]:
            time.sleep(0.25 if next(self.reads) == 60 else 0)
            return super().scores(answer)

    with loaded_http_server() as server:
        result = load(server.port, duration_s=1, arrivals="poisson", pool_class=BusyPool)
    assert result.answered == server.requests == len([*arrival_times("poisson", 200, 1.0)]) != 200
    # About 50 requests were due in those 250 ms; p99 is the third latest.
    assert min(result.generator.lag_p99_ms, result.latency.p99_ms) >= 150
    assert not result.valid
    assert "late" in result.invalid_because[0]


class BrokenPool(Pool):
    def scores(self, answer: bytes) -> list[float]:
        raise ZeroDivisionError("a bug of the judge")


@pytest.mark.parametrize("api", ["json", "grpc"])
def test_a_bug_of_the_judge_ends_the_run(api):
    with SERVERS[api]() as server, pytest.raises(ExceptionGroup) as raised:
        load(server.port, api, pool_class=BrokenPool)
    assert raised.group_contains(ZeroDivisionError)


def test_the_timer_is_never_early():
    async def main() -> None:
        with contextlib.closing(PreciseTimer()) as timer:
            for when in (time.monotonic() + 0.0123, time.monotonic() - 5, 0.0, time.monotonic() + 0.001):
                await timer.until(when)
                assert time.monotonic() >= when

    asyncio.run(asyncio.wait_for(main(), 10))


def times(arrivals: str, rate: float, until_s: float, **options: int) -> np.ndarray:
    return np.array([*arrival_times(arrivals, rate, until_s, **options)])


@given(rate=st.floats(0.5, 5000), until_s=st.floats(0.01, 3), processes=st.integers(1, 5))
def test_constant_arrivals_of_all_processes_are_evenly_spaced(rate, until_s, processes):
    parts = [times("constant", rate, until_s, process=number, processes=processes) for number in range(processes)]
    expected = np.arange(0, int(until_s * rate) + 2) / rate
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), expected[expected < until_s])


@pytest.mark.parametrize("processes", [1, 3])
def test_poisson_arrivals_have_exponential_gaps(processes):
    parts = [times("poisson", 1000, 60, seed=4, process=number, processes=processes) for number in range(processes)]
    together = np.sort(np.concatenate(parts))
    assert together.max() < 60
    # The number in 60 s has mean 60000 and standard deviation sqrt(60000) = 245; the seed is fixed.
    assert abs(len(together) - 60_000) < 5 * 245
    gaps = np.diff(together)
    # An exponential gap is longer than the mean with probability 1/e, and than twice the mean with 1/e^2.
    assert (gaps > 1e-3).mean() == pytest.approx(np.exp(-1), abs=0.01)
    assert (gaps > 2e-3).mean() == pytest.approx(np.exp(-2), abs=0.01)
    np.testing.assert_array_equal(parts[0], times("poisson", 1000, 60, seed=4, processes=processes))
    assert times("poisson", 1000, 1, seed=5)[0] != parts[0][0]
