"""What is tried again, when, and how often: against servers that fail on purpose, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import closing, contextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from loader.errors import DeadlineExceededError, OverloadedError, ShardrankError, UnavailableError
from serving.client import AsyncClient, Client, RetryPolicy, transports
from serving.errors import (
    InternalError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from serving.proto.shardrank.v1 import ranking_pb2
from shardrank_testing.client_calls import CLIENTS, calling

MODEL = "plain"
DESCRIPTION = ranking_pb2.GetModelResponse(
    model=MODEL,
    version=3,
    schema_digest="d",
    features=[ranking_pb2.FeatureInfo(name="film", side="candidate", id_type="integer")],
)
ANSWER = ranking_pb2.RankResponse(model=MODEL, version=3, scores=[0.5, 0.25], order=[0, 1])
JSON_DESCRIPTION = json.dumps(
    {
        "model": MODEL,
        "version": 3,
        "schema_digest": "d",
        "features": [{"name": "film", "side": "candidate", "pooling": "sum", "weighted": False, "id_type": "integer"}],
        "limits": {"max_candidates": 4096, "not_a_number": ["x"]},
        "something_new": None,
    }
).encode()
both_clients = pytest.mark.parametrize("kind", CLIENTS)


class Time:
    """A clock that only sleeping moves; random numbers are all 1."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    async def sleep_on_loop(self, seconds: float) -> None:
        self.sleep(seconds)

    def options(self, kind: type) -> dict[str, Any]:
        sleep = self.sleep if kind is Client else self.sleep_on_loop
        return {"clock": self.clock, "sleep": sleep, "random": lambda: 1.0}


class GrpcStub:
    """A server whose first calls of Rank fail, with `pushback_ms` if it is not 0; then it answers `ANSWER`."""

    def __init__(
        self, failures: int, status: grpc.StatusCode, kind: str = "", message: str = "no", pushback_ms: int = 0
    ) -> None:
        self.ranks: list[ranking_pb2.RankRequest] = []
        self.delays_s: Iterator[float] = iter(())

        def rank(request: bytes, context: grpc.ServicerContext) -> bytes:
            self.ranks.append(ranking_pb2.RankRequest.FromString(request))
            time.sleep(next(self.delays_s, 0.0))
            if len(self.ranks) <= failures:
                pushback = (("grpc-retry-pushback-ms", str(pushback_ms)),) if pushback_ms else ()
                context.set_trailing_metadata(((("shardrank-error-kind", kind),) if kind else ()) + pushback)
                context.abort(status, message)
            return ANSWER.SerializeToString()

        self._methods = {
            "Rank": grpc.unary_unary_rpc_method_handler(rank),
            "GetModel": grpc.unary_unary_rpc_method_handler(lambda request, context: DESCRIPTION.SerializeToString()),
        }

    @contextmanager
    def running(self) -> Iterator[str]:
        server = grpc.server(futures.ThreadPoolExecutor(4))
        handler = grpc.method_handlers_generic_handler("shardrank.v1.RankingService", self._methods)
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"grpc://127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


