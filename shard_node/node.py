"""A shard node without its socket: the generations it holds, and pooling on one of them."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, cast

from loader.progress import BeginThread, begin_thread
from loader.snapshot.store import HeldSnapshot
from shard_node.answer import FLOAT32_SUMS, Answer, ReplyEncoding, rounded
from shard_node.bags import Bags, Float32Array
from shard_node.buckets import Message, NodeIdentity, Partition
from shard_node.engine.base import CardsUse, DiskUse, Engine
from shard_node.engine.memory import Claim
from shard_node.errors import GenerationNotFoundError
from shard_node.freshness import FORKED_AGE_MS, UNKNOWN_AGE_MS
from shard_node.generation import Generation, Generations
from shard_node.tracing import SpanSink
from shard_node.training.push import Push
from shard_node.wire.frame import Body

CLOSE_TIMEOUT_S = 10.0
LOCAL_REPLICA = "local"


class ServedVersion(Message):
    """One version that a node can answer for, with the fields of `DeltaProgress`, and `delta_digest` in hex.

    Routers compare `plan_digest`.
    """

    model: str
    version: int
    manifest_identity: str
    plan_digest: str
    state: str
    delta_base: int = 0
    last_delta: int = 0
    delta_sequence: int = 0
    delta_fresh_at: float | None = None
    delta_lag: int = 0
    delta_forks: int = 0
    absent_keys: int = 0
    delta_digest: str = ""
    forked: bool = False


class MemoryReport(Message):
    """Bytes of rows by card and tier, of one model version."""

    model: str
    version: int
    card: int
    tier: str
    size_bytes: int


class LookupReport(Message):
    """Rows looked up by table and tier since a model version was loaded."""

    model: str
    version: int
    table: str
    tier: str
    rows: int


class CardsReport(Message):
    """The cards that the rows of a model version lie on; fields are those of `CardsUse`."""

    model: str
    version: int
    name: str
    num_cards: int
    peer_access: bool
    outside_table: int = 0
    not_here: int = 0


class TrainingReport(Message):
    """Workers of a node that trains, by number: the last step of each, who takes part, and at which step it goes on."""

    steps: tuple[int, ...]
    is_active: tuple[bool, ...]
    resume_steps: tuple[int, ...]


class NodeInfo(Message):
    """What a node tells of itself. `cards`, `disks` have versions with rows on some; `takes_traces` allows contexts."""

    identity: NodeIdentity
    versions: tuple[ServedVersion, ...]
    memory: tuple[MemoryReport, ...]
    lookups: tuple[LookupReport, ...] = ()
    cards: tuple[CardsReport, ...] = ()
    disks: tuple[DiskUse, ...] = ()
    takes_traces: bool = False
    training: TrainingReport | None = None

    def served(self, model: str, version: int) -> ServedVersion:
        """Return what it reports of a version. Raises GenerationNotFoundError."""
        for served in self.versions:
            if (served.model, served.version) == (model, version):
                return served
        versions = [f"{served.model} {served.version}" for served in self.versions]
        raise GenerationNotFoundError(f"the node has no version {version} of model {model!r}; it has {versions}")

    def has(self, model: str, version: int) -> bool:
        """Whether it answers for a version."""
        return any((one.model, one.version, one.state != "draining") == (model, version, True) for one in self.versions)


@dataclass(frozen=True, slots=True)
class DeltaProgress:
    """How far rows are along their stream of deltas, at one moment. Times are seconds since the epoch.

    Attributes:
        delta_base: the version that the stream began with; 0 if the tables follow no stream.
        last_delta: the last delta that the snapshot itself contains; 0 for none.
        sequence: the last delta whose rows are here, contained ones included; `published_at` None if none was applied.
        stream_last: the last delta of the stream, as far as it is known.
        fresh_at: every delta that was published before this moment is applied; None before the first read.
        rows: written here; `refused` deltas were not what they should be.
        reason: what keeps the next delta from being applied; "" if nothing does; `refusal` is that error's kind.
        absent: keys that were to be deleted and were not there.
        catch_up_to: the last delta of the stream at the first read; None before.
        digest: of the entry that was applied last, b"" until one was.
        forked: rows are of deltas that the stream does not have: they are to be replaced, and others asked meanwhile.
    """

    delta_base: int = 0
    last_delta: int = 0
    sequence: int = 0
    published_at: float | None = None
    stream_last: int = 0
    fresh_at: float | None = None
    rows: int = 0
    refused: int = 0
    reason: str = ""
    refusal: str = ""
    absent: int = 0
    catch_up_to: int | None = None
    digest: bytes = b""
    forked: bool = False

    @property
    def has_caught_up(self) -> bool:
        """Whether every delta that was published before the first look is applied. It never turns false again."""
        return self.catch_up_to is not None and self.sequence >= self.catch_up_to

    @property
    def lag(self) -> int:
        """Deltas of the stream that are not applied yet, as last seen."""
        return max(0, self.stream_last - self.sequence)

    def age_ms(self, now: float) -> int:
        """Return the age of the rows; it grows while the registry can't be reached, since anything may be missing."""
        if self.forked:
            return FORKED_AGE_MS
        return UNKNOWN_AGE_MS if self.fresh_at is None else max(0, math.ceil(1000.0 * (now - self.fresh_at)))


