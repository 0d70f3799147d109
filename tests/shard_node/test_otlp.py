"""Spans reach a real collector over both of OTLP's protocols; one that is dead costs nobody anything but its spans."""

from __future__ import annotations

import importlib
import logging
import socket
import sys
import time
from collections import Counter

import pytest
from pydantic import ValidationError

from loader.errors import ConfigError
from shard_node.otlp import OtlpSink
from shard_node.tracing import Span, SpanContext, TraceConfig
from shardrank_testing.otlp_receiver import collector

PARENT = SpanContext(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, "vendor=x1,other=y")
OWN, LINKED = SpanContext(PARENT.trace_id, 7, PARENT.state), SpanContext(9, 8)
ENDPOINT, DEAD = "http://127.0.0.1:4318", "http://127.0.0.1:1"


def counting_sink(config: TraceConfig):
    """A sink, and how many spans had each outcome."""
    outcomes: Counter[str] = Counter()
    return OtlpSink(config, lambda outcome, count: outcomes.update({outcome: count})), outcomes


def small_queue(monkeypatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")


def warnings_in(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def span(began: float = 1.0, ended: float = 1.25, error: str = "") -> Span:
    return Span("a", "server", OWN, PARENT, began, ended, {"text": "t", "whole": 3, "real": 0.5}, (LINKED,), error)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_collector_gets_all_fields_of_a_span(protocol, monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    with collector(protocol) as found:
        config = TraceConfig(endpoint=found.url, protocol=protocol, service_name="tested")
        sink, outcomes = counting_sink(config)
        now, wall = time.monotonic(), time.time()
        sink.put(span(now - 2.0, now - 1.5, error="card: it broke"))
        sink.close()
        sink.close()
    (one,) = found.spans
    assert (one.name, one.kind, one.service, one.error) == ("a", "server", "tested", "card: it broke")
    assert (int(one.trace, 16), int(one.id, 16), int(one.parent, 16)) == (PARENT.trace_id, 7, PARENT.span_id)
    assert one.state == PARENT.state
    assert one.attributes == {"text": "t", "whole": 3, "real": 0.5}
    assert one.links == [(f"{9:032x}", f"{8:016x}")]
    assert one.ended - one.began == pytest.approx(0.5e9, abs=1e3)
    assert one.began == pytest.approx((wall - 2.0) * 1e9, abs=0.2e9)
    assert outcomes == {"exported": 1}


def test_a_dead_collector_is_logged_once_and_counted(caplog, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    sink, outcomes = counting_sink(TraceConfig(endpoint=DEAD, flush_timeout_s=5))
    for expected in (1, 2):
        sink.put(span())
        while outcomes["failed"] < expected:
            time.sleep(0.01)
    sink.close()
    assert warnings_in(caplog) == ["the collector of traces does not answer, or refuses"]
    assert outcomes == {"failed": 2}


def test_an_invalid_span_is_logged_and_no_other_is_lost(caplog):
    with collector() as found:
        sink, outcomes = counting_sink(TraceConfig(endpoint=found.url))
        sink.put(span(ended=float("nan")))
        sink.put(span(), span(ended=float("inf")))
        sink.put(span())
        sink.close()
    assert outcomes == {"exported": 2}
    assert len(found.spans) == 2
    assert len(warnings_in(caplog)) == 2


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_silent_collector_holds_up_nothing(protocol, monkeypatch):
    small_queue(monkeypatch)
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        sink, outcomes = counting_sink(TraceConfig(endpoint=url, protocol=protocol, flush_timeout_s=0.2))
        for _ in range(100):
            sink.put(span())
        sink.close()
    assert outcomes["exported"] == 0
    assert time.monotonic() - began < 2.0


@pytest.mark.parametrize(
    ("config", "variables", "expected"),
    [
        ({"endpoint": ENDPOINT}, {}, (f"{ENDPOINT}/v1/traces", "http")),
        ({"endpoint": f"{ENDPOINT}/"}, {}, (f"{ENDPOINT}/v1/traces", "http")),
        ({"endpoint": "https://c/own/path"}, {}, ("https://c/own/path", "http")),
        ({"endpoint": "http://c:4317"}, {}, ("http://c:4317/", "grpc")),
        ({"endpoint": "http://c:4317", "protocol": "http"}, {}, ("http://c:4317/v1/traces", "http")),
        ({"endpoint": ENDPOINT}, {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, (f"{ENDPOINT}/", "grpc")),
        ({"endpoint": ENDPOINT}, {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, (f"{ENDPOINT}/", "grpc")),
        ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, (None, "grpc")),
        ({}, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": ENDPOINT}, (None, "http")),
    ],
)
def test_flags_and_variables_decide_where_spans_go(config, variables, expected, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert TraceConfig(**config).is_enabled
    assert TraceConfig(**config).resolved() == expected


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("collector:4317", "URL scheme should be 'http' or 'https'"),
        ("http://", "empty host"),
        ("http://c:99999", "invalid port number"),
    ],
)
def test_wrong_endpoints_are_refused(endpoint, message):
    with pytest.raises(ValidationError, match=message):
        TraceConfig(endpoint=endpoint)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")],
)
def test_wrong_variables_are_refused_by_name(variable, value, monkeypatch):
    """And only where traces are sent: a cluster may set them for all."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", ENDPOINT)
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=rf"{variable}: '{value}' is not "):
        TraceConfig().resolved()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not TraceConfig().is_enabled


def test_without_endpoint_or_extra_there_are_no_spans(monkeypatch):
    assert not TraceConfig().is_enabled
    monkeypatch.delitem(sys.modules, "shard_node.otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'shardrank\[otel\]'"):
        importlib.import_module("shard_node.otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", ENDPOINT)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not TraceConfig().is_enabled
