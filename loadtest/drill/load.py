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
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import uvloop

from loader.memory import settle_heap
from loader.snapshot.tables import Frozen
from loadtest.drill.config import OracleShape
from loadtest.drill.oracle import Kind, Method, Verdict, judge, make_questions, oracle_spec
from loadtest.load.config import LoadTarget
from loadtest.load.loops import OpenLoop, arrival_times
from loadtest.load.senders import Failure, Outgoing, Sender, make_sender
from loadtest.workloads.payloads import Payload
from serving.client import ClientError
from serving.client.features import RankFeatures, lookup_request, read_lookup, read_rank
from serving.fleet.process import StopRequestedError, die_with_parent, run_until_signalled

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
MAX_DETAILS = 20
MAX_DETAIL_CHARS = 300
NO_VECTORS = np.empty(0, np.float32)


def api_of(number: int) -> int:
    """Return the place in `APIS` of what request `number` of a load goes over."""
    return API_PATTERN[number % len(API_PATTERN)]


RECORD = np.dtype(
    [
        ("intended", "<f8"),  # when the request was due: latency counts from here
        ("turn", "<f8"),  # when the load came to it
        ("ended", "<f8"),
        ("version", "<i8"),  # that the answer names; 0 for none
        ("api", "u1"),  # place in `APIS`
        ("kind", "u1"),  # `Kind`
    ]
)
"""Of an answer; times are seconds of CLOCK_MONOTONIC, which all processes of a machine share."""

Answers = npt.NDArray[np.void]
Mask = npt.NDArray[np.bool_]


class TimeSpan(NamedTuple):
    """A span of time."""

    begin: float
    end: float


def count_kinds(kinds: npt.ArrayLike) -> dict[str, int]:
    """Return how many answers there were, and how many failed, were mixed and wrong."""
    counts = np.bincount(np.asarray(kinds, np.int64), minlength=len(Kind)).tolist()
    return {"answers": sum(counts), **{kind.name.lower(): counts[kind] for kind in Kind if kind is not Kind.OK}}


def overlaps(answers: Answers, spans: Sequence[TimeSpan]) -> Mask:
    """Return which requests were in flight at any time within one of the spans."""
    result = np.zeros(len(answers), np.bool_)
    for begin, end in spans:
        result |= (answers["intended"] <= end) & (begin <= answers["ended"])
    return result


def percentile(values: Sequence[float] | npt.NDArray[np.floating], percent: float) -> float | None:
    """Return a percentile; None of nothing."""
    return float(np.percentile(values, percent)) if np.size(values) else None


def latency_ms(answers: Answers, percent: float) -> float | None:
    """Return a percentile of the times from when requests were due; None of no answers."""
    return percentile(1e3 * (answers["ended"] - answers["intended"]), percent)


class OracleRequests:
    """The oracle's questions, encoded, and the judge of their answers. A request has the same body over HTTP and gRPC.

    Args:
        shape: of the model.
        single: features whose bags have one id.
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

    async def sender(self, address: str, connections: int = 1) -> Sender:
        """Make the sender of a server's URL."""
        target = LoadTarget.parse(address)
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
                    request.verdict = judge(question, ranked.version, ranked.scores)
                else:
                    found = read_lookup(body)
                    # Vectors that are not there are values too few, which is judged.
                    vectors: dict[str, Any] = {**dict.fromkeys(question.bags, NO_VECTORS), **found.embeddings}
                    request.verdict = judge(
                        question, found.version, np.concatenate([vectors[name].reshape(-1) for name in question.bags])
                    )
            except ClientError as error:
                return Failure(error.kind, str(error))
            return None

        return await make_sender(target, payloads, check, connections=connections, channels=connections)


def verdict_of(request: Outgoing, failure: Failure | None) -> Verdict:
    """Return the verdict on a request that is over."""
    if failure is not None:
        return Verdict(Kind.FAILED, f"{failure.kind}: {failure.message}")
    verdict: Verdict = request.verdict
    return verdict


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


if __name__ == "__main__":
    die_with_parent(os.environ)
    settings = LoadConfig.model_validate_json(sys.argv[1])
    with contextlib.suppress(StopRequestedError):
        run_until_signalled(lambda: run_load(settings), loop_factory=uvloop.new_event_loop)
