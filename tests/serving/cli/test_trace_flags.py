"""`--trace-endpoint` and its fellows: real processes send their spans."""

from __future__ import annotations

import httpx

from shardrank_testing.command_line import ANY_PORTS
from shardrank_testing.otlp_receiver import collector
from shardrank_testing.processes import running
from shardrank_testing.serving_api import MODEL, api_request

TRACE, SPAN = f"{7:032x}", f"{5:016x}"


def test_a_serving_process_and_a_node_send_one_trace(api_model, folder):
    with collector("grpc") as found:
        told = ("--snapshot", str(api_model.path), "--trace-endpoint", found.url, "--trace-protocol", "grpc")
        address = f"unix:{folder}/n.sock"
        with (
            running("shard-node", *told, "--shard", "0/1", "--listen", address) as node,
            running("serve", *told, "--shard", address, "--trace-sample-share", "0", *ANY_PORTS) as server,
        ):
            for headers in ({}, {"traceparent": f"00-{TRACE}-{SPAN}-01"}):
                url = f"{server.url}/v1/models/{MODEL}:rank"
                assert httpx.post(url, json=api_request(1), headers=headers, timeout=30).status_code == 200
            assert (server.stop(), node.stop()) == (0, 0), server.output + node.output
    assert sorted((span.service, span.name, span.trace) for span in found.spans) == [
        ("shardrank-serve", "http rank", TRACE),
        ("shardrank-serve", "shardrank.ask", TRACE),
        ("shardrank-serve", "shardrank.batch", TRACE),
        ("shardrank-serve", "shardrank.dense", TRACE),
        ("shardrank-serve", "shardrank.lookup", TRACE),
        ("shardrank-shard-node", "shardrank.pool", TRACE),
    ]
