"""docs/wire-protocol.md shows bytes; these are the bytes that the code sends."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from shard_node.bags import KeyedBags
from shard_node.errors import GenerationNotFoundError, ShardNodeError
from shard_node.wire.frame import HEADER, FrameType
from shard_node.wire.messages import (
    MAX_ARRAYS,
    MAX_ERROR_MESSAGE_BYTES,
    MAX_MODEL_BYTES,
    encode_error,
    encode_pool,
    encode_pooled,
)

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "wire-protocol.md").read_text()

EXAMPLES = {
    "pool": encode_pool(
        1,
        50_000,
        "films",
        7,
        KeyedBags.from_lengths(
            np.array([0, 2], np.int32),
            np.array([2, 1], np.int64),
            np.array([2, 0, 1], np.int64),
            np.array([5, 9, 7], np.int64),
            np.array([1.0, 0.5, 2.0], np.float32),
        ),
    ),
    "pooled": encode_pooled(1, [np.array([[0.25, -1], [0, 0]], np.float32), np.array([[3]], np.float32)]),
    "error": encode_error(1, GenerationNotFoundError("version 7 is not here")),
}


def hex_dump(data: bytes) -> str:
    lines = [f"{start:04x}  {data[start : start + 16].hex(' ')}" for start in range(0, len(data), 16)]
    return "\n".join(lines)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_documents_bytes_are_the_codes(name):
    (shown,) = re.findall(rf"```hex {name}\n(.*?)\n```", PAGE, re.DOTALL)
    assert shown == hex_dump(b"".join(EXAMPLES[name]))


def test_the_document_names_every_frame_type_with_its_number():
    table = dict(re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", PAGE, re.MULTILINE))
    assert table == {str(int(kind)): kind.name for kind in FrameType}


def test_the_documents_numbers_are_the_codes():
    assert f"header of {HEADER.size} bytes" in PAGE
    assert f"number of arrays, at most {MAX_ARRAYS}" in PAGE
    assert f"at most {MAX_MODEL_BYTES} bytes" in PAGE
    assert f"at most {MAX_ERROR_MESSAGE_BYTES} bytes" in PAGE


def test_every_kind_that_the_document_names_is_a_kind_of_error():
    kinds = {found.kind for found in ShardNodeError.__subclasses__()}
    kinds |= {found.kind for error in ShardNodeError.__subclasses__() for found in error.__subclasses__()}
    named = set(re.findall(r"ERROR `(\w+)`", PAGE))
    assert named
    assert named <= kinds
