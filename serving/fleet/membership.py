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
from serving.cli.settings import config_of, snapshot_folder
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
    def of(cls, config: MemberSettings) -> Membership:
        """Return what the settings of a process say. Raises UsageError, SnapshotError, RegistryRecordError."""
        if config.registry is not None and config.store_place is not None:
            agent = config_of(AgentConfig, {}, models=config.models or None)
            reopen = partial(open_registry, config.registry)
            return cls(FleetRegistry(reopen()), reopen, config.store_place, agent)
        store, snapshot = only_version(config)
        version = version_record(snapshot, time.time())
        fleet = single_process_fleet(f"process {os.getpid()}", version)
        return cls(fleet, lambda: fleet.registry, store, AgentConfig.for_only_process(version.model), version)

    def stage_cpu_share(self, config: MemberSettings) -> float:
        """Return how much of a core loading may use: all of it where no version answers meanwhile."""
        return config.stage_cpu_share if self.version is None else 1.0


def only_version(config: MemberSettings) -> tuple[StorePlace, Snapshot]:
    """Return the version that a process without a registry serves, and its store; files are not checked.

    Of a store at a URL all but rows is fetched. Raises UsageError, SnapshotError, StoreError.
    """
    model = config.models[0] if config.models else None
    named = config.store_place, model, config.version, config.snapshot
    folder = snapshot_folder(*named, with_rows=False, verify=config.verify).resolve()
    store = config.store_place
    store = folder.parent.parent if store is None or isinstance(store, Path) else store
    return store, Snapshot.open(folder, verify=False, rows_here=isinstance(store, Path))


def node_id(kind: str, suffix: str) -> str:
    """Return `<kind>-<host>-<suffix>`, with `_` for what no id may have."""
    return re.sub(r"[^A-Za-z0-9_.:-]", "_", f"{kind}-{socket.gethostname()}-{suffix}")[:200]


def reachable_host(bound: str) -> str:
    """Return the host at which others reach what is bound: every interface stands for this host's name."""
    return socket.gethostname() if bound in ANY_HOST else bound
