"""One trace from a product's `traceparent` to each shard node: real sockets, real shard nodes, a real collector."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.errors import OverloadedError
from loader.snapshot.reader import Snapshot
from router.plan import Plan
from serving.embedded import ModelSource, load_served_model
from serving.errors import InvalidRequestError
from serving.observe.calls import BatchTimes, Call
from serving.observe.traces import Parent, Tracer, batch_spans, call_span, read_parent, traced_batch
from serving.rank.service import RankingService
from shard_node.otlp import OtlpSink
from shard_node.tracing import TRACED_LOOKUP, SpanContext, TraceConfig
from shard_node.wire.address import Address
from shard_node.wire.server import NodeServer
from shardrank_testing.inference_requests import json_body, tensors_of
from shardrank_testing.otlp_receiver import KeptSpans, Received, collector
from shardrank_testing.serving_api import MODEL, Api, api_request, ask, rank_message, run, running_api
from shardrank_testing.standalone import serving_alone
from shardrank_testing.topologies import make_node

CANDIDATES = 6
SPAN = "00f067aa0ba902b7"


def trace_of(number: int) -> str:
    return f"{number:032x}"


def headers(number: int, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{trace_of(number)}-{SPAN}-{flags}", "tracestate": "vendor=x"}


@contextlib.asynccontextmanager
async def traced_api(model, folder: Path, url: str) -> AsyncIterator[tuple[Api, list[NodeServer]]]:
    """An API over two shard nodes behind sockets; all of them send their spans to a collector."""
    snapshot, plan = Snapshot.open(model.path), Plan.make(model.spec, 2, "hash", 1, 0)
    config = TraceConfig(endpoint=url)
    sinks = [OtlpSink(config.model_copy(update={"service_name": name})) for name in ("serve", "node")]
    servers, addresses = [], []
    for shard in range(2):
        node = make_node(snapshot, plan, shard)
        node.sink = sinks[1]
        servers.append(NodeServer(node))
        addresses.append(Address(path=f"{folder}/{shard}.sock"))
        await servers[-1].start([addresses[-1]])
    service = RankingService(expected_models=[MODEL])
    service.tracer = Tracer(sinks[0], share=0.0)
    try:
        shards = [[address] for address in addresses]
        async with serving_alone(service, model.path, shards, num_replicas=0), running_api(service) as api:
            yield api, servers
    finally:
        await asyncio.to_thread(service.close)
        for server in servers:
            await server.close()
        for sink in sinks:
            await asyncio.to_thread(sink.close)


def by_name(spans: list[Received], trace: str) -> dict[str, list[Received]]:
    found = [span for span in spans if span.trace == trace]
    return {name: [span for span in found if span.name == name] for name in {span.name for span in found}}


def assert_is_one_trace(found: dict[str, list[Received]], method: str, api: str) -> None:
    """Spans of one request over two shards: whose children they are, how they nest, and what they tell."""
    counts = {f"{api} {method}": 1, "shardrank.batch": 1, "shardrank.lookup": 1}
    counts |= {"shardrank.ask": 2, "shardrank.pool": 2} | ({"shardrank.dense": 1} if method == "rank" else {})
    assert {name: len(spans) for name, spans in found.items()} == counts
    (request,), (batch,), (lookup,) = found[f"{api} {method}"], found["shardrank.batch"], found["shardrank.lookup"]
    asks, pools = ({one.id: one for one in found[f"shardrank.{name}"]} for name in ("ask", "pool"))
    assert (request.parent, request.kind, request.state, request.service) == (SPAN, "server", "vendor=x", "serve")
    assert (batch.parent, lookup.parent) == (request.id, batch.id)
    assert {one.parent for one in asks.values()} == {lookup.id}
    assert {one.parent for one in pools.values()} == asks.keys()
    assert (batch.links, request.links) == ([(request.trace, request.id)], [(batch.trace, batch.id)])
    model = {"shardrank.model": MODEL, "shardrank.version": 1}
    for dense in found.get("shardrank.dense", []):
        assert (dense.parent, dense.attributes) == (batch.id, {**model, "shardrank.candidates": CANDIDATES})
        assert dense.began >= lookup.ended - 1
        assert batch.attributes["shardrank.candidates"] == CANDIDATES
    spans = {span.id: span for named in found.values() for span in named}
    assert [span.name for span in spans.values() if span != request and not span.is_within(spans[span.parent])] == []
    for one in (request, batch, lookup, *pools.values()):
        assert one.attributes.items() >= model.items()
        assert not one.error
    assert (request.attributes["shardrank.api"], batch.attributes["shardrank.requests"]) == (api, 1)
    assert request.attributes["shardrank.queue_ms"] >= 0
    assert lookup.attributes["shardrank.shard_wait_ms"] > 0
    for shards in (asks, pools):
        assert sorted(one.attributes["shardrank.shard"] for one in shards.values()) == [0, 1]
    assert {(one.kind, one.service) for one in pools.values()} == {("server", "node")}
    assert {one.kind for one in asks.values()} == {"client"}


def test_every_api_continues_the_callers_trace_to_each_node(api_model, folder):
    async def main(url: str) -> None:
        async with traced_api(api_model, folder, url) as (api, servers):
            body = api_request(1, CANDIDATES)
            message = rank_message(body)
            oip, bags = json_body(tensors_of(api_model.spec, body)), {"sparse": {"film": [[1, 2]], "user": [[3]]}}
            for number, flags in ((0, "01"), (10, "00")):
                told = [headers(number + one, flags) for one in range(1, 5)]
                answers = [
                    await api.http.post(f"/v1/models/{MODEL}:rank", json=body, headers=told[0]),
                    await api.http.post(f"/v2/models/{MODEL}/infer", content=oip, headers=told[1]),
                    await api.http.post(f"/v1/models/{MODEL}:lookup", json=bags, headers=told[2]),
                ]
                assert [one.status_code for one in answers] == [200] * 3, [one.text for one in answers]
                assert len((await api.stub.Rank(message, metadata=tuple(told[3].items()))).scores) == CANDIDATES
            # Without a parent, and with one that is malformed, the share decides, which is 0 here.
            for sent in ({}, {"traceparent": f"00-{trace_of(20)}-{SPAN}-1"}):
                assert (await api.http.post(f"/v1/models/{MODEL}:rank", json=body, headers=sent)).status_code == 200
            await servers[1].close()
            answer = await api.http.post(f"/v1/models/{MODEL}:rank", json=body, headers=headers(9))
            assert answer.status_code == 503

    with collector() as found:
        run(main(found.url))
    assert {one.trace for one in found.spans} == {trace_of(number) for number in (1, 2, 3, 4, 9)}
    asked = (("rank", "http"), ("rank", "oip_http"), ("lookup", "http"), ("rank", "grpc"))
    for number, (method, api) in enumerate(asked, 1):
        assert_is_one_trace(by_name(found.spans, trace_of(number)), method, api)
    # Of a request that failed all that was done is there, with why.
    failed = by_name(found.spans, trace_of(9))
    for name in ("http rank", "shardrank.batch", "shardrank.lookup"):
        (one,) = failed[name]
        assert one.error.startswith("shard_unavailable: shard 1 of 2"), name
    assert "shardrank.dense" not in failed
    assert failed["http rank"][0].attributes["error.type"] == "shard_unavailable"
    assert {one.attributes.get("shardrank.shard", 1): bool(one.error) for one in failed["shardrank.ask"]}[1]


def test_rows_of_this_process_are_looked_up_and_scored_within_the_batch(api_model):
    sink = KeptSpans()

    async def main() -> None:
        service, loop = RankingService(expected_models=[MODEL]), asyncio.get_running_loop()
        source = ModelSource(snapshot=api_model.path, num_replicas=0, dtype="float32")
        service.install(await asyncio.to_thread(load_served_model, source, service, loop=loop))
        for share in (1.0, 0.0):
            service.tracer = Tracer(sink, share)
            await ask(service, api_request(1, CANDIDATES))
            # Batches are ranked on this loop, and the next one's lookup is another.
            assert TRACED_LOOKUP.get() is None
        await asyncio.to_thread(service.close)

    run(main())
    names = ["shardrank.batch", "shardrank.lookup", "shardrank.dense", "embedded rank"]
    assert [one.name for one in sink.spans] == names
    assert len({one.context.trace_id for one in sink.spans}) == 1


def call(tracer: Tracer, parent: Parent | None = None) -> Call:
    return Call("http", "rank", 1.0, trace=tracer.begin(parent))


def test_a_batch_is_in_its_first_sampled_trace_and_linked_with_all():
    sink = KeptSpans()
    draws = iter([0.02, 0.009, 0.001])
    tracer = Tracer(sink, 0.01, lambda: next(draws))
    calls = [call(tracer), call(tracer), call(tracer)]
    assert [one.trace is None for one in calls] == [True, False, False]
    times = BatchTimes(
        3,
        7,
        started_at=2.0,
        merge_s=0.1,
        lookup_s=0.2,
        rank_s=0.3,
        ended_at=2.7,
        trace=traced_batch([one.trace for one in calls if one.trace]),
    )
    assert times.trace is not None
    batch_spans(times.trace, times, "m", 4, "rank")
    batch, lookup, dense = sink.spans
    contexts = [one.trace.context for one in calls[1:] if one.trace is not None]
    assert (batch.parent, batch.links) == (contexts[0], tuple(contexts))
    assert [one.trace.links for one in calls[1:] if one.trace is not None] == [(batch.context,)] * 2
    assert len({one.trace_id for one in contexts}) == 2
    times = [time for span in (batch, lookup, dense) for time in (span.began, span.ended)]
    assert times == pytest.approx([2.0, 2.7, 2.1, 2.3, 2.3, 2.6])


def test_a_clients_mistake_is_no_error_of_a_span_and_a_failed_lookup_is():
    sink = KeptSpans()
    tracer = Tracer(sink, 1.0)
    for error in (
        InvalidRequestError("top_k", "x", kind="invalid_field"),
        OverloadedError("x", kind="node_overloaded"),
        asyncio.CancelledError(),
    ):
        one = call(tracer)
        assert one.trace is not None
        call_span(one.trace, one, 2.0, error)
    assert [bool(span.error) for span in sink.spans] == [False, True, False]
    times = BatchTimes(1, 1, started_at=2.0, merge_s=0.1, ended_at=2.5, trace=traced_batch([call(tracer).trace]))
    assert times.trace is not None
    batch_spans(times.trace, times, "m", 4, "rank", OverloadedError("full", kind="node_overloaded"))
    assert [(span.name, span.error, span.ended) for span in sink.spans[3:]] == [
        ("shardrank.batch", "node_overloaded: full", 2.5),
        ("shardrank.lookup", "node_overloaded: full", 2.5),
    ]


IDS = st.integers(0, 2**128 - 1), st.integers(0, 2**64 - 1)


@given(st.integers(0, 255), *IDS, st.integers(0, 255), st.sampled_from(["", "-", "-x", "0"]))
def test_a_traceparent_is_read_as_w3c_has_it(version, trace_id, span_id, flags, more):
    text = f"{version:02x}-{trace_id:032x}-{span_id:016x}-{flags:02x}{more}"
    is_valid = version != 255 and trace_id and span_id and (not more or (version and more[0] == "-"))
    expected = (SpanContext(trace_id, span_id, "a=b" if flags & 1 else ""), bool(flags & 1)) if is_valid else None
    assert read_parent(Parent(text.encode(), b"a=b")) == expected
