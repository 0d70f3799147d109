"""Prepared questions sent over one API, and their answers read: the version and the values as one array."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio
import msgspec
import numpy as np

from loadtest.drill.http_client import HttpClient
from loadtest.drill.oracle import Float32Array
from loadtest.drill.questions import Method, Question
from loadtest.grpc_channels import as_it_is
from serving.proto.shardrank.v1 import ranking_pb2

OK_STATUS = 200
MAX_ERROR_CHARS = 300


class CallFailedError(Exception):
    """A question that got no answer: it stays within the load, which records it as `failed`."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What came back.

    Attributes:
        version: that it names.
        values: float32 [n], scores, or vectors in the order of the question's features, one after the other.
    """

    version: int
    values: Float32Array


class Client(Protocol):
    """Asks the questions of one list over one API."""

    async def ask(self, index: int, timeout_s: float) -> Answer:
        """Asks question `index`. Raises CallFailedError, and TimeoutError after `timeout_s`."""
        ...


class _RankDocument(msgspec.Struct):
    version: int
    scores: list[float]


class _LookupDocument(msgspec.Struct):
    version: int
    embeddings: dict[str, list[list[float]]]


class HttpQuestions:
    """`POST /v1/models/{model}:rank` or `:lookup`.

    Args:
        http: the connections.
        model: its name.
        method: rank or lookup.
        questions: all of that method.
    """

    def __init__(self, http: HttpClient, model: str, method: Method, questions: Sequence[Question]) -> None:
        self._http = http
        self._questions = questions
        self._payloads = [http.prepare(f"/v1/models/{model}:{method}", one.json_body) for one in questions]
        self._rank = msgspec.json.Decoder(_RankDocument)
        self._lookup = msgspec.json.Decoder(_LookupDocument)

    async def ask(self, index: int, timeout_s: float) -> Answer:
        """As `Client.ask`."""
        try:
            async with asyncio.timeout(timeout_s):
                status, body = await self._http.call(self._payloads[index])
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise CallFailedError(f"{type(error).__name__}: {error}") from error
        if status != OK_STATUS:
            raise CallFailedError(f"status {status}: {body[:MAX_ERROR_CHARS].decode('utf-8', 'replace')}")
        try:
            return self._read(self._questions[index], body)
        except (msgspec.MsgspecError, KeyError, ValueError) as error:
            raise CallFailedError(f"an answer that can't be read: {error!r}: {body[:MAX_ERROR_CHARS]!r}") from error

    def _read(self, question: Question, body: bytes) -> Answer:
        if question.method == "rank":
            ranked = self._rank.decode(body)
            return Answer(ranked.version, np.array(ranked.scores, np.float32))
        found = self._lookup.decode(body)
        parts = [np.array(found.embeddings[name], np.float32).reshape(-1) for name in question.features]
        return Answer(found.version, np.concatenate(parts))


class GrpcQuestions:
    """`shardrank.v1.RankingService/Rank` or `/Lookup`, on several channels in turn.

    Args:
        channels: each its own connection.
        method: rank or lookup.
        questions: all of that method.
    """

    def __init__(self, channels: Sequence[grpc.aio.Channel], method: Method, questions: Sequence[Question]) -> None:
        self._questions = questions
        name, parse = (
            ("Rank", ranking_pb2.RankResponse.FromString)
            if method == "rank"
            else ("Lookup", ranking_pb2.LookupResponse.FromString)
        )
        calls: list[Any] = [
            channel.unary_unary(
                f"/shardrank.v1.RankingService/{name}", request_serializer=as_it_is, response_deserializer=parse
            )
            for channel in channels
        ]
        self._calls = itertools.cycle(calls)

    async def ask(self, index: int, timeout_s: float) -> Answer:
        """As `Client.ask`."""
        question = self._questions[index]
        try:
            response = await next(self._calls)(question.message, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError from error
            raise CallFailedError(f"{error.code().name}: {(error.details() or '')[:MAX_ERROR_CHARS]}") from error
        if question.method == "rank":
            return Answer(response.version, np.array(response.scores, np.float32))
        # A feature that is not there is an empty message in a protobuf map, so its values are missing below.
        parts = [np.array(response.embeddings[name].values, np.float32) for name in question.features]
        return Answer(response.version, np.concatenate(parts))
