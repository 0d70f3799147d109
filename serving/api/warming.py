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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from loader.errors import ShardrankError
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.reader import Snapshot
from serving.api.http import PROTOBUF, HttpApp, HttpServer
from serving.formats.messages import packed_request
from serving.formats.requests import RankRequest
from serving.formats.schema import RequestSchema
from serving.observe.calls import VersionCounter
from serving.observe.recording import last_requests
from serving.rank.service import RankingService
from serving.versions.loaded_version import LoadedVersion, golden_bags
from shard_node.generation import Generations

logger = logging.getLogger(__name__)

SIZES = (1, 10, 20, *range(50, 501, 50))
"""Candidates of golden requests; not all, since oneDNN keeps 0.6 MB a layer for each number of rows."""
GROUPS = (1, 2, 4, 8)
"""Recorded requests that are sent at once, group after group: under load several are ranked together."""
PAUSES = 3.0
"""After a group, times its duration: a quarter of one core is used."""
LIMIT_S = 10.0
MAX_RECORDED = 512
MAX_READ_BYTES = 256 << 20
"""Of recorded files, where most requests are of another model."""


def warming_requests(served: LoadedVersion, snapshot: Snapshot, folder: Path | None) -> list[list[RankRequest]]:
    """Return golden requests of the usual sizes, and the last recorded ones of a folder: groups to be sent at once."""
    schema, golden, limit = served.schema, snapshot.golden(), served.schema.limits.max_candidates
    requests = [] if golden is None else [_golden_request(schema, golden, size) for size in SIZES if size <= limit]
    groups = [[request] for request in requests] + [requests[first : first + 4] for first in (0, 4) if requests]
    if folder is not None:
        try:
            remaining = iter(last_requests(folder, schema, MAX_RECORDED, MAX_READ_BYTES))
        except ShardrankError as error:
            logger.warning("%s %d: recorded requests do not warm it: %s", served.model, served.version, error)
            return groups
        sizes = itertools.cycle(GROUPS)
        while group := list(itertools.islice(remaining, next(sizes))):
            groups.append(group)
    return groups


def _golden_request(schema: RequestSchema, golden: GoldenRequests, size: int) -> RankRequest:
    """Return the first golden request with so many candidates, its candidates again and again.

    Bags of strings are empty, since only fingerprints of these are known.
    """
    first = golden.request(0)
    candidates = np.resize(first.candidate_dense, (size, first.candidate_dense.shape[1]))
    lengths = {
        feature.name: np.resize(first.lengths[feature.name], 1 if feature.side == "context" else size) * (not is_string)
        for feature, is_string in zip(schema.features.features, schema.is_string, strict=True)
    }
    values = {name: np.resize(ids, lengths[name].sum()) for name, ids in first.values.items()}
    weights = {name: np.resize(floats, lengths[name].sum()) for name, floats in first.weights.items()}
    resized = replace(first, lengths=lengths, values=values, weights=weights)
    bags = golden_bags(schema, resized, slice(0, 1), slice(0, size))
    return RankRequest(bags, size, first.context_dense[0], candidates, 0.0)


async def warm(service: RankingService, served: LoadedVersion, groups: Sequence[Sequence[RankRequest]]) -> None:
    """Answer requests with a version that is not installed yet, over HTTP, for `LIMIT_S` at most.

    They are not counted as requests of clients. Failures are logged, and do not keep the version from serving.
    """
    if not groups:
        service.metrics.count("warmed_requests", served.model, served.version, by=0)
        return
    clock, started_at, answered = service.clock, service.clock(), 0
    hidden, version = RankingService(service.limits, clock=clock), copy.copy(served)
    hidden.metrics, version.counter = service.metrics.uncounted(), VersionCounter()
    hidden.generations = Generations(lambda served: None, low_priority=False)
    hidden.install(version)
    for ranking in served.rankings:
        ranking.metrics, ranking.counter = hidden.metrics, version.counter
    try:
        app = await asyncio.to_thread(HttpApp, hidden)
        http = HttpServer(service.limits, clock, hidden.metrics.failed, app.application, admit=app.admit)
        async with asyncio.timeout(LIMIT_S):
            for group in groups:
                sent_at = clock()
                answered += sum(await asyncio.gather(*(_answered(http, served, request) for request in group)))
                await asyncio.sleep(PAUSES * (clock() - sent_at))
    except Exception as error:
        if not isinstance(error, TimeoutError):
            logger.exception("%s %d is not warmed any further", served.model, served.version)
    finally:
        for ranking in served.rankings:
            ranking.metrics, ranking.counter = service.metrics, served.counter
        hidden.generations.retire_all()
    service.metrics.count("warmed_requests", served.model, served.version, by=answered)
    counts = answered, sum(map(len, groups)), clock() - started_at
    logger.info("%s %d is warm: %d of %d requests answered, in %.1f s", served.model, served.version, *counts)


async def _answered(http: HttpServer, served: LoadedVersion, request: RankRequest) -> bool:
    """Send a request on a new connection, and wait for the end of its reply. Returns whether it has scores."""
    body = packed_request(served.schema.features, request).SerializeToString()
    head = f"POST /v1/models/{served.model}:rank HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += f"content-type: {PROTOBUF.decode()}\r\ncontent-length: {len(body)}\r\n\r\n"
    accepted, connected = socket.socketpair()
    http.accept_socket(accepted, "")
    reader, writer = await asyncio.open_connection(sock=connected)
    with contextlib.closing(writer):
        writer.write(head.encode() + body)
        return (await reader.read()).startswith(b"HTTP/1.1 200")
