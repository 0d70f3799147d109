"""How many Python functions, of how many files of this project, one warm JSON rank request goes through."""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
from http.client import HTTPConnection
from pathlib import Path
from types import CodeType
from typing import Any

from loadtest.errors import RequestFailedError
from loadtest.servers import SERVED_PACKAGES, THIS_CHECKOUT
from loadtest.workloads.catalog import BenchShape, bench_payloads, bench_spec
from loadtest.workloads.payloads import Payload
from loadtest.workloads.prepare import write_random_snapshot
from serving.rank.service import RankingService
from serving.server import ServerConfig, running_server
from serving.versions.loading import ModelSource, load_served_model

ROWS = 10_000
WARM_UP_REQUESTS, COUNTED_REQUESTS = 300, 8
SETTLE_S = 0.01


def _send(connection: HTTPConnection, request: Payload) -> None:
    connection.request("POST", request.path, request.body, dict(request.headers))
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise RequestFailedError(body[:1000].decode(errors="replace"))


async def count_calls(folder: Path) -> dict[str, Any]:
    """Serve a small model in this process, warm it up over one kept connection, and count a few requests more.

    The client is in another thread, which is not counted. The report is that of the request with the fewest calls,
    which had no periodic work beside it.

    Raises:
        RequestFailedError: a request failed.
    """
    shape = BenchShape.of(ROWS, varied=True)
    spec = bench_spec(shape, "mlp")
    service = RankingService(None, expected_models=[spec.model])
    try:
        # As `shardrank serve` does with all rows in its RAM: the event loop itself ranks.
        source = ModelSource(snapshot=write_random_snapshot(spec, folder), dtype="float32", num_replicas=0)
        loop = asyncio.get_running_loop()
        service.install(await asyncio.to_thread(load_served_model, source, service, loop=loop))
        async with running_server(service, ServerConfig(http_port=0, grpc_port=0, shutdown_delay_s=0)) as listening:
            pool = bench_payloads(shape, "mlp", 1, "json", 32)
            with contextlib.closing(HTTPConnection(listening.host, listening.http_port, timeout=30)) as connection:
                for number in range(WARM_UP_REQUESTS):
                    await asyncio.to_thread(_send, connection, pool[number % len(pool)])
                reports = [await _counted(connection, pool[number]) for number in range(COUNTED_REQUESTS)]
        return min(reports, key=lambda report: int(report["count"]))
    finally:
        service.close()


async def _counted(connection: HTTPConnection, request: Payload) -> dict[str, Any]:
    profile, by_file = cProfile.Profile(builtins=False), dict[str, dict[str, int]]()
    packages = tuple(f"{THIS_CHECKOUT}/{package}/" for package in SERVED_PACKAGES)
    # A batch ends after its answers were sent; that end belongs to its request.
    await asyncio.sleep(SETTLE_S)
    profile.enable()
    try:
        await asyncio.to_thread(_send, connection, request)
        await asyncio.sleep(SETTLE_S)
    finally:
        profile.disable()
    for entry in profile.getstats():
        if isinstance(entry.code, CodeType) and entry.code.co_filename.startswith(packages):
            name = str(Path(entry.code.co_filename).relative_to(THIS_CHECKOUT))
            by_file.setdefault(name, {})[entry.code.co_qualname] = entry.callcount
    functions = [count for calls in by_file.values() for count in calls.values()]
    return {"count": sum(functions), "functions": len(functions), "files": len(by_file), "by_file": by_file}
