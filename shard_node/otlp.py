"""Spans to an OpenTelemetry collector, over OTLP. The only file that imports OpenTelemetry, and imported only for that.

Spans arrive ended and with ids (docs/decisions/operations.md): of the SDK they need the batch processor and exporters.
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


class OtlpSink(SpanExporter):
    """Sends spans on the thread of the SDK's batch processor, for which it is the exporter. Thread-safe.

    `note` is called with outcomes and their numbers of spans. Raises ConfigError for a wrong OTEL_* variable.
    """

    def __init__(self, config: TraceConfig, note: Callable[[Outcome, int], None] = lambda outcome, count: None) -> None:
        # It logs every attempt that fails.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        self._resource = Resource.create({"service.name": config.service_name}).merge(OTELResourceDetector().detect())
        self._note, self._is_failing, self._flush_timeout_s = note, False, config.flush_timeout_s
        endpoint, protocol = config.resolved()
        try:
            self._exporter: SpanExporter = GrpcExporter(endpoint) if protocol == "grpc" else HttpExporter(endpoint)
            self._processor = BatchSpanProcessor(self)
        except ValueError as error:
            raise ConfigError(f"OpenTelemetry refuses what its variables (OTEL_*) say: {error}") from error

    def put(self, *spans: Span) -> None:
        """Queue spans, and never raise: one that fails is logged and dropped."""
        # Wall time less monotonic time; the largest is the one whose two readings were interrupted least.
        offset_ns = max(time.time_ns() - time.monotonic_ns() for _ in range(3))
        try:
            for span in spans:
                self._processor.on_end(self._readable(span, offset_ns))
        except Exception:
            logger.exception("a span can't be handed to OpenTelemetry")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans, count what becomes of them, and log when a collector stops to accept them or does again."""
        try:
            result = self._exporter.export(spans)
        except Exception:
            logger.exception("spans can't be exported")
            result = SpanExportResult.FAILURE
        is_failing = result is not SpanExportResult.SUCCESS
        self._note("failed" if is_failing else "exported", len(spans))
        if is_failing != self._is_failing:
            self._is_failing = is_failing
            logger.warning("the collector of traces %s", "does not answer, or refuses" if is_failing else "works again")
        return result

    def shutdown(self) -> None:
        """End the exporter; the batch processor does this."""
        self._exporter.shutdown()

    def close(self) -> None:
        """Send what is queued, for at most `flush_timeout_s`; the processor alone would wait for 30 s. Idempotent."""
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


def _context(context: tracing.SpanContext, *, is_remote: bool = False) -> SpanContext:
    state = TraceState.from_header([context.state]) if context.state else TraceState()
    return SpanContext(context.trace_id, context.span_id, is_remote, TraceFlags(TraceFlags.SAMPLED), state)
