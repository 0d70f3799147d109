from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_node.errors import FrameTooLargeError, WireError
from shard_node.wire.frame import CHUNK_BYTES, HEADER, FrameReceiver, FrameType, pack_header

LIMIT = 1 << 20


def header(magic=b"SHRK", version=1, frame_type=1, request_id=5, body_bytes=0, budget_us=0) -> bytes:
    return struct.pack("<4sHHQII", magic, version, frame_type, request_id, body_bytes, budget_us)


def receive(receiver: FrameReceiver, data: bytes, pieces) -> list:
    """Feeds the bytes in pieces of the given sizes, then the rest, taking frames after each piece."""
    frames = []
    view = memoryview(data)
    sizes = iter(pieces)
    while view:
        space = receiver.get_buffer()
        size = min(next(sizes, len(view)), len(space), len(view))
        assert size > 0
        space[:size] = view[:size]
        receiver.received(size)
        view = view[size:]
        while (frame := receiver.next_frame()) is not None:
            frames.append(frame)
    return frames


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2**64 - 1), st.integers(0, 300_000)), max_size=6),
    st.lists(st.integers(1, 100_000), max_size=30),
    st.integers(0, 1000),
)
def test_frames_come_out_however_the_stream_is_cut(frames, pieces, seed):
    rng = np.random.default_rng(seed)
    bodies = [rng.bytes(size) for _, _, size in frames]
    stream = b"".join(
        pack_header(FrameType(kind), request_id, len(body)) + body
        for (kind, request_id, _), body in zip(frames, bodies, strict=True)
    )
    receiver = FrameReceiver(LIMIT)
    received = receive(receiver, stream, pieces)
    assert [(frame.header.frame_type, frame.header.request_id) for frame in received] == [
        (kind, request_id) for kind, request_id, _ in frames
    ]
    assert [frame.body.tobytes() for frame in received] == bodies
    assert all(frame.body.ctypes.data % 8 == 0 for frame in received if frame.body.size)
    assert not receiver.is_mid_frame


@given(st.integers(0, CHUNK_BYTES * 2), st.integers(0, 23))
def test_an_incomplete_frame_is_not_returned(body_bytes, missing_from_header):
    whole = header(body_bytes=body_bytes) + bytes(body_bytes)
    receiver = FrameReceiver(LIMIT)
    assert receive(receiver, whole[:-1], []) == []
    assert receiver.is_mid_frame
    early = FrameReceiver(LIMIT)
    assert receive(early, whole[: 23 - missing_from_header], []) == []
    assert early.is_mid_frame == (missing_from_header < 23)


@pytest.mark.parametrize(
    ("bad", "error", "message", "request_id"),
    [
        (header(magic=b"HTTP"), WireError, r"magic is b'HTTP', a frame begins with b'SHRK'", 0),
        (header(version=2), WireError, "protocol version 2 is not spoken here, only 1", 5),
        (header(body_bytes=LIMIT - 23), FrameTooLargeError, f"frame has {LIMIT + 1} bytes, at most {LIMIT}", 5),
        (header(body_bytes=2**32 - 1), FrameTooLargeError, "frame has 4294967319 bytes", 5),
        (header(version=9, frame_type=5, body_bytes=LIMIT), FrameTooLargeError, "at most", 5),
    ],
)
def test_a_bad_header_is_refused_before_its_body_is_read(bad, error, message, request_id):
    receiver = FrameReceiver(LIMIT)
    with pytest.raises(error, match=message):
        receive(receiver, bad, [])
    assert receiver.request_id == request_id


def test_limits_of_frames():
    # An error frame of another protocol version is let through.
    (frame,) = receive(FrameReceiver(LIMIT), header(version=9, frame_type=5, body_bytes=8) + bytes(8), [])
    assert frame.header.protocol_version == 9
    size = LIMIT - HEADER.size
    (frame,) = receive(FrameReceiver(LIMIT), header(body_bytes=size) + bytes(size), [])
    assert frame.body.size == size
    with pytest.raises(FrameTooLargeError, match="4294967296 bytes"):
        pack_header(FrameType.POOLED, 1, 2**32)


@given(st.binary(max_size=400), st.booleans())
def test_arbitrary_bytes_give_frames_or_a_wire_error(data, with_magic):
    receiver = FrameReceiver(4096)
    try:
        frames = receive(receiver, (b"SHRK\1\0" if with_magic else b"") + data, [7, 1, 30])
    except WireError:
        return
    assert sum(frame.body.size + HEADER.size for frame in frames) <= len(data) + 6
