"""The router: a batch's raw ids in, its pooled embeddings out."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from loader.errors import ShardrankError, UnavailableError
from loader.snapshot.buckets import ranges
from loader.snapshot.tables import DividedTable
from router.errors import HotRowsError, PlanError
from router.feature_schema import FeatureSchema
from router.hot_rows import HotLookup, HotRows
from router.id_mapping import NO_IDS, BagIds, IdMapper, MappedBags
from router.plan import BucketOwners, Plan
from shard_node.answer import (
    EXACT,
    NEWEST_SEQUENCE,
    NONE_MISSING,
    UNKNOWN_SEQUENCE,
    WIRE_FORMS,
    Answer,
    ReplyEncoding,
    add_answers,
)
from shard_node.bags import Bags, CheckedBags, Float32Array, Int32Array, Int64Array, TableLayout
from shard_node.freshness import UNKNOWN_AGE_MS, FreshnessBound, oldest
from shard_node.node import LocalShard, Shard
from shard_node.split import Part, changes, split, whole

# For how long a shard that was down is left out for rows that others have too.
BACKOFF_S = 1.0
# Far below the wire's own limits (64 MiB a frame, 4 Mi values a request), so that a node can work on one piece while
# the next one travels, and no single request takes much of its memory.
PIECE_BYTES = 16 << 20
VALUE_BYTES = 16
_ANY_AGE = FreshnessBound()


@dataclass(slots=True, eq=False)
class LookupTimes:
    """Where the time of one lookup went, in seconds.

    Attributes:
        map_s: ids to rows, features to tables.
        split_s: whose rows they are, and the bags that each shard gets.
        shard_wait_s: until all shards have answered; of rows in this process the pooling itself.
        add_s: the shards' answers added, means divided.
        wire_bytes: sent to shards behind sockets, then of their replies in each of `shard_node.answer.WIRE_FORMS`.
    """

    map_s: float = 0.0
    split_s: float = 0.0
    shard_wait_s: float = 0.0
    add_s: float = 0.0
    wire_bytes: tuple[int, ...] = (0,) * (1 + len(WIRE_FORMS))

    def count(self, answer: Answer) -> None:
        """Count what an answer took on the wire; nothing if it came through no socket."""
        if answer.asked_bytes:
            self.wire_bytes = tuple(map(add, self.wire_bytes, (answer.asked_bytes, *answer.bytes_by_form())))


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """Pooled embeddings of the features that were asked for.

    Attributes:
        schema: the model's features.
        keys: int32 [S], flat indices of the features, ascending.
        lookups: int32 [S], what was looked up for them, of `schema.lookups`; more than S where tables are sliced or
            divided.
        blocks: one for each group of the table layout, float32 [rows, embedding_dim]: the rows of the group's
            lookups in order. A pooled feature has one row for each bag, one with pooling `none` one for each id.
        row_starts: int64 [S], the row, in its group's block, at which each of `lookups` begins.
        num_rows: int64 [S], how many rows each feature has in its blocks.
        bags: the rows that were asked for, by feature, after `skip` has left out unknown ids.
        rejected: ids that have no row, under `unknown_id: reject`; what is here for their bags must not be used.
        missing: keys that have no row, in the order of the ids; of bags as they were asked for.
        times: where the time went.
        sequence: every row is of this delta or a later one.
        age_ms: of the oldest rows, as `shard_node.freshness` has it.
    """

    schema: FeatureSchema
    keys: Int32Array
    lookups: Int32Array
    blocks: list[Float32Array]
    row_starts: Int64Array
    num_rows: Int64Array
    bags: Bags
    rejected: BagIds
    times: LookupTimes = field(default_factory=LookupTimes)
    sequence: int = UNKNOWN_SEQUENCE
    age_ms: int = UNKNOWN_AGE_MS
    missing: BagIds = NO_IDS

    def feature(self, index: int, projections: Mapping[str, Float32Array] | None = None) -> Float32Array:
        """Return one feature by its flat index, float32 [bags, embedding_dim]: a view, or made of slices and parts.

        With pooling `none` it is [ids, embedding_dim]. `projections` are float32 [columns, embedding_dim] by the name
        of the part. KeyError if it was not asked for, or a projection is missing.
        """
        stored, spec = self.stored(index), self.schema.spec
        table = spec.table_of(self.schema.features[index].name)
        if isinstance(table, DividedTable):
            needed = spec.projections()
            parts = zip(table.parts, stored, strict=True)
            stored = [rows @ (projections or {})[part] if part in needed else rows for part, rows in parts]
            return stored[0] if len(stored) == 1 else np.add.reduce(stored)
        return stored[0] if len(stored) == 1 else np.concatenate(stored, axis=1)

    def stored(self, index: int) -> list[Float32Array]:
        """Return what was looked up for a feature, a view for each of its lookups. KeyError if it was not asked for."""
        num_rows, lookups = int(self.num_rows[self._segment(index)]), self.schema.lookups
        views = []
        for number in lookups.of_feature[index]:
            start = int(self.row_starts[np.searchsorted(self.lookups, number)])
            views.append(self.blocks[int(lookups.group[number])][start : start + num_rows])
        return views

    def lengths(self, index: int) -> Int64Array:
        """Count the ids of each bag of a feature, int64 [bags]. KeyError if the feature was not asked for."""
        segment = self._segment(index)
        starts = self.bags.bag_starts()
        return np.diff(self.bags.offsets[int(starts[segment]) : int(starts[segment + 1]) + 1])

    def _segment(self, index: int) -> int:
        segment = int(np.searchsorted(self.keys, index))
        if segment == self.keys.size or int(self.keys[segment]) != index:
            raise KeyError(self.schema.features[index].name)
        return segment


class LookedUp(NamedTuple):
    """What is looked up for a batch.

    Attributes:
        num_rows: int64 [S], how many rows each feature has in what is answered.
        complete: the bags of all lookups, before parts of divided tables have left out what is not theirs: bag lengths.
        rows: the same bags, with the rows of stored tables. Keys are numbers of lookups.
    """

    num_rows: Int64Array
    complete: Bags
    rows: Bags


class Cutter:
    """Cuts parts of one model's bags into pieces that fit the wire: contiguous runs of bags, parts themselves.

    `piece_bytes` is about what ids out and answers back of one piece take; a single bag may exceed it.
    """

    def __init__(self, layout: TableLayout, piece_bytes: int = PIECE_BYTES) -> None:
        self._bag_bytes = layout.bag_bytes
        self._max_bag_bytes = int(layout.bag_bytes.max())
        self._piece_bytes = piece_bytes

    def cut(self, part: Part) -> list[Part]:
        """Return the pieces, in order; the part itself if it fits in one."""
        bags = part.bags
        if bags.num_bags * self._max_bag_bytes + bags.num_values * VALUE_BYTES <= self._piece_bytes:
            return [part]
        bag_cost = np.repeat(self._bag_bytes[bags.keys], bags.bags_per_key) + bags.lengths * VALUE_BYTES
        end_cost = np.cumsum(bag_cost)
        edges: list[int] = [0]
        while edges[-1] < bags.num_bags:
            spent = int(end_cost[edges[-1] - 1]) if edges[-1] else 0
            edges.append(max(edges[-1] + 1, int(np.searchsorted(end_cost, spent + self._piece_bytes, side="right"))))
        starts, pieces = bags.bag_starts(), []
        for first, end in itertools.pairwise(edges):
            clipped: Int64Array = np.clip(starts, first, end)
            counts = np.diff(clipped)
            has_bags = counts > 0
            values = slice(int(bags.offsets[first]), int(bags.offsets[end]))
            piece = Bags(
                bags.keys[has_bags],
                counts[has_bags],
                bags.offsets[first : end + 1] - values.start,
                bags.values[values],
                None if bags.weights is None else bags.weights[values],
            )
            bag_index, positions = part.bag_index[first:end], part.positions[values]
            pieces.append(Part(part.owner, piece, bag_index, positions, part.shares_no_bag))
        return pieces


class Router:
    """Looks up batches of one model version over its shards, one for each shard of the plan, in order.

    `hot` are copies of rows in this process, pooled here while shards are asked for the others.
    """

    def __init__(
        self,
        schema: FeatureSchema,
        mapper: IdMapper,
        plan: Plan,
        shards: Sequence[Shard],
        clock: Callable[[], float] = time.monotonic,
        hot: HotRows | None = None,
    ) -> None:
        if len(shards) != plan.num_shards:
            raise PlanError(f"the plan has {plan.num_shards} shards, but {len(shards)} were given")
        self._hot = hot
        self.schema = schema
        self.plan = plan
        self.mapper = mapper
        self._shards = tuple(shards)
        # Rows that are all in this process need no split.
        self._all_rows = shards[0] if len(shards) == 1 and isinstance(shards[0], LocalShard) else None
        if hot is not None and self._all_rows is not None:
            raise HotRowsError("hot rows are copies of rows on shard nodes, but all rows are in this process")
        self._cutter = Cutter(plan.layout)
        self._is_narrow = max(table.last_value for table in plan.layout.tables) < 2**31
        self._owners = BucketOwners(plan)
        self._has_rows = bool(schema.is_none.any())
        self._has_mean = bool(schema.is_mean.any())
        lookups = self._lookups = schema.lookups
        self._is_repeated = lookups.feature.size > len(schema.features)
        # The lookups of each feature, one feature after the other.
        self._by_feature = np.concatenate([np.array(numbers, np.int64) for numbers in lookups.of_feature])
        self._num_lookups = np.array([len(numbers) for numbers in lookups.of_feature])
        self._first_lookup = np.cumsum(self._num_lookups) - self._num_lookups
        # A rank request has all features. What follows from that alone is worked out once: the lookup that each one's
        # group begins with, and the first lookup of each table.
        self._first_in_group = lookups.group_starts[lookups.group]
        self._firsts = np.flatnonzero(changes(lookups.table))
        self._tables = lookups.table[self._firsts]
        self._round = itertools.count()
        self._clock = clock
        self._down_until = [float("-inf")] * len(self._shards)

    @property
    def waits(self) -> bool:
        """Whether a lookup may have to wait for a shard that is not in this process."""
        return self._all_rows is None

    def local_freshness(self, model: str, version: int) -> tuple[int, int]:
        """Return the last delta that is applied to rows that are all in this process, and their age in milliseconds."""
        assert self._all_rows is not None
        progress = self._all_rows.node.generations.payload(model, version).deltas.now
        return progress.sequence, progress.age_ms(time.time())

    def rows_to_fetch(self, mapped: MappedBags) -> LookedUp:
        """Find the rows of all lookups, for whoever pools them himself; `mapped` is what `mapper` gives."""
        by_feature, parts = mapped.bags, self.mapper.parts
        rows = by_feature if parts is None else parts.find(by_feature)
        by_row = _bag_per_id(rows, self.schema.is_none) if self._has_rows else rows
        complete = _of_lookups(by_row, self._lookups.feature) if self._is_repeated else by_row
        return LookedUp(by_row.bags_per_key, complete, complete if parts is None else parts.take(complete))

    async def lookup(
        self, model: str, version: int, bags: Bags, deadline: float, forms: ReplyEncoding = EXACT
    ) -> Embeddings:
        """Map, split, fan out and add.

        Keys of `bags` are flat feature indices, values raw ids. Every shard must answer with this version; `deadline`
        and `forms` are as of `Shard.pool`. Where no rows are within `forms.bound`, the newest ones are returned.

        Raises:
            ShardrankError: if a shard can't answer.
        """
        times, started_at = LookupTimes(), self._clock()
        mapped = self.mapper.map(bags)
        num_rows, complete, by_lookup = self.rows_to_fetch(mapped)
        by_table = self._by_table(by_lookup)
        mapped_at = self._clock()
        times.map_s = mapped_at - started_at
        if self._all_rows is not None:
            answer = self._all_rows.node.answer(model, version, by_table)
            started_at = self._clock()
            times.shard_wait_s = started_at - mapped_at
        else:
            answer = await self._pool(model, version, by_table, deadline, forms, times)
            started_at = self._clock()
        blocks, requested, missing = cast("list[Float32Array]", answer.sums), mapped.bags, NO_IDS
        if answer.missing.size:
            without = self.without_missing(requested, LookedUp(num_rows, complete, by_lookup), answer.missing, blocks)
            missing, requested, (num_rows, complete, by_lookup) = without
        starts, first_in_group = by_lookup.bag_starts(), self._first_in_group
        if by_lookup.keys.size < self._lookups.feature.size:
            first_key = np.searchsorted(by_lookup.keys, self._lookups.group_starts)
            first_in_group = first_key[self._lookups.group[by_lookup.keys]]
        if self._has_mean:
            self._divide_means(blocks, complete)
        embeddings = Embeddings(
            schema=self.schema,
            keys=bags.keys,
            lookups=by_lookup.keys,
            blocks=blocks,
            row_starts=starts[:-1] - starts[first_in_group],
            num_rows=num_rows,
            bags=requested,
            rejected=mapped.rejected,
            times=times,
            sequence=answer.sequence,
            age_ms=answer.age_ms,
            missing=missing,
        )
        times.add_s += self._clock() - started_at
        return embeddings

    async def close(self) -> None:
        """Close the shards."""
        for shard in self._shards:
            await shard.close()

    async def _pool(
        self, model: str, version: int, bags: CheckedBags, deadline: float, forms: ReplyEncoding, times: LookupTimes
    ) -> Answer:
        """Return the blocks, with a delta that all rows have and the age of the oldest."""
        num_shards, down = len(self._shards), dict[int, ShardrankError]()
        with nullcontext() if self._hot is None else self._hot.used() as used:
            started_at = self._clock()
            hot, sequence, age_ms = used or (None, 0, 0)
            # Copies that are too old are no use: nodes may have newer rows.
            is_new = (forms.bound or _ANY_AGE).allows(sequence, age_ms)
            lookup = hot.find(bags) if hot is not None and is_new else None
            while True:
                parts = self._parts(bags, lookup)
                sent_at = self._clock()
                times.split_s += sent_at - started_at
                hits = parts[-1] if parts and parts[-1].owner == num_shards else None
                remote = parts if hits is None else parts[:-1]
                # A shard that is down is split to again only if no other has the rows that it was needed for.
                for part in remote:
                    if part.owner in down:
                        raise down[part.owner]
                calls: list[asyncio.Future[Answer]] = []
                try:
                    for part in remote:
                        calls.append(self._shards[part.owner].pool(model, version, part.bags, deadline, forms))
                    local: list[Answer] = []
                    if hits is not None and lookup is not None:
                        copies = lookup.hot.answer(hits, lookup.numbers.take(hits.positions), forms)
                        local.append(replace(copies, sequence=sequence, age_ms=age_ms))
                    replies = [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)
                except UnavailableError as error:
                    failed = [call.done() and not call.cancelled() and call.exception() is error for call in calls]
                    if True not in failed:
                        raise
                    started_at, shard = self._clock(), remote[failed.index(True)].owner
                    times.shard_wait_s += started_at - sent_at
                    down[shard] = error
                    self._down_until[shard] = started_at + BACKOFF_S
                    continue
                finally:
                    # One shard's failure is the batch's.
                    for call in calls:
                        call.cancel()
                break
            answered_at = self._clock()
            times.shard_wait_s += answered_at - sent_at
            answers = [*replies, *local]
            for answer in answers:
                times.count(answer)
            blocks = add_answers(self.plan.layout, bags, parts, answers)
            times.add_s += self._clock() - answered_at
            if self._hot is not None and lookup is not None:
                self._hot.looked_up(bags, lookup, hits)
            sequence = min([answer.sequence for answer in answers], default=NEWEST_SEQUENCE)
            lacking = [(part, answer) for part, answer in zip(parts, answers, strict=True) if answer.missing.size]
            missing = [part.positions.take(answer.missing) for part, answer in lacking]
            in_order = np.sort(np.concatenate(missing)) if missing else NONE_MISSING
            age_ms = oldest([answer.age_ms for answer in answers])
            return Answer(blocks, sequence=sequence, age_ms=age_ms, missing=in_order)

    def without_missing(
        self,
        by_feature: Bags,
        looked_up: LookedUp,
        positions: npt.NDArray[np.integer[Any]],
        blocks: list[Float32Array] | None = None,
    ) -> tuple[BagIds, Bags, LookedUp]:
        """Tell which keys have no row, and take those out of bags, and out of blocks, whose table leaves them out.

        `positions`, [k], are of values of `looked_up.rows`. What one slice of a table misses, all do: a delta may have
        come to one of them before the others. `blocks` are None where nothing is pooled yet.
        """
        lookups, rows = self._lookups, looked_up.rows
        segment = np.searchsorted(rows.value_starts(), positions, side="right") - 1
        within = positions - rows.value_starts()[segment]
        feature, within = np.unique([lookups.feature[rows.keys[segment]], within], axis=1)
        of_feature = np.searchsorted(by_feature.keys, feature)
        at = by_feature.value_starts()[of_feature] + within
        bag = np.searchsorted(by_feature.offsets, at, side="right") - 1 - by_feature.bag_starts()[of_feature]
        missing = BagIds(feature.astype(np.int32), bag, by_feature.values[at])
        is_skipped = self.schema.skips_missing[feature]
        if not is_skipped.any():
            return missing, by_feature, looked_up
        by_feature = by_feature.kept(_all_but(at[is_skipped], by_feature.num_values))
        # Of each, in all slices.
        counts = self._num_lookups[feature[is_skipped]]
        number = self._by_feature[ranges(self._first_lookup[feature[is_skipped]], counts)]
        within, of_feature = within[is_skipped].repeat(counts), of_feature[is_skipped].repeat(counts)
        segment, is_first = np.searchsorted(rows.keys, number), lookups.column[number] == 0
        all_positions: Int64Array = rows.value_starts()[segment] + within
        # An id of a sequence is a bag of its own, which goes with it: a row of its block.
        is_row = self.schema.is_none[lookups.feature[number]]
        gone = np.searchsorted(rows.offsets, all_positions[is_row], side="right") - 1
        groups = lookups.group[number[is_row]]
        at_group = rows.bag_starts()[np.searchsorted(rows.keys, lookups.group_starts[groups])]
        if blocks is not None:
            for group in np.unique(groups).tolist():
                blocks[group] = np.delete(blocks[group], (gone - at_group)[groups == group], axis=0)
        gone_per_key = np.bincount(segment[is_row], minlength=rows.keys.size)
        gone_rows = np.bincount(of_feature[is_row & is_first], minlength=by_feature.keys.size)
        complete, kept = looked_up.complete, _without(rows, all_positions, gone, gone_per_key)
        if complete is not rows:
            complete = _without(complete, complete.value_starts()[segment] + within, gone, gone_per_key)
        else:
            complete = kept
        return missing, by_feature, LookedUp(looked_up.num_rows - gone_rows, complete, kept)

    def _parts(self, bags: Bags, hot_lookup: HotLookup | None) -> list[Part]:
        """Divide bags over the shards, into pieces that fit the wire; the longest first, and last what is hot."""
        num_shards = len(self._shards)
        if num_shards == 1 and hot_lookup is None:
            return self._cutter.cut(whole(bags))
        if self._is_narrow:
            # Half of the bytes for all that follows, the wire included.
            bags = bags.with_values(bags.values.astype(np.int32), bags.weights)
        owners = self._owners.of(bags, self._up, next(self._round))
        if hot_lookup is None:
            parts, hot = split(bags, owners, range(num_shards)), []
        else:
            np.putmask(owners, hot_lookup.is_hit, num_shards)
            parts = split(bags, owners, range(num_shards + 1))
            hot = [parts.pop()] if parts and parts[-1].owner == num_shards else []
        parts.sort(key=lambda part: -part.positions.size)
        return [piece for part in parts for piece in self._cutter.cut(part)] + hot

    def _up(self) -> npt.NDArray[np.int16]:
        """Return the shards that were not down a moment ago, int16; all if none was up."""
        now = self._clock()
        up = [shard for shard, until in enumerate(self._down_until) if until <= now] or range(len(self._shards))
        return np.array(up, np.int16)

    def _by_table(self, bags: Bags) -> CheckedBags:
        """Join neighbouring lookups in one table, whose values the id mapping checked, into one segment."""
        if bags.keys.size == self._lookups.feature.size:
            firsts, tables = self._firsts, self._tables
        else:
            by_lookup = self._lookups.table[bags.keys]
            firsts = np.flatnonzero(changes(by_lookup))
            tables = by_lookup[firsts]
        counts = bags.bags_per_key
        if firsts.size < counts.size:
            counts = np.add.reduceat(counts, firsts)
        return CheckedBags(tables, counts, bags.offsets, bags.values, bags.weights, layout=self.schema.layout)

    def _divide_means(self, blocks: list[Float32Array], bags: Bags) -> None:
        # A mean is a sum divided once, by the length of the whole bag. Runs of mean features are divided together.
        mean = self.schema.is_mean[self._lookups.feature[bags.keys]]
        group_of = self._lookups.group[bags.keys]
        for number in np.unique(group_of[mean]).tolist():
            block = blocks[number]
            if not block.flags.writeable:
                block = blocks[number] = block.copy()
            in_group = group_of == number
            lengths = np.ones(block.shape[0], np.float32)
            of_bags = np.repeat(mean & in_group, bags.bags_per_key)
            lengths[np.repeat(mean[in_group], bags.bags_per_key[in_group])] = np.maximum(bags.lengths[of_bags], 1)
            block /= lengths[:, None]


def _of_lookups(bags: Bags, feature: Int32Array) -> Bags:
    """Repeat the bags of each feature for each lookup of it, int32 [L]: keys become numbers of lookups."""
    segment_of = np.full(int(feature.max()) + 1, -1, np.int64)
    segment_of[bags.keys] = np.arange(bags.keys.size)
    segments = segment_of[feature]
    keys = np.flatnonzero(segments >= 0).astype(np.int32)
    segments = segments[keys]
    bags_per_key = bags.bags_per_key[segments]
    values = ranges(bags.value_starts()[segments], bags.values_per_key()[segments])
    return Bags.from_lengths(
        keys,
        bags_per_key,
        bags.lengths[ranges(bags.bag_starts()[segments], bags_per_key)],
        bags.values[values],
        None if bags.weights is None else bags.weights[values],
    )


def _all_but(positions: Int64Array, size: int) -> npt.NDArray[np.bool_]:
    kept = np.ones(size, np.bool_)
    kept[positions] = False
    return kept


def _without(bags: Bags, values: Int64Array, gone_bags: Int64Array, gone_per_key: Int64Array) -> Bags:
    """Return bags without some values, and without some bags, which are empty then: positions, int64 [k] and [b]."""
    kept = bags.kept(_all_but(values, bags.num_values))
    lengths = kept.lengths[_all_but(gone_bags, bags.num_bags)]
    return Bags.from_lengths(bags.keys, bags.bags_per_key - gone_per_key, lengths, kept.values, kept.weights)


def _bag_per_id(bags: Bags, is_none: npt.NDArray[np.bool_]) -> Bags:
    """Turn each id of a `none` feature into a bag of its own, so that a shard only ever sums."""
    none = is_none[bags.keys]
    if not none.any():
        return bags
    lengths = bags.lengths
    in_none = np.repeat(none, bags.bags_per_key)
    new_lengths = np.repeat(np.where(in_none, 1, lengths), np.where(in_none, lengths, 1))
    bags_per_key = np.where(none, bags.values_per_key(), bags.bags_per_key)
    return Bags.from_lengths(bags.keys, bags_per_key, new_lengths, bags.values, bags.weights)
