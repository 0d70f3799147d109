from __future__ import annotations

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.api.grpc.wire import ErrorCode, Http2Error
from serving.http2.header_blocks import KEPT_BLOCKS, HeaderReader, header_block

NAMES = st.sampled_from([b":path", b"te", b"grpc-timeout", b"x-trace", b"a-rather-long-name-of-a-header"])
VALUES = st.one_of(st.sampled_from([b"", b"/a/B", b"trailers"]), st.binary(max_size=40))


@given(
    st.lists(st.lists(st.tuples(NAMES, VALUES, st.booleans()), max_size=6), min_size=1, max_size=12),
    st.sampled_from([0, 60, 200, 4096]),
    st.booleans(),
)
def test_every_block_means_what_its_encoder_meant_however_its_table_changes(lists, table_size, is_huffman):
    encoder, reader = hpack.Encoder(), HeaderReader(2**16, tuple)
    for number, one in enumerate([*lists, *lists]):
        if number == len(lists):
            encoder.header_table_size = table_size
        kinds = (hpack.HeaderTuple, hpack.NeverIndexedHeaderTuple)
        block = encoder.encode([kinds[hides](name, value) for name, value, hides in one], huffman=is_huffman)
        known = reader.known.get(block)
        expected = tuple((name, value) for name, value, _ in one)
        # What is known is not decoded again; what is not must be, for the table's sake.
        assert (reader.read(block) if known is None else known) == expected


def test_a_block_that_names_entries_of_the_table_is_known_from_its_second_time_on():
    encoder, made = hpack.Encoder(), []
    reader = HeaderReader(4096, lambda headers: made.append(headers) or len(made))
    headers = [(b":path", b"/a"), (b"te", b"trailers")]
    first, again = encoder.encode(headers), encoder.encode(headers)
    assert (reader.read(first), reader.read(again), reader.known) == (1, 2, {again: 2})
    # Another entry: the same bytes may mean something else.
    reader.read(encoder.encode([(b"new", b"one")]))
    assert reader.known == {}


def test_a_block_that_sets_the_tables_size_is_read_each_time_it_comes():
    encoder, reader = hpack.Encoder(), HeaderReader(4096, tuple)
    # An empty table does not show that its size has changed.
    grown, gone, literal = b"\x3f\xe1\x1f\x82", b"\x20\x82", (b":method", b"GET")
    for block in (grown, grown, gone, gone, grown):
        known = reader.known.get(block)
        assert (reader.read(block) if known is None else known) == (literal,)
    added = encoder.encode([(b"x-name", b"value")])
    assert reader.read(added) == reader.read(encoder.encode([(b"x-name", b"value")])) == ((b"x-name", b"value"),)


def test_no_more_blocks_are_kept_than_a_client_has_use_for():
    reader = HeaderReader(4096, tuple)
    for number in range(2 * KEPT_BLOCKS):
        reader.read(header_block([(b"x", str(number).encode())], status=None))
    reader.read(header_block([(b"x", b"y" * 600)], status=None))
    assert len(reader.known) == KEPT_BLOCKS
    assert sum(map(len, reader.known)) < KEPT_BLOCKS * 20


@given(st.lists(st.tuples(NAMES, st.binary(max_size=700)), max_size=5), st.sampled_from([None, 200, 415]))
def test_a_block_of_literals_is_read_by_any_decoder_and_leaves_its_table_alone(headers, status):
    decoder = hpack.Decoder()
    read = list(decoder.decode(header_block(headers, status=status), raw=True))
    assert read == [(b":status", str(status).encode())] * (status is not None) + headers
    assert not decoder.header_table.dynamic_entries


@pytest.mark.parametrize(
    ("block", "code"),
    [
        (b"\xff\xff\xff", ErrorCode.COMPRESSION_ERROR),
        (b"\x80", ErrorCode.COMPRESSION_ERROR),
        (b"\x40", ErrorCode.COMPRESSION_ERROR),
        (b"\x00\x7f", ErrorCode.COMPRESSION_ERROR),
        (b"\x3f\xff\xff\x7f", ErrorCode.COMPRESSION_ERROR),
        (b"\x00\x81\x00\x00", ErrorCode.COMPRESSION_ERROR),
        (b"\x40\x01a\x64" + b"x" * 100 + b"\xbe" * 50, ErrorCode.ENHANCE_YOUR_CALM),
    ],
)
def test_what_is_no_block_or_takes_too_much_is_refused(block, code):
    with pytest.raises(Http2Error) as refusal:
        HeaderReader(1000, tuple).read(block)
    assert refusal.value.code is code
