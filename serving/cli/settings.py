"""What commands make of their options and settings: configs, folders, registries, devices, TLS, plans and traces."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click

from loader.errors import ConfigError, ExportError, SnapshotNotFoundError, nearest, no_path
from serving.config import FrontSettings, NodeTlsSettings, TlsSettings, TraceSettings

if TYPE_CHECKING:
    from pydantic import BaseModel

    from loader.progress import Progress
    from loader.registry.fleet import FleetRegistry
    from loader.snapshot.reader import Snapshot
    from loader.snapshot.store import HeldSnapshot, Store
    from loader.stores.cache import StorePlace
    from router.plan import Plan
    from router.plan_file import PlanFile
    from serving.config import DivisionSettings, ServeConfig, ShardNodeConfig
    from serving.rank.service import RankingService
    from shard_node.agent.node_agent import NodeConfig
    from shard_node.buckets import Partition
    from shard_node.cuda.card_set import CardSet
    from shard_node.tracing import TraceConfig
    from shard_node.wire.tls import TlsClientConfig, TlsConfig

logger = logging.getLogger(__name__)

Options: TypeAlias = Mapping[str, Any]
Result = TypeVar("Result")
Config = TypeVar("Config", bound="BaseModel")

_HELD: list[HeldSnapshot] = []
"""Versions that the one command of this process works with."""


def config_of(
    schema: type[Config],
    options: Options | BaseModel,
    prefix: str = "",
    given: Collection[str] | None = None,
    /,
    **more: Any,
) -> Config:
    """Make a config of the options or settings that are its fields, and of `more`, which comes first.

    `given` are those that are checked against each other, all by default (`Settings.given`). Raises UsageError naming
    what is unknown or out of range.
    """
    from pydantic import ValidationError

    from loader.snapshot.tables import schema_errors

    named = options if isinstance(options, Mapping) else dict(options)
    values = {name: named[name] for name in schema.model_fields.keys() & named if named[name] is not None} | more
    try:
        # Numbers may be strings, as they are on a command line.
        return schema.model_validate(values, context=None if given is None else {"given": {*given}})
    except ValidationError as error:
        problems = (
            str(one).removeprefix("document: ").removeprefix("Value error, ") for one in schema_errors(error, [schema])
        )
        raise click.UsageError(prefix + "; ".join(problems)) from error


def snapshot_folder(
    store: StorePlace | None,
    model: str | None,
    version: int | None,
    snapshot: Path | None,
    *,
    with_rows: bool = True,
    verify: bool = True,
) -> Path:
    """Return the folder of the snapshot that was named, by default the latest. Raises UsageError, SnapshotError.

    Of a store at a URL it is fetched, with its rows or without, and stays in the cache until this process ends.
    """
    if snapshot is not None:
        if store is not None or model is not None or version is not None:
            raise click.UsageError("--snapshot names the folder itself: leave out --store, --model and --version.")
        return snapshot
    if store is None:
        raise click.UsageError(
            "Name a snapshot: --store FOLDER|URL [--model NAME] [--version N], or --snapshot FOLDER."
        )
    from loader.stores import open_store

    opened = open_store(store)
    opened.check_exists()
    held = opened.hold(only_model(opened) if model is None else model, version, with_rows=with_rows, verify=verify)
    _HELD.append(held)
    return held.path


def published_folder(snapshot: str | Path, store: StorePlace | None) -> tuple[Path, StorePlace]:
    """Return the folder of a snapshot that is named by itself, and the store in which it lies.

    One at a URL is fetched through the cache of `store`, which has to be the one in which it lies.

    Raises UsageError, SnapshotError, StoreError.
    """
    if isinstance(snapshot, Path):
        if not snapshot.is_dir():
            raise SnapshotNotFoundError(no_path("snapshot", snapshot))
        folder = snapshot.resolve()
        return folder, folder.parent.parent
    from loader.stores.cache import store_place

    url, _, version = snapshot.rstrip("/").rpartition("/")
    url, _, model = url.rpartition("/")
    if not version.isdecimal() or not model:
        raise click.UsageError(f"{snapshot!r} is no snapshot: URL/MODEL/VERSION, or a folder.")
    place = store_place(url)
    if isinstance(place, Path):
        return (place / model / version).resolve(), place
    if store is not None and str(store) != str(place):
        raise click.UsageError(f"{snapshot} lies in another store than {store}: fetch it into a folder first.")
    place = place if store is None else store
    return snapshot_folder(place, model, int(version), None), place


def export_into(
    place: StorePlace, model: str, version: int | None, write: Callable[[Path, int | None], Path], progress: Progress
) -> tuple[Snapshot, str]:
    """Have `write` make a model's next version, or that one, in a store; return it and where it is.

    For a store at a URL it is made in a folder beside the cache, put up as a whole, and deleted here.

    Raises ExportError as `write`, and if an earlier version made here was not put up; StoreError.
    """
    from loader.snapshot.reader import Snapshot
    from loader.stores import open_store

    if isinstance(place, Path):
        folder = write(place, version)
        return Snapshot.open(folder, verify=False), str(folder)
    store, made = open_store(place), place.exports
    version = store.next_version(model) if version is None else version
    if (finished := made / model / str(version)).exists():
        raise ExportError(
            f"{finished} was made by an earlier export and not put up: go on with `shardrank publish {finished} "
            f"--store {place}`, or delete it"
        )
    snapshot = Snapshot.open(write(made, version), verify=False)
    where, _ = store.put(snapshot.path, snapshot.identity, progress)
    shutil.rmtree(snapshot.path)
    return snapshot, where


def only_model(store: Store) -> str:
    """Return the one model of a store. Raises UsageError, SnapshotNotFoundError."""
    models = store.models()
    if not models:
        store.check_exists()
    if len(models) > 1:
        raise click.UsageError(f"--store {store.name} holds several models, name one with --model: {models}")
    return models[0]


def registry_url(registry: str | None, store: StorePlace | None) -> str:
    """Return the registry that was named, or that of a store's folder. Raises click.UsageError if there is neither."""
    if registry is not None:
        return registry
    if store is None:
        raise click.UsageError("Name the fleet: --registry URL, or --store FOLDER for the registry that lies in it.")
    if not isinstance(store, Path):
        raise click.UsageError(f"--registry URL is needed: no registry lies in a store at a URL, {store}.")
    from loader.registry import registry_in

    return registry_in(store)


