"""The load generator: open and closed loops in processes of their own.

Everything that costs time and can be done ahead is: while a run goes on, they write prepared bytes and read answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from functools import cache, lru_cache, partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import uvloop

from loader.errors import ConfigError, ShardrankError
from loader.memory import settle_heap
from loadtest.errors import LoadError, RequestFailedError
from loadtest.load.config import OfferedLoad, RunConfig, Sending
from loadtest.load.loops import ANSWER_TIMEOUT_S, Weighed, arrival_times, keep_busy, open_loop
from loadtest.load.result import Done, LoadResult, Ready, Recorder, make_result
from loadtest.load.senders import Failure, Judge, Outgoing, check_answer, make_sender
from loadtest.workloads.catalog import BenchWorkload, bench_payloads, open_workload
from loadtest.workloads.payloads import MAX_POOL_BYTES, Pool, changing_headers, drawn_payloads, payload_of
from loadtest.workloads.served import requests_like
from serving.description import ModelInfo
from serving.fleet.process import PARENT_PID_VARIABLE, die_with_parent
from shard_node.bags import Float32Array

READY_TIMEOUT_S = 600.0
# Beyond what was asked for.
ANSWER_SLACK_S = 120.0
# Between the order and the begin, for the order to reach every process.
LEAD_S = 0.3

Answer = TypeVar("Answer")


def open_payloads(load: OfferedLoad, process: int = 0) -> tuple[str, Pool]:
    """Open a workload: its complete name, and the requests of a process, which are made once. Raises ShardrankError."""
    # Where servers listen changes, what is requested does not.
    return _open_payloads(load.model_copy(update={"target": "", "api": load.spoken}), process)


@lru_cache(maxsize=32)
def _open_payloads(load: OfferedLoad, process: int) -> tuple[str, Pool]:
    api, bench, timeout_ms = load.api or "json", load.workload, load.stated_timeout_ms
    if isinstance(bench, BenchWorkload):
        pool = bench_payloads(bench, api, load.requests, timeout_ms=timeout_ms)
        return f"{pool.model}, hotness {bench.hotness}", pool
    # Processes that sent the same would find each other's rows in the server's caches.
    seed = load.seed + 2**32 * process
    if load.like is not None and isinstance(bench, ModelInfo):
        schema, requests = requests_like(load.like, bench)
        order = np.random.default_rng(seed).permutation(len(requests))[: load.requests].tolist()
        payloads = (payload_of(schema, requests[number], api, bench.model, timeout_ms) for number in order)
        return f"{bench.model}, like {load.like}", Pool(api, bench.model, payloads, MAX_POOL_BYTES)
    workload = open_workload(bench, **load.model_dump(include={"ids", "candidates", "hotness", "varied"}))
    drawn = islice(drawn_payloads(workload, api, seed, timeout_ms), load.requests)
    return workload.name, Pool(api, workload.spec.model, drawn, MAX_POOL_BYTES)


async def offer(
    load: Sending,
    pool: Pool,
    times: Iterable[float],
    recorder: Recorder,
    *,
    cpu_s: tuple[float, float],
    judge: Judge | None = None,
    process: int = 0,
) -> Done:
    """Send a process's part of a load at the times of an `open_loop`, with connections of its own.

    The run begins when the recorder does; this process's CPU time is measured between its seconds `cpu_s`. Answers are
    judged by `check_answer`, unless another judge is given. Raises OSError: no such target.
    """

    def part(total: int) -> int:
        """Return this process's part of what all have together; the parts add up to the total."""
        return total // load.processes + (process < total % load.processes)

    async def cpu_time() -> float:
        await asyncio.sleep(max(at + cpu_s[0] - time.monotonic(), 0))
        used_s = time.process_time()
        await asyncio.sleep(max(at + cpu_s[1] - time.monotonic(), 0))
        return time.process_time() - used_s

    at, limits = recorder.begin, {"connections": part(load.max_connections), "channels": part(load.grpc_channels)}
    judge = judge or partial(check_answer, pool)
    sender = await make_sender(load.target, pool, judge, changing_headers(load.varied), **limits)
    if load.scheme == "grpc":
        await sender.open(max(at - time.monotonic(), 0))
    cpu = asyncio.create_task(cpu_time())
    try:
        max_in_flight = part(load.max_in_flight)
        await open_loop(times, sender.ask, recorder, timeout_s=load.timeout_ms / 1000, max_in_flight=max_in_flight)
        used_s = await cpu
    finally:
        cpu.cancel()
        await sender.aclose()
    return Done(records=recorder.records(), cpu_s=used_s, connections=sender.opened)


def ask_scores(load: OfferedLoad, number: int = 0) -> Float32Array:
    """Send a server one request of a load, and return its scores, float32 [candidates].

    Raises RequestFailedError: there is no answer with finite scores.
    """
    _, pool = open_payloads(load)
    now = time.monotonic()
    request = Outgoing(number, 0.0, now, now + ANSWER_TIMEOUT_S, now)

    def judge(request: Outgoing, body: bytes) -> Failure | None:
        request.verdict = scores = np.array(pool.scores(body), np.float32)
        return None if np.isfinite(scores).all() else Failure("bad_answer", "a score that is not finite")

    async def ask() -> Failure | None:
        try:
            async with contextlib.aclosing(await make_sender(load.target, pool, judge, connections=1)) as sender:
                return await sender.ask(request)
        except (OSError, RequestFailedError) as error:
            return Failure("bad_answer", str(error))

    if (failure := event_loop().run(ask())) is not None:
        raise RequestFailedError(f"{pool.api}: no scores of request {number}: {failure.kind}: {failure.message[:300]}")
    scores: Float32Array = request.verdict
    return scores


