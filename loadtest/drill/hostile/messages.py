"""Single messages that are small on the wire, or within all limits in bytes, and dear to who reads them.

Bodies over HTTP: JSON that is long, deep or wrong at its end, infer requests that lie about their parts, heads that
must not be. Messages over gRPC, written as protobuf's encoding (https://protobuf.dev/programming-guides/encoding):
most could not be made with its library in reasonable time.
"""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from loadtest.drill.hostile.attacker import AttackConfig
from serving.formats.protobuf import encode_varint

LIMIT = 16 << 20
# What lookups and rank requests may have at most by default: ids, and floats of a lookup's answer.
MAX_IDS = 1 << 20
MAX_FLOATS = 2**18
# Rows are of 64, and a bag's length counts too.
DIM = 65
HEADER_LENGTH = "inference-header-content-length"
HTTP_RANK, HTTP_LOOKUP = "/v1/models/{model}:rank", "/v1/models/{model}:lookup"
HTTP_INFER = "/v2/models/{model}/infer"
GRPC_RANK, GRPC_LOOKUP = "/shardrank.v1.RankingService/Rank", "/shardrank.v1.RankingService/Lookup"
GRPC_INFER = "/inference.GRPCInferenceService/ModelInfer"
MANY = 8_000_000
MILLION = 1_000_000
BOMB_BYTES = 16_000_000
VARINT, FIXED64, SIZED, GROUP, END_GROUP = range(5)

Build = Callable[[AttackConfig], bytes]


# HTTP


