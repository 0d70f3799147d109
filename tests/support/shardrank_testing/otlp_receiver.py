"""Takers of spans: a collector that speaks OTLP, by HTTP or gRPC, on a real socket; and one that only keeps them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from shard_node.tracing import Span

WAIT_S = 30.0
KINDS = {1: "internal", 2: "server", 3: "client"}


@dataclass(frozen=True)
class Received:
    """A span as it came; ids are hex, times nanoseconds."""

    name: str
    kind: str
    trace: str
    id: str
    parent: str
    state: str
    began: int
    ended: int
    attributes: dict[str, Any]
    links: list[tuple[str, str]]
    error: str
    service: str

    def is_within(self, other: Received, slack_ns: int = 1_000_000) -> bool:
        """Whether it lies within another, but for what clocks of two processes differ by."""
        return other.began - slack_ns <= self.began <= self.ended <= other.ended + slack_ns


@dataclass
class Collector:
    """What came so far."""

    url: str = ""
    spans: list[Received] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        found = [
            _received(span, _values(of_resource.resource.attributes).get("service.name", ""))
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]
        with self.changed:
            self.spans += found
            self.changed.notify_all()

    def wait_for(self, count: int) -> list[Received]:
        """Waits until so many spans have come."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.spans) >= count, WAIT_S), self.spans
            return list(self.spans)


class KeptSpans:
    """A sink that keeps spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def put(self, *spans: Span) -> None:
        self.spans += spans

    def close(self) -> None:
        pass


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


def _received(span: Any, service: str) -> Received:
    return Received(
        name=span.name,
        kind=KINDS[span.kind],
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        state=span.trace_state,
        began=span.start_time_unix_nano,
        ended=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        error=span.status.message if span.status.code == 2 else "",
        service=service,
    )


@contextmanager
def collector(protocol: Literal["http", "grpc"] = "http") -> Iterator[Collector]:
    """A collector that listens while the block runs."""
    found = Collector()
    with _http(found) if protocol == "http" else _grpc(found) as port:
        found.url = f"http://127.0.0.1:{port}"
        yield found


@contextmanager
def _http(found: Collector) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            found.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def _grpc(found: Collector) -> Iterator[int]:
    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802  # gRPC's name
            found.take(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()