class HttpStub(http.server.ThreadingHTTPServer):
    """A server that answers each POST with the next of some raw answers, the last one for ever; b"" hangs up.

    Attributes:
        posts: path, content type and body of the POSTs that came.
        may_answer: GETs are answered once it is set, as it is at first.
    """

    daemon_threads = True

    def __init__(self, answers: list[bytes]) -> None:
        self.posts: list[tuple[str, str, bytes]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        stub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                stub.may_answer.wait(10)
                # Who asked may have gone.
                with contextlib.suppress(OSError):
                    self.wfile.write(http_answer(200, JSON_DESCRIPTION))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                stub.posts.append((self.path, self.headers["content-type"], body))
                answer = answers[min(len(stub.posts), len(answers)) - 1]
                self.wfile.write(answer)
                self.close_connection = not answer

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()


def http_answer(status: int, body: bytes, headers: str = "") -> bytes:
    return f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body


def http_error(status: int, kind: str, headers: str = "", field: str | None = None) -> bytes:
    return http_answer(status, json.dumps({"error": {"kind": kind, "message": "no", "field": field}}).encode(), headers)


OK = http_answer(200, ANSWER.SerializeToString())


async def rank(call: Any, **options: Any) -> Any:
    return await call("rank", MODEL, {}, {"film": [3, 9]}, **options)


@both_clients
async def test_what_is_left_of_the_deadline_goes_with_each_attempt(kind):
    stub, timing = GrpcStub(2, grpc.StatusCode.UNAVAILABLE, "not_ready"), Time()

    with stub.running() as address:
        async with calling(kind, address, timeout_ms=900, **timing.options(kind)) as call:
            result = await rank(call)
            np.testing.assert_array_equal(result.scores, np.float32([0.5, 0.25]))
            assert (result.version, result.order.tolist()) == (3, [0, 1])
    # Random numbers are 1: the whole bound is waited, which doubles.
    assert timing.slept == [0.025, 0.05]
    assert [one.timeout_ms for one in stub.ranks] == [900, 875, 825]
    assert all(one.packed.schema_digest == "d" and one.num_candidates == 2 for one in stub.ranks)


@pytest.mark.parametrize(
    ("policy", "timeout_ms", "slept_ms", "sent"),
    [
        ({"max_attempts": 4, "backoff_ms": 10, "max_backoff_ms": 15}, 1000, [10, 15, 15], [1000, 990, 975, 960]),
        # No retry begins that would end past the deadline.
        ({"max_attempts": 99, "backoff_ms": 100, "max_backoff_ms": 100}, 250, [100, 100], [250, 150, 50]),
    ],
    ids=["the policy", "the deadline"],
)
@both_clients
async def test_attempts_end_with_the_last_error(kind, policy, timeout_ms, slept_ms, sent):
    retry = RetryPolicy(budget_burst=100, **policy)
    stub, timing = GrpcStub(99, grpc.StatusCode.UNAVAILABLE, "shard_unavailable", "no replica"), Time()
    with stub.running() as address:
        async with calling(kind, address, retry=retry, timeout_ms=timeout_ms, **timing.options(kind)) as call:
            with pytest.raises(UnavailableError, match="no replica") as found:
                await rank(call)
    assert found.value.kind == "shard_unavailable"
    assert [1000 * slept for slept in timing.slept] == pytest.approx(slept_ms)
    assert [request.timeout_ms for request in stub.ranks] == sent


def test_the_budget_bounds_the_retries_of_all_requests_together():
    stub, timing = GrpcStub(10_000, grpc.StatusCode.UNAVAILABLE), Time()
    with (
        stub.running() as address,
        Client(address, retry=RetryPolicy(max_attempts=5, budget_burst=6), **timing.options(Client)) as client,
    ):
        counts = []
        for _ in range(40):
            before = len(stub.ranks)
            with pytest.raises(UnavailableError):
                client.rank(MODEL, {}, {"film": [1]})
            counts.append(len(stub.ranks) - before)
    assert counts[:2] == [5, 3]
    # Then one retry for ten requests.
    assert sum(counts[2:]) - 38 in (3, 4)


@pytest.mark.parametrize(
    ("status", "kind", "error"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline_exceeded", DeadlineExceededError),
        (grpc.StatusCode.INVALID_ARGUMENT, "invalid_id", InvalidRequestError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded", OverloadedError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "memory_budget", InternalError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "header_too_large", InvalidRequestError),
        (grpc.StatusCode.UNAUTHENTICATED, "unauthenticated", UnauthenticatedError),
        (grpc.StatusCode.PERMISSION_DENIED, "permission_denied", PermissionDeniedError),
        (grpc.StatusCode.NOT_FOUND, "model_not_found", NotFoundError),
        (grpc.StatusCode.INTERNAL, "model_output", InternalError),
        (grpc.StatusCode.UNKNOWN, "", InternalError),
    ],
)
def test_other_errors_are_not_tried_again(status, kind, error):
    stub = GrpcStub(1, status, kind, "candidates.sparse.film[1]: it is wrong")
    with stub.running() as address, Client(address) as client:
        with pytest.raises(ShardrankError, match="it is wrong") as found:
            client.rank(MODEL, {}, {"film": [1]})
        assert type(found.value) is error
        assert found.value.grpc_status == status.name
        assert found.value.kind == (kind or "internal")
        assert found.value.field == ("candidates.sparse.film[1]" if error is InvalidRequestError else "")
    assert len(stub.ranks) == 1


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"error": {"message": "no", "kind": ' + b"[" * 100_000])
def test_an_http_error_of_another_form_has_its_beginning(body):
    error = transports.http_error(502, body, None)
    assert (type(error), error.kind) == (UnavailableError, "unavailable")
    assert str(error).startswith(f"HTTP status 502: {body[:300].decode()}")
    with pytest.raises(InternalError, match="does not describe a model"):
        transports._described(body)


@both_clients
@pytest.mark.parametrize("scheme", ["grpc", "http"])
async def test_a_server_that_hangs_gives_way_to_another_one(kind, scheme):
    """The kernel accepts connections for it, as for a process that is stopped."""
    stub = GrpcStub(0, grpc.StatusCode.OK) if scheme == "grpc" else HttpStub([OK] * 8)
    with socket.create_server(("127.0.0.1", 0)) as hung, contextlib.ExitStack() as stack:
        other = stack.enter_context(stub.running()) if isinstance(stub, GrpcStub) else stub.address
        addresses = [other, f"{scheme}://127.0.0.1:{hung.getsockname()[1]}"]
        # The only token pays for the retry: calls that were answered have given it back.
        retry = RetryPolicy(budget_burst=1, budget_ratio=0)
        async with calling(kind, addresses, timeout_ms=1500, retry=retry) as call:
            for _ in range(6):
                assert (await rank(call)).scores.tolist() == [0.5, 0.25]
        if isinstance(stub, HttpStub):
            stub.close()
    sent = stub.ranks if isinstance(stub, GrpcStub) else stub.posts
    assert len(sent) == 6


def test_a_server_that_hangs_comes_last_after_a_call_without_a_retry():
    stub, retry = GrpcStub(0, grpc.StatusCode.OK), RetryPolicy(max_attempts=1)
    with socket.create_server(("127.0.0.1", 0)) as hung, stub.running() as other:
        addresses = [f"grpc://127.0.0.1:{hung.getsockname()[1]}", other]
        with Client(addresses, timeout_ms=400, retry=retry, clock=lambda: 5.0) as client:
            with pytest.raises(DeadlineExceededError):
                client.describe(MODEL)
            assert [client.rank(MODEL, {}, {"film": [1]}).version for _ in range(4)] == [3] * 4


async def test_only_a_request_whose_retry_is_paid_for_gives_a_server_half_its_time():
    """With one token for two requests at once, one is asked of the other server, and one is waited for."""
    stub, retry = GrpcStub(0, grpc.StatusCode.OK), RetryPolicy(budget_burst=1, budget_ratio=0)
    with stub.running() as first, stub.running() as second:
        async with AsyncClient([first, second], timeout_ms=2000, retry=retry) as client:
            await client.describe(MODEL)
            stub.delays_s = iter([1.4, 1.4])
            ranked = await asyncio.gather(*(client.rank(MODEL, {}, {"film": [1]}) for _ in range(2)))
    assert ([result.version for result in ranked], len(stub.ranks)) == ([3, 3], 3)


def test_what_one_server_sheds_is_asked_of_another_one():
    """At once, whatever they send as pushback; which is waited for where all have shed."""
    full = [GrpcStub(99, grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded", pushback_ms=1000) for _ in range(2)]
    free, timing = GrpcStub(0, grpc.StatusCode.OK), Time()
    with full[0].running() as first, full[1].running() as second, free.running() as third:
        with Client([first, third], **timing.options(Client)) as client:
            assert [client.rank(MODEL, {}, {"film": [1]}).version for _ in range(4)] == [3] * 4
        assert timing.slept == [0.025] * len(full[0].ranks)
        both = Client([first, second], timeout_ms=5000, **timing.options(Client))
        with both as client, pytest.raises(OverloadedError):
            client.rank(MODEL, {}, {"film": [1]})
    assert timing.slept[-2:] == [0.025, 1.05]
    assert len(free.ranks) == 4


async def test_of_concurrent_requests_each_is_asked_of_the_other_server():
    """However they come to the round: what one server sheds is not asked of it again."""
    full = GrpcStub(99, grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded", pushback_ms=1000)
    free = GrpcStub(0, grpc.StatusCode.OK)
    with full.running() as first, free.running() as second:
        async with AsyncClient([first, second], retry=RetryPolicy(budget_burst=99), timeout_ms=5000) as client:
            ranked = await asyncio.gather(*(client.rank(MODEL, {}, {"film": [1]}) for _ in range(16)))
    assert [result.version for result in ranked] == [3] * 16
    assert len(free.ranks) == 16


@both_clients
async def test_over_http_503_and_connections_that_end_are_tried_again(kind):
    not_ready = http_error(503, "not_ready")

    for failures in ([not_ready, not_ready], [b"", b""], [not_ready, b""]):
        with closing(HttpStub([*failures, OK])) as stub:
            timing = Time()
            async with calling(kind, stub.address, **timing.options(kind)) as call:
                result = await rank(call, request_id="r")
                assert result.scores.tolist() == [0.5, 0.25]
            assert timing.slept == [0.025, 0.05]
            assert {post[:2] for post in stub.posts} == {("/v1/models/plain:rank", "application/x-protobuf")}
            sent = [ranking_pb2.RankRequest.FromString(body) for _, _, body in stub.posts]
            assert [one.timeout_ms for one in sent] == [1000, 975, 925]
            assert {one.packed.schema_digest for one in sent} == {"d"}


async def test_deadlines_that_pass_while_a_loop_is_held_up_cost_no_connection(monkeypatch):
    """At whatever step of a call: a connection that is lost by one stays lost, until none of the pool is left."""
    monkeypatch.setattr(transports, "_MAX_CONNECTIONS", 4)
    with closing(HttpStub([OK])) as stub:
        async with AsyncClient(stub.address, retry=RetryPolicy(max_attempts=1)) as client:
            for steps in range(40):
                calls = [asyncio.ensure_future(client.rank("m", {}, {"film": [1]}, timeout_ms=30)) for _ in range(20)]
                for _ in range(steps):
                    await asyncio.sleep(0)
                time.sleep(0.04)  # noqa: ASYNC251  # which is what is tested
                await asyncio.gather(*calls, return_exceptions=True)
            answers = await asyncio.gather(*(client.describe("m", timeout_ms=5000) for _ in range(20)))
    assert [answer.version for answer in answers] == [3] * 20


@pytest.mark.parametrize("steps", [0, 1, 3, 30])
async def test_calls_of_a_client_that_is_closed_say_so_and_leave_nothing(monkeypatch, steps):
    """However far they are: some wait for others to end, some for a connection, some for an answer."""
    monkeypatch.setattr(transports, "_MAX_CONNECTIONS", 2)
    with closing(HttpStub([OK])) as stub:
        stub.may_answer.clear()
        client = AsyncClient(stub.address)
        calls = [asyncio.create_task(client.describe("m", timeout_ms=5000)) for _ in range(5)]
        for _ in range(steps):
            await asyncio.sleep(0)
        calls[0].cancel()
        await client.close()
        failed = await asyncio.gather(*calls, return_exceptions=True)
        assert not [task for task in asyncio.all_tasks() if "_exchange" in repr(task)]
        stub.may_answer.set()
    assert isinstance(failed[0], asyncio.CancelledError)
    assert [getattr(error, "kind", error) for error in failed[1:]] == ["closed"] * 4


@both_clients
async def test_retry_after_is_waited_for_if_the_deadline_allows_it(kind):
    shed = http_error(503, "overloaded", "retry-after: 2\r\n")

    with closing(HttpStub([shed, OK])) as stub:
        timing = Time()
        async with calling(kind, stub.address, timeout_ms=5000, **timing.options(kind)) as call:
            await rank(call)
        assert timing.slept == [2.025]
    with closing(HttpStub([shed, OK])) as stub:
        timing = Time()
        async with calling(kind, stub.address, timeout_ms=1500, **timing.options(kind)) as call:
            with pytest.raises(OverloadedError) as found:
                await rank(call)
            assert (found.value.kind, found.value.retry_after_s) == ("overloaded", 2.0)
        assert (timing.slept, len(stub.posts)) == ([], 1)


def test_an_error_is_the_same_after_a_process_pool():
    error = transports.http_error(
        413, b'{"error": {"kind": "body_too_large", "message": "top_k: 9", "field": "top_k"}}', "2"
    )
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (InvalidRequestError, "top_k: 9", vars(error))
    assert (copy.kind, copy.http_status, copy.retry_after_s) == ("body_too_large", 413, 2.0)
