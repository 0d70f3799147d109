"""`--trace-endpoint` and its fellows: real processes send their spans, and what can't be is refused at the start."""

from __future__ import annotations

import httpx
import pytest
from click.testing import CliRunner

from serving.cli import main
from shardrank_testing.otlp_receiver import collector
from shardrank_testing.processes import running
from shardrank_testing.serving_api import MODEL, api_request

ANY_PORTS = ("--http-port", "0", "--grpc-port", "0", "--shutdown-delay-s", "0")
TRACE, SPAN = f"{7:032x}", f"{5:016x}"


def test_a_serving_process_and_a_shard_node_send_one_trace_before_they_end(api_model, folder):
    with collector("grpc") as found:
        told = ("--snapshot", str(api_model.path), "--trace-endpoint", found.url, "--trace-protocol", "grpc")
        address = f"unix:{folder}/n.sock"
        with (
            running("shard-node", *told, "--shard", "0/1", "--listen", address) as node,
            running("serve", *told, "--shard", address, "--trace-sample-share", "0", *ANY_PORTS) as server,
        ):
            url = server.read_until(r"HTTP: (http://127.0.0.1:\d+)")[1]
            for headers in ({}, {"traceparent": f"00-{TRACE}-{SPAN}-01"}):
                answer = httpx.post(f"{url}/v1/models/{MODEL}:rank", json=api_request(1), headers=headers, timeout=30)
                assert answer.status_code == 200
            assert (server.stop(), node.stop()) == (0, 0), server.output + node.output
    assert {(one.trace, one.service) for one in found.spans} == {
        (TRACE, "shardrank-serve"),
        (TRACE, "shardrank-shard-node"),
    }
    assert sorted(one.name for one in found.spans) == [
        "http rank",
        "shardrank.ask",
        "shardrank.batch",
        "shardrank.dense",
        "shardrank.lookup",
        "shardrank.pool",
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trace-endpoint", "collector:4317"], "endpoint 'collector:4317' is not http://host:port"),
        (["--trace-protocol", "grpc"], "need --trace-endpoint"),
        (["--trace-endpoint", "http://c:1", "--trace-sample-share", "1.5"], "1.5 is not in the range"),
    ],
)
def test_what_can_not_be_is_refused_before_anything_is_loaded(api_model, flags, message):
    result = CliRunner().invoke(main, ["serve", "--snapshot", str(api_model.path), *flags])
    assert result.exit_code in (1, 2)
    assert message in result.output
