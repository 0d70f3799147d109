"""The load of a drill, a process of its own: the oracle is asked at a fixed rate, every answer is judged and recorded.

Its argument is a `LoadConfig` as JSON. It ends with SIGTERM, after the answers that are still in flight. Latency counts
from when a request was due, so time in which neither the server nor the load itself got on is in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from loader.memory import settle_heap
from loader.snapshot.tables import Frozen
from loadtest.drill.answers import APIS, RECORD, Answers
from loadtest.drill.config import OracleShape
from loadtest.drill.oracle import Float32Array, Kind, Method, Question, Verdict, judge, make_questions, oracle_spec
from loadtest.drill.processes import check_running, child_process
from loadtest.load.config import LoadTarget
from loadtest.load.loops import OpenLoop, arrival_times
from loadtest.load.senders import Failure, Outgoing, Sender, make_sender
from loadtest.workloads.payloads import Payload
from serving.client import ClientError
from serving.client.features import RankFeatures, lookup_request, read_lookup, read_rank
from serving.fleet.process import StopRequestedError, die_with_parent, run_until_signalled
from serving.fleet.supervisor import Child, describe_exit
from serving.proto.shardrank.v1.ranking_pb2 import LookupRequest, RankRequest

# Which of `APIS` request i goes over, i mod 6: two of three are ranked, one of two goes over HTTP.
API_PATTERN = (0, 1, 2, 0, 1, 3)
METHODS: tuple[Method, ...] = ("rank", "lookup")
PROTOBUF = (("content-type", "application/x-protobuf"), ("accept", "application/x-protobuf"))
# Deadline of each request, which brings it; from when it is due, it is also what the load waits at most.
TIMEOUT_MS = 5000
# Connections that are opened before the load begins, so that each serving process has some; requests wait for them.
HTTP_CONNECTIONS, GRPC_CHANNELS = 16, 4
CONNECT_TIMEOUT_S = 10.0
# One beyond is recorded as failed without being sent.
MAX_IN_FLIGHT = 2048
QUESTIONS_EACH = 256
STOP_TIMEOUT_S = 90.0
MAX_DETAILS = 20
MAX_DETAIL_CHARS = 300


def api_of(number: int) -> int:
    """Return the place in `APIS` of what request `number` of a load goes over."""
    return API_PATTERN[number % len(API_PATTERN)]


class OracleRequests:
    """The oracle's questions, encoded, and the judge of their answers. A request has the same body over HTTP and gRPC.

    Args:
        shape: of the model.
        count: different questions of each method.
        single: features whose bags have one id.
    """

    def __init__(self, shape: OracleShape, count: int = QUESTIONS_EACH, single: Collection[str] = ()) -> None:
        questions, total = make_questions(oracle_spec(shape), count, single=single), count * len(API_PATTERN)
        self._questions = [questions[METHODS[api_of(i) // 2]][i // len(API_PATTERN)] for i in range(total)]
        self._payloads: dict[str, list[Payload]] = {"http": [], "grpc": []}
        for question in self._questions:
            message: RankRequest | LookupRequest
            if question.method == "rank":
                sides = question.side("context"), question.side("candidate")
                message = RankFeatures(*sides, weights={}, context_dense=None, candidate_dense=None).by_name()
            else:
                message = lookup_request(question.bags, {})
            message.model, message.timeout_ms = shape.model, TIMEOUT_MS
            path = f"/v1/models/{shape.model}:{question.method}"
            payload = Payload(path, message.SerializeToString(), PROTOBUF, num_candidates=0)
            self._payloads["http"].append(payload)
            path = f"/shardrank.v1.RankingService/{question.method.title()}"
            self._payloads["grpc"].append(replace(payload, path=path, headers=()))

    async def sender(self, address: str, connections: int = 1) -> Sender:
        """Make the sender of a server's URL."""
        target = LoadTarget.parse(address)

        def check(request: Outgoing, body: bytes) -> Failure | None:
            question = self._questions[request.number % len(self._questions)]
            try:
                request.verdict = judge(question, *read_answer(question, body))
            except ClientError as error:
                return Failure(error.kind, str(error))
            return None if request.verdict.kind is Kind.OK else Failure(request.verdict.kind.name.lower())

        payloads = self._payloads[target.scheme]
        return await make_sender(target, payloads, check, connections=connections, channels=connections)


