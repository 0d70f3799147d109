"""The one road of a call that ranks or looks up, whatever it came by: admit, lease, parse, rank, encode."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeAlias, cast

from serving.formats.requests import Answer, Buffer, Codec, Encoded, LookupRequest, Request, Unparsed
from serving.observe.calls import Call
from serving.rank.batcher import Pending
from serving.rank.service import RankingService
from serving.versions.served_model import ServedModel
from shard_node.generation import Lease

Receive: TypeAlias = Callable[[], Awaitable[Buffer]]


class Caller(Protocol):
    """Whoever waits for an answer."""

    @property
    def owner(self) -> str:
        """Its address; "" for one that stands for many, or has none."""
        ...

    def time_remaining(self) -> float | None:
        """Seconds until the client's own deadline; None if it set none."""
        ...

    def watch(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when the client leaves: at once, if it has left already."""
        ...

    def when_taken(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once the answer that comes next is sent, or given up."""
        ...


async def answer(service: RankingService, codec: Codec, receive: Receive, client: Caller) -> Encoded:
    """Answer one call, whose request `receive` gives complete and not compressed.

    Raises:
        ShardrankError: with its HTTP and gRPC status.
    """
    call = service.begin_call(codec.api, codec.method)
    try:
        body = await receive()
        unparsed, request, lease = _parsed(service, codec, call, body)
        # A long request's bytes are not needed while it waits.
        del body
        deadline = call.began + request.timeout_s
        if (remaining_s := client.time_remaining()) is not None:
            deadline = min(deadline, call.parsed + remaining_s)
        loop = asyncio.get_running_loop()
        pending = Pending(request, lease, deadline, call, loop.create_future(), loop)
        if isinstance(request, LookupRequest):
            encoded = await _looked_up(service, unparsed, pending, client)
        else:
            answered = await service.wait(pending, client.watch)
            call.answered = service.clock()
            encoded = unparsed.encode(answered)
        call.encoded = service.clock()
    except BaseException as error:
        service.end_call(call, error)
        raise
    service.end_call(call)
    return encoded


async def _looked_up(service: RankingService, unparsed: Unparsed, pending: Pending, client: Caller) -> Encoded:
    """Answer a lookup, once there is room for its answer."""
    num_floats, untaken = cast(LookupRequest, pending.request).num_floats, service.untaken
    try:
        await untaken.take(client.owner, num_floats, pending.deadline - pending.call.parsed)
    except BaseException:
        pending.lease.release()
        raise
    give = partial(untaken.give, client.owner, num_floats)
    try:
        answered = await service.wait(pending, client.watch)
        pending.call.answered = service.clock()
        encoded = await untaken.write(unparsed.encode(answered))
        client.when_taken(give)
    except BaseException:
        give()
        raise
    return encoded


def answer_in_thread(service: RankingService, codec: Codec, body: Buffer) -> Answer:
    """Answer one call of this process while the calling thread waits. Nothing is encoded. Raises as `answer`."""
    with service.call(codec.api, codec.method) as call:
        _, request, lease = _parsed(service, codec, call, body)
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        return service.wait_in_thread(Pending(request, lease, call.began + request.timeout_s, call, future, None))


def _parsed(
    service: RankingService, codec: Codec, call: Call, body: Buffer
) -> tuple[Unparsed, Request, Lease[ServedModel]]:
    """Admit a call whose request is complete, choose its version, and parse it."""
    call.received = service.clock()
    service.admit(call)
    unparsed = codec.read(body, service.limits)
    lease = service.lease(unparsed.model, unparsed.version, lambda: unparsed.key)
    # It counts for that version from now on.
    generation = call.generation = lease.generation
    call.model, call.version, call.counter = generation.model, generation.version, generation.payload.counter
    call.leased = service.clock()
    try:
        request = unparsed.parse(generation.payload.schema)
    except BaseException:
        lease.release()
        raise
    call.parsed = service.clock()
    return unparsed, request, lease
