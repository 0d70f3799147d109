"""The load of a drill, in a generator's process: the oracle is asked at a fixed rate, every answer judged and recorded.

Latency counts from when a request was due, so time in which neither the server nor the load itself got on is in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import threading
import time
from array import array
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loader.memory import settle_heap
from loadtest.drill.config import FleetDrillConfig, OracleShape
from loadtest.drill.oracle import Method, judge, make_questions, oracle_spec
from loadtest.errors import DrillError
from loadtest.load.config import LoadTarget
from loadtest.load.generator import Generators, event_loop
from loadtest.load.loops import OpenLoop, arrival_times
from loadtest.load.result import COLUMNS, ROW, Recorder, Records, Rows
from loadtest.load.senders import Failure, Outgoing, Sender, make_sender
from loadtest.servers import Server
from loadtest.workloads.payloads import Payload
from serving.client import ClientError
from serving.client.features import RankFeatures, lookup_request, read_lookup, read_rank

APIS = ("http rank", "grpc rank", "http lookup", "grpc lookup")
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
NO_VECTORS = np.empty(0, np.float32)


def api_of(number: int) -> int:
    """Return the place in `APIS` of what request `number` of a load goes over."""
    return API_PATTERN[number % len(API_PATTERN)]


KINDS = ("ok", "failed", "mixed", "wrong")
"""Of answers, by their code.

`ok`: exactly that of the version that it names. `failed`: there is none (an error, a broken connection, nothing within
the deadline, or nothing that can be read). `mixed` and `wrong`: see `judge`.
"""
ANSWER = np.dtype([*ROW.descr, ("version", "<i8"), ("api", "<i8")])
"""A row of a `Recorder`, in seconds of CLOCK_MONOTONIC, which all processes of a machine share, its code a place in
`KINDS`; the version that the answer names, 0 for none; and the place in `APIS`."""


class TimeSpan(NamedTuple):
    """A span of time."""

    begin: float
    end: float


def count_kinds(codes: npt.ArrayLike) -> dict[str, int]:
    """Return how many answers there were, and how many failed, were mixed and wrong."""
    counts = np.bincount(np.asarray(codes, np.int64), minlength=len(KINDS)).tolist()
    return {"answers": sum(counts), **dict(zip(KINDS[1:], counts[1:], strict=True))}


def overlaps(answers: Rows, spans: Sequence[TimeSpan]) -> npt.NDArray[np.bool_]:
    """Return which requests were in flight at any time within one of the spans."""
    result = np.zeros(len(answers), np.bool_)
    for begin, end in spans:
        result |= (answers["due"] <= end) & (begin <= answers["ended"])
    return result


class OracleRecorder(Recorder):
    """Records as `ANSWER`; for loops whose begin is 0, so that all times are CLOCK_MONOTONIC's."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self._versions, self._apis = array("q"), array("q")

    def add(self, request: Outgoing, failure: Failure | None) -> None:
        """See `Recorder`; an example says when the request was due, and its API."""
        api = api_of(request.number)
        self._versions.append(request.verdict or 0)
        self._apis.append(api)
        if failure is not None:
            failure = failure._replace(message=f"{request.intended:.3f} {APIS[api]}: {failure.message}")
        super().add(request, failure)

    def records(self) -> Records:
        """See `Recorder`."""
        rows, kinds, examples = super().records()
        codes = np.array([KINDS.index(kind if kind in KINDS else "failed") for kind in kinds])
        answers = np.zeros(len(rows), ANSWER)
        answers[list(COLUMNS)] = rows
        answers["code"] = codes[rows["code"].astype(np.int64)]
        answers["version"], answers["api"] = self._versions, self._apis
        return Records(answers, KINDS, examples)