class DeltaPosition:
    """The current `DeltaProgress` of one generation, `now`: written by one follower, read by any thread.

    It begins with a snapshot's rows, or with copies of rows that had `sequence` applied. `is_chained` is whether its
    entry is of format 2, as far as known; `heads` are the digests of the last parts.
    """

    def __init__(self, delta_base: int = 0, last_delta: int = 0, sequence: int = 0, digest: bytes = b"") -> None:
        self.now = DeltaProgress(delta_base, last_delta, max(last_delta, sequence), digest=digest)
        self.is_chained, self.heads = bool(digest), dict[int, bytes]()

    @property
    def sequence(self) -> int:
        """The last delta whose rows are here, contained ones included."""
        return self.now.sequence

    def applied(
        self, sequence: int, published_at: float, rows: int, now: float, digest: bytes = b"", absent: int = 0
    ) -> None:
        """Move past one delta: all of its rows are in place, or gone."""
        before, published = self.now, min(published_at, now)
        self.now = replace(
            before,
            sequence=sequence,
            published_at=published_at,
            stream_last=max(before.stream_last, sequence),
            fresh_at=published if before.fresh_at is None else max(before.fresh_at, published),
            rows=before.rows + rows,
            reason="",
            refusal="",
            absent=before.absent + absent,
            digest=digest,
        )

    def seen(self, stream_last: int, looked_at: float) -> None:
        """Note where the stream ended at `looked_at`. If that is applied, all that came before is.

        A stream that was seen to be longer is not forgotten: what was there once and is not applied is missing.
        """
        before = self.now
        stream_last = max(stream_last, before.stream_last)
        until = stream_last if before.catch_up_to is None else before.catch_up_to
        if stream_last > before.sequence:
            self.now = replace(before, stream_last=stream_last, catch_up_to=until)
        else:
            self.now = replace(
                before, stream_last=stream_last, catch_up_to=until, fresh_at=looked_at, reason="", refusal=""
            )

    def refused(self, reason: str, kind: str = "", *, forked: bool = False) -> None:
        """Note why the next delta can't be applied; no other one ever is, if the stream has `forked`."""
        self.now = replace(self.now, refused=self.now.refused + 1, reason=reason, refusal=kind, forked=forked)


@dataclass(frozen=True, slots=True)
class LoadedTables:
    """What a shard node's generation serves with, all rows if `partition` is None.

    `claims`, on memory, and `files` that rows are read from go with it.
    """

    engine: Engine
    manifest_identity: str
    plan_digest: str
    deltas: DeltaPosition = field(default_factory=DeltaPosition)
    partition: Partition | None = None
    claims: Sequence[Claim] = ()
    files: HeldSnapshot | None = None

    def close(self) -> None:
        """Frees the rows, in pieces. Nobody may be using them."""
        try:
            self.engine.close()
        finally:
            for claim in self.claims:
                claim.give_back()
            if self.files is not None:
                self.files.close()


class PushReceiver(Protocol):
    """Takes gradients, in any thread."""

    def submit(
        self,
        model: str,
        version: int,
        body: Body,
        push: Push,
        kept: Callable[[], object],
        done: Callable[[int | Exception], object],
    ) -> None:
        """Apply a push; `done` is called once, with the slowest worker's step or an error, maybe at once.

        `body` is that of the frame which the push is a view of. `kept` is called before if the answer is withheld while
        the push is durable, and its frame needed no more.
        """

    def report(self) -> TrainingReport:
        """Return where workers are."""


