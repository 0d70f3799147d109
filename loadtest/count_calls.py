"""How much code does one warm JSON rank request go through?

    python -m loadtest.count_calls [--same] [--json]

Serves a small model in this process, warms it up with requests over one kept HTTP connection, and counts the `call`
events of `sys.setprofile` on the loop's thread for one more: of functions whose file lies in loader, shard_node,
router, serving or loadtest, but for this file. The client is in a thread of its own and not counted: profiling is by
thread.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections import Counter
from http.client import HTTPConnection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import uvloop

from loadtest.workloads.catalog import BenchShape, bench_payloads, bench_spec
from loadtest.workloads.payloads import Payload
from loadtest.workloads.prepare import write_random_snapshot
from serving.rank.service import RankingService
from serving.server import ServerConfig, running_server
from serving.versions.loading import ModelSource, load_served_model

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("loader", "shard_node", "router", "serving", "loadtest")
ROWS = 10_000
WARM_UP_REQUESTS = 300


class CallCounter:
    """Counts calls on the thread that it is set for."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.changes = 0
        self._file = ""

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Take an event of `sys.setprofile`."""
        code = frame.f_code
        if event == "call" and _is_ours(code.co_filename):
            self.calls[code] += 1
            self.changes += code.co_filename != self._file != ""
            self._file = code.co_filename

    def report(self) -> dict[str, Any]:
        """Return what was counted."""
        by_file: dict[str, Counter[str]] = {}
        for code, count in self.calls.items():
            by_file.setdefault(str(Path(code.co_filename).relative_to(ROOT)), Counter())[code.co_qualname] += count
        return {
            "calls": self.calls.total(),
            "functions": len(self.calls),
            "files": len(by_file),
            "changes_of_file": self.changes,
            "by_file": {name: dict(sorted(by_file[name].items())) for name in sorted(by_file)},
        }


def _is_ours(name: str) -> bool:
    path = Path(name)
    return name != __file__ and path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES


def ask(connection: HTTPConnection, path: str, request: Payload) -> None:
    """Send a request and read its answer. Raises RuntimeError unless that is a 200."""
    connection.request("POST", path, request.body, dict(request.headers))
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != 200:
        raise RuntimeError(body[:1000].decode(errors="replace"))


async def count(folder: Path, *, same: bool) -> dict[str, Any]:
    """Serve, warm up and count a few requests: that with the fewest calls had no periodic work beside it."""
    shape = BenchShape.of(ROWS, varied=not same)
    spec = bench_spec(shape, "mlp")
    snapshot = write_random_snapshot(spec, folder)
    service = RankingService(None, expected_models=[spec.model])
    try:
        # As `shardrank serve` does with all rows in its RAM: the loop itself ranks.
        source = ModelSource(snapshot=snapshot, dtype="float32", num_replicas=0)
        loop = asyncio.get_running_loop()
        service.install(await asyncio.to_thread(load_served_model, source, service, loop=loop))
        async with running_server(service, ServerConfig(http_port=0, grpc_port=0, shutdown_delay_s=0)) as listening:
            pool = bench_payloads(shape, "mlp", 1, "json", 32)
            with contextlib.closing(HTTPConnection(listening.host, listening.http_port, timeout=30)) as connection:
                for number in range(WARM_UP_REQUESTS):
                    await asyncio.to_thread(ask, connection, pool[0].path, pool[number % len(pool)])
                counted = [await _counted(connection, pool[0].path, pool[number]) for number in range(8)]
                return min(counted, key=lambda one: int(one["calls"]))
    finally:
        service.close()


async def _counted(connection: HTTPConnection, path: str, request: Payload) -> dict[str, Any]:
    counter = CallCounter()
    # What an earlier request leaves behind, such as a batch's end, is not this one's.
    await asyncio.sleep(0.01)
    sys.setprofile(counter)
    try:
        await asyncio.to_thread(ask, connection, path, request)
    finally:
        sys.setprofile(None)
    return counter.report()


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print all as JSON")
    parser.add_argument(
        "--same", action="store_true", help="always 100 candidates with one id a bag, not varied requests"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = uvloop.run(count(Path(folder), same=arguments.same))
    if arguments.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    by_file: dict[str, dict[str, int]] = found.pop("by_file")
    sys.stdout.write(", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in found.items()) + "\n")
    for name, functions in by_file.items():
        sys.stdout.write(f"{sum(functions.values()):5} {name}\n")
        for function, calls in functions.items():
            sys.stdout.write(f"      {calls:3} {function}\n")


if __name__ == "__main__":
    main()
