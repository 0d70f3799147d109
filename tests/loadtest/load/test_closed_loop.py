"""The closed loop, the processes that it runs in, and the comparison of scores."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest
import uvloop

from loadtest.errors import GeneratorError, LateAnswerError, RequestFailedError, ScoresDifferError
from loadtest.load.closed_loop import ClosedLoop, Weighed, keep_busy
from loadtest.load.config import LoadTarget, OfferedLoad
from loadtest.load.generator import Generators, ask_scores, share_of
from loadtest.load.senders import AnswerCheck, Failure, Outgoing, Sender, make_sender
from loadtest.servers import check_scores
from loadtest.workloads.catalog import BenchShape, bench_payloads
from loadtest.workloads.payloads import Payloads
from shardrank_testing.loaded_server import CANDIDATES as LOADED_CANDIDATES
from shardrank_testing.loaded_server import SCORES, Reply, loaded_grpc_server, loaded_http_server

SHAPE = BenchShape(features=3, embedding_dim=8, rows=200, dense=2, candidates="7")
CANDIDATES = 7


def test_a_worker_that_ends_is_told_with_the_end_of_its_log() -> None:
    with (
        Generators() as worker,
        pytest.raises(GeneratorError, match=r"(?s)a bug of the generator:.*ZeroDivisionError"),
    ):
        worker.call(share_of, [(1, 0, 0)], 60)


def test_a_call_that_is_not_done_in_time_is_an_error_and_its_answer_is_not_taken_for_the_next_ones() -> None:
    with Generators(2) as workers:
        with pytest.raises(GeneratorError, match="share_of was not done within 0 s"):
            workers.call(share_of, [(100, 0, 2), (100, 1, 2)], 0)
        assert workers.call(share_of, [(7, 0, 2), (7, 1, 2)], 60) == (4, 3)


class CountingServer:
    """Answers HTTP requests once `together` of them are there, so that a client with fewer in flight waits for ever."""

    def __init__(self, together: int, answer: bytes, status: int = 200) -> None:
        self._together = together
        self._answer = b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%s" % (status, len(answer), answer)
        self._waiting: list[asyncio.StreamWriter] = []
        self.answered = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                writer.close()
                return
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.split(b":")[1]))
            self._waiting.append(writer)
            if len(self._waiting) == self._together:
                for one in self._waiting:
                    one.write(self._answer)
                self.answered += len(self._waiting)
                self._waiting.clear()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self.handle, "127.0.0.1", 0)
        async with server:
            yield server.sockets[0].getsockname()[1]


def weigh(port: int, in_flight: int, pool: Payloads):
    """Keep a server busy for a moment; it is this very process."""
    load = OfferedLoad(target=f"{'grpc' if pool.is_grpc else 'http'}://127.0.0.1:{port}", api=pool.api)
    times = {"warmup_s": 0.05, "seconds": 0.1}
    return keep_busy(load, pool, in_flight=in_flight, **times, process_ids=(os.getpid(),))


ANSWER = b'{"model": "bench-mlp", "version": 1, "scores": [%s], "order": []}'


def scores(count: int) -> bytes:
    return ANSWER % b", ".join([b"0.5"] * count)


def test_the_client_always_has_all_its_requests_out_and_counts_them_after_the_warm_up() -> None:
    server = CountingServer(together=5, answer=scores(CANDIDATES))

    async def main() -> Weighed:
        async with server.listening() as port:
            return await weigh(port, 5, bench_payloads(SHAPE, "mlp", 1, "json"))

    told = asyncio.run(main())
    assert 0 < told.requests < server.answered
    assert told.seconds >= 0.1
    assert told.p50_ms <= told.p99_ms
    # Server and client are this very process.
    assert told.server_cpu_s == pytest.approx(told.client_cpu_s, abs=0.03)
    assert told.server_cpu.keys() == {"serve"}


def test_in_the_closed_loop_each_request_has_a_trace_and_an_id_of_its_own() -> None:
    with loaded_grpc_server() as server:
        shape = SHAPE.model_copy(update={"candidates": str(LOADED_CANDIDATES)})
        told = uvloop.run(weigh(server.port, 2, bench_payloads(shape, "mlp", 1, "grpc")))
    for name in ("traceparent", "x-request-id"):
        assert len({one[name] for one in server.heads}) == len(server.heads) > told.requests


@pytest.mark.parametrize(
    ("answer", "status", "problem"),
    [
        (scores(6), 200, "6 scores for a request of 7"),
        (b"no", 503, "http_503: no"),
        (b"no", 504, "http_504: no"),
        (b"{", 200, "not one to a rank"),
    ],
)
def test_an_answer_that_is_none_ends_the_measurement(answer, status, problem) -> None:
    server = CountingServer(together=1, answer=answer, status=status)

    async def main() -> None:
        async with server.listening() as port:
            await weigh(port, 1, bench_payloads(SHAPE, "mlp", 1, "json"))

    with pytest.raises(RequestFailedError, match=f"json: .*{problem}") as failure:
        asyncio.run(main())
    # Who can't answer in time is asked too much; who answers wrong is not.
    assert isinstance(failure.value, LateAnswerError) == (status == 504)


def test_a_deadline_over_grpc_is_told_from_other_failures() -> None:
    def fail(status: grpc.StatusCode) -> None:
        with loaded_grpc_server(lambda number: Reply(grpc_status=status)) as server:
            uvloop.run(weigh(server.port, 2, bench_payloads(SHAPE, "mlp", 1, "grpc")))

    with pytest.raises(LateAnswerError, match="grpc: timeout: "):
        fail(grpc.StatusCode.DEADLINE_EXCEEDED)
    with pytest.raises(RequestFailedError, match="grpc: grpc_unavailable: ") as failure:
        fail(grpc.StatusCode.UNAVAILABLE)
    assert not isinstance(failure.value, LateAnswerError)


def test_scores_that_are_not_the_models_are_refused() -> None:
    right = np.full(CANDIDATES, 0.5, np.float32)
    check_scores("json", right, right, 1e-6)
    with pytest.raises(
        ScoresDifferError, match=r"json, candidate 0: .* expected 0\.6.* differ by 0\.1, allowed is 1e-06"
    ):
        check_scores("json", right, right + np.float32(0.1), 1e-6)
    with pytest.raises(ScoresDifferError, match="json: 7 scores, 6 expected"):
        check_scores("json", right, right[1:], 1e-6)


def test_targets_of_a_closed_loop_are_swapped_while_it_runs() -> None:
    pool = bench_payloads(SHAPE.model_copy(update={"candidates": str(LOADED_CANDIDATES)}), "mlp", 1, "json")
    verdicts: list[tuple[float, str]] = []

    def record(request: Outgoing, failure: Failure | None) -> None:
        verdicts.append((request.ended - request.intended, failure.kind if failure else request.verdict))

    def judge(request: Outgoing, body: bytes) -> Failure | None:
        request.verdict = "right"
        return AnswerCheck(pool)(request, body)

    async def main(ports: list[int]) -> None:
        senders: list[Sender] = [
            await make_sender(LoadTarget(scheme="http", host="127.0.0.1", port=port), pool, judge) for port in ports
        ]
        loop = ClosedLoop(lambda number: senders[number % len(senders)], record, in_flight=3, begin=time.monotonic())
        async with loop.running():
            await asyncio.sleep(0.1)
            left = senders.pop(0)
            await asyncio.sleep(0.1)
            await left.close()
            seen.append(first.requests)
            await asyncio.sleep(0.1)
        await senders[0].close()

    seen: list[int] = []
    with loaded_http_server() as first, loaded_http_server() as second:
        uvloop.run(main([first.port, second.port]))
        assert 0 < first.requests == seen[0] < second.requests
        assert len(verdicts) == first.requests + second.requests
    assert {kind for _, kind in verdicts} == {"right"}
    assert min(latency for latency, _ in verdicts) > 0


@pytest.mark.parametrize(("api", "server_of"), [("json", loaded_http_server), ("grpc", loaded_grpc_server)])
def test_scores_of_one_request_are_returned(api, server_of) -> None:
    pool = bench_payloads(SHAPE, "mlp", 1, api, 2)
    with server_of() as server:
        load = OfferedLoad(target=f"{'grpc' if api == 'grpc' else 'http'}://127.0.0.1:{server.port}")
        assert ask_scores(load, pool, 1).tolist() == SCORES
    with pytest.raises(RequestFailedError, match=r"no scores of request 1: (connect|grpc_unavailable)"):
        ask_scores(load, pool, 1)
