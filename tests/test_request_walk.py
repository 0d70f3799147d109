"""ARCHITECTURE.md's way of a request names the files that a request passes, and no others."""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter
from contextlib import AsyncExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from types import FrameType

import pytest
import uvloop

from loader.snapshot.reader import Snapshot
from loadtest.bench.harness import make_node, remote_shards
from loadtest.workloads.catalog import BenchShape, BenchWorkload, bench_payloads, bench_spec
from loadtest.workloads.prepare import write_random_snapshot
from router.plan import Plan
from serving import rank
from serving.config import ServeConfig
from serving.rank.service import RankingService
from serving.server import running_server
from serving.versions.loaded_version import LoadedVersion, LoadOptions
from shard_node.wire.address import Address
from shardrank_testing.nodes import serving

ROOT = Path(__file__).resolve().parent.parent
INSTALLED = Path(rank.__file__).resolve().parent.parent.parent
"""Where the packages are imported from: the checkout, or the environment."""
PACKAGES = ("loader", "shard_node", "router", "serving")
SHAPE = BenchShape.of(20_000, varied=True)
"""Of a model with so many rows that not every shard has them all."""


def files_named(text: str) -> set[str]:
    """Return the files of the modules that `code` names are in, of whatever depth: a package is its `__init__.py`."""
    files = set()
    for name in re.findall(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)`", text):
        parts = name.split(".")
        paths = (Path(*parts[:count]).with_suffix(".py") for count in range(len(parts), 0, -1))
        files |= {str(path) for path in paths if (ROOT / path).is_file()}
    return files


def walk() -> tuple[set[str], set[str]]:
    """Return the files that the section names, and those that a request must pass.

    These are named in a numbered step, but not in parentheses that begin with "or", nor after "gRPC:" in its step.
    """
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.partition("## The way of a request\n")[2].partition("\n## ")[0]
    steps = re.findall(r"^\d+\. (.*(?:\n   .*)*)", section, re.MULTILINE)
    certain = [re.sub(r"\(or\b[^()]*(?:\([^()]*\)[^()]*)*\)|gRPC:.*", "", step, flags=re.DOTALL) for step in steps]
    return files_named(section), files_named("\n".join(certain))


async def passed_files(path: Path, folder: Path) -> set[str]:
    """Serve a snapshot over two shards on sockets, all in this thread, and return the files that most requests pass.

    What runs now and then beside a request is not passed by most of them.
    """
    snapshot, passed, loop = Snapshot.open(path), list[set[str]](), asyncio.get_running_loop()
    workload = BenchWorkload(shape=SHAPE, head="mlp", hotness=1)
    plan, (request,) = Plan.make(snapshot.spec, 2), bench_payloads(workload, "json", 1)

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            passed[-1].add(frame.f_code.co_filename)

    async with AsyncExitStack() as stack:
        nodes = [Address(path=f"{folder}/{shard}.sock") for shard in range(2)]
        for shard, address in enumerate(nodes):
            await stack.enter_async_context(serving(address, make_node(snapshot, plan, shard)))
        service = stack.enter_context(closing(RankingService(None, expected_models=["bench-mlp"])))
        version = await asyncio.to_thread(
            LoadedVersion.load,
            snapshot,
            plan,
            lambda _: remote_shards(snapshot, plan, nodes),
            LoadOptions(dtype="float32", num_replicas=0),
            limits=service.limits,
            metrics=service.metrics,
            clock=service.clock,
            loop=loop,
        )
        service.install(version)
        running = running_server(service, ServeConfig(http_port=0, grpc_port=0, shutdown_delay_s=0))
        server = await stack.enter_async_context(running)
        connection = stack.enter_context(closing(HTTPConnection(server.host, server.http_port, timeout=30)))
        for number in range(7):
            passed.append(set())
            sys.setprofile(note if number >= 2 else None)
            await asyncio.to_thread(connection.request, "POST", request.path, request.body, dict(request.headers))
            response = await asyncio.to_thread(connection.getresponse)
            assert (response.status, bool(response.read())) == (200, True)
        sys.setprofile(None)
    counts = Counter(name for files in passed[2:] for name in files)
    names = {name.removeprefix(f"{INSTALLED}/") for name, count in counts.items() if count >= 3}
    return {name for name in names if name.startswith(tuple(f"{package}/" for package in PACKAGES))}


@pytest.mark.timeout(120)
def test_the_way_of_a_request_names_its_files(tmp_path: Path) -> None:
    """A JSON request over two shards passes all that the text says, and nothing else."""
    path = write_random_snapshot(bench_spec(SHAPE, "mlp"), tmp_path)
    passed = uvloop.run(passed_files(path, tmp_path))
    named, certain = walk()
    missing, extra = sorted(passed - named), sorted(certain - passed)
    assert not missing, f"passed, but not named in the text: {missing}"
    assert not extra, f"named in the text, but not passed: {extra}"
