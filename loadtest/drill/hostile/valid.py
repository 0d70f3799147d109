"""Valid clients, in a process of their own: varied requests at a fixed rate, open loop, each answer checked.

`python -m loadtest.drill.hostile.valid CONFIG` with a file that holds a `WatchConfig` as JSON. It prints `ready`, and
goes on until it is killed. Latency counts from when a request was due.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
import httpx
import numpy as np
import uvloop
from pydantic import Field

from loader.snapshot.manifest import Frozen
from loadtest.errors import AnswerError
from loadtest.grpc_channels import as_it_is, open_channels
from loadtest.workloads.catalog import BenchShape, bench_workload
from loadtest.workloads.payloads import Api, Payload, Payloads
from serving.fleet.process import die_with_parent

RECORD = np.dtype([("due", "<f8"), ("done", "<f8"), ("source", "u1"), ("ok", "?")])
APIS: tuple[Api, ...] = ("json", "oip-http", "grpc")
# Of every feature, about; 1 to 3.
HOTNESS = 2
# One JSON request of so many comes over a connection of its own: a server must go on to accept.
FRESH_EVERY = 4
FLUSH_S = 0.1
MAX_DETAILS = 1000


class WatchConfig(Frozen):
    """What valid clients and probes are told.

    Attributes:
        host, http_port, grpc_port: where the server is.
        shape: of the model that it serves, with an MLP.
        rate: valid requests a second over all APIs.
        log: file that gets a `RECORD` for each answer. Reasons of failures go to the same name with `.txt`.
        timeout_ms: that each valid request tells.
        requests_each: different requests for each API.
        seed: of them.
    """

    host: str = "127.0.0.1"
    http_port: int
    grpc_port: int
    shape: BenchShape
    rate: float = Field(gt=0)
    log: Path
    timeout_ms: int = 1000
    requests_each: int = Field(default=32, ge=1)
    seed: int = 0


class Log:
    """Records, written now and then."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._details = path.with_suffix(".txt").open("a", encoding="utf-8", buffering=1)
        self._left = MAX_DETAILS
        self._records: list[tuple[float, float, int, bool]] = []

    def add(self, due: float, source: int, problem: str) -> None:
        """An answer that came now; `problem` is empty for a right one."""
        done = time.monotonic()
        self._records.append((due, done, source, not problem))
        if problem and self._left:
            self._left -= 1
            self._details.write(f"{done:.6f} {problem[:300]!r}\n")

    def flush(self) -> None:
        """Writes what there is."""
        if self._records:
            self._file.write(np.array(self._records, RECORD).tobytes())
            self._records.clear()


Ask = Callable[[int], Awaitable[str]]


def http_asks(config: WatchConfig, pool: Payloads, fresh_every: int) -> Ask:
    """Asks request i over kept connections, some over one of its own."""
    # Deadlines are the caller's.
    client_of = partial(httpx.AsyncClient, verify=False, trust_env=False, timeout=None)
    host = f"[{config.host}]" if ":" in config.host else config.host
    kept, url = client_of(), f"http://{host}:{config.http_port}{pool.path}"

    async def ask(number: int) -> str:
        payload = pool[number % len(pool)]
        async with client_of() if fresh_every and number % fresh_every == 0 else nullcontext(kept) as client:
            answer = await client.post(url, content=payload.body, headers=payload.headers)
        body = answer.content
        return f"{answer.status_code} {body[:200]!r}" if answer.status_code != 200 else _count(pool, payload, body)

    return ask


def grpc_asks(config: WatchConfig, pool: Payloads) -> Ask:
    """Asks request i over one of two channels."""
    channels = open_channels(config.host, config.grpc_port, 2)
    calls = [channel.unary_unary(pool.path, as_it_is, as_it_is) for channel in channels]

    async def ask(number: int) -> str:
        payload = pool[number % len(pool)]
        try:
            return _count(pool, payload, await calls[number % 2](payload.body, timeout=config.timeout_ms / 1e3))
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"

    return ask


def _count(pool: Payloads, payload: Payload, answer: bytes) -> str:
    try:
        found = len(pool.scores(answer))
    except AnswerError as error:
        return str(error)
    return "" if found == payload.num_candidates else f"{found} scores, {payload.num_candidates} are due"


async def run(config: WatchConfig) -> None:
    """Asks until it is cancelled."""
    drawn = bench_workload(config.shape, "mlp", HOTNESS)
    pools = [
        Payloads(drawn, api, count=config.requests_each, seed=config.seed, timeout_ms=config.timeout_ms) for api in APIS
    ]
    asks = [
        http_asks(config, pools[0], FRESH_EVERY),
        http_asks(config, pools[1], 0),
        grpc_asks(config, pools[2]),
    ]
    log, out = Log(config.log), set[asyncio.Task[None]]()

    async def one(due: float, source: int, number: int) -> None:
        try:
            async with asyncio.timeout(config.timeout_ms / 1e3 + 1):
                problem = await asks[source](number)
        except (OSError, TimeoutError, httpx.HTTPError) as error:
            problem = repr(error)
        log.add(due, source, f"{APIS[source]}: {problem}" if problem else "")

    # What is there by now stays for good: a collection that walks all requests would delay answers.
    gc.freeze()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    first, number, flushed = time.monotonic(), 0, 0.0
    while True:
        due = first + number / config.rate
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        task = asyncio.create_task(one(due, number % len(asks), number // len(asks)))
        out.add(task)
        task.add_done_callback(out.discard)
        number += 1
        if due - flushed > FLUSH_S:
            flushed = due
            log.flush()


def main(arguments: list[str]) -> None:
    """The program."""
    die_with_parent(os.environ)
    config = WatchConfig.model_validate_json(Path(arguments[0]).read_text(encoding="utf-8"))
    uvloop.run(run(config))


if __name__ == "__main__":
    main(sys.argv[1:])
