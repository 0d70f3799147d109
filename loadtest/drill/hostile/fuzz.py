"""Mutated requests of one kind: mutations of valid ones, the same for the same seed, and the connections they go over.

`python -m loadtest.drill.hostile.fuzz CONFIG` with a file that holds a `FuzzConfig` as JSON sends them, in a process of
its own. Its one line on stdout is a `FuzzTally`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import re
import struct
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import uvloop
from pydantic import BaseModel, Field

from loader.snapshot.tables import Frozen
from loadtest.drill.hostile import messages
from loadtest.drill.hostile.attacker import AttackConfig, Attacker, EndedError, Responses
from loadtest.drill.hostile.messages import post
from loadtest.drill.hostile.peer import Http2Peer, call_headers, message
from loadtest.drill.processes import module_config
from loadtest.workloads.catalog import BenchShape, bench_workload
from loadtest.workloads.payloads import Api, Payloads
from loadtest.workloads.workload import SyntheticWorkload
from serving.api.grpc.wire import DEFAULT_FRAME_SIZE, END_HEADERS, END_STREAM, HEADERS, PING, frame
from shard_node.wire.frame import HEADER, FrameType
from shard_node.wire.messages import encode_info, encode_pool

Surface: TypeAlias = Literal["json", "oip-http", "grpc", "http1-bytes", "http2-bytes", "wire", "wire-bytes"]
# Of all mutations. Those that cost a connection each are fewer.
SHARES: dict[Surface, float] = {
    "json": 0.35,
    "oip-http": 0.2,
    "grpc": 0.3,
    "http1-bytes": 0.04,
    "http2-bytes": 0.06,
    "wire": 0.04,
    "wire-bytes": 0.01,
}
CONNECTIONS: dict[Surface, int] = {"http1-bytes": 64, "http2-bytes": 32, "wire-bytes": 64}
CORPUS = 12
ANSWER_S, RAW_ANSWER_S = 10.0, 0.25
MAX_REFUSED = 3000
MAX_EXAMPLES = 5
POOLED_TABLE = 0
BODIES_EACH, CALLS_EACH, RAW_CALLS_EACH, FRAMES_EACH = 16, 32, 4, 16
LAST_GET = b"GET /healthz HTTP/1.1\r\nhost: drill\r\nconnection: close\r\n\r\n"
LAST_ID = 2**63
MAX_REQUEST_BYTES = 30_000
_WIRE_STATUS = struct.Struct("<H")
# A deadline that passed, and what a busy server sheds.
_ALLOWED = frozenset({"HTTP 503", "HTTP 504", "wire 503", "wire 504"})
_BLAMES = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS"})

# What lengths and numbers become: the edges of one, two, four and eight bytes, and a little beyond.
EDGES = tuple(
    sorted({value for bits in (7, 8, 15, 16, 24, 31, 32, 63, 64) for value in (2**bits - 1, 2**bits)} | {0, 1})
)
_DIGITS = re.compile(rb"\d+")
Mutation = Callable[[random.Random, bytes, int, Sequence[bytes]], tuple[int, int, bytes]]
"""Takes a request, a place in it and the corpus; gives a range of the request, and what stands there instead."""


def lie(rng: random.Random, data: bytes, at: int, corpus: Sequence[bytes]) -> tuple[int, int, bytes]:
    """Replace one, two, four or eight bytes, which may be a length, by an edge value."""
    size = rng.choice((1, 2, 4, 8))
    value = rng.choice(EDGES) & (1 << 8 * size) - 1
    return at, at + size, value.to_bytes(size, rng.choice(("little", "big")))


def lie_in_text(rng: random.Random, data: bytes, at: int, corpus: Sequence[bytes]) -> tuple[int, int, bytes]:
    """Replace the next number in digits by an edge value, negative at times."""
    if (found := _DIGITS.search(data, at)) is None:
        return at, at, b""
    return *found.span(), rng.choice((b"%d", b"-%d", b"%d.5", b"%de9")) % rng.choice(EDGES)


MUTATIONS: Mapping[str, Mutation] = {
    "flip up to four bits": lambda rng, data, at, corpus: (at, at + 4, _flipped(rng, data[at : at + 4])),
    "insert": lambda rng, data, at, corpus: (place := at + rng.randint(0, 1), place, rng.randbytes(rng.randint(1, 16))),
    "delete": lambda rng, data, at, corpus: (at, at + rng.randint(1, max(1, len(data) // 8)), b""),
    "repeat": lambda rng, data, at, corpus: (at, at, data[at : at + rng.randint(1, 64)] * rng.randint(1, 4)),
    "go on as another": lambda rng, data, at, corpus: (at, len(data), _end(rng, rng.choice(corpus))),
    "end early": lambda rng, data, at, corpus: (at, len(data), b""),
    "lie": lie,
    "lie in a varint": lambda rng, data, at, corpus: (
        at,
        at + 1,
        b"\xff" * rng.randint(1, 10) + rng.choice((b"\x01", b"\x7f", b"\x00")),
    ),
    "lie in text": lie_in_text,
}
_MUTATIONS = tuple(MUTATIONS.values())


def _flipped(rng: random.Random, data: bytes) -> bytes:
    bits = sum({1 << rng.randrange(8 * len(data)) for _ in range(rng.randint(1, 4))})
    return (int.from_bytes(data, "big") ^ bits).to_bytes(len(data), "big")


def _end(rng: random.Random, other: bytes) -> bytes:
    return other[rng.randrange(len(other)) :]


class Mutator:
    """Draws mutated requests without end, from valid ones; `keep` bytes at the begin of each stay as they are."""

    def __init__(self, seed: str, corpus: Sequence[bytes], keep: int = 0) -> None:
        self._random = random.Random(seed)
        self._corpus = corpus
        self._keep = keep

    def next(self) -> bytes:
        """One more: one to three mutations of one of them."""
        rng = self._random
        whole = rng.choice(self._corpus)
        data = whole[self._keep :]
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if data:
                first, end, instead = rng.choice(_MUTATIONS)(rng, data, rng.randrange(len(data)), self._corpus)
                data = data[:first] + instead + data[end:]
        return whole[: self._keep] + data


def blames_server(answer: str) -> bool:
    """Whether an answer says that the fault is the server's, which no client's mistake may come to."""
    if answer.startswith(("HTTP 5", "wire 5")):
        return answer not in _ALLOWED
    return answer in _BLAMES or answer.startswith("grpc ")


class Channel:
    """One connection's worth of mutated requests: a batch of bytes out, answers in. No I/O.

    Attributes:
        done: whether all answers to the batch are here, and another batch may follow.
        over: whether nothing more is to come and the connection is to be closed.
        peer: what must be known of a connection over HTTP/2.
    """

    def __init__(self) -> None:
        self.done = self.over = False
        self.peer = Http2Peer()

    def batch(self) -> tuple[bytes, int]:
        """Return bytes to send, and how many mutated requests they are. For a new connection, and whenever `done`."""
        raise NotImplementedError

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """Return answers that came, each with the request that got it. Raises ValueError if it isn't the protocol."""
        raise NotImplementedError