@dataclass(frozen=True, slots=True)
class Body:
    """What is posted: to a path with `{model}` in place of its name, with headers beside host and content-length."""

    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "application/json"})

    def request(self, model: str) -> bytes:
        """Return the bytes of the request."""
        lines = [f"POST {self.path.format(model=model)} HTTP/1.1", "host: drill", f"content-length: {len(self.body)}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + self.body


BuildBody = Callable[[AttackConfig], Body]


def fixed(path: str, head: bytes, part: bytes, tail: bytes = b"") -> BuildBody:
    """Repeat a part up to the limit in bytes."""
    count = (LIMIT - len(head) - len(tail)) // len(part)
    return lambda config: Body(path, head + part * count + tail)


def sparse(text: Callable[[AttackConfig], str]) -> BuildBody:
    """Make a lookup of features that are written so."""
    return lambda config: Body(HTTP_LOOKUP, ('{"sparse":{' + text(config) + "}}").encode())


def id_written(text: str) -> BuildBody:
    """Make a lookup with one id that is written so."""
    return sparse(lambda config: f'"{config.features[0]}":[[{text}]]')


def full_lookup(config: AttackConfig, wrong: str = "") -> Body:
    """Make a lookup of as many ids as are allowed in as many bags as are allowed; `wrong` is its last id."""
    bags = MAX_FLOATS // DIM // len(config.features)
    hotness = MAX_IDS // (bags * len(config.features))
    bag = json.dumps(list(range(10_000, 10_000 + hotness)), separators=(",", ":"))
    features = [f'"{name}":[{",".join([bag] * bags)}]' for name in config.features]
    if wrong:
        features[-1] = features[-1][: -len("]]")].rpartition(",")[0] + f",{wrong}]]"
    return Body(HTTP_LOOKUP, ('{"sparse":{' + ",".join(features) + "}}").encode())


def full_rank(config: AttackConfig, wrong: str = "", candidates: int = 1000) -> Body:
    """Make a rank request of as many ids as are allowed; `wrong` is the last float of its candidates."""
    hotness = MAX_IDS // (candidates * len(config.features))
    bag = json.dumps(list(range(10_000, 10_000 + hotness)), separators=(",", ":"))
    features = ",".join(f'"{name}":[{",".join([bag] * candidates)}]' for name in config.features)
    row = json.dumps([0.5] * config.dense, separators=(",", ":"))
    last = row[:-1].rpartition(",")[0] + f",{wrong}]" if wrong else row
    dense = ",".join([*[row] * (candidates - 1), last])
    return Body(HTTP_RANK, f'{{"candidates":{{"sparse":{{{features}}},"dense":[{dense}]}}}}'.encode())


def full_answer(config: AttackConfig) -> Body:
    """Make a small lookup with the largest answer that is allowed."""
    bags = MAX_FLOATS // DIM // len(config.features)
    return sparse(lambda config: ",".join(f'"{name}":[{",".join(["7"] * bags)}]' for name in config.features))(config)


def infer(document: Callable[[AttackConfig], str], header_length: str | None = None, tail: bytes = b"") -> BuildBody:
    """Make an infer request in JSON, with the length of its header if one is given."""
    headers = {"content-type": "application/octet-stream"}
    if header_length is not None:
        headers[HEADER_LENGTH] = header_length
    return lambda config: Body(HTTP_INFER, document(config).encode() + tail, headers)


def encoded(coding: str, body: Build) -> BuildBody:
    """Make an infer request under a content coding."""
    headers = {"content-type": "application/json", "content-encoding": coding}
    return lambda config: Body(HTTP_INFER, body(config), headers)


def _many_inputs(config: AttackConfig) -> str:
    return '{"inputs":[' + ",".join([f'{{"name":"{config.features[0]}"}}'] * 600_000) + "]}"


def _long_data(config: AttackConfig) -> str:
    data = ",".join(["10000"] * MILLION)
    name = config.features[0]
    return f'{{"inputs":[{{"name":"{name}","shape":[1000,1000],"datatype":"INT64","data":[{data},"x"]}}]}}'


def _small(config: AttackConfig) -> str:
    inputs = f'{{"name":"{config.features[0]}","shape":[1,1],"datatype":"INT64","parameters":{{"binary_data_size":8}}}}'
    return f'{{"inputs":[{inputs}]}}'


def _distinct_keys(config: AttackConfig) -> str:
    return ",".join(f'"f{number}":[1]' for number in range(MILLION))


# By name: what is sent, the row of the first table in docs/drills.md, and how many ms the loop may stand.
BODIES: Mapping[str, tuple[BuildBody, str, float]] = {
    "json-lookup-wrong-end": (lambda config: full_lookup(config, '"x"'), "7", 100.0),
    "json-rank-wrong-end": (lambda config: full_rank(config, '"x"'), "7", 100.0),
    "json-open-lists": (fixed(HTTP_RANK, b"", b"["), "own", 100.0),
    "json-open-objects": (fixed(HTTP_RANK, b"", b'{"a":'), "own", 100.0),
    "json-empty-lists": (fixed(HTTP_LOOKUP, b'{"sparse":{"feature-000":[[]', b",[]", b"]}}"), "own", 100.0),
    "json-spaces": (fixed(HTTP_RANK, b"", b" "), "own", 100.0),
    "json-commas": (fixed(HTTP_RANK, b"[", b","), "own", 100.0),
    "json-zeros": (fixed(HTTP_LOOKUP, b'{"sparse":{"feature-000":[0', b",0", b"]}}"), "own", 100.0),
    "json-keys": (sparse(_distinct_keys), "own", 100.0),
    "json-one-key": (sparse(lambda config: ",".join([f'"{config.features[0]}":[1]'] * 600_000)), "own", 100.0),
    "json-digits": (id_written("9" * MILLION), "own", 100.0),
    "json-fraction": (id_written("0." + "9" * MILLION), "own", 100.0),
    "json-exponent": (id_written("1e" + "9" * MILLION), "own", 100.0),
    "json-escapes": (fixed(HTTP_RANK, b'{"request_id":"', b"\\u0041", b'"}'), "own", 100.0),
    "json-surrogates": (fixed(HTTP_RANK, b'{"request_id":"', b"\\ud800", b'"}'), "own", 100.0),
    "json-backslashes": (fixed(HTTP_RANK, b'{"request_id":"', b"\\\\", b'"'), "own", 100.0),
    "json-not-utf8": (fixed(HTTP_RANK, b'{"request_id":"', b"\xff", b'"}'), "own", 100.0),
    "oip-json-inputs": (infer(_many_inputs), "own", 100.0),
    "oip-json-empty-inputs": (
        infer(lambda config: '{"inputs":[' + ",".join(["{}"] * 5_000_000) + "]}"),
        "own",
        100.0,
    ),
    "oip-json-data-wrong-end": (infer(_long_data), "own", 100.0),
    "oip-header-beyond": (infer(_small, "99999999", bytes(8)), "own", 50.0),
    "oip-header-negative": (infer(_small, "-1", bytes(8)), "own", 50.0),
    "oip-header-digits": (infer(_small, "9" * 5000, bytes(8)), "own", 50.0),
    "oip-header-short": (infer(_small, "5", bytes(8)), "own", 50.0),
    "oip-header-all": (infer(_small, str(LIMIT - 1000), bytes(LIMIT - 1000)), "own", 100.0),
    "oip-gzip-bomb": (encoded("gzip", lambda config: bomb(900)), "own", 50.0),
    "oip-deflate-bomb": (encoded("deflate", lambda config: deflate_bomb()), "own", 50.0),
    "oip-gzip-inputs": (
        lambda config: Body(HTTP_INFER, compressed(_many_inputs(config).encode()), {"content-encoding": "gzip"}),
        "own",
        100.0,
    ),
}
# The largest that is allowed: answered, or refused by a limit that a deployment has lowered.
ALLOWED: Mapping[str, BuildBody] = {"json-lookup-full": full_lookup, "json-rank-full": full_rank}


def small_lookup(config: AttackConfig) -> bytes:
    """Make the body of a valid lookup of one id."""
    return f'{{"sparse":{{"{config.features[0]}":[1]}}}}'.encode()


def lookup_head(config: AttackConfig, *lines: str) -> bytes:
    """Make the head of a lookup with these lines."""
    head = [f"POST /v1/models/{config.model}:lookup HTTP/1.1", *lines]
    return ("\r\n".join(head) + "\r\n\r\n").encode("latin-1")


def with_length(*lines: str, hosts: tuple[str, ...] = ("host: drill",)) -> Build:
    """Make a lookup of one id, with these lines in its head."""
    return lambda config: (
        lookup_head(config, *hosts, f"content-length: {len(small_lookup(config))}", *lines) + small_lookup(config)
    )


def chunked(coding: str = "chunked", tail: bytes = b"\r\n") -> Build:
    """Make a lookup of one id in one chunk."""

    def build(config: AttackConfig) -> bytes:
        body, head = small_lookup(config), lookup_head(config, "host: drill", f"transfer-encoding: {coding}")
        return head + b"%x\r\n%s\r\n0\r\n" % (len(body), body) + tail

    return build


_TRAILERS = b"".join(b"x-%d: %s\r\n" % (one, b"y" * 1000) for one in range(100)) + b"\r\n"
# Requests whose head is what is wrong, by name, with their row.
HEADS: Mapping[str, tuple[Build, str]] = {
    "http1-gzip-chunked": (chunked("gzip, chunked"), "12"),
    "http1-trailers": (chunked(tail=_TRAILERS), "12"),
    "http1-no-host": (with_length(hosts=()), "12"),
    "http1-two-hosts": (with_length("host: other"), "12"),
    "http1-nul": (with_length("x-request-id: a\0b"), "12"),
    # As request smuggling has them.
    "http1-two-lengths": (with_length("content-length: 1"), "own"),
    "http1-length-and-chunks": (with_length("transfer-encoding: chunked"), "own"),
    "http1-long-head": (
        lambda config: lookup_head(config, "host: drill", *(f"x-{one}: {'y' * 1000}" for one in range(16_000))),
        "own",
    ),
}
# What Java's HttpClient asks beside its POST. It must be answered as if it had not.
UPGRADE_H2C = with_length(
    *("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAA"),
    "content-type: application/json",
)


# gRPC


def tag(number: int, wire_type: int) -> bytes:
    """Return what stands before a field's value."""
    return encode_varint(number << 3 | wire_type)


def sized(number: int, *parts: bytes) -> bytes:
    """Return a field of bytes, text or a message, empty ones too."""
    body = b"".join(parts)
    return tag(number, SIZED) + encode_varint(len(body)) + body


def request(made: Build) -> Build:
    """Make a message of the model's name and what follows."""
    return lambda config: sized(1, config.model.encode()) + made(config)


def repeated(part: bytes, count: int = MANY) -> Build:
    """Make a message in which a field comes again and again."""
    return request(lambda config: part * count)


def entries(number: int, count: int = MILLION) -> bytes:
    """Return entries of a map by text, each with a key of its own and an empty message."""
    head = tag(number, SIZED)[0]
    return b"".join(b"%c\x0b\x0a\x07%07x\x12\x00" % (head, one) for one in range(count))


def input_of(made: Callable[[], bytes], datatype: bytes = b"INT64", after: Callable[[], bytes] = bytes) -> Build:
    """Make a ModelInferRequest with one input of the first feature."""
    return request(lambda config: sized(5, sized(1, config.features[0].encode()), sized(2, datatype), made()) + after())


def candidates_of(made: Callable[[], bytes]) -> Build:
    """Make a rank request with one feature of candidates."""
    return request(lambda config: sized(4, sized(1, sized(1, config.features[0].encode()), sized(2, made()))))


def packed_of(made: Callable[[], bytes]) -> Build:
    """Make a rank request with packed features."""
    return request(lambda config: sized(10, made()) + tag(5, VARINT) + b"\x05")


def lookup_of_rows(config: AttackConfig, rows: int) -> bytes:
    """Make a valid lookup of one feature."""
    feature = sized(1, (7).to_bytes(8, "little") * rows)
    return sized(1, config.model.encode()) + sized(3, sized(1, config.features[0].encode()), sized(2, feature))


def _unknown_groups(config: AttackConfig) -> bytes:
    depth = MANY - 100
    return tag(15, GROUP) * depth + tag(15, END_GROUP) * depth


def _nested(config: AttackConfig) -> bytes:
    heads, size = list[bytes](), 0
    for _ in range(20_000):
        heads.append(tag(5, SIZED) + encode_varint(size))
        size += len(heads[-1])
    return b"".join(reversed(heads))


def half_message(config: AttackConfig) -> bytes:
    """Make half of a message of zeros, with its prefix."""
    return struct.pack(">BI", 0, LIMIT) + bytes(LIMIT // 2)


def compressed(body: bytes) -> bytes:
    """Compress with gzip."""
    return gzip.compress(body, 6, mtime=0)


def bomb(members: int) -> bytes:
    """Make a gzip body of many members, each 16 MB of zeros: 16 KB become 16 MB, again and again."""
    return compressed(bytes(BOMB_BYTES)) * members


def deflate_bomb() -> bytes:
    """Make 256 MB of zeros as one zlib stream of 256 KB."""
    packer = zlib.compressobj(9)
    block = bytes(1 << 24)
    return b"".join([*(packer.compress(block) for _ in range(16)), packer.flush()])


def _one_feature(config: AttackConfig) -> bytes:
    return sized(3, sized(1, b"feature-000"), sized(2)) * (MILLION // 2)


GRPC_INT64 = input_of(lambda: sized(3, encode_varint(BOMB_BYTES)) + sized(5, sized(3, bytes(BOMB_BYTES))))
GRPC_FEATURES = request(lambda config: entries(3))
# By name: the method, what is sent as it is and compressed, and its row.
MESSAGES: Mapping[str, tuple[str, Build, str]] = {
    "grpc-outputs": (GRPC_INFER, repeated(sized(6)), "1"),
    "grpc-outputs-800k": (GRPC_INFER, repeated(sized(6), MANY // 10), "1"),
    "grpc-inputs": (GRPC_INFER, repeated(sized(5)), "1"),
    "grpc-raw-contents": (GRPC_INFER, repeated(sized(7)), "1"),
    "grpc-parameters-one-key": (GRPC_INFER, repeated(sized(4)), "1"),
    "grpc-parameters": (GRPC_INFER, request(lambda config: entries(4)), "1"),
    "grpc-input-parameters": (GRPC_INFER, input_of(lambda: entries(4)), "1"),
    "grpc-int64-contents": (GRPC_INFER, GRPC_INT64, "2"),
    "grpc-int64-unpacked": (
        GRPC_INFER,
        input_of(lambda: sized(3, encode_varint(MANY)) + sized(5, (tag(3, VARINT) + b"\0") * (MANY - 100))),
        "2",
    ),
    "grpc-shape-dims": (GRPC_INFER, input_of(lambda: sized(3, bytes(BOMB_BYTES))), "5"),
    "grpc-bytes-contents": (
        GRPC_INFER,
        input_of(lambda: sized(3, encode_varint(MANY)) + sized(5, sized(8) * (MANY - 100)), b"BYTES"),
        "own",
    ),
    "grpc-bytes-raw": (
        GRPC_INFER,
        input_of(lambda: sized(3, encode_varint(4_000_000)), b"BYTES", after=lambda: sized(7, bytes(BOMB_BYTES))),
        "own",
    ),
    "grpc-lookup-features": (GRPC_LOOKUP, GRPC_FEATURES, "5"),
    "grpc-lookup-one-feature": (GRPC_LOOKUP, request(_one_feature), "own"),
    "grpc-rank-features": (GRPC_RANK, request(lambda config: sized(4, entries(1))), "5"),
    "grpc-rank-parts": (GRPC_RANK, repeated(sized(4)), "own"),
    "grpc-ids-unpacked": (GRPC_RANK, candidates_of(lambda: (tag(1, FIXED64) + bytes(8)) * MILLION), "own"),
    "grpc-ids-chunks": (GRPC_RANK, candidates_of(lambda: sized(1) * (MANY - 100)), "own"),
    "grpc-lengths": (GRPC_RANK, candidates_of(lambda: sized(2, bytes(BOMB_BYTES))), "own"),
    "grpc-string-ids": (GRPC_RANK, candidates_of(lambda: sized(4) * (MANY - 100)), "own"),
    "grpc-packed-string-ids": (GRPC_RANK, packed_of(lambda: sized(7) * (MANY - 100)), "own"),
    "grpc-packed-zeros": (
        GRPC_RANK,
        packed_of(lambda: sized(2, bytes(7_900_000)) + sized(3, bytes(7_900_000))),
        "own",
    ),
    "grpc-unknown-fields": (GRPC_RANK, repeated(tag(100, VARINT) + b"\0", 5_300_000), "own"),
    "grpc-unknown-empty": (GRPC_INFER, repeated(sized(15)), "own"),
    "grpc-unknown-groups": (GRPC_RANK, request(_unknown_groups), "own"),
    "grpc-nested": (GRPC_INFER, request(_nested), "own"),
    "grpc-long-text": (GRPC_INFER, lambda config: sized(1, b"m" * 15_000_000 + b"\xff"), "own"),
}
# What says that it is compressed already, by name.
GZIP_BODIES: Mapping[str, Build] = {
    "grpc-gzip-bomb": lambda config: bomb(900),
    "grpc-gzip-cut": lambda config: bomb(1)[:-100],
    "grpc-gzip-garbage": lambda config: b"\x1f\x8b" + bytes(1 << 20),
}
