"""The closed loop, and the processes that it runs in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from operator import floordiv

import grpc
import pytest
import uvloop

from loadtest.errors import LoadError, RequestFailedError
from loadtest.load.config import OfferedLoad
from loadtest.load.generator import Generators
from loadtest.load.loops import Weighed, keep_busy
from loadtest.workloads.catalog import BenchShape, BenchWorkload, bench_payloads
from loadtest.workloads.payloads import GRPC_APIS, Pool
from shardrank_testing.loaded_server import CANDIDATES as LOADED_CANDIDATES
from shardrank_testing.loaded_server import Reply, loaded_grpc_server, loaded_http_server

CANDIDATES = 7
SHAPE = BenchShape(features=3, embedding_dim=8, rows=200, dense=2, candidates=f"{CANDIDATES}")
SMALL = BenchWorkload(shape=SHAPE, head="mlp", hotness=1)
LOADED_SHAPE = SHAPE.model_copy(update={"candidates": str(LOADED_CANDIDATES)})
LOADED = BenchWorkload(shape=LOADED_SHAPE, head="mlp", hotness=1)


def test_processes_report_bugs_and_calls_that_take_too_long() -> None:
    """The answer of a call that was not awaited is not taken for the next one's."""
    with Generators(2) as generators:
        with pytest.raises(ZeroDivisionError):
            generators.call(floordiv, [(1, 0)], 60)
        with pytest.raises(LoadError, match="sleep was not done within 0 s"):
            generators.call(time.sleep, [(0.3,), (0.3,)], 0)
        assert generators.call(floordiv, [(8, 2), (7, 2)], 60) == (4, 3)


class CountingServer:
    """Answers HTTP requests once `together` of them are there, so that a client with fewer in flight waits for ever."""

    def __init__(self, together: int, answer: bytes) -> None:
        self._together = together
        self._answer = b"HTTP/1.1 200 x\r\ncontent-length: %d\r\n\r\n%s" % (len(answer), answer)
        self._waiting: list[asyncio.StreamWriter] = []
        self.answered = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError), contextlib.closing(writer):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"content-length: (\d+)", head)
                await reader.readexactly(int(length[1]))
                self._waiting.append(writer)
                if len(self._waiting) == self._together:
                    for waiting in self._waiting:
                        waiting.write(self._answer)
                    self.answered += len(self._waiting)
                    self._waiting.clear()


def weigh(port: int, in_flight: int, pool: Pool):
    """Keep a server busy for a moment; it is this very process."""
    load = OfferedLoad(target=f"{'grpc' if pool.api in GRPC_APIS else 'http'}://127.0.0.1:{port}", api=pool.api)
    times = {"warmup_s": 0.05, "seconds": 0.1}
    return keep_busy(load, pool, in_flight=in_flight, **times, process_ids=(os.getpid(),))


def test_all_requests_are_always_out_and_count_after_the_warm_up() -> None:
    counting = CountingServer(5, json.dumps({"version": 1, "scores": [0.5] * CANDIDATES}).encode())

    async def main() -> Weighed:
        async with await asyncio.start_server(counting.handle, "127.0.0.1", 0) as server:
            return await weigh(server.sockets[0].getsockname()[1], 5, bench_payloads(SMALL, "json"))

    weighed = asyncio.run(main())
    assert 0 < weighed.requests < counting.answered
    assert weighed.seconds >= 0.1
    assert weighed.p50_ms <= weighed.p99_ms
    # Server and client are this very process.
    assert sum(weighed.server_cpu_s.values()) == pytest.approx(weighed.client_cpu_s, abs=0.03)
    assert weighed.server_cpu_s.keys() == {"serve"}


def test_each_request_has_a_trace_and_an_id_of_its_own() -> None:
    with loaded_grpc_server() as server:
        weighed = uvloop.run(weigh(server.port, 2, bench_payloads(LOADED, "grpc")))
    for name in ("traceparent", "x-request-id"):
        assert len({head[name] for head in server.heads}) == len(server.heads) > weighed.requests


@pytest.mark.parametrize(
    ("api", "reply", "problem"),
    [
        ("json", Reply(), "bad_answer: 3 scores for a request of 7"),
        ("json", Reply(status=503, body=b"no"), "http_503: no"),
        ("json", Reply(status=504, body=b"no"), "http_504: no"),
        ("json", Reply(body=b"{"), "bad_answer: the answer is not one to a rank"),
        ("grpc", Reply(grpc_status=grpc.StatusCode.DEADLINE_EXCEEDED), "timeout: "),
        ("grpc", Reply(grpc_status=grpc.StatusCode.UNAVAILABLE), "grpc_unavailable: "),
    ],
)
def test_a_failed_request_ends_the_measurement(api, reply, problem) -> None:
    server_of = loaded_http_server if api == "json" else loaded_grpc_server
    with server_of(lambda number: reply) as server, pytest.raises(RequestFailedError, match=problem) as failure:
        uvloop.run(weigh(server.port, 1, bench_payloads(SMALL, api)))
    assert str(failure.value).startswith(f"{api}: ")
    assert str(failure.value).endswith(" (1 in flight)")
