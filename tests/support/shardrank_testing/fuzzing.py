"""Decoders of bytes from outside, as functions of bytes that a fuzzer calls, and valid messages for it to begin with.

The first byte of many chooses what the others are, or in what pieces they come. Digests are made right first, as a
forger would.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import os
import random
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, TypeVar

import hpack
import numpy as np
from pydantic import ValidationError

from loader.access_counts import AccessCounts
from loader.deltas import batch, chain
from loader.errors import DeltaError, RegistryRecordError, ShardrankError, SnapshotError, TraceError
from loader.registry import fleet
from loader.rollout.plan import Rollout
from loader.snapshot.manifest import parse_manifest
from loader.snapshot.reader import Snapshot
from loader.snapshot.tensor_files import read_header
from loader.snapshot.vocabularies_and_counts import check_vocabulary_ids
from loader.traces import read_traces
from router.errors import PlanError
from router.plan_file import PlanFile, RanksOfBuckets, TablePlan
from serving.api.bodies import expand, read_json
from serving.api.grpc import wire as h2
from serving.api.grpc.calls import OK_TRAILERS, RESPONSE_HEAD, CallHead, GrpcCall, GrpcMethod, GrpcMethods, read_head
from serving.api.grpc.connection import Connection, Stream
from serving.client import features, transports
from serving.errors import InvalidRequestError
from serving.formats.infer import InferGrpcCodec, InferHttpCodec
from serving.formats.json_reader import JsonCodec
from serving.formats.messages import MessageCodec, encode_lookup, encode_rank
from serving.formats.requests import Codec
from serving.limits import RequestLimits
from serving.proto.shardrank.v1 import ranking_pb2
from serving.results import LookupResult, Ragged, RankResult
from shard_node.answer import Answer
from shard_node.byte_budget import ByteAccount, ByteBudget
from shard_node.errors import WireError
from shard_node.tracing import SpanContext
from shard_node.training.push import Push
from shard_node.wire import messages as wire
from shard_node.wire.frame import Frame, FrameReceiver, FrameType
from shard_node.wire.requests import Peer, RequestHandler, ServerLimits
from shardrank_testing.bags import bags_of
from shardrank_testing.deltas import all_divisions, delta_spec, make_batch
from shardrank_testing.http2_peer import END, LIMITS, data, prefixed
from shardrank_testing.http_wire import Served, chunked, message_bytes, post, statuses
from shardrank_testing.inference_requests import binary_body, json_body, message_of, tensors_of
from shardrank_testing.nodes import feed, small_node
from shardrank_testing.parsing import MODEL, SCHEMA, SPEC, parse
from shardrank_testing.serving_api import api_request, packed_message, rank_message, write_api_model
from shardrank_testing.snapshots import random_golden

T = TypeVar("T")
Read = Callable[[bytes], object]
WORDS = [b"\r\n", *b'[[ {" \\ud800 1e999 null -1 \xff'.split(), b"9" * 30, b"[" * 3000, b"\x91" * 3000]
NUMBERS = (0, 1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
MAX_SECONDS, MAX_KIB = 0.05, 64 << 10


@dataclass(frozen=True)
class Target:
    """A decoder: what it may raise, and valid messages."""

    read: Read
    refusals: tuple[type[ShardrankError], ...]
    seeds: Callable[[], Sequence[bytes]]

    def check(self, content: bytes) -> None:
        """Raise whatever is no refusal."""
        with contextlib.suppress(*self.refusals):
            self.read(content)

    def check_costs(self, content: bytes) -> None:
        """Raise AssertionError, too, for an input that takes 50 ms of CPU three times, or 64 MiB."""
        before, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, list[float]()
        while len(seconds) < 3 and (not seconds or seconds[-1] > MAX_SECONDS):
            started_at = time.thread_time()
            self.check(content)
            seconds.append(time.thread_time() - started_at)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert (min(seconds) <= MAX_SECONDS, grown <= MAX_KIB) == (True, True), f"{seconds} s, {grown} KiB"


TARGETS: dict[str, Target] = {}


def target(seeds: Callable[[], Sequence[bytes]], *refusals: type[ShardrankError]) -> Callable[[Read], Read]:
    def add(read: Read) -> Read:
        TARGETS[read.__name__] = Target(read, refusals, cache(seeds))
        return read

    return add


def mutated(seeds: Sequence[bytes], drawn: random.Random) -> bytes:
    """A message with one to five changes: bytes, numbers, words, pieces left out, doubled, or of another message."""
    content = bytearray(drawn.choice(seeds))
    for _ in range(drawn.randint(1, 5)):
        at, size, other = drawn.randrange(len(content) + 1), drawn.choice((1, 2, 4, 8, 40)), drawn.choice(seeds)
        number = drawn.choice(NUMBERS).to_bytes(8, drawn.choice(("little", "big")))
        pieces = b"", drawn.randbytes(size), number[:size], number[-size:], drawn.choice(WORDS)
        piece = drawn.choice((*pieces, other[drawn.randrange(len(other) + 1) :][:size]))
        content[at : at + drawn.choice((0, len(piece), size))] = piece
    return bytes(content)


def numbered(contents: Iterable[bytes]) -> list[bytes]:
    return [bytes([number]) + content for number, content in enumerate(contents)]


def chosen(content: bytes, choices: Sequence[T]) -> tuple[T, bytes]:
    """What the first byte chooses, and the others."""
    return choices[content[0] % len(choices) if content else 0], content[1:]


def in_pieces(contents: Iterable[bytes], size: int = 0) -> list[bytes]:
    return [bytes([size]) + content for content in contents]


def pieces_of(content: bytes) -> list[bytes]:
    """The bytes after the first, in pieces of as many as that says; 0 for one piece."""
    step = (content[0] if content else 0) or max(1, len(content))
    return [content[at : at + step] for at in range(1, len(content), step)]


def nothing(*_: Any) -> None:
    """Stand for what nobody counts."""


FOLDER = TemporaryDirectory(dir=os.environ.get("TMPDIR", "/dev/shm"))


@cache
def run() -> Callable[..., Any]:
    return asyncio.new_event_loop().run_until_complete


# The wire between routers and shard nodes.


@cache
def node() -> tuple[RequestHandler, Peer]:
    limits = ServerLimits(max_inline_bytes=1 << 20, max_frame_bytes=1 << 20)
    peer = Peer(ByteAccount(ByteBudget(1 << 30), nothing), lambda: True)
    return RequestHandler(small_node(), limits, time.monotonic), peer


def check_answer(buffers: Sequence[Any]) -> None:
    assert b"the node failed" not in b"".join(buffers)


DECODERS: dict[int, Callable[[Frame], object]] = {
    FrameType.POOL: wire.decode_pool,
    FrameType.POOLED: wire.decode_answer,
    FrameType.STORED: wire.decode_answer,
    FrameType.INFO_ANSWER: wire.decode_info_answer,
    FrameType.ERROR: wire.decode_error,
    FrameType.COUNTS: wire.decode_counts,
    FrameType.COUNTS_ANSWER: wire.decode_counts_answer,
    FrameType.PUSH: wire.decode_push,
    FrameType.PUSHED: wire.decode_pushed,
}


@cache
def frames() -> dict[int, bytes]:
    """A valid frame of each type that has a body."""
    bags, trace = bags_of({1: [[1, 2], [], [3]]}, [0.5, 1, 2]), SpanContext(5, 7, "a=b")
    sums, rows = [np.ones((3, 5), np.float32), np.zeros((0, 8), np.float16)], [np.ones((4, 9), np.uint8)]
    sent = {
        FrameType.POOL: wire.encode_pool(1, 9, "films", 7, bags, trace=trace),
        FrameType.POOLED: wire.encode_answer(1, Answer(sums, sequence=5), 2),
        FrameType.STORED: wire.encode_answer(1, Answer(sums[:1], rows)),
        FrameType.INFO_ANSWER: wire.encode_info_answer(1, small_node().info()),
        FrameType.ERROR: wire.encode_error(1, WireError("row")),
        FrameType.COUNTS: wire.encode_counts(1, 0, "films", 7),
        FrameType.COUNTS_ANSWER: wire.encode_counts_answer(1, {"film": AccessCounts.from_rows(np.arange(5))}),
        FrameType.PUSH: wire.encode_push(1, 9, "films", 7, Push(3, 5, {0: (np.arange(2), sums[0][:2])})),
        FrameType.PUSHED: wire.encode_pushed(1, 7),
    }
    return {kind: b"".join(buffers) for kind, buffers in sent.items()}


@target(lambda: in_pieces(frames().values(), 90), WireError)
def shard_wire(content: bytes) -> None:
    handler, peer = node()
    for frame in feed(FrameReceiver(1 << 20), content[1:], map(len, pieces_of(content))):
        if frame.header.frame_type in (FrameType.POOL, FrameType.INFO):
            handler.handle(frame, None, check_answer, peer)
        else:
            DECODERS.get(frame.header.frame_type, wire.decode_error)(frame)


# HTTP/2, gRPC and HTTP/1.


def http2_frames() -> list[bytes]:
    call = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a/B"), (b"content-type", b"application/grpc")]
    block = hpack.Encoder().encode([*call, (b"grpc-timeout", b"5S")])
    begin = h2.PREFACE + h2.settings({}) + h2.frame(h2.HEADERS, h2.END_HEADERS, 1, block)
    more = [
        h2.settings({1: 0, 4: 100, 5: 20_000}) + data(1, b"", END) + h2.window_update(0, 5) + h2.window_update(1, 250),
        h2.rst_stream(1, h2.ErrorCode.CANCEL) + h2.frame(h2.PING, 0, 0, bytes(8)) + h2.goaway(0, h2.ErrorCode.NO_ERROR),
        h2.frame(h2.DATA, h2.PADDED, 1, b"\x03abc" + bytes(3)) + data(1, b"more", END),
        h2.frame(h2.HEADERS, END, 3, block[:9]) + h2.frame(h2.CONTINUATION, h2.END_HEADERS, 3, block[9:]),
    ]
    return in_pieces([begin + frames for frames in more], 40)


def http2_events(pieces: Sequence[bytes]) -> tuple[Any, ...]:
    """What a connection does that answers each request: its streams, their data and events, and what it sends."""
    events, received = list[tuple[Any, ...]](), dict[int, bytes]()
    connection = Connection(LIMITS, lambda: 0.0)

    def open_stream(stream_id: int, request: h2.HeaderList) -> Stream:
        def on_data(data: memoryview) -> None:
            received[stream_id] = received.get(stream_id, b"") + data

        def on_end() -> None:
            connection.send(stream_id, RESPONSE_HEAD, bytes(300), OK_TRAILERS)

        events.append((stream_id, read_head(request, LIMITS.max_header_bytes)))
        stream: Any = Stream()
        stream.on_data, stream.on_end = on_data, on_end
        stream.on_drained, stream.on_dropped = (partial(events.append, (stream_id, kind)) for kind in (True, False))
        return stream

    connection.open_stream = open_stream  # type: ignore[method-assign]
    for piece in pieces:
        connection.feed(piece)
        connection.read()
    assert connection.failure is None or not connection.streams
    return str(events), received, connection.outgoing(), connection.phase, list(connection.streams)


@target(http2_frames)
def http2(content: bytes) -> None:
    """However the bytes are cut, nothing is raised, and streams and answers are the same."""
    assert http2_events(pieces_of(content)) == http2_events([content[1:]])


def grpc_calls() -> list[bytes]:
    contents = prefixed(b"abc") * 2, prefixed(gzip.compress(b"abc", mtime=0), 1), prefixed(b"")
    return numbered(in_pieces(contents, 9))


@target(grpc_calls, ShardrankError)
def grpc_messages(content: bytes) -> None:
    coding, content = chosen(content, ("identity", "gzip", "snappy"))
    connection: Any = SimpleNamespace(account=ByteAccount(ByteBudget(1 << 20), nothing), clock=time.monotonic)
    connection.grant = connection.spent = connection.is_iteration_used = nothing
    methods = GrpcMethods({b"/a": GrpcMethod(nothing, 1 << 16, is_streamed=True)}, 1.0, asyncio.Semaphore(2))
    call = GrpcCall(connection, 1, CallHead(b"/a", coding=coding), methods)
    for piece in pieces_of(content):
        call.on_data(memoryview(piece))
    call.has_all = True
    call.on_end()

    async def read() -> list[Any]:
        return [message async for message in call.messages()]

    run()(read())


@target(
    lambda: numbered([gzip.compress(bytes(900), mtime=0), b'{"a": ["b", "\\u1234"], "c": []}']), InvalidRequestError
)
def bodies(content: bytes) -> None:
    """A body that is compressed, or a small one of JSON."""
    is_json, body = chosen(content, (False, True))

    async def receive() -> dict[str, bytes | str]:
        return {"type": "http.request", "body": body}

    if is_json:
        run()(read_json(receive, "limit", 1 << 16, dict[str, list[str]], "be an object"))
    else:
        run()(expand(body, 1 << 20, message_bytes(), nothing, asyncio.Semaphore(2)))


@cache
def served() -> Served:
    return Served(RequestLimits(max_header_bytes=4096, max_body_bytes=100_000, max_idle_work_ms=0))


def http1_requests() -> list[bytes]:
    requests = [post(b"abc", "expect: 100-continue"), chunked([b"abc", b"d" * 50], b";a=b", b"x: y\r\n")]
    requests.append(b"GET /a%20b?c=d HTTP/1.1\r\nhost: [::1]:80\r\nupgrade: h2c\r\n\r\n")
    return in_pieces([*requests, b"".join(requests)], 60)


@target(http1_requests)
def http1(content: bytes) -> None:
    if pieces := pieces_of(content):
        wire = run()(served().converse(pieces))
        assert set(statuses(wire.sent)) <= {100, 200, 400, 405, 413, 431}, wire.sent
        assert (served().tasks, served().buffers.buffered) == (set(), 0), "a task or bytes are left"


# Requests to rank and to look up, and responses.

REQUEST = api_request(1, 2)
TENSORS = tensors_of(SPEC, REQUEST)
INFER_BODY, INFER_HEADERS = binary_body(TENSORS, parameters={"top_k": 1}, outputs=[{"name": "scores"}])
LENGTHS = (None, *INFER_HEADERS.values(), "40")
CODECS: dict[str, Sequence[Codec]] = {
    "json_requests": (JsonCodec("rank", MODEL), JsonCodec("lookup", MODEL)),
    "protobuf_requests": (MessageCodec("rank"), MessageCodec("lookup"), MessageCodec("rank")),
    "infer_http": [InferHttpCodec(model=MODEL, header_length=length) for length in LENGTHS],
    "infer_grpc": (InferGrpcCodec(), InferGrpcCodec()),
}


@cache
def requests() -> dict[str, list[bytes]]:
    """Requests for each codec."""
    lookup = {"sparse": {"film": [1, 2], "tag": [[3], []]}, "weights": {"tag": [[0.5], []]}, "version": 1}
    message = ranking_pb2.LookupRequest(model=MODEL, version=1, max_age_ms=7)
    message.sparse["city"].string_ids.extend(["Oslo"])
    messages = rank_message(REQUEST), message, packed_message(SCHEMA, REQUEST)
    infer = message_of(TENSORS, MODEL), message_of(TENSORS, MODEL, raw=False)
    return {
        "json_requests": [json.dumps(text).encode() for text in (REQUEST | {"routing_key": "é"}, lookup)],
        "protobuf_requests": [message.SerializeToString() for message in messages],
        "infer_http": [json_body(TENSORS, id="a"), INFER_BODY],
        "infer_grpc": [message.SerializeToString() for message in infer],
    }


def parse_request(codecs: Sequence[Codec], content: bytes) -> None:
    codec, body = chosen(content, codecs)
    parse(SCHEMA, codec, body)


for name, codecs in CODECS.items():
    seeds = cache(lambda name=name: numbered(requests()[name]))
    TARGETS[name] = Target(partial(parse_request, codecs), (InvalidRequestError,), seeds)


def http_refusal(content: bytes) -> None:
    retry_after, _, body = content.partition(b"\n")
    raise transports.http_error(503, body, retry_after.decode("latin-1"))


def described(content: bytes) -> None:
    features.Layout(features.read_message(ranking_pb2.GetModelResponse, transports._described(content)))


def responses() -> list[bytes]:
    scores, rows = np.array([0.5, 0.25], np.float32), np.ones((2, 4), np.float32)
    described = {"model": MODEL, "version": 1, "schema_digest": "d", "limits": {"max_candidates": 7, "x": "y"}}
    described["features"] = [{"name": "film", "side": "candidate", "id_type": "integer", "weighted": True}]
    error = {"error": {"kind": "overloaded", "message": "field: m", "field": "f"}}
    ranked = encode_rank(RankResult(MODEL, 1, scores, np.arange(2), "id", 3, {"click": scores}, 5, 7))
    looked_up = encode_lookup(LookupResult(MODEL, 1, {"film": rows, "x": Ragged(rows, np.array([0, 2]))}, "id", 5, 7))
    return numbered([ranked, looked_up, json.dumps(described).encode(), b"3\n" + json.dumps(error).encode()])


@target(responses, ShardrankError)
def client_responses(content: bytes) -> None:
    read, response = chosen(content, (features.read_rank, features.read_lookup, described, http_refusal))
    read(response)


# Row updates, and what a registry has.

TABLES = {spec.name: spec for spec in delta_spec().tables}
DELTAS = [
    make_batch(delta_spec(), name, 7, [3, 200], np.ones((2, spec.embedding_dim))) for name, spec in TABLES.items()
]


@target(lambda: [delta.encode()[24:] for delta in DELTAS], DeltaError)
def deltas(content: bytes) -> None:
    """What is behind a delta's digest."""
    delta = batch.DeltaBatch.decode(batch.MAGIC + batch.digest_of(content) + content)
    delta.check_table(TABLES.get(delta.table, TABLES["int8"]))


