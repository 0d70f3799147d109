"""How much code does one warm JSON rank request go through?

    python -m loadtest.count_calls [--same] [--json]

Serves a small model in this process, warms it up with requests over one kept HTTP connection, and counts the `call`
events of `sys.setprofile` on the loop's thread for one more: of functions whose file lies in loader, shard_node,
router, serving or loadtest, but for this file. The client is in a thread of its own, with blocking sockets, and is not
counted: profiling is by thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

import uvloop

from loadtest.http_connection import post_request
from loadtest.workloads.catalog import BenchShape, bench_payloads, bench_spec
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
        """What `sys.setprofile` calls."""
        if event != "call":
            return
        code = frame.f_code
        if not self._is_ours(code.co_filename):
            return
        self.calls[code] += 1
        if code.co_filename != self._file:
            self.changes += bool(self._file)
            self._file = code.co_filename

    @staticmethod
    def _is_ours(name: str) -> bool:
        path = Path(name)
        if name == __file__:
            return False
        return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES

    def report(self) -> dict[str, object]:
        """What was counted."""
        by_file: dict[str, dict[str, int]] = {}
        for code, count in self.calls.items():
            name = str(Path(code.co_filename).relative_to(ROOT))
            functions = by_file.setdefault(name, {})
            functions[code.co_qualname] = functions.get(code.co_qualname, 0) + count
        return {
            "calls": sum(self.calls.values()),
            "functions": len(self.calls),
            "files": len(by_file),
            "changes_of_file": self.changes,
            "by_file": {name: dict(sorted(by_file[name].items())) for name in sorted(by_file)},
        }


def ask(sock: socket.socket, request: bytes) -> None:
    """Sends a request and reads its answer. Raises RuntimeError unless that is a 200."""
    sock.sendall(request)
    got = b""
    while b"\r\n\r\n" not in got:
        got += sock.recv(1 << 16)
    head, _, body = got.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(got[:1000].decode(errors="replace"))
    length = next(
        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    while len(body) < length:
        body += sock.recv(1 << 16)


async def count(folder: Path, *, same: bool) -> dict[str, object]:
    """Serves, warms up and counts a few requests: that with the fewest calls had no periodic work beside it."""
    shape = BenchShape.of(ROWS, varied=not same)
    spec = bench_spec(shape, "mlp")
    snapshot = write_random_snapshot(spec, folder)
    service = RankingService(None, expected_models=[spec.model])
    try:
        # As `shardrank serve` does with all rows in its RAM: the loop itself ranks.
        source = ModelSource(snapshot=snapshot, dtype="float32", num_replicas=0)
        loop = asyncio.get_running_loop()
        service.install(await asyncio.to_thread(load_served_model, source, service, loop=loop))
        config = ServerConfig(http_port=0, grpc_port=0, shutdown_delay_s=0)
        async with running_server(service, config) as listening:
            pool = bench_payloads(shape, "mlp", 1, "json", 32)
            place = (listening.host, listening.http_port)
            posts = [post_request(*place, pool.path, dict(one.headers), one.body) for one in pool]
            requests = [b"".join((one.head, b"\r\n", one.body)) for one in posts]
            sock = await asyncio.to_thread(socket.create_connection, place, 30)
            with sock:
                for number in range(WARM_UP_REQUESTS):
                    await asyncio.to_thread(ask, sock, requests[number % len(requests)])
                return min([await _counted(sock, one) for one in requests[:8]], key=lambda one: int(str(one["calls"])))
    finally:
        service.close()


async def _counted(sock: socket.socket, request: bytes) -> dict[str, object]:
    counter = CallCounter()
    # What an earlier request leaves behind, such as a batch's end, is not this one's.
    await asyncio.sleep(0.01)
    sys.setprofile(counter)
    try:
        await asyncio.to_thread(ask, sock, request)
    finally:
        sys.setprofile(None)
    return counter.report()


def main() -> None:
    """The program."""
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
    by_file = found.pop("by_file")
    sys.stdout.write(", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in found.items()) + "\n")
    assert isinstance(by_file, dict)
    for name, functions in by_file.items():
        sys.stdout.write(f"{sum(functions.values()):5} {name}\n")
        for function, calls in functions.items():
            sys.stdout.write(f"      {calls:3} {function}\n")


if __name__ == "__main__":
    main()
