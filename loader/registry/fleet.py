"""Define what is kept of a fleet in a registry and where, and read and write it typed.

All records are JSON. Processes of different releases share a registry during an upgrade, so unknown keys are ignored.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from loader.errors import RegistryConflictError, RegistryForeignError, RegistryRecordError
from loader.registry.registry import Registry
from loader.snapshot.tables import Name, refused_as

IDENTITY = "identity"
"""A random id that is written once, before what is first wanted."""
FLEET = "fleet"
VERSIONS = "versions/"
WANTED = "wanted/"
ROLLOUTS = "rollouts/"
NODES = "nodes/"
QUALITY = "quality/"
STRANGERS = "strangers/"
"""Announcements of processes that know another registry, by node id: what is wrong."""
COORDINATOR_LOCK = "locks/coordinator"
SPECS = "specs/"
"""The JSON of a version's `ModelSpec`, for readers without a store."""
DENSE = "dense/"
"""A version's newest `DenseStep`; `ACCEPTED_DENSE`: the newest that a serving process has accepted."""
ACCEPTED_DENSE = "dense-accepted/"

NodeKind = Literal["shard", "serving"]
VersionState = Literal["waiting", "staging", "ready", "refused", "draining"]
NodeId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:\-]{1,200}$")]
Version = Annotated[int, Field(ge=1, lt=2**63)]
NumShards = Annotated[int, Field(ge=1, le=1024)]
LATENCY_BOUNDS_MS: tuple[float, ...] = tuple(round(0.1 * 1.15**step, 4) for step in range(96))
"""Upper bounds of the buckets of `VersionStats.latency_counts`, 15% apart from 0.1 ms to a minute; one more above."""
MAX_REASON_CHARACTERS = 2000
R = TypeVar("R", bound=BaseModel)
_MAX_ATTEMPTS: Final = 64
"""Times that a change is tried while others write first."""
_log = logging.getLogger(__name__)


def version_key(model: str, version: int, area: str = VERSIONS) -> str:
    """Return the key of what `area` has of a version, padded so that versions sort as numbers."""
    return f"{area}{model}/{version:020d}"


def wanted_key(model: str) -> str:
    """Return the key of a `WantedModel`."""
    return f"{WANTED}{model}"


def rollout_key(model: str) -> str:
    """Return the key of a `Rollout`."""
    return f"{ROLLOUTS}{model}"


def delta_stream(model: str, delta_base: int) -> str:
    """Return the stream of changed rows that began with a version."""
    return f"deltas/{model}/{delta_base}"


