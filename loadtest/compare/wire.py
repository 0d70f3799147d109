"""Bytes between a serving process and its shards: what its counters say, and what `network_cost` reckons beforehand.

What is reckoned knows the workload's bags, which share of their rows each shard has, and the wire's frames. Of what was
served it is told how many requests a batch had and how many candidates, as both depend on when requests came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from loader.snapshot.buckets import RowBuckets
from loader.snapshot.reader import Snapshot
from loadtest.compare.arms import CompareConfig, ServedArm
from loadtest.load.config import OfferedLoad
from loadtest.servers import summed
from loadtest.workloads.catalog import open_workload
from router.feature_schema import FeatureSchema
from router.id_mapping import IdMapper
from router.plan import REPLICATED, Plan
from shard_node.bags import Int64Array, KeyedBags
from shard_node.planning.network_cost import BatchBags, NetworkBytes, SentLookups, WireForm

ASKED = "asked"
"""Of bytes on the wire: those of questions to shards. Others are named by the form in which shards send back."""
BACK = "back"
"""All forms of answers together, as they are predicted."""
SAMPLED_REQUESTS = 256


@dataclass(frozen=True, slots=True)
class ServedWire:
    """What a serving process counted between two looks at its metrics.

    Attributes:
        sent: bytes for each request that was answered, by form and for `ASKED`; empty where rows are in the process.
        batch_requests: of a batch, in the mean.
        looked_up: requests of all batches, by those that were answered: where some are out at one of the looks, not 1.
        candidates: of a request, in the mean.
        has_halves: whether shards send float16 sums.
    """

    sent: Mapping[str, float]
    batch_requests: float = 1.0
    looked_up: float = 1.0
    candidates: float = 0.0
    has_halves: bool = True

    @classmethod
    def between(cls, before: str, after: str) -> Self:
        """Compare metrics, in Prometheus' text format."""
        grown = {
            name: sum(summed(after, f"shardrank_{name}").values()) - sum(summed(before, f"shardrank_{name}").values())
            for name in ("batch_requests_sum", "batch_requests_count", "batch_candidates_sum")
        }
        requests, batches = grown["batch_requests_sum"], grown["batch_requests_count"]
        return cls(
            wire_bytes(before, after),
            requests / batches if batches else 1.0,
            requests / answered if (answered := answered_between(before, after)) else 1.0,
            grown["batch_candidates_sum"] / requests if requests else 0.0,
            not any(summed(after, "shardrank_wire_fallback").values()),
        )


def answered_between(before: str, after: str) -> float:
    """Compare a serving process's metrics: requests that were answered in between."""
    old, new = (summed(one, "shardrank_requests_total", "status").get("ok", 0.0) for one in (before, after))
    return new - old


def wire_bytes(before: str, after: str) -> dict[str, float]:
    """Compare a serving process's metrics: bytes to and from shards for each request answered in between.

    By the form in which shards sent rows or sums (such as `float16`), and `ASKED` for what they were asked. Empty where
    none were sent, as with rows in the serving process.
    """

    def grown(sample: str, label: str) -> dict[str, float]:
        old, new = summed(before, sample, label), summed(after, sample, label)
        return {value: count - old.get(value, 0.0) for value, count in new.items()}

    sent = grown("shardrank_shard_answer_bytes_total", "form")
    sent[ASKED] = sum(grown("shardrank_shard_request_bytes_total", "").values())
    answered = answered_between(before, after)
    return {form: size / answered for form, size in sent.items() if size and answered}


@dataclass(frozen=True, slots=True, eq=False)
class _TableBags:
    """The sampled bags of one table: rows, and lengths of the bags of context and of candidate features."""

    rows: Int64Array
    context: Int64Array
    candidate: Int64Array