class MutatedRequests(Channel):
    """Mutated requests over HTTP/1.1: bodies, each with what puts a head before it, several ahead on one connection.

    With a `last` request, which closes the connection, one is sent before it, and answers to either are the mutated
    one's.
    """

    def __init__(self, mutators: Sequence[tuple[Callable[[bytes], bytes], Mutator]], last: bytes = b"") -> None:
        super().__init__()
        self._mutators, self._last = itertools.cycle(mutators), last
        self._waiting: list[bytes] = []
        self._responses = Responses()

    def batch(self) -> tuple[bytes, int]:
        """Return requests that are sent ahead."""
        count = 1 if self._last else BODIES_EACH
        made = [request(mutator.next()) for request, mutator in itertools.islice(self._mutators, count)]
        self._waiting += made * (2 if self._last else 1)
        self.done = False
        return b"".join(made) + self._last, count

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """Return answers, which are in the order of the requests."""
        found = self._responses.feed(data)
        requests, self._waiting = self._waiting[: len(found)], self._waiting[len(found) :]
        self.done = not self._waiting and not self._last
        return [(f"HTTP {status}", request) for status, request in zip(found, requests, strict=False)]


class Calls(Channel):
    """Mutated messages of gRPC methods by path, in valid calls, many at a time on one connection."""

    def __init__(self, methods: Sequence[tuple[str, Mutator]]) -> None:
        super().__init__()
        self._methods = itertools.cycle(methods)
        self._begin = self.peer.begin()
        self._requests: dict[int, bytes] = {}

    def batch(self) -> tuple[bytes, int]:
        """Return calls; fewer, or none, while the server's window is too small."""
        peer, made = self.peer, bytearray(self._begin)
        self._begin = b""
        while len(self._requests) < CALLS_EACH:
            path, mutator = next(self._methods)
            body = message(mutator.next()[:MAX_REQUEST_BYTES])
            if peer.window < len(body):
                break
            stream = peer.open()
            made += frame(HEADERS, END_HEADERS, stream, call_headers(path))
            for first in range(0, len(body), DEFAULT_FRAME_SIZE):
                made += peer.data(
                    stream, body[first : first + DEFAULT_FRAME_SIZE], last=first + DEFAULT_FRAME_SIZE >= len(body)
                )
            self._requests[stream] = path.encode() + b" " + body
        self.done = False
        return bytes(made), len(self._requests)

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """Return answers by stream."""
        self.peer.feed(data)
        found = [(str(reply), self._requests.pop(stream)) for stream, reply in self.peer.ended().items()]
        self.done = not self._requests
        return found