def commits() -> list[bytes]:
    tail = chain.Tail(4, b"p" * chain.DIGEST_BYTES)
    written = [
        chain.encode_commit(delta, chain.partitions_of(TABLES[delta.table], delta.rows), tail, 3) for delta in DELTAS
    ]
    return [len(commit[24:]).to_bytes(2, "little") + commit[24:] + rows for commit, rows, _ in written]


@target(commits, DeltaError)
def delta_commits(content: bytes) -> None:
    """A commit without its digest, after its length, and the parts beside it."""
    end = 2 + int.from_bytes(content[:2], "little")
    text, rows = content[2:end], bytearray(content[end:])
    commit = chain.Commit.decode(chain.MAGIC + batch.digest_of(text) + text)
    ends = np.cumsum(commit.part_bytes, dtype=np.int64).tolist()
    for begin, end in zip([0, *ends], ends, strict=False):
        if begin + chain.DIGEST_BYTES <= end <= len(rows):
            rows[begin : begin + chain.DIGEST_BYTES] = batch.digest_of(bytes(rows[begin + chain.DIGEST_BYTES : end]))
    partitions = np.arange(chain.NUM_PARTITIONS) % (1 + len(rows) % 3) == 0
    pieces = [bytes(rows[begin:end]) for begin, end in commit.ranges(partitions)]
    commit.decode_parts(partitions, pieces, {0: bytes(chain.DIGEST_BYTES)})


