"""The parts of the serving benchmark: the closed loop, the limit, and the processes that they run in."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from loadtest.errors import (
    GeneratorError,
    LateAnswerError,
    LoadError,
    RequestFailedError,
    ScoresDifferError,
    WorkloadError,
)
from loadtest.load.closed_loop import Weighed, keep_busy
from loadtest.load.config import OfferedLoad
from loadtest.load.generator import share_of
from loadtest.load.workers import Workers
from loadtest.servers import check_scores
from loadtest.serving_limit import Limit, LimitConfig, LimitProcess, batch_sizes
from loadtest.workloads.catalog import BenchShape, bench_payloads, bench_spec
from loadtest.workloads.payloads import Payloads, changing_headers
from loadtest.workloads.prepare import write_random_snapshot
from serving.embedded import Ranker
from shardrank_testing.loaded_server import CANDIDATES as LOADED_CANDIDATES
from shardrank_testing.loaded_server import Reply, loaded_grpc_server

SHAPE = BenchShape(features=3, embedding_dim=8, rows=200, dense=2, candidates="7")
CANDIDATES = 7
HEADERS = changing_headers(True, 0)


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    store = tmp_path_factory.mktemp("store")
    return {head: write_random_snapshot(bench_spec(SHAPE, head), store) for head in ("mlp", "dlrm")}


def limit_config(snapshot: Path, head: str) -> LimitConfig:
    return LimitConfig(snapshot=snapshot, shape=SHAPE, head=head, dtype="float32")


@pytest.mark.parametrize("varied", [True, False])
@pytest.mark.parametrize("head", ["mlp", "dlrm"])
@pytest.mark.parametrize("hotness", [1, 4])
def test_the_limit_gives_the_scores_of_a_served_model_for_the_same_request(snapshots, head, hotness, varied) -> None:
    shape = SHAPE.model_copy(update={"candidates": "2-9:5", "varied": varied})
    config = replace(limit_config(snapshots[head], head), shape=shape)
    limit, pool = Limit(config), bench_payloads(shape, head, hotness, "json", 5)
    assert len({one.num_candidates for one in pool}) > 1
    with Ranker.open(snapshots[head], dtype="float32") as ranker:
        for number in range(5):
            expected = ranker.rank(json.loads(pool[number].body))["scores"]
            found = asyncio.run(limit.score(hotness, number))
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@given(mean=st.floats(1, 64))
def test_batches_of_two_sizes_keep_to_any_mean(mean: float) -> None:
    sizes = list(itertools.islice(batch_sizes(mean), 200))
    assert set(sizes) <= {int(mean), int(mean) + 1}
    for count, total in enumerate(itertools.accumulate(sizes), start=1):
        assert abs(total - mean * count) <= 1


def test_the_limit_scores_whole_batches_and_tells_what_they_took(snapshots) -> None:
    with Workers() as worker:
        limit = LimitProcess(worker, limit_config(snapshots["mlp"], "mlp"))
        told = limit.compute(hotness=1, batch_requests=2.5, seconds=0.05)
        assert told.requests >= 2
        assert told.seconds >= 0.05
        assert 0 < told.cpu_s <= told.seconds * (os.cpu_count() or 1) + 0.1
        assert told.batch_p50_ms > 0
        assert len(limit.score(hotness=1, request=0)) == CANDIDATES


def test_a_limit_without_its_snapshot_says_so(tmp_path) -> None:
    config = LimitConfig(tmp_path / "none" / "1", SHAPE, "mlp", "float32")
    with Workers() as worker, pytest.raises(LoadError, match="none"):
        LimitProcess(worker, config).score(hotness=1, request=0)


def test_a_worker_that_ends_is_told_with_the_end_of_its_log() -> None:
    with (
        Workers() as worker,
        pytest.raises(GeneratorError, match=r"(?s)process 0 ended: exit code 1.*ZeroDivisionError"),
    ):
        worker.call(share_of, [(1, 0, 0)], 60)


def test_a_call_that_is_not_done_in_time_is_an_error_and_its_answer_is_not_taken_for_the_next_ones() -> None:
    with Workers(2) as workers:
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


def weigh(port: int, in_flight: int, pool: Payloads, headers=HEADERS):
    """Keep a server busy for a moment; it is this very process."""
    load = OfferedLoad(target=f"{'grpc' if pool.is_grpc else 'http'}://127.0.0.1:{port}", api=pool.api)
    times = {"warmup_s": 0.05, "seconds": 0.1}
    return keep_busy(load, pool, headers, in_flight=in_flight, **times, process_ids=(os.getpid(),))


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
        told = uvloop.run(weigh(server.port, 2, bench_payloads(shape, "mlp", 1, "grpc"), changing_headers(True, 5)))
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


def test_a_pool_that_would_be_cut_short_is_refused_since_the_limit_computes_all_of_it(monkeypatch) -> None:
    monkeypatch.setattr("loadtest.workloads.catalog.MAX_BENCH_BYTES", 2000)
    with pytest.raises(WorkloadError, match="hotness 4: 64 requests of json are more than 2000 bytes"):
        bench_payloads(SHAPE, "mlp", 4, "json")
