from __future__ import annotations

import asyncio
import gzip
import tracemalloc
import zlib

import grpc
import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.errors import ShardrankError
from serving.api.grpc.calls import (
    MAX_DETAILS_BYTES,
    CallHead,
    MessageReader,
    plain_message,
    read_head,
    status_block,
)
from serving.api.grpc.wire import HeaderDecoder, HeaderList, header_block

MAX_HEADER_BYTES = 1000
CALL = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.B/C"),
    (b"content-type", b"application/grpc+proto"),
]


def prefixed(message: bytes, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(message).to_bytes(4, "big") + message


def received(headers) -> HeaderList:
    return HeaderDecoder(2**20).decode(header_block(headers, status=None))


def no_charge(seconds: float) -> None:
    pass


def read_all(reader: MessageReader, pieces: list[bytes], coding: str = "identity") -> list[bytes]:
    messages = []
    for piece in pieces:
        # In the midst of other bytes, as a frame's payload is.
        data = memoryview(b"###" + piece + b"####")[3 : 3 + len(piece)]
        while data:
            message, data = reader.feed(data)
            if message is not None:
                messages.append(asyncio.run(plain_message(*message, coding, 1000, no_charge)))
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


def test_how_much_is_missing_is_known_from_the_length_on():
    reader = MessageReader(1000)
    stream = prefixed(bytes(100))
    assert [read_all(reader, [stream[at : at + 1]]) or reader.missing for at in (0, 1, 2, 3, 4, 5)] == [
        0,
        0,
        0,
        0,
        100,
        99,
    ]


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


@pytest.mark.parametrize("sent", [b"application/grpc", b"application/grpc+proto", b"application/grpc;charset=utf-8"])
def test_the_content_type_may_say_the_messages_format(sent):
    assert read_head(received([*CALL[:3], (b"content-type", sent)]), MAX_HEADER_BYTES).refusal is None


def test_a_message_in_tiny_pieces_takes_no_more_than_its_length():
    reader, length = MessageReader(2**20), 2**17
    stream = prefixed(bytes(length))
    tracemalloc.start()
    try:
        for at in range(len(stream) - 1):
            # Of one packet, but in a frame each.
            reader.feed(memoryview(stream)[at : at + 1])
        assert tracemalloc.get_traced_memory()[1] < 3 * length
    finally:
        tracemalloc.stop()
    message, _ = reader.feed(memoryview(stream)[-1:])
    assert message == (0, bytes(length))


@pytest.mark.parametrize("letter", ["x", "%", "é", "北", "\n"])
def test_a_status_fits_into_one_frame_whatever_its_details(letter):
    block = status_block(grpc.StatusCode.NOT_FOUND, letter * 10_000, "x", http_status=200)
    assert MAX_DETAILS_BYTES - 40 < len(block) < MAX_DETAILS_BYTES + 200


def test_a_status_begins_and_ends_with_no_space():
    block = status_block(grpc.StatusCode.NOT_FOUND, "  a b ", "", http_status=415)
    headers = dict(hpack.Decoder().decode(block))
    assert (headers[":status"], headers["grpc-message"]) == ("415", "%20 a b%20")


def test_a_status_holds_what_utf_8_can_not():
    block = status_block(grpc.StatusCode.INVALID_ARGUMENT, "\ud800 is none", "", http_status=None)
    assert dict(hpack.Decoder().decode(block)) == {"grpc-status": "3", "grpc-message": "? is none"}


def test_credentials_that_come_twice_are_none_that_is_known():
    once = (b"authorization", b"Bearer a")
    assert read_head(received([*CALL, once]), MAX_HEADER_BYTES).authorization == "Bearer a"
    assert read_head(received([*CALL, once, once]), MAX_HEADER_BYTES).authorization == "Bearer a, Bearer a"
    assert read_head(received(CALL), MAX_HEADER_BYTES).authorization is None


def test_a_malformed_request_is_refused_with_what_is_wrong():
    error, http_status = read_head(received([*CALL, (b"x-a", b"b\nc")]), MAX_HEADER_BYTES).refusal
    assert (error.grpc_status, http_status, "x-a" in str(error)) == ("INVALID_ARGUMENT", 400, True)


def test_a_long_message_is_expanded_in_pieces_with_turns_between_them():
    turns = 0

    async def main() -> None:
        nonlocal turns
        expanding = asyncio.create_task(plain_message(1, gzip.compress(bytes(2**23)), "gzip", 2**24, no_charge))
        while not expanding.done():
            turns += 1
            await asyncio.sleep(0)
        assert len(expanding.result()) == 2**23

    asyncio.run(main())
    assert turns > 20
