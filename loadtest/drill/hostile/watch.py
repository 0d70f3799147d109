"""What a server under attack is asked meanwhile: valid requests, each answer checked, and probes that find stalls.

`python -m loadtest.drill.hostile.watch CONFIG` with a file that holds a `WatchConfig` as JSON: valid clients, open loop
at a fixed rate, or the probes, two connections with a tiny request every 5 ms each. Both log as `loadtest.drill.load`
does, and go on until they are killed. A probe's latency is an upper bound of how long the server's loop stood: the
probing process and the server wait for a core too.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import grpc
import grpc.aio
import httpx
import numpy as np
import uvloop
from pydantic import Field

from loader.snapshot.tables import Frozen
from loadtest.drill.load import (
    RECORD,
    AnswerLog,
    Answers,
    Ask,
    DrillLoad,
    details_path,
    failed,
    latency_ms,
    percentile,
    read_answers,
)
from loadtest.drill.oracle import OK, Kind, Verdict
from loadtest.drill.processes import child_process, module_command, module_config, say_ready, until_ready
from loadtest.errors import AnswerError
from loadtest.load.senders import CHANNEL_OPTIONS, as_it_is, open_channels
from loadtest.workloads.catalog import BenchShape, bench_workload
from loadtest.workloads.payloads import Api, Payload, Payloads

VALID: tuple[Api, ...] = ("json", "oip-http", "grpc")
HTTP_PROBE, GRPC_PROBE = 3, 4
SOURCES = (*VALID, "http probe", "grpc probe")
# Of every feature, about; 1 to 3.
HOTNESS = 2
# One JSON request of so many comes over a connection of its own: a server must go on to accept.
FRESH_EVERY = 4
# That each valid request tells, and how long it is waited for.
TIMEOUT_MS, WAIT_S = 1000, 2.0
# Different requests for each API.
REQUESTS_EACH = 32
PROBE_INTERVAL_S = 0.005
PROBE_TIMEOUT_S = 60.0
RECONNECT_S = 0.05
MAX_FAILURES = 5


class WatchConfig(Frozen):
    """What valid clients and probes are told; `rate` is of valid requests over all APIs."""

    role: Literal["valid", "probe"]
    host: str = "127.0.0.1"
    http_port: int
    grpc_port: int
    shape: BenchShape
    rate: float = Field(gt=0)
    log: Path
    seed: int = 0


def http_ask(config: WatchConfig, pool: Payloads, fresh_every: int) -> Ask:
    """Ask over kept connections, and some requests over one of their own."""
    # Deadlines are the caller's.
    client_of = partial(httpx.AsyncClient, verify=False, trust_env=False, timeout=None)
    host = f"[{config.host}]" if ":" in config.host else config.host
    kept, url = client_of(), f"http://{host}:{config.http_port}{pool.path}"

    async def ask(number: int) -> tuple[int, Callable[[], Verdict]]:
        payload = pool[number % len(pool)]
        is_fresh = fresh_every and number % fresh_every == 0
        try:
            async with (
                asyncio.timeout(WAIT_S),
                client_of() if is_fresh else contextlib.nullcontext(kept) as client,
            ):
                answer = await client.post(url, content=payload.body, headers=payload.headers)
        except (OSError, TimeoutError, httpx.HTTPError) as error:
            return failed(repr(error))
        if answer.status_code != 200:
            return failed(f"{answer.status_code} {answer.content[:200]!r}")
        return 0, partial(judge_payload, pool, payload, answer.content)

    return ask


def grpc_ask(config: WatchConfig, pool: Payloads) -> Ask:
    """Ask over two channels in turn."""
    channels = open_channels(config.host, config.grpc_port, 2)
    calls = [channel.unary_unary(pool.path, as_it_is, as_it_is) for channel in channels]

    async def ask(number: int) -> tuple[int, Callable[[], Verdict]]:
        payload = pool[number % len(pool)]
        try:
            async with asyncio.timeout(WAIT_S):
                body: bytes = await calls[number % 2](payload.body, timeout=TIMEOUT_MS / 1e3)
        except TimeoutError as error:
            return failed(repr(error))
        except grpc.aio.AioRpcError as error:
            return failed(f"{error.code().name}: {error.details()}")
        return 0, partial(judge_payload, pool, payload, body)

    return ask


def judge_payload(pool: Payloads, payload: Payload, answer: bytes) -> Verdict:
    """Judge an answer by the number of its scores."""
    try:
        found = len(pool.scores(answer))
    except AnswerError as error:
        return Verdict(Kind.FAILED, str(error))
    if found == payload.num_candidates:
        return OK
    return Verdict(Kind.FAILED, f"{found} scores, {payload.num_candidates} are due")


async def ask_validly(config: WatchConfig) -> None:
    """Send valid requests until cancelled."""
    drawn = bench_workload(config.shape, "mlp", HOTNESS)
    json, binary, messages = (
        Payloads(drawn, api, count=REQUESTS_EACH, seed=config.seed, timeout_ms=TIMEOUT_MS) for api in VALID
    )
    asks = [http_ask(config, json, FRESH_EVERY), http_ask(config, binary, 0), grpc_ask(config, messages)]
    await DrillLoad(asks, range(len(VALID)), config.rate, AnswerLog(config.log, SOURCES)).run()


def probe(config: WatchConfig) -> None:
    """Send probes for ever."""
    log, lock = AnswerLog(config.log, SOURCES), threading.Lock()
    connection = http.client.HTTPConnection(config.host, config.http_port, timeout=PROBE_TIMEOUT_S)
    channel = grpc.insecure_channel(f"{config.host}:{config.grpc_port}", options=CHANNEL_OPTIONS)
    check = channel.unary_unary("/grpc.health.v1.Health/Check", as_it_is, as_it_is)

    def over_http() -> str:
        try:
            connection.request("GET", "/healthz")
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            return repr(error)
        return "" if answer.status == 200 else f"HTTP {answer.status}"

    def over_grpc() -> str:
        try:
            check(b"", timeout=PROBE_TIMEOUT_S)
        except grpc.RpcError as error:
            return repr(error)
        return ""

    def ask(source: int, once: Callable[[], str]) -> None:
        while True:
            sent = time.monotonic()
            problem = once()
            done = time.monotonic()
            with lock:
                log.add(source, sent, sent, done, 0, Verdict(Kind.FAILED, problem) if problem else OK)
            time.sleep(max(RECONNECT_S if problem else 0.0, sent + PROBE_INTERVAL_S - done))

    say_ready()
    threading.Thread(target=ask, args=(HTTP_PROBE, over_http), daemon=True).start()
    ask(GRPC_PROBE, over_grpc)


class ValidAnswers(NamedTuple):
    """Valid requests that came due within a time, how many of them failed, and their p99."""

    requests: int
    failures: int
    p99_ms: float | None


class Watch:
    """What valid clients and probes have logged so far."""

    def __init__(self, logs: tuple[Path, ...]) -> None:
        self._logs = dict.fromkeys(logs, 0)
        self._answers: Answers = np.empty(0, RECORD)

    def read(self) -> Answers:
        """Return all answers."""
        for path, first in self._logs.items():
            new = read_answers(path, first)
            self._logs[path] += len(new)
            self._answers = np.concatenate([self._answers, new])
        return self._answers

    def forget(self) -> None:
        """Drop what was read: the attacks before are judged."""
        self._answers = np.empty(0, RECORD)

    def valid(self, begin: float, end: float) -> ValidAnswers:
        """Return what became of the requests that came due within a time."""
        answers = self.read()
        due = answers["intended"]
        chosen = answers[(answers["api"] < HTTP_PROBE) & (due >= begin) & (due <= end)]
        return ValidAnswers(len(chosen), int((chosen["kind"] != Kind.OK).sum()), percentile(latency_ms(chosen), 99))

    def stall_ms(self, begin: float, end: float) -> float:
        """Return the longest time from a probe to its answer, of those that were out within."""
        answers = self.read()
        probes = answers[(answers["api"] >= HTTP_PROBE) & (answers["intended"] < end) & (answers["ended"] > begin)]
        return float(latency_ms(probes).max()) if probes.size else 0.0

    def failures(self, begin: float, end: float) -> tuple[str, ...]:
        """Return why the first valid requests within failed."""
        found = []
        for path in self._logs:
            for line in details_path(path).read_text(encoding="utf-8").splitlines():
                when, _, what = line.partition(" ")
                if begin <= float(when) <= end:
                    found.append(what)
        return tuple(found[:MAX_FAILURES])

    async def caught_up(self, moment: float, timeout_s: float) -> None:
        """Wait until both probes have been answered that were sent after a moment, or no longer."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            answers = self.read()
            later = answers[answers["intended"] > moment]["api"]
            if (later == HTTP_PROBE).any() and (later == GRPC_PROBE).any():
                return
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def watching(config: WatchConfig) -> AsyncIterator[Watch]:
    """Send valid requests and probes while the block runs; `config` is that of the valid clients."""
    probes = config.model_copy(update={"role": "probe", "log": config.log.with_name("probe.answers")})
    async with contextlib.AsyncExitStack() as stack:
        for own in (config, probes):
            command = module_command("loadtest.drill.hostile.watch", own, own.log.with_suffix(".json"))
            log = own.log.with_suffix(".log")
            await until_ready(await stack.enter_async_context(child_process(command, log)), log)
        yield Watch((config.log, probes.log))


if __name__ == "__main__":
    settings = module_config(WatchConfig)
    if settings.role == "probe":
        probe(settings)
    else:
        uvloop.run(ask_validly(settings))
