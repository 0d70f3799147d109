"""A shard node's port for operators: probes, and its metrics. Routers never come here."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext
from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from loader.errors import ShardrankError
from serving.api.http import HttpServer, listening_on_thread
from serving.api.http_messages import Exchange, error_reply
from serving.errors import InvalidRequestError, NotFoundError
from serving.limits import RequestLimits
from serving.observe.metrics import CONTENT_TYPE, MAX_KEPT, Kept, make_observations
from serving.observe.watch import NODE_FAMILIES, Sample, StateCollector, node_samples, version_samples
from shard_node.engine.base import CardsUse
from shard_node.errors import CardError, TlsHandshakeError
from shard_node.generation import Generation
from shard_node.node import LoadedTables, ShardNode
from shard_node.wire.address import Address
from shard_node.wire.server import NodeServer
from shard_node.wire.tls import MISSING, TlsConfig, server_context

_SECONDS = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075),
    *(0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)
PATHS = ("/healthz", "/readyz", "/metrics")


class NodeMetrics:
    """Counts and times of one shard node, at the address `replica`. Implements `RequestWatch`; thread-safe."""

    def __init__(self, node: ShardNode) -> None:
        self.replica = ""
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._node = node
        registry.register(StateCollector(self._samples, NODE_FAMILIES))
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        text = "Time from a whole request to its answer, an error too."
        seconds = Histogram("shardrank_node_request_seconds", text, ("model",), buckets=_SECONDS, registry=registry)
        text = "Requests and connections refused or failed, by kind."
        self._errors = counter("shardrank_node_errors", text, ("api", "kind"))
        self._in_flight = gauge("shardrank_node_requests_in_flight", "Requests waiting for a thread or in one.")
        self._buffered = gauge("shardrank_buffered_bytes", "Bytes of messages that are held.")
        text = "Messages refused because max_buffered_bytes are held, by cause."
        self._buffer_refusals = counter("shardrank_buffer_refusals", text, ("cause",))
        self._connections = gauge("shardrank_node_connections", "Connections of routers.")
        self._of_model = cache(lambda model: (seconds.labels(model),))
        self._kept: Kept = deque()

    def answered(self, model: str, seconds: float) -> None:
        """As `RequestWatch.answered`."""
        self._kept.append((self._of_model(model), (seconds,)))
        if len(self._kept) >= MAX_KEPT:
            make_observations(self._kept)

    def refused(self, kind: str) -> None:
        """As `RequestWatch.refused`."""
        self._errors.labels("wire", kind).inc()

    def buffer_refused(self, cause: str) -> None:
        """As `RequestWatch.buffer_refused`."""
        self._buffer_refusals.labels(cause).inc()

    def failed(self, api: str, method: str, kind: str) -> None:
        """Count what a connection to these metrics was refused for."""
        del method
        self._errors.labels(api, kind).inc()

    def of(self, server: NodeServer, replica: str) -> None:
        """Report a server's requests and connections; `replica` is where routers reach it."""
        self.replica = replica
        self._in_flight.set_function(lambda: server.in_flight)
        self._connections.set_function(lambda: server.num_connections)
        self._buffered.set_function(lambda: server.buffers.buffered)

    def render(self) -> bytes:
        """Write the exposition text. Of cards that have failed it says that, and what is known without them."""
        make_observations(self._kept)
        return generate_latest(self._registry)

    def _samples(self) -> Iterator[Sample]:
        failed: list[Generation[LoadedTables]] = []

        def cards_of(generation: Generation[LoadedTables]) -> CardsUse | None:
            try:
                return generation.payload.engine.cards()
            except CardError:
                failed.append(generation)
                return None

        info, now = self._node.info(cards_of), time.time()
        yield from version_samples(self._node.generations.all())
        for model in {served.model for served in info.versions}:
            yield from node_samples(model, self.replica, info, now)
        for generation in failed:
            shard = str(info.identity.shard_index)
            yield "cards_failed", (generation.model, str(generation.version), shard, self.replica), 1.0


@asynccontextmanager
async def running_node_port(
    node: ShardNode, address: Address, tls: TlsConfig | None = None
) -> AsyncIterator[tuple[NodeMetrics, str]]:
    """Serve probes and metrics of a node while the block runs; yield what counts, and the URL. Raises ConfigError.

    Where clients must show certificates, probes need none, since a kubelet has none, and name nothing without one.
    """
    metrics = NodeMetrics(node)
    context = None if tls is None else server_context(tls, alpn=("http/1.1",), verify=ssl.CERT_OPTIONAL)
    app = node_app(node, metrics, needs_certificate=tls is not None and tls.client_ca is not None)
    make = partial(HttpServer, RequestLimits(), time.monotonic, metrics.failed, ssl=context)
    async with listening_on_thread(make, nullcontext(app), address.host, address.port) as port:
        host = f"[{address.host}]" if ":" in address.host else address.host
        yield metrics, f"{'http' if tls is None else 'https'}://{host}:{port}/metrics"


def node_app(node: ShardNode, metrics: NodeMetrics, *, needs_certificate: bool = False) -> ASGIApp:
    """Make the application: GET and HEAD of its paths, and typed errors for all else."""

    async def answer(method: str, path: str, is_known: bool) -> Response:
        if path not in PATHS:
            raise NotFoundError(f"{path[:200]}: this port has {', '.join(PATHS)}", kind="no_such_route")
        if method not in ("GET", "HEAD"):
            raise InvalidRequestError("", f"{method} {path}: allowed are GET and HEAD", kind="method_not_allowed")
        if path == "/healthz":
            return JSONResponse({"status": "ok"})
        if path == "/readyz":
            problems = node.problems()
            shown = {"problems": problems} if is_known else {}
            return JSONResponse({"ready": not problems, **shown}, 503 if problems else 200)
        if not is_known:
            raise TlsHandshakeError(f"{path}: a certificate of --tls-client-ca is needed", kind=MISSING)
        return Response(await asyncio.to_thread(metrics.render), media_type=CONTENT_TYPE)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["state"]["exchange"]
        transport = exchange.connection.transport
        is_known = not needs_certificate or transport.get_extra_info("ssl_object").getpeercert() is not None
        try:
            response = await answer(exchange.method, exchange.path, is_known)
        except ShardrankError as error:
            reply = error_reply(exchange.path, "", error)
            response = Response(reply.body, reply.status, dict(reply.headers), reply.content_type)
        await response(scope, receive, send)

    return app