class RawHttp2(Channel):
    """A few mutated calls, frames and all, and a PING behind them."""

    def __init__(self, frames: Mutator) -> None:
        super().__init__()
        self._frames = frames
        self._sent = b""

    def batch(self) -> tuple[bytes, int]:
        """Return a whole connection's bytes."""
        for number in range(RAW_CALLS_EACH):
            self.peer.open()
            made = bytearray(self._frames.next())
            if len(made) > 9 and number:
                # The corpus has its calls on stream 1.
                made[5:9] = struct.pack(">I", self.peer.last_stream)
            self._sent += bytes(made)
        return self.peer.begin() + self._sent + frame(PING, 0, 0, b"drilling"), RAW_CALLS_EACH

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """Return answers, until the server has answered the PING or said goodbye."""
        peer = self.peer
        peer.feed(data)
        goodbye = [] if peer.goaway is None else [f"GOAWAY {peer.goaway}"]
        self.over = bool(peer.pongs or goodbye)
        replies = [str(peer.replies.pop(stream)) for stream, reply in list(peer.replies.items()) if reply.ended]
        return [(answer, self._sent) for answer in (*replies, *goodbye)]


def call_frames(path: str, body: bytes) -> bytes:
    """Return a valid call on stream 1 as frames."""
    head = frame(HEADERS, END_HEADERS, 1, call_headers(path))
    return head + frame(0, END_STREAM, 1, message(body)[:DEFAULT_FRAME_SIZE])


class Wire(Channel):
    """Mutated frames of the protocol between router and shard nodes, and a valid one behind them.

    If they are `raw`, headers are mutated too, one a connection; else `FRAMES_EACH` a batch.
    """

    def __init__(self, mutator: Mutator, *, raw: bool) -> None:
        super().__init__()
        self._mutator, self._raw = mutator, raw
        self._in = self._sent = b""

    def batch(self) -> tuple[bytes, int]:
        """Return frames, with ids of their own and true lengths unless they are raw."""
        made = [self._mutator.next() for _ in range(1 if self._raw else FRAMES_EACH)]
        if not self._raw:
            for number, one in enumerate(made):
                magic, version, kind, _, _, budget = HEADER.unpack_from(one)
                body = one[HEADER.size :]
                made[number] = HEADER.pack(magic, version, kind, number + 1, len(body), budget) + body
        self._sent = b"".join(made)
        self.done = False
        return self._sent + HEADER.pack(b"SHRK", 1, FrameType.INFO, LAST_ID, 0, 0), len(made)

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """Return answers, until that to the valid frame is here."""
        self._in += data
        found = []
        while len(self._in) >= HEADER.size:
            magic, _, kind, request_id, size, _ = HEADER.unpack_from(self._in)
            if magic != b"SHRK":
                raise ValueError(f"not a frame: {self._in[:24]!r}")
            if len(self._in) < HEADER.size + size:
                break
            body, self._in = self._in[HEADER.size : HEADER.size + size], self._in[HEADER.size + size :]
            if kind == FrameType.ERROR:
                found.append((f"wire {_WIRE_STATUS.unpack_from(body, 8)[0]}", self._sent))
            elif request_id == LAST_ID:
                self.done, self.over = not self._raw, self._raw
            else:
                found.append((f"wire {FrameType(kind).name}", self._sent))
        return found


