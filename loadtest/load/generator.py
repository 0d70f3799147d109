"""A process that measures servers: `python -m loadtest.load.generator`.

It answers what it reads from stdin, a line each, until that ends. Everything that costs time and can be done ahead is:
while a run goes on, it writes prepared bytes and reads answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import grpc
import numpy as np
import uvloop
from pydantic import BaseModel

from loader.errors import ShardrankError
from loader.memory import settle_heap
from loadtest.errors import LateAnswerError, RequestFailedError
from loadtest.grpc_channels import as_it_is
from loadtest.load.closed_loop import ANSWER_TIMEOUT_S, keep_busy
from loadtest.load.config import MAX_TIMEOUT_MS, OTHER_SERVERS_APIS, OfferedLoad
from loadtest.load.messages import ASKED, Done, Offer, Prepare, Ready, Refused, Scores, ScoresAsked, Status
from loadtest.load.open_loop import OpenLoop, arrival_times
from loadtest.load.recorder import Recorder
from loadtest.load.senders import make_sender
from loadtest.workloads.catalog import bench_payloads, bench_workload, open_workload
from loadtest.workloads.payloads import Headers, Payloads, changing_headers
from serving.fleet.process import die_with_parent
from shard_node.bags import Float32Array

STATUS_INTERVAL_S = 0.5

Say = Callable[[BaseModel], None]


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


@lru_cache(maxsize=16)
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
        max_bytes=load.max_request_bytes,
        # Processes that asked the same would find each other's rows in the server's caches.
        seed=load.seed + 2**32 * process,
    )


@lru_cache(maxsize=16)
def headers_of(varied: bool, seed: int, process: int) -> Iterator[Headers]:
    """Give the headers of a process, which go on from run to run."""
    return changing_headers(varied, seed + 2**32 * process)


async def offer(asked: Offer, pool: Payloads, headers: Iterator[Headers], say: Say) -> Done:
    """Do one run, with connections of its own.

    Raises:
        OSError: the target's name is not known.
        Exception: a defect of the generator.
    """
    load, run, part = asked.load, asked.run, partial(share_of, process=asked.process, processes=asked.load.processes)
    recorder = Recorder(run.warmup_s, run.until_s, load.slo_ms / 1000)
    loop = OpenLoop(
        arrival_times(
            load.arrivals, run.rate, run.until_s, seed=run.seed, process=asked.process, processes=load.processes
        ),
        asked.at,
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
        await sender.open(max(asked.at - time.monotonic(), 0))
    status = asyncio.create_task(_say_status(loop, recorder, say))
    cpu = asyncio.create_task(_cpu_between(asked.at + run.warmup_s, asked.at + run.until_s))
    try:
        await loop.run(sender)
        cpu_s = await cpu
    finally:
        status.cancel()
        cpu.cancel()
        await sender.close()
    return Done(records=recorder.records(), cpu_s=cpu_s, connections=sender.opened)


async def _cpu_between(begin: float, end: float) -> float:
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
    host = f"[{at.host}]:{at.port}" if ":" in at.host else f"{at.host}:{at.port}"
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


def answer_lines(answer: Callable[[str], BaseModel]) -> None:
    """Answer line after line of stdin until it ends. An error of ours is an answer too."""
    die_with_parent(os.environ)
    # A terminal's Ctrl-C is for the process that started this one, and so is a mark.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    for line in sys.stdin:
        try:
            told = answer(line)
        except (ShardrankError, OSError) as error:
            told = Refused(message=str(error), is_config=getattr(error, "http_status", 400) == 400)
        say(told)


def say(message: BaseModel) -> None:
    """Write one line to stdout."""
    sys.stdout.write(message.model_dump_json() + "\n")
    sys.stdout.flush()


def _answer(runner: asyncio.Runner, line: str) -> BaseModel:
    asked = ASKED.validate_json(line)
    process = asked.process if isinstance(asked, Prepare | Offer) else 0
    name, pool = open_payloads(asked.load, process)
    if isinstance(asked, ScoresAsked):
        return Scores(scores=tuple(ask_scores(asked.load, pool, asked.request).tolist()))
    if isinstance(asked, Prepare):
        # What is there by now stays: a collection that walks all requests would delay those that are due.
        settle_heap()
        return Ready(requests=len(pool), model=pool.model, workload=name)
    headers = headers_of(asked.load.varied, asked.load.seed, process)
    if isinstance(asked, Offer):
        return runner.run(offer(asked, pool, headers, say))
    try:
        return runner.run(keep_busy(asked, pool, headers))
    except LateAnswerError as error:
        raise LateAnswerError(
            f"{error}; with {asked.in_flight} requests in flight the server needs more time than they have: "
            "let fewer be out (--in-flight), or give them longer (--timeout-ms)"
        ) from error


def main() -> None:
    """Run the program."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answer_lines(partial(_answer, runner))


if __name__ == "__main__":
    main()
