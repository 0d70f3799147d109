"""Traces: spans, made of times that are over, for calls that are sampled; and where they go (docs/traces.md)."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Literal, NamedTuple, Protocol, TypeAlias

from pydantic import Field, HttpUrl

from loader.errors import ConfigError
from loader.snapshot.tables import Frozen

Outcome: TypeAlias = Literal["exported", "failed", "refused"]

# Of a `tracestate`; a longer one is not passed on, as W3C's Trace Context allows.
MAX_STATE_BYTES = 512


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
        return self._replace(span_id=random.getrandbits(64) or 1)


class Span(NamedTuple):
    """What was done, in monotonic seconds. A `server` has its parent in another process, a `client` its children."""

    name: str
    kind: Literal["server", "client", "internal"]
    context: SpanContext
    parent: SpanContext | None
    began: float
    ended: float
    attributes: Mapping[str, str | int | float]
    links: Sequence[SpanContext] = ()
    error: str = ""


class SpanSink(Protocol):
    """Receives spans, from any thread."""

    def put(self, *spans: Span) -> None:
        """Queue spans; never wait and never raise, since an answer would be lost: what fails is logged and dropped."""

    def close(self) -> None:
        """Send what is queued, within a limit of time. Idempotent."""


class TracedLookup(NamedTuple):
    """The context of a lookup whose trace is sampled, and the sink of its spans."""

    sink: SpanSink
    context: SpanContext


TRACED_LOOKUP: ContextVar[TracedLookup | None] = ContextVar("TRACED_LOOKUP", default=None)
"""The lookup that is under way, if its trace is sampled; read when a lookup is sent to its shards."""


def error_text(error: BaseException) -> str:
    """Return the kind and message of an error, for a span."""
    return f"{getattr(error, 'kind', type(error).__name__)}: {error}"[:512]


def _otlp_variable(name: str) -> str | None:
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}") or None


class TraceConfig(Frozen):
    """Where spans go, and for which share of calls without a parent they are made.

    `endpoint` is a collector's URL, None if the exporter reads it from a variable; `protocol` is by default that of
    OTEL_EXPORTER_OTLP_PROTOCOL, else by the port: 4317 is gRPC's. OTEL_SERVICE_NAME goes before `service_name`.
    """

    endpoint: HttpUrl | None = None
    protocol: Literal["grpc", "http", "http/protobuf"] | None = None
    sample_share: float = Field(default=0.01, ge=0, le=1)
    service_name: str = "shardrank"
    flush_timeout_s: float = Field(default=3.0, gt=0, le=60)

    @property
    def is_enabled(self) -> bool:
        """Whether there is an endpoint, or a variable with one that OTEL_SDK_DISABLED does not switch off."""
        is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        return self.endpoint is not None or (not is_disabled and _otlp_variable("ENDPOINT") is not None)

    def resolved(self) -> tuple[str | None, Literal["grpc", "http"]]:
        """Return the URL for the exporter, None if it reads a variable, and the protocol.

        Raises ConfigError for a variable that says something else.
        """
        endpoint, protocol = _otlp_variable("ENDPOINT"), self.protocol or _otlp_variable("PROTOCOL")
        try:
            url = self.endpoint or HttpUrl(endpoint or "")
        except ValueError:
            raise ConfigError(
                f"OTEL_EXPORTER_OTLP_ENDPOINT: {endpoint!r} is not http:// or https:// of a host"
            ) from None
        if protocol not in (None, "grpc", "http", "http/protobuf"):
            raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL: {protocol!r} is not grpc, http or http/protobuf")
        is_grpc = protocol == "grpc" or (protocol is None and url.port == 4317)
        path = "v1/traces" if url.path == "/" and not is_grpc else ""
        return None if self.endpoint is None else f"{url}{path}", "grpc" if is_grpc else "http"
