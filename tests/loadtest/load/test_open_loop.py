from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

import grpc
import pytest
import uvloop
from hdrh.histogram import HdrHistogram

from loadtest.load.config import OfferedLoad, RunConfig
from loadtest.load.generator import offer
from loadtest.load.open_loop import arrival_times
from loadtest.load.recorder import Done, Ready, Recorder, make_result
from loadtest.load.result import LoadResult
from loadtest.workloads.catalog import open_workload
from loadtest.workloads.payloads import Payloads
from shardrank_testing.loaded_server import (
    CANDIDATES,
    LoadedServer,
    Plan,
    Reply,
    loaded_grpc_server,
    loaded_http_server,
)

SERVERS = {"json": loaded_http_server, "grpc": loaded_grpc_server}
SCHEMES = {"json": "http", "grpc": "grpc"}


@contextlib.contextmanager
def server_of(api: str, plan: Plan = lambda number: Reply()) -> Iterator[LoadedServer]:
    with SERVERS[api](plan) as server:
        yield server


def load(
    port: int,
    api: str = "json",
    *,
    rate: float = 200,
    duration_s: float = 0.5,
    warmup_s: float = 0.0,
    **options: object,
) -> LoadResult:
    """One run of one process, in this process, and its result."""
    config = OfferedLoad(
        **{
            "target": f"{SCHEMES[api]}://127.0.0.1:{port}",
            "workload": "merlin-tiny:0.001",
            "arrivals": "constant",
            **options,
        }
    )
    run = RunConfig(rate=rate, duration_s=duration_s, warmup_s=warmup_s)
    pool = Payloads(open_workload(config.workload, candidates=str(CANDIDATES)), config.spoken, count=4)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        done = runner.run(offered(config, run, pool))
    return make_result(config, run, [Ready(requests=4, model=pool.model, workload=config.workload)], 0.0, [done])


async def offered(load: OfferedLoad, run: RunConfig, pool: Payloads) -> Done:
    times = arrival_times(load.arrivals, run.rate, run.until_s, seed=run.seed)
    return await offer(load, pool, times, Recorder(time.monotonic() + 0.05), cpu_s=(run.warmup_s, run.until_s))


def slower_than(result: LoadResult, ms: float, of: str = "latency") -> int:
    encoded = getattr(result, f"{of}_histogram")
    decoded = HdrHistogram.decode(encoded.encoded)
    return sum(
        one.count_at_value_iterated_to for one in decoded.get_recorded_iterator() if one.value_iterated_to >= ms * 1000
    )


def check_sums(result: LoadResult, due: int) -> None:
    """Every request that was due is in exactly one place."""
    assert result.due == due == result.answered + sum(result.errors.values())
    assert sum(second.due for second in result.time_line if not second.warmup) == due
    assert sum(second.ok for second in result.time_line if not second.warmup) == result.answered


@pytest.mark.parametrize("api", ["json", "grpc"])
def test_every_request_is_sent_once_and_answered(api):
    with server_of(api) as server:
        result = load(server.port, api, timeout_ms=5000)
    check_sums(result, 100)
    assert server.requests == 100 == result.answered == result.sent
    assert result.errors == {}
    assert result.throughput == 200
    assert result.latency == result.latency_of_due
    assert result.service.p99_ms <= result.latency.p99_ms


@pytest.mark.parametrize("api", ["json", "grpc"])
def test_every_request_has_a_trace_and_an_id_of_its_own_unless_they_shall_be_the_same(api):
    with server_of(api) as server:
        varied = load(server.port, api, timeout_ms=5000)
        same = load(server.port, api, timeout_ms=5000, varied=False)
    assert (varied.varied, same.varied) == (True, False)
    heads, others = server.heads[:100], server.heads[100:]
    assert len(others) == 100
    for name in ("traceparent", "x-request-id"):
        # The pool has 4 requests: each was sent 25 times, never again under the same head.
        assert len({one[name] for one in heads}) == 100
        assert not any(name in one for one in others)
    assert len({tuple(sorted(one.items())) for one in others}) == 1 if api == "grpc" else 4


