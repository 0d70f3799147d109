"""The catalogue of single messages that are small on the wire, or within all limits in bytes, and dear to read.

Bodies over HTTP: JSON that is long, deep or wrong at its end, infer requests that lie about their parts, heads that
must not be. Messages over gRPC, written as protobuf's encoding (https://protobuf.dev/programming-guides/encoding):
most could not be made with its library in reasonable time. `drill hostile` sends them; `loadtest.worst_message` times
how long they take to read.
"""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from loader.snapshot.tables import Frozen
from loadtest.drill.hostile import peer as h2
from loadtest.load.senders import post_request
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
REFLECTION = "/grpc.reflection.{}.ServerReflection/ServerReflectionInfo"
MANY = 8_000_000
MILLION = 1_000_000
BOMB_BYTES = 16_000_000
VARINT, FIXED64, SIZED, GROUP, END_GROUP = range(5)
MESSAGE_MS = 50.0
LARGEST_JSON_MS = 100.0
# A beginning of deflate, and 4 of the blocks that take longest for their length: empty, with codes of their own.
DEFLATE_HEAD = b"\x78\x9c"
EMPTY_BLOCKS = bytes.fromhex(
    "04c081000000000090ff6b100007020000000040feaf41001c080000000000f9bf060170200000000000e4ff1a"
)

Form: TypeAlias = Literal["post", "raw", "both", "plain", "gzip", "as gzip", "framed"]
"""How a message is sent.

Over HTTP: as the body of a POST, or with a head of its own. Over gRPC: compressed and once more as it is, as it is,
compressed, as if it were compressed, or with its prefix in it.
"""
Outcome: TypeAlias = Literal["refused", "ended", "served", "any"]
Headers: TypeAlias = tuple[tuple[str, str], ...]
JSON: Headers = (("content-type", "application/json"),)
BINARY: Headers = (("content-type", "application/octet-stream"),)


class Served(Frozen):
    """What a message must know of the server.

    Attributes:
        features: of the model, all of candidates, which have `dense` floats each.
        json_bytes: how long JSON is that is as long as possible.
    """

    model: str
    features: tuple[str, ...]
    dense: int
    json_bytes: int = LIMIT


Build = Callable[[Served], bytes]


@dataclass(frozen=True, slots=True)
class HostileMessage:
    """One message.

    Attributes:
        path: a gRPC method, or a path over HTTP with `{model}` in place of its name; unused by a `raw` one.
        build: makes its bytes for a server.
        row: of the first table in docs/drills.md that it belongs to; `own` for ideas beside it.
        headers: beside host and content-length; over gRPC beside those of every call.
        outcome: refused (4xx and its like), the same or its connection ended without an answer, served (200, OK), or
            whatever of these answers the server prefers.
        limit_ms: how long the loop may stand.
    """

    name: str
    path: str
    build: Build
    row: str = "own"
    form: Form = "both"
    headers: Headers = ()
    outcome: Outcome = "refused"
    limit_ms: float = MESSAGE_MS

    @property
    def is_grpc(self) -> bool:
        """Whether it is sent to the gRPC port."""
        return self.form not in ("post", "raw")

    def encode(self, served: Served, form: Form) -> bytes:
        """Return what is sent: a whole request over HTTP, or the data of a gRPC call."""
        body = self.build(served)
        if form == "post":
            return post(self.path, served.model, self.headers, body)
        if form == "gzip":
            body = compressed(body)
        return body if form in ("raw", "framed") else h2.message(body, compressed="gzip" in form)


# Over HTTP


def post(path: str, model: str, headers: Headers, body: bytes) -> bytes:
    """Return a request to a path with `{model}` in place of its name."""
    made = post_request("drill", 80, path.format(model=model), dict(headers), body)
    return made.head + b"\r\n" + made.body


