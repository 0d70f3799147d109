"""Measure published models at full size: export, load, requests a second and times, in one process and on two shards.

    python scripts/measure_published_models.py STORE --model merlin-tiny [--budget-gb B] [--swap] --json FILE

Exports the model into STORE, twice with --swap, whose second version is rolled out while requests are sent. Eight
connections send requests as fast as they are answered, then one alone. With --budget-gb rows of each process beyond it
are on disk.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from loader.registry import open_registry
from loader.registry.fleet import FleetRegistry
from loader.rollout.plan import read_rollout
from loader.rollout.requests import start_rollout
from loader.snapshot.publishing import publish, rows_bytes_of
from loadtest.servers import free_ports
from loadtest.workloads.catalog import open_workload
from loadtest.workloads.payloads import Payload, drawn_payloads
from serving.fleet.config import FleetConfig
from serving.fleet.local_fleet import running_fleet

CONNECTIONS, PAYLOADS, TIMEOUT_MS = 8, 64, 60_000
HOST = "127.0.0.1"
COMMAND = [sys.executable, "-m", "serving.cli"]


def export(workload: str, store: Path, version: int) -> dict[str, Any]:
    """Write a version, with another seed each, if it is not there; return time and memory."""
    spec = open_workload(workload).spec
    if (store / spec.model / str(version)).exists():
        return {}
    command = [*COMMAND, "loadtest", "prepare", "--workload", workload, "--store", str(store), "--seed", str(version)]
    started_at, peak, cached = time.monotonic(), 0, 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError, KeyError):
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith("kB")}
            peak, cached = max(peak, sizes["RssAnon"]), max(cached, sizes["RssFile"])
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{command} failed")
    return {"export_s": time.monotonic() - started_at, "export_anonymous_bytes": peak, "export_file_bytes": cached}


async def post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: Payload) -> int:
    """Send a request, and return the status of its answer."""
    heads = "".join(f"{name}: {value}\r\n" for name, value in payload.headers)
    begin = f"POST {payload.path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(payload.body)}\r\n{heads}\r\n"
    writer.write(begin.encode() + payload.body)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length"))
    await reader.readexactly(length)
    return int(head.split()[1])


async def keep_busy(port: int, payloads: list[Payload], connections: int, seconds: float) -> dict[str, Any]:
    """Send on so many connections until the time is over; return what was answered."""
    times, statuses, until = list[float](), dict[int, int](), time.monotonic() + seconds

    async def work(number: int) -> None:
        reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 24)
        while time.monotonic() < until:
            started_at, payload = time.monotonic(), payloads[(number * 7 + len(times)) % len(payloads)]
            status = await post(reader, writer, payload)
            statuses[status] = statuses.get(status, 0) + 1
            times.append(time.monotonic() - started_at)
        writer.close()

    started_at = time.monotonic()
    await asyncio.gather(*map(work, range(connections)))
    quantiles = (1e3 * np.percentile(times, [50, 99])).tolist()
    result = {"requests_per_s": len(times) / (time.monotonic() - started_at), "statuses": statuses}
    return result | dict(zip(("p50_ms", "p99_ms"), quantiles, strict=True))


@contextlib.asynccontextmanager
async def serving_locally(store: Path, model: str, budget_gb: float | None, folder: Path) -> AsyncIterator[int]:
    """Serve with rows in one process, and yield its port."""
    (port,) = free_ports(1)
    settings = folder / "serve.toml"
    budget = "" if budget_gb is None else f"memory_budget_gb = {budget_gb}\n"
    settings.write_text(f'store = "{store}"\nmodels = ["{model}"]\nhttp_port = {port}\nverify = false\n{budget}')
    command = [*COMMAND, "serve", "--config", str(settings), "--version", "1"]
    with (folder / "serve.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(*command, stderr=log)
        try:
            while process.returncode is None:
                with contextlib.suppress(OSError):
                    socket = await asyncio.open_connection(HOST, port)
                    socket[1].write(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                    if b" 200 " in await socket[0].read(-1):
                        break
                await asyncio.sleep(0.1)
            yield port
        finally:
            process.terminate()
            await process.wait()


def children_bytes() -> int:
    """Return the anonymous memory of all processes below this one."""
    total = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError, IndexError):
            lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
            total += next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
    return total


async def swapped(fleet: FleetConfig, port: int, store: Path, model: str, payloads: list[Payload]) -> dict[str, Any]:
    """Roll version 2 out while requests are sent; return what became of these, and the memory at its most."""
    opened, peak = FleetRegistry(open_registry(fleet.registry_url)), 0
    load: dict[str, Any] = {"statuses": {}, "times": []}

    async def send() -> None:
        reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 24)
        for number in range(10**9):
            started_at = time.monotonic()
            status = await post(reader, writer, payloads[number % len(payloads)])
            load["statuses"][status] = load["statuses"].get(status, 0) + 1
            load["times"].append(time.monotonic() - started_at)

    senders = [asyncio.create_task(send()) for _ in range(4)]
    started_at = time.monotonic()
    await publish(opened, store / model / "2", store, clock=time.time)
    await start_rollout(opened, model, 2, rollout_id="f" * 32)
    while (last := await read_rollout(opened, model)) is not None and last.rollout.active:
        peak = max(peak, children_bytes())
        await asyncio.sleep(0.25)
    took_s = time.monotonic() - started_at
    for sender in senders:
        sender.cancel()
    await asyncio.gather(*senders, return_exceptions=True)
    await opened.registry.close()
    quantiles = (1e3 * np.percentile(load["times"], [50, 99, 100])).tolist()
    state = "" if last is None else f"{last.rollout.state} {last.rollout.reason}".strip()
    return {"rollout": state, "rollout_s": took_s, "peak_bytes": peak, "statuses": load["statuses"], "ms": quantiles}


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a model."""
    name, store, budget = options.model, options.store, options.budget_gb
    workload = open_workload(f"{name}:{options.scale:g}", ids=options.ids)
    row_bytes = rows_bytes_of(workload.spec)
    result: dict[str, Any] = {"workload": workload.name, "row_bytes": row_bytes, "budget_gb": budget}
    result |= export(f"{name}:{options.scale:g}", store, 1)
    if options.swap:
        export(f"{name}:{options.scale:g}", store, 2)
    payloads = list(islice(drawn_payloads(workload, "json", 5, TIMEOUT_MS), options.payloads))
    folder = store / "work"
    folder.mkdir(exist_ok=True)

    async def both(port: int) -> dict[str, Any]:
        warm = await keep_busy(port, payloads, CONNECTIONS, options.warmup)
        busy = await keep_busy(port, payloads, CONNECTIONS, options.seconds)
        return {"warmup": warm, "busy": busy, "alone": await keep_busy(port, payloads, 1, options.seconds)}

    started_at = time.monotonic()
    async with serving_locally(store, name, budget, folder) as port:
        result["local"] = {"load_s": time.monotonic() - started_at, "bytes": children_bytes(), **await both(port)}
    fleet = FleetConfig(
        store=store, registry=str(folder / f"registry-{os.getpid()}"),
        models=(name,), versions={name: 1}, shards=2, http_port=0, grpc_port=0, verify=False, memory_budget_gb=budget,
    )  # fmt: skip
    started_at = time.monotonic()
    async with running_fleet(fleet) as running:
        port, ready_s = running.ports.http_port, time.monotonic() - started_at
        result["shards"] = {"load_s": ready_s, "bytes": children_bytes(), **await both(port)}
        if options.swap:
            result["swap"] = await swapped(fleet, port, store, name, payloads)
    return result


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--ids")
    parser.add_argument("--budget-gb", type=float)
    parser.add_argument("--swap", action="store_true")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warmup", type=float, default=10.0)
    parser.add_argument("--payloads", type=int, default=PAYLOADS)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    result = asyncio.run(measure(options))
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
