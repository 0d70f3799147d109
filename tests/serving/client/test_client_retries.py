"""What is tried again, when, and how often: against servers that fail on purpose, over real sockets."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import closing, contextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from serving.client import (
    Client,
    ClientError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RetryPolicy,
    UnauthenticatedError,
    UnavailableError,
)
from serving.proto.shardrank.v1 import ranking_pb2
from shardrank_testing.client_calls import CLIENTS, calling

pytestmark = pytest.mark.anyio

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
    """Answers Rank with what `fail` raises as long as it does, then with `ANSWER`.

    Attributes:
        ranks: the requests that came.
        metadata: of the last call.
    """

    def __init__(self, fail: Callable[[int, grpc.ServicerContext], None]) -> None:
        self.ranks: list[ranking_pb2.RankRequest] = []
        self.metadata: dict[str, Any] = {}

        def rank(request: bytes, context: grpc.ServicerContext) -> bytes:
            self.ranks.append(ranking_pb2.RankRequest.FromString(request))
            self.metadata = dict(context.invocation_metadata())
            fail(len(self.ranks), context)
            return ANSWER.SerializeToString()

        methods = {
            "Rank": grpc.unary_unary_rpc_method_handler(rank),
            "GetModel": grpc.unary_unary_rpc_method_handler(lambda request, context: DESCRIPTION.SerializeToString()),
        }
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        handler = grpc.method_handlers_generic_handler("shardrank.v1.RankingService", methods)
        self.server.add_generic_rpc_handlers((handler,))

    @contextmanager
    def running(self) -> Iterator[str]:
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        try:
            yield f"grpc://127.0.0.1:{port}"
        finally:
            self.server.stop(None).wait()


def failing(times: int, status: grpc.StatusCode, kind: str = "", message: str = "no") -> Callable[..., None]:
    def fail(number: int, context: grpc.ServicerContext) -> None:
        if number <= times:
            if kind:
                context.set_trailing_metadata((("shardrank-error-kind", kind),))
            context.abort(status, message)

    return fail


class HttpStub:
    """A socket that answers each POST with the next of some raw answers, the last one for ever; b"" hangs up.

    Attributes:
        posts: head and body of the POSTs that came.
        connections: how many were accepted.
    """

    def __init__(self, answers: list[bytes]) -> None:
        self._answers = answers
        self.posts: list[bytes] = []
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._open:
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(peer)
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rb") as stream:
            while head := b"".join(iter(stream.readline, b"\r\n") if stream.peek(1) else ()):
                length = next(
                    (line for line in head.splitlines() if line.lower().startswith(b"content-length:")), b":0"
                )
                body = stream.read(int(length.split(b":")[1]))
                if head.startswith(b"GET"):
                    peer.sendall(http_answer(200, JSON_DESCRIPTION))
                    continue
                self.posts.append(head + b"\r\n" + body)
                answer = self._answers[min(len(self.posts), len(self._answers)) - 1]
                if not answer:
                    return
                peer.sendall(answer)


def http_answer(status: int, body: bytes, headers: str = "") -> bytes:
    return f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body


def http_error(status: int, kind: str, headers: str = "", field: str | None = None) -> bytes:
    return http_answer(status, json.dumps({"error": {"kind": kind, "message": "no", "field": field}}).encode(), headers)


OK = http_answer(200, ANSWER.SerializeToString())


async def rank(call: Any, **options: Any) -> Any:
    return await call("rank", MODEL, {}, {"film": [3, 9]}, **options)


@both_clients
async def test_a_server_that_is_unavailable_for_two_calls_is_asked_a_third_time_with_what_is_left_of_the_deadline(kind):
    stub, timing = GrpcStub(failing(2, grpc.StatusCode.UNAVAILABLE, "not_ready")), Time()

    with stub.running() as address:
        async with calling(kind, address, timeout_ms=900, **timing.options(kind)) as call:
            result = await rank(call)
            np.testing.assert_array_equal(result.scores, np.float32([0.5, 0.25]))
            assert (result.version, result.order.tolist()) == (3, [0, 1])
    # Random numbers are 1: the whole bound is waited, which doubles.
    assert timing.slept == [0.025, 0.05]
    assert [one.timeout_ms for one in stub.ranks] == [900, 875, 825]
    assert all(one.packed.schema_digest == "d" and one.num_candidates == 2 for one in stub.ranks)


@both_clients
async def test_attempts_end_with_the_policy_and_the_error_is_the_last_one(kind):
    stub, timing = GrpcStub(failing(9, grpc.StatusCode.UNAVAILABLE, "shard_unavailable", "no replica")), Time()

    with stub.running() as address:
        retry = RetryPolicy(max_attempts=4, backoff_ms=10, max_backoff_ms=15)
        async with calling(kind, address, retry=retry, **timing.options(kind)) as call:
            with pytest.raises(UnavailableError, match="no replica") as found:
                await rank(call)
            assert found.value.kind == "shard_unavailable"
    assert timing.slept == [0.01, 0.015, 0.015]
    assert len(stub.ranks) == 4


@both_clients
async def test_no_retry_begins_that_would_end_past_the_deadline(kind):
    stub, timing = GrpcStub(failing(9, grpc.StatusCode.UNAVAILABLE)), Time()

    with stub.running() as address:
        retry = RetryPolicy(max_attempts=100, backoff_ms=100, max_backoff_ms=100, budget_burst=100)
        async with calling(kind, address, retry=retry, timeout_ms=250, **timing.options(kind)) as call:
            with pytest.raises(UnavailableError):
                await rank(call)
    assert timing.slept == [0.1, 0.1]
    assert [one.timeout_ms for one in stub.ranks] == [250, 150, 50]


def test_the_budget_bounds_the_retries_of_all_requests_together():
    stub, timing = GrpcStub(failing(10_000, grpc.StatusCode.UNAVAILABLE)), Time()
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
def test_whatever_else_ends_a_call_is_not_tried_again_and_keeps_its_kind(status, kind, error):
    stub = GrpcStub(failing(1, status, kind, "candidates.sparse.film[1]: it is wrong"))
    with stub.running() as address, Client(address) as client:
        with pytest.raises(ClientError, match="it is wrong") as found:
            client.rank(MODEL, {}, {"film": [1]})
        assert type(found.value) is error
        assert found.value.grpc_status == status.name
        assert found.value.kind == (kind or "internal")
        assert found.value.field == ("candidates.sparse.film[1]" if error is InvalidRequestError else "")
    assert len(stub.ranks) == 1


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
            heads, bodies = zip(*(post.split(b"\r\n\r\n", 1) for post in stub.posts), strict=True)
            assert all(b"POST /v1/models/plain:rank " in head for head in heads)
            assert all(b"content-type: application/x-protobuf" in head.lower() for head in heads)
            sent = [ranking_pb2.RankRequest.FromString(body) for body in bodies]
            assert [one.timeout_ms for one in sent] == [1000, 975, 925]
            assert {one.packed.schema_digest for one in sent} == {"d"}


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