class ShardNode:
    """Holds generations of tables and pools bags from them. Thread-safe.

    `sink` takes spans of lookups that bring a trace; it is closed with the node. `problems` returns what it lacks to be
    ready, by model ("" for the node itself), on another thread. `forks` counts, by model and version, how often the
    stream of deltas did not go on from what was applied. `wall_clock` is seconds since the epoch. `trainer` takes
    gradients; None where nothing is trained.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        sink: SpanSink | None = None,
        wall_clock: Callable[[], float] = time.time,
        begin: BeginThread = begin_thread,
    ) -> None:
        self.identity, self.sink, self.wall_clock, self.begin_thread = identity, sink, wall_clock, begin
        self.problems: Callable[[], Mapping[str, str]] = dict
        self.forks = Counter[tuple[str, int]]()
        self.trainer: PushReceiver | None = None
        self.generations: Generations[LoadedTables] = Generations(LoadedTables.close, begin)

    def pool(self, model: str, version: int, bags: Bags) -> list[Float32Array]:
        """Pools on one version, under a lease. Returns and raises as `Engine.pool`, and GenerationNotFoundError."""
        return cast("list[Float32Array]", self.answer(model, version, bags).sums)

    def answer(self, model: str, version: int, bags: Bags, forms: ReplyEncoding = FLOAT32_SUMS) -> Answer:
        """Pools as `pool`, in the forms that the caller accepts."""
        # One lease for both: under the same number rows may be staged anew, and then they begin with an earlier delta.
        lease = self.generations.lease(model, version)
        try:
            tables = lease.generation.payload
            # Before the rows: they may be newer than it says, and never older.
            progress = tables.deltas.now
            answer = tables.engine.answer(bags, stored=forms.stored)
        finally:
            lease.release()
        sums = [rounded(one, forms.sums) for one in cast("list[Float32Array]", answer.sums)]
        return Answer(sums, answer.stored, 0, progress.sequence, progress.age_ms(self.wall_clock()), answer.missing)

    def info(
        self, cards_of: Callable[[Generation[LoadedTables]], CardsUse | None] = lambda one: one.payload.engine.cards()
    ) -> NodeInfo:
        """Return what this node serves, and the memory it takes. Raises CardError, of `cards_of`, if cards failed."""
        versions: list[ServedVersion] = []
        memory: list[MemoryReport] = []
        lookups: list[LookupReport] = []
        cards: list[CardsReport] = []
        disks: list[DiskUse] = []
        for one in self.generations.all():
            tables = one.payload
            engine, deltas = tables.engine, tables.deltas.now
            version: dict[str, Any] = {"model": one.model, "version": one.version}
            versions.append(
                ServedVersion(
                    **version,
                    manifest_identity=tables.manifest_identity,
                    plan_digest=tables.plan_digest,
                    state=one.state,
                    delta_base=deltas.delta_base,
                    last_delta=deltas.last_delta,
                    delta_sequence=deltas.sequence,
                    delta_fresh_at=deltas.fresh_at,
                    delta_lag=deltas.lag,
                    delta_forks=self.forks[one.model, one.version],
                    absent_keys=deltas.absent,
                    delta_digest=deltas.digest.hex(),
                    forked=deltas.forked,
                )
            )
            memory += [MemoryReport(**version, **asdict(use)) for use in engine.memory()]
            lookups += [LookupReport(**version, **asdict(count)) for count in engine.rows_looked_up()]
            if (reads := engine.disk_use()) is not None:
                disks.append(reads.model_copy(update=version))
            if (use := cards_of(one)) is not None:
                cards.append(CardsReport(**version, **asdict(use)))
        return NodeInfo(
            identity=self.identity,
            versions=tuple(versions),
            memory=tuple(memory),
            lookups=tuple(lookups),
            cards=tuple(cards),
            disks=tuple(disks),
            takes_traces=self.sink is not None,
            training=None if self.trainer is None else self.trainer.report(),
        )

    def close(self) -> None:
        """Withdraws every generation and waits for what nobody leases to be freed; the rest is when its leases end."""
        if self.sink is not None:
            self.sink.close()
        for generation in self.generations.retire_all():
            if not generation.leases:
                generation.retired.wait(CLOSE_TIMEOUT_S)


class Shard(Protocol):
    """Pools the bags whose rows a shard owns."""

    def pool(
        self, model: str, version: int, bags: Bags, deadline: float, forms: ReplyEncoding = FLOAT32_SUMS
    ) -> asyncio.Future[Answer]:
        """Start pooling on one version of a model; cancel the future to end it.

        Keys of `bags` are tables in layout order, values are rows; `deadline` is on the monotonic clock, in seconds;
        `forms` are what the answer may have in addition to float32 sums; it need not have it. The answer fits the
        bags, and is within `forms.bound` if that of some replica is. Raises ShardrankError, now or by the future.
        """

    async def infos(self) -> list[tuple[str, NodeInfo]]:
        """Return what each of the shard's nodes serves, by its address."""

    async def close(self) -> None:
        """End connections. Idempotent."""


class LocalShard:
    """A shard in this process, on `node`: a plain call, nothing serialised."""

    def __init__(self, node: ShardNode) -> None:
        self.node = node

    def pool(
        self, model: str, version: int, bags: Bags, deadline: float, forms: ReplyEncoding = FLOAT32_SUMS
    ) -> asyncio.Future[Answer]:
        """Pool in the calling thread, into float32 sums: the deadline does not matter."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        answer.set_result(self.node.answer(model, version, bags))
        return answer

    async def infos(self) -> list[tuple[str, NodeInfo]]:
        """Return what the node serves, by the address `local`."""
        return [(LOCAL_REPLICA, self.node.info())]

    async def close(self) -> None:
        """Do nothing: the node belongs to the caller."""