VERSION: dict[str, Any] = {"model": "m", "version": 3, "published_at": 1.5}
REPORT = fleet.VersionReport(model="m", version=3, state="ready", stats=fleet.VersionStats(latency_counts=(1,)))
ROLLOUT: dict[str, Any] = {"model": "m", "epoch": 1, "rollout_id": "0" * 32, "from_version": None, "to_version": 3}
ROLLOUT |= {"delta_base": 3, "last_delta": 0}
RECORDS = (
    fleet.FleetRecord(num_shards=2, sharding="hash", replicate_bytes=0),
    fleet.PublishedVersion(**VERSION, identity="i", delta_base=3, last_delta=0, rows_bytes=9),
    fleet.DenseStep(**VERSION, step=1, sequence=0, sha256="s", size_bytes=1, max_drift=0.1),
    fleet.WantedModel(model="m", epoch=1, live=3, hold=(3, 4), node_hold={"n": (3,)}, num_shards={3: 2}),
    fleet.NodeRecord(node_id="n", kind="shard", process_id=1, address="a:1", versions=(REPORT,)),
    Rollout(**ROLLOUT, steps=("stage_shards",), state="running", started_at=1.5, step_began_at=1.5),
    SPEC,
)


@target(lambda: numbered(record.model_dump_json().encode() for record in RECORDS), RegistryRecordError)
def registry_records(content: bytes) -> None:
    record, text = chosen(content, RECORDS)
    fleet.parse_record("key", text, type(record)).model_dump_json()


