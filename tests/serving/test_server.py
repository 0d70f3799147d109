from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest

from serving.config import ServeConfig
from serving.embedded import ModelSource, load_served_model
from serving.rank.service import RankingService
from serving.server import serve
from shardrank_testing.serving_api import MODEL, ApiModel, Gate, api_request, gated_service, running_api, until
from shardrank_testing.serving_process import serving_process


@pytest.mark.nightly
def test_two_processes_share_ports_and_metrics(api_model, tmp_path):
    with (
        serving_process(api_model.path, metrics_folder=tmp_path) as first,
        serving_process(api_model.path, first.http_port, first.grpc_port, tmp_path) as second,
    ):
        assert (second.http_port, second.grpc_port) == (first.http_port, first.grpc_port)
        # Nobody asked for traces. (OpenTelemetry's API is FastAPI's; its SDK and exporters would be ours.)
        assert not first.has_otel_sdk
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


async def test_what_is_in_flight_when_the_server_stops_is_answered(api_model):
    gate = Gate()

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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextlib.asynccontextmanager
async def loading_server(
    model: ApiModel, port: int, probe_port: int | None = None
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A serving process that loads its model when what is yielded is called, and is then ready."""
    service, may_load, ready = RankingService(expected_models=[MODEL]), asyncio.Event(), asyncio.Event()

    async def load() -> None:
        await may_load.wait()
        service.install(await asyncio.to_thread(load_served_model, ModelSource(snapshot=model.path), service))

    async def finish_loading() -> None:
        may_load.set()
        await ready.wait()

    config = ServeConfig(http_port=port, grpc_port=0, shutdown_delay_s=0, probe_port=probe_port)
    serving = asyncio.create_task(serve(service, config, load, lambda listening: ready.set()))
    yield finish_loading
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving


async def test_a_process_that_loads_says_so_and_is_ready_afterwards(api_model):
    base, patient = f"http://127.0.0.1:{(port := free_port())}", httpx.AsyncHTTPTransport(retries=8)
    async with (
        loading_server(api_model, port) as finish_loading,
        httpx.AsyncClient(base_url=base, transport=patient) as client,
    ):
        assert (await client.get("/healthz")).status_code == 200
        answer = await client.get("/readyz")
        assert (answer.status_code, list(answer.json()["problems"])) == (503, [MODEL])
        answer = await client.post(f"/v1/models/{MODEL}:rank", json=api_request(1))
        assert (answer.status_code, answer.json()["error"]["kind"]) == (503, "not_ready")
        await finish_loading()
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.post(f"/v1/models/{MODEL}:rank", json=api_request(1))).status_code == 200


async def test_a_worker_listens_at_a_shared_port_when_it_is_loaded(api_model):
    port, probe_port = free_port(), free_port()
    async with (
        loading_server(api_model, port, probe_port) as finish_loading,
        httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(retries=8)) as client,
    ):
        assert (await client.get(f"http://127.0.0.1:{probe_port}/readyz")).status_code == 503
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        await finish_loading()
        for served in (port, probe_port):
            assert (await client.get(f"http://127.0.0.1:{served}/readyz")).status_code == 200


async def test_a_process_leaves_its_fleet_once_requests_have_ended(api_model):
    """So that a rollout waits for it while it answers."""
    service, port, left = RankingService(), free_port(), asyncio.Event()

    async def load() -> None:
        service.install(await asyncio.to_thread(load_served_model, ModelSource(snapshot=api_model.path), service))

    async def leave() -> None:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        left.set()

    config, ready = ServeConfig(http_port=port, grpc_port=0, shutdown_delay_s=0), asyncio.Event()
    serving = asyncio.create_task(serve(service, config, load, lambda listening: ready.set(), leave=leave))
    await ready.wait()
    serving.cancel()
    await asyncio.wait([serving])
    assert left.is_set()


async def test_a_worker_that_is_stopped_under_load_loses_no_request(api_model):
    statuses: list[int] = []

    async def load(url: str, seed: int, stop: asyncio.Event, ended: asyncio.Event) -> None:
        # Nothing is sent twice: any connection that is reset, and any answer but a success, is a failure.
        # One half keeps its connections, the other opens one for each request.
        keeps_connections = seed % 2 == 0
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(httpx.AsyncClient(verify=False))
            while not (stop.is_set() and ended.is_set()):
                if not keeps_connections:
                    client = await stack.enter_async_context(httpx.AsyncClient(verify=False))
                answer = await client.post(f"{url}/v1/models/{MODEL}:rank", json=api_request(seed))
                statuses.append(answer.status_code)

    with serving_process(api_model.path) as first, serving_process(api_model.path, first.http_port, first.grpc_port):
        stop, ended = asyncio.Event(), asyncio.Event()
        clients = [
            asyncio.create_task(load(f"http://127.0.0.1:{first.http_port}", seed, stop, ended)) for seed in range(4)
        ]
        await until(lambda: len(statuses) >= 50)
        first.process.send_signal(signal.SIGTERM)
        stop.set()
        assert await asyncio.to_thread(first.process.wait, 20) == 0
        count = len(statuses)
        await until(lambda: len(statuses) >= count + 20)
        ended.set()
        await asyncio.gather(*clients)
    assert set(statuses) == {200}
