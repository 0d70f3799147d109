"""Spans to an OpenTelemetry collector, over OTLP. The only file that imports OpenTelemetry, and imported only for that.

Spans arrive ended and with ids (docs/decisions/operations.md): of the SDK they need the batch processor and exporters.
To import it raises ConfigError where OpenTelemetry is not installed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from loader.errors import ConfigError
from shard_node import tracing
from shard_node.tracing import Outcome, Span, TraceConfig

try:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
except ImportError as error:
    raise ConfigError(f"traces need OpenTelemetry: pip install 'shardrank[otel]' ({error})") from error

logger = logging.getLogger(__name__)


class OtlpSink:
    """Sends spans on the thread of the SDK's batch processor. Thread-safe.

    `note` is called with outcomes and their numbers of spans. Raises ConfigError for a wrong OTEL_* variable.
    """

    def __init__(self, config: TraceConfig, note: Callable[[Outcome, int], None] = lambda outcome, count: None) -> None:
        # It logs every attempt that fails; `_CountingExporter` logs the first.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        resource = Resource.create({"service.name": config.service_name})
        self._resource = resource.merge(OTELResourceDetector().detect())
        endpoint, protocol = config.resolved()
        try:
            exporter = GrpcExporter(endpoint) if protocol == "grpc" else HttpExporter(endpoint)
            self._processor = BatchSpanProcessor(_CountingExporter(exporter, note))
        except ValueError as error:
            raise ConfigError(f"OpenTelemetry refuses what its variables (OTEL_*) say: {error}") from error
        self._flush_timeout_s = config.flush_timeout_s

    def put(self, *spans: Span) -> None:
        """Queue spans, and never raise: one that fails is logged and dropped."""
        # Wall time less monotonic time; the largest is the one whose two readings were interrupted least.
        offset_ns = max(time.time_ns() - time.monotonic_ns() for _ in range(3))
        try:
            for span in spans:
                self._processor.on_end(self._readable(span, offset_ns))
        except Exception:
            logger.exception("a span can't be handed to OpenTelemetry")

    def close(self) -> None:
        """Send what is queued, for at most `flush_timeout_s`. Idempotent."""
        # The processor alone would wait for 30 s.
        closing = threading.Thread(target=self._processor.shutdown, name="traces-flush", daemon=True)
        closing.start()
        closing.join(self._flush_timeout_s)

    def _readable(self, span: Span, offset_ns: int) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=_context(span.context),
            parent=None if span.parent is None else _context(span.parent, is_remote=span.kind == "server"),
            resource=self._resource,
            attributes=dict(span.attributes),
            links=[Link(_context(link)) for link in span.links],
            kind=SpanKind[span.kind.upper()],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=int(span.began * 1e9) + offset_ns,
            end_time=int(span.ended * 1e9) + offset_ns,
            instrumentation_scope=InstrumentationScope("shardrank"),
        )


class _CountingExporter(SpanExporter):
    """Counts what becomes of spans, and logs when a collector stops to accept them and when it does again."""

    def __init__(self, exporter: SpanExporter, note: Callable[[Outcome, int], None]) -> None:
        self._exporter, self._note = exporter, note
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        has_failed = result is not SpanExportResult.SUCCESS
        self._note("failed" if has_failed else "exported", len(spans))
        if has_failed != self._is_failing:
            self._is_failing = has_failed
            logger.warning("the collector %s spans", "does not answer, or refuses" if has_failed else "accepts again")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _context(context: tracing.SpanContext, *, is_remote: bool = False) -> SpanContext:
    state = TraceState.from_header([context.state]) if context.state else TraceState()
    return SpanContext(context.trace_id, context.span_id, is_remote, TraceFlags(TraceFlags.SAMPLED), state)
