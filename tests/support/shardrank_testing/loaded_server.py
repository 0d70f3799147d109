"""A server for load generators, in a thread of its own: it does to each request what the test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

import grpc.aio

from serving.proto.shardrank.v1 import ranking_pb2
from shardrank_testing.background import in_background

CANDIDATES = 3
SCORES = [0.5] * CANDIDATES
ANSWER = json.dumps({"model": "m", "version": 1, "scores": SCORES, "order": [0, 1, 2]}).encode()
MESSAGE = ranking_pb2.RankResponse(model="m", version=1, scores=SCORES).SerializeToString()


@dataclass(frozen=True)
class Reply:
    """What becomes of one request.

    `hold` never answers it, `hang_up` closes the connection instead, `last` closes it afterwards.
    """

    status: int = 200
    body: bytes = ANSWER
    then: Literal["keep", "hold", "hang_up", "last", "noise"] = "keep"
    grpc_status: grpc.StatusCode = grpc.StatusCode.OK


Plan = Callable[[int], Reply]


@dataclass
class LoadedServer:
    """What a server saw.

    Attributes:
        port: where it listens.
        requests: that came, so far.
        connections: that are open, by HTTP; most_connections is the most at a time.
        heads: the headers or metadata of each request.
    """

    port: int = 0
    requests: int = 0
    connections: int = 0
    most_connections: int = 0
    heads: list[dict[str, str]] = field(default_factory=list)


class _HttpPeer(asyncio.Protocol):
    def __init__(self, server: LoadedServer, plan: Plan, hang_up_at_once: bool) -> None:
        self._server, self._plan, self._hang_up_at_once = server, plan, hang_up_at_once
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._server.connections += 1
        self._server.most_connections = max(self._server.most_connections, self._server.connections)
        if self._hang_up_at_once:
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections -= 1

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, rest = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        if len(rest) < length:
            return
        assert len(rest) == length, "a request before the answer to the one before it"
        self._received = b""
        lines = head.decode("latin-1").split("\r\n")[1:]
        self._server.heads.append(dict(line.split(": ", 1) for line in lines))
        self._answer()

    def _answer(self) -> None:
        number, self._server.requests = self._server.requests, self._server.requests + 1
        reply = self._plan(number)
        if reply.then == "noise":
            self._transport.write(b"not HTTP at all\r\n\r\n")
        elif reply.then in ("keep", "last"):
            close = b"connection: close\r\n" if reply.then == "last" else b""
            head = b"HTTP/1.1 %d X\r\n%scontent-length: %d\r\n\r\n" % (reply.status, close, len(reply.body))
            self._transport.write(head + reply.body)
        if reply.then in ("hang_up", "last"):
            self._transport.close()


class _GrpcPeer(grpc.GenericRpcHandler):
    def __init__(self, server: LoadedServer, plan: Plan) -> None:
        self._server, self._plan = server, plan

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self._answer)

    async def _answer(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        number, self._server.requests = self._server.requests, self._server.requests + 1
        self._server.heads.append({str(name): str(value) for name, value in context.invocation_metadata() or ()})
        reply = self._plan(number)
        if reply.then == "hold":
            await asyncio.Event().wait()
        if reply.grpc_status is not grpc.StatusCode.OK:
            await context.abort(reply.grpc_status, "as planned")
        return MESSAGE


@asynccontextmanager
async def _http_server(plan: Plan, hang_up_at_once: bool) -> AsyncIterator[LoadedServer]:
    server = LoadedServer()
    listening = await asyncio.get_running_loop().create_server(
        lambda: _HttpPeer(server, plan, hang_up_at_once), "127.0.0.1", 0, backlog=1024
    )
    server.port = listening.sockets[0].getsockname()[1]
    yield server
    listening.close()


@asynccontextmanager
async def _grpc_server(plan: Plan) -> AsyncIterator[LoadedServer]:
    server, grpc_server = LoadedServer(), grpc.aio.server()
    grpc_server.add_generic_rpc_handlers([_GrpcPeer(server, plan)])
    server.port = grpc_server.add_insecure_port("127.0.0.1:0")
    await grpc_server.start()
    yield server
    await grpc_server.stop(None)


@contextmanager
def loaded_http_server(plan: Plan = lambda number: Reply(), hang_up_at_once: bool = False) -> Iterator[LoadedServer]:
    """An HTTP server on 127.0.0.1; `plan` says what becomes of its n-th request, and may block the whole server."""
    with in_background(_http_server(plan, hang_up_at_once)) as (server, _):
        yield server


@contextmanager
def loaded_grpc_server(plan: Plan = lambda number: Reply()) -> Iterator[LoadedServer]:
    """The same over gRPC, whatever method is called."""
    with in_background(_grpc_server(plan)) as (server, _):
        yield server
