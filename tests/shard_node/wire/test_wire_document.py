"""docs/wire-protocol.md shows bytes; these are the bytes that the code sends."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from loader.snapshot.codecs import RowCodec
from shard_node.answer import Answer, ReplyEncoding, add_answers
from shard_node.errors import GenerationNotFoundError
from shard_node.split import whole
from shard_node.tracing import SpanContext
from shard_node.wire.frame import HEADER, FrameType
from shard_node.wire.messages import (
    _ERROR_OF_KIND,
    MAX_ARRAYS,
    MAX_ERROR_MESSAGE_BYTES,
    MAX_NAME_BYTES,
    _encode,
    encode_answer,
    encode_error,
    encode_pool,
)
from shardrank_testing.bags import bags_of
from shardrank_testing.card_plans import layout_of
from shardrank_testing.snapshots import table_of

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "wire-protocol.md").read_text()

# One group of two int8 tables, and what is stored of it.
ONE_GROUP = layout_of([table_of(name, 10, 4, dtype="int8") for name in ("film", "genre")])
NOTED_BAGS = bags_of({0: [[5], [9]], 1: [[7, 8, 3]]})
ROWS = np.array([[0.0, 0.25, 0.5, 1.0], [-1.0, -0.5, 0.0, 1.0]], np.float32)
STORED_ANSWER = Answer([np.array([[0.25, -1, 1.5, 2]], np.float16)], [RowCodec("int8", 4).encode(ROWS)])

TRACE = SpanContext(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7)
EXAMPLES = {
    "pool": encode_pool(1, 50_000, "films", 7, bags_of({0: [[5, 9], []], 2: [[7]]}, [1.0, 0.5, 2.0])),
    "pooled": encode_answer(1, Answer([np.array([[0.25, -1], [0, 0]], np.float32), np.array([[3]], np.float32)])),
    "pool-noted": encode_pool(2, 50_000, "films", 7, NOTED_BAGS, ReplyEncoding(stored=True, sums="float16")),
    "pool-traced": encode_pool(3, 50_000, "films", 7, bags_of({0: [[5]]}), trace=TRACE),
    "stored": encode_answer(2, STORED_ANSWER),
    "error": encode_error(1, GenerationNotFoundError("version 7 is not here")),
}


def hex_dump(data: bytes) -> str:
    lines = [f"{start:04x}  {data[start : start + 16].hex(' ')}" for start in range(0, len(data), 16)]
    return "\n".join(lines)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_documents_bytes_are_the_codes(name):
    (shown,) = re.findall(rf"```hex {name}\n(.*?)\n```", PAGE, re.DOTALL)
    assert shown == hex_dump(b"".join(EXAMPLES[name]))


def test_the_documented_answer_is_one_to_the_documented_request():
    STORED_ANSWER.check(ONE_GROUP, NOTED_BAGS)
    (block,) = add_answers(ONE_GROUP, NOTED_BAGS, [whole(NOTED_BAGS)], [STORED_ANSWER])
    np.testing.assert_allclose(block, [*ROWS, [0.25, -1, 1.5, 2]], atol=1e-2)


def test_the_document_names_every_dtype_with_its_code():
    (row,) = re.findall(r"^\| u16 \| dtype \| (.*) \|$", PAGE, re.MULTILINE)
    named = dict(one.split(" ")[::-1] for one in row.split(", "))
    arrays = [np.zeros(1, name) for name in named]
    sent = b"".join(_encode(FrameType.POOL, 1, b"", arrays))
    headers = [sent[HEADER.size + 8 + 16 * number :][:2] for number in range(len(arrays))]
    assert [int.from_bytes(header, "little") for header in headers] == list(map(int, named.values()))


def test_the_documents_numbers_are_the_codes():
    assert f"header of {HEADER.size} bytes" in PAGE
    assert f"number of arrays, at most {MAX_ARRAYS}" in PAGE
    assert f"at most {MAX_NAME_BYTES} bytes" in PAGE
    assert f"at most {MAX_ERROR_MESSAGE_BYTES} bytes" in PAGE
    table = dict(re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", PAGE, re.MULTILINE))
    assert table == {str(int(kind)): kind.name for kind in FrameType}
    assert set() < set(re.findall(r"ERROR `(\w+)`", PAGE)) <= _ERROR_OF_KIND.keys()
