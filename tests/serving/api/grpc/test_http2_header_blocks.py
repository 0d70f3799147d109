"""Header blocks, against the `hpack` library: what an encoder meant is what is read."""

from __future__ import annotations

import hpack
import pytest
from hpack.exceptions import HPACKError
from hypothesis import given
from hypothesis import strategies as st

from serving.api.grpc.wire import ErrorCode, HeaderDecoder, Http2Error

NAMES = st.sampled_from([b":path", b"te", b"grpc-timeout", b"x-trace", b"a-rather-long-name-of-a-header"])
VALUES = st.one_of(st.sampled_from([b"", b"/a/B", b"trailers"]), st.binary(max_size=40))
CALL = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a.B/C"), (b"te", b"trailers")]


@given(
    st.lists(st.lists(st.tuples(NAMES, VALUES, st.booleans()), max_size=6), min_size=1, max_size=12),
    st.sampled_from([0, 60, 200, 4096]),
    st.booleans(),
)
def test_every_block_means_what_its_encoder_meant(lists, table_size, is_huffman):
    encoder, decoder = hpack.Encoder(), HeaderDecoder(2**16)
    for number, one in enumerate([*lists, *lists]):
        if number == len(lists):
            encoder.header_table_size = table_size
        kinds = (hpack.HeaderTuple, hpack.NeverIndexedHeaderTuple)
        block = encoder.encode([kinds[hides](name, value) for name, value, hides in one], huffman=is_huffman)
        found = decoder.decode(block)
        assert found.headers == [(name, value) for name, value, _ in one]
        assert found.size == sum(len(name) + len(value) + 32 for name, value, _ in one)


@given(st.lists(st.binary(max_size=60), max_size=6))
def test_random_blocks_are_read_or_refused_as_the_library_does(blocks):
    theirs, ours = hpack.Decoder(max_header_list_size=2**16), HeaderDecoder(2**16)
    for block in blocks:
        try:
            expected = [tuple(one) for one in theirs.decode(block, raw=True)]
        except (HPACKError, IndexError):
            expected = None
        problem = None
        try:
            found = ours.decode(block).headers
        except Http2Error as error:
            found, problem = None, str(error)
        # Integers that are padded with zeros are an attack, not a header; the library reads them.
        assert found == expected or "integer" in problem
        if problem is not None:
            return


@pytest.mark.parametrize(
    ("block", "is_too_large"),
    [
        (b"\xff\xff\xff", False),
        (b"\x80", False),
        (b"\x40", False),
        (b"\x00\x7f", False),
        (b"\x3f\xff\xff\x7f", False),
        (b"\x82\x20", False),
        (b"\x00\x81\x00\x00", False),
        (b"\x00\x01a\x84\xff\xff\xff\xff", False),
        (b"\x7f" + b"\x80" * 10 + b"\x00", False),
        (b"\x40\x01a\x64" + b"x" * 100 + b"\xbe" * 50, True),
    ],
)
def test_what_is_no_block_or_takes_too_much_is_refused(block, is_too_large):
    with pytest.raises(Http2Error) as refusal:
        HeaderDecoder(1000).decode(block)
    code = ErrorCode.ENHANCE_YOUR_CALM if is_too_large else ErrorCode.COMPRESSION_ERROR
    assert refusal.value.code is code


WRONG_VALUES = [b"a\0b", b"a\nb", b"a\rb", b"\n", b" a", b"a ", b"\ta", b"a\t"]


@pytest.mark.parametrize("value", WRONG_VALUES)
@pytest.mark.parametrize("is_indexed", [False, True])
def test_a_value_that_could_be_split_makes_requests_malformed(value, is_indexed):
    kind = hpack.HeaderTuple if is_indexed else hpack.NeverIndexedHeaderTuple
    encoder, decoder = hpack.Encoder(), HeaderDecoder(2**16)
    for _ in range(2):
        block = encoder.encode([*(hpack.HeaderTuple(*one) for one in CALL), kind(b"x-wrong", value)])
        assert "x-wrong" in decoder.decode(block).problem
    assert decoder.decode(encoder.encode(CALL)).problem is None
