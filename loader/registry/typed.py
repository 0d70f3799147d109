"""Typed reads and writes of what is kept in a registry. Everything but the streams goes through here."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from loader.errors import RegistryConflictError, RegistryRecordError, cut
from loader.registry.records import (
    FLEET,
    NODES,
    VERSIONS,
    WANTED,
    FleetRecord,
    NodeRecord,
    PublishedVersion,
    Record,
    WantedModel,
    node_key,
    parse_record,
    version_key,
    wanted_key,
)
from loader.registry.registry import Entry, Registry

MAX_ATTEMPTS: Final = 64
"""How often a change is tried again because somebody else wrote first."""
SPECS: Final = "specs/"

_log = logging.getLogger(__name__)


def spec_key(model: str, version: int) -> str:
    """Returns the key of the JSON of a version's `ModelSpec`, for those who have no store at hand."""
    return f"{SPECS}{model}/{version:020d}"


class FleetRegistry:
    """A registry seen as the records of one fleet. Every method may raise RegistryUnavailableError.

    A record that can't be read raises RegistryRecordError with its key; only announcements are skipped, and logged
    once, since one broken node must not hide the others.
    """

    def __init__(self, registry: Registry) -> None:
        """Reads and writes through `registry`, which stays the caller's to close."""
        self.registry = registry
        self._skipped: dict[str, bytes] = {}
        # Announcements are read far more often than they change, and a record is immutable.
        self._nodes: dict[str, tuple[bytes, NodeRecord]] = {}

    @property
    def name(self) -> str:
        """The registry's, for logs."""
        return self.registry.name

    # What is wanted

    async def wanted(self) -> dict[str, WantedModel]:
        """Returns what is wanted, by model."""
        entries = await self.registry.entries(WANTED)
        found = (_wanted(key, entry.value) for key, entry in entries.items())
        return {record.model: record for record in found}

    async def wanted_model(self, model: str) -> WantedModel | None:
        """Returns what is wanted for one model."""
        key = wanted_key(model)
        entry = await self.registry.get(key)
        return _wanted(key, entry.value) if entry is not None else None

    async def put_wanted(self, record: WantedModel, expected_epoch: int | None) -> None:
        """Writes what is wanted over a record of that epoch; None if there must be none.

        Raises:
            RegistryConflictError: what is there has another epoch, or changed meanwhile.
        """
        key = wanted_key(record.model)
        entry = await self.registry.get(key)
        epoch = _wanted(key, entry.value).epoch if entry is not None else None
        if epoch != expected_epoch:
            raise RegistryConflictError(f"{key} has epoch {epoch}, not {expected_epoch}")
        await self.registry.put(key, _encode(record), entry.revision if entry is not None else 0)

    async def update_wanted(
        self, model: str, change: Callable[[WantedModel | None], WantedModel | None], epoch_above: int = 0
    ) -> WantedModel | None:
        """Changes what is wanted, again and again from what is there until nobody else wrote in between.

        Args:
            model: whose record.
            change: from what is there to what shall be; None, or an equal record, leaves it. Its epoch is set here. It
                may be called several times.
            epoch_above: the highest epoch that the writer knows of: the new one is higher, also if the registry
                has lost its record.

        Returns:
            What is there now.

        Raises:
            RegistryConflictError: somebody else was faster `MAX_ATTEMPTS` times.
        """
        key = wanted_key(model)
        there: WantedModel | None = None

        def following(entry: Entry | None) -> bytes | None:
            nonlocal there
            there = now = _wanted(key, entry.value) if entry is not None else None
            changed = change(now)
            if changed is None or (now is not None and changed.model_copy(update={"epoch": now.epoch}) == now):
                return None
            if changed.model != model:
                raise RegistryRecordError(f"{key}: model {changed.model!r} in the record of {model!r}")
            epoch = max(now.epoch if now is not None else 0, epoch_above) + 1
            there = changed.model_copy(update={"epoch": epoch})
            return _encode(there)

        await self._change(key, following)
        return there

    async def restore_wanted(self, record: WantedModel) -> bool:
        """Gives a record back to a registry that has none, or one of a lower epoch. True if it was written."""
        return await self.restore_raw(wanted_key(record.model), _encode(record), record.epoch)

    # Versions

    async def versions(self, model: str | None = None) -> list[PublishedVersion]:
        """Returns what is published, of one model or of all, by model and version."""
        prefix = VERSIONS if model is None else f"{VERSIONS}{model}/"
        entries = await self.registry.entries(prefix)
        return [_version(key, entry.value) for key, entry in entries.items()]

    async def version(self, model: str, version: int) -> PublishedVersion | None:
        """Reads one published version, or None."""
        key = version_key(model, version)
        entry = await self.registry.get(key)
        return _version(key, entry.value) if entry is not None else None

    async def put_version(self, record: PublishedVersion) -> None:
        """Puts a version on record. The same one again, published at whatever time, changes nothing.

        Raises:
            RegistryConflictError: there is another one of that number.
        """
        key = version_key(record.model, record.version)
        there = _version(key, await self._put_once(key, _encode(record)))
        if there.model_copy(update={"published_at": record.published_at}) != record:
            raise RegistryConflictError(
                f"{key} is published with identity {there.identity}, last_delta {there.last_delta}; this one has "
                f"identity {record.identity}, last_delta {record.last_delta}: a version is immutable"
            )

    async def drop_version(self, model: str, version: int) -> bool:
        """Takes a version, and its spec, off record. False if it was not there."""
        dropped = await self._drop(version_key(model, version))
        await self._drop(spec_key(model, version))
        return dropped

    async def put_spec(self, model: str, version: int, spec_json: str) -> None:
        """Puts the JSON of a version's `ModelSpec` on record. Raises RegistryConflictError if there is another one."""
        key, value = spec_key(model, version), spec_json.encode()
        if await self._put_once(key, value) != value:
            raise RegistryConflictError(f"{key} is on record with another spec: a version is immutable")

    async def spec(self, model: str, version: int) -> str | None:
        """Returns the JSON of a version's `ModelSpec`, or None."""
        entry = await self.registry.get(spec_key(model, version))
        return entry.value.decode() if entry is not None else None

    # Nodes

    async def nodes(self) -> list[NodeRecord]:
        """Returns what every node told last, by node id; those whose announcement has expired are not there."""
        announced = await self.registry.announced(NODES)
        found: dict[str, tuple[bytes, NodeRecord]] = {}
        skipped: dict[str, bytes] = {}
        for key, value in announced.items():
            known = self._nodes.get(key)
            try:
                record = known[1] if known is not None and known[0] == value else _node(key, value)
            except RegistryRecordError as error:
                if self._skipped.get(key) != value:
                    _log.warning("a node's announcement is skipped: %s", error)
                skipped[key] = value
                continue
            found[key] = (value, record)
        self._nodes, self._skipped = found, skipped
        return [record for _, record in found.values()]

    async def announce_node(self, record: NodeRecord, ttl_s: float) -> None:
        """Tells what a node is and has, for `ttl_s` from now on."""
        await self.registry.announce(node_key(record.node_id), _encode(record), ttl_s)

    async def withdraw_node(self, node_id: str) -> None:
        """Ends a node's announcement now."""
        await self.registry.withdraw(node_key(node_id))

    async def fleet(self) -> FleetRecord | None:
        """Reads how the fleet divides rows; None before its first shard node."""
        entry = await self.registry.get(FLEET)
        return parse_record(FLEET, entry.value, FleetRecord) if entry is not None else None

    async def join_fleet(self, record: FleetRecord) -> FleetRecord:
        """Says how the fleet divides rows, if nobody has yet; gives what is on record then. The caller compares."""
        return parse_record(FLEET, await self._put_once(FLEET, _encode(record)), FleetRecord)

    # Records that the caller reads itself

    async def raw(self, key: str) -> Entry | None:
        """Returns a key's bytes and revision."""
        return await self.registry.get(key)

    async def restore_raw(self, key: str, value: bytes, epoch: int) -> bool:
        """Gives a JSON record with an `epoch` back to a registry that has none, or one of a lower epoch.

        Returns:
            True if it was written.
        """
        return await self._change(
            key, lambda entry: None if entry is not None and epoch_of(key, entry.value) >= epoch else value
        )

    async def _put_once(self, key: str, value: bytes) -> bytes:
        """Writes a key that is not there. Returns what is there now: `value`, or what somebody else wrote before."""
        there = value

        def following(entry: Entry | None) -> bytes | None:
            nonlocal there
            there = value if entry is None else entry.value
            return value if entry is None else None

        await self._change(key, following)
        return there

    async def _change(self, key: str, following: Callable[[Entry | None], bytes | None]) -> bool:
        """Writes what follows from a key's entry (None: nothing), again until nobody else wrote in between."""
        for _ in range(MAX_ATTEMPTS):
            entry = await self.registry.get(key)
            value = following(entry)
            if value is None:
                return False
            with suppress(RegistryConflictError):
                await self.registry.put(key, value, entry.revision if entry is not None else 0)
                return True
        raise RegistryConflictError(f"{key}: others wrote first {MAX_ATTEMPTS} times in a row")

    async def _drop(self, key: str) -> bool:
        for _ in range(MAX_ATTEMPTS):
            entry = await self.registry.get(key)
            if entry is None:
                return False
            with suppress(RegistryConflictError):
                await self.registry.delete(key, entry.revision)
                return True
        raise RegistryConflictError(f"{key}: others wrote first {MAX_ATTEMPTS} times in a row")


def epoch_of(key: str, value: bytes) -> int:
    """Returns the `epoch` of a JSON record, whatever else it holds. Raises RegistryRecordError if it has none."""
    try:
        record = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RegistryRecordError(f"{key}: not JSON: {cut(error)}") from error
    epoch = record.get("epoch") if isinstance(record, Mapping) else None
    if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 1:
        raise RegistryRecordError(f"{key}: epoch {cut(repr(epoch))}; an integer from 1 on is needed")
    return epoch


def _encode(record: Record) -> bytes:
    return record.model_dump_json().encode()


def _wanted(key: str, value: bytes) -> WantedModel:
    record = parse_record(key, value, WantedModel)
    _check_place(key, wanted_key(record.model))
    return record


def _version(key: str, value: bytes) -> PublishedVersion:
    record = parse_record(key, value, PublishedVersion)
    _check_place(key, version_key(record.model, record.version))
    return record


def _node(key: str, value: bytes) -> NodeRecord:
    record = parse_record(key, value, NodeRecord)
    _check_place(key, node_key(record.node_id))
    return record


def _check_place(key: str, belongs: str) -> None:
    if key != belongs:
        raise RegistryRecordError(f"{key}: the record there belongs to {belongs}")
