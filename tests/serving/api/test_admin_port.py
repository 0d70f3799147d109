"""Probes and metrics on a port and a thread of their own. On real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import threading
import time
from functools import partial

import pytest

from loader.registry.memory import MemoryRegistry
from serving.api.http import running_admin
from serving.config import ServeConfig
from serving.dashboard.board import Board
from serving.rank.service import RankingService
from serving.server import serve
from shardrank_testing.serving_api import MODEL, running_api, served_service

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


async def test_a_process_has_it_from_before_it_loads_until_its_end(api_model):
    service = RankingService(expected_models=[MODEL])
    loading, loaded = asyncio.Event(), asyncio.Event()
    seen = []

    async def load() -> None:
        loading.set()
        await loaded.wait()

    config = ServeConfig(http_port=0, grpc_port=0, admin_port=0, shutdown_delay_s=0)
    page = partial(Board, partial(MemoryRegistry, "alone"))
    serving = asyncio.create_task(serve(service, config, load, on_listening=seen.append, page=page))
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


async def test_metrics_are_rendered_on_a_thread_once_for_all(api_model):
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