@pytest.mark.parametrize("api", ["json", "grpc"])
def test_a_stall_is_in_the_latency_of_all_that_came_meanwhile(api):
    def plan(number: int) -> Reply:
        if number == 60:
            # The whole server, as a collection of garbage or a swap would do it.
            time.sleep(0.3)
        return Reply()

    with server_of(api, plan) as server:
        result = load(server.port, api, rate=100, duration_s=2, timeout_ms=5000)
    check_sums(result, 200)
    assert result.answered == 200
    # One request each 10 ms meets the stall with 300, 290, ... ms of it left. p99 of 200 is the third highest.
    assert result.latency.p99_ms >= 280
    assert result.latency.max_ms >= 300
    assert slower_than(result, 100) >= 21
    assert slower_than(result, 200) >= 11
    # A busy machine only adds: what is below is what it would have to add to a request without a stall.
    assert result.latency.p50_ms < 100


def test_a_stall_is_in_the_latency_though_one_connection_takes_them_one_by_one():
    def plan(number: int) -> Reply:
        if number == 60:
            time.sleep(0.3)
        return Reply()

    with server_of("json", plan) as server:
        result = load(server.port, rate=100, duration_s=2, timeout_ms=5000, max_connections=1)
    check_sums(result, 200)
    assert server.most_connections == 1
    assert result.generator.processes[0].connections == 1
    assert result.latency.p99_ms >= 280
    assert slower_than(result, 200) >= 11
    # The others waited for the connection: a closed loop would have seen one slow request and nothing else.
    assert slower_than(result, 200, of="service") * 4 < slower_than(result, 200)
    # That wait is not the generator's lateness.
    assert result.generator.lag_p99_ms < 280


def test_beyond_the_limit_of_connections_requests_wait_and_are_not_forgotten():
    with server_of("json", lambda number: Reply(then="hold" if number < 2 else "keep")) as server:
        result = load(server.port, rate=100, duration_s=0.4, timeout_ms=200, slo_ms=100, max_connections=2)
    check_sums(result, 40)
    # The server may see a new one before an old one's end; without the limit there would be 20.
    assert server.most_connections <= 3
    # The two that are held time out, and with them some that could never be sent.
    assert result.errors.keys() == {"timeout"}
    assert result.errors["timeout"] >= 2
    assert result.sent == server.requests >= result.answered + 2
    # Their connections can't be used again.
    assert result.generator.processes[0].connections in (3, 4)


def test_a_request_beyond_those_in_flight_fails_unsent():
    with server_of("json", lambda number: Reply(then="hold")) as server:
        result = load(server.port, rate=100, duration_s=0.3, timeout_ms=600, max_in_flight=5)
    check_sums(result, 30)
    assert result.errors == {"timeout": 5, "too_many_in_flight": 25}
    assert result.sent == server.requests == 5
    assert result.time_line[0].in_flight == 0
    assert result.latency.p50_ms is result.latency_of_due.p50_ms is None


def test_what_is_out_at_the_end_of_a_second_is_in_its_time_line():
    with server_of("json", lambda number: Reply(then="hold" if number in (3, 7) else "keep")) as server:
        result = load(server.port, rate=20, duration_s=2, timeout_ms=1500)
    check_sums(result, 40)
    # Requests 3 and 7 were due after 150 and 350 ms, and were given up 1.5 s later.
    assert [(second.due, second.errors) for second in result.time_line] == [(20, 2), (20, 0)]
    assert result.time_line[0].in_flight >= 2
    assert result.errors == {"timeout": 2}


def test_failures_are_counted_by_kind():
    plans = {
        1: Reply(status=503, body=b'{"error": {"kind": "overloaded"}}'),
        2: Reply(status=404),
        3: Reply(body=b"not JSON"),
        4: Reply(body=b'{"scores": [0.5]}'),
        5: Reply(then="hang_up"),
        6: Reply(then="noise"),
        7: Reply(status=503),
    }
    with server_of("json", lambda number: plans.get(number, Reply())) as server:
        result = load(server.port, timeout_ms=5000)
    check_sums(result, 100)
    assert result.errors == {"bad_answer": 2, "connection": 2, "http_404": 1, "http_503": 2}
    assert any("overloaded" in example for example in result.error_examples)
    assert any("1 scores for a request of 3 candidates" in example for example in result.error_examples)
    # 93% were answered: the 99th of a hundred that were due was not.
    assert result.latency_of_due.p50_ms is not None
    assert result.latency_of_due.p99_ms is None


