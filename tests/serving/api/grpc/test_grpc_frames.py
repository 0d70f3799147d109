"""Calls as no client library makes them, frame by frame, to a real server."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator

import pytest
from grpc_reflection.v1alpha import reflection_pb2

from serving.api.grpc import listener
from serving.api.grpc import wire as frames
from serving.api.grpc.calls import MAX_WAITING_MESSAGES
from serving.api.grpc.services import GrpcServer
from serving.api.grpc.wire import ErrorCode
from serving.limits import RequestLimits
from shardrank_testing.http2_peer import END, Http2Peer, data, prefixed
from shardrank_testing.serving_api import Api, api_request, counted_turns, rank_message, served_api

RANK = "/shardrank.v1.RankingService/Rank"
GET_MODEL = "/shardrank.v1.RankingService/GetModel"
REFLECTION = "/grpc.reflection.{}.ServerReflection/ServerReflectionInfo"
WATCH = "/grpc.health.v1.Health/Watch"
MESSAGE = prefixed(rank_message(api_request(0)).SerializeToString())


@pytest.fixture
async def peer(api: Api) -> AsyncIterator[Http2Peer]:
    async with connected(api.listening.grpc_port) as peer:
        yield peer


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Http2Peer]:
    peer = Http2Peer(*await asyncio.open_connection("127.0.0.1", port))
    peer.begin()
    yield peer
    peer.close()


def question(**fields: str) -> bytes:
    return reflection_pb2.ServerReflectionRequest(**fields).SerializeToString()


async def test_headers_that_are_too_long_end_only_their_call(api, peer):
    peer.send(peer.call(1, RANK), data(1, MESSAGE[:9]))
    limit = api.service.limits.max_header_bytes
    peer.send(peer.call(3, RANK, x_long="v" * limit), data(3, MESSAGE, END))
    refused = await peer.status(3)
    assert (refused["grpc-status"], refused["shardrank-error-kind"]) == ("8", "header_too_large")
    assert f"max_header_bytes = {limit}" in refused["grpc-message"]
    peer.send(data(1, MESSAGE[9:], END))
    assert (await peer.status(1))["grpc-status"] == "0"


@pytest.mark.parametrize("flag", [0, 1])
async def test_what_a_message_took_of_the_window_is_given_back(peer, flag):
    """All of it, and no more, though the stream goes on."""
    message = question(file_by_filename="x" * 20_000)
    sent = prefixed(zlib.compress(message) if flag else message, flag) + prefixed(b"")
    peer.send(peer.call(1, REFLECTION.format("v1alpha"), grpc_encoding="deflate"))
    for _ in range(20):
        peer.send(data(1, sent))
        granted = 0
        while granted < len(sent):
            frame = await peer.find(frames.WINDOW_UPDATE, 1)
            granted += int.from_bytes(frame.payload, "big")
        assert granted == len(sent)
        # What the answers took.
        peer.send(frames.window_update(0, 2**16), frames.window_update(1, 2**16))


async def test_no_call_without_an_end_begins_while_the_server_stops(api):
    server = GrpcServer(api.service)
    async with connected(server.listen("127.0.0.1", 0, "gRPC")) as peer:
        # A call that is under way holds the connection, and its peer does not say that it knows.
        peer.send(peer.call(1, WATCH), data(1, prefixed(b""), END), peer.call(3, RANK))
        await peer.find(frames.DATA, 1)
        stopping = asyncio.create_task(server.stop(20))
        assert (await peer.status(1))["grpc-message"] == "the server stops"
        peer.send(peer.call(5, WATCH), data(5, prefixed(b""), END))
        assert (await peer.status(5))["grpc-message"] == "the server stops"
        peer.send(data(3, MESSAGE, END))
        assert (await peer.status(3))["grpc-status"] == "0"
    await stopping


async def test_messages_that_wait_are_counted(peer):
    peer.send(peer.call(1, REFLECTION.format("v1")), data(1, prefixed(b"") * (4 * MAX_WAITING_MESSAGES)))
    trailers = await peer.status(1)
    assert trailers["grpc-status"] == "8"
    assert f"more than {MAX_WAITING_MESSAGES} messages" in trailers["grpc-message"]


async def test_streams_of_small_requests_let_others_have_their_turn(peer, monkeypatch):
    """However many streams a connection has: together they work for so long in an iteration of the loop."""
    request, streams, count = prefixed(question(file_containing_symbol="none")), (1, 3, 5, 7), 40
    monkeypatch.setattr(listener, "MAX_READ_S", 20e-6)
    async with counted_turns() as turns:
        for stream in streams:
            peer.send(peer.call(stream, REFLECTION.format("v1")), data(stream, request * count, END))
        answers = [(await peer.answer(stream))[0] for stream in streams]
    assert [answer.count(b"none") for answer in answers] == [count] * len(streams)
    assert turns[0] >= len(streams) * count // 8


@pytest.mark.parametrize(
    ("path", "message", "num_streams"),
    [
        (REFLECTION.format("v1"), prefixed(question(file_containing_symbol="none")) * MAX_WAITING_MESSAGES, 40),
        # So many unknown fields, and a last byte that is wrong.
        (RANK, prefixed(b"\xf8\x07\x01" * 10_000 + b"\xff"), 2),
    ],
    ids=["streamed", "refused"],
)
async def test_work_on_messages_without_a_completed_call_ends_its_connection(api_model, path, message, num_streams):
    limits = RequestLimits(max_idle_work_ms=5)
    async with served_api(api_model, limits) as api, connected(api.listening.grpc_port) as peer:
        for stream in range(1, 2 * num_streams, 2):
            peer.send(peer.call(stream, path), data(stream, message, END))
        assert (await peer.rest())[-1].code == ErrorCode.ENHANCE_YOUR_CALM


async def test_a_document_has_a_small_message(peer):
    peer.send(peer.call(1, GET_MODEL), data(1, prefixed(bytes(70_000))[:900]))
    assert (await peer.status(1))["shardrank-error-kind"] == "body_too_large"


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
@pytest.mark.parametrize("symbol", ["grpc.reflection.{}.ServerReflection", "inference.GRPCInferenceService"])
async def test_both_versions_of_reflection_describe_services(peer, version, symbol):
    symbol = symbol.format(version)
    peer.send(peer.call(1, REFLECTION.format(version)))
    peer.send(data(1, prefixed(question(file_containing_symbol=symbol)), END))
    answer, trailers = await peer.answer(1)
    assert dict(trailers)["grpc-status"] == "0"
    described = reflection_pb2.ServerReflectionResponse.FromString(answer[5:]).file_descriptor_response
    assert symbol.rpartition(".")[0].encode() in described.file_descriptor_proto[0]
