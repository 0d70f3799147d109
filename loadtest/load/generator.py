"""Processes that measure servers.

Everything that costs time and can be done ahead is: while a run goes on, they write prepared bytes and read answers.
"""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import grpc
import numpy as np
from pydantic import TypeAdapter

from loader.errors import ShardrankError
from loader.memory import settle_heap
from loadtest.errors import LateAnswerError, RequestFailedError
from loadtest.load.closed_loop import ANSWER_TIMEOUT_S, Weighed, keep_busy
from loadtest.load.config import MAX_TIMEOUT_MS, OTHER_SERVERS_APIS, OfferedLoad, RunConfig
from loadtest.load.open_loop import OpenLoop, arrival_times
from loadtest.load.recorder import Done, LatencyHistogram, Ready, Recorder, make_result
from loadtest.load.result import LoadResult
from loadtest.load.senders import as_it_is, host_and_port, make_sender
from loadtest.load.workers import Workers, event_loop, tell
from loadtest.workloads.catalog import bench_payloads, bench_workload, open_workload
from loadtest.workloads.payloads import Headers, Payloads, changing_headers
from shard_node.bags import Float32Array

STATUS_INTERVAL_S = 0.5
READY_TIMEOUT_S = 600.0
# Beyond what was asked for.
ANSWER_SLACK_S = 120.0
# Between the order and the begin, for the order to reach every process.
LEAD_S = 0.3


@dataclass(frozen=True, slots=True)
class Status:
    """How a run gets on in one process, some times a second.

    Attributes:
        due: requests that are over.
        ok: of these, answered right.
        in_flight: requests that are out.
        recent: latency of right answers since the last status.
    """

    due: int
    ok: int
    in_flight: int
    recent: LatencyHistogram


# Made once: that takes as long as a request, on the loop that times them.
_STATUS = TypeAdapter(Status)

Say = Callable[[Status], None]


def share_of(total: int, process: int, processes: int) -> int:
    """Give a process's part of what all have together; the parts add up to the total."""
    return total // processes + (process < total % processes)


def open_payloads(load: OfferedLoad, process: int = 0) -> tuple[str, Payloads]:
    """Open a workload: its whole name, and a process's own requests, which are made once. Raises ShardrankError."""
    # Where servers listen changes, what they are asked does not; requests of other servers bring no deadline.
    changed: dict[str, object] = {"target": "", "api": load.spoken}
    if load.spoken in OTHER_SERVERS_APIS:
        changed["timeout_ms"] = MAX_TIMEOUT_MS
    return _open_payloads(load.model_copy(update=changed), process)


@lru_cache(maxsize=32)
def _open_payloads(load: OfferedLoad, process: int) -> tuple[str, Payloads]:
    api, wanted = load.api or "json", load.workload
    if not isinstance(wanted, str):
        name = bench_workload(wanted.shape, wanted.head, wanted.hotness).name
        timeout_ms = load.stated_timeout_ms
        return name, bench_payloads(
            wanted.shape, wanted.head, wanted.hotness, api, load.requests, timeout_ms=timeout_ms, path=load.path
        )
    workload = open_workload(
        wanted,
        ids=load.ids,
        candidates=load.candidates,
        context_features=load.context_features,
        movielens=load.movielens,
        split_seed=load.split_seed,
        varied=load.varied,
    )
    return workload.name, Payloads(
        workload,
        api,
        model=load.model,
        count=load.requests,
        timeout_ms=load.stated_timeout_ms,
        # Processes that asked the same would find each other's rows in the server's caches.
        seed=load.seed + 2**32 * process,
    )


@lru_cache(maxsize=16)
def headers_of(varied: bool, seed: int, process: int) -> Iterator[Headers]:
    """Give the headers of a process, which go on from run to run."""
    return changing_headers(varied, seed + 2**32 * process)


async def offer(
    load: OfferedLoad,
    run: RunConfig,
    pool: Payloads,
    headers: Iterator[Headers],
    say: Say,
    *,
    at: float,
    process: int = 0,
) -> Done:
    """Do one process's part of a run, with connections of its own.

    Args:
        load: what is asked.
        run: how often.
        pool: of the requests.
        headers: that requests are sent with beside their own.
        say: given a status some times a second.
        at: the begin, CLOCK_MONOTONIC seconds, which all processes of a machine share.
        process: its number, from 0.

    Raises:
        OSError: the target's name is not known.
        Exception: a defect of the generator.
    """
    part = partial(share_of, process=process, processes=load.processes)
    recorder = Recorder(run.warmup_s, run.until_s, load.slo_ms / 1000)
    loop = OpenLoop(
        arrival_times(load.arrivals, run.rate, run.until_s, seed=run.seed, process=process, processes=load.processes),
        at,
        len(pool),
        recorder,
        timeout_s=load.timeout_ms / 1000,
        max_in_flight=part(load.max_in_flight),
    )
    sender = await make_sender(
        load.at,
        pool,
        recorder,
        loop.on_over,
        headers,
        connections=part(load.max_connections),
        channels=part(load.grpc_channels),
        timeout_s=load.timeout_ms / 1000,
    )
    if load.at.scheme == "grpc":
        await sender.open(max(at - time.monotonic(), 0))
    status = asyncio.create_task(_say_status(loop, recorder, say))
    cpu = asyncio.create_task(cpu_between(at + run.warmup_s, at + run.until_s))
    try:
        await loop.run(sender)
        cpu_s = await cpu
    finally:
        status.cancel()
        cpu.cancel()
        await sender.close()
    return Done(records=recorder.records(), cpu_s=cpu_s, connections=sender.opened)


