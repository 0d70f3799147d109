"""Loads, processes of their own: ask at a fixed rate, judge every answer and log it. Open loop: they never wait.

`python -m loadtest.drill.load CONFIG` with a file that holds a `DrillLoadConfig` asks the oracle. It says that it is
ready once it is about to ask, and ends with SIGTERM, after the answers that are still out. Latency counts from when a
request was due, so time in which neither the server nor the load itself got on is in it.

The log has records of a fixed size, which can be read while it grows, and beside them a text file with the details of
the first answers that were not right. Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import uvloop
from pydantic import Field

from loader.snapshot.tables import Frozen
from loadtest.drill.oracle import Kind, OracleShape, Question, Verdict, judge, make_questions
from loadtest.drill.processes import (
    child_process,
    ended,
    finished,
    module_command,
    module_config,
    say_ready,
    until_ready,
)
from serving.client import AsyncClient, ClientError, RetryPolicy
from serving.fleet.process import StopRequestedError, run_until_signalled

APIS = ("http rank", "grpc rank", "http lookup", "grpc lookup")
# Which API request i goes over, i mod 6: two of three are ranked, one of two goes over HTTP.
API_PATTERN = (0, 1, 2, 0, 1, 3)
RECORD = np.dtype(
    [
        ("intended", "<f8"),  # when the request was due: latency counts from here
        ("sent", "<f8"),  # when the load got to it
        ("ended", "<f8"),
        ("version", "<i8"),  # that the answer names; 0 for none
        ("api", "u1"),
        ("kind", "u1"),  # `Kind`
    ]
)
# Deadline of each request; it is also what the client waits at most.
TIMEOUT_MS = 5000
# Clients for each protocol, which take turns: they reach different serving processes.
CLIENTS_EACH = 4
# Requests that are out at a time; one beyond is recorded as failed without being sent.
MAX_IN_FLIGHT = 2048
STOP_TIMEOUT_S = 90.0
MAX_DETAILS = 1000
MAX_DETAIL_CHARS = 300

Answers = npt.NDArray[np.void]
Ask = Callable[[int], Awaitable[tuple[int, Callable[[], Verdict]]]]
"""Ask question i; gives the version that the answer names, or 0, and what judges it, which is not the server's work."""


class DrillLoadConfig(Frozen):
    """What to ask of the oracle, over HTTP and gRPC at which addresses, how often in all, and where the log goes."""

    addresses: tuple[str, str]
    shape: OracleShape
    rate: float = Field(gt=0, le=100_000)
    answers: Path
    questions_each: int = Field(default=256, ge=1, le=100_000)


class AnswerLog:
    """Writes records to a new file; what was added can be read by another process at once."""

    def __init__(self, path: Path, apis: Sequence[str] = APIS) -> None:
        self._records = path.open("wb", buffering=0)
        self._details = details_path(path).open("w", encoding="utf-8", buffering=1)
        self._details_left = MAX_DETAILS
        self._apis = apis
        self._record = np.zeros(1, RECORD)

    def add(self, api: int, intended: float, sent: float, ended: float, version: int, verdict: Verdict) -> None:
        """Add one answer."""
        self._record[0] = (intended, sent, ended, version, api, verdict.kind)
        self._records.write(self._record.tobytes())
        if verdict.kind is not Kind.OK and self._details_left:
            self._details_left -= 1
            detail = verdict.detail[:MAX_DETAIL_CHARS].replace("\n", " ")
            self._details.write(f"{intended:.3f} {verdict.kind.name.lower()} {self._apis[api]}: {detail}\n")

    def close(self) -> None:
        """End."""
        self._records.close()
        self._details.close()


def details_path(path: Path) -> Path:
    """Return where the details of answers that are not right lie."""
    return path.with_suffix(".details")


def read_answers(path: Path, first: int = 0) -> Answers:
    """Return the records from number `first` on that are complete by now, in the order in which they ended."""
    size = path.stat().st_size // RECORD.itemsize
    return np.fromfile(path, RECORD, count=max(0, size - first), offset=first * RECORD.itemsize)


def read_details(path: Path, max_lines: int = 20) -> list[str]:
    """Return the first details, one line each."""
    return details_path(path).read_text(encoding="utf-8").splitlines()[:max_lines]


class TimeSpan(NamedTuple):
    """A span of time, in seconds of CLOCK_MONOTONIC."""

    begin: float
    end: float


class AnswerCounts(Frozen):
    """How many answers there were, and how many were not right."""

    answers: int = 0
    failed: int = 0
    mixed: int = 0
    wrong: int = 0


def count_kinds(answers: Answers) -> dict[str, int]:
    """Return the fields of `AnswerCounts`."""
    kinds = np.bincount(answers["kind"], minlength=len(Kind)).tolist()
    return {"answers": len(answers), **{kind.name.lower(): kinds[kind] for kind in Kind if kind is not Kind.OK}}


def counted(found: Mapping[str, int]) -> list[str]:
    """Return a problem for each kind of answers of which there is one, by what is wrong with it."""
    return [f"{count} answers {what}" for what, count in found.items() if count]


def overlaps(answers: Answers, spans: Sequence[TimeSpan]) -> npt.NDArray[np.bool_]:
    """Return which requests were out at any time within one of the spans, which are in order and apart: bool [n]."""
    if not spans:
        return np.zeros(len(answers), np.bool_)
    begins, ends = np.array(spans).T
    last_begun = np.searchsorted(begins, answers["ended"], side="right") - 1
    result: npt.NDArray[np.bool_] = (last_begun >= 0) & (ends[np.maximum(last_begun, 0)] >= answers["intended"])
    return result


