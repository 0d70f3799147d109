"""Define what is kept in a registry and where: what is wanted of a fleet, and what its nodes tell of themselves.

All are JSON. Processes of different releases share a registry during an upgrade, so unknown keys are ignored.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loader.errors import RegistryRecordError, cut
from loader.snapshot.manifest import Name

FLEET = "fleet"
VERSIONS = "versions/"
WANTED = "wanted/"
ROLLOUTS = "rollouts/"
NODES = "nodes/"
COORDINATOR_LOCK = "locks/coordinator"
STAGING_LOCKS = "locks/staging/"


def version_key(model: str, version: int) -> str:
    """Returns the key of a `PublishedVersion`. Padded, so that versions sort as numbers."""
    return f"{VERSIONS}{model}/{version:020d}"


def wanted_key(model: str) -> str:
    """Returns the key of a `WantedModel`."""
    return f"{WANTED}{model}"


def rollout_key(model: str) -> str:
    """Returns the key of a `Rollout`."""
    return f"{ROLLOUTS}{model}"


def node_key(node_id: str) -> str:
    """Returns the key of a `NodeRecord`; announced, not put."""
    return f"{NODES}{node_id}"


def delta_stream(model: str, delta_base: int) -> str:
    """Returns the stream of changed rows that began with a version."""
    return f"deltas/{model}/{delta_base}"


NodeKind = Literal["shard", "serving"]
VersionState = Literal["waiting", "staging", "ready", "refused", "draining"]
NodeId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:\-]{1,200}$")]
Version = Annotated[int, Field(ge=1, lt=2**63)]

LATENCY_BOUNDS_MS: tuple[float, ...] = tuple(round(0.1 * 1.15**step, 4) for step in range(96))
"""Upper bounds of the buckets of `VersionStats.latency_counts`, 15% apart from 0.1 ms to a minute; one more above."""
MAX_REASON_CHARACTERS = 2000


class Record(BaseModel):
    """Frozen; unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


R = TypeVar("R", bound=Record)


class FleetRecord(Record):
    """How a fleet divides rows. Written by its first shard node; a node that differs is refused."""

    num_shards: int = Field(ge=1, le=1024)
    sharding: Literal["hash", "range", "table"]
    replicate_bytes: int = Field(ge=0)


class PublishedVersion(Record):
    """A version that may be rolled out.

    Attributes:
        identity: SHA-256 (hex) of its manifest: a folder with another one is not this version.
        delta_base: the version with which the stream of deltas began that this one continues; itself if it is new.
        last_delta: the last delta of that stream whose rows it contains; 0 for none.
        rows_bytes: bytes of all rows of one copy.
        published_at: seconds since the epoch.
    """

    model: Name
    version: Version
    identity: str
    delta_base: Version
    last_delta: int = Field(ge=0)
    rows_bytes: int = Field(ge=0)
    published_at: float


class Canary(Record):
    """A version that a stable share of the requests goes to."""

    version: Version
    share: float = Field(gt=0, lt=1)


class WantedModel(Record):
    """What is wanted of a fleet for one model.

    Attributes:
        epoch: counts up with every write. The highest one counts: a registry that lost its last writes is given them
            back by the nodes that know them.
        live: the version that answers requests; None before the first rollout.
        hold: versions that shard nodes hold.
        serve: versions that serving processes hold beside it, ready to be flipped to; each is in `hold`.
        follow: those of `hold` to which deltas are applied.
        canary: part of the requests goes to another version than the live one.
        node_hold: what single shard nodes hold in place of `hold`, by node id; for rolling replica by replica.
    """

    model: Name
    epoch: int = Field(ge=1)
    live: Version | None = None
    hold: tuple[Version, ...] = ()
    serve: tuple[Version, ...] = ()
    follow: tuple[Version, ...] = ()
    canary: Canary | None = None
    node_hold: dict[NodeId, tuple[Version, ...]] = Field(default_factory=dict)

    def named(self) -> frozenset[int]:
        """Returns every version that it names: none of them may be dropped."""
        named = {*self.hold, *self.serve, *self.follow}
        named.update(version for held in self.node_hold.values() for version in held)
        pointers = (self.live, None if self.canary is None else self.canary.version)
        return frozenset(named.union(version for version in pointers if version is not None))

    def held_by(self, node_id: str) -> tuple[int, ...]:
        """Returns the versions that a shard node shall hold."""
        return self.node_hold.get(node_id, self.hold)


