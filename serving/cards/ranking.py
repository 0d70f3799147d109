"""Ranking where rows lie on cards: ids go up once, scores come down once, and all between stays on one card.

Rows of this process that are on cards are not asked for through a shard. The router only maps ids to rows; the
replica's own lane pools them straight into the ranking model's input, on the card that scores. Lookups of the API go
the usual way: they end on the host anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from loader.snapshot.golden import GoldenRequests
from router.id_mapping import RejectedIds
from router.router import Router
from serving.cards.layout import CardLayout
from serving.cards.scorer import CardModel, CardScorer
from serving.observe.calls import BatchTimes, VersionCounter
from serving.observe.metrics import ServingMetrics
from serving.rank.merge import MergedBatch
from serving.rank.ranking import Ranking, RankingParts
from shard_node.bags import Float32Array
from shard_node.errors import DeadlineExceededError
from shard_node.node import Shard


class CardRanking(Ranking):
    """Ranks batches on one card. Belongs to the event loop, and thread, of its replica.

    The stage `lookup` is the host's share of a batch: ids to rows, and packing. The stage `rank` is the time from there
    until the scores are back: pooling and the dense model. Arguments as of `Ranking`; the scorer is closed by `close`.
    """

    def __init__(
        self,
        parts: RankingParts,
        router: Router,
        shards: Sequence[Shard],
        metrics: ServingMetrics,
        counter: VersionCounter,
        scorer: CardScorer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(parts, router, shards, metrics, counter, clock, scorer.device)
        self.scorer = scorer
        self._model = self._on_card(parts)

    def use(self, parts: RankingParts) -> None:
        """Goes on with another dense model."""
        super().use(parts)
        self._model = self._on_card(parts)

    async def score(
        self, batch: MergedBatch, deadline: float, times: BatchTimes | None = None
    ) -> tuple[Float32Array, RejectedIds]:
        """As `Ranking.score`.

        Raises:
            DeadlineExceededError: if nobody could take the scores any more: they are not worked out.
            MemoryBudgetError: the card has no room for a batch of that size.
        """
        began = self._clock()
        mapped = self.router.map(batch.bags)
        packed = self.scorer.pack(self._model, batch, mapped.bags)
        ready = self._clock()
        if ready >= deadline:
            raise DeadlineExceededError("the deadline passed while the batch was packed")
        scores = packed.score(batch)
        if times is not None:
            times.lookup_s, times.rank_s = ready - began, self._clock() - ready
        self._metrics.card_batch(self._model_name, is_graph=packed.is_graph)
        return scores, mapped.rejected

    def warm(self, golden: GoldenRequests | None) -> None:
        """Makes buffers and graphs for the usual classes of batches: as golden requests have, or one id a feature."""
        context_ids, candidate_ids = usual_ids(self.parts, golden)
        self.scorer.warm(self._model, context_ids, candidate_ids)

    async def close(self) -> None:
        """Frees the lane, gives the rows back, and closes the router."""
        try:
            self.scorer.close()
        finally:
            await super().close()

    def _on_card(self, parts: RankingParts) -> CardModel:
        features = parts.schema.features
        layout = CardLayout(features.spec, features, parts.assembler.dtype)
        return CardModel(layout, parts.models.on(self.scorer.device))


def usual_ids(parts: RankingParts, golden: GoldenRequests | None) -> tuple[float, float]:
    """Ids of one request's context, and of one candidate, on average over golden requests."""
    features = parts.schema.features
    is_context = features.is_context
    if golden is None:
        return float(np.count_nonzero(is_context)), float(np.count_nonzero(~is_context))
    ids = np.array([golden.lengths[feature.name].sum(dtype=np.int64) for feature in features.features])
    num_requests, num_candidates = golden.num_candidates.size, int(golden.num_candidates.sum(dtype=np.int64))
    return float(ids[is_context].sum() / num_requests), float(ids[~is_context].sum() / num_candidates)
