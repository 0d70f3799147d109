"""The load, a process of its own: asks at a fixed rate, judges every answer and logs it. Open loop: it never waits.

`python -m loadtest.drill.load CONFIG` with a file that holds a `LoadConfig` as JSON. It prints `ready` once it is about
to ask, and ends with SIGTERM, after the answers that are still out. Latency counts from when a request was due, so
time in which neither the server nor the load itself got on is in it.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from pydantic import Field

from loader.snapshot.manifest import Frozen
from loadtest.drill.answers import AnswerLog
from loadtest.drill.oracle import Float32Array, OracleShape
from loadtest.drill.questions import Question, make_questions
from loadtest.drill.verdict import Kind, Verdict, judge
from serving.client import AsyncClient, ClientError, RetryPolicy
from serving.fleet.process import StopRequestedError, die_with_parent, run_until_signalled

FLUSH_INTERVAL_S = 0.1
MAX_ERROR_CHARS = 300
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
        clients_each: clients for each protocol, which take turns: they reach different serving processes.
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
    clients_each: int = Field(default=4, ge=1, le=64)
    max_in_flight: int = Field(default=2048, ge=1, le=65536)
    seed: int = 0


class Load:
    """Asks at a fixed rate.

    Args:
        config: what and how often.
        clients: over HTTP and over gRPC, as `APIS` alternate.
        questions: those of each of `APIS`.
        log: where answers go.
        clock: CLOCK_MONOTONIC in seconds.
    """

    def __init__(
        self,
        config: LoadConfig,
        clients: list[list[AsyncClient]],
        questions: list[list[Question]],
        log: AnswerLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._clients = [itertools.cycle(one) for one in clients]
        self._model = config.shape.model
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
        question = self._questions[api][index]
        try:
            version, values = await self._answer(next(self._clients[api % 2]), question)
        except ClientError as error:
            verdict = Verdict(Kind.FAILED, f"{error.kind}: {error}"[:MAX_ERROR_CHARS])
            self._log.add(api, due, sent, self._clock(), 0, verdict)
        else:
            # The clock before the judging, which is not the server's work.
            self._log.add(api, due, sent, self._clock(), version, judge(question, version, values))

    async def _answer(self, client: AsyncClient, question: Question) -> tuple[int, Float32Array]:
        if question.method == "rank":
            ranked = await client.rank(self._model, **question.arguments)
            return ranked.version, ranked.scores
        found = await client.lookup(self._model, **question.arguments)
        # Vectors that are not there are values too few, which is judged.
        vectors: dict[str, Any] = {**dict.fromkeys(question.features, np.empty(0, np.float32)), **found.embeddings}
        return found.version, np.concatenate([vectors[name].reshape(-1) for name in question.features])

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
    made = make_questions(spec, config.questions_each, config.seed)
    rank, lookup = made["rank"], made["lookup"]
    host = f"[{config.host}]" if ":" in config.host else config.host
    log = AnswerLog(config.answers)
    # What is there by now stays for good: a collection that walks all questions would delay answers.
    gc.freeze()
    async with AsyncExitStack() as stack:
        stack.callback(log.close)

        def opened(address: str) -> AsyncClient:
            # No request is sent a second time, whatever happens to it.
            client = AsyncClient(address, timeout_ms=int(config.timeout_s * 1000), retry=RetryPolicy(max_attempts=1))
            stack.push_async_callback(client.close)
            return client

        clients = [
            [opened(address) for _ in range(config.clients_each)]
            for address in (f"http://{host}:{config.http_port}", f"grpc://{host}:{config.grpc_port}")
        ]
        on_ready()
        await Load(config, clients, [rank, rank, lookup, lookup], log).run()


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
