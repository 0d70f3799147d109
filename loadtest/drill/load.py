"""The load, a process of its own: asks at a fixed rate, judges every answer and logs it. Open loop: it never waits.

`python -m loadtest.drill.load CONFIG` with a file that holds a `LoadConfig` as JSON. It prints `ready` once it is about
to ask, and ends with SIGTERM, after the answers that are still out. Latency counts from when a request was due, so
time in which neither the server nor the load itself got on is in it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc.aio
import uvloop
from pydantic import Field

from loader.manifest import Frozen
from loadtest.drill.answers import AnswerLog
from loadtest.drill.clients import CallFailedError, Client, GrpcQuestions, HttpQuestions
from loadtest.drill.http_client import HttpClient
from loadtest.drill.oracle import OracleShape
from loadtest.drill.questions import Question, make_questions
from loadtest.drill.verdict import Kind, Verdict, judge
from loadtest.grpc_channels import open_channels
from serving.fleet.process import StopRequestedError, die_with_parent, run_until_signalled

FLUSH_INTERVAL_S = 0.1
# Which API request i goes over, i mod 6: two of three are ranked, one of two goes over HTTP. Indices in `APIS`.
API_PATTERN = (0, 1, 2, 0, 1, 3)


class LoadConfig(Frozen):
    """What to ask, where, and how often.

    Attributes:
        host, http_port, grpc_port: of the fleet.
        shape: of the oracle.
        rate: requests a second over all APIs.
        answers: file of the log.
        timeout_s: deadline of each request; it is also what the client waits at most.
        questions_each: different questions of each method.
        grpc_channels: connections over gRPC.
        max_in_flight: requests that are out at a time; one beyond is recorded as failed without being sent.
        seed: of the questions.
    """

    host: str
    http_port: int = Field(ge=1, le=65535)
    grpc_port: int = Field(ge=1, le=65535)
    shape: OracleShape
    rate: float = Field(gt=0, le=100_000)
    answers: Path
    timeout_s: float = Field(default=5.0, gt=0, le=60)
    questions_each: int = Field(default=256, ge=1, le=100_000)
    grpc_channels: int = Field(default=4, ge=1, le=64)
    max_in_flight: int = Field(default=2048, ge=1, le=65536)
    seed: int = 0


class Load:
    """Asks at a fixed rate.

    Args:
        config: what and how often.
        clients: one for each of `APIS`.
        questions: those of each client.
        log: where answers go.
        clock: CLOCK_MONOTONIC in seconds.
    """

    def __init__(
        self,
        config: LoadConfig,
        clients: list[Client],
        questions: list[list[Question]],
        log: AnswerLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._clients = clients
        self._questions = questions
        self._log = log
        self._clock = clock
        self._out: set[asyncio.Task[None]] = set()
        self._defect: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Asks until it is cancelled; then waits for the answers that are out, and flushes the log.

        Raises:
            Exception: whatever an `ask` raises that is not a failed call: a defect of the load itself.
        """
        work = [asyncio.create_task(self._ask_at_rate()), asyncio.create_task(self._flush_often())]
        for task in work:
            task.add_done_callback(self._ended)
        try:
            await self._defect
        finally:
            work[0].cancel()
            if self._out:
                await asyncio.wait(self._out)
            work[1].cancel()
            self._log.flush()

    async def _ask_at_rate(self) -> None:
        begin = self._clock()
        number = 0
        while True:
            due = begin + number / self._config.rate
            if (wait_s := due - self._clock()) > 0:
                await asyncio.sleep(wait_s)
            self._start(number, due)
            number += 1

    def _start(self, number: int, due: float) -> None:
        api = API_PATTERN[number % len(API_PATTERN)]
        if len(self._out) >= self._config.max_in_flight:
            now = self._clock()
            self._log.add(api, due, now, now, 0, Verdict(Kind.FAILED, f"{len(self._out)} requests are out already"))
            return
        task = asyncio.create_task(self._ask(api, number // len(API_PATTERN) % len(self._questions[api]), due))
        self._out.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._out.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._defect.done():
            self._defect.set_exception(error)

    async def _ask(self, api: int, index: int, due: float) -> None:
        sent = self._clock()
        # The event loop's timers may fire a fraction of a millisecond early.
        due = min(due, sent)
        version = 0
        try:
            answer = await self._clients[api].ask(index, self._config.timeout_s)
        except TimeoutError:
            verdict = Verdict(Kind.FAILED, f"no answer within {self._config.timeout_s:g} s")
        except CallFailedError as error:
            verdict = Verdict(Kind.FAILED, str(error))
        else:
            version = answer.version
        # Before the judging, which is not the server's work.
        ended = self._clock()
        if version:
            verdict = judge(self._questions[api][index], version, answer.values)
        self._log.add(api, due, sent, ended, version, verdict)

    async def _flush_often(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            self._log.flush()


async def run_load(config: LoadConfig, on_ready: Callable[[], None]) -> None:
    """Asks until it is cancelled.

    Args:
        config: what, where and how often.
        on_ready: called when all is prepared.
    """
    spec = config.shape.spec()
    made = make_questions(spec, config.questions_each, int(config.timeout_s * 1000), config.seed)
    http = HttpClient(config.host, config.http_port)
    channels: list[grpc.aio.Channel] = open_channels(config.host, config.grpc_port, config.grpc_channels)
    rank, lookup = made["rank"], made["lookup"]
    clients: list[Client] = [
        HttpQuestions(http, spec.model, "rank", rank),
        GrpcQuestions(channels, "rank", rank),
        HttpQuestions(http, spec.model, "lookup", lookup),
        GrpcQuestions(channels, "lookup", lookup),
    ]
    log = AnswerLog(config.answers)
    # What is there by now stays for good: a collection that walks all questions would delay answers.
    gc.freeze()
    try:
        on_ready()
        await Load(config, clients, [rank, rank, lookup, lookup], log).run()
    finally:
        log.close()
        http.close()
        for channel in channels:
            await channel.close(None)


def main(arguments: list[str]) -> None:
    """The program."""
    die_with_parent(os.environ)
    config = LoadConfig.model_validate_json(Path(arguments[0]).read_text(encoding="utf-8"))

    def say_ready() -> None:
        sys.stdout.write("ready\n")
        sys.stdout.flush()

    try:
        run_until_signalled(lambda: run_load(config, say_ready), loop_factory=uvloop.new_event_loop)
    except StopRequestedError:
        return


if __name__ == "__main__":
    main(sys.argv[1:])