def latency_ms(answers: Answers) -> npt.NDArray[np.float64]:
    """Return times from when requests were due."""
    result: npt.NDArray[np.float64] = 1e3 * (answers["ended"] - answers["intended"])
    return result


def percentile(values: Sequence[float] | npt.NDArray[np.floating], percent: float) -> float | None:
    """Return a percentile; None of nothing."""
    return float(np.percentile(values, percent)) if np.size(values) else None


class DrillLoad:
    """Asks at a fixed rate: request i goes over API `pattern[i]`, in turn."""

    def __init__(self, asks: Sequence[Ask], pattern: Sequence[int], rate: float, log: AnswerLog) -> None:
        self._asks, self._pattern, self._rate, self._log = asks, pattern, rate, log
        self._out = 0

    async def run(self) -> None:
        """Ask until cancelled; then wait for the answers that are out. Raises what an `ask` raises: a defect."""
        # What is there by now stays for good: a collection that walks all questions would delay answers.
        gc.freeze()
        say_ready()
        begin = time.monotonic()
        async with asyncio.TaskGroup() as group:
            with contextlib.suppress(asyncio.CancelledError):
                for number in itertools.count():
                    due = begin + number / self._rate
                    # uvloop's timers may be a part of a millisecond early.
                    while (wait_s := due - time.monotonic()) > 0:  # noqa: ASYNC110
                        await asyncio.sleep(wait_s)
                    turn, place = divmod(number, len(self._pattern))
                    api = self._pattern[place]
                    if self._out < MAX_IN_FLIGHT:
                        self._out += 1
                        group.create_task(self._ask(api, turn, due))
                    else:
                        now, reason = time.monotonic(), f"{self._out} requests are out already"
                        self._log.add(api, due, now, now, 0, Verdict(Kind.FAILED, reason))

    async def _ask(self, api: int, number: int, due: float) -> None:
        sent = time.monotonic()
        version, verdict = await self._asks[api](number)
        self._log.add(api, due, sent, time.monotonic(), version, verdict())
        self._out -= 1


def failed(reason: str) -> tuple[int, Callable[[], Verdict]]:
    """Return an answer that there is not."""
    return 0, lambda: Verdict(Kind.FAILED, reason)


def oracle_ask(model: str, clients: Sequence[AsyncClient], questions: Sequence[Question]) -> Ask:
    """Ask questions of one method over clients in turn."""
    turns = itertools.cycle(clients)

    async def ask(number: int) -> tuple[int, Callable[[], Verdict]]:
        question, client = questions[number % len(questions)], next(turns)
        try:
            if question.method == "rank":
                ranked = await client.rank(model, **question.arguments)
                return ranked.version, partial(judge, question, ranked.version, ranked.scores)
            found = await client.lookup(model, **question.arguments)
        except ClientError as error:
            return failed(f"{error.kind}: {error}")
        # Vectors that are not there are values too few, which is judged.
        vectors: dict[str, Any] = {**dict.fromkeys(question.features, np.empty(0, np.float32)), **found.embeddings}
        values = np.concatenate([vectors[name].reshape(-1) for name in question.features])
        return found.version, partial(judge, question, found.version, values)

    return ask


async def run_load(config: DrillLoadConfig) -> None:
    """Ask the oracle until cancelled."""
    questions = make_questions(config.shape.spec(), config.questions_each)
    log = AnswerLog(config.answers)
    async with AsyncExitStack() as stack:
        stack.callback(log.close)

        def opened(address: str) -> AsyncClient:
            # No request is sent a second time, whatever happens to it.
            client = AsyncClient(address, timeout_ms=TIMEOUT_MS, retry=RetryPolicy(max_attempts=1))
            stack.push_async_callback(client.close)
            return client

        clients = [[opened(address) for _ in range(CLIENTS_EACH)] for address in config.addresses]
        asks = [
            oracle_ask(config.shape.model, own, questions[method]) for method in ("rank", "lookup") for own in clients
        ]
        await DrillLoad(asks, API_PATTERN, config.rate, log).run()


@dataclass(frozen=True, slots=True)
class RunningLoad:
    """A load that asks, as a child process of a drill, with its log of answers and that of its errors."""

    process: asyncio.subprocess.Process
    path: Path
    log: Path

    def check(self) -> None:
        """Raise LoadProcessError if the load has ended by itself."""
        if self.process.returncode is not None:
            raise ended(self.process.returncode, self.log)

    def answers(self, first: int = 0) -> Answers:
        """Return what was logged so far. Raises LoadProcessError if the load has ended by itself."""
        self.check()
        return read_answers(self.path, first)

    def details(self, max_lines: int = 20) -> list[str]:
        """Return why the first answers that are not right are not."""
        return read_details(self.path, max_lines)

    async def stop(self) -> Answers:
        """End it after the answers that are out; return all answers. Raises LoadProcessError if it failed."""
        self.check()
        self.process.terminate()
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await finished(self.process, self.log)
        return read_answers(self.path)


@contextlib.asynccontextmanager
async def running_load(config: DrillLoadConfig) -> AsyncIterator[RunningLoad]:
    """Start the load and yield once it asks; it ends with the block. Raises LoadProcessError if it does not begin."""
    path, log = config.answers, config.answers.with_suffix(".log")
    async with child_process(module_command("loadtest.drill.load", config, path.with_suffix(".json")), log) as process:
        await until_ready(process, log)
        yield RunningLoad(process, path, log)


if __name__ == "__main__":
    settings = module_config(DrillLoadConfig)
    with contextlib.suppress(StopRequestedError):
        run_until_signalled(lambda: run_load(settings), loop_factory=uvloop.new_event_loop)
