"""Sends serialised gRPC messages over several channels in turn."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio

from loadtest.grpc_channels import as_it_is, open_channels
from loadtest.load.answer_check import AnswerCheck
from loadtest.load.outgoing import OnOver, Outgoing, PayloadPool
from loadtest.load.recorder import Recorder
from loadtest.workloads.payloads import Headers


class GrpcSender:
    """Every request goes out at once: a channel carries many at a time, so none waits for another.

    Args:
        host: of the server.
        port: of the server.
        pool: of the requests.
        recorder: gives out codes of failures.
        on_over: told each request that is over.
        headers: metadata of each call, one after the other.
        channels: connections.
        timeout_s: deadline of a call, from the request's intended time.
        clock: CLOCK_MONOTONIC in seconds.
    """

    def __init__(
        self,
        host: str,
        port: int,
        pool: PayloadPool,
        recorder: Recorder,
        on_over: OnOver,
        *,
        headers: Iterator[Headers],
        channels: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channels = open_channels(host, port, channels)
        calls: list[Any] = [
            channel.unary_unary(pool.path, request_serializer=as_it_is, response_deserializer=as_it_is)
            for channel in self._channels
        ]
        self._calls = itertools.cycle(calls)
        self._bodies = [payload.body for payload in pool]
        self._check = AnswerCheck(pool, recorder)
        self._recorder = recorder
        self._on_over = on_over
        self._headers = headers
        self._timeout_s = timeout_s
        self._clock = clock
        self._out: dict[Outgoing, asyncio.Task[None]] = {}

    @property
    def opened(self) -> int:
        """Channels; each is one connection, opened again when it breaks."""
        return len(self._channels)

    async def open(self) -> None:
        """Connects all channels. One that can't is connected by its first call, whose failure it then is."""
        opening = [asyncio.ensure_future(channel.channel_ready()) for channel in self._channels]
        _, late = await asyncio.wait(opening, timeout=self._timeout_s)
        for one in late:
            one.cancel()
        await asyncio.gather(*opening, return_exceptions=True)

    def send(self, request: Outgoing) -> None:
        """As `Sender.send`."""
        request.sent = self._clock()
        self._out[request] = asyncio.create_task(self._ask(request))

    def give_up(self, request: Outgoing) -> None:
        """As `Sender.give_up`."""
        if (task := self._out.get(request)) is not None:
            task.cancel()

    async def close(self) -> None:
        """As `Sender.close`."""
        for task in (tasks := list(self._out.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close(None)

    async def _ask(self, request: Outgoing) -> None:
        try:
            left_s = request.intended + self._timeout_s - request.sent
            body = await next(self._calls)(
                self._bodies[request.number], timeout=max(left_s, 0.001), metadata=next(self._headers)
            )
            ended = self._clock()
            code = self._check(request.number, body)
        except grpc.aio.AioRpcError as error:
            ended = self._clock()
            name = error.code().name.lower()
            kind = "timeout" if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else f"grpc_{name}"
            code = self._recorder.failure(kind, error.details() or "")
        finally:
            del self._out[request]
        self._on_over(request, ended, code)