class FuzzConfig(Frozen):
    """What to send.

    Attributes:
        attack: where to, and from where; for `wire` the HTTP port is the shard node's.
        folder: gets the requests that got a wrong answer.
    """

    attack: AttackConfig
    shape: BenchShape
    surface: Surface
    mutations: int
    folder: Path


class FuzzTally(BaseModel):
    """What came of it: how often each answer or end came, how many blame the server, and examples of those."""

    mutations: int = 0
    answers: Counter[str] = Field(default_factory=Counter)
    wrong_answers: int = 0
    examples: list[str] = []


def small(shape: BenchShape) -> SyntheticWorkload:
    """Return requests of 1 to 3 candidates with 0 to 2 ids a bag."""
    return bench_workload(shape.model_copy(update={"candidates": "1-3:2"}), "mlp", 1)


def corpus(shape: BenchShape, api: Api, seed: int = 0) -> list[bytes]:
    """Bodies of small valid requests."""
    return [one.body for one in Payloads(small(shape), api, count=CORPUS, seed=seed, timeout_ms=1000)]


def lookups(shape: BenchShape) -> list[bytes]:
    """Bodies of small valid lookups in JSON."""
    names = [feature.name for feature in small(shape).spec.features]
    features = ",".join(f'"{name}":[[{number}],[],[1,2]]' for number, name in enumerate(names[:3]))
    return [('{"sparse":{' + features + '},"timeout_ms":1000,"request_id":"a"}').encode()]


def pool_frames(shape: BenchShape, model: str) -> list[bytes]:
    """Small valid frames to a shard node."""
    drawn, rng, made = small(shape), np.random.default_rng(2), []
    for _ in range(CORPUS):
        bags = drawn.request(rng).bags
        chosen = type(bags)(
            np.full(1, POOLED_TABLE, np.int32),
            np.array([bags.bags_per_key.sum()], np.int64),
            bags.offsets,
            bags.values,
        )
        made.append(b"".join(bytes(part) for part in encode_pool(1, 1_000_000, model, 1, chosen)))
    return [*made, b"".join(bytes(part) for part in encode_info(1))]


