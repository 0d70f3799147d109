"""Publish the rows that a trainer changed, into a stream that is kept whole and bounded. See docs/deltas.md."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from loader.access_counts import AccessCounter, AccessCounts, write_access_counts
from loader.deltas.batch import (
    DELETE_KEYS,
    UPSERT_KEYS,
    WRITE_ROWS,
    DeltaBatch,
    keyed_update,
    rows_per_batch,
    stored_updates,
)
from loader.deltas.chain import (
    FORMAT,
    HEADS_BYTES,
    NOTHING,
    NUM_PARTITIONS,
    PART_BYTES,
    Commit,
    Tail,
    encode_commit,
    entry_digest,
    is_commit,
    partitions_of,
)
from loader.deltas.dense import DEFAULT_MAX_DRIFT, checked_tensors, write_step
from loader.errors import (
    DeltaError,
    DeltaFormatError,
    DeltaLostError,
    RegistryConflictError,
    RegistryUnavailableError,
    StreamFullError,
    StreamSequenceError,
)
from loader.registry.fleet import DenseStep, FleetRegistry, delta_stream, parse_record
from loader.registry.registry import MAX_VALUE_BYTES, Publisher, Registry, StreamEntry
from loader.rollout.plan import read_rollout
from loader.snapshot.buckets import Int64Array
from loader.snapshot.codecs import ByteArray
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.publishing import stream_end
from loader.snapshot.reader import Snapshot
from loader.snapshot.row_classes import RowClasses
from loader.snapshot.store import Store
from loader.snapshot.tables import MAX_NUM_EMBEDDINGS, TableSpec
from loader.stores import open_store
from loader.stores.cache import StoreUrl

DEFAULT_MAX_STREAM_ENTRIES: Final = 65_536
DEFAULT_RETRY_S: Final = 30.0
ENTRY_BYTES: Final = 4096 + HEADS_BYTES + NUM_PARTITIONS * PART_BYTES
"""Upper bound of an entry without its rows: names, headers, and the registry's share."""
MAX_PAUSE_S: Final = 1.0
SETTLED_S: Final = 5.0
"""Longer than an announcement lasts: until then a node that has not announced itself may be there."""
MAX_REMEMBERED: Final = 65_536
"""Of a publisher's last deltas, whose digests are kept to tell which of them a registry has lost."""
_NAMED_ROWS: Final = 8
_MERGED_ROWS: Final = 1 << 20

_log = logging.getLogger(__name__)

T = TypeVar("T")


