"""What commands make of their options: configs, folders, registries, devices, limits, TLS, and flags of children."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from pydantic import BaseModel

    from loader.progress import Progress
    from loader.registry.fleet import FleetRegistry
    from loader.snapshot.reader import Snapshot
    from loader.snapshot.store import HeldSnapshot
    from loader.stores.cache import StorePlace
    from router.hot_rows import HotRowsConfig
    from router.outliers import ReplicaPolicy
    from router.plan import Plan
    from router.plan_file import PlanFile
    from serving.limits import RequestLimits
    from serving.rank.service import RankingService
    from serving.versions.warming import Warming
    from shard_node.agent.node_agent import NodeConfig
    from shard_node.buckets import NodeIdentity, Partition
    from shard_node.cuda.card_set import CardSet
    from shard_node.tracing import TraceConfig
    from shard_node.wire.tls import TlsClientConfig, TlsConfig

logger = logging.getLogger(__name__)

Options: TypeAlias = Mapping[str, Any]
Result = TypeVar("Result")
Config = TypeVar("Config", bound="BaseModel")

MAX_LIMITS_FILE_BYTES = 1 << 20
REMOVED_LIMITS = ("max_connections_per_address", "penalty_s", "trusted_proxies")
"""Ignored for one release."""
DEVICE_FLAGS = ("device", "card_memory_gb", "pinned_memory_gb", "hot_gb", "peer_access")
TRACES = ("trace_endpoint", "trace_protocol")
HOT_ROWS = ("hot_rows_gb", "hot_rows")
_TLS = ("tls_cert", "tls_key", "tls_client_ca")
_NODE_TLS = ("node_ca", "node_cert", "node_key")
SERVING = (
    *("admin_port", *_TLS, *_NODE_TLS, "tls_role", "tokens", *TRACES, "trace_sample_share"),
    *("ranking_replicas", "dtype", "wire_dtype", "replica_policy", *HOT_ROWS, "trust_exported"),
)
"""Options of a serving process that whoever starts several passes on as they are."""
_HELD: list[HeldSnapshot] = []
"""Versions that the one command of this process works with."""
_FLAGS = {"shards": "--shard", "models": "--model", "plan_file": "--plan", "detached": "--detach"}


def config_of(schema: type[Config], options: Options, prefix: str = "", /, **more: Any) -> Config:
    """Make a config of the options that were given and are its fields, and of `more`, which comes first.

    Raises UsageError naming what is unknown or out of range.
    """
    from pydantic import ValidationError

    from loader.snapshot.tables import schema_errors

    values = {name: options[name] for name in schema.model_fields.keys() & options if options[name] is not None} | more
    try:
        # Numbers may be strings, as they are on a command line.
        return schema.model_validate(values)
    except ValidationError as error:
        raise click.UsageError(prefix + "; ".join(map(str, schema_errors(error, [schema])))) from error


def flags(names: Iterable[str]) -> str:
    """Return options as a person writes them: `--shard, --no-verify`."""
    return ", ".join(_FLAGS.get(name, f"--{name.replace('_', '-')}") for name in names)


def arguments(options: Options, names: Iterable[str]) -> list[str]:
    """Return the flags that give a child process the same values, each as often as it was given; no switch is off."""
    passed: list[str] = []
    for name in names:
        value = options.get(name)
        if isinstance(value, bool):
            passed += flags([name]).split() if value else []
            continue
        for item in value if isinstance(value, tuple) else () if value is None else (value,):
            # A link is kept as it is: setting it anew is how secrets change.
            text = (
                "=".join(item) if isinstance(item, tuple) else str(item.absolute() if isinstance(item, Path) else item)
            )
            passed += [flags([name]), text]
    return passed


def given_flags(ctx: click.Context) -> set[str]:
    """Return the names of the options that stand on the command line itself."""
    return {name for name in ctx.params if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE}


def belongs_to_fleet(ctx: click.Context, fleet_only: Collection[str]) -> bool:
    """Tell whether a process gets its versions from a registry. Raises UsageError for flags of the other form."""
    given = given_flags(ctx)
    static = sorted(given & {"version", "snapshot", "shards"})
    if ctx.params["registry"] is None or (static and "registry" not in given):
        if wrong := sorted(given.intersection(fleet_only)):
            raise click.UsageError(f"{flags(wrong)}: only with --registry.")
        return False
    if static:
        raise click.UsageError(f"{flags(static)}: not with --registry, which says what is served and where rows are.")
    if ctx.params["store"] is None:
        raise click.UsageError("--registry needs --store.")
    return True


def store_of(
    store: str | Path, store_cache: Path | None, store_cache_gb: float | None, store_timeout_s: float | None
) -> StorePlace:
    """Return where a store is. Raises StoreError, and UsageError for flags that a folder has no use for."""
    from loader.stores.cache import store_place

    values = {"cache": store_cache, "cache_bytes": to_bytes(store_cache_gb), "timeout_s": store_timeout_s}
    place = store_place(store, **{name: value for name, value in values.items() if value is not None})
    if isinstance(place, Path):
        given = given_flags(click.get_current_context())
        if wrong := sorted(given & {"store_cache", "store_cache_gb", "store_timeout_s"}):
            raise click.UsageError(f"{flags(wrong)}: only with a --store at a URL.")
    return place


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
    if model is None:
        models = opened.models()
        if len(models) > 1:
            raise click.UsageError(f"--store {store} holds several models, name one with --model: {models}")
        model = models[0]
    held = opened.hold(model, version, with_rows=with_rows, verify=verify)
    _HELD.append(held)
    return held.path


def published_folder(snapshot: str | Path, store: StorePlace | None) -> tuple[Path, StorePlace]:
    """Return the folder of a snapshot that is named by itself, and the store in which it lies.

    One at a URL is fetched through the cache of `store`, which has to be the one in which it lies.

    Raises UsageError, SnapshotError, StoreError.
    """
    if isinstance(snapshot, Path):
        if not snapshot.is_dir():
            raise click.UsageError(f"Directory {str(snapshot)!r} does not exist.")
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
    from loader.errors import ExportError
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


def member_folder(options: Options, *, with_rows: bool = True) -> Path:
    """Return the folder of the one snapshot that a process without a registry serves. Raises as `snapshot_folder`."""
    models = options["models"]
    if len(models) > 1:
        raise click.UsageError("Several --model need --registry.")
    model = models[0] if models else None
    named = options["store"], model, options["version"], options["snapshot"]
    return snapshot_folder(*named, with_rows=with_rows, verify=options["verify"]).resolve()


def registry_url(registry: str | None, store: StorePlace | None) -> str:
    """Return the registry that was named, or that of a store's folder. Raises click.UsageError if there is neither."""
    if registry is not None:
        return registry
    if store is None:
        raise click.UsageError("Name the fleet: --registry URL, or --store FOLDER for the registry that lies in it.")
    if not isinstance(store, Path):
        raise click.UsageError(f"--registry URL is needed: no registry lies in a store at a URL, {store}.")
    from loader.registry import STORE_REGISTRY

    return str(store.resolve() / STORE_REGISTRY)


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