def read_answer(question: Question, body: bytes) -> tuple[int, Float32Array]:
    """Read the version that an answer names, and its values in the order of the question's. Raises ClientError."""
    if question.method == "rank":
        ranked = read_rank(body)
        return ranked.version, ranked.scores
    answer = read_lookup(body)
    # Vectors that are not there are values too few, which is judged.
    vectors: dict[str, Any] = {**dict.fromkeys(question.bags, np.empty(0, np.float32)), **answer.embeddings}
    return answer.version, np.concatenate([vectors[name].reshape(-1) for name in question.bags])


def verdict_of(request: Outgoing, failure: Failure | None) -> Verdict:
    """Return the verdict on a request that is over."""
    if request.verdict is not None or failure is None:
        verdict: Verdict = request.verdict
        return verdict
    return Verdict(Kind.FAILED, f"{failure.kind}: {failure.message}")


def describe(request: Outgoing, verdict: Verdict) -> str:
    """Return in one line why an answer is not right."""
    detail = verdict.detail[:MAX_DETAIL_CHARS].replace("\n", " ")
    return f"{verdict.kind.name.lower()} {APIS[api_of(request.number)]}: {detail}"


class LoadConfig(Frozen):
    """What to ask of the oracle, over HTTP and gRPC at which addresses, how often in all, and the file of answers."""

    addresses: tuple[str, str]
    shape: OracleShape
    rate: float
    answers: Path


async def run_load(config: LoadConfig) -> None:
    """Ask the oracle until cancelled, then wait for the answers that are in flight.

    The file of answers gets a `RECORD` for each, and is there once it is about to ask; another one, with the suffix
    `.details`, says why the first ones that are not right are not.
    """
    requests = OracleRequests(config.shape)
    connections = (HTTP_CONNECTIONS, GRPC_CHANNELS)
    senders = [await requests.sender(*place) for place in zip(config.addresses, connections, strict=True)]
    async with contextlib.AsyncExitStack() as stack:
        for sender in senders:
            stack.push_async_callback(sender.close)
            await sender.open(CONNECT_TIMEOUT_S)
        details = stack.enter_context(config.answers.with_suffix(".details").open("w", encoding="utf-8", buffering=1))
        answers = stack.enter_context(config.answers.open("wb", buffering=0))
        left = MAX_DETAILS

        def record(request: Outgoing, failure: Failure | None) -> None:
            nonlocal left
            verdict, api = verdict_of(request, failure), api_of(request.number)
            row = (request.intended, request.turn, request.ended, verdict.version, api, verdict.kind)
            answers.write(np.array(row, RECORD).tobytes())
            if verdict.kind is not Kind.OK and left:
                left -= 1
                details.write(f"{request.intended:.3f} {describe(request, verdict)}\n")

        # What is there by now stays: a collection that walks all questions would delay answers.
        settle_heap()
        loop = OpenLoop(
            arrival_times("constant", config.rate, math.inf),
            lambda number: senders[api_of(number) % 2],
            record,
            begin=time.monotonic(),
            timeout_s=TIMEOUT_MS / 1000,
            max_in_flight=MAX_IN_FLIGHT,
        )
        running = asyncio.ensure_future(loop.run())
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            loop.stop()
            await running


@dataclass(frozen=True, slots=True)
class RunningLoad:
    """A load, a child process of a drill, and its file of answers."""

    process: Child
    path: Path

    def check(self) -> None:
        """Raise ChildFailedError if the load has ended by itself."""
        check_running(self.process)

    def details(self) -> tuple[str, ...]:
        """Return why the first answers that are not right are not."""
        return tuple(self.path.with_suffix(".details").read_text(encoding="utf-8").splitlines())

    async def stop(self) -> Answers:
        """End it after the answers that are in flight; return all answers. Raises ChildFailedError if it failed."""
        self.check()
        await self.process.stop(STOP_TIMEOUT_S)
        if code := await self.process.wait():
            raise self.process.failure(f"ended with {describe_exit(code)}")
        return np.fromfile(self.path, RECORD)


@contextlib.asynccontextmanager
async def running_load(config: LoadConfig) -> AsyncIterator[RunningLoad]:
    """Start the load and yield once it asks; it ends with the block. Raises ChildFailedError if it does not begin."""
    command = (sys.executable, "-m", "loadtest.drill.load", config.model_dump_json())

    async def asks() -> bool:
        return config.answers.exists()

    async with child_process("load", command, config.answers.parent, asks) as process:
        yield RunningLoad(process, config.answers)


if __name__ == "__main__":
    die_with_parent(os.environ)
    settings = LoadConfig.model_validate_json(sys.argv[1])
    with contextlib.suppress(StopRequestedError):
        run_until_signalled(lambda: run_load(settings), loop_factory=uvloop.new_event_loop)