class Record(BaseModel):
    """Frozen; unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    def encode(self) -> bytes:
        """Return its JSON."""
        return self.model_dump_json().encode()


class FleetRecord(Record):
    """How a fleet divides rows. Written by its first shard node; a node that differs is refused.

    `num_shards` is that of versions that are rolled out from now on; see `WantedModel.num_shards` for the others.
    """

    num_shards: NumShards
    sharding: Literal["hash", "range", "table"]
    replicate_bytes: int = Field(ge=0)


class PublishedVersion(Record):
    """A version that may be rolled out.

    Attributes:
        identity: SHA-256 (hex) of its manifest.
        delta_base: the version that began the stream of deltas that this one continues; itself if it is new.
        last_delta: the last delta of that stream whose rows it contains; 0 for none.
        rows_bytes: of one copy.
        published_at: seconds since the epoch.
    """

    model: Name
    version: Version
    identity: str
    delta_base: Version
    last_delta: int = Field(ge=0)
    rows_bytes: int = Field(ge=0)
    published_at: float


class DenseStep(Record):
    """Dense weights of a published version, a file in the store. See docs/deltas.md.

    Attributes:
        step: of training; each is higher than the one before.
        sequence: the last delta of rows that training had published before: rows must have it.
        digest: of that delta's entry, hex; "" if it is not known.
        max_drift: largest difference of a golden score from what the weights before gave, of the same rows.
        published_at: seconds since the epoch.
    """

    model: Name
    version: Version
    step: int = Field(ge=1, lt=2**63)
    sequence: int = Field(ge=0, lt=2**63)
    digest: str = ""
    sha256: str
    size_bytes: int = Field(ge=0)
    max_drift: float = Field(gt=0)
    published_at: float


class Canary(Record):
    """A version and its share of the requests: a stable one that it answers."""

    version: Version
    share: float = Field(gt=0, lt=1)


class WantedModel(Record):
    """What is wanted of a fleet for one model.

    Attributes:
        epoch: counts up with every write; the highest one counts, and nodes restore it in a registry that lost it.
        live: the version that answers requests; None before the first rollout.
        hold: versions that shard nodes hold.
        serve: versions that serving processes hold beside it, ready to be flipped to; each is in `hold`.
        follow: those of `hold` to which deltas are applied.
        node_hold: what single shard nodes hold, by node id; of `hold` they keep what they have while memory allows it.
        num_shards: over how many shards a version's rows are divided; a version not named is on every shard node.
        refused: versions that a fleet began with and could not serve, and why, until the next rollout.
        fallback: of `serve`; answers requests that name no version while a shard has no replica for the live one.
    """

    model: Name
    epoch: int = Field(ge=1)
    live: Version | None = None
    hold: tuple[Version, ...] = ()
    serve: tuple[Version, ...] = ()
    follow: tuple[Version, ...] = ()
    canary: Canary | None = None
    node_hold: dict[NodeId, tuple[Version, ...]] = Field(default_factory=dict)
    num_shards: dict[Version, NumShards] = Field(default_factory=dict)
    refused: dict[Version, str] = Field(default_factory=dict)
    fallback: Version | None = None

    def named(self) -> frozenset[int]:
        """Return every version that it names: none of them may be dropped."""
        pointers = (self.live, None if self.canary is None else self.canary.version, self.fallback)
        versions = chain(self.hold, self.serve, self.follow, *self.node_hold.values(), pointers)
        return frozenset(version for version in versions if version is not None)

    def held_by(self, node_id: str, num_shards: int | None = None) -> tuple[int, ...]:
        """Return the versions that a shard node shall hold, one of `num_shards` shards; None: whatever its number."""
        versions = self.node_hold.get(node_id, self.hold)
        return tuple(version for version in versions if num_shards in (None, self.num_shards.get(version, num_shards)))

    def divided(self, num_shards: int) -> WantedModel:
        """Return the record with every version that it names divided over so many shards."""
        return self.model_copy(update={"num_shards": dict.fromkeys(sorted(self.named()), num_shards)})

    def replaced(self, version: int | None, by: int | None, reason: str) -> WantedModel:
        """Return the record with another version, or none, in place of a live one that is refused, if it is live."""
        if version is None or version != self.live:
            return self
        only = () if by is None else (by,)
        held: dict[str, object] = {name: only if getattr(self, name) else () for name in ("hold", "serve", "follow")}
        held["num_shards"] = dict.fromkeys(only, self.num_shards[version]) if version in self.num_shards else {}
        return self.model_copy(update={"live": by, "refused": self.refused | {version: reason}, **held})

    def wants_same(self, other: WantedModel) -> bool:
        """Return whether both want the same, whatever their epochs."""
        return self.model_copy(update={"epoch": other.epoch}) == other


class VersionStats(Record):
    """Counts of one version in a serving process since it has it; they only grow.

    Attributes:
        requests: answered, of those that did not name their version; without a client's mistakes and deadlines below
            the live version's median.
        errors: of those, the server's faults.
        latency_counts: answers by latency, one more than `LATENCY_BOUNDS_MS`; empty for none.
        score_count, score_sum, score_square_sum: of all scores of such requests.
        keys, missing_keys: looked up in tables with keys, and those of them that their tables had not.
    """

    requests: int = 0
    errors: int = 0
    latency_counts: tuple[int, ...] = ()
    score_count: int = 0
    score_sum: float = 0.0
    score_square_sum: float = 0.0
    keys: int = 0
    missing_keys: int = 0


class HotReport(Record):
    """A serving process's copies of a version's hottest rows; `size_bytes` with their index.

    `lookups` and `hits` count rows looked up since it has the version, and those of them that were hot; they only
    grow.
    """

    rows: int = 0
    size_bytes: int = 0
    lookups: int = 0
    hits: int = 0


class VersionStatus(Record):
    """How far a node is with one version; see `VersionReport`."""

    version: Version
    state: VersionState
    progress: float = 0.0
    reason: Annotated[str, Field(max_length=MAX_REASON_CHARACTERS)] = ""
    leases: int = 0
    memory_bytes: int = 0
    delta_sequence: int = 0
    dense_step: int = 0
    dense_refused: Annotated[str, Field(max_length=MAX_REASON_CHARACTERS)] = ""
    golden_difference: float | None = None
    golden_tolerance: float | None = None


class VersionReport(VersionStatus):
    """What a node reports of one version.

    Attributes:
        progress: of staging, 0 to 1.
        reason: why it is refused, or what it waits for.
        passing: the reason may pass by itself, and the version is tried again although it is refused.
        plan_digest: who owns what; only of processes that hold rows, as are memory_bytes and delta_sequence.
        memory_bytes: of its rows in RAM and on cards; `memory_tiers`: by tier, disk among them.
        hot: copies of rows that are on shard nodes; serving processes only, as are golden_difference and dense_step.
        leases: requests that use it now.
        golden_difference: largest difference from a golden score; None without golden requests.
        golden_tolerance: what the manifest allows.
        delta_sequence: the last delta that is applied, contained ones included.
        delta_published_at: when that was published, in seconds since the epoch; None if none was applied.
        forked: its rows are of deltas that the stream does not have; they are about to be replaced.
        delta_refusal: the kind of the error that keeps the next delta from being applied; "" if nothing does.
        dense_step: of the newest dense weights that may answer, 0 for the snapshot's.
        dense_refused: which step is refused, and why; "" if none was refused since.
    """

    model: Name
    passing: bool = False
    identity: str = ""
    plan_digest: str = ""
    memory_tiers: dict[str, int] = Field(default_factory=dict)
    hot: HotReport | None = None
    delta_published_at: float | None = None
    forked: bool = False
    delta_refusal: str = ""
    stats: VersionStats | None = None


class NodeRecord(Record):
    """What a process announces, and announces again before it expires.

    Attributes:
        node_id: stable over restarts; `process_id` is not.
        address: a shard node's wire address, a serving process's HTTP address.
        num_shards: how many shards rows are divided over; None for a serving process that holds them itself.
        shard_index, sharding, replicate_bytes, num_cards: shard nodes only.
        memory_total_bytes, memory_available_bytes: of the machine, or the process's limit; to rows, for a shard node.
        models: the only models that it is for; None for all.
        draining: it is about to end and accepts no new requests.
        applied: by model, the epoch of the wanted record that it has last acted on in full.
        live: by model, the version that it answers with; serving processes only.
        delta_format: the newest format of deltas that it reads; releases before format 2 do not say.
    """

    node_id: NodeId
    kind: NodeKind
    process_id: int
    address: str
    shard_index: int | None = None
    num_shards: int | None = None
    sharding: Literal["hash", "range", "table"] | None = None
    replicate_bytes: int | None = None
    num_cards: int | None = None
    memory_total_bytes: int = 0
    memory_available_bytes: int = 0
    models: tuple[Name, ...] | None = None
    draining: bool = False
    applied: dict[str, int] = Field(default_factory=dict)
    live: dict[str, int] = Field(default_factory=dict)
    delta_format: int = Field(default=1, ge=1)
    versions: tuple[VersionReport, ...] = ()

    def is_for(self, model: str) -> bool:
        """Return whether it takes part in what happens to a model."""
        return self.models is None or model in self.models

    def report(self, model: str, version: int | None) -> VersionReport | None:
        """Return its report of a version; None if it does not have it."""
        return next((report for report in self.versions if (report.model, report.version) == (model, version)), None)

    def has(self, model: str, version: int | None, state: VersionState) -> bool:
        """Return whether it has a version, in that state."""
        report = self.report(model, version)
        return report is not None and report.state == state


def cut_reason(reason: str) -> str:
    """Return a reason short enough for a record."""
    return reason if len(reason) <= MAX_REASON_CHARACTERS else reason[: MAX_REASON_CHARACTERS - 3] + "..."


def parse_record(key: str, value: bytes, schema: type[R]) -> R:
    """Return the record under a key. Raises RegistryRecordError, naming the key and the bad fields."""
    with refused_as(RegistryRecordError, f"{key}: "):
        return schema.model_validate_json(value)


class Quality(Record):
    """The area under the ROC curve of a model's scores of labelled candidates, of all and of the last ones."""

    model: Name
    auc: float
    recent_auc: float
    scored: int


