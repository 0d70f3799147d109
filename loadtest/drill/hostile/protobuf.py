"""Single gRPC messages that are small on the wire, or within all limits in bytes, and dear to who makes objects.

Written as protobuf's encoding (https://protobuf.dev/programming-guides/encoding), without its library: most could not
be made with it in reasonable time. Each function gives one message, not compressed and without gRPC's prefix.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Mapping

from loadtest.drill.hostile.attacker import AttackConfig

MANY = 8_000_000
MILLION = 1_000_000
BOMB_BYTES = 16_000_000
INFER = "/inference.GRPCInferenceService/ModelInfer"
RANK = "/shardrank.v1.RankingService/Rank"
LOOKUP = "/shardrank.v1.RankingService/Lookup"
VARINT, FIXED64, SIZED, GROUP, END_GROUP, FIXED32 = range(6)

Build = Callable[[AttackConfig], bytes]


def varint(value: int) -> bytes:
    """A number, seven bits a byte."""
    made = bytearray()
    while value >= 128:
        made.append(value & 127 | 128)
        value >>= 7
    made.append(value)
    return bytes(made)


def tag(field: int, wire_type: int) -> bytes:
    """What stands before a field's value."""
    return varint(field << 3 | wire_type)


def sized(field: int, *parts: bytes) -> bytes:
    """A field of bytes, text or a message."""
    body = b"".join(parts)
    return tag(field, SIZED) + varint(len(body)) + body


def repeated(field: int, count: int, *, model: bool = True) -> Build:
    """The model's name and a field that comes again and again, empty."""
    return lambda config: (sized(1, config.model.encode()) if model else b"") + sized(field) * count


def entries(count: int, *, distinct: bool, field: int) -> bytes:
    """Entries of a map by text, each with an empty message."""
    if not distinct:
        return sized(field, sized(1, b"feature-000"), sized(2)) * count
    return b"".join(b"%c\x0b\x0a\x07%07x\x12\x00" % (tag(field, SIZED)[0], number) for number in range(count))


def lookup_of_features(config: AttackConfig) -> bytes:
    """Row 5: a lookup with a million features that do not exist."""
    return sized(1, config.model.encode()) + entries(MILLION, distinct=True, field=3)


