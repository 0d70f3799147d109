from __future__ import annotations

import asyncio
import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.errors import ShardrankError
from serving.api.bodies import expand
from serving.api.grpc.calls import CallHead, MessageReader, check_coding, read_head
from serving.api.grpc.wire import HeaderDecoder, HeaderList, header_block
from shardrank_testing.http2_peer import prefixed
from shardrank_testing.http_wire import message_bytes

MAX_HEADER_BYTES = 1000
CALL = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.B/C"),
    (b"content-type", b"application/grpc+proto"),
]


def received(headers) -> HeaderList:
    return HeaderDecoder(2**20).decode(header_block(headers, status=None))


def read_all(reader: MessageReader, pieces: list[bytes], coding: str = "identity") -> list[bytes]:
    messages, held = [], message_bytes()
    for piece in pieces:
        # In the midst of other bytes, as a frame's payload is.
        data = memoryview(b"###" + piece + b"####")[3 : 3 + len(piece)]
        for flag, message in reader.feed(data):
            held.hold(len(message))
            if not flag:
                messages.append(message)
                continue
            check_coding(flag, coding)
            expanding = expand(message, 1000, held, lambda seconds: None, asyncio.Semaphore(2))
            messages.append(asyncio.run(expanding))
    return messages


@given(st.lists(st.tuples(st.binary(max_size=300), st.booleans()), max_size=6), st.lists(st.integers(1, 200)))
def test_messages_are_the_same_however_they_are_cut(messages, sizes):
    stream = b"".join(prefixed(zlib.compress(one) if flag else one, flag) for one, flag in messages)
    pieces = []
    for size in sizes:
        pieces.append(stream[:size])
        stream = stream[size:]
    reader = MessageReader(1000)
    assert read_all(reader, [*filter(None, pieces), stream], "deflate") == [one for one, _ in messages]
    assert reader.missing == 0


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
        read_all(MessageReader(1000), [sent], coding)
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
