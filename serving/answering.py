"""From a batch to its answers: what a ranking replica does with what it took, on whatever thread it works."""

from __future__ import annotations

import logging
from collections.abc import Callable

from loader.errors import ShardrankError
from serving.errors import ServingError
from serving.formats.requests import Answer, LookupRequest
from serving.metrics import ServingMetrics
from serving.pending import Pending, finish
from serving.ranking import Ranking

logger = logging.getLogger(__name__)

# Errors with these statuses are about the shards or the clock: another try with fewer requests would not help.
_OF_THE_WHOLE_BATCH = (503, 504)


async def answer_batch(
    ranking: Ranking, batch: list[Pending], metrics: ServingMetrics, clock: Callable[[], float]
) -> None:
    """Ranks or looks up what a batcher gave, and hands out answers and errors.

    Args:
        ranking: does the work; belongs to the calling loop.
        batch: rank requests, or one lookup; each is finished exactly once, whatever happens.
        metrics: told how long requests waited.
        clock: monotonic seconds.
    """
    # Whatever ends the calling thread, the batch that it took is answered and its leases are given back.
    ended = ServingError("the ranking replica ended; the server's log says more")
    outcomes: list[Answer | BaseException] = [ended] * len(batch)
    try:
        now = clock()
        model = ranking.parts.schema.features.spec.model
        for pending in batch:
            pending.queue_s = now - pending.arrived
            metrics.stage(model, "queue", pending.queue_s, pending.method)
        outcomes = await _outcomes(ranking, batch)
    finally:
        finish(zip(batch, outcomes, strict=True))


async def _outcomes(ranking: Ranking, batch: list[Pending]) -> list[Answer | BaseException]:
    try:
        if isinstance(batch[0].request, LookupRequest):
            return [await ranking.lookup(batch[0])]
        return list(await ranking.rank(batch))
    except ShardrankError as error:
        if len(batch) == 1 or error.http_status in _OF_THE_WHOLE_BATCH:
            return [error] * len(batch)
    except Exception as error:
        logger.exception("a batch of %d requests failed", len(batch))
        if len(batch) == 1:
            return [_internal(error)]
    # Checked requests should not be able to fail a batch. If one did, only that one shall fail.
    return [(await _outcomes(ranking, [pending]))[0] for pending in batch]


def _internal(error: Exception) -> ServingError:
    failure = ServingError(f"ranking failed: {type(error).__name__}")
    failure.__cause__ = error
    return failure