def filled(unit: bytes, size: int, head: bytes = b"", tail: bytes = b"") -> bytes:
    """Repeat a unit as often as it fits into a message of some size."""
    return head + unit * ((size - len(head) - len(tail)) // len(unit)) + tail


def fixed(head: str, unit: str, tail: str = "", encoding: str = "ascii") -> Build:
    """Repeat a part up to the limit of JSON; FEATURE stands for the first one's name."""

    def build(served: Served) -> bytes:
        parts = [one.replace("FEATURE", served.features[0]).encode(encoding) for one in (unit, head, tail)]
        return filled(parts[0], served.json_bytes, *parts[1:])

    return build


def id_written(text: str) -> Build:
    """Make a lookup with one id that is written so."""
    return lambda served: f'{{"sparse":{{"{served.features[0]}":[[{text}]]}}}}'.encode()


def full_bags(served: Served, count: int) -> list[str]:
    """Write every feature with as many ids as are allowed in so many bags."""
    hotness = MAX_IDS // (count * len(served.features))
    bag = json.dumps(list(range(10_000, 10_000 + hotness)), separators=(",", ":"))
    return [f'"{name}":[{",".join([bag] * count)}]' for name in served.features]


def full_lookup(served: Served, wrong: str = "") -> bytes:
    """Make a lookup of as many ids as are allowed in as many bags as are allowed; `wrong` is its last id."""
    text = ",".join(full_bags(served, MAX_FLOATS // DIM // len(served.features)))
    if wrong:
        text = text[: -len("]]")].rpartition(",")[0] + f",{wrong}]]"
    return ('{"sparse":{' + text + "}}").encode()


def full_rank(served: Served, wrong: str = "", candidates: int = 1000) -> bytes:
    """Make a rank request of as many ids as are allowed; `wrong` is the last float of its candidates."""
    row = json.dumps([0.5] * served.dense, separators=(",", ":"))
    last = row[:-1].rpartition(",")[0] + f",{wrong}]" if wrong else row
    dense = ",".join([*[row] * (candidates - 1), last])
    features = ",".join(full_bags(served, candidates))
    return f'{{"candidates":{{"sparse":{{{features}}},"dense":[{dense}]}}}}'.encode()


def full_answer(served: Served) -> bytes:
    """Make a small lookup with the largest answer that is allowed."""
    bags = ",".join(["7"] * (MAX_FLOATS // DIM // len(served.features)))
    return ('{"sparse":{' + ",".join(f'"{name}":[{bags}]' for name in served.features) + "}}").encode()


def _distinct_keys(served: Served) -> bytes:
    keys = ",".join(f'"f{number}":[1]' for number in range(served.json_bytes // 15))
    return ('{"sparse":{' + keys + "}}").encode()


def _long_data(served: Served) -> bytes:
    data = ",".join(["10000"] * MILLION)
    head = f'{{"inputs":[{{"name":"{served.features[0]}","shape":[1000,1000],"datatype":"INT64","data":['
    return f'{head}{data},"x"]}}]}}'.encode()


def _binary(tail_bytes: int = 8) -> Build:
    head = '{{"inputs":[{{"name":"{}","shape":[1,1],"datatype":"INT64","parameters":{{"binary_data_size":8}}}}]}}'
    return lambda served: head.format(served.features[0]).encode() + bytes(tail_bytes)


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


_LOOKUP, _TEXT = '{"sparse":{"FEATURE":[', '{"request_id":"'
_MANY_INPUTS = fixed('{"inputs":[', '{"name":"FEATURE"},', "{}]}")
_JSON: tuple[tuple[str, str, Build], ...] = (
    ("json-lookup-wrong-end", HTTP_LOOKUP, partial(full_lookup, wrong='"x"')),
    ("json-rank-wrong-end", HTTP_RANK, partial(full_rank, wrong='"x"')),
    ("json-open-lists", HTTP_RANK, fixed("", "[")),
    ("json-open-objects", HTTP_RANK, fixed("", '{"a":')),
    ("json-empty-lists", HTTP_LOOKUP, fixed(_LOOKUP + "[]", ",[]", "]}}")),
    ("json-spaces", HTTP_RANK, fixed("", " ")),
    ("json-commas", HTTP_RANK, fixed("[", ",")),
    ("json-zeros", HTTP_LOOKUP, fixed(_LOOKUP + "0", ",0", "]}}")),
    ("json-keys", HTTP_LOOKUP, _distinct_keys),
    ("json-one-key", HTTP_LOOKUP, fixed('{"sparse":{', '"FEATURE":[1],', '"FEATURE":[1]}}')),
    ("json-digits", HTTP_LOOKUP, id_written("9" * MILLION)),
    ("json-fraction", HTTP_LOOKUP, id_written("0." + "9" * MILLION)),
    ("json-exponent", HTTP_LOOKUP, id_written("1e" + "9" * MILLION)),
    ("json-escapes", HTTP_RANK, fixed(_TEXT, "\\u0041", '"}')),
    ("json-surrogates", HTTP_RANK, fixed(_TEXT, "\\ud800", '"}')),
    ("json-backslashes", HTTP_RANK, fixed(_TEXT, "\\\\", '"')),
    ("json-not-utf8", HTTP_RANK, fixed(_TEXT, "\xff", '"}', "latin-1")),
)
_INFER: tuple[tuple[str, Build, Headers, float], ...] = (
    ("oip-json-inputs", _MANY_INPUTS, BINARY, LARGEST_JSON_MS),
    ("oip-json-empty-inputs", fixed('{"inputs":[', "{},", "{}]}"), BINARY, LARGEST_JSON_MS),
    ("oip-json-data-wrong-end", _long_data, BINARY, LARGEST_JSON_MS),
    ("oip-header-beyond", _binary(), (*BINARY, (HEADER_LENGTH, "99999999")), MESSAGE_MS),
    ("oip-header-negative", _binary(), (*BINARY, (HEADER_LENGTH, "-1")), MESSAGE_MS),
    ("oip-header-digits", _binary(), (*BINARY, (HEADER_LENGTH, "9" * 5000)), MESSAGE_MS),
    ("oip-header-short", _binary(), (*BINARY, (HEADER_LENGTH, "5")), MESSAGE_MS),
    ("oip-header-all", _binary(LIMIT - 1000), (*BINARY, (HEADER_LENGTH, str(LIMIT - 1000))), LARGEST_JSON_MS),
    ("oip-gzip-bomb", lambda served: bomb(900), (*JSON, ("content-encoding", "gzip")), MESSAGE_MS),
    ("oip-deflate-bomb", lambda served: deflate_bomb(), (*JSON, ("content-encoding", "deflate")), MESSAGE_MS),
    (
        "oip-deflate-empty-blocks",
        lambda served: filled(EMPTY_BLOCKS, LIMIT, DEFLATE_HEAD),
        (*JSON, ("content-encoding", "deflate")),
        MESSAGE_MS,
    ),
    (
        "oip-gzip-inputs",
        lambda served: compressed(_MANY_INPUTS(served)),
        (("content-encoding", "gzip"),),
        LARGEST_JSON_MS,
    ),
)


SMALL_LOOKUP = id_written("1")


def lookup_head(served: Served, *lines: str) -> bytes:
    """Make the head of a lookup with these lines."""
    head = [f"POST /v1/models/{served.model}:lookup HTTP/1.1", *lines]
    return ("\r\n".join(head) + "\r\n\r\n").encode("latin-1")


def with_length(*lines: str, hosts: tuple[str, ...] = ("host: drill",)) -> Build:
    """Make a lookup of one id, with these lines in its head."""
    return lambda served: (
        lookup_head(served, *hosts, f"content-length: {len(SMALL_LOOKUP(served))}", *lines) + SMALL_LOOKUP(served)
    )


def chunked(coding: str = "chunked", tail: bytes = b"\r\n") -> Build:
    """Make a lookup of one id in one chunk."""

    def build(served: Served) -> bytes:
        body, head = SMALL_LOOKUP(served), lookup_head(served, "host: drill", f"transfer-encoding: {coding}")
        return head + b"%x\r\n%s\r\n0\r\n" % (len(body), body) + tail

    return build


def _long_head(served: Served) -> bytes:
    return lookup_head(served, "host: drill", *(f"x-{one}: {'y' * 1000}" for one in range(16_000)))


_TRAILERS = b"".join(b"x-%d: %s\r\n" % (one, b"y" * 1000) for one in range(100)) + b"\r\n"
# Requests whose head is what is wrong.
_HEADS: tuple[tuple[str, Build, str], ...] = (
    ("http1-gzip-chunked", chunked("gzip, chunked"), "12"),
    ("http1-trailers", chunked(tail=_TRAILERS), "12"),
    ("http1-no-host", with_length(hosts=()), "12"),
    ("http1-two-hosts", with_length("host: other"), "12"),
    ("http1-nul", with_length("x-request-id: a\0b"), "12"),
    # As request smuggling has them.
    ("http1-two-lengths", with_length("content-length: 1"), "own"),
    ("http1-length-and-chunks", with_length("transfer-encoding: chunked"), "own"),
    ("http1-long-head", _long_head, "own"),
)
# What Java's HttpClient asks beside its POST. It must be answered as if it had not.
_UPGRADE_H2C = with_length(
    *("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAA"),
    "content-type: application/json",
)


# Over gRPC


def tag(number: int, wire_type: int) -> bytes:
    """Return what stands before a field's value."""
    return encode_varint(number << 3 | wire_type)


def sized(number: int, *parts: bytes) -> bytes:
    """Return a field of bytes, text or a message, empty ones too."""
    body = b"".join(parts)
    return tag(number, SIZED) + encode_varint(len(body)) + body


def request(made: Build) -> Build:
    """Make a message of the model's name and what follows."""
    return lambda served: sized(1, served.model.encode()) + made(served)


def repeated(part: bytes, count: int = MANY) -> Build:
    """Make a message in which a field comes again and again."""
    return request(lambda served: part * count)


def entries(number: int) -> bytes:
    """Return a million entries of a map by text, each with a key of its own and an empty message."""
    head = tag(number, SIZED)[0]
    return b"".join(b"%c\x0b\x0a\x07%07x\x12\x00" % (head, one) for one in range(MILLION))


def input_of(made: Callable[[], bytes], datatype: bytes = b"INT64", after: Callable[[], bytes] = bytes) -> Build:
    """Make a ModelInferRequest with one input of the first feature."""
    return request(lambda served: sized(5, sized(1, served.features[0].encode()), sized(2, datatype), made()) + after())


def typed_input(count: int, contents: Callable[[], bytes], datatype: bytes = b"INT64") -> Build:
    """Make a ModelInferRequest with one input of the first feature, with a shape and typed contents."""
    return input_of(lambda: sized(3, encode_varint(count)) + sized(5, contents()), datatype)


def candidates_of(made: Callable[[], bytes]) -> Build:
    """Make a rank request with one feature of candidates."""
    return request(lambda served: sized(4, sized(1, sized(1, served.features[0].encode()), sized(2, made()))))


def packed_of(made: Callable[[], bytes]) -> Build:
    """Make a rank request with packed features."""
    return request(lambda served: sized(10, made()) + tag(5, VARINT) + b"\x05")


def lookup_of_rows(served: Served, rows: int = 1) -> bytes:
    """Make a valid lookup of one feature."""
    feature = sized(1, (7).to_bytes(8, "little") * rows)
    return sized(1, served.model.encode()) + sized(3, sized(1, served.features[0].encode()), sized(2, feature))


def _unknown_groups(served: Served) -> bytes:
    depth = MANY - 100
    return tag(15, GROUP) * depth + tag(15, END_GROUP) * depth


def _nested(served: Served) -> bytes:
    heads, size = list[bytes](), 0
    for _ in range(20_000):
        heads.append(tag(5, SIZED) + encode_varint(size))
        size += len(heads[-1])
    return b"".join(reversed(heads))


def _one_feature(served: Served) -> bytes:
    return sized(3, sized(1, served.features[0].encode()), sized(2)) * (MILLION // 2)


def half_message(served: Served) -> bytes:
    """Make half of a message of zeros, with its prefix."""
    return struct.pack(">BI", 0, LIMIT) + bytes(LIMIT // 2)


_BYTES_RAW = input_of(lambda: sized(3, encode_varint(4_000_000)), b"BYTES", after=lambda: sized(7, bytes(BOMB_BYTES)))
_GRPC: tuple[tuple[str, str, Build, str], ...] = (
    ("grpc-outputs", GRPC_INFER, repeated(sized(6)), "1"),
    ("grpc-outputs-800k", GRPC_INFER, repeated(sized(6), MANY // 10), "1"),
    ("grpc-inputs", GRPC_INFER, repeated(sized(5)), "1"),
    ("grpc-raw-contents", GRPC_INFER, repeated(sized(7)), "1"),
    ("grpc-parameters-one-key", GRPC_INFER, repeated(sized(4)), "1"),
    ("grpc-parameters", GRPC_INFER, request(lambda served: entries(4)), "1"),
    ("grpc-input-parameters", GRPC_INFER, input_of(lambda: entries(4)), "1"),
    ("grpc-int64-contents", GRPC_INFER, typed_input(BOMB_BYTES, lambda: sized(3, bytes(BOMB_BYTES))), "2"),
    ("grpc-int64-unpacked", GRPC_INFER, typed_input(MANY, lambda: (tag(3, VARINT) + b"\0") * (MANY - 100)), "2"),
    ("grpc-shape-dims", GRPC_INFER, input_of(lambda: sized(3, bytes(BOMB_BYTES))), "5"),
    ("grpc-bytes-contents", GRPC_INFER, typed_input(MANY, lambda: sized(8) * (MANY - 100), b"BYTES"), "own"),
    ("grpc-bytes-raw", GRPC_INFER, _BYTES_RAW, "own"),
    ("grpc-lookup-features", GRPC_LOOKUP, request(lambda served: entries(3)), "5"),
    ("grpc-lookup-one-feature", GRPC_LOOKUP, request(_one_feature), "own"),
    ("grpc-rank-features", GRPC_RANK, request(lambda served: sized(4, entries(1))), "5"),
    ("grpc-rank-parts", GRPC_RANK, repeated(sized(4)), "own"),
    ("grpc-ids-unpacked", GRPC_RANK, candidates_of(lambda: (tag(1, FIXED64) + bytes(8)) * MILLION), "own"),
    ("grpc-ids-chunks", GRPC_RANK, candidates_of(lambda: sized(1) * (MANY - 100)), "own"),
    ("grpc-lengths", GRPC_RANK, candidates_of(lambda: sized(2, bytes(BOMB_BYTES))), "own"),
    ("grpc-string-ids", GRPC_RANK, candidates_of(lambda: sized(4) * (MANY - 100)), "own"),
    ("grpc-packed-string-ids", GRPC_RANK, packed_of(lambda: sized(7) * (MANY - 100)), "own"),
    ("grpc-packed-zeros", GRPC_RANK, packed_of(lambda: sized(2, bytes(7_900_000)) + sized(3, bytes(7_900_000))), "own"),
    ("grpc-unknown-fields", GRPC_RANK, repeated(tag(100, VARINT) + b"\0", 5_300_000), "own"),
    ("grpc-unknown-empty", GRPC_INFER, repeated(sized(15)), "own"),
    ("grpc-unknown-groups", GRPC_RANK, request(_unknown_groups), "own"),
    ("grpc-nested", GRPC_INFER, request(_nested), "own"),
    ("grpc-long-text", GRPC_INFER, lambda served: sized(1, b"m" * 15_000_000 + b"\xff"), "own"),
)
# What says that it is compressed already.
_AS_GZIP: tuple[tuple[str, Build], ...] = (
    ("grpc-gzip-bomb", lambda served: bomb(900)),
    ("grpc-gzip-cut", lambda served: bomb(1)[:-100]),
    ("grpc-gzip-garbage", lambda served: b"\x1f\x8b" + bytes(1 << 20)),
)
_BAD_HEADERS = (
    ("nul", "x-request-id", "a\0b"),
    ("lf", "x-request-id", "a\nb: c"),
    ("cr", "x-request-id", "a\rb"),
    ("upper-case", "X-Request-Id", "a"),
)


def _catalogue() -> Iterator[HostileMessage]:
    for name, path, build, row in _GRPC:
        # The last entry of a key is the one that counts, so this one is valid.
        outcome: Outcome = "any" if name == "grpc-lookup-one-feature" else "refused"
        yield HostileMessage(name, path, build, row, outcome=outcome)
    for name, build in _AS_GZIP:
        yield HostileMessage(name, GRPC_INFER, build, form="as gzip")
    for name, path, build in _JSON:
        row = "7" if name.endswith("-wrong-end") else "own"
        yield HostileMessage(name, path, build, row, "post", JSON, limit_ms=LARGEST_JSON_MS)
    for name, build, headers, limit_ms in _INFER:
        # Decompressing these costs more than a connection may cost that completes nothing.
        outcome = "ended" if name == "oip-deflate-empty-blocks" else "refused"
        yield HostileMessage(name, HTTP_INFER, build, "own", "post", headers, outcome, limit_ms)
    # The largest that is allowed: answered, or refused by a limit that a deployment has lowered.
    yield HostileMessage("json-lookup-full", HTTP_LOOKUP, full_lookup, "own", "post", JSON, "any", LARGEST_JSON_MS)
    yield HostileMessage("json-rank-full", HTTP_RANK, full_rank, "own", "post", JSON, "any", LARGEST_JSON_MS)
    for version in ("v1", "v1alpha"):
        path = REFLECTION.format(version)
        yield HostileMessage(
            f"grpc-reflection-{version}", path, lambda served: h2.message(sized(7)), "15", "framed", (), "served"
        )
    for name, *header in _BAD_HEADERS:
        yield HostileMessage(f"h2-header-{name}", GRPC_LOOKUP, lookup_of_rows, "12", "plain", ((header[0], header[1]),))
    for name, build, row in _HEADS:
        yield HostileMessage(name, HTTP_LOOKUP, build, row, "raw")
    yield HostileMessage("http1-upgrade-h2c", HTTP_LOOKUP, _UPGRADE_H2C, "14", "raw", outcome="served")


MESSAGES: dict[str, HostileMessage] = {one.name: one for one in _catalogue()}
"""All by name."""