def with_registry(url: str, work: Callable[[FleetRegistry], Awaitable[Result]]) -> Result:
    """Run what talks to a registry, in an event loop of its own, until it is done. Raises RegistryError."""

    async def program() -> Result:
        async with opened_registry(url) as fleet:
            return await work(fleet)

    return asyncio.run(program())


def to_bytes(gigabytes: float | None) -> int | None:
    """Return 10^9 bytes for each gigabyte."""
    return None if gigabytes is None else int(gigabytes * 1e9)


def open_card_set(options: Options) -> CardSet | None:
    """Open the cards that the flags choose, as far as one version may take them; None for the CPU.

    Raises as `CardSet.open`.
    """
    from shard_node.cuda.card_set import CardOptions, CardSet

    limits = config_of(CardOptions, options, require_peer_access=options["peer_access"] == "required")
    return CardSet.open(options["device"], options["cards"], limits)


def device_arguments(options: Options) -> list[str]:
    """Return the flags that give a child process the same devices. Raises DeviceChoiceError."""
    from shard_node.cuda.card_set import DeviceChoice

    DeviceChoice.parse(options["device"])
    return arguments(options, DEVICE_FLAGS)


def num_replicas(asked: int | None, card_set: CardSet | None, *, may_block: bool) -> int:
    """Choose the number of ranking replicas: as asked, one for each card, none if no row blocks a thread, else one.

    `may_block` says whether a lookup may block its thread, for a disk or for rows that are written: then 0 raises
    UsageError, as with cards.
    """
    if asked == 0 and (may_block or card_set is not None):
        raise click.UsageError("--ranking-replicas 0 is only for rows in this process's RAM or on shard nodes.")
    if asked is not None:
        return asked
    return len(card_set.cards.cards) if card_set is not None else int(may_block)


