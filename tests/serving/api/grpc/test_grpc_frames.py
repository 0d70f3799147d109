"""Calls as no client library makes them, frame by frame, to a real server."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator

import pytest
from grpc_reflection.v1alpha import reflection_pb2

from serving.api.grpc import wire as frames
from serving.api.grpc.services import GrpcServer
from shardrank_testing.http2_peer import Http2Peer
from shardrank_testing.serving_api import api_request, api_service, rank_message, run, running_api

END, END_HEADERS = frames.END_STREAM, frames.END_HEADERS
RANK = "/shardrank.v1.RankingService/Rank"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
WATCH = "/grpc.health.v1.Health/Watch"


@pytest.fixture(scope="module")
def service(api_model):
    with api_service(api_model) as service:
        yield service


@contextlib.asynccontextmanager
async def peer_of(host: str, port: int) -> AsyncIterator[Http2Peer]:
    peer = Http2Peer(*await asyncio.open_connection(host, port))
    peer.begin()
    yield peer
    peer.close()


def prefixed(message: bytes, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(message).to_bytes(4, "big") + message


def call(peer: Http2Peer, stream_id: int, path: str, flags: int = 0, **headers: str) -> bytes:
    sent = [(":method", "POST"), (":scheme", "http"), (":path", path), ("te", "trailers")]
    sent += [("content-type", "application/grpc"), *((name.replace("_", "-"), headers[name]) for name in headers)]
    return frames.frame(frames.HEADERS, flags | END_HEADERS, stream_id, peer.encoder.encode(sent))


def data(stream_id: int, payload: bytes, flags: int = 0) -> bytes:
    return frames.frame(frames.DATA, flags, stream_id, payload)


async def status(peer: Http2Peer, stream_id: int) -> dict[str, str]:
    return dict((await peer.answer(stream_id))[1])


def test_a_call_whose_headers_are_too_long_is_refused_without_harm_to_others_on_its_connection(service):
    async def main() -> None:
        async with running_api(service) as api, peer_of(api.listening.host, api.listening.grpc_port) as peer:
            message = prefixed(rank_message(api_request(0)).SerializeToString())
            peer.send(call(peer, 1, RANK), data(1, message[:9]))
            limit = service.limits.max_header_bytes
            peer.send(call(peer, 3, RANK, x_long="v" * limit), data(3, message, END))
            refused = await status(peer, 3)
            assert (refused["grpc-status"], refused["shardrank-error-kind"]) == ("8", "header_too_large")
            assert f"max_header_bytes = {limit}" in refused["grpc-message"]
            peer.send(data(1, message[9:], END))
            assert (await status(peer, 1))["grpc-status"] == "0"

    run(main())


@pytest.mark.parametrize("flag", [0, 1])
def test_all_that_a_streamed_message_took_of_the_window_is_given_back_and_no_more(service, flag):
    async def main() -> None:
        async with running_api(service) as api, peer_of(api.listening.host, api.listening.grpc_port) as peer:
            message = reflection_pb2.ServerReflectionRequest(file_by_filename="x" * 20_000).SerializeToString()
            sent = prefixed(zlib.compress(message) if flag else message, flag) + prefixed(b"")
            peer.send(call(peer, 1, REFLECTION, grpc_encoding="deflate"))
            for _ in range(20):
                peer.send(data(1, sent))
                granted = 0
                while granted < len(sent):
                    frame = await peer.find(frames.WINDOW_UPDATE, 1)
                    granted += int.from_bytes(frame.payload, "big")
                assert granted == len(sent)
                # What the answers took.
                peer.send(frames.window_update(0, 2**16), frames.window_update(1, 2**16))

    run(main())


def test_no_call_without_an_end_begins_while_the_server_stops(service):
    async def main() -> None:
        server = GrpcServer(service)
        port = await server.start("127.0.0.1", 0)
        async with peer_of("127.0.0.1", port) as peer:
            # A call that is under way holds the connection, and its peer does not say that it knows.
            peer.send(call(peer, 1, WATCH), data(1, prefixed(b""), END), call(peer, 3, RANK))
            await peer.find(frames.DATA, 1)
            stopping = asyncio.create_task(server.stop(20))
            assert (await status(peer, 1))["grpc-message"] == "the server stops"
            peer.send(call(peer, 5, WATCH), data(5, prefixed(b""), END))
            assert (await status(peer, 5))["grpc-message"] == "the server stops"
            peer.send(data(3, prefixed(rank_message(api_request(0)).SerializeToString()), END))
            assert (await status(peer, 3))["grpc-status"] == "0"
        await stopping

    run(main())