def check_store(store: StorePlace | None) -> None:
    """Raise ConfigError if a store is a folder that is not there. One that is empty may be filled later."""
    if isinstance(store, Path) and not store.is_dir():
        raise ConfigError(no_path("store", store))


def check_registry(url: str) -> None:
    """Raise ConfigError if a registry is in a folder, or in a store, that is not there."""
    from loader.registry import registry_in
    from loader.registry.registry import local_path

    folder = local_path(url)
    if folder is not None and url == registry_in(folder.parent):
        check_store(folder.parent)
    elif folder is not None and not folder.is_dir():
        raise ConfigError(no_path("registry", folder))


@contextlib.asynccontextmanager
async def opened_registry(url: str) -> AsyncIterator[FleetRegistry]:
    """Open a registry, and close it when the block ends. Raises RegistryError."""
    from loader.registry import open_registry
    from loader.registry.fleet import FleetRegistry

    registry = open_registry(url)
    try:
        yield FleetRegistry(registry)
    finally:
        await registry.close()


def with_registry(
    url: str, work: Callable[[FleetRegistry], Awaitable[Result]], model: str | None = None, *, may_be_new: bool = False
) -> Result:
    """Run what talks to a registry, in an event loop of its own, until it is done.

    Raises ConfigError for a registry that is not there, unless it may be new, or a model that it does not have;
    RegistryError.
    """

    async def program() -> Result:
        async with opened_registry(url) as fleet:
            if model is not None:
                await check_model(fleet, model)
            return await work(fleet)

    if not may_be_new:
        check_registry(url)
    return asyncio.run(program())


async def check_model(fleet: FleetRegistry, model: str) -> None:
    """Raise ConfigError for a model that a registry does not have."""
    known = {record.model for record in await fleet.versions()} | (await fleet.wanted()).keys()
    if model not in known:
        problem = f"it has {nearest(model, known)}; `shardrank publish` puts a version on record"
        raise ConfigError(f"registry {fleet.name} has no model {model!r}; {problem}")


def open_card_set(config: ServeConfig | ShardNodeConfig) -> CardSet | None:
    """Open the cards that the settings choose, as far as one version may take them; None for the CPU.

    Raises as `CardSet.open`.
    """
    from shard_node.cuda.card_set import CardOptions, CardSet

    limits = config_of(CardOptions, config, require_peer_access=config.peer_access == "required")
    return CardSet.open(config.device, config.cards, limits)


def num_replicas(asked: int | None, card_set: CardSet | None, *, may_block: bool) -> int:
    """Choose the number of ranking replicas: as asked, one for each card, none if no row blocks a thread, else one.

    `may_block` says whether a lookup may block its thread, for a disk or for rows that are written: then 0 raises
    UsageError, as with cards.
    """
    if asked == 0 and (may_block or card_set is not None):
        raise click.UsageError("ranking_replicas 0 is only for rows in this process's RAM or on shard nodes.")
    if asked is not None:
        return asked
    return len(card_set.cards.cards) if card_set is not None else int(may_block)


@contextlib.contextmanager
def recording(config: ServeConfig, service: RankingService) -> Iterator[None]:
    """Record what a service answers while the block runs, as far as the settings say. Raises ConfigError."""
    if config.record is None:
        yield
        return
    from serving.observe.recording import RequestRecorder

    bounds, counted = (config.record_share, config.record_max_mb * 1_000_000), service.metrics.recorded
    with contextlib.closing(RequestRecorder(config.record, *bounds, counted, clock=service.clock)) as recorder:
        service.on_ranked += (recorder.offer,)
        yield