def channels(config: FuzzConfig) -> Callable[[], Channel]:
    """Make a channel for each new connection; all of them draw from the same mutators."""
    model, shape, surface = config.attack.model, config.shape, config.surface
    seed = f"{config.attack.seed} {surface}"
    rank, lookup = (partial(post, path, model, messages.JSON) for path in (messages.HTTP_RANK, messages.HTTP_LOOKUP))
    if surface == "json":
        pairs = [(rank, Mutator(seed + "r", corpus(shape, "json"))), (lookup, Mutator(seed + "l", lookups(shape)))]
        return lambda: MutatedRequests(pairs)
    if surface == "oip-http":
        payloads = Payloads(small(shape), "oip-http", count=CORPUS, timeout_ms=1000)
        # The length of the header belongs to each body, so each is mutated by itself.
        found = [
            (partial(post, messages.HTTP_INFER, model, one.headers), Mutator(f"{seed}{number}", [one.body]))
            for number, one in enumerate(payloads)
        ]
        return lambda: MutatedRequests(found)
    if surface == "grpc":
        methods = [
            (messages.GRPC_RANK, Mutator(seed + "m", corpus(shape, "grpc"))),
            (messages.GRPC_RANK, Mutator(seed + "p", corpus(shape, "grpc-packed"))),
            (messages.GRPC_INFER, Mutator(seed + "o", corpus(shape, "oip-grpc"))),
        ]
        return lambda: Calls(methods)
    if surface == "http1-bytes":
        whole = [*map(rank, corpus(shape, "json")[:4]), *map(lookup, lookups(shape))]
        http1 = Mutator(seed, [*whole, b"GET /healthz HTTP/1.1\r\nhost: drill\r\naccept: */*\r\n\r\n"])
        return lambda: MutatedRequests([(bytes, http1)], LAST_GET)
    if surface == "http2-bytes":
        http2 = Mutator(seed, [call_frames(messages.GRPC_RANK, body) for body in corpus(shape, "grpc")[:4]])
        return lambda: RawHttp2(http2)
    raw = surface == "wire-bytes"
    frames = Mutator(seed, pool_frames(shape, model), keep=0 if raw else HEADER.size)
    return lambda: Wire(frames, raw=raw)


class Fuzzer:
    """Sends mutated requests over several connections."""

    def __init__(self, config: FuzzConfig) -> None:
        self._config = config
        self._attacker = Attacker(config.attack)
        self._make = channels(config)
        self._tally = FuzzTally()
        self._refused = 0
        self._timeout_s = RAW_ANSWER_S if config.surface.endswith("-bytes") else ANSWER_S

    async def run(self) -> FuzzTally:
        """Send them all."""
        await asyncio.gather(*(self._work() for _ in range(CONNECTIONS.get(self._config.surface, 4))))
        return self._tally

    async def _work(self) -> None:
        """Use one connection after the other."""
        over_grpc = self._config.surface in ("grpc", "http2-bytes")
        while self._tally.mutations < self._config.mutations:
            try:
                sock = self._attacker.grpc() if over_grpc else self._attacker.http()
            except EndedError as error:
                self._tally.answers[str(error)] += 1
                self._refused += 1
                if self._refused > MAX_REFUSED:
                    raise
                self._attacker.next_source()
                await asyncio.sleep(0.01)
                continue
            self._refused = 0
            sock.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=sock)
            try:
                how = await self._use(self._make(), reader, writer)
            except TimeoutError:
                how = "no answer"
            except OSError:
                how = "reset"
            except ValueError as error:
                how = str(error)[:40]
            finally:
                writer.close()
            if how:
                self._tally.answers[how] += 1

    async def _use(self, channel: Channel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """Send batches over a connection. Returns how it ended; nothing if the drill ended it."""
        while self._tally.mutations < self._config.mutations:
            data, count = channel.batch()
            self._tally.mutations += count
            writer.write(data)
            async with asyncio.timeout(self._timeout_s):
                while True:
                    got = await reader.read(1 << 18)
                    if not got:
                        return "closed"
                    self._count(channel.feed(got))
                    writer.write(channel.peer.taken_out())
                    if channel.over:
                        return ""
                    if channel.done:
                        break
        return ""

    def _count(self, answers: list[tuple[str, bytes]]) -> None:
        for answer, request in answers:
            self._tally.answers[answer] += 1
            if blames_server(answer):
                self._tally.wrong_answers += 1
                if len(self._tally.examples) < MAX_EXAMPLES:
                    path = self._config.folder / f"wrong-{self._config.surface}-{len(self._tally.examples)}.bin"
                    with contextlib.suppress(OSError):
                        path.write_bytes(request)
                    self._tally.examples.append(f"{answer} to {request[-300:]!r}; whole in {path.name} (--keep)")


def main() -> None:
    """Run the program."""
    config = module_config(FuzzConfig)
    if config.attack.core is not None:
        os.sched_setaffinity(0, {config.attack.core})
    sys.stdout.write(uvloop.run(Fuzzer(config).run()).model_dump_json() + "\n")


if __name__ == "__main__":
    main()
