"""The load generator: open and closed loops in processes of their own.

Everything that costs time and can be done ahead is: while a run goes on, they write prepared bytes and read answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from functools import lru_cache, partial

import numpy as np

from loader.memory import settle_heap
from loadtest.errors import AnswerError, LateAnswerError, RequestFailedError
from loadtest.load.closed_loop import ANSWER_TIMEOUT_S, Weighed, keep_busy
from loadtest.load.config import MAX_TIMEOUT_MS, OTHER_SERVERS_APIS, OfferedLoad, RunConfig
from loadtest.load.open_loop import OpenLoop, arrival_times
from loadtest.load.recorder import Done, Float64Array, Ready, Recorder, make_result
from loadtest.load.result import LoadResult
from loadtest.load.senders import AnswerCheck, Failure, Judge, Outgoing, make_sender
from loadtest.load.workers import Workers, event_loop
from loadtest.workloads.catalog import bench_payloads, bench_workload, open_workload
from loadtest.workloads.payloads import Payloads, Pool, changing_headers
from shard_node.bags import Float32Array

READY_TIMEOUT_S = 600.0
# Beyond what was asked for.
ANSWER_SLACK_S = 120.0
# Between the order and the begin, for the order to reach every process.
LEAD_S = 0.3


def share_of(total: int, process: int, processes: int) -> int:
    """Return a process's part of what all have together; the parts add up to the total."""
    return total // processes + (process < total % processes)


def open_payloads(load: OfferedLoad, process: int = 0) -> tuple[str, Payloads]:
    """Open a workload: its complete name, and the requests of a process, which are made once. Raises ShardrankError."""
    # Where servers listen changes, what is requested does not; requests of other servers bring no deadline.
    changed: dict[str, object] = {"target": "", "api": load.spoken}
    if load.spoken in OTHER_SERVERS_APIS:
        changed["timeout_ms"] = MAX_TIMEOUT_MS
    return _open_payloads(load.model_copy(update=changed), process)


@lru_cache(maxsize=32)
def _open_payloads(load: OfferedLoad, process: int) -> tuple[str, Payloads]:
    api, bench, timeout_ms = load.api or "json", load.workload, load.stated_timeout_ms
    if not isinstance(bench, str):
        name = bench_workload(bench.shape, bench.head, bench.hotness).name
        return name, bench_payloads(
            bench.shape, bench.head, bench.hotness, api, load.requests, timeout_ms=timeout_ms, path=load.path
        )
    workload = open_workload(
        bench,
        ids=load.ids,
        candidates=load.candidates,
        context_features=load.context_features,
        movielens=load.movielens,
        split_seed=load.split_seed,
        varied=load.varied,
    )
    # Processes that sent the same would find each other's rows in the server's caches.
    seed = load.seed + 2**32 * process
    return workload.name, Payloads(
        workload, api, model=load.model, count=load.requests, timeout_ms=timeout_ms, seed=seed
    )


async def offer(
    load: OfferedLoad,
    pool: Pool,
    times: Iterable[Float64Array],
    recorder: Recorder,
    *,
    cpu_s: tuple[float, float],
    judge: Judge | None = None,
    process: int = 0,
) -> Done:
    """Send requests at given times, with connections that are this call's.

    Args:
        load: where requests go, and its limits, of which a process has its part.
        pool: of the requests.
        times: when they are due, as `OpenLoop` reads it.
        recorder: of all requests, whose `begin` is the run's.
        cpu_s: begin and end, in seconds of the run, of the time for which this process's CPU time is measured.
        judge: of answers; None for `AnswerCheck`.
        process: its number, from 0.

    Raises:
        OSError: the target's name is not known.
        Exception: a bug of the generator.
    """
    part = partial(share_of, process=process, processes=load.processes)
    at = recorder.begin
    sender = await make_sender(
        load.at,
        pool,
        judge or AnswerCheck(pool),
        changing_headers(load.varied),
        connections=part(load.max_connections),
        channels=part(load.grpc_channels),
    )
    loop = OpenLoop(
        times,
        lambda number: sender,
        recorder.add,
        begin=at,
        timeout_s=load.timeout_ms / 1000,
        max_in_flight=part(load.max_in_flight),
    )
    if load.at.scheme == "grpc":
        await sender.open(max(at - time.monotonic(), 0))
    cpu = asyncio.create_task(_cpu_between(at + cpu_s[0], at + cpu_s[1]))
    try:
        await loop.run()
        used_s = await cpu
    finally:
        cpu.cancel()
        await sender.close()
    return Done(records=recorder.records(), cpu_s=used_s, connections=sender.opened)


