"""Probes and metrics on a port and a thread of their own. On real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import threading
import time

import httpx
import pytest

from serving.api.http_server import running_admin
from serving.errors import ServingError
from serving.rank.service import RankingService
from serving.server import ServerConfig, serve
from shardrank_testing.serving_api import MODEL, api_service, running_api, served_service

pytestmark = pytest.mark.anyio

PATHS = {"/healthz": 200, "/readyz": 503, "/v2/health/live": 200, "/v2/health/ready": 503, "/metrics": 200}


def fetch(port: int, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()


async def test_it_answers_while_the_loop_that_ranks_stands_still():
    service = RankingService(expected_models=[MODEL])

    async with running_admin(service, "127.0.0.1", 0) as port:
        found: dict[str, int] = {}

        def ask() -> None:
            found.update({path: fetch(port, path)[0] for path in PATHS})

        asking = threading.Thread(target=ask)
        asking.start()
        # Holds this event loop until all is answered.
        while asking.is_alive():
            time.sleep(0.001)  # noqa: ASYNC251
        assert found == PATHS


async def test_a_serving_process_has_it_from_before_it_loads_until_it_has_stopped(api_model):
    service = RankingService(expected_models=[MODEL])
    loading, loaded = asyncio.Event(), asyncio.Event()
    seen = []

    async def load() -> None:
        loading.set()
        await loaded.wait()

    config = ServerConfig(http_port=0, grpc_port=0, admin_port=0, shutdown_delay_s=0)
    serving = asyncio.create_task(serve(service, config, load, on_listening=seen.append))
    await loading.wait()
    port = seen[0].admin_port
    assert (await asyncio.to_thread(fetch, port, "/readyz"))[0] == 503
    status, page = await asyncio.to_thread(fetch, port, "/")
    assert (status, b"<title>shardrank</title>" in page) == (200, True)
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    with pytest.raises(ConnectionRefusedError):
        await asyncio.to_thread(fetch, port, "/healthz")


async def test_metrics_of_the_main_port_are_rendered_on_a_thread_once_for_all_who_ask(api_model):
    threads: list[str] = []

    service = served_service(api_model)
    render = service.metrics.render

    def noting() -> bytes:
        threads.append(threading.current_thread().name)
        time.sleep(0.2)
        return render()

    service.metrics.render = noting  # type: ignore[method-assign]
    async with running_api(service) as api:
        answers = await asyncio.gather(*(api.http.get("/metrics") for _ in range(5)))
        assert {answer.status_code for answer in answers} == {200}
    assert len(threads) < 5
    assert threading.main_thread().name not in threads
    await asyncio.to_thread(service.close)


class Doorman:
    """Lets in whoever says the right that is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def check(self, authorization: str | None, scope: str) -> None:
        self.asked.append(scope)
        if authorization != f"Bearer {scope}":
            raise ServingError(f"not for you: {scope}")


async def test_every_path_asks_for_its_right_and_probes_for_none(api_model):
    from serving.api.http import HttpApp
    from serving.api.http_server import HttpServer

    with api_service(api_model) as service:
        doorman = Doorman()
        server = HttpServer(service, 1.0, HttpApp(service, doorman))
        port = await server.start("127.0.0.1", 0)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            for method, path, right in [
                ("POST", f"/v1/models/{MODEL}:rank", "rank"),
                ("POST", f"/v1/models/{MODEL}:lookup", "rank"),
                ("POST", f"/v2/models/{MODEL}/infer", "rank"),
                ("GET", "/v1/models", "describe"),
                ("GET", f"/v1/models/{MODEL}", "describe"),
                ("GET", "/v2", "describe"),
                ("GET", f"/v2/models/{MODEL}/config", "describe"),
                ("POST", "/v2/repository/index", "describe"),
                ("POST", f"/v2/repository/models/{MODEL}/load", "admin"),
                ("GET", "/metrics", "admin"),
            ]:
                refused = await client.request(method, path)
                assert refused.status_code == 500, path
                assert f"not for you: {right}" in refused.text
                allowed = await client.request(method, path, headers={"authorization": f"Bearer {right}"})
                assert "not for you" not in allowed.text
            doorman.asked.clear()
            for path in ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", f"/v2/models/{MODEL}/ready"):
                await client.get(path)
            assert doorman.asked == []
        await server.stop()