class AsyncDeltaPublisher:
    """Publishes changed rows from an event loop; `DeltaPublisher` does it from a thread.

    Several publishers may share a stream: each names the entry that it saw last, and finds the next free number. What
    the registry had acknowledged and has lost is told by the next call, a DeltaLostError, once: its rows may be
    published again.

    Args:
        registry: where the fleet is; stays the caller's to close.
        base_version: the published version that training goes on from. Deltas go to the stream that it continues.
        store: for tables divided by popularity, and for dense weights.
        max_stream_entries, max_stream_bytes: limits of the stream; None for what the registry says
            (`Registry.max_stream_bytes`). What a version in use needs is never dropped.
        name: of a publisher of which there is one; whoever begins under the same name supersedes this one. "" for one
            of any number.
        min_replicas: a delta is published once so many replicas of Redis have it; docs/deltas.md says what that does
            not promise.
        retry_s: how long calls to a registry that does not answer are repeated.
        clock: seconds since the epoch; dates the deltas. `monotonic` and `sleep` bound retries.
    """

    def __init__(
        self,
        registry: Registry,
        model: str,
        base_version: int,
        store: str | Path | StoreUrl | Store | None = None,
        *,
        max_stream_entries: int = DEFAULT_MAX_STREAM_ENTRIES,
        max_stream_bytes: int | None = None,
        name: str = "",
        min_replicas: int = 0,
        retry_s: float = DEFAULT_RETRY_S,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
    ) -> None:
        self._fleet = FleetRegistry(registry)
        self._model, self._base_version = model, base_version
        self._store = store if isinstance(store, Store | None) else open_store(store)
        self._max_stream_entries, self._given_bytes = max_stream_entries, max_stream_bytes
        self._by, self._retry_s = Publisher(name, 0, min_replicas), retry_s
        self._clock, self._monotonic, self._sleep = clock, monotonic, sleep
        self._lock = asyncio.Lock()
        # Of the version, once it is open.
        self._spec: ModelSpec | None = None
        self._identity = ""
        self._classes: dict[str, RowClasses] = {}
        self._pruned: dict[str, AccessCounter] = {}
        self._delta_base = self._contained = 0
        self._stream = ""
        self._first = 0
        # The highest number that was ever seen, and where the registry's stream ends: its last entry, and that as tail.
        self._sequence = 0
        self._last: StreamEntry | None = None
        self._tail = Tail()
        self._has_commits, self._read_since = False, math.inf
        # An upper bound of the stream's bytes, and their limit; inf until they were measured.
        self._stream_bytes = self._max_stream_bytes = math.inf
        # Number and digest of each delta that this publisher has appended, and those that were lost, until it is told.
        self._acknowledged: deque[tuple[int, bytes]] = deque(maxlen=MAX_REMEMBERED)
        self._lost: set[int] = set()

    async def open(self) -> None:
        """Read the version's record; the first `publish` does it otherwise. Raises as `publish`."""
        async with self._lock:
            await self._opened()

    async def publish(self, table: str, rows: Any, values: Any) -> int:
        """Publish rows as they are from now on. Durable when it returns; many rows become several deltas.

        May be repeated after a failure: rows that are published twice are the same rows. Rows that the table is pruned
        of are not written, but counted: see `pruned_updates`.

        Args:
            table: the table's name; where its parts are trained as such (narrower ones, quotients and remainders), a
                part's name.
            rows: whole numbers [n] of the table, whatever parts it is stored as; of duplicates the last one counts.
            values: floats [n, embedding_dim], arrays or tensors.

        Returns the sequence number of the last delta; with no rows, of the last one that is known.

        Raises:
            DeltaFormatError: an unknown table, or one whose parts are trained as such; wrong rows, shapes or values.
            DeltaError: the version, or its spec, is not published; the store is missing.
            DeltaLostError: the registry lost deltas that it had acknowledged; nothing is published by this call.
            PublisherSupersededError: another publisher of this name has begun.
            StreamFullError: versions in use need all that is in the stream, and it has no room for more.
            SnapshotError: the store can't be read, or has another version, of a table that is divided by popularity.
            RegistryUnavailableError: the registry did not answer for `retry_s`.
        """
        async with self._lock:
            spec = await self._opened()
            classes = await self._row_classes(spec, table)
            updates, pruned = await asyncio.to_thread(stored_updates, spec, table, rows, values, classes)
            await self._check_end()
            for update in updates:
                await self._append_all(*update)
            if pruned.size:
                if table not in self._pruned:
                    more = f" and {pruned.size - _NAMED_ROWS} more" if pruned.size > _NAMED_ROWS else ""
                    _log.warning(
                        "table %r of %r is pruned of rows %s%s: updates of such rows are not written, but counted",
                        *(table, self._model, pruned[:_NAMED_ROWS].tolist(), more),
                    )
                counter = self._pruned.setdefault(table, AccessCounter(MAX_NUM_EMBEDDINGS, _MERGED_ROWS))
                counter.add(pruned)
                if counter.is_full:
                    counter.fold()
            return self._tail.sequence

    async def upsert(self, table: str, keys: Any, values: Any) -> int:
        """Publish rows of keys, which come into the table if it has them not, as `publish` does.

        `keys` are whole numbers [n] of 64 bits, unsigned ones taken by their bits, or, of a table of strings, these.
        Raises as `publish`, and DeltaError if a node of an older release follows the stream, or some node has refused
        keys beyond its table's capacity (`key_capacity`): it applies no more before a snapshot with more is served.
        """
        return await self._update_keys(table, keys, values, UPSERT_KEYS)

    async def delete(self, table: str, keys: Any) -> int:
        """Publish that keys go, with their rows; one that is not there changes nothing. As `upsert`."""
        return await self._update_keys(table, keys, None, DELETE_KEYS)

    async def _update_keys(self, table: str, keys: Any, values: Any | None, operation: int) -> int:
        async with self._lock:
            spec = await self._opened()
            update = await asyncio.to_thread(keyed_update, spec, table, keys, values)
            await self._check_end()
            await self._check_capacity()
            await self._append_all(*update, operation)
            return self._tail.sequence

    async def _append_all(
        self, table: TableSpec, numbers: Int64Array, stored: ByteArray, operation: int = WRITE_ROWS
    ) -> None:
        step = rows_per_batch(stored.shape[1])
        for begin in range(0, numbers.size, step):
            batch = DeltaBatch(
                model=self._model,
                delta_base=self._delta_base,
                base_version=self._base_version,
                sequence=1,
                published_at=self._clock(),
                table=table.name,
                dtype=table.dtype,
                embedding_dim=table.embedding_dim,
                column_dims=table.column_dims,
                rows=numbers[begin : begin + step],
                stored=stored[begin : begin + step],
                operation=operation,
            )
            await self._append(batch, partitions_of(table, batch.rows))

    async def _check_capacity(self) -> None:
        """Raise DeltaError (`key_capacity`) if a node with the live version has refused keys of this stream."""
        nodes = await self._again(self._fleet.nodes)
        full = [
            (node, report)
            for node in nodes
            for report in node.versions
            if report.model == self._model and report.delta_refusal == "key_capacity"
        ]
        if not full:
            return
        wanted = await self._again(lambda: self._fleet.wanted_model(self._model))
        for node, report in full:
            record = await self._again(partial(self._fleet.version, self._model, report.version))
            is_live = wanted is None or wanted.live in (None, report.version)
            if is_live and record is not None and record.delta_base == self._delta_base:
                problem = f"node {node.node_id} follows no further: {report.reason}"
                raise DeltaError(problem, kind=report.delta_refusal)

    @property
    def pruned_updates(self) -> Mapping[str, AccessCounts]:
        """The rows that were published though their table is pruned of them, by table, and how often each was."""
        sizes = {table.name: table.num_embeddings for table in self._spec.divided} if self._spec is not None else {}
        return {table: replace(counter.fold(), limit=sizes[table]) for table, counter in list(self._pruned.items())}

    def write_pruned(self, path: str | Path) -> int:
        """Write `pruned_updates`, if there are any, as a file of access counts for `shardrank export --keep`.

        Returns how many rows are in it. Raises OSError if it can't be written.
        """
        if pruned := self.pruned_updates:
            write_access_counts(Path(path), pruned)
        return sum(rows.keys.size for rows in pruned.values())

    async def publish_dense(
        self,
        step: int,
        tensors: Mapping[str, Any],
        *,
        sequence: int | None = None,
        max_drift: float = DEFAULT_MAX_DRIFT,
    ) -> int:
        """Publish a complete set of dense weights. Durable when it returns; the same weights again change nothing.

        Serving processes answer with it once the rows of all shards that they read have the deltas of `sequence`.

        Args:
            step: of training, from 1 on; higher than that of all steps published before.
            tensors: of the names and shapes of the version's dense tensors; arrays or tensors on any device.
            sequence: the last delta of rows that the weights were trained with; None for the last of the stream.
            max_drift: a step whose golden scores differ by more from what the weights before give is refused.

        Returns the sequence number that rows must have. Raises as `publish`, DeltaError also for a dense model that is
        a program, and RegistryConflictError if that step, or a later one, was published before.
        """
        if not 1 <= step < 2**63:
            raise DeltaFormatError(f"dense step {step} is not within 1..2^63-1")
        if not 0 < max_drift <= 1:
            raise DeltaFormatError(f"max_drift {max_drift} is not above 0 and at most 1")
        if self._store is None:
            raise DeltaError("dense weights lie in the store: give the publisher `store`")
        store, model, version = self._store, self._model, self._base_version
        async with self._lock:
            await self._opened()
            await self._check_end()
            last = self._tail.sequence
            sequence = last if sequence is None else sequence
            if not 0 <= sequence <= last:
                raise DeltaFormatError(f"sequence {sequence} is not within 0..{last}, the last delta")
            newest = await self._again(lambda: self._fleet.dense_step(model, version))
            if newest is not None and step < newest.step:
                raise RegistryConflictError(f"dense step {newest.step} is published; {step} must be higher")
            accepted = await self._again(lambda: self._fleet.dense_step(model, version, accepted=True))
            needed = await self._again(lambda: self._entry(sequence))

            def write() -> tuple[str, int]:
                checked = self._read(store, lambda snapshot: checked_tensors(snapshot, tensors))
                return write_step(store, model, version, step, checked, accepted)

            sha256, size_bytes = await asyncio.to_thread(write)
            if newest is not None and step == newest.step:
                if sha256 != newest.sha256:
                    raise RegistryConflictError(f"dense step {step} is published with other weights")
                return newest.sequence
            record = DenseStep(
                model=model,
                version=version,
                step=step,
                sequence=sequence,
                digest="" if needed is None else entry_digest(needed.payload).hex(),
                sha256=sha256,
                size_bytes=size_bytes,
                max_drift=max_drift,
                published_at=self._clock(),
            )
            await self._again(lambda: self._fleet.put_dense_step(record))
            return sequence

    @property
    def spec(self) -> ModelSpec:
        """What the version is made of. Raises DeltaError before it is open."""
        if self._spec is None:
            raise DeltaError("the publisher is not open yet")
        return self._spec

    @property
    def stream(self) -> str:
        """The name of the stream that deltas go to; "" before it is open."""
        return self._stream

    @property
    def sequence(self) -> int:
        """The last delta of the stream, as this publisher saw it last; 0 before it is open."""
        return self._tail.sequence

    async def _append(self, batch: DeltaBatch, partitions: npt.NDArray[np.uint8]) -> None:
        size = batch.rows.nbytes + batch.stored.nbytes + ENTRY_BYTES
        await self._again(lambda: self._make_room(size))
        deadline = self._monotonic() + self._retry_s

        async def attempt() -> bool:
            # The same bytes for the same number: an append that is repeated then differs from another publisher's.
            numbered, after = replace(batch, sequence=self._sequence + 1), self._last
            if await self._writes_commits():
                payload, rows, tail = encode_commit(numbered, partitions, self._tail, self._by.token)
                entry = StreamEntry(tail.sequence, payload)
                work = self._fleet.registry.commit(self._stream, entry, rows, after, self._by)
            else:
                if batch.operation != WRITE_ROWS:
                    raise DeltaError(f"stream {self._stream}: nodes of an older release follow it, which know no keys")
                entry = StreamEntry(numbered.sequence, numbered.encode())
                tail = Tail(entry.sequence, entry_digest(entry.payload))
                work = self._fleet.registry.append(self._stream, entry.sequence, entry.payload, self._by)
            try:
                await work
            except StreamSequenceError:
                # Unless it was put by an earlier try whose outcome was not known, and others went on from it. How many
                # replicas have it nobody knows then.
                if self._by.min_replicas or await self._entry(entry.sequence) != entry:
                    await self._find_end()
                    return False
            self._sequence, self._last, self._tail = entry.sequence, entry, tail
            self._stream_bytes += size
            self._acknowledged.append((tail.sequence, tail.digest))
            return True

        while not await self._again(attempt):
            if self._monotonic() >= deadline:
                raise RegistryConflictError(f"stream {self._stream}: others were faster for {self._retry_s} s")

    async def _writes_commits(self) -> bool:
        """Return whether to write format 2: for good, once every node that the registry knows reads it.

        Raises DeltaError if the next number is not the one that format 1 needs.
        """
        last, now = self._last, self._monotonic()
        if self._has_commits or (last is not None and is_commit(last.payload)):
            return True
        nodes = await self._fleet.nodes()
        has_fleet = last is not None or await self._fleet.wanted_model(self._model) is not None
        reads = all(node.delta_format >= FORMAT for node in nodes) and (bool(nodes) or not has_fleet)
        # In a registry that was away, nodes of an older release may not have announced themselves again yet.
        self._read_since = min(self._read_since, now) if reads else math.inf
        self._has_commits = reads and (last is None or now - self._read_since >= SETTLED_S)
        if not self._has_commits and last is not None and self._sequence > last.sequence:
            raise DeltaError(
                f"stream {self._stream} ends with {last.sequence}, but deltas up to {self._sequence} were published: "
                "the registry has lost the others, and nodes of an older release would not notice. Upgrade these, or "
                "publish a snapshot that begins a stream of its own",
                kind="delta_gap",
            )
        return self._has_commits

    async def _opened(self) -> ModelSpec:
        if self._spec is not None:
            return self._spec
        for name, limit in (("entries", self._max_stream_entries), ("bytes", self._given_bytes)):
            if limit is not None and limit < 1:
                raise DeltaError(f"max_stream_{name}: {limit}; at least 1 is needed")
        model, number = self._model, self._base_version
        if (version := await self._again(lambda: self._fleet.version(model, number))) is None:
            problem = f"version {number} of model {model!r} is not published in {self._fleet.name}"
            raise DeltaError(problem, kind="delta_base")
        self._identity = version.identity
        if (text := await self._again(lambda: self._fleet.spec(model, number))) is None:
            problem = f"the registry has no spec of {model!r} version {number}: publish it again"
            raise DeltaError(problem, kind="delta_base")
        spec = parse_record(f"the spec of {model!r} version {number}", text.encode(), ModelSpec)
        self._delta_base, self._stream = version.delta_base, delta_stream(model, version.delta_base)
        self._contained = version.last_delta
        await self._again(self._find_end)
        await self._again(self._writes_commits)
        token = await self._again(lambda: self._fleet.registry.next_token(self._stream, self._by.name))
        self._by = self._by._replace(token=token)
        default_bytes = await self._again(self._fleet.registry.max_stream_bytes)
        self._max_stream_bytes = default_bytes if self._given_bytes is None else self._given_bytes
        self._spec = spec
        return spec

    async def _row_classes(self, spec: ModelSpec, name: str) -> RowClasses | None:
        """Return in which part of a table each row is, if it has classes; read once, from the store."""
        divided = any(table.name == name and table.num_classes > 1 for table in spec.divided)
        if name in self._classes or not divided:
            return self._classes.get(name)
        if (store := self._store) is None:
            raise DeltaError(
                f"table {name!r} of {self._model!r} is divided by popularity, and only its snapshot tells where its "
                "rows lie: give the publisher `store`"
            )
        # What is mapped stays, whatever becomes of the folder's entries.
        self._classes[name] = await asyncio.to_thread(self._read, store, lambda snapshot: snapshot.row_classes(name))
        return self._classes[name]

    def _read(self, store: Store, read: Callable[[Snapshot], T]) -> T:
        """Return what is read of the version's snapshot, of which no rows are needed."""
        with store.hold(self._model, self._base_version, identity=self._identity, with_rows=False) as folder:
            return read(Snapshot.open(folder.path, self._identity, verify=False, rows_here=False))

    async def _again(self, attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
        deadline, pause_s = self._monotonic() + self._retry_s, 0.05
        while True:
            try:
                return await attempt()
            except RegistryUnavailableError:
                if self._monotonic() + pause_s >= deadline:
                    raise
            await self._sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _find_end(self) -> None:
        """Read what the next number is, where the stream ends, and which deltas that it had are not in it any more.

        No number is given twice that a node, a version or this publisher knows.
        """
        await self._fleet.check_identity()
        registry, is_new = self._fleet.registry, self._spec is None
        known = max(self._sequence, await stream_end(self._fleet, self._model, self._delta_base))
        # Read after what nodes report, so that what others append meanwhile is in it.
        bounds = await registry.bounds(self._stream)
        last = await self._entry(bounds.last) or StreamEntry(bounds.last, b"")
        tail, first = await self._read_tail(last), await self._entry(bounds.first)
        # What lies between the first entry and the one that it names has not been trimmed: it was lost.
        trimmed = Commit.decode(first.payload).previous if first and is_commit(first.payload) else bounds.first - 1
        kept = len(self._acknowledged)
        while kept and (number := self._acknowledged[kept - 1][0]) > trimmed:
            entry = await self._entry(number) if bounds.first <= number <= bounds.last else None
            if entry is not None and entry_digest(entry.payload) == self._acknowledged[kept - 1][1]:
                break
            kept -= 1
        # All is read: a call that failed before would have left the end as it was, so that it is looked for again.
        self._last, self._tail = last if bounds.last else None, tail
        if is_new:
            self._lost.update(range(max(bounds.last, self._contained) + 1, known + 1))
        while len(self._acknowledged) > kept:
            self._lost.add(self._acknowledged.pop()[0])
        self._stream_bytes += (max(bounds.last, known) - self._sequence) * MAX_VALUE_BYTES
        self._sequence = max(bounds.last, known)
        self._first = bounds.first or self._sequence + 1

    async def _entry(self, sequence: int) -> StreamEntry | None:
        entries = await self._fleet.registry.read(self._stream, sequence - 1, 1) if sequence else []
        return entries[0] if entries and entries[0].sequence == sequence else None

    async def _read_tail(self, last: StreamEntry) -> Tail:
        if not is_commit(last.payload):
            return Tail(last.sequence, entry_digest(last.payload) if last.payload else NOTHING)
        commit = Commit.decode(last.payload)
        begin = commit.rows_bytes
        (heads,) = await self._fleet.registry.read_rows(self._stream, [(last.sequence, begin, begin + HEADS_BYTES)])
        if len(heads) != HEADS_BYTES:
            raise RegistryUnavailableError(f"stream {self._stream}: entry {last.sequence} has lost its rows")
        return Tail(commit.sequence, commit.digest, heads)

    async def _check_end(self) -> None:
        """Find the end anew if it is not where it was. Raises DeltaLostError, once, if deltas are lost."""

        async def check() -> None:
            await self._fleet.check_identity()
            there = await self._fleet.registry.read(self._stream, self._tail.sequence - 1, 2)
            if there != [self._last][: self._last is not None]:
                await self._find_end()

        await self._again(check)
        if lost := tuple(sorted(self._lost)):
            self._lost.clear()
            raise DeltaLostError(
                f"stream {self._stream}: the registry has lost {len(lost)} of the deltas {lost[0]} to {lost[-1]}, "
                "which it had acknowledged. What they changed may be published again",
                lost,
            )

    async def _make_room(self, size: int) -> None:
        """Drop the oldest entries that no version in use needs, if there is no room. Raises StreamFullError."""
        registry, max_entries, max_bytes = self._fleet.registry, self._max_stream_entries, self._max_stream_bytes
        if self._sequence + 1 - self._first < max_entries and self._stream_bytes + size <= max_bytes:
            return
        versions = await self._fleet.versions(self._model)
        wanted, on_record = await self._fleet.wanted_model(self._model), await read_rollout(self._fleet, self._model)
        named = frozenset[int]() if wanted is None else wanted.named()
        named |= frozenset() if on_record is None else on_record.rollout.named()
        # Before anything is wanted, whatever is published may become so.
        used = [version for version in versions if version.version in named or not named]
        of_stream = (version.last_delta for version in used if version.delta_base == self._delta_base)
        # The last entry stays: the next one names it.
        needed = min(min(of_stream, default=self._sequence) + 1, self._tail.sequence)
        while True:
            kept, kept_bytes = await registry.stream_size(self._stream)
            if kept < max_entries and kept_bytes + size <= max_bytes:
                # Numbers that were lost, or trimmed, are no entries.
                self._first, self._stream_bytes = self._sequence + 1 - kept, kept_bytes
                return
            oldest = await registry.read(self._stream, 0, 1)
            first = oldest[0].sequence if oldest else self._sequence + 1
            # More than needed now, so that not every append drops. Entries count as equally large: it may take loops.
            excess = max(0.0, kept_bytes + size - max_bytes * 15 / 16)
            drop = max(kept - max_entries + max(1, max_entries // 16), math.ceil(kept * excess / max(kept_bytes, 1)))
            before = min(first + drop, needed)
            if before <= first:
                raise StreamFullError(
                    f"stream {self._stream} holds {kept} deltas, max_stream_entries is {max_entries}, in {kept_bytes} "
                    f"bytes for {size} more, max_stream_bytes is {max_bytes:.0f}, and a version that is held needs all "
                    f"from {needed} on: roll out a snapshot that contains them, or allow more"
                )
            await registry.trim(self._stream, before)
            _log.info("stream %s: dropped what is before delta %d", self._stream, before)
