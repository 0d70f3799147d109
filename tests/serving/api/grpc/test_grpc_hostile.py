"""Clients that ask for much and complete nothing, against real sockets: what ends them, and that others go on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import tracemalloc
import zlib

import pytest
from grpc_reflection.v1alpha import reflection_pb2

from serving.api.grpc import wire as frames
from serving.api.grpc.calls import MAX_WAITING_MESSAGES, MESSAGES_OF_A_TURN
from serving.api.grpc.services import GrpcServer
from serving.errors import ServingError
from serving.limits import RequestLimits
from shardrank_testing.http2_peer import LIMITS, Echo, Http2Peer, echo_listener
from shardrank_testing.serving_api import MODEL, api_request, api_service, rank_message, run

END, END_HEADERS = frames.END_STREAM, frames.END_HEADERS
RANK = "/shardrank.v1.RankingService/Rank"
GET_MODEL = "/shardrank.v1.RankingService/GetModel"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
PING = frames.frame(frames.PING, 0, 0, bytes(8))


@pytest.fixture(scope="module")
def service(api_model):
    with api_service(api_model) as service:
        yield service


def prefixed(message: bytes, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(message).to_bytes(4, "big") + message


def call(peer: Http2Peer, stream_id: int, path: str, **headers: str) -> bytes:
    sent = [(":method", "POST"), (":scheme", "http"), (":path", path), ("content-type", "application/grpc")]
    sent += [(name.replace("_", "-"), value) for name, value in headers.items()]
    return frames.frame(frames.HEADERS, END_HEADERS, stream_id, peer.encoder.encode(sent))


def data(stream_id: int, payload: bytes, flags: int = 0) -> bytes:
    return frames.frame(frames.DATA, flags, stream_id, payload)


def code_of(going) -> int:
    return int.from_bytes(going.payload[4:8], "big")


@contextlib.asynccontextmanager
async def listening(limits=LIMITS, requests=None, clock=None, max_connections=8):
    echo = Echo()
    listener = echo_listener(echo, limits, requests, clock or asyncio.get_running_loop().time, max_connections)
    listener.start("127.0.0.1", 0, "echoes")
    peers = []

    async def connect(source: str = "127.0.0.1") -> Http2Peer:
        streams = await asyncio.open_connection("127.0.0.1", listener.port, local_addr=(source, 0))
        peers.append(Http2Peer(*streams))
        return peers[-1]

    yield connect, echo, listener
    for peer in peers:
        peer.close()
    await listener.stop(0.1)


@contextlib.asynccontextmanager
async def served(service, tokens=None):
    server = GrpcServer(service, tokens)
    port = await server.start("127.0.0.1", 0)
    peer = Http2Peer(*await asyncio.open_connection("127.0.0.1", port))
    peer.begin()
    yield peer
    peer.close()
    await server.stop(0.1)


def test_one_that_floods_is_ended_and_its_address_waits_while_others_come_in():
    async def main() -> None:
        async with listening() as (connect, _, _):
            flooding = await connect("127.0.0.2")
            flooding.begin()
            flooding.send(PING * 2 * LIMITS.max_control_frames)
            assert code_of((await flooding.rest())[-1]) == frames.ErrorCode.ENHANCE_YOUR_CALM
            with contextlib.suppress(ConnectionError):
                # It is reset, at the latest when it is read from.
                assert await (await connect("127.0.0.2")).rest() == []
            other = await connect("127.0.0.3")
            other.begin()
            other.send(other.headers(1), data(1, b"served", END))
            assert (await other.answer(1))[0] == b"served"

    run(main())


def test_a_proxy_that_is_trusted_never_waits():
    async def main() -> None:
        async with listening(requests=RequestLimits(trusted_proxies=("127.0.0.2/32",))) as (connect, _, _):
            for _ in range(3):
                flooding = await connect("127.0.0.2")
                flooding.begin()
                flooding.send(PING * 2 * LIMITS.max_control_frames)
                assert code_of((await flooding.rest())[-1]) == frames.ErrorCode.ENHANCE_YOUR_CALM

    run(main())


def ticking(step_s: float):
    """A clock that goes on a step each time it is looked at."""
    counter = itertools.count()
    return lambda: step_s * next(counter)


def test_work_without_a_completed_call_ends_a_connection_and_reconnecting_brings_no_new_budget():
    # No single connection sends enough to be ended by a count of frames.
    limits = dataclasses.replace(LIMITS, patience_s=10_000, idle_s=10_000, age_s=10_000, max_control_frames=10**6)

    async def main() -> None:
        async with listening(limits, clock=ticking(0.0002)) as (connect, _, _):
            ends = []
            for _ in range(100):
                ends.append(0)
                with contextlib.suppress(ConnectionError):
                    peer = await connect("127.0.0.2")
                    peer.begin()
                    peer.send(PING * 100)
                    while ends[-1] < 100 and (frame := await peer.read()) is not None and frame.kind != frames.GOAWAY:
                        ends[-1] += frame.kind == frames.PING
                    peer.close()
                if not ends[-1]:
                    break
            # Charged for each of them: some were answered, then the address had to wait.
            assert ends[0] == 100
            assert ends[-1] == 0
            assert len(ends) < 60

    run(main())


def test_one_that_completes_calls_may_go_on():
    limits = dataclasses.replace(LIMITS, patience_s=10_000, idle_s=10_000, age_s=10_000, max_control_frames=10**6)

    async def main() -> None:
        async with listening(limits, clock=ticking(0.00001)) as (connect, _, _):
            peer = await connect()
            peer.begin()
            for stream_id in range(1, 4001, 2):
                peer.send(peer.headers(stream_id), data(stream_id, b"x", END), frames.window_update(0, 1))
                assert (await peer.answer(stream_id))[0] == b"x"

    run(main())


def test_a_connection_has_its_turn_and_then_others_come_first():
    limits = dataclasses.replace(LIMITS, patience_s=10_000, idle_s=10_000, age_s=10_000, max_control_frames=10**6)

    async def main() -> None:
        unlimited = RequestLimits(max_idle_work_ms=0)
        async with listening(limits, unlimited, ticking(0.001)) as (connect, _, listener):
            busy, other = await connect(), await connect()
            for peer in (busy, other):
                peer.begin()
                peer.send(PING)
                await peer.find(frames.PING)
            here = busy._writer.get_extra_info("sockname")
            (protocol,) = [one for one in listener.open if one._transport.get_extra_info("peername") == here]
            # All of it is there at once; a turn is good for some five of them.
            busy.send(PING * 2000)
            while not protocol.connection.can_read:  # noqa: ASYNC110  # nobody is told
                await asyncio.sleep(0)
            other.send(other.headers(1), data(1, b"first", END))
            assert (await other.answer(1))[0] == b"first"
            assert len(protocol.connection._buffer) > 100 * len(PING)
            assert not protocol._transport.is_reading()
            for _ in range(2000):
                await busy.find(frames.PING)
            assert protocol._transport.is_reading()

    run(main())


def test_messages_that_wait_are_counted(service):
    async def main() -> None:
        async with served(service) as peer:
            peer.send(call(peer, 1, REFLECTION), data(1, prefixed(b"") * (4 * MAX_WAITING_MESSAGES)))
            _, trailers = await peer.answer(1)
            assert dict(trailers)["grpc-status"] == "8"
            assert f"more than {MAX_WAITING_MESSAGES} messages" in dict(trailers)["grpc-message"]

    run(main())


def test_a_stream_of_small_requests_lets_others_have_their_turn(service):
    async def main() -> None:
        async with served(service) as peer:
            turns = 0

            async def count() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="none").SerializeToString()
            counting = asyncio.create_task(count())
            peer.send(call(peer, 1, REFLECTION), data(1, prefixed(request) * MAX_WAITING_MESSAGES, END))
            answers, _ = await peer.answer(1)
            counting.cancel()
            assert answers.count(b"none") == MAX_WAITING_MESSAGES
            assert turns >= MAX_WAITING_MESSAGES // MESSAGES_OF_A_TURN

    run(main())


@pytest.mark.parametrize(
    ("message", "flag"),
    [
        (b"\xff" * 3_000_000, 0),
        (zlib.compress(b"\xff" * 3_000_000), 1),
        (zlib.compress(bytes(20_000_000)), 1),
    ],
    ids=["no message", "no message, compressed", "too much once it is expanded"],
)
def test_nothing_of_a_refused_message_is_kept(service, message, flag):
    async def main() -> None:
        async with served(service) as peer:

            async def refused(stream_id: int) -> None:
                pieces = [prefixed(message, flag)[at : at + 500_000] for at in range(0, len(message) + 5, 500_000)]
                peer.send(call(peer, stream_id, RANK, grpc_encoding="deflate"))
                peer.send(*(data(stream_id, piece) for piece in pieces), data(stream_id, b"", END))
                assert dict((await peer.answer(stream_id))[1])["grpc-status"] == "3"

            await refused(1)
            gc.collect()
            gc.disable()
            tracemalloc.start()
            try:
                for stream_id in range(3, 13, 2):
                    await refused(stream_id)
                held, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
                gc.enable()
            assert held < 1_500_000

    run(main())


def test_a_document_has_a_small_message(service):
    async def main() -> None:
        async with served(service) as peer:
            peer.send(call(peer, 1, GET_MODEL), data(1, prefixed(bytes(70_000))[:900], 0))
            _, trailers = await peer.answer(1)
            assert dict(trailers)["shardrank-error-kind"] == "body_too_large"

    run(main())


class RefusedError(ServingError):
    http_status, grpc_status, kind = 401, "UNAUTHENTICATED", "unauthenticated"


class OneToken:
    """Knows one token, which may rank."""

    def check(self, authorization, scope) -> None:
        if authorization != "Bearer good" or scope != "rank":
            raise RefusedError(f"not for {scope}")


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (RANK, {"authorization": "Bearer good"}, "0"),
        (RANK, {"authorization": "Bearer bad"}, "16"),
        (RANK, {}, "16"),
        (GET_MODEL, {"authorization": "Bearer good"}, "16"),
        (REFLECTION, {"authorization": "Bearer good"}, "16"),
        ("/inference.GRPCInferenceService/RepositoryModelLoad", {"authorization": "Bearer good"}, "16"),
        ("/inference.GRPCInferenceService/ServerLive", {}, "0"),
        ("/grpc.health.v1.Health/Check", {}, "0"),
    ],
)
def test_a_token_is_asked_for_what_a_method_does(service, path, headers, status):
    async def main() -> None:
        async with served(service, OneToken()) as peer:
            message = rank_message(api_request(0), MODEL).SerializeToString() if path == RANK else b""
            peer.send(call(peer, 1, path, **headers), data(1, prefixed(message), END))
            trailers = dict((await peer.answer(1))[1])
            assert trailers["grpc-status"] == status

    run(main())


@pytest.mark.parametrize("package", ["grpc.reflection.v1", "grpc.reflection.v1alpha"])
@pytest.mark.parametrize("own", [True, False])
def test_both_versions_of_reflection_tell_of_themselves_and_of_the_inference_service(service, package, own):
    async def main() -> None:
        async with served(service) as peer:
            symbol = f"{package}.ServerReflection" if own else "inference.GRPCInferenceService"
            request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol).SerializeToString()
            path = f"/{package}.ServerReflection/ServerReflectionInfo"
            peer.send(call(peer, 1, path), data(1, prefixed(request), END))
            answer, trailers = await peer.answer(1)
            assert dict(trailers)["grpc-status"] == "0"
            told = reflection_pb2.ServerReflectionResponse.FromString(answer[5:])
            assert symbol.rpartition(".")[0].encode() in told.file_descriptor_response.file_descriptor_proto[0]

    run(main())


def test_nothing_of_a_message_that_is_cut_off_is_kept(service):
    async def main() -> None:
        async with served(service) as peer:
            tracemalloc.start()
            try:
                for stream_id in range(1, 11, 2):
                    peer.send(call(peer, stream_id, RANK), data(stream_id, prefixed(bytes(4_000_000))[:900_000]))
                    peer.send(frames.rst_stream(stream_id, frames.ErrorCode.CANCEL), PING)
                    await peer.find(frames.PING)
                held, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert held < 1_500_000

    run(main())
