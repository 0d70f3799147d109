"""Which shard owns each value of a batch: from rows to buckets to shards, by a fixed number of vector operations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from loader.snapshot.codecs import bucket_shift
from router.plan import REPLICATED, Plan
from shard_node.bags import Int64Array, KeyedBags
from shard_node.split import Owners

# Up to so many shards, comparing each bucket with where the next shard's begin is faster than looking it up (measured:
# 52,000 rows take 8 us a comparison, 38 us looked up).
MAX_COMPARED_SHARDS = 4


class BucketOwners:
    """Who owns which bucket, of one plan.

    Most plans divide all large tables alike, in runs of buckets: then a row's owner follows from its bucket without
    knowing its table.

    Args:
        plan: who owns what.
    """

    def __init__(self, plan: Plan) -> None:
        self._owner = plan.shard_of_bucket.reshape(-1)
        self._shift = np.array([bucket_shift(one.bucketing, one.num_embeddings) for one in plan.layout.tables])
        self._dtype: type[np.uint8] | type[np.uint16] = np.uint8 if plan.num_shards <= 256 else np.uint16
        is_replicated = plan.shard_of_bucket[:, 0] == REPLICATED
        self._has_replicated = bool(is_replicated.any())
        divided = np.flatnonzero(~is_replicated)
        self._alike = _alike(plan.shard_of_bucket[divided], self._shift[divided])
        # Shard s has the buckets from the s-th of these on; only if each has a run of them.
        self._run_begins: tuple[int, ...] = ()
        if self._alike:
            self._common_shift = int(self._shift[divided[0]])
            self._common_owner = plan.shard_of_bucket[divided[0]].astype(self._dtype)
            if plan.num_shards <= MAX_COMPARED_SHARDS and (np.diff(self._common_owner.astype(np.int16)) >= 0).all():
                begins = np.searchsorted(self._common_owner, np.arange(1, plan.num_shards)).tolist()
                self._run_begins = tuple(begins) if all(begin < 256 for begin in begins) else ()

    def of(self, bags: KeyedBags, up: Callable[[], npt.NDArray[np.int16]], turn: int) -> Owners:
        """The shard of each value.

        Args:
            bags: keys are tables, values rows of them.
            up: gives the shards (int16, at least one) that may stand in as owners of what every shard has; not asked
                if there is no such table.
            turn: with which of them to begin; the tables of a batch take turns from there on.

        Returns:
            uint8 [n], or uint16 [n] if there are more than 256 shards.
        """
        if self._alike and not self._has_replicated:
            return self._of_alike(bags.values)
        values_per_key = bags.values_per_key()
        cell = (bags.values >> np.repeat(self._shift[bags.keys], values_per_key)) & 255
        cell += np.repeat(bags.keys.astype(np.int64) << 8, values_per_key)
        owner = self._owner.take(cell)
        if self._has_replicated:
            # Turning from batch to batch spreads these rows evenly, a table at a time.
            shards = up()
            stand_in = shards[(bags.keys + turn % shards.size) % shards.size]
            owner = np.where(owner == REPLICATED, np.repeat(stand_in, values_per_key), owner)
        owners: Owners = owner.astype(self._dtype)
        return owners

    def _of_alike(self, rows: Int64Array) -> Owners:
        # The low 8 bits are the bucket: narrowing is what masks.
        bucket = (rows >> self._common_shift if self._common_shift else rows).astype(np.uint8)
        if not self._run_begins:
            looked_up: Owners = self._common_owner.take(bucket)
            return looked_up
        owner: Owners = (bucket >= self._run_begins[0]).view(np.uint8)
        for begin in self._run_begins[1:]:
            owner += bucket >= begin
        return owner


def _alike(owners: npt.NDArray[np.int16], shifts: Int64Array) -> bool:
    return bool(len(owners)) and bool((owners == owners[0]).all()) and bool((shifts == shifts[0]).all())
