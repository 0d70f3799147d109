"""What the caller passes as headers goes along with its call, so that the server's spans are in the caller's trace."""

from __future__ import annotations

import pytest

from serving.observe.traces import Tracer
from shardrank_testing.client_calls import CLIENTS, calling, rank_arguments
from shardrank_testing.otlp_receiver import KeptSpans
from shardrank_testing.serving_api import MODEL, api_request, run, running_api

TRACE, SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_traceparent_reaches_the_server_over_http_and_grpc(api_service, kind):
    sink = KeptSpans()
    headers = {"Traceparent": f"00-{TRACE:032x}-{SPAN:016x}-01", "tracestate": "a=b"}

    async def main() -> None:
        async with running_api(api_service) as api:
            listening = api.listening
            for address in (
                f"http://{listening.host}:{listening.http_port}",
                f"grpc://{listening.host}:{listening.grpc_port}",
            ):
                async with calling(kind, address) as call:
                    await call("rank", MODEL, **rank_arguments(api_request(1)), headers=headers)
                    await call("lookup", MODEL, {"film": [[1]]}, headers=headers)
                    await call("lookup", MODEL, {"film": [[1]]})

    api_service.tracer = Tracer(sink, 0.0)
    try:
        run(main())
    finally:
        api_service.tracer = None
    calls = [one for one in sink.spans if one.kind == "server"]
    assert [one.name for one in calls] == ["http rank", "http lookup", "grpc rank", "grpc lookup"]
    assert {one.parent for one in calls} == {(TRACE, SPAN, "a=b")}