@cache
def event_loop() -> asyncio.Runner:
    """Return the event loop of this process."""
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def _begin(parent: int) -> None:
    die_with_parent({PARENT_PID_VARIABLE: str(parent)})
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # A terminal's Ctrl-C is for the process that started this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _call(function: Callable[..., Any], arguments: tuple[object, ...]) -> Any:
    try:
        return function(*arguments)
    except (ShardrankError, OSError) as error:
        is_config = getattr(error, "http_status", 400) == 400
        # The error itself may not be one that can be pickled.
        raise (ConfigError if is_config else LoadError)(str(error)) from None


def _prepare(load: OfferedLoad, process: int) -> Ready:
    name, pool = open_payloads(load, process)
    # What is there by now stays: a collection that walks all requests would delay those that are due.
    settle_heap()
    return Ready(len(pool), pool.model, name)


def _offer(load: OfferedLoad, run: RunConfig, at: float, process: int) -> Done:
    _, pool = open_payloads(load, process)
    part = {"process": process, "processes": load.processes}
    times = arrival_times(load.arrivals, run.rate, run.until_s, seed=run.seed, **part)
    return event_loop().run(offer(load, pool, times, Recorder(at), cpu_s=(run.warmup_s, run.until_s), process=process))


def _busy(load: OfferedLoad, in_flight: int, warmup_s: float, seconds: float, process_ids: tuple[int, ...]) -> Weighed:
    _, pool = open_payloads(load)
    busy = keep_busy(load, pool, in_flight=in_flight, warmup_s=warmup_s, seconds=seconds, process_ids=process_ids)
    return event_loop().run(busy)


class Generators(AbstractContextManager["Generators"]):
    """Processes that offer loads to servers, keep them busy, and ask for their scores. `with` ends them."""

    def __init__(self, count: int = 1) -> None:
        context, arguments = multiprocessing.get_context("spawn"), (os.getpid(),)
        # A pool of one process each, so that every process gets its part of a call.
        self._pools = [ProcessPoolExecutor(1, context, _begin, arguments) for _ in range(count)]
        starting = [pool.submit(os.getpid) for pool in self._pools]
        self.process_ids = [process.result() for process in starting]

    def call(
        self, function: Callable[..., Answer], arguments: Sequence[tuple[object, ...]], limit_s: float
    ) -> tuple[Answer, ...]:
        """Call a function of a module's top level in each of the first processes, with its arguments.

        Raises ConfigError: a process can't do what was requested. LoadError: one failed or ended, or took too long.
        """
        calls = [pool.submit(_call, function, given) for pool, given in zip(self._pools, arguments, strict=False)]
        done, waiting = wait(calls, limit_s, FIRST_EXCEPTION)
        for number, call in enumerate(calls):
            if call in done and isinstance(error := call.exception(), BrokenProcessPool):
                raise LoadError(f"worker process {number} ended by itself; its output has the reason") from error
        results = tuple(call.result() for call in calls if call in done)
        if waiting:
            raise LoadError(f"{function.__qualname__} was not done within {limit_s:g} s")
        return results

    def prepare(self, load: OfferedLoad) -> tuple[Ready, ...]:
        """Have the requests of a load made; they are kept. Raises ConfigError if the workload can't be opened."""
        return self.call(_prepare, [(load, number) for number in range(load.processes)], READY_TIMEOUT_S)

    def offer(self, load: OfferedLoad, run: RunConfig) -> LoadResult:
        """Do a run."""
        ready = self.prepare(load)
        at, started_at = time.monotonic() + LEAD_S, time.time() + LEAD_S
        limit_s = LEAD_S + run.until_s + load.timeout_ms / 1000 + ANSWER_SLACK_S
        done = self.call(_offer, [(load, run, at, number) for number in range(load.processes)], limit_s)
        return make_result(load, run, ready, started_at, done)

    def busy(
        self, load: OfferedLoad, in_flight: int, warmup_s: float, seconds: float, process_ids: tuple[int, ...]
    ) -> Weighed:
        """Keep a server busy from the first process. A request that fails is a LoadError."""
        self.prepare(load)
        limit_s = warmup_s + seconds + ANSWER_SLACK_S
        return self.call(_busy, [(load, in_flight, warmup_s, seconds, process_ids)], limit_s)[0]

    def scores(self, load: OfferedLoad, request: int) -> Float32Array:
        """Return a server's scores, float32 [candidates], of a request of the first process."""
        self.prepare(load)
        return self.call(ask_scores, [(load, request)], ANSWER_SLACK_S)[0]

    def __exit__(self, *raised: object) -> None:
        """End them."""
        for process_id in self.process_ids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)
