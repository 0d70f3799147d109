"""Warms a version before it is ready, so that its first requests find nothing cold.

Cold are code that has not run, pages and caches of rows, connections to shards, and products that oneDNN prepares for
each number of rows. Other versions answer meanwhile, so there are pauses, and a time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import logging
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from loader.errors import ShardrankError
from loader.snapshot.reader import Snapshot
from serving.api.grpc import wire
from serving.api.grpc.services import RANKING, GrpcServer
from serving.api.http import PROTOBUF, HttpApp, HttpServer
from serving.formats.messages import packed_request
from serving.formats.requests import RankRequest
from serving.models.layers import CPU
from serving.observe.calls import VersionCounter
from serving.observe.recording import last_requests
from serving.rank.service import RankingService
from serving.versions.loaded_version import LoadedVersion, golden_batches
from shard_node.bags import KeyedBags
from shard_node.generation import Generations

logger = logging.getLogger(__name__)

SIZES = (1, 10, 20, *range(50, 501, 50), 1000, 2000)
"""Candidates of batches. Not all: what oneDNN keeps for a number of rows takes 0.6 MB a layer, 0.7 ms to prepare."""
GOLDEN_REQUESTS = 16
GROUPS = (1, 1, 2, 4, 8)
"""Requests that are sent at once, group after group: under load several are ranked together."""
PAUSES = 3.0
"""After a group, times its duration: a quarter of one core is used."""
LIMIT_S = 10.0
MAX_READ_BYTES = 256 << 20
"""Of recorded files, where most requests are of another model."""
_GRPC_FIELDS = (
    *((b":method", b"POST"), (b":scheme", b"http"), (b":path", f"/{RANKING}/Rank".encode())),
    *((b"te", b"trailers"), (b"content-type", b"application/grpc")),
)


def _warm_layers(served: LoadedVersion) -> None:
    """Score zeros for the usual numbers of candidates, on the CPU. Blocks."""
    torch.set_num_threads(1)
    ranking = served.rankings[0]
    for size in SIZES if ranking.device == CPU else ():
        started_at = time.monotonic()
        with torch.inference_mode():
            ranking.parts.models.original.scores(ranking.parts.assembler.zeros(size))
        time.sleep(time.monotonic() - started_at)


def warming_requests(
    served: LoadedVersion, snapshot: Snapshot, folder: Path | None, recorded: int
) -> list[RankRequest]:
    """Return golden requests, each several times if they are few, and the last ones that were recorded in a folder."""
    schema, golden, requests = served.schema, snapshot.golden(), list[RankRequest]()
    for number in range(0 if golden is None else min(GOLDEN_REQUESTS, golden.num_requests)):
        assert golden is not None
        ((batch, _),) = golden_batches(schema, golden.request(number))
        # Strings are left out: only their fingerprints are known.
        bags, is_string = batch.bags, schema.is_string
        lengths = np.where(np.repeat(is_string, bags.bags_per_key), 0, bags.lengths)
        kept = ~np.repeat(is_string, bags.values_per_key())
        weights = None if bags.weights is None else bags.weights[kept]
        bags = KeyedBags.from_lengths(bags.keys, bags.bags_per_key, lengths, bags.values[kept], weights)
        requests.append(
            RankRequest(bags, len(batch.candidate_dense), batch.context_dense[0], batch.candidate_dense, 0.0)
        )
    requests = list(itertools.islice(itertools.cycle(requests), GOLDEN_REQUESTS))
    if folder is not None and recorded:
        try:
            requests += last_requests(folder, schema, recorded, MAX_READ_BYTES)
        except ShardrankError as error:
            logger.warning("%s %d: recorded requests do not warm it: %s", served.model, served.version, error)
    return requests


async def warm(service: RankingService, served: LoadedVersion, requests: Sequence[RankRequest]) -> None:
    """Answer requests with a version that is not installed yet, by HTTP and gRPC in turn, for `LIMIT_S` at most.

    They are not counted as requests of clients. Failures are logged, and do not keep the version from serving.
    """
    clock, started_at, answered = service.clock, service.clock(), 0
    hidden, version = RankingService(service.limits, clock=clock), copy.copy(served)
    hidden.metrics, version.counter = service.metrics.uncounted(), VersionCounter()
    hidden.generations = Generations(lambda served: None, low_priority=False)
    hidden.install(version)
    for ranking in served.rankings:
        ranking.metrics, ranking.counter = hidden.metrics, version.counter
    try:
        await asyncio.to_thread(_warm_layers, served)
        app = await asyncio.to_thread(HttpApp, hidden)
        http = HttpServer(service.limits, clock, hidden.metrics.failed, app.application, admit=app.admit)
        grpc, remaining, sizes = GrpcServer(hidden), enumerate(requests), itertools.cycle(GROUPS)
        async with asyncio.timeout(LIMIT_S):
            while group := list(itertools.islice(remaining, next(sizes))):
                sent_at = clock()
                calls = [_answered(grpc if number % 2 else http, served, request) for number, request in group]
                answered += sum(await asyncio.gather(*calls))
                await asyncio.sleep(PAUSES * (clock() - sent_at))
    except Exception as error:
        if not isinstance(error, TimeoutError):
            logger.exception("%s %d is not warmed any further", served.model, served.version)
    finally:
        for ranking in served.rankings:
            ranking.metrics, ranking.counter = service.metrics, served.counter
        hidden.generations.retire_all()
    service.metrics.count("warmed_requests", served.model, served.version, by=answered)
    counts = answered, len(requests), clock() - started_at
    logger.info("%s %d is warm: %d of %d requests answered, in %.1f s", served.model, served.version, *counts)


async def _answered(listener: HttpServer | GrpcServer, served: LoadedVersion, request: RankRequest) -> bool:
    """Send a request on a new connection, and wait for the end of its reply. Returns whether it has scores."""
    message = packed_request(served.schema.features, request)
    message.model = served.model
    body = message.SerializeToString()
    accepted, connected = socket.socketpair()
    listener.accept_socket(accepted, "")
    reader, writer = await asyncio.open_connection(sock=connected)
    with contextlib.closing(writer):
        if isinstance(listener, HttpServer):
            head = f"POST /v1/models/{served.model}:rank HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            head += f"content-type: {PROTOBUF.decode()}\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            return (await reader.read()).startswith(b"HTTP/1.1 200")
        block, data = wire.header_block(_GRPC_FIELDS, status=None), b"\0" + len(body).to_bytes(4) + body
        writer.write(wire.PREFACE + wire.settings({wire.INITIAL_WINDOW_SIZE: wire.MAX_WINDOW}))
        writer.write(wire.window_update(0, wire.MAX_WINDOW - wire.DEFAULT_WINDOW))
        writer.write(wire.frame(wire.HEADERS, wire.END_HEADERS, 1, block))
        for at in range(0, len(data), wire.DEFAULT_FRAME_SIZE):
            writer.write(wire.frame(wire.DATA, 0, 1, data[at : at + wire.DEFAULT_FRAME_SIZE]))
        writer.write(wire.frame(wire.DATA, wire.END_STREAM, 1))
        kind, flags, has_message = wire.SETTINGS, 0, False
        while not (kind == wire.HEADERS and flags & wire.END_STREAM):
            frame = await reader.readexactly(wire.HEAD_BYTES)
            await reader.readexactly(int.from_bytes(frame[:3]))
            kind, flags = frame[3:5]
            has_message |= kind == wire.DATA
        return has_message
