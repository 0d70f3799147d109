"""Rank recorded requests with a version before it is ready, to warm what its first requests would find cold.

That is pages and caches of rows, tiers of hot rows that learn, and kernels that are prepared when a number of rows
first comes. Other versions answer meanwhile, so there are pauses between batches, and a time limit.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from pydantic import Field

from loader.errors import ShardrankError
from loader.snapshot.tables import Frozen
from serving.formats.requests import RankRequest
from serving.formats.schema import RequestSchema
from serving.observe.recording import last_requests
from serving.rank.batcher import fraction_of_batch
from serving.rank.ranking import Ranking, merge
from serving.rank.replica import Replica

logger = logging.getLogger(__name__)

GROUPS = (1, 2, 4, 8)
"""Requests of successive batches: under load several are ranked together."""
PAUSES = 3.0
"""After a batch, times its duration: a quarter of one core is used."""
LIMIT_S = 10.0
BATCH_TIMEOUT_S = 5.0
MAX_READ_BYTES = 256 << 20
"""Of recorded files, where most requests are of another model."""


class Warming(Frozen):
    """What versions are warmed with: the last `requests` of a folder that fit the version's schema."""

    folder: Path
    requests: int = Field(default=512, ge=1, le=100_000)

    def warm(self, replicas: Sequence[Replica], clock: Callable[[], float]) -> int:
        """Rank recorded requests with every replica, for `LIMIT_S` at most. Blocks; returns how many were ranked.

        Failures are logged, and do not keep the version from serving.
        """
        parts = replicas[0].ranking.parts
        schema, started_at, ranked = parts.schema, clock(), 0
        name = f"{schema.features.spec.model} {parts.version}"
        try:
            requests = last_requests(self.folder, schema, self.requests, MAX_READ_BYTES)
            groups = list(_groups(requests, schema))
            for number, replica in enumerate(replicas, 1):
                until = started_at + LIMIT_S * number / len(replicas)
                ranked += replica.call(partial(_rank, groups=groups, until=until, clock=clock)).result()
        except Exception as error:
            is_bug = not isinstance(error, ShardrankError)
            logger.warning("%s is not warmed any further: %s", name, error, exc_info=is_bug)
        logger.info("%s is warmed with %d recorded requests, in %.1f s", name, ranked, clock() - started_at)
        return ranked


async def _rank(
    ranking: Ranking, groups: Sequence[Sequence[RankRequest]], until: float, clock: Callable[[], float]
) -> int:
    """Rank batches until a time of the clock. Returns how many requests were ranked."""
    ranked = 0
    for group in groups:
        if (started_at := clock()) >= until:
            break
        await ranking.score(merge(group), started_at + BATCH_TIMEOUT_S)
        ranked += len(group)
        now = clock()
        await asyncio.sleep(min(PAUSES * (now - started_at), max(0.0, until - now)))
    return ranked


def _groups(requests: Sequence[RankRequest], schema: RequestSchema) -> Iterator[list[RankRequest]]:
    """Divide requests into batches of `GROUPS` requests, or as many as a batch may have."""
    limits, is_none = schema.limits, schema.features.is_none
    longest = max((int(request.bags.values_per_key()[is_none].max(initial=0)) for request in requests), default=0)
    sizes, group, filled = itertools.cycle(GROUPS), list[RankRequest](), 0.0
    size = next(sizes)
    for request in requests:
        share = fraction_of_batch(request, longest, limits)
        if group and (len(group) == size or filled + share > 1):
            yield group
            group, filled, size = [], 0.0, next(sizes)
        group.append(request)
        filled += share
    if group:
        yield group
