"""Sends mutated requests of one kind, in a process of its own.

`python -m loadtest.drill.hostile.fuzz_process CONFIG` with a file that holds a `FuzzConfig` as JSON. Its one line on
stdout is a `FuzzTally`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from pydantic import BaseModel

from loader.snapshot.manifest import Frozen
from loadtest.drill.hostile import documents, protobuf
from loadtest.drill.hostile.attacker import AttackConfig, Attacker, EndedError
from loadtest.drill.hostile.documents import Body
from loadtest.drill.hostile.fuzz import (
    Bodies,
    Calls,
    Channel,
    Method,
    RawHttp,
    RawHttp2,
    Wire,
    blames_server,
    call_frames,
)
from loadtest.drill.hostile.mutate import Mutator
from loadtest.workloads.catalog import BenchShape, bench_workload
from loadtest.workloads.payloads import Api, Payloads
from loadtest.workloads.workload import SyntheticWorkload
from serving.fleet.process import die_with_parent
from serving.proto.shardrank.v1 import ranking_pb2
from shard_node.wire.frame import HEADER
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
MAX_EXAMPLES = 5
POOLED_TABLE = 0


class FuzzConfig(Frozen):
    """What to send.

    Attributes:
        attack: where to, and from where; for `wire` the HTTP port is the shard node's.
        shape: of the model.
        surface: what is mutated.
        mutations: how many.
        schema_digest: of packed requests; empty for a server that has none.
        folder: gets the requests that got a wrong answer.
    """

    attack: AttackConfig
    shape: BenchShape
    surface: Surface
    mutations: int
    schema_digest: str = ""
    folder: Path


class FuzzTally(BaseModel):
    """What came of it.

    Attributes:
        mutations: that were sent.
        answers: how often each answer or end came.
        wrong_answers: that blame the server.
        examples: of those.
    """

    mutations: int = 0
    answers: dict[str, int] = {}
    wrong_answers: int = 0
    examples: list[str] = []


def small(shape: BenchShape) -> SyntheticWorkload:
    """Requests of 1 to 3 candidates with 0 to 2 ids a bag."""
    return bench_workload(shape.model_copy(update={"candidates": "1-3:2"}), "mlp", 1)


def corpus(shape: BenchShape, api: Api, seed: int = 0) -> list[bytes]:
    """Bodies of small valid requests."""
    return [one.body for one in Payloads(small(shape), api, count=CORPUS, seed=seed, timeout_ms=1000)]


def lookups(shape: BenchShape) -> list[bytes]:
    """Bodies of small valid lookups in JSON."""
    names = [feature.name for feature in small(shape).spec.features]
    features = ",".join(f'"{name}":[[{number}],[],[1,2]]' for number, name in enumerate(names[:3]))
    return [('{"sparse":{' + features + '},"timeout_ms":1000,"request_id":"a"}').encode()]


def packed(shape: BenchShape, model: str, digest: str) -> list[bytes]:
    """Small valid rank requests in the packed form."""
    rng, made = np.random.default_rng(1), []
    for candidates in (1, 3):
        lengths = rng.integers(0, 3, candidates * shape.features, dtype=np.int32)
        request = ranking_pb2.RankRequest(model=model, num_candidates=candidates, timeout_ms=1000)
        request.packed.schema_digest = digest
        request.packed.ids = rng.integers(0, shape.rows, int(lengths.sum()), dtype=np.int64).tobytes()
        request.packed.lengths = lengths.tobytes()
        request.packed.candidate_dense = rng.standard_normal(candidates * shape.dense, dtype=np.float32).tobytes()
        made.append(request.SerializeToString())
    return made


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
    """Makes a channel for each new connection; all of them draw from the same mutators."""
    model, shape, surface = config.attack.model, config.shape, config.surface
    seed = f"{config.attack.seed} {surface}"
    if surface == "json":
        pairs = [
            (Body(documents.RANK, b""), Mutator(seed + "r", corpus(shape, "json"))),
            (Body(documents.LOOKUP, b""), Mutator(seed + "l", lookups(shape))),
        ]
        return lambda: Bodies(pairs, model)
    if surface == "oip-http":
        payloads = Payloads(small(shape), "oip-http", count=CORPUS, timeout_ms=1000)
        bodies = [Body(documents.INFER, one.body, dict(one.headers)) for one in payloads]
        # The length of the header belongs to each body, so each is mutated by itself.
        found = [(one, Mutator(f"{seed}{number}", [one.body])) for number, one in enumerate(bodies)]
        return lambda: Bodies(found, model)
    if surface == "grpc":
        methods = [
            Method(protobuf.RANK, Mutator(seed + "m", corpus(shape, "grpc"))),
            Method(protobuf.RANK, Mutator(seed + "p", packed(shape, model, config.schema_digest))),
            Method(protobuf.INFER, Mutator(seed + "o", corpus(shape, "oip-grpc"))),
        ]
        return lambda: Calls(methods)
    if surface == "http1-bytes":
        whole = [Body(documents.RANK, body).request(config.attack) for body in corpus(shape, "json")[:4]]
        whole += [Body(documents.LOOKUP, body).request(config.attack) for body in lookups(shape)]
        http1 = Mutator(seed, [*whole, b"GET /healthz HTTP/1.1\r\nhost: drill\r\naccept: */*\r\n\r\n"])
        return lambda: RawHttp(http1)
    if surface == "http2-bytes":
        http2 = Mutator(seed, [call_frames(protobuf.RANK, body) for body in corpus(shape, "grpc")[:4]])
        return lambda: RawHttp2(http2)
    raw = surface == "wire-bytes"
    frames = Mutator(seed, pool_frames(shape, model), keep=0 if raw else HEADER.size)
    return lambda: Wire(frames, raw=raw)


class _Connection:
    """One that is in use."""

    def __init__(self, sock: socket.socket, channel: Channel, timeout_s: float) -> None:
        self.sock, self.channel, self._timeout_s = sock, channel, timeout_s
        self.left = b""
        self.deadline = 0.0

    def begin(self) -> int:
        """Makes another batch; how many mutated requests it has."""
        self.left, count = self.channel.batch()
        self.deadline = time.monotonic() + self._timeout_s
        return count


class Fuzzer:
    """Sends mutated requests over several connections.

    Args:
        config: what to send.
    """

    def __init__(self, config: FuzzConfig) -> None:
        self._config = config
        self._attacker = Attacker(config.attack)
        self._make = channels(config)
        self._selector = selectors.DefaultSelector()
        self._answers: Counter[str] = Counter()
        self._tally = FuzzTally()
        self._open = 0
        self._timeout_s = RAW_ANSWER_S if config.surface.endswith("-bytes") else ANSWER_S

    def run(self) -> FuzzTally:
        """Sends them all."""
        wanted = self._config.mutations
        connections = CONNECTIONS.get(self._config.surface, 4)
        refused = 0
        while self._open or self._tally.mutations < wanted:
            while self._open < connections and self._tally.mutations < wanted:
                try:
                    self._connect()
                    refused = 0
                except EndedError as error:
                    refused += 1
                    self._ended(str(error), refused)
                    break
            for key, events in self._selector.select(0.05):
                self._serve(key.data, events)
            now = time.monotonic()
            for key in list(self._selector.get_map().values()):
                if key.data.deadline < now:
                    self._close(key.data, "no answer")
        return self._tally.model_copy(update={"answers": dict(self._answers)})

    def _ended(self, how: str, refused: int) -> None:
        self._answers[how] += 1
        self._attacker.next_source()
        time.sleep(0.01)
        if refused > 3000:
            raise EndedError(how)

    def _connect(self) -> None:
        grpc = self._config.surface in ("grpc", "http2-bytes")
        sock = self._attacker.grpc() if grpc else self._attacker.http()
        sock.setblocking(False)
        connection = _Connection(sock, self._make(), self._timeout_s)
        self._tally.mutations += connection.begin()
        self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
        self._open += 1

    def _serve(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE and connection.left:
                connection.left = connection.left[connection.sock.send(connection.left) :]
            if events & selectors.EVENT_READ:
                data = connection.sock.recv(1 << 18)
                if not data:
                    self._close(connection, "closed")
                    return
                self._count(connection.channel.feed(data))
                connection.left += connection.channel.out()
        except BlockingIOError:
            pass
        except OSError:
            self._close(connection, "reset")
            return
        except ValueError as error:
            self._close(connection, str(error)[:40])
            return
        if connection.channel.over:
            self._close(connection, "")
            return
        if not connection.left and connection.channel.done:
            if self._tally.mutations >= self._config.mutations:
                self._close(connection, "")
                return
            self._tally.mutations += connection.begin()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.left else 0)
        self._selector.modify(connection.sock, wanted, connection)

    def _close(self, connection: _Connection, how: str) -> None:
        if how:
            self._answers[how] += 1
        self._selector.unregister(connection.sock)
        connection.sock.close()
        self._open -= 1

    def _count(self, answers: list[tuple[str, bytes]]) -> None:
        for answer, request in answers:
            self._answers[answer] += 1
            if blames_server(answer):
                self._tally.wrong_answers += 1
                if len(self._tally.examples) < MAX_EXAMPLES:
                    path = self._config.folder / f"wrong-{self._config.surface}-{len(self._tally.examples)}.bin"
                    with contextlib.suppress(OSError):
                        path.write_bytes(request)
                    self._tally.examples.append(f"{answer} to {request[-300:]!r}; whole in {path.name} (--keep)")


def main(arguments: list[str]) -> None:
    """The program."""
    die_with_parent(os.environ)
    config = FuzzConfig.model_validate_json(Path(arguments[0]).read_text(encoding="utf-8"))
    if config.attack.core is not None:
        os.sched_setaffinity(0, {config.attack.core})
    sys.stdout.write(Fuzzer(config).run().model_dump_json() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