class WirePredictor:
    """Reckons the bytes of a workload's requests on any arm."""

    def __init__(self, config: CompareConfig, load: OfferedLoad, snapshot: Path) -> None:
        assert isinstance(load.workload, str)
        self._config = config
        stored = Snapshot.open(snapshot, verify=False)
        self._spec, self._schema = stored.spec, FeatureSchema.of(stored.spec)
        workload = open_workload(
            load.workload,
            ids=load.ids,
            candidates=load.candidates,
            context_features=load.context_features,
            movielens=load.movielens,
            split_seed=load.split_seed,
            varied=load.varied,
        )
        mapper = IdMapper.of_snapshot(stored, self._schema)
        rng = np.random.default_rng(load.seed)
        requests = [workload.request(rng) for _ in range(min(SAMPLED_REQUESTS, load.requests))]
        self._num_requests = len(requests)
        self._candidates = float(np.mean([one.num_candidates for one in requests]))
        self._is_weighted = any(one.bags.weights is not None for one in requests)
        self._tables = _tables(self._schema, [mapper.map(one.bags).bags for one in requests])

    def of(self, arm: ServedArm, served: ServedWire) -> dict[str, float]:
        """Return the bytes of a request, `ASKED` and `BACK`; empty for an arm without shards.

        As the counters do, it leaves out the headers of answers.
        """
        if arm.shards is None:
            return {}
        plan = Plan.make(self._spec, arm.shards, self._config.sharding, arm.cards, self._config.budgets.replicate_bytes)
        form = WireForm(
            sum_item_bytes=2 if served.has_halves and self._config.wire_dtype != "float32" else 4,
            stored=self._config.budgets.device == "cpu" or "stored" in served.sent,
            weighted=self._is_weighted,
            model_bytes=len(self._spec.model.encode()),
        )
        found = NetworkBytes.of(plan.layout, self._batch(served), self._sent(plan), form)
        of_each = served.looked_up / served.batch_requests
        return {
            ASKED: float(found.out.sum()) * of_each,
            BACK: float((found.stored + found.sums).sum()) * of_each,
        }

    def _batch(self, served: ServedWire) -> BatchBags:
        """Return a batch of as many requests as those that were served had, with as many candidates."""
        more = served.candidates / self._candidates if served.candidates else 1.0
        of_tables = [
            (
                BatchBags.counted([one.context], self._num_requests),
                BatchBags.counted([one.candidate], self._num_requests),
            )
            for one in self._tables
        ]
        return BatchBags(
            len(of_tables),
            np.concatenate([np.full(one.bags.size, number) for number, both in enumerate(of_tables) for one in both]),
            np.concatenate([one.lengths for both in of_tables for one in both]),
            np.concatenate([part for once, each in of_tables for part in (once.bags, each.bags * more)])
            * served.batch_requests,
        )

    def _sent(self, plan: Plan) -> SentLookups:
        """Return which share of each table's sampled rows lies on which shard."""
        shares = np.full((len(self._tables), plan.num_shards), 1 / plan.num_shards)
        takes_turns = np.array([bool(owners[0] == REPLICATED) for owners in plan.shard_of_bucket])
        for number, (table, owners) in enumerate(zip(plan.layout.tables, plan.shard_of_bucket, strict=True)):
            rows = self._tables[number].rows
            if rows.size and not takes_turns[number]:
                of_rows = owners[RowBuckets.of(table).of_rows(rows)]
                shares[number] = np.bincount(of_rows, minlength=plan.num_shards) / rows.size
        return SentLookups(shares, takes_turns)


def _tables(schema: FeatureSchema, requests: list[KeyedBags]) -> list[_TableBags]:
    parts: list[tuple[list[Int64Array], list[Int64Array], list[Int64Array]]] = [
        ([], [], []) for _ in schema.layout.tables
    ]
    for bags in requests:
        values, starts, lengths = bags.value_starts(), bags.bag_starts(), bags.lengths
        for place, feature in enumerate(bags.keys.tolist()):
            rows, context, candidate = parts[int(schema.table_index[feature])]
            rows.append(bags.values[values[place] : values[place + 1]])
            own = lengths[starts[place] : starts[place + 1]]
            # Ids that are not pooled are a bag each.
            own = np.ones(int(own.sum()), np.int64) if schema.is_none[feature] else own
            (context if schema.is_context[feature] else candidate).append(own)
    none = np.empty(0, np.int64)
    return [_TableBags(*(np.concatenate([none, *one]) for one in of_table)) for of_table in parts]