# Files: traces, snapshots, plans.


def traces() -> list[bytes]:
    arrays = np.array([7, 3, 2**62]), np.array([1, 2], ">u2"), np.array([1], object)
    files = [io.BytesIO() for _ in arrays]
    for file, array in zip(files, arrays, strict=True):
        np.save(file, array)
    texts = b"label,item,shop\n0,7,a1\n1,,\n", b'"item"\r\n-1\r\n"5"\r\n'
    return [*(b"\0" + file.getvalue() for file in files), *(b"\1" + text for text in texts)]


@target(traces, TraceError)
def id_traces(content: bytes) -> None:
    suffix, content = chosen(content, ("npy", "csv"))
    path = Path(FOLDER.name) / f"trace.{suffix}"
    path.write_bytes(content)
    read_traces([str(path) if suffix == "csv" else f"item={path}"], {"item", "shop"}, {"item"})


@cache
def snapshots() -> list[tuple[Snapshot, str]]:
    """Small files of two snapshots that have one of everything, each with its snapshot."""
    plain = write_api_model(Path(FOLDER.name), golden=random_golden(SPEC, 1, 2))
    opened = Snapshot.open(plain.path), all_divisions(0).export(Path(FOLDER.name))
    return [(found, file.path) for found in opened for file in found.manifest.files() if file.size_bytes < 8192]


