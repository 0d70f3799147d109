"""What `shardrank publish` and `shardrank versions` tell, as documents."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from loader.publishing import Publication, Retained
from loader.registry.records import NodeRecord, PublishedVersion, WantedModel
from loader.registry.typed import FleetRegistry


class ListedVersion(PublishedVersion):
    """A `PublishedVersion` and where it is in use.

    Attributes:
        uses: of `live`, `canary <share>`, `staged` (wanted beside the live one).
        nodes: nodes of both kinds on which it is ready.
    """

    uses: tuple[str, ...] = ()
    nodes: int = 0


class VersionList(BaseModel):
    """By model and version, ascending."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    versions: tuple[ListedVersion, ...]


async def list_versions(fleet: FleetRegistry, model: str | None) -> VersionList:
    """The published versions of one model, or of all. Raises RegistryError."""
    published = await fleet.versions(model)
    wanted, nodes = await fleet.wanted(), await fleet.nodes()
    listed = (_listed(record, wanted.get(record.model), nodes) for record in published)
    return VersionList(versions=tuple(sorted(listed, key=lambda one: (one.model, one.version))))


def _listed(record: PublishedVersion, wanted: WantedModel | None, nodes: list[NodeRecord]) -> ListedVersion:
    ready = 0
    for node in nodes:
        report = node.report(record.model, record.version)
        ready += report is not None and report.state == "ready"
    return ListedVersion(**record.model_dump(), uses=_uses(record.version, wanted), nodes=ready)


def _uses(version: int, wanted: WantedModel | None) -> tuple[str, ...]:
    if wanted is None:
        return ()
    uses: list[str] = []
    if version == wanted.live:
        uses.append("live")
    elif version in wanted.hold or any(version in held for held in wanted.node_hold.values()):
        uses.append("staged")
    if wanted.canary is not None and version == wanted.canary.version:
        uses.append(f"canary {wanted.canary.share:.3g}")
    return tuple(uses)


class PublishReport(PublishedVersion):
    """What `shardrank publish` did.

    Attributes:
        folder: where the version lies in the store.
        copied: whether it had to be copied there.
        is_new: whether the registry did not know it yet.
        kept, deleted: what `--retain` left and deleted; None without it.
    """

    folder: str
    copied: bool
    is_new: bool
    kept: tuple[int, ...] | None = None
    deleted: tuple[int, ...] | None = None

    @classmethod
    def of(cls, done: Publication, retained: Retained | None) -> PublishReport:
        """What both say."""
        return cls(
            **done.record.model_dump(),
            folder=str(done.folder),
            copied=done.copied,
            is_new=done.is_new,
            kept=None if retained is None else retained.kept,
            deleted=None if retained is None else retained.dropped,
        )