def lookup_of_one_feature(config: AttackConfig) -> bytes:
    """A lookup that gives one feature half a million times."""
    return sized(1, config.model.encode()) + entries(MILLION // 2, distinct=False, field=3)


def rank_of_features(config: AttackConfig) -> bytes:
    """A rank request with a million features of candidates."""
    return sized(1, config.model.encode()) + sized(4, entries(MILLION, distinct=True, field=1))


def parameters(config: AttackConfig) -> bytes:
    """A million parameters with names of their own."""
    return sized(1, config.model.encode()) + entries(MILLION, distinct=True, field=4)


def input_of(config: AttackConfig, *parts: bytes, datatype: bytes = b"INT64") -> bytes:
    """A ModelInferRequest with one input of the first feature."""
    name = config.features[0].encode()
    return sized(1, config.model.encode()) + sized(5, sized(1, name), sized(2, datatype), *parts)


def shape_dims(config: AttackConfig) -> bytes:
    """Row 5: an input whose shape has 16 million dimensions."""
    return input_of(config, sized(3, bytes(BOMB_BYTES)))


def input_varints(config: AttackConfig) -> bytes:
    """Row 2: an input with 16 million ids, packed as varints of one byte."""
    return input_of(config, sized(3, varint(BOMB_BYTES)), sized(5, sized(3, bytes(BOMB_BYTES))))


def input_unpacked(config: AttackConfig) -> bytes:
    """An input with 8 million ids, each with a tag of its own."""
    return input_of(config, sized(3, varint(MANY)), sized(5, (tag(3, VARINT) + b"\0") * (MANY - 100)))


def input_strings(config: AttackConfig) -> bytes:
    """An input of 8 million empty strings."""
    return input_of(config, sized(3, varint(MANY)), sized(5, sized(8) * (MANY - 100)), datatype=b"BYTES")


def raw_strings(config: AttackConfig) -> bytes:
    """An input of 4 million empty strings as raw contents."""
    return input_of(config, sized(3, varint(4_000_000)), datatype=b"BYTES") + sized(7, bytes(BOMB_BYTES))


def input_parameters(config: AttackConfig) -> bytes:
    """An input with a million parameters."""
    return input_of(config, entries(MILLION, distinct=True, field=4))


def candidates_of(*parts: bytes) -> Build:
    """A rank request with one feature of candidates made of these parts."""

    def build(config: AttackConfig) -> bytes:
        entry = sized(1, sized(1, config.features[0].encode()), sized(2, *parts))
        return sized(1, config.model.encode()) + sized(4, entry)

    return build


def packed_of(*parts: bytes) -> Build:
    """A rank request with packed features made of these parts."""
    return lambda config: sized(1, config.model.encode()) + sized(10, *parts) + tag(5, VARINT) + b"\x05"


def ids_unpacked(config: AttackConfig) -> bytes:
    """A rank request with a million ids, each with a tag of its own."""
    return candidates_of((tag(1, FIXED64) + bytes(8)) * MILLION)(config)


def unknown_groups(config: AttackConfig) -> bytes:
    """Groups in groups in an unknown field, as deep as the message is long."""
    depth = MANY - 100
    return sized(1, config.model.encode()) + tag(15, GROUP) * depth + tag(15, END_GROUP) * depth


def nested(config: AttackConfig) -> bytes:
    """Messages in messages, 20,000 deep."""
    heads, size = list[bytes](), 0
    for _ in range(20_000):
        heads.append(tag(5, SIZED) + varint(size))
        size += len(heads[-1])
    return sized(1, config.model.encode()) + b"".join(reversed(heads))


def unknown_numbers(config: AttackConfig) -> bytes:
    """5 million unknown fields."""
    return sized(1, config.model.encode()) + (tag(100, VARINT) + b"\0") * 5_300_000


def long_text(config: AttackConfig) -> bytes:
    """A model's name of 15 MB that is not UTF-8 at its end."""
    return sized(1, b"m" * 15_000_000 + b"\xff")


def compressed(body: bytes) -> bytes:
    """As gzip."""
    return gzip.compress(body, 6, mtime=0)


def bomb(members: int) -> bytes:
    """A gzip body of many members, each 16 MB of zeros: 16 KB become 16 MB, again and again."""
    return compressed(bytes(BOMB_BYTES)) * members


def deflate_bomb() -> bytes:
    """256 MB of zeros as one zlib stream of 256 KB."""
    packer = zlib.compressobj(9)
    block = bytes(1 << 24)
    return b"".join([*(packer.compress(block) for _ in range(16)), packer.flush()])


# By name: the method, what is sent, and whether as it is too.
MESSAGES: Mapping[str, tuple[str, Build, str]] = {
    "grpc-outputs": (INFER, repeated(6, MANY), "1"),
    "grpc-outputs-800k": (INFER, repeated(6, MANY // 10), "1"),
    "grpc-inputs": (INFER, repeated(5, MANY), "1"),
    "grpc-raw-contents": (INFER, repeated(7, MANY), "1"),
    "grpc-parameters-one-key": (INFER, repeated(4, MANY), "1"),
    "grpc-parameters": (INFER, parameters, "1"),
    "grpc-input-parameters": (INFER, input_parameters, "1"),
    "grpc-int64-contents": (INFER, input_varints, "2"),
    "grpc-int64-unpacked": (INFER, input_unpacked, "2"),
    "grpc-shape-dims": (INFER, shape_dims, "5"),
    "grpc-bytes-contents": (INFER, input_strings, "own"),
    "grpc-bytes-raw": (INFER, raw_strings, "own"),
    "grpc-lookup-features": (LOOKUP, lookup_of_features, "5"),
    "grpc-lookup-one-feature": (LOOKUP, lookup_of_one_feature, "own"),
    "grpc-rank-features": (RANK, rank_of_features, "5"),
    "grpc-rank-parts": (RANK, repeated(4, MANY), "own"),
    "grpc-ids-unpacked": (RANK, ids_unpacked, "own"),
    "grpc-ids-chunks": (RANK, candidates_of(sized(1) * (MANY - 100)), "own"),
    "grpc-lengths": (RANK, candidates_of(sized(2, bytes(BOMB_BYTES))), "own"),
    "grpc-string-ids": (RANK, candidates_of(sized(4) * (MANY - 100)), "own"),
    "grpc-packed-string-ids": (RANK, packed_of(sized(7) * (MANY - 100)), "own"),
    "grpc-packed-zeros": (RANK, packed_of(sized(2, bytes(7_900_000)), sized(3, bytes(7_900_000))), "own"),
    "grpc-unknown-fields": (RANK, unknown_numbers, "own"),
    "grpc-unknown-empty": (INFER, repeated(15, MANY), "own"),
    "grpc-unknown-groups": (RANK, unknown_groups, "own"),
    "grpc-nested": (INFER, nested, "own"),
    "grpc-long-text": (INFER, long_text, "own"),
}