@target(lambda: [(snapshots()[0][0].path / "manifest.json").read_bytes()], SnapshotError)
def manifests(content: bytes) -> None:
    parse_manifest("manifest", content)


@target(lambda: numbered((found.path / path).read_bytes() for found, path in snapshots()), SnapshotError)
def snapshot_files(content: bytes) -> None:
    """A file whose size and checksum the manifest states."""
    (opened, path), content = chosen(content, snapshots())
    at, manifest = opened.path / path, opened.manifest
    at.write_bytes(content)
    forged = Snapshot(opened.path, manifest, opened.identity, {**opened._headers, path: read_header(at)})
    forged._check_headers()
    for table in manifest.tables:
        if table.vocabulary is not None and table.vocabulary.path == path:
            check_vocabulary_ids(at, forged.vocabulary(table.table))
            forged.vocabulary_strings(table.table)
        if table.row_classes is not None and table.row_classes.path == path:
            forged.row_classes(table.table)
    if path == manifest.dense.path:
        forged.dense_tensors()
    elif manifest.golden is not None and path == manifest.golden.file.path:
        forged.golden()


def plan() -> bytes:
    owners = {"data_parallel": RanksOfBuckets(ranks=(0, 1)), "row_wise": RanksOfBuckets.of(np.arange(256) % 2)}
    shape: dict[str, Any] = {"num_embeddings": 300, "bucketing": "range"}
    tables = [TablePlan(table=kind, sharding_type=kind, slices=(owner,), **shape) for kind, owner in owners.items()]
    return PlanFile.of("m", 2, 1, tables).to_json().encode()


@target(lambda: [plan()], PlanError)
def plans(content: bytes) -> None:
    with contextlib.suppress(ValidationError):
        changed = PlanFile.model_validate_json(content, strict=True)
        content = changed.model_copy(update={"digest": changed.content_digest}).to_json().encode()
    PlanFile.parse("plan", content)
