"""Frames and messages come back as they were sent; anything else is refused by name, and uses no memory."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from loader.access_counts import AccessCounts
from loader.errors import DeadlineExceededError, OverloadedError, ShardrankError, SnapshotNotFoundError
from shard_node import errors
from shard_node.answer import FLOAT32_SUMS, UNKNOWN_SEQUENCE, Answer, ReplyEncoding
from shard_node.bags import Bags
from shard_node.errors import InvalidBagsError, RemoteError, WireError
from shard_node.freshness import FORKED_AGE_MS, UNKNOWN_AGE_MS
from shard_node.tracing import MAX_STATE_BYTES, SpanContext
from shard_node.training.push import Push
from shard_node.wire import messages as wire
from shard_node.wire.frame import (
    CHUNK_BYTES,
    HEADER,
    MAX_BUDGET_US,
    Frame,
    FrameHeader,
    FrameReceiver,
    FrameType,
    pack_header,
)
from shardrank_testing.bags import bags_of, small_bags
from shardrank_testing.errors import raises_kind
from shardrank_testing.fuzzing import DECODERS, frames
from shardrank_testing.nodes import feed, film_bags, received


def frame_of(frame_type: int, body: bytes) -> Frame:
    return Frame(FrameHeader(1, frame_type, 1, len(body), 0), np.frombuffer(bytearray(body), np.uint8))


def assert_same_bags(actual: Bags, expected: Bags) -> None:
    wide = actual.wide()
    for name in ("keys", "bags_per_key", "offsets", "values", "weights"):
        ours, theirs = getattr(wide, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)


U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
FORMS = [ReplyEncoding(stored, sums) for stored in (False, True) for sums in ("float32", "float16", "int8")]
STATES = st.text(st.characters(codec="ascii"), max_size=MAX_STATE_BYTES)
CONTEXTS = st.none() | st.builds(SpanContext, st.integers(0, 2**128 - 1), U64, STATES)


@given(small_bags(), U64, st.text(max_size=60), U64, st.integers(0, 2**40), st.sampled_from(FORMS), CONTEXTS)
def test_any_request_comes_back_as_it_was_sent(bags, version, model, request_id, budget_us, forms, trace):
    frame = received(wire.encode_pool(request_id, budget_us, model, version, bags, forms, trace=trace))
    request = wire.decode_pool(frame)
    assert (request.model, request.version, request.forms, request.trace) == (model, version, forms, trace)
    assert (frame.header.request_id, frame.header.budget_us) == (request_id, min(budget_us, MAX_BUDGET_US))
    assert_same_bags(request.bags(), bags)
    # What came over a socket is checked by whoever pools it, whatever the sender says.
    assert type(request.bags()) is Bags
    # A sequence and an age are always accepted.
    assert request.num_fields == 2


@pytest.mark.parametrize(
    ("note", "forms", "num_fields"),
    [
        (0, FLOAT32_SUMS, 0),
        (0x8002, ReplyEncoding(sums="float16"), 0),
        (0x8022, ReplyEncoding(sums="int8"), 0),
        (4, FLOAT32_SUMS, 1),
        (16, FLOAT32_SUMS, 0),
    ],
)
def test_older_and_unknown_notes_of_accepted_forms(note, forms, num_fields):
    """The note is the second u16 of the first array header, where older clients send 0."""
    frame = received(wire.encode_pool(1, 0, "m", 1, film_bags([1]), ReplyEncoding(stored=True)))
    frame.body[10:12] = np.array([note], "<u2").view(np.uint8)
    request = wire.decode_pool(frame)
    assert (request.forms, request.num_fields) == (forms, num_fields)


@pytest.mark.parametrize("size", [0, 23, 24 + MAX_STATE_BYTES + 1])
def test_a_context_of_another_size_is_refused(size):
    frame = received(wire.encode_pool(1, 0, "m", 1, film_bags([7]), trace=SpanContext(2**127 + 5, 2**63 + 1, "a=b")))
    arrays = struct.unpack_from("<II", frame.body)[1]
    # The rows of the last array header, and as many bytes behind the others.
    struct.pack_into("<Q", frame.body, 8 + 16 * (arrays - 1) + 8, size)
    body = np.concatenate([frame.body[:-32], np.zeros((size + 7) // 8 * 8, np.uint8)])
    with pytest.raises(WireError, match=rf"POOL trace has {size} bytes, allowed are 24\.\.536"):
        wire.decode_pool(Frame(frame.header, body))


@given(st.text(max_size=60), U64, st.dictionaries(st.text(min_size=1, max_size=9), hnp.arrays(np.uint32, 9)), U64)
def test_any_counts_come_back(model, version, counts, request_id):
    frame = received(wire.encode_counts(request_id, 7, model, version))
    assert (frame.header.frame_type, frame.header.request_id) == (FrameType.COUNTS, request_id)
    assert wire.decode_counts(frame) == (model, version)
    sent = {name: AccessCounts.from_rows(of_table) for name, of_table in counts.items()}
    decoded = wire.decode_counts_answer(received(wire.encode_counts_answer(1, sent)))
    assert {name: table[:].tolist() for name, table in decoded.items()} == {
        name: of_table.tolist() for name, of_table in counts.items()
    }


@given(
    U64,
    st.text(max_size=60),
    U32,
    U64,
    st.dictionaries(st.integers(0, 4095), st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=5),
)
def test_any_push_comes_back(version, model, worker, step, shapes):
    rng = np.random.default_rng(len(shapes))
    gradients = {
        table: (rng.integers(-(2**63), 2**63 - 1, count), rng.normal(size=(count, dim)).astype(np.float32))
        for table, (count, dim) in shapes.items()
    }
    sent = received(wire.encode_push(1, 7, model, version, Push(worker, step, gradients)))
    found = wire.decode_push(sent)
    assert found[:2] == (model, version)
    assert (found[2].worker, found[2].step, list(found[2].gradients)) == (worker, step, list(gradients))
    for table, arrays in gradients.items():
        for ours, theirs in zip(found[2].gradients[table], arrays, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert wire.decode_pushed(received(wire.encode_pushed(3, step))) == step


def test_counts_that_are_no_file_are_refused():
    for arrays, message in (([b"{}"], "COUNTS_ANSWER: no file of access counts"), ([], "num_arrays is 0")):
        sent = wire._encode(FrameType.COUNTS_ANSWER, 1, b"", [np.frombuffer(array, np.uint8) for array in arrays])
        with pytest.raises(WireError, match=message):
            wire.decode_counts_answer(received(sent))


EDGES = st.sampled_from([0, 2**31 - 1, 2**31, -1, -(2**63), 2**63 - 1])


@given(st.lists(st.integers(0, 2**31 - 1) | EDGES, max_size=40), st.booleans())
def test_long_arrays_are_narrow_exactly_when_they_fit(rows, long):
    bags = bags_of({3: [rows * 50 if long else rows]})
    values = bags.values
    request = wire.decode_pool(received(wire.encode_pool(1, 0, "m", 1, bags)))
    assert_same_bags(request.bags(), bags)
    narrow = values.nbytes > wire.SMALL_ARRAY_BYTES and values.min() >= 0 and values.max() < 2**31
    assert request.values.dtype == (np.int32 if narrow else np.int64)


def arrays_of(dtype: str) -> st.SearchStrategy[np.ndarray]:
    def of_random_bits(rows: int, width: int, seed: int) -> np.ndarray:
        bits = np.random.default_rng(seed).bytes(rows * width * np.dtype(dtype).itemsize)
        return np.frombuffer(bits, dtype).reshape(rows, width)

    return st.builds(of_random_bits, st.integers(0, 30), st.integers(1, 70), U32)


any_rows = arrays_of("uint8")
any_sums = arrays_of("float32") | arrays_of("float16") | any_rows


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    """What nodes may answer for 0 to 5 groups: sums of every kind, and stored rows for all groups or for none."""
    sums = draw(st.lists(any_sums, max_size=5))
    stored = draw(st.none() | st.lists(any_rows, min_size=len(sums), max_size=len(sums)))
    return Answer(sums, stored)


@given(answers())
def test_any_answer_comes_back_as_aligned_views(answer):
    frame = received(wire.encode_answer(9, answer))
    assert frame.header.frame_type == (FrameType.POOLED if answer.stored is None else FrameType.STORED)
    decoded = wire.decode_answer(frame)
    assert (decoded.stored is None) == (answer.stored is None)
    assert decoded.bytes_by_form() == answer.bytes_by_form()
    for ours, theirs in ((decoded.sums, answer.sums), (decoded.stored or [], answer.stored or [])):
        assert [(array.shape, array.dtype) for array in ours] == [(array.shape, array.dtype) for array in theirs]
        for mine, sent in zip(ours, theirs, strict=True):
            assert mine.tobytes() == sent.tobytes()
            assert mine.ctypes.data % 8 == 0 or not mine.size
            assert np.shares_memory(mine, frame.body) or not mine.size


def test_large_arrays_are_sent_from_their_own_memory():
    for dtype in (np.float32, np.float16, np.uint8):
        block = np.ones((100, 64), dtype)
        answer = Answer([], [block]) if dtype is np.uint8 else Answer([block])
        (view,) = (buffer for buffer in wire.encode_answer(1, answer) if isinstance(buffer, memoryview))
        assert np.shares_memory(np.frombuffer(view, dtype), block)
    strided = np.arange(600, dtype=np.float32).reshape(30, 20)[::2, 3:9]
    rows = np.arange(200, dtype=np.uint8).reshape(20, 10)[3::3, ::2]
    decoded = wire.decode_answer(received(wire.encode_answer(1, Answer([strided], [rows]))))
    np.testing.assert_array_equal(decoded.sums[0], strided)
    np.testing.assert_array_equal(decoded.stored[0], rows)


KINDS = [error for error in vars(errors).values() if isinstance(error, type) and error.__module__ == errors.__name__]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        *((kind("row 7 of 5, ключ"), kind, "row 7 of 5, ключ") for kind in KINDS),
        (OverloadedError("full", kind="node_overloaded"), OverloadedError, "full"),
        (OverloadedError("full", kind="buffer_full"), OverloadedError, "full"),
        (DeadlineExceededError("late"), DeadlineExceededError, "late"),
        (ShardrankError("a bug"), RemoteError, "internal: a bug"),
        (SnapshotNotFoundError("no version 3"), RemoteError, "snapshot_not_found: no version 3"),
        # A long message is cut, never within a character.
        (InvalidBagsError("ü" * 5000 + "\ud800"), InvalidBagsError, "ü" * 2048),
        (InvalidBagsError("x" + "ü" * 5000), InvalidBagsError, "x" + "ü" * 2047),
    ],
)
def test_an_error_comes_back_as_its_class(error, kind, message):
    decoded = wire.decode_error(received(wire.encode_error(3, error)))
    assert type(decoded) is kind
    assert kind is RemoteError or (decoded.kind, decoded.http_status) == (error.kind, error.http_status)
    assert str(decoded).removesuffix("\ufffd") == message


@pytest.mark.parametrize("frame_type", DECODERS)
def test_every_truncation_and_addition_is_refused(frame_type):
    body = frames()[frame_type][24:]
    DECODERS[frame_type](frame_of(frame_type, body))
    for size in range(len(body)):
        with pytest.raises(WireError):
            DECODERS[frame_type](frame_of(frame_type, body[:size]))
    with pytest.raises(WireError, match="8 bytes after its last array"):
        DECODERS[frame_type](frame_of(frame_type, body + bytes(8)))


def array_header(code: int = 1, width: int = 0, rows: int = 1) -> bytes:
    return struct.pack("<II", 0, 1) + struct.pack("<HHIQ", code, 0, width, rows)


def body_of(fields: bytes, *arrays: np.ndarray) -> bytes:
    return b"".join(wire._encode(FrameType.POOL, 1, fields, arrays))[24:]


SUMS, HALF, ROWS, WHOLE = (np.zeros((2, 3), dtype) for dtype in (np.float32, np.float16, np.uint8, np.int32))
NARROW, WIDE, REAL = (np.zeros(2, dtype) for dtype in (np.int32, np.int64, np.float32))
FIELDS = struct.pack("<Q", 1) + b"m"
POOL, POOLED, STORED, ERROR = FrameType.POOL, FrameType.POOLED, FrameType.STORED, FrameType.ERROR


@pytest.mark.parametrize(
    ("frame_type", "body", "message"),
    [
        (POOL, b"", "POOL body has 0 bytes, at least 8"),
        (POOL, struct.pack("<II", 8, 2**32 - 1), "num_arrays is 4294967295, at most 8192"),
        (POOL, struct.pack("<II", 8, 8192), "num_arrays is 8192, their headers do not fit"),
        (POOL, struct.pack("<II", 2**32 - 1, 0), "fields_bytes is 4294967295, they do not fit"),
        (POOL, array_header(code=9), "array 0: dtype 9 is none of"),
        (POOL, array_header(rows=2**64 - 1), "array 0: 18446744073709551615 rows of width 0 do"),
        (POOL, array_header(width=2**31, rows=2**31), "do not fit"),
        (POOL, body_of(b""), "POOL fields have 0 bytes"),
        (POOL, body_of(bytes(8)), "num_arrays is 0, allowed are 4"),
        (POOL, body_of(bytes(272)), "POOL model has 264 bytes, at most 256"),
        (POOL, body_of(FIELDS[:8] + b"\xff", *(NARROW,) * 4), "POOL model is not UTF-8"),
        (POOL, body_of(FIELDS, WIDE, NARROW, NARROW, NARROW), "POOL keys is 1-d int64, it must be 1-d int32"),
        (POOL, body_of(FIELDS, NARROW, REAL, NARROW, NARROW), "POOL bags_per_key is 1-d float32"),
        (POOL, body_of(FIELDS, NARROW, NARROW, NARROW.reshape(1, 2), NARROW), "POOL offsets is 2-d int32"),
        (POOL, body_of(FIELDS, NARROW, NARROW, NARROW, REAL), "POOL values is 1-d float32"),
        (POOL, body_of(FIELDS, *(NARROW,) * 5), "POOL weights is 1-d int32"),
        (POOLED, body_of(b"", SUMS, SUMS[0]), "sums of group 1 are 1-d float32, they must be 2-d float32 or"),
        (POOLED, body_of(b"", HALF, ROWS[0]), "POOLED sums of group 1 are 1-d uint8"),
        (STORED, body_of(b"", WHOLE, ROWS), "STORED sums of group 0 are 2-d int32"),
        (STORED, body_of(b"", SUMS, HALF, ROWS, HALF), "rows of group 1 are 2-d float16, they must be 2-d uint8"),
        (STORED, body_of(b"", SUMS, ROWS[0]), "STORED rows of group 0 are 1-d uint8"),
        (STORED, body_of(b"", SUMS, HALF, ROWS), "STORED num_arrays is 3, there must be two for each group"),
        (STORED, body_of(b"more"), r"STORED fields have 4 bytes, allowed are \[0, 8, 16\]"),
        (FrameType.INFO_ANSWER, body_of(b"{}", NARROW), "INFO_ANSWER num_arrays is 1"),
        (ERROR, body_of(b"", NARROW), "ERROR num_arrays is 1"),
        (ERROR, body_of(b"x"), "ERROR fields have 1 bytes"),
        (ERROR, body_of(b"\xff" * 16), "ERROR kind and grpc_status have"),
        (FrameType.COUNTS, body_of(FIELDS[:7]), "COUNTS fields have 7 bytes"),
        (FrameType.PUSH, body_of(bytes(11)), "PUSH fields have 11 bytes, at least 12"),
        (FrameType.PUSH, body_of(bytes(21), np.zeros(2, np.int32)), "PUSH num_arrays is 1, there must be tables"),
        (
            FrameType.PUSH,
            body_of(bytes(21), np.zeros(1, np.int32), np.zeros(2, np.int64), np.zeros((3, 4), np.float32)),
            "PUSH table 0 has 2 ids and 3 gradients",
        ),
        (FrameType.PUSHED, body_of(bytes(7)), "PUSHED fields have 7 bytes, 8 are needed"),
        (FrameType.COUNTS, body_of(bytes(24), NARROW), "COUNTS num_arrays is 1"),
    ],
)
def test_a_malformed_body_is_refused_naming_its_field(frame_type, body, message):
    with pytest.raises(WireError, match=message):
        DECODERS[frame_type](frame_of(frame_type, body))


def test_what_no_frame_can_state_is_not_sent():
    for model, version, message in (
        ("m", -1, "version -1"),
        ("m" * 257, 1, "model has 257 bytes, at most 256"),
        ("\ud800", 1, "not Unicode"),
    ):
        with pytest.raises(WireError, match=message):
            wire.encode_pool(1, 0, model, version, film_bags([1]))
    with pytest.raises(WireError, match="version -1"):
        wire.encode_counts(1, 0, "m", -1)


@pytest.mark.parametrize("stored", [None, [np.zeros((1, 12), np.uint8)]], ids=["POOLED", "STORED"])
@pytest.mark.parametrize(
    ("sent", "num_fields", "expected"),
    [
        ((2**62 + 1, FORKED_AGE_MS), 2, (2**62 + 1, FORKED_AGE_MS)),
        ((5, UNKNOWN_AGE_MS), 2, (5, UNKNOWN_AGE_MS)),
        ((5, 70), 1, (5, UNKNOWN_AGE_MS)),
        ((5, 70), 0, (UNKNOWN_SEQUENCE, UNKNOWN_AGE_MS)),
        ((UNKNOWN_SEQUENCE, 70), 2, (UNKNOWN_SEQUENCE, UNKNOWN_AGE_MS)),
    ],
)
def test_a_sequence_and_an_age_come_back_if_they_are_sent(stored, sent, num_fields, expected):
    answer = Answer([np.ones((2, 4), np.float32)], stored, 0, *sent)
    read = wire.decode_answer(received(wire.encode_answer(1, answer, num_fields)))
    assert (read.sequence, read.age_ms) == expected


LIMIT = 1 << 20


def frame_header(version=1, frame_type=1, body_bytes=0) -> bytes:
    return struct.pack("<4sHHQII", b"SHRK", version, frame_type, 5, body_bytes, 0)


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
    received = feed(receiver, stream, pieces)
    assert [(frame.header.frame_type, frame.header.request_id) for frame in received] == [
        (kind, request_id) for kind, request_id, _ in frames
    ]
    assert [frame.body.tobytes() for frame in received] == bodies
    assert all(frame.body.ctypes.data % 8 == 0 for frame in received if frame.body.size)
    assert not receiver.is_mid_frame


@given(st.integers(0, CHUNK_BYTES * 2), st.integers(0, 23))
def test_an_incomplete_frame_is_not_returned(body_bytes, missing_from_header):
    whole = frame_header(body_bytes=body_bytes) + bytes(body_bytes)
    receiver = FrameReceiver(LIMIT)
    assert feed(receiver, whole[:-1]) == []
    assert receiver.is_mid_frame
    early = FrameReceiver(LIMIT)
    assert feed(early, whole[: 23 - missing_from_header]) == []
    assert early.is_mid_frame == (missing_from_header < 23)


@pytest.mark.parametrize("header", [frame_header(body_bytes=LIMIT - 23), frame_header(9, 5, body_bytes=LIMIT - 23)])
def test_a_too_long_frame_is_refused_before_its_body_is_read(header):
    """What else may be wrong with a header is in test_server_connections.py."""
    receiver = FrameReceiver(LIMIT)
    with raises_kind("frame_too_large", match=f"frame has {LIMIT + 1} bytes, at most {LIMIT}"):
        feed(receiver, header)
    assert receiver.request_id == 5


def test_limits_of_frames():
    # An error frame of another protocol version is let through.
    (frame,) = feed(FrameReceiver(LIMIT), frame_header(version=9, frame_type=5, body_bytes=8) + bytes(8))
    assert frame.header.protocol_version == 9
    size = LIMIT - HEADER.size
    (frame,) = feed(FrameReceiver(LIMIT), frame_header(body_bytes=size) + bytes(size))
    assert frame.body.size == size
    with raises_kind("frame_too_large", match="4294967296 bytes"):
        pack_header(FrameType.POOLED, 1, 2**32)
