"""Rank recorded requests with a version before it is ready: what its first requests would find cold, these have warmed.

That is pages and caches of rows here and on shard nodes, tiers of hot rows that learn, and kernels that are prepared
for a number of rows when it first comes. Others answer meanwhile, so it rests between batches, and has an end.
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
from serving.rank.batcher import share_of
from serving.rank.ranking import Ranking, merge
from serving.rank.replica import Replica

logger = logging.getLogger(__name__)

GROUPS = (1, 2, 4, 8)
"""Requests of a batch, in turn: under load they come together, and then the batch's size is another one."""
RESTS = 3.0
"""After a batch, times what it took: of one core it takes a quarter."""
LIMIT_S = 10.0
BATCH_TIMEOUT_S = 5.0
MAX_READ_BYTES = 256 << 20
"""Of recorded files, where most requests are of another model."""


class Warming(Frozen):
    """What versions are warmed with.

    Attributes:
        folder: of recorded requests.
        requests: the last so many that fit the version's schema.
    """

    folder: Path
    requests: int = Field(default=512, ge=1, le=100_000)

    def warm(self, replicas: Sequence[Replica], clock: Callable[[], float]) -> int:
        """Rank the last recorded requests with every replica, for `LIMIT_S` at most. Blocks.

        They are as they were sent, to whatever version; those beyond the limits of today are left out. Nothing that
        goes wrong keeps the version from serving: the log tells. Returns how many requests were ranked.
        """
        own = replicas[0].ranking.parts
        schema, began, ranked = own.schema, clock(), 0
        name = f"{schema.features.spec.model} {own.version}"
        try:
            requests = last_requests(self.folder, schema, self.requests, MAX_READ_BYTES)
            groups = list(_groups(requests, schema))
            for number, replica in enumerate(replicas, 1):
                until = began + LIMIT_S * number / len(replicas)
                ranked += replica.call(partial(_rank, groups=groups, until=until, clock=clock)).result()
        except Exception as error:
            # What is not a typed error is a defect, of which the log tells more.
            logger.warning(
                "%s is not warmed any further: %s", name, error, exc_info=not isinstance(error, ShardrankError)
            )
        logger.info("%s is warmed with %d recorded requests, in %.1f s", name, ranked, clock() - began)
        return ranked


async def _rank(
    ranking: Ranking, groups: Sequence[Sequence[RankRequest]], until: float, clock: Callable[[], float]
) -> int:
    """Rank batches, one after the other, until a time of the clock. Returns how many requests were ranked."""
    ranked = 0
    for group in groups:
        if (began := clock()) >= until:
            break
        await ranking.score(merge(group), began + BATCH_TIMEOUT_S)
        ranked += len(group)
        now = clock()
        await asyncio.sleep(min(RESTS * (now - began), max(0.0, until - now)))
    return ranked


def _groups(requests: Sequence[RankRequest], schema: RequestSchema) -> Iterator[list[RankRequest]]:
    """Divide those within the limits into batches of the sizes of `GROUPS` in turn, as far as limits of batches go."""
    limits, is_none = schema.limits, schema.features.is_none
    allowed = [
        request
        for request in requests
        if request.num_candidates <= limits.max_candidates and request.bags.num_values <= limits.max_ids_per_request
    ]
    longest = max((int(request.bags.values_per_key()[is_none].max(initial=0)) for request in allowed), default=0)
    sizes, group, filled = itertools.cycle(GROUPS), list[RankRequest](), 0.0
    size = next(sizes)
    for request in allowed:
        share = share_of(request, longest, limits)
        if group and (len(group) == size or filled + share > 1):
            yield group
            group, filled, size = [], 0.0, next(sizes)
        group.append(request)
        filled += share
    if group:
        yield group
