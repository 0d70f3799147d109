"""Traces: what a span is, which lookup's shards are asked for theirs, and where spans go.

A span is a record of times that are over, and is made only for calls that are sampled. Nothing here imports
OpenTelemetry: `shard_node.otlp` does, and only once that spans shall go somewhere. docs/traces.md.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Literal, NamedTuple, Protocol, TypeAlias, TypeVar
from urllib.parse import urlsplit

from pydantic import Field

from loader.snapshot.tables import Frozen
from shard_node.errors import TracingError

Attributes: TypeAlias = Mapping[str, str | int | float]
Outcome: TypeAlias = Literal["exported", "failed", "dropped"]
Result = TypeVar("Result")

INSTALL = "pip install 'shardrank[otel]'"
MAX_STATE_BYTES = 512
"""Of a `tracestate`; a longer one is not passed on, as W3C's Trace Context allows."""
GRPC_PORT = 4317
DEFAULT_SHARE = 0.01
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOLS: dict[str, Literal["grpc", "http"]] = {"grpc": "grpc", "http": "http", "http/protobuf": "http"}
# None: OTEL_TRACES_SAMPLER_ARG says it.
_SAMPLERS = {"parentbased_traceidratio": None, "parentbased_always_on": 1.0, "parentbased_always_off": 0.0}


class SpanContext(NamedTuple):
    """Names a span of a sampled trace: ids of 16 and 8 bytes, above 0, and the trace's `tracestate`."""

    trace_id: int
    span_id: int
    state: str = ""

    @classmethod
    def new(cls) -> SpanContext:
        """Draw the first span of a trace."""
        return cls(random.getrandbits(128) or 1, random.getrandbits(64) or 1)

    def child(self) -> SpanContext:
        """Draw another span of the same trace."""
        return SpanContext(self.trace_id, random.getrandbits(64) or 1, self.state)


class Span(NamedTuple):
    """What was done, from when to when.

    Attributes:
        kind: `server` has its parent in another process, and `client` its children.
        began, ended: monotonic seconds.
        links: spans that it has to do with, of this trace or another.
        error: what went wrong; "" if nothing did.
    """

    name: str
    kind: Literal["server", "client", "internal"]
    context: SpanContext
    parent: SpanContext | None
    began: float
    ended: float
    attributes: Attributes
    links: Sequence[SpanContext] = ()
    error: str = ""


class SpanSink(Protocol):
    """Takes spans, from any thread, and waits for nobody."""

    def put(self, *spans: Span) -> None:
        """Take spans; those that there is no room for are dropped and counted."""

    def close(self) -> None:
        """Send what was taken, within a limit of time. Idempotent."""


class TraceConfig(Frozen):
    """Where spans go.

    Attributes:
        endpoint: URL of a collector; None for what the OTEL_* variables say.
        protocol: OTLP over gRPC or HTTP; None for what the variables say, then by the port: 4317 is gRPC's.
        sample_share: of calls without a parent that are traced; None for what the variables say, else 0.01.
        service_name: of the process, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES say another one.
        flush_timeout_s: how long the end of the process may wait for what was not sent yet.
    """

    endpoint: str | None = None
    protocol: Literal["grpc", "http"] | None = None
    sample_share: float | None = Field(default=None, ge=0, le=1)
    service_name: str = "shardrank"
    flush_timeout_s: float = Field(default=3.0, gt=0, le=60)

    @property
    def is_wanted(self) -> bool:
        """Whether an endpoint is named, here or by a variable that OTEL_SDK_DISABLED does not switch off."""
        is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        return self.endpoint is not None or (not is_disabled and any(map(os.environ.get, ENDPOINT_VARIABLES)))

    def share(self) -> float:
        """Return the share of calls without a parent that are traced. Raises TracingError."""
        sampler, argument = os.environ.get("OTEL_TRACES_SAMPLER"), os.environ.get("OTEL_TRACES_SAMPLER_ARG", "1")
        if self.sample_share is not None or not sampler:
            return DEFAULT_SHARE if self.sample_share is None else self.sample_share
        if sampler not in _SAMPLERS:
            raise TracingError(f"OTEL_TRACES_SAMPLER {sampler!r} is none of {', '.join(_SAMPLERS)}")
        try:
            share = float(argument) if (fixed := _SAMPLERS[sampler]) is None else fixed
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise TracingError(f"OTEL_TRACES_SAMPLER_ARG {argument!r} is not within 0..1")
        return share

    def resolved(self) -> tuple[str | None, Literal["grpc", "http"]]:
        """Return the URL for the exporter, None if the SDK finds it itself, and the protocol. Raises TracingError."""
        told = self.endpoint or next(filter(None, map(os.environ.get, ENDPOINT_VARIABLES)), "")
        try:
            parts = urlsplit(told)
            port = parts.port
        except ValueError as error:
            raise TracingError(f"endpoint {told!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise TracingError(f"endpoint {told!r} is not http://host:port or https://host:port")
        protocol = self.protocol
        if protocol is None and (named := next(filter(None, map(os.environ.get, _PROTOCOL_VARIABLES)), None)):
            if named not in _PROTOCOLS:
                raise TracingError(f"OTLP protocol {named!r} is not spoken, only {' and '.join(sorted(_PROTOCOLS))}")
            protocol = _PROTOCOLS[named]
        if protocol is None:
            protocol = "grpc" if port == GRPC_PORT else "http"
        if self.endpoint is not None and protocol == "http" and parts.path in ("", "/"):
            return f"{told.rstrip('/')}/v1/traces", protocol
        return self.endpoint, protocol


def open_sink(config: TraceConfig, note: Callable[[Outcome, int], None] = lambda outcome, count: None) -> SpanSink:
    """Make what sends spans to a collector, from a thread of its own; `note` is told what became of how many.

    Raises TracingError if OpenTelemetry is not installed, or the endpoint can't be one.
    """
    endpoint, protocol = config.resolved()
    try:
        from shard_node.otlp import OtlpSink
    except ImportError as error:
        raise TracingError(f"traces need OpenTelemetry: {INSTALL} ({error})") from error
    return OtlpSink(endpoint, protocol, config.service_name, config.flush_timeout_s, note)


class TracedLookup(NamedTuple):
    """A lookup that is traced, for whoever asks shards for it.

    Attributes:
        sink: takes the spans of the calls.
        context: of the lookup, which they are children of.
    """

    sink: SpanSink
    context: SpanContext

    async def ask(self, call: Callable[[SpanContext], Awaitable[Result]], attributes: Attributes) -> Result:
        """Make a call to a shard node, which is told the context of the call's own span."""
        own, began, error = self.context.child(), time.monotonic(), ""
        try:
            return await call(own)
        except BaseException as failure:
            error = error_text(failure)
            raise
        finally:
            ended = time.monotonic()
            self.sink.put(Span("shardrank.ask", "client", own, self.context, began, ended, attributes, (), error))


TRACED_LOOKUP: ContextVar[TracedLookup | None] = ContextVar("TRACED_LOOKUP", default=None)
"""The lookup that is under way, if its trace is sampled; calls to its shards are made in copies of this context."""


def error_text(error: BaseException) -> str:
    """Say what went wrong: its kind and message."""
    kind = getattr(error, "kind", type(error).__name__)
    return f"{kind}: {error}"[:MAX_STATE_BYTES]