class FleetRegistry:
    """The records of one fleet in a registry. Every method may raise RegistryUnavailableError.

    A record that can't be read raises RegistryRecordError with its key; only announcements are skipped, and logged
    once, since one broken node must not hide the others.
    """

    def __init__(self, registry: Registry) -> None:
        """Read and write through `registry`, which stays the caller's to close."""
        self.registry = registry
        self._identity: bytes | None = None
        self._rolled_out = "was used before"
        self.foreign = ""
        """What is wrong if this is not the registry that was used before, as far as known."""
        # By area and key: announcements are read far more often than they change. None for one that can't be read.
        self._known: dict[str, dict[str, tuple[bytes, Any]]] = {}

    @property
    def name(self) -> str:
        """The registry's, for logs."""
        return self.registry.name

    async def check_identity(self, known: Iterable[WantedModel] = (), *, create: bool = False) -> None:
        """Raise RegistryForeignError, which names what is `known`, unless this is the registry that was used before.

        Check after reading what is to be used, and before writing. A registry that lost its id is given it back; with
        `create`, one that never had an id gets one. Before anything is wanted there is none: whatever process comes
        first into a registry that was emptied must leave it to those that remember more.
        """
        entry = await self.registry.get(IDENTITY)
        there = None if entry is None else entry.value
        if there is None and (create or self._identity is not None):
            there = await self._put_once(IDENTITY, self._identity or secrets.token_hex(16).encode())
        versions = ", ".join(f"version {wanted.live} of {wanted.model}" for wanted in known if wanted.live)
        self._rolled_out = f"{versions} was rolled out with" if versions else self._rolled_out
        if self._identity not in (None, there):
            remedy = "restore it, or restart the processes to adopt it"
            self.foreign = f"this registry is not the one that {self._rolled_out}: {remedy}"
            raise RegistryForeignError(self.foreign)
        self._identity, self.foreign = there, ""

    async def wanted(self) -> dict[str, WantedModel]:
        """Return what is wanted, by model."""
        return {record.model: record for record in await self._entries(WANTED, WantedModel)}

    async def wanted_model(self, model: str) -> WantedModel | None:
        """Return what is wanted for one model."""
        return await self._get(wanted_key(model), WantedModel)

    async def live_version(self, model: str) -> int | None:
        """Return the version of a model that shall answer requests; None if there is none."""
        wanted = await self.wanted_model(model)
        return None if wanted is None else wanted.live

    async def put_wanted(self, record: WantedModel, expected_epoch: int | None) -> None:
        """Write what is wanted over a record of that epoch, None for no record. Raises RegistryConflictError."""
        await self.check_identity(create=True)
        entry = await self.registry.get(key := wanted_key(record.model))
        epoch = parse_record(key, entry.value, WantedModel).epoch if entry is not None else None
        if epoch != expected_epoch:
            raise RegistryConflictError(f"{key} has epoch {epoch}, not {expected_epoch}")
        await self.registry.put(key, record.encode(), entry.revision if entry is not None else 0)

    async def update_wanted(
        self, model: str, change: Callable[[WantedModel | None], WantedModel | None]
    ) -> WantedModel | None:
        """Change what is wanted, again until nobody else wrote in between. Return what is there now.

        `change` returns the new record of the present one, perhaps several times; None, or an equal record, leaves it.
        Its epoch is set here. Raises RegistryConflictError if others were faster each time.
        """
        key = wanted_key(model)

        def following(value: bytes | None) -> bytes | None:
            now = None if value is None else parse_record(key, value, WantedModel)
            changed = change(now)
            if changed is None or (now is not None and changed.wants_same(now)):
                return None
            if changed.model != model:
                raise RegistryRecordError(f"{key}: model {changed.model!r} in the record of {model!r}")
            return changed.model_copy(update={"epoch": 1 if now is None else now.epoch + 1}).encode()

        await self.check_identity(create=True)
        _, there = await self._change(key, following)
        return None if there is None else parse_record(key, there, WantedModel)

    async def restore_wanted(self, record: WantedModel) -> bool:
        """Restore a record in a registry that has none, or one of a lower epoch. Return whether it was written."""
        return await self.restore_raw(wanted_key(record.model), record.encode(), record.epoch)

    async def versions(self, model: str | None = None) -> list[PublishedVersion]:
        """Return what is published, of one model or of all, by model and version."""
        return await self._entries(VERSIONS if model is None else f"{VERSIONS}{model}/", PublishedVersion)

    async def version(self, model: str, version: int) -> PublishedVersion | None:
        """Read one published version, or None."""
        return await self._get(version_key(model, version), PublishedVersion)

    async def put_version(self, record: PublishedVersion) -> None:
        """Put a version on record; the same one again changes nothing. Raises RegistryConflictError for another one."""
        key = version_key(record.model, record.version)
        there = parse_record(key, await self._put_once(key, record.encode()), PublishedVersion)
        if there.model_copy(update={"published_at": record.published_at}) != record:
            raise RegistryConflictError(
                f"{key} is published with identity {there.identity}, last_delta {there.last_delta}; this one "
                f"has identity {record.identity}, last_delta {record.last_delta}: a version is immutable"
            )

    async def restore_version(self, record: PublishedVersion, spec_json: str | None) -> None:
        """Put a version that the registry has lost on record again, after its spec. Raises RegistryConflictError."""
        if spec_json is not None:
            await self.put_spec(record.model, record.version, spec_json)
        await self.put_version(record)
        _log.warning("the registry had lost version %d of %s: restored", record.version, record.model)

    async def drop_version(self, model: str, version: int) -> bool:
        """Remove a version, its dense steps and its spec. Return whether the version was there."""
        keys = [version_key(model, version, area) for area in (VERSIONS, DENSE, ACCEPTED_DENSE, SPECS)]
        dropped = [await self._change(key, lambda value: None if value is None else b"") for key in keys]
        return dropped[0][0]

    async def dense_step(self, model: str, version: int, *, accepted: bool = False) -> DenseStep | None:
        """Return a version's newest dense weights, or those accepted last; None for its snapshot's."""
        return await self._get(version_key(model, version, ACCEPTED_DENSE if accepted else DENSE), DenseStep)

    async def accept_dense_step(self, record: DenseStep) -> None:
        """Note that a serving process has checked a step, and answers with it. An earlier one changes nothing."""
        await self._put_later_step(ACCEPTED_DENSE, record)

    async def put_dense_step(self, record: DenseStep) -> None:
        """Make a step the newest; the same again changes nothing. Raises RegistryConflictError if it is not later."""
        newest = await self._put_later_step(DENSE, record)
        if newest.model_copy(update={"published_at": record.published_at}) != record:
            key = version_key(record.model, record.version, DENSE)
            raise RegistryConflictError(f"{key}: dense step {newest.step} is on record; {record.step} must be higher")

    async def put_spec(self, model: str, version: int, spec_json: str) -> None:
        """Put the JSON of a version's `ModelSpec` on record. Raises RegistryConflictError if there is another one."""
        key, value = version_key(model, version, SPECS), spec_json.encode()
        if await self._put_once(key, value) != value:
            raise RegistryConflictError(f"{key} is on record with another spec: a version is immutable")

    async def spec(self, model: str, version: int) -> str | None:
        """Return the JSON of a version's `ModelSpec`, or None."""
        entry = await self.registry.get(version_key(model, version, SPECS))
        return entry.value.decode() if entry is not None else None

    async def nodes(self) -> list[NodeRecord]:
        """Return what every node announced last, by node id, unless it has expired."""
        return await self._announced(NODES, NodeRecord)

    async def _announced(self, area: str, schema: type[R]) -> list[R]:
        known, records = self._known.get(area, {}), dict[str, tuple[bytes, Any]]()
        for key, value in (await self.registry.announced(area)).items():
            record = known.get(key)
            if record is None or record[0] != value:
                try:
                    record = value, parse_record(key, value, schema)
                except RegistryRecordError as error:
                    _log.warning("an announcement is skipped: %s", error)
                    record = value, None
            records[key] = record
        self._known[area] = records
        return [record for _, record in records.values() if record is not None]

    async def announce_node(self, record: NodeRecord, ttl_s: float) -> None:
        """Announce what a node is and has, for `ttl_s` from now on; in a `foreign` registry, only that it is one."""
        # Another fleet's routers must not ask this process, nor its node of the same id be overwritten.
        area, value = (STRANGERS, self.foreign.encode()) if self.foreign else (NODES, record.encode())
        await self.registry.announce(f"{area}{record.node_id}", value, ttl_s)

    async def withdraw_node(self, node_id: str) -> None:
        """End a node's announcement now."""
        await self.registry.withdraw(f"{STRANGERS if self.foreign else NODES}{node_id}")

    async def announce_quality(self, record: Quality, ttl_s: float) -> None:
        """Announce how well a model ranks, as somebody measures it who knows the labels, for `ttl_s` from now on."""
        await self.registry.announce(f"{QUALITY}{record.model}", record.encode(), ttl_s)

    async def qualities(self) -> dict[str, Quality]:
        """Return what was announced of models' quality last, by model, unless it has expired."""
        return {record.model: record for record in await self._announced(QUALITY, Quality)}

    async def strangers(self) -> dict[str, str]:
        """Return what is wrong for processes that know another registry, by node id."""
        announced = await self.registry.announced(STRANGERS)
        return {key.removeprefix(STRANGERS): problem.decode() for key, problem in announced.items()}

    async def fleet(self) -> FleetRecord | None:
        """Read how the fleet divides rows; None before its first shard node."""
        return await self._get(FLEET, FleetRecord)

    async def join_fleet(self, record: FleetRecord) -> FleetRecord:
        """Put on record how the fleet divides rows, unless that is known; return what is on record then."""
        return parse_record(FLEET, await self._put_once(FLEET, record.encode()), FleetRecord)

    async def restore_raw(self, key: str, value: bytes, epoch: int) -> bool:
        """Restore a JSON record with an `epoch`, as `restore_wanted`. Raises RegistryForeignError."""
        await self.check_identity()
        written, _ = await self._change(key, lambda now: value if now is None or epoch_of(key, now) < epoch else None)
        return written

    async def _get(self, key: str, schema: type[R]) -> R | None:
        entry = await self.registry.get(key)
        return parse_record(key, entry.value, schema) if entry is not None else None

    async def _entries(self, prefix: str, schema: type[R]) -> list[R]:
        return [parse_record(key, entry.value, schema) for key, entry in (await self.registry.entries(prefix)).items()]

    async def _put_later_step(self, area: str, record: DenseStep) -> DenseStep:
        """Write a step unless there is the same or a later one; return what is on record then."""
        key = version_key(record.model, record.version, area)

        def following(value: bytes | None) -> bytes | None:
            is_later = value is None or parse_record(key, value, DenseStep).step < record.step
            return record.encode() if is_later else None

        _, there = await self._change(key, following)
        return record if there is None else parse_record(key, there, DenseStep)

    async def _put_once(self, key: str, value: bytes) -> bytes:
        """Write a key that is not there. Returns what is there now: `value`, or what was before."""
        _, there = await self._change(key, lambda before: value if before is None else None)
        return there or value

    async def _change(self, key: str, following: Callable[[bytes | None], bytes | None]) -> tuple[bool, bytes | None]:
        """Write what follows from a key's value, again until nobody else wrote in between.

        If None follows, nothing is written; b"" deletes the key. Return whether it was written, and what is there now.
        """
        for _ in range(_MAX_ATTEMPTS):
            entry = await self.registry.get(key)
            before, revision = (None, 0) if entry is None else (entry.value, entry.revision)
            if (value := following(before)) is None:
                return False, before
            with suppress(RegistryConflictError):
                if value:
                    await self.registry.put(key, value, revision)
                else:
                    await self.registry.delete(key, revision)
                return True, value
        raise RegistryConflictError(f"{key}: others wrote first {_MAX_ATTEMPTS} times in a row")


class _Epoch(Record):
    epoch: int = Field(ge=1, strict=True)


def epoch_of(key: str, value: bytes) -> int:
    """Return the `epoch` of a JSON record, whatever else it holds. Raises RegistryRecordError if it has none."""
    return parse_record(key, value, _Epoch).epoch