async def _cpu_between(begin: float, end: float) -> float:
    """Wait until `end`; return CPU seconds that this process used since `begin`, both CLOCK_MONOTONIC."""
    await asyncio.sleep(max(begin - time.monotonic(), 0))
    used_s = time.process_time()
    await asyncio.sleep(max(end - time.monotonic(), 0))
    return time.process_time() - used_s


def ask_scores(load: OfferedLoad, pool: Pool, request: int) -> Float32Array:
    """Send a server one request of a pool, and return its scores, float32 [candidates].

    Raises:
        RequestFailedError: there is no answer with finite scores.
    """

    async def ask() -> tuple[Outgoing, Failure | None]:
        def judge(request: Outgoing, body: bytes) -> None:
            request.verdict = body

        now = time.monotonic()
        outgoing = Outgoing(request, 0.0, now, now + ANSWER_TIMEOUT_S, now)
        sender = await make_sender(load.at, pool, judge, connections=1, channels=1)
        try:
            return outgoing, await sender.ask(outgoing)
        finally:
            await sender.close()

    what = f"{pool.api}: no scores of request {request}"
    try:
        outgoing, failure = asyncio.run(ask())
        if failure is not None:
            raise RequestFailedError(f"{what}: {failure.kind}: {failure.message[:300]}")
        scores = np.array(pool.scores(outgoing.verdict), np.float32)
    except (OSError, AnswerError) as error:
        raise RequestFailedError(f"{what}: {error}") from error
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
    times = arrival_times(
        load.arrivals, run.rate, run.until_s, seed=run.seed, process=process, processes=load.processes
    )
    return event_loop().run(offer(load, pool, times, Recorder(at), cpu_s=(run.warmup_s, run.until_s), process=process))


def _busy(load: OfferedLoad, in_flight: int, warmup_s: float, seconds: float, process_ids: tuple[int, ...]) -> Weighed:
    _, pool = open_payloads(load)
    busy = keep_busy(load, pool, in_flight=in_flight, warmup_s=warmup_s, seconds=seconds, process_ids=process_ids)
    try:
        return event_loop().run(busy)
    except LateAnswerError as error:
        raise LateAnswerError(
            f"{error}; with {in_flight} requests in flight the server needs more time than they have: "
            "let fewer be out (--in-flight), or give them longer (--timeout-ms)"
        ) from error


def _scores(load: OfferedLoad, request: int) -> Float32Array:
    return ask_scores(load, open_payloads(load)[1], request)


class Generators(Workers):
    """Processes that offer loads to servers, keep them busy, and ask for their scores.

    Every method raises as `Workers.call`.
    """

    def prepare(self, load: OfferedLoad) -> tuple[Ready, ...]:
        """Have the requests of a load made; they are kept. Raises LoadConfigError if the workload can't be opened."""
        return self.call(_prepare, [(load, number) for number in range(load.processes)], READY_TIMEOUT_S)

    def offer(self, load: OfferedLoad, run: RunConfig) -> LoadResult:
        """Do a run."""
        ready = self.prepare(load)
        at, began = time.monotonic() + LEAD_S, time.time() + LEAD_S
        limit_s = LEAD_S + run.until_s + load.timeout_ms / 1000 + ANSWER_SLACK_S
        done = self.call(_offer, [(load, run, at, number) for number in range(load.processes)], limit_s)
        return make_result(load, run, ready, began, done)

    def busy(
        self, load: OfferedLoad, in_flight: int, warmup_s: float, seconds: float, process_ids: tuple[int, ...]
    ) -> Weighed:
        """Keep a server busy from the first process. A request that fails is a GeneratorError."""
        self.prepare(load)
        arguments = load, in_flight, warmup_s, seconds, process_ids
        return self.call(_busy, [arguments], warmup_s + seconds + ANSWER_SLACK_S)[0]

    def scores(self, load: OfferedLoad, request: int) -> Float32Array:
        """Return a server's scores, float32 [candidates], of a request of the first process."""
        self.prepare(load)
        return self.call(_scores, [(load, request)], ANSWER_SLACK_S)[0]
