from __future__ import annotations

import asyncio
import json
import re
import signal
import socket

import httpx
import pytest

from serving.errors import ListenError
from serving.limits import RequestLimits
from serving.server import ServerConfig, running_server
from shardrank_testing.serving_api import MODEL, Gate, api_request, api_service, gated_service, run, running_api
from shardrank_testing.serving_process import serving_process


def test_two_processes_share_the_ports_and_their_metrics_and_end_on_sigterm(api_model, tmp_path):
    with (
        serving_process(api_model.path, metrics_folder=tmp_path) as first,
        serving_process(api_model.path, first.http_port, first.grpc_port, tmp_path) as second,
    ):
        assert (second.http_port, second.grpc_port) == (first.http_port, first.grpc_port)
        base = f"http://127.0.0.1:{first.http_port}"
        for seed in range(20):
            # A connection each, so that the kernel spreads them.
            assert httpx.post(f"{base}/v1/models/{MODEL}:rank", json=api_request(seed)).status_code == 200
        metrics = httpx.get(f"{base}/metrics").text
        line = r'^shardrank_requests_total\{api="http",method="rank",model="films",status="ok"\} 20\.0$'
        assert re.search(line, metrics, re.MULTILINE)
        assert "shardrank_memory_bytes{" in metrics
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(20) == 0
        assert httpx.get(f"{base}/readyz").status_code == 200
        second.process.send_signal(signal.SIGTERM)
        assert second.process.wait(20) == 0


def test_what_is_in_flight_when_the_server_stops_is_answered_and_nothing_else_is_taken(api_model):
    gate = Gate()

    async def main() -> None:
        with gated_service(api_model, gate) as service:
            client = httpx.AsyncClient()
            async with running_api(service) as api:
                url = f"http://127.0.0.1:{api.listening.http_port}/v1/models/{MODEL}:rank"
                waiting = asyncio.create_task(client.post(url, json=api_request(1)))
                await gate.wait_until_busy()
                gate.open.set()
            assert (await waiting).status_code == 200
            with pytest.raises(httpx.ConnectError):
                await client.post(url, json=api_request(1))
            await client.aclose()

    run(main())


def test_a_request_that_outlasts_the_drain_is_cut_off(api_model):
    gate = Gate()

    async def main() -> None:
        with gated_service(api_model, gate, RequestLimits(default_timeout_ms=30_000)) as service:
            config = ServerConfig(http_port=0, grpc_port=0, drain_timeout_s=0.5)
            async with running_server(service, config) as listening:
                _, writer = await asyncio.open_connection("127.0.0.1", listening.http_port)
                body = json.dumps(api_request(1)).encode()
                writer.write(
                    f"POST /v1/models/{MODEL}:rank HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
                )
                writer.write(body)
                await gate.wait_until_busy()
            assert service.in_flight == 0
            writer.close()

    run(main())


@pytest.mark.parametrize("which", ["http_port", "grpc_port"])
def test_a_port_that_is_taken_is_an_error_that_names_it(api_model, which):
    async def main(service) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ListenError, match=str(port)):
                async with running_server(service, ServerConfig(**{"http_port": 0, "grpc_port": 0, which: port})):
                    pass

    with api_service(api_model) as service:
        run(main(service))