async def cpu_between(begin: float, end: float) -> float:
    """Wait until `end`; seconds of processor time that this process used since `begin`, both CLOCK_MONOTONIC."""
    await asyncio.sleep(max(begin - time.monotonic(), 0))
    used_s = time.process_time()
    await asyncio.sleep(max(end - time.monotonic(), 0))
    return time.process_time() - used_s


async def _say_status(loop: OpenLoop, recorder: Recorder, say: Say) -> None:
    while True:
        await asyncio.sleep(STATUS_INTERVAL_S)
        recent = recorder.take_recent()
        say(Status(due=recorder.due, ok=recorder.ok, in_flight=loop.in_flight, recent=recent))


def ask_scores(load: OfferedLoad, pool: Payloads, request: int) -> Float32Array:
    """Ask a server one request of a pool: its scores, float32 [candidates].

    Raises:
        RequestFailedError: there is no answer with finite scores.
    """
    at, asked = load.at, pool[request]
    host = host_and_port(at.host, at.port)
    try:
        if pool.is_grpc:
            with grpc.insecure_channel(host) as channel:
                answer = channel.unary_unary(pool.path, as_it_is, as_it_is)(asked.body, timeout=ANSWER_TIMEOUT_S)
        else:
            post = urllib.request.Request(f"http://{host}{pool.path}", asked.body, dict(asked.headers))
            with urllib.request.urlopen(post, timeout=ANSWER_TIMEOUT_S) as response:
                answer = response.read()
        scores = np.array(pool.scores(answer), np.float32)
    except (OSError, urllib.error.URLError, grpc.RpcError, ValueError, ShardrankError) as error:
        raise RequestFailedError(f"{pool.api}: no scores of request {request}: {error}") from error
    if not np.isfinite(scores).all():
        raise RequestFailedError(f"{pool.api}: request {request}: a score that is not finite")
    return scores


def _prepare(load: OfferedLoad, process: int) -> Ready:
    name, pool = open_payloads(load, process)
    # What is there by now stays: a collection that walks all requests would delay those that are due.
    settle_heap()
    return Ready(requests=len(pool), model=pool.model, workload=name)


def _offer(load: OfferedLoad, run: RunConfig, at: float, process: int) -> Done:
    _, pool = open_payloads(load, process)
    headers = headers_of(load.varied, load.seed, process)

    def say(status: Status) -> None:
        tell(_STATUS.dump_python(status, mode="json"))

    return event_loop().run(offer(load, run, pool, headers, say, at=at, process=process))


def _busy(load: OfferedLoad, in_flight: int, warmup_s: float, seconds: float, process_ids: tuple[int, ...]) -> Weighed:
    _, pool = open_payloads(load)
    times = {"warmup_s": warmup_s, "seconds": seconds}
    headers = headers_of(load.varied, load.seed, 0)
    try:
        return event_loop().run(keep_busy(load, pool, headers, in_flight=in_flight, **times, process_ids=process_ids))
    except LateAnswerError as error:
        raise LateAnswerError(
            f"{error}; with {in_flight} requests in flight the server needs more time than they have: "
            "let fewer be out (--in-flight), or give them longer (--timeout-ms)"
        ) from error


def _scores(load: OfferedLoad, request: int) -> list[float]:
    scores: list[float] = ask_scores(load, open_payloads(load)[1], request).tolist()
    return scores


class Generators(Workers):
    """Processes that offer loads to servers, keep them busy, and ask for their scores.

    Every method raises as `Workers.call`.
    """

    def prepare(self, load: OfferedLoad) -> tuple[Ready, ...]:
        """Have the requests of a load made; they are kept. Raises LoadConfigError if the workload can't be opened."""
        return self.call(_prepare, [(load, number) for number in range(load.processes)], READY_TIMEOUT_S)

    def offer(
        self,
        load: OfferedLoad,
        run: RunConfig,
        on_status: Callable[[int, Status], None] = lambda process, status: None,
    ) -> LoadResult:
        """Do a run; `on_status` is given each `Status` of a process."""
        ready = self.prepare(load)
        at, began = time.monotonic() + LEAD_S, time.time() + LEAD_S
        limit_s = LEAD_S + run.until_s + load.timeout_ms / 1000 + ANSWER_SLACK_S
        parts = [(load, run, at, number) for number in range(load.processes)]
        done = self.call(_offer, parts, limit_s, lambda number, told: on_status(number, _STATUS.validate_python(told)))
        return make_result(load, run, ready, began, done)

    def busy(
        self, load: OfferedLoad, in_flight: int, warmup_s: float, seconds: float, process_ids: tuple[int, ...]
    ) -> Weighed:
        """Keep a server busy from the first process. A request that fails is a GeneratorError."""
        self.prepare(load)
        asked = load, in_flight, warmup_s, seconds, process_ids
        return self.call(_busy, [asked], warmup_s + seconds + ANSWER_SLACK_S)[0]

    def scores(self, load: OfferedLoad, request: int) -> Float32Array:
        """Ask for a server's scores, float32 [candidates], of a request of the first process."""
        self.prepare(load)
        return np.array(self.call(_scores, [(load, request)], ANSWER_SLACK_S)[0], np.float32)
