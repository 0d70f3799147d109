"""A shard node's port for operators: a probe, and metrics. Routers never come here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.api.bodies import error_reply
from serving.api.http import answer_whole
from serving.api.http_server import Answering, listening_beside
from serving.errors import MethodNotAllowedError, NoSuchRouteError, ServingError
from serving.observe.metrics import CONTENT_TYPE
from serving.observe.node_metrics import NodeMetrics
from shard_node.node import ShardNode
from shard_node.wire.address import Address
from shard_node.wire.tls import TlsConfig, server_context

PATHS = ("/healthz", "/metrics")


@asynccontextmanager
async def running_node_port(
    node: ShardNode, address: Address, tls: TlsConfig | None = None
) -> AsyncIterator[tuple[NodeMetrics, str]]:
    """Serve `/healthz` and `/metrics` of a node while the block runs; give what counts, and the URL of metrics.

    Raises ListenError.
    """
    metrics = NodeMetrics(node)
    ssl = None if tls is None else server_context(tls, alpn=("http/1.1",))
    answering = nullcontext(Answering(partial(answer_whole, node_app(metrics))))
    async with listening_beside(metrics, answering, address.host, address.port, ssl) as port:
        host = f"[{address.host}]" if ":" in address.host else address.host
        yield metrics, f"{'http' if tls is None else 'https'}://{host}:{port}/metrics"


def node_app(metrics: NodeMetrics) -> ASGIApp:
    """Make the application: GET and HEAD of its two paths, and typed errors for all else."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        await (await answer(request.method, request.url.path))(scope, receive, send)

    async def answer(method: str, path: str) -> Response:
        if path not in PATHS:
            return refused(path, NoSuchRouteError(f"{path[:200]}: this port has {' and '.join(PATHS)}"))
        if method not in ("GET", "HEAD"):
            return refused(path, MethodNotAllowedError(f"{method} {path}: allowed are GET and HEAD"))
        if path == "/healthz":
            return JSONResponse({"status": "ok"})
        return Response(await asyncio.to_thread(metrics.render), media_type=CONTENT_TYPE)

    def refused(path: str, error: ServingError) -> Response:
        reply = error_reply(path, "", error)
        return Response(reply.body, reply.status, dict(reply.headers), reply.content_type)

    return app