def hot_rows(options: Options, *, all_here: bool) -> HotRowsConfig | None:
    """Return what is held of rows on shard nodes; None for nothing. Raises UsageError where all rows are here."""
    size_bytes = to_bytes(options["hot_rows_gb"])
    if not size_bytes:
        return None
    if all_here:
        raise click.UsageError(
            "--hot-rows-gb holds copies of rows that are on shard nodes; here all rows are in this process, "
            "where a copy would save nothing."
        )
    from router.hot_rows import HotRowsConfig

    return HotRowsConfig(size_bytes=size_bytes, policy=options["hot_rows"])


def replica_policy(options: Options) -> ReplicaPolicy:
    """Return what `--replica-policy` says. Raises UsageError naming what is unknown or out of range."""
    from router.outliers import ReplicaPolicy

    return config_of(ReplicaPolicy, {}, "replica-policy: ", **dict(options["replica_policy"]))


@contextlib.contextmanager
def recording(options: Options, service: RankingService) -> Iterator[None]:
    """Record what a service answers while the block runs, as far as it was asked for. Raises ConfigError."""
    if options["record"] is None:
        yield
        return
    from serving.observe.recording import RecordingConfig, RequestRecorder

    max_bytes = options["record_max_mb"] * 1_000_000
    config = RecordingConfig(folder=options["record"], share=options["record_share"], max_bytes=max_bytes)
    with contextlib.closing(RequestRecorder(config, service.metrics.recorded, clock=service.clock)) as recorder:
        service.on_ranked += (recorder.offer,)
        yield


def warming(options: Options) -> Warming | None:
    """Return what versions are warmed with; None for nothing."""
    folder = options["warm_from"] or options["record"]
    if folder is None or not options["warm_requests"]:
        return None
    from serving.versions.warming import Warming

    return Warming(folder=folder, requests=options["warm_requests"])