def test_failures_over_grpc_are_counted_by_status():
    plans = {
        1: Reply(grpc_status=grpc.StatusCode.UNAVAILABLE),
        2: Reply(grpc_status=grpc.StatusCode.INVALID_ARGUMENT),
        3: Reply(then="hold"),
    }
    with server_of("grpc", lambda number: plans.get(number, Reply())) as server:
        result = load(server.port, "grpc", timeout_ms=1000)
    check_sums(result, 100)
    assert result.errors == {"grpc_unavailable": 1, "grpc_invalid_argument": 1, "timeout": 1}
    assert any("as planned" in example for example in result.error_examples)


def test_a_server_that_ends_each_connection_gets_a_new_one_for_each_request():
    with server_of("json", lambda number: Reply(then="last")) as server:
        result = load(server.port, rate=100, timeout_ms=5000)
    check_sums(result, 50)
    assert result.errors == {}
    assert result.generator.processes[0].connections >= 50


def test_without_a_server_every_request_fails_to_connect():
    with loaded_http_server() as server:
        port = server.port
    result = load(port)
    check_sums(result, 100)
    assert result.errors == {"connect": 100}
    assert result.sent == 0


def test_a_server_that_hangs_up_at_once_is_a_failure_to_connect_or_of_the_connection():
    with loaded_http_server(hang_up_at_once=True) as server:
        result = load(server.port)
    check_sums(result, 100)
    assert result.answered == 0
    assert result.errors.keys() <= {"connect", "connection"}


def test_the_warm_up_is_cut_off_by_intended_time():
    def plan(number: int) -> Reply:
        if number == 45:
            # Due 50 ms before the end of the warm-up, answered after it.
            time.sleep(0.2)
        return Reply()

    with server_of("json", plan) as server:
        result = load(server.port, rate=100, warmup_s=0.5, duration_s=1, timeout_ms=5000)
    assert server.requests == 150
    assert result.due == 100 == result.answered
    assert [second.due for second in result.time_line] == [100, 50]
    assert [second.warmup for second in result.time_line] == [True, False]
    # Those that were due later and met the rest of the stall count, 15 of them.
    assert slower_than(result, 100) >= 5
    assert result.latency.max_ms >= 150


def test_poisson_arrivals_are_all_sent():
    with server_of("json") as server:
        result = load(server.port, rate=200, duration_s=1, arrivals="poisson", timeout_ms=5000)
    expected = sum(map(len, arrival_times("poisson", 200, 1.0, seed=0)))
    assert result.due == server.requests == expected != 200


def test_a_generator_that_comes_late_says_so_and_its_run_is_not_valid():
    with server_of("json") as server:
        config = OfferedLoad(target=f"http://127.0.0.1:{server.port}", arrivals="constant", timeout_ms=5000)
        run = RunConfig(rate=200, duration_s=1, warmup_s=0)
        pool = Payloads(open_workload("merlin-tiny:0.001", candidates=str(CANDIDATES)), "json", count=4)

        async def measured() -> Done:
            # Something else in the generator's process that takes its time.
            asyncio.get_running_loop().call_at(asyncio.get_running_loop().time() + 0.3, time.sleep, 0.25)
            return await offered(config, run, pool)

        found = asyncio.run(measured())
    result = make_result(config, run, [Ready(requests=4, model="m", workload="w")], 0.0, [found])
    # 50 of 200 requests were due in those 250 ms; p99 is the third latest.
    assert result.generator.lag_p99_ms >= 235
    assert result.latency.p99_ms >= 235
    assert not result.valid
    assert "late" in result.invalid_because[0]
    assert result.answered == 200
    assert found.records.rows.size == 200


class BrokenPayloads(Payloads):
    def scores(self, answer: bytes) -> list[float]:
        raise ZeroDivisionError("a defect of the check")


@pytest.mark.parametrize("api", ["json", "grpc"])
def test_a_defect_of_the_generator_is_not_taken_for_an_answer(api):
    with server_of(api) as server:
        config = OfferedLoad(target=f"{SCHEMES[api]}://127.0.0.1:{server.port}", timeout_ms=5000)
        pool = BrokenPayloads(open_workload("merlin-tiny:0.001", candidates=str(CANDIDATES)), config.spoken, count=4)

        run = RunConfig(rate=100, duration_s=0.3, warmup_s=0)
        with (
            pytest.raises(ExceptionGroup) as raised,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runner.run(offered(config, run, pool))
    assert raised.group_contains(ZeroDivisionError)
