"""One process that sends: `python -m loadtest.load.generator_process CONFIG`, where CONFIG is a `ProcessConfig`.

It makes its requests, says that it is ready, and does each run that it reads from stdin, until that ends. Everything
that costs time and can be done ahead is: while a run goes on, it writes prepared bytes and reads answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import uvloop
from pydantic import BaseModel

from loader.errors import ShardrankError
from loadtest.load.arrivals import arrival_times
from loadtest.load.cpu_time import cpu_between
from loadtest.load.grpc_sender import GrpcSender
from loadtest.load.http_sender import HttpSender, resolve
from loadtest.load.messages import Begin, Done, Failed, ProcessConfig, Ready, Status
from loadtest.load.open_loop import OpenLoop
from loadtest.load.outgoing import PayloadPool, Sender
from loadtest.load.recorder import Recorder
from loadtest.workloads.opened import open_workload
from loadtest.workloads.payloads import Headers, Payloads, changing_headers
from serving.fleet.process import die_with_parent

STATUS_INTERVAL_S = 0.5
MAX_LINE_BYTES = 1 << 20

Say = Callable[[BaseModel], None]


def share_of(total: int, process: int, processes: int) -> int:
    """A process's part of what all have together; the parts add up to the total."""
    return total // processes + (process < total % processes)


def open_payloads(config: ProcessConfig) -> tuple[str, Payloads]:
    """A workload's whole name, and a process's own requests.

    Raises:
        ShardrankError: the workload can't be opened.
    """
    load = config.load
    workload = open_workload(
        load.workload,
        ids=load.ids,
        candidates=load.candidates,
        context_features=load.context_features,
        movielens=load.movielens,
        split_seed=load.split_seed,
        varied=load.varied,
    )
    return workload.name, Payloads(
        workload,
        load.spoken,
        model=load.model,
        count=load.requests,
        timeout_ms=load.stated_timeout_ms,
        max_bytes=load.max_request_bytes,
        # Processes that asked the same would find each other's rows in the server's caches.
        seed=_seed_of(config),
    )


def _seed_of(config: ProcessConfig) -> int:
    return config.load.seed + 2**32 * config.process


async def do_run(config: ProcessConfig, begin: Begin, pool: PayloadPool, say: Say) -> Done:
    """One run, with connections of its own.

    Raises:
        OSError: the target's name is not known.
        Exception: a defect of the generator.
    """
    load, run = config.load, begin.run
    timeout_s = load.timeout_ms / 1000
    recorder = Recorder(run.warmup_s, run.until_s, load.slo_ms / 1000)
    times = arrival_times(
        load.arrivals,
        run.rate,
        run.until_s,
        seed=run.seed,
        process=config.process,
        processes=load.processes,
    )
    loop = OpenLoop(
        times,
        begin.at,
        len(pool),
        recorder,
        timeout_s=timeout_s,
        max_in_flight=share_of(load.max_in_flight, config.process, load.processes),
    )
    headers = changing_headers(load.varied, _seed_of(config) + 2**40 * run.seed)
    sender = await _open_sender(config, pool, headers, recorder, loop)
    status = asyncio.create_task(_say_status(loop, recorder, say))
    cpu = asyncio.create_task(cpu_between(begin.at + run.warmup_s, begin.at + run.until_s))
    try:
        await loop.run(sender)
        cpu_s = await cpu
    finally:
        status.cancel()
        cpu.cancel()
        await sender.close()
    return Done(records=recorder.records(), cpu_s=cpu_s, connections=sender.opened)


async def _open_sender(
    config: ProcessConfig, pool: PayloadPool, headers: Iterator[Headers], recorder: Recorder, loop: OpenLoop
) -> Sender:
    load, at = config.load, config.load.at
    if at.scheme == "grpc":
        return GrpcSender(
            at.host,
            at.port,
            pool,
            recorder,
            loop.on_over,
            headers=headers,
            channels=max(1, share_of(load.grpc_channels, config.process, load.processes)),
            timeout_s=load.timeout_ms / 1000,
        )
    address = await resolve(at.host, at.port)
    connections = share_of(load.max_connections, config.process, load.processes)
    return HttpSender(address, at.host, pool, recorder, loop.on_over, headers=headers, max_connections=connections)


async def _say_status(loop: OpenLoop, recorder: Recorder, say: Say) -> None:
    while True:
        await asyncio.sleep(STATUS_INTERVAL_S)
        recent = recorder.take_recent()
        say(Status(due=recorder.due, ok=recorder.ok, in_flight=loop.in_flight, recent=recent))


async def serve_runs(config: ProcessConfig, pool: PayloadPool, say: Say) -> None:
    """Does each run that is read from stdin."""
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        say(await do_run(config, Begin.model_validate_json(line), pool, say))


def main(arguments: list[str]) -> int:
    """The program; returns its exit code."""
    die_with_parent(os.environ)
    # SIGUSR1 to the whole group is a mark, which is the main process's business.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    config = ProcessConfig.model_validate_json(Path(arguments[0]).read_text(encoding="utf-8"))
    _raise_file_limit()
    try:
        name, pool = open_payloads(config)
        # What is there by now stays for good: a collection that walks all requests would delay those that are due.
        gc.freeze()
        say(Ready(requests=len(pool), model=pool.model, workload=name))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_runs(config, pool, say))
    except (ShardrankError, OSError) as error:
        say(Failed(message=str(error)))
        return 1
    return 0


def say(message: BaseModel) -> None:
    """One line on stdout."""
    sys.stdout.write(message.model_dump_json() + "\n")
    sys.stdout.flush()


def _raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
