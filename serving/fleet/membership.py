"""Which fleet a process belongs to: that of its registry, or one in its memory that wants a single version of it."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loader.registry import open_registry
from loader.registry.fleet import FleetRegistry, PublishedVersion
from loader.registry.memory import single_process_fleet
from loader.registry.registry import Registry
from loader.snapshot.publishing import version_record
from loader.snapshot.reader import Snapshot
from loader.stores.cache import StorePlace
from serving.cli import settings
from serving.config import MemberSettings
from shard_node.agent.agent import AgentConfig

ANY_HOST = frozenset({"0.0.0.0", "::", ""})


@dataclass(frozen=True, slots=True)
class Membership:
    """What a process follows.

    Attributes:
        fleet: its registry, for the event loop that first uses it.
        open_registry: opens it once more.
        store: has the versions.
        version: the only one, of a process without a registry; None in a fleet.
    """

    fleet: FleetRegistry
    open_registry: Callable[[], Registry]
    store: StorePlace
    agent: AgentConfig
    version: PublishedVersion | None = None

    @classmethod
    def of(cls, options: MemberSettings) -> Membership:
        """Return what the settings of a process say. Raises UsageError, SnapshotError, RegistryRecordError."""
        store = options.store_place
        if options.registry is not None:
            agent = settings.config_of(AgentConfig, {}, models=options.models or None)
            reopen = partial(open_registry, options.registry)
            return cls(FleetRegistry(reopen()), reopen, options.named_store, agent)
        folder = settings.member_folder(options, with_rows=False)
        place = folder.parent.parent if store is None or isinstance(store, Path) else store
        snapshot = Snapshot.open(folder, verify=False, rows_here=isinstance(place, Path))
        version = version_record(snapshot, time.time())
        fleet = single_process_fleet(f"process {os.getpid()}", version)
        return cls(fleet, lambda: fleet.registry, place, AgentConfig.for_only_process(version.model), version)


def node_id(kind: str, place: str) -> str:
    """Return `<kind>-<host>-<place>`, with `_` for what no id may have."""
    return re.sub(r"[^A-Za-z0-9_.:-]", "_", f"{kind}-{socket.gethostname()}-{place}")[:200]


def reachable_host(bound: str) -> str:
    """Return the host at which others reach what is bound: every interface stands for this host's name."""
    return socket.gethostname() if bound in ANY_HOST else bound
