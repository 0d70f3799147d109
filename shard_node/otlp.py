"""Spans to an OpenTelemetry collector, over OTLP. The only file that imports OpenTelemetry, and imported only for that.

Spans come here when they are over and with ids of their own (docs/decisions/operations.md), so
the SDK's tracer and samplers are not used: its batch processor, its exporters and its OTEL_* variables are.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from shard_node import tracing
from shard_node.tracing import Outcome, Span

logger = logging.getLogger(__name__)

DEFAULT_MAX_QUEUE = 2048
# Wall and monotonic clocks go at one pace; a step of more than this is somebody setting the clock.
CLOCK_STEP_NS = 1_000_000
MAX_CLOCK_LOOKS, UNDISTURBED_NS = 5, 20_000
_SCOPE = InstrumentationScope("shardrank")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_NO_STATE = TraceState()
_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
_UNSET = Status()


class OtlpSink:
    """Sends spans in batches, on the thread of the SDK's batch processor. Thread-safe.

    At most as many spans wait as OTEL_BSP_MAX_QUEUE_SIZE says; further ones are dropped. A collector that does not
    answer is logged once, and once more when it does again.

    Args:
        endpoint: as the exporter takes it; None for its variables.
        protocol: that the collector speaks.
        service_name: where no variable says another one.
        flush_timeout_s: how long `close` may take.
        note: told what became of how many spans, on the thread that finds out.
    """

    def __init__(
        self,
        endpoint: str | None,
        protocol: Literal["grpc", "http"],
        service_name: str,
        flush_timeout_s: float,
        note: Callable[[Outcome, int], None],
    ) -> None:
        # It logs every attempt that fails; `_Counted` says it once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter = _Counted(_exporter(endpoint, protocol), endpoint or "the collector of OTEL_*", note)
        self._processor = BatchSpanProcessor(self._exporter)
        self._resource = _resource(service_name)
        self._max_queue = _max_queue()
        self._taken, self._counting = 0, threading.Lock()
        self._note = note
        self._flush_timeout_s = flush_timeout_s
        self._offset_ns = _offset_ns()
        self._is_closed = self._has_failed = False

    def put(self, *spans: Span) -> None:
        """Take spans, and never raise: those that there is no room for, or that fail, are dropped and counted."""
        offset_ns = _offset_ns()
        if abs(offset_ns - self._offset_ns) > CLOCK_STEP_NS:
            self._offset_ns = offset_ns
        with self._counting:
            # One too many and the processor drops one that is never seen, whose room would be lost for good.
            is_dropped = self._is_closed or self._taken + len(spans) - self._exporter.seen > self._max_queue
            self._taken += 0 if is_dropped else len(spans)
        if is_dropped:
            self._note("dropped", len(spans))
            return
        num_given = 0
        try:
            for span in spans:
                self._processor.on_end(self._readable(span))
                num_given += 1
        except Exception:
            # Whoever hands a span out has an answer to give and calls to count.
            lost = len(spans) - num_given
            with self._counting:
                self._taken -= lost
            self._note("dropped", lost)
            if not self._has_failed:
                self._has_failed = True
                logger.exception("a span can't be handed to OpenTelemetry; further ones that fail are only counted")

    def close(self) -> None:
        """Send what was taken, for as long as that may take; then nothing more is sent. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        # The processor's own end waits for 30 s, and for an exporter that tries again and again.
        closing = threading.Thread(target=self._processor.shutdown, name="traces-flush", daemon=True)
        closing.start()
        closing.join(self._flush_timeout_s)
        if closing.is_alive():
            self._exporter.shutdown()
        if (left := self._taken - self._exporter.seen) > 0:
            self._note("dropped", left)
            logger.warning("%d spans were not sent: the collector did not take them in time", left)

    def _readable(self, span: Span) -> ReadableSpan:
        state = _state(span.context.state)
        parent = None if span.parent is None else _context(span.parent, state, is_remote=span.kind == "server")
        return ReadableSpan(
            name=span.name,
            context=_context(span.context, state),
            parent=parent,
            resource=self._resource,
            attributes=dict(span.attributes),
            links=[Link(_context(one, _state(one.state))) for one in span.links],
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else _UNSET,
            start_time=int(span.began * 1e9) + self._offset_ns,
            end_time=int(span.ended * 1e9) + self._offset_ns,
            instrumentation_scope=_SCOPE,
        )


class _Counted(SpanExporter):
    """Another exporter, with what became of its spans.

    Attributes:
        seen: spans that it was given.
    """

    def __init__(self, exporter: SpanExporter, where: str, note: Callable[[Outcome, int], None]) -> None:
        self._exporter = exporter
        self._where = where
        self._note = note
        self._is_failing = self._is_shut_down = False
        self.seen = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.seen += len(spans)
        why = "it does not answer, or refuses them"
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            # The processor would only log it.
            result, why = SpanExportResult.FAILURE, f"{type(error).__name__}: {error}"
        has_failed = result is not SpanExportResult.SUCCESS
        self._note("failed" if has_failed else "exported", len(spans))
        if has_failed != self._is_failing:
            self._is_failing = has_failed
            if has_failed:
                logger.error("spans can't be sent to %s: %s; they are lost until it takes them", self._where, why)
            else:
                logger.info("spans are sent to %s again", self._where)
        return result

    def shutdown(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _exporter(endpoint: str | None, protocol: Literal["grpc", "http"]) -> SpanExporter:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint)


def _resource(service_name: str) -> Resource:
    try:
        own_version = version("shardrank")
    except PackageNotFoundError:
        own_version = "unknown"
    found = Resource.create(
        {"service.version": own_version, "host.name": socket.gethostname(), "process.pid": os.getpid()}
    )
    # What the SDK calls a process that no variable names.
    if str(found.attributes.get("service.name", "")).startswith("unknown_service"):
        found = found.merge(Resource({"service.name": service_name}))
    return found


def _max_queue() -> int:
    try:
        return int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", DEFAULT_MAX_QUEUE))
    except ValueError:
        return DEFAULT_MAX_QUEUE


def _offset_ns() -> int:
    """Return wall time less monotonic time: of a few looks the one that was disturbed least."""
    best = (1 << 62, 0)
    for _ in range(MAX_CLOCK_LOOKS):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        best = min(best, (after - before, wall - (before + after) // 2))
        if best[0] < UNDISTURBED_NS:
            break
    return best[1]


def _context(context: tracing.SpanContext, state: TraceState, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(context.trace_id, context.span_id, is_remote, _SAMPLED, state)


def _state(text: str) -> TraceState:
    return TraceState.from_header([text]) if text else _NO_STATE