class OracleRequests:
    """The oracle's questions, encoded, and the judge of their answers; bags of `single` features have one id.

    A request has the same body over HTTP and gRPC.
    """

    def __init__(self, shape: OracleShape, single: Collection[str] = ()) -> None:
        by_method = make_questions(oracle_spec(shape), QUESTIONS_EACH, single=single)
        self._questions = [by_method[METHODS[api // 2]][i] for i in range(QUESTIONS_EACH) for api in API_PATTERN]
        self._model = shape.model
        self._bodies: list[bytes] = []
        for question in self._questions:
            message: Any = lookup_request(question.bags, {})
            if question.method == "rank":
                sides = question.side("context"), question.side("candidate")
                message = RankFeatures(*sides, weights={}, context_dense=None, candidate_dense=None).by_name()
            message.model, message.timeout_ms = shape.model, TIMEOUT_MS
            self._bodies.append(message.SerializeToString())

    async def sender(self, url: str, connections: int = GRPC_CHANNELS) -> Sender:
        """Make the sender of a server's URL."""
        target = LoadTarget.parse(url)
        paths = {method: f"/shardrank.v1.RankingService/{method.title()}" for method in METHODS}
        if is_http := target.scheme == "http":
            paths = {method: f"/v1/models/{self._model}:{method}" for method in METHODS}
        requests = zip(self._questions, self._bodies, strict=True)
        payloads = [Payload(paths[each.method], body, PROTOBUF if is_http else (), 0) for each, body in requests]

        def check(request: Outgoing, body: bytes) -> Failure | None:
            question = self._questions[request.number % len(self._questions)]
            try:
                if question.method == "rank":
                    ranked = read_rank(body)
                    request.verdict, values = ranked.version, ranked.scores
                else:
                    found = read_lookup(body)
                    # Vectors that are not there are values too few, which is judged.
                    vectors: dict[str, Any] = {**dict.fromkeys(question.bags, NO_VECTORS), **found.embeddings}
                    values = np.concatenate([vectors[name] for name in question.bags], axis=None)
                    request.verdict = found.version
            except ClientError as error:
                return Failure(error.kind, str(error))
            return judge(question, request.verdict, values)

        return await make_sender(target, payloads, check, connections=connections, channels=connections)


async def ask_oracle(config: FleetDrillConfig, server: Server, file: Path) -> Records:
    """Ask the oracle until SIGTERM, then wait for the answers in flight, and write all to the file.

    It is there, but empty, once the first request is due.
    """
    requests = OracleRequests(config)
    senders = (
        await requests.sender(server.target("json"), HTTP_CONNECTIONS),
        await requests.sender(server.target("grpc")),
    )
    for sender in senders:
        await sender.open(CONNECT_TIMEOUT_S)
    # What is there by now stays: a collection that walks all questions would delay answers.
    settle_heap()
    recorder, begin = OracleRecorder(), time.monotonic()
    loop = OpenLoop(
        (begin + times for times in arrival_times("constant", config.rate, math.inf)),
        lambda number: senders[api_of(number) % 2],
        recorder.add,
        begin=0.0,
        timeout_s=TIMEOUT_MS / 1000,
        max_in_flight=MAX_IN_FLIGHT,
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, loop.stop)
    await asyncio.to_thread(file.touch)
    await loop.run()
    for sender in senders:
        await sender.close()
    records = recorder.records()
    np.save(file, records.rows)
    return records


def run_load(*arguments: Any) -> Records:
    """Do `ask_oracle` in this process, a generator's."""
    return event_loop().run(ask_oracle(*arguments))


class RunningLoad(NamedTuple):
    """The process of a load, the call that it runs, and the group of that task: whatever fails in it ends the block."""

    process_id: int
    call: asyncio.Task[tuple[Records, ...]]
    tasks: asyncio.TaskGroup

    async def stop(self) -> Records:
        """End it after the answers that are in flight. Raises DrillError if it has ended before."""
        if self.call.done():
            raise DrillError("the load has ended by itself")
        os.kill(self.process_id, signal.SIGTERM)
        (records,) = await self.call
        return records


@contextlib.asynccontextmanager
async def running_load(config: FleetDrillConfig, server: Server, file: Path) -> AsyncIterator[RunningLoad]:
    """Start the load and yield once it asks; it ends with the block. Raises LoadError if it fails."""
    with await asyncio.to_thread(Generators) as generators:
        calling = asyncio.to_thread(generators.call, run_load, [(config, server, file)], threading.TIMEOUT_MAX)
        try:
            async with asyncio.TaskGroup() as tasks:
                call = tasks.create_task(calling)
                while not await asyncio.to_thread(file.exists):  # noqa: ASYNC110 - another process makes it
                    await asyncio.sleep(0.05)
                yield RunningLoad(generators.process_ids[0], call, tasks)
                call.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
