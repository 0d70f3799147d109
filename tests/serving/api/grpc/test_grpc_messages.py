from __future__ import annotations

import asyncio
import gzip
import zlib
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.errors import ShardrankError
from serving.api.grpc.calls import CallHead, GrpcCall, GrpcMethod, GrpcMethods, read_head
from serving.api.grpc.wire import HeaderDecoder, HeaderList, header_block
from shard_node.byte_budget import ByteAccount, ByteBudget
from shardrank_testing.http2_peer import prefixed

MAX_HEADER_BYTES = 1000
CALL = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.B/C"),
    (b"content-type", b"application/grpc+proto"),
]


def received(headers) -> HeaderList:
    return HeaderDecoder(2**20).decode(header_block(headers, status=None))


async def respond(call: GrpcCall) -> None:
    """Answers nothing."""


def read_all(pieces: list[bytes], coding: str = "identity") -> list[bytes]:
    """The messages of a call, whose data come in pieces."""

    async def read() -> list[bytes]:
        connection = Mock(account=ByteAccount(ByteBudget(1 << 30), lambda error: None), clock=lambda: 0.0)
        methods = GrpcMethods({b"/a.B/C": GrpcMethod(respond, 1000, is_streamed=True)}, 1.0, asyncio.Semaphore(2))
        call = GrpcCall(connection, 1, CallHead(b"/a.B/C", coding=coding), methods)
        for piece in pieces:
            # In the midst of other bytes, as a frame's payload is.
            call.on_data(memoryview(b"###" + piece + b"####")[3 : 3 + len(piece)])
        call.has_all = True
        call.on_end()
        return [bytes(message) async for message in call.messages()]

    return asyncio.run(read())


@given(st.lists(st.tuples(st.binary(max_size=300), st.booleans()), max_size=6), st.lists(st.integers(1, 200)))
def test_messages_are_the_same_however_they_are_cut(messages, sizes):
    stream = b"".join(prefixed(zlib.compress(one) if flag else one, flag) for one, flag in messages)
    pieces = []
    for size in sizes:
        pieces.append(stream[:size])
        stream = stream[size:]
    assert read_all([*filter(None, pieces), stream], "deflate") == [one for one, _ in messages]


@pytest.mark.parametrize(
    ("coding", "sent", "says", "kind"),
    [
        ("identity", prefixed(bytes(1001))[:5], "1001 bytes in the message.*max_body_bytes = 1000", "body_too_large"),
        ("gzip", prefixed(gzip.compress(bytes(1001), mtime=0), 1), "max_body_bytes = 1000", "body_too_large"),
        ("gzip", prefixed(b"no gzip", 1), "neither gzip nor deflate", "malformed"),
        ("identity", prefixed(b"x", 1), "no grpc-encoding", "malformed"),
        ("identity", prefixed(b"x", 2), "flag is 2; allowed are 0 and 1", "malformed"),
        ("snappy", prefixed(b"x", 1), "'snappy'; known are identity, gzip, deflate", "unknown_coding"),
    ],
)
def test_a_message_that_can_not_be_taken_is_refused(coding, sent, says, kind):
    with pytest.raises(ShardrankError, match=says) as refusal:
        read_all([sent], coding)
    assert refusal.value.kind == kind


@pytest.mark.parametrize(
    ("sent", "timeout_s"),
    [(b"2H", 7200), (b"3M", 180), (b"4S", 4), (b"5m", 0.005), (b"99999999u", 99.999999), (b"7n", 7e-9), (b"0S", 0)],
)
def test_a_timeout_is_digits_and_a_unit(sent, timeout_s):
    assert read_head(received([*CALL, (b"grpc-timeout", sent)]), MAX_HEADER_BYTES) == CallHead(
        b"/a.B/C", pytest.approx(timeout_s)
    )


@pytest.mark.parametrize("sent", [b"S", b"1", b"1s", b"-1S", b"1.5S", b"123456789S", b"1S "])
def test_a_timeout_that_is_none_is_refused(sent):
    error, _ = read_head(received([*CALL, (b"grpc-timeout", sent)]), MAX_HEADER_BYTES).refusal
    assert (error.grpc_status, "grpc-timeout" in str(error)) == ("INVALID_ARGUMENT", True)


@pytest.mark.parametrize("sent", [b"text/html", b"application/grpc-web", b"application/grpcx", b""])
def test_what_is_no_grpc_call_is_refused(sent):
    error, status = read_head(received([*CALL[:3], (b"content-type", sent)]), MAX_HEADER_BYTES).refusal
    assert ("application/grpc" in str(error), error.grpc_status, status) == (True, "INVALID_ARGUMENT", 415)
    error, status = read_head(received([(b":method", b"GET"), *CALL[1:]]), MAX_HEADER_BYTES).refusal
    assert ("POST" in str(error), error.grpc_status, status) == (True, "UNIMPLEMENTED", 405)