def read_limits(options: Options) -> RequestLimits:
    """Return the limits of a file (JSON, or TOML by its name), overridden by `--limit`.

    Raises UsageError naming the limit that is unknown or out of range, or what is wrong with the file.
    """
    from serving.limits import RequestLimits

    values: dict[str, Any] = {}
    path: Path | None = options["limits_file"]
    if path is not None:
        if path.stat().st_size > MAX_LIMITS_FILE_BYTES:
            raise click.UsageError(f"{path}: more than {MAX_LIMITS_FILE_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
        try:
            values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        except ValueError as error:
            raise click.UsageError(f"{path}: {error}") from error
        if not isinstance(values, dict):
            raise click.UsageError(f"{path}: expected an object of limits by name")
    values |= dict(options["limit"])
    ignored = [name for name in REMOVED_LIMITS if values.pop(name, None) is not None]
    ignored += ["--trusted-proxy"] if options.get("trusted_proxies") else []
    if ignored:
        logger.warning("%s: ignored, and refused by the next release: addresses are not judged", ", ".join(ignored))
    return config_of(RequestLimits, {}, "limits: ", **values)


def staleness_limits(pairs: tuple[tuple[str, str], ...], models: tuple[str, ...]) -> dict[str, float]:
    """Return `--max-staleness` by model. Raises UsageError for what is no number above 0, and for another model."""
    limits: dict[str, float] = {}
    for model, text in pairs:
        try:
            limits[model] = float(text)
        except ValueError:
            limits[model] = 0.0
        if not 0 < limits[model] < float("inf"):
            raise click.UsageError(f"--max-staleness {model}={text}: seconds must be a number above 0.")
        if models and model not in models:
            raise click.UsageError(f"--max-staleness {model}={text}: {model} is not among the --model: {list(models)}.")
    return limits


def serving_arguments(options: Options) -> list[str]:
    """Return the flags that give a serving process the same options. Raises UsageError for wrong limits or traces."""
    limits = read_limits(options).model_dump(exclude_unset=True)
    trace_config(options, "")
    passed = [f"--limit={name}={value}" for name, value in limits.items()]
    return passed + arguments(options, SERVING)


def trace_config(options: Options, service_name: str) -> TraceConfig | None:
    """Return where traces go; None for nowhere. Raises UsageError, and ConfigError for a variable."""
    from shard_node.tracing import TraceConfig

    names = ("endpoint", "protocol", "sample_share")
    given = {name: value for name in names if (value := options.get(f"trace_{name}")) is not None}
    config = config_of(TraceConfig, {}, "traces: ", service_name=service_name, **given)
    if not config.is_enabled:
        if given:
            raise click.UsageError("--trace-protocol and --trace-sample-share need --trace-endpoint.")
        return None
    if os.environ.get("OTEL_TRACES_SAMPLER") and options.get("trace_sample_share", 0) is None:
        raise click.UsageError("OTEL_TRACES_SAMPLER is not read any more: pass --trace-sample-share, or unset it.")
    config.resolved()
    return config


def scheme(options: Options) -> str:
    """Return that of the URLs at which a server answers."""
    return "http" if options["tls_cert"] is None else "https"


@dataclass(frozen=True, slots=True)
class Protection:
    """TLS with clients, TLS with shard nodes at TCP addresses, and the file of those who are let in; None for none."""

    tls: TlsConfig | None
    node_tls: TlsClientConfig | None
    tokens: Path | None

    @classmethod
    def of(cls, options: Options) -> Protection:
        """Read the options of a command, those that it has.

        Raises UsageError for flags that need another one; TlsConfigError, ConfigError for a file that does not fit.
        """
        from shard_node.wire.tls import TlsClientConfig, TlsConfig, client_context, server_context

        cert, key, client_ca = (options.get(name) for name in _TLS)
        node_ca, node_cert, node_key = (options.get(name) for name in _NODE_TLS)
        if (cert is None) != (key is None) or (client_ca is not None and cert is None):
            raise click.UsageError("--tls-cert and --tls-key belong together, and --tls-client-ca needs both.")
        if (node_cert is None) != (node_key is None):
            raise click.UsageError("--node-cert and --node-key belong together.")
        node_ca = node_ca or client_ca
        if node_cert is not None and node_ca is None:
            raise click.UsageError("--node-cert needs --node-ca or --tls-client-ca.")
        if node_cert is None:
            node_cert, node_key = cert, key
        if options.get("tls_role") and node_ca is None:
            raise click.UsageError("--tls-role needs --tls-client-ca or --node-ca.")
        roles, place = {"role_uris": options.get("tls_role")}, "--tls-role: "
        tls = None if cert is None else config_of(TlsConfig, roles, place, cert=cert, key=key, client_ca=client_ca)
        node = {"ca": node_ca, "cert": node_cert, "key": node_key}
        node_tls = None if node_ca is None else config_of(TlsClientConfig, roles, place, **node)
        tokens: Path | None = options.get("tokens")
        if tls is not None:
            server_context(tls)
        if node_tls is not None:
            client_context(node_tls)
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


def read_plan(options: Options, models: Collection[str] = ()) -> PlanFile | None:
    """Return the plan file that was named. Raises PlanError if it can't be read or, told models, is of none of them."""
    from router.errors import PlanError
    from router.plan_file import PlanFile

    path: Path | None = options["plan_file"]
    file = None if path is None else PlanFile.read(path)
    if file is not None and models and file.model not in models:
        raise PlanError(f"{path}: model is {file.model!r}, allowed here is {' or '.join(map(repr, sorted(models)))}")
    return file


def plan_of(options: Options, file: PlanFile | None, num_shards: int, snapshot: Snapshot) -> Plan:
    """Return how a version's rows are divided: by a file, if that is of its model. Raises as `Plan.of_snapshot`."""
    from router.plan import Plan

    return Plan.of_snapshot(
        snapshot, num_shards, options["sharding"], options["cards"], options["replicate_bytes"], file
    )


def partition_of(
    options: Options, file: PlanFile | None, index: int, num_shards: int, snapshot: Snapshot
) -> tuple[Partition, str]:
    """Return which rows of a version are a shard's, and the digest of the plan that says so. Raises as `plan_of`."""
    plan = plan_of(options, file, num_shards, snapshot)
    return plan.partition(index), plan.digest


def node_identity(options: Options, index: int, num_shards: int) -> NodeIdentity:
    """Return which shard of how many a process holds."""
    from shard_node.buckets import NodeIdentity

    return config_of(NodeIdentity, options, shard_index=index, num_shards=num_shards, num_cards=options["cards"])


def node_config(options: Options, node_id: str, address: str = "", **more: Any) -> NodeConfig:
    """Return what a process that holds rows for a fleet is told."""
    from shard_node.agent.node_agent import NodeConfig

    memory = {
        "memory_cap_bytes": to_bytes(options["max_memory_gb"]),
        "memory_budget_bytes": to_bytes(options["memory_budget_gb"]),
    }
    return config_of(NodeConfig, options, node_id=node_id, address=address, **memory, **more)