class VersionStats(Record):
    """What a serving process has seen of one version since it holds it; all counts only grow.

    Attributes:
        requests: answered, with success or not; a client's mistakes are not counted.
        errors: of those, the server's faults, and ids without a row.
        latency_counts: answers by latency, one more than `LATENCY_BOUNDS_MS`; empty for none.
        score_count, score_sum, score_square_sum: of all scores.
    """

    requests: int = 0
    errors: int = 0
    latency_counts: tuple[int, ...] = ()
    score_count: int = 0
    score_sum: float = 0.0
    score_square_sum: float = 0.0


class VersionReport(Record):
    """What a node tells of one version.

    Attributes:
        state: `waiting` to be staged, `ready` to be asked for, `draining` once it is asked for no more.
        progress: of staging, 0 to 1.
        reason: why it is refused, or what it waits for.
        identity: of its manifest, once it is read.
        plan_digest: who owns what; shard nodes only.
        memory_bytes: of its rows in RAM and on cards; shard nodes, and serving processes that hold rows.
        leases: requests that use it now.
        golden_difference: largest difference from a golden score; serving processes only, None without golden requests.
        golden_tolerance: what the manifest allows.
        delta_sequence: the last delta that is applied, contained ones included; shard nodes only.
        delta_published_at: when that was published, in seconds since the epoch; None if none was applied here.
        stats: serving processes only.
    """

    model: Name
    version: Version
    state: VersionState
    progress: float = 0.0
    reason: Annotated[str, Field(max_length=MAX_REASON_CHARACTERS)] = ""
    identity: str = ""
    plan_digest: str = ""
    memory_bytes: int = 0
    leases: int = 0
    golden_difference: float | None = None
    golden_tolerance: float | None = None
    delta_sequence: int = 0
    delta_published_at: float | None = None
    stats: VersionStats | None = None


class NodeRecord(Record):
    """What a process announces, and announces again before it expires.

    Attributes:
        node_id: stable over restarts.
        kind: a shard node or a serving process.
        process_id: the process; another one has begun to count anew.
        address: where it is asked; a shard node's wire address, a serving process' HTTP address.
        shard_index: shard nodes only.
        num_shards: how many shards rows are divided over; None for a serving process that holds them itself.
        sharding, replicate_bytes, num_cards: shard nodes only.
        memory_total_bytes, memory_available_bytes: of the machine, or of the process' own limit.
        models: the only models that it is for; None for all.
        draining: it is about to end and wants no new requests.
        applied: by model, the epoch of the wanted record that it has last acted on in full, pointers included.
        live: by model, the version that it answers with; serving processes only.
        versions: what it holds, is staging, or has refused.
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
    versions: tuple[VersionReport, ...] = ()

    def is_for(self, model: str) -> bool:
        """Tells whether it takes part in what happens to a model."""
        return self.models is None or model in self.models

    def report(self, model: str, version: int) -> VersionReport | None:
        """Returns what it tells of a version; None if it does not have it."""
        return next((one for one in self.versions if (one.model, one.version) == (model, version)), None)


def cut_reason(reason: str) -> str:
    """Returns a reason short enough for a record."""
    return reason if len(reason) <= MAX_REASON_CHARACTERS else reason[: MAX_REASON_CHARACTERS - 3] + "..."


def parse_record(key: str, value: bytes, schema: type[R]) -> R:
    """Returns the record under a key. Raises RegistryRecordError, naming the key and the first bad field."""
    try:
        return schema.model_validate_json(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"])) or "record"
        found = "" if first["type"] == "json_invalid" else f", not {cut(repr(first['input']))}"
        raise RegistryRecordError(f"{key}: {place}: {cut(first['msg'])}{found}") from error