def trace_config(config: TraceSettings, service_name: str) -> TraceConfig | None:
    """Return where traces go; None for nowhere. Raises UsageError, and ConfigError for a variable."""
    from shard_node.tracing import TraceConfig

    names = ("endpoint", "protocol", "sample_share")
    given = {name: value for name in names if (value := getattr(config, f"trace_{name}", None)) is not None}
    traces = config_of(TraceConfig, {}, "traces: ", service_name=service_name, **given)
    if not traces.is_enabled:
        if given:
            raise click.UsageError("trace_protocol and trace_sample_share need --trace-endpoint.")
        return None
    if os.environ.get("OTEL_TRACES_SAMPLER") and isinstance(config, FrontSettings) and "sample_share" not in given:
        raise click.UsageError("OTEL_TRACES_SAMPLER is not read any more: set trace_sample_share, or unset it.")
    traces.resolved()
    return traces


@dataclass(frozen=True, slots=True)
class Protection:
    """TLS with clients, TLS with shard nodes at TCP addresses, and the file of those who are let in; None for none."""

    tls: TlsConfig | None
    node_tls: TlsClientConfig | None
    tokens: Path | None

    @classmethod
    def of(cls, config: TlsSettings) -> Protection:
        """Read the settings of a process, those that it has.

        Raises UsageError for roles that are none; TlsConfigError, ConfigError for a file that does not fit.
        """
        from shard_node.wire.tls import TlsClientConfig, TlsConfig, client_context, server_context

        cert, key, client_ca = config.tls_cert, config.tls_key, config.tls_client_ca
        uris = tuple(text.partition("=")[::2] for text in getattr(config, "tls_role", ()))
        roles, prefix = {"role_uris": uris}, "tls_role: ROLE=URI: "
        tls = node_tls = None
        if cert is not None:
            tls = config_of(TlsConfig, roles, prefix, cert=cert, key=key, client_ca=client_ca)
            server_context(tls)
        if isinstance(config, NodeTlsSettings) and (ca := config.node_ca or client_ca) is not None:
            shown = (cert, key) if config.node_cert is None else (config.node_cert, config.node_key)
            node_tls = config_of(TlsClientConfig, roles, prefix, ca=ca, cert=shown[0], key=shown[1])
            client_context(node_tls)
        tokens: Path | None = getattr(config, "tokens", None)
        if tokens is not None:
            from serving.api.tokens import read_tokens

            read_tokens(tokens)
        return cls(tls, node_tls, tokens)


def warn_if_open(host: str, protection: Protection) -> None:
    """Log one warning if others than this machine can reach the APIs, and anybody may ask or listen in."""
    from shard_node.wire.address import Address

    tls = protection.tls
    missing = [] if tls is not None else ["TLS (--tls-cert)"]
    if protection.tokens is None and (tls is None or tls.client_ca is None):
        missing.append("tokens (--tokens) or client certificates (--tls-client-ca)")
    if missing and not Address(host).is_loopback:
        logger.warning("listens on %s without %s: for a private network only", host, " and without ".join(missing))


def read_plan(config: DivisionSettings, models: Collection[str] = ()) -> PlanFile | None:
    """Return the plan file that was named. Raises PlanError if it can't be read or, told models, is of none of them."""
    from router.errors import PlanError
    from router.plan_file import PlanFile

    path = config.plan_file
    file = None if path is None else PlanFile.read(path)
    if file is not None and models and file.model not in models:
        raise PlanError(f"{path}: model is {file.model!r}, allowed here is {' or '.join(map(repr, sorted(models)))}")
    return file


def plan_of(config: DivisionSettings, file: PlanFile | None, num_shards: int, snapshot: Snapshot) -> Plan:
    """Return how a version's rows are divided: by a file, if that is of its model. Raises as `Plan.of_snapshot`."""
    from router.plan import Plan

    return Plan.of_snapshot(snapshot, num_shards, config.sharding, config.cards, config.replicate_bytes, file)


def partition_of(
    config: DivisionSettings, file: PlanFile | None, index: int, num_shards: int, snapshot: Snapshot
) -> tuple[Partition, str]:
    """Return which rows of a version are a shard's, and the digest of the plan that says so. Raises as `plan_of`."""
    plan = plan_of(config, file, num_shards, snapshot)
    return plan.partition(index), plan.digest


def node_config(config: ServeConfig | ShardNodeConfig, node_id: str, address: str = "", **more: Any) -> NodeConfig:
    """Return what a process that has rows needs to know of itself."""
    from shard_node.agent.node_agent import NodeConfig

    gigabytes = {"memory_cap_bytes": config.max_memory_gb, "memory_budget_bytes": config.memory_budget_gb}
    memory = {name: int(number * 1e9) for name, number in gigabytes.items() if number is not None}
    return config_of(NodeConfig, config, node_id=node_id, address=address, **memory | more)
