"""One version of a model made servable: what a generation of the serving process holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias, cast

import torch

from loader.reader import Snapshot
from router.feature_schema import FeatureSchema
from router.id_mapping import IdMapper
from router.plan import Plan
from router.router import Router
from serving.cards.ranking import CardRanking
from serving.cards.scorer import scorer_on_card
from serving.description import ModelDescription
from serving.errors import NotReadyError
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from serving.models.factory import DtypeChoice
from serving.observe.metrics import ServingMetrics
from serving.observe.statistics import VersionCounter
from serving.rank.batcher import Batcher
from serving.rank.ranking import Ranking
from serving.rank.replica import LoopReplica, Replica
from serving.versions.version_check import CheckedVersion, check_version, ranking_parts
from shard_node.node import NodeInfo, Shard

OnRetry: TypeAlias = Callable[[str], None]
ShardsFactory: TypeAlias = Callable[[OnRetry], Sequence[Shard]]
"""Makes one replica's own connections to all shards of the plan; called on the replica's event loop."""

INFO_TIMEOUT_S = 2.0


class ServedModel:
    """A version with its schema, its queue and its ranking replicas. Made by `load`.

    Attributes:
        submit: queues a request. Raises OverloadedError, ShuttingDownError; then the lease is still the caller's.
        counter: what it has done since it is here.
        checked: what its golden requests said when it was loaded.
    """

    def __init__(
        self,
        schema: RequestSchema,
        description: ModelDescription,
        batcher: Batcher,
        replicas: list[Replica | LoopReplica],
        on_close: Callable[[], None],
        counter: VersionCounter,
        checked: CheckedVersion,
    ) -> None:
        self.model = description.model
        self.version = description.version
        self.schema = schema
        self.description = description
        self.counter = counter
        self.checked = checked
        self._batcher = batcher
        self.submit = batcher.submit
        self._replicas = replicas
        self._on_close = on_close

    @classmethod
    def load(
        cls,
        snapshot: Snapshot,
        plan: Plan,
        shards: ShardsFactory,
        *,
        limits: RequestLimits | None = None,
        num_replicas: int = 1,
        dtype: DtypeChoice = "auto",
        card_graphs: bool = True,
        metrics: ServingMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_close: Callable[[], None] = lambda: None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> ServedModel:
        """Makes a version servable: connects, checks it against its golden requests, warms every replica. Blocks.

        Args:
            snapshot: the opened snapshot.
            plan: who owns which rows.
            shards: makes the connections of one ranking replica.
            limits: of requests and batches.
            num_replicas: ranking replicas; each is a thread, and where rows are on cards they take turns over these.
            dtype: of the dense model; `auto` is bfloat16 where the device has it and the golden requests bear it out.
            card_graphs: where rows are on cards, rank by CUDA graphs.
            metrics: where times are counted.
            clock: monotonic seconds.
            on_close: called when the version is unloaded, after its replicas have ended.
            loop: ranks in place of threads, for rows in this process that are never waited for: the event loop that
                requests come from. It runs in another thread than this one.

        Raises:
            GoldenMismatchError, RouterError, ShardNodeError: as `check_version`.
            RankingModelError: if the dense model does not fit its description.
        """
        spec, limits, metrics = snapshot.spec, limits or RequestLimits(), metrics or ServingMetrics()
        schema = RequestSchema(FeatureSchema.of(spec), limits)
        parts = ranking_parts(snapshot, schema, torch.float32)
        is_none = schema.features.is_none
        batcher, counter = Batcher(limits, clock, is_none if is_none.any() else None), VersionCounter()
        vocabularies = (one.name for one in spec.tables if one.id_mapping.kind == "vocabulary")
        mapper = IdMapper(schema.features, {name: snapshot.vocabulary(name) for name in vocabularies})

        def ranking(number: int) -> Ranking:
            connected = shards(partial(metrics.shard_retry, spec.model))
            router = Router(schema.features, mapper, plan, connected)
            scorer = scorer_on_card(connected, spec.model, snapshot.version, number, limits, card_graphs)
            if scorer is None:
                return Ranking(parts, router, connected, metrics, counter, clock)
            return CardRanking(parts, router, connected, metrics, counter, scorer, clock)

        # What ranks on the loop of the APIs is checked on a thread, so that the loop goes on meanwhile.
        checked_with = batcher if loop is None else Batcher(limits, clock)
        replicas = _started(f"rank-{spec.model}-{snapshot.version}", num_replicas, checked_with, ranking, clock)
        try:
            checked = check_version(snapshot, parts, replicas, dtype, clock)
        except BaseException:
            _stop(checked_with, replicas)
            raise
        # The same list: whoever empties it lets go of all that know each other by it.
        takers = cast("list[Replica | LoopReplica]", replicas)
        if loop is not None:
            on_loop = LoopReplica(ranking(0).using(replicas[0].parts), batcher, loop, clock)
            on_loop.start()
            takers = [on_loop]
            _stop(checked_with, replicas)
        metrics.dtype_fallback(spec.model, snapshot.version, fell_back=bool(checked.fallback))
        description = ModelDescription.of(
            snapshot, limits, "bfloat16" if checked.dtype is torch.bfloat16 else "float32", checked.fallback
        )
        return cls(schema, description, batcher, takers, on_close, counter, checked)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a replica."""
        return self._batcher.num_waiting

    async def nodes(self) -> list[tuple[str, NodeInfo]]:
        """What the nodes of all shards tell of themselves now, each with its address.

        Raises:
            NotReadyError: if a replica has ended, a shard does not answer in time, or no node of a shard has this
                version any more: the fleet went on without this process, which lost sight of the registry.
            RouterError, ShardNodeError: if a shard can't be asked.
        """
        if dead := [replica for replica in self._replicas if not replica.is_alive]:
            raise NotReadyError(f"{len(dead)} of {len(self._replicas)} ranking replicas of {self.model!r} have ended")

        async def ask(ranking: Ranking) -> list[tuple[str, NodeInfo]]:
            return await ranking.nodes()

        try:
            async with asyncio.timeout(INFO_TIMEOUT_S):
                told = await asyncio.wrap_future(self._replicas[0].call(ask))
        except TimeoutError:
            raise NotReadyError(f"the shards of {self.model!r} did not answer within {INFO_TIMEOUT_S} s") from None
        asked = {info.identity.shard_index for _, info in told}
        have = {info.identity.shard_index for _, info in told if info.has(self.model, self.version)}
        if asked != have:
            raise NotReadyError(
                f"no node of shard {min(asked - have)} that answers has version {self.version} of model {self.model!r}"
            )
        return told

    def close(self) -> None:
        """Ends the replicas and frees what they hold. Not from a replica's own thread; no lease may be out."""
        _stop(self._batcher, self._replicas)
        self._on_close()


def _started(
    name: str, count: int, batcher: Batcher, ranking: Callable[[int], Ranking], clock: Callable[[], float]
) -> list[Replica]:
    replicas: list[Replica] = []

    def replica_failed() -> None:
        if all(replica.has_failed for replica in replicas):
            batcher.close("all its ranking replicas have ended")

    replicas += [
        Replica(f"{name}-{number}", batcher, partial(ranking, number), clock, replica_failed) for number in range(count)
    ]
    try:
        for replica in replicas:
            replica.start()
    except BaseException:
        _stop(batcher, replicas)
        raise
    return replicas


def _stop(batcher: Batcher, replicas: list[Replica] | list[Replica | LoopReplica]) -> None:
    batcher.close()
    for replica in replicas:
        replica.join()
    # They know each other by this list: emptied, the last reference frees the dense model and the vocabularies at once
    # and not when the interpreter next looks for cycles, which a large process rarely does.
    replicas.clear()
