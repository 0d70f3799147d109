"""Where spans go: the collector that flags or OpenTelemetry's variables name."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field

from loader.errors import ConfigError
from loader.snapshot.tables import Frozen
from shard_node.tracing import Outcome, SpanSink

INSTALL = "pip install 'shardrank[otel]'"
GRPC_PORT = 4317
DEFAULT_SHARE = 0.01
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOLS: dict[str, Literal["grpc", "http"]] = {"grpc": "grpc", "http": "http", "http/protobuf": "http"}
# None: OTEL_TRACES_SAMPLER_ARG says it.
_SAMPLERS = {"parentbased_traceidratio": None, "parentbased_always_on": 1.0, "parentbased_always_off": 0.0}


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
        return self.endpoint is not None or (not is_disabled and any(map(os.environ.get, _ENDPOINT_VARIABLES)))

    def share(self) -> float:
        """Return the share of calls without a parent that are traced. Raises ConfigError."""
        sampler, argument = os.environ.get("OTEL_TRACES_SAMPLER"), os.environ.get("OTEL_TRACES_SAMPLER_ARG", "1")
        if self.sample_share is not None or not sampler:
            return DEFAULT_SHARE if self.sample_share is None else self.sample_share
        if sampler not in _SAMPLERS:
            raise ConfigError(f"OTEL_TRACES_SAMPLER {sampler!r} is none of {', '.join(_SAMPLERS)}")
        try:
            share = float(argument) if (fixed := _SAMPLERS[sampler]) is None else fixed
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise ConfigError(f"OTEL_TRACES_SAMPLER_ARG {argument!r} is not within 0..1")
        return share

    def resolved(self) -> tuple[str | None, Literal["grpc", "http"]]:
        """Return the URL for the exporter, None if the SDK finds it itself, and the protocol. Raises ConfigError."""
        told = self.endpoint or next(filter(None, map(os.environ.get, _ENDPOINT_VARIABLES)), "")
        try:
            parts = urlsplit(told)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"endpoint {told!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"endpoint {told!r} is not http://host:port or https://host:port")
        protocol = self.protocol
        if protocol is None and (named := next(filter(None, map(os.environ.get, _PROTOCOL_VARIABLES)), None)):
            if named not in _PROTOCOLS:
                raise ConfigError(f"OTLP protocol {named!r} is not spoken, only {' and '.join(sorted(_PROTOCOLS))}")
            protocol = _PROTOCOLS[named]
        if protocol is None:
            protocol = "grpc" if port == GRPC_PORT else "http"
        if self.endpoint is not None and protocol == "http" and parts.path in ("", "/"):
            return f"{told.rstrip('/')}/v1/traces", protocol
        return self.endpoint, protocol


def open_sink(config: TraceConfig, note: Callable[[Outcome, int], None] = lambda outcome, count: None) -> SpanSink:
    """Make what sends spans to a collector, from a thread of its own; `note` is told what became of how many.

    Raises ConfigError if OpenTelemetry is not installed, the endpoint can't be one, or a variable of its own is wrong.
    """
    endpoint, protocol = config.resolved()
    try:
        from shard_node.otlp import OtlpSink
    except ImportError as error:
        raise ConfigError(f"traces need OpenTelemetry: {INSTALL} ({error})") from error
    try:
        return OtlpSink(endpoint, protocol, config.service_name, config.flush_timeout_s, note)
    except ValueError as error:
        raise ConfigError(f"OpenTelemetry refuses what its variables (OTEL_*) say: {error}") from error
