"""Options that several commands share, so that one flag means one thing, and what is made of their values.

Nothing heavy is imported at the top: `shardrank --help` loads this file.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import click

if TYPE_CHECKING:
    from pydantic import BaseModel

    from loader.registry.fleet import FleetRegistry

Option: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
Result = TypeVar("Result")
Config = TypeVar("Config", bound="BaseModel")

Sharding: TypeAlias = Literal["hash", "range", "table"]
SHARDINGS: tuple[Sharding, ...] = ("hash", "range", "table")
FOLDER = click.Path(path_type=Path, file_okay=False)
FILE = click.Path(path_type=Path, dir_okay=False)

# Repeated from the router and the engine because importing them would make `--help` slow; tests compare them.
DEFAULT_REPLICATE_BYTES = 1 << 20
DEFAULT_PINNED_GB = 16.0

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class FiniteRange(click.FloatRange):
    """A number within bounds, which neither `nan` nor `inf` is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number; fail if it is not finite or not within the bounds."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class ShardNumber(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases only
    """`I/N`: shard I of N, counted from 0."""

    name = "I/N"

    def convert(
        self, value: str | tuple[int, int], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        """Return (I, N); fail unless 0 <= I < N."""
        if isinstance(value, tuple):
            return value
        index, _, count = value.partition("/")
        if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            self.fail(f"{value!r} is not I/N with 0 <= I < N, such as 0/2.", param, ctx)
        return int(index), int(count)


class Assignment(click.ParamType):  # type: ignore[type-arg]
    """`NAME=VALUE`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def convert(
        self, value: str | tuple[str, str], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """Return (NAME, VALUE); fail if either is empty."""
        if isinstance(value, tuple):
            return value
        name, _, text = value.partition("=")
        if not name or not text:
            self.fail(f"{value!r} is not {self.name}.", param, ctx)
        return name, text


class Share(click.ParamType):  # type: ignore[type-arg]
    """Part of a whole, `5%` or `0.05`."""

    name = "SHARE"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return a number above 0 and below 1; fail for any other."""
        if isinstance(value, float):
            return value
        text = value.strip()
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = math.nan
        if not 0 < share < 1:
            self.fail(f"{value!r} is not a share above 0% and below 100%, such as 5% or 0.05.", param, ctx)
        return share


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A time in seconds: `60s`, `2m`, `500ms`, `1h`, or a plain number of seconds."""

    name = "TIME"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds, at least 0; fail for what is not a time."""
        if isinstance(value, float):
            return value
        text = value.strip()
        number = text.rstrip("hms")
        try:
            seconds = float(number) * _SECONDS[text[len(number) :] or "s"]
        except (ValueError, KeyError):
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            self.fail(f"{value!r} is not a time such as 60s, 2m, 500ms or 1h.", param, ctx)
        return seconds


def together(*options: Option) -> Option:
    """Join options into one decorator; the help lists them in this order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def count_option(
    flag: str, help_text: str, low: int = 1, high: int | None = None, *, default: int | None = None, metavar: str = "N"
) -> Option:
    """Declare an option for a whole number."""
    kind = click.IntRange(low, high)
    return click.option(flag, type=kind, default=default, show_default=True, metavar=metavar, help=help_text)


def gigabytes_option(flag: str, help_text: str, *, default: float | None = None, above_zero: bool = False) -> Option:
    """Declare an option for memory in 10^9 bytes."""
    kind = FiniteRange(min=0, min_open=above_zero)
    return click.option(flag, type=kind, default=default, show_default=True, metavar="GB", help=help_text)


def _port_option(flag: str, default: int, protocol: str) -> Option:
    help_text = f"{protocol} port; 0 takes a free one."
    kind = click.IntRange(0, 65535)
    return click.option(flag, type=kind, default=default, show_default=True, metavar="PORT", help=help_text)


def _file_option(flag: str, help_text: str) -> Option:
    return click.option(flag, type=FILE, metavar="FILE", help=help_text)


def folder_option(flag: str, help_text: str, *, required: bool = False) -> Option:
    """Declare an option for a folder."""
    return click.option(flag, type=FOLDER, metavar="FOLDER", required=required, help=help_text)


def json_flag(what: str) -> Option:
    """Declare `--json` as a flag: print JSON in place of tables."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print {what} as JSON.")


STORE_HELP = "The folder that holds <model>/<version>/ snapshots."

store_option = folder_option("--store", STORE_HELP)

out_store_option = folder_option("--store", "Where the snapshot goes: FOLDER/<model>/<version>/.", required=True)

snapshot_options = together(
    store_option,
    click.option("--model", metavar="NAME", help="The model; without it, the store's only one."),
    count_option("--version", "The version; without it, the store's latest."),
    folder_option("--snapshot", "The snapshot's own folder, in place of --store, --model and --version."),
)

registry_option = click.option(
    "--registry",
    metavar="URL",
    envvar="SHARDRANK_REGISTRY",
    help="redis://… or rediss://… (with ?fleet=NAME for one of several), or a folder. "
    "Better given as the variable SHARDRANK_REGISTRY if it has a password.",
)

fleet_options = together(
    registry_option,
    folder_option("--store", "The fleet's store, if its registry lies in it."),
)

member_options = together(
    registry_option,
    store_option,
    click.option(
        "--model",
        "models",
        multiple=True,
        metavar="NAME",
        help="With --registry only this model, repeatable; by default all. Without, the model; default: the only one.",
    ),
    count_option("--version", "Without --registry: the version; by default the store's latest."),
    folder_option(
        "--snapshot", "Without --registry: the snapshot's own folder, in place of --store, --model and --version."
    ),
)

follow_option = click.option(
    "--follow", is_flag=True, help="Show how far it is until it ends; exit code 1 unless it is done."
)

hash_threads_option = count_option("--threads", "How many files are hashed at a time.", 1, 64, default=2)


def cards_option(default: int) -> Option:
    """Declare `--cards`."""
    help_text = "Cards of each shard node: GPUs, or logical cards on one (see --device); on the CPU arenas of rows."
    return count_option("--cards", help_text, 1, 64, default=default)


sharding_option = click.option(
    "--sharding",
    type=click.Choice(SHARDINGS),
    default="hash",
    show_default=True,
    help="What a shard owns: rows by hash, contiguous ranges of rows, or whole tables. hash and range need tables "
    "exported with that bucketing, but for those that --replicate-bytes or a single shard leaves whole.",
)

replicate_option = count_option(
    "--replicate-bytes",
    "Tables of at most this many bytes are held whole by every shard.",
    0,
    default=DEFAULT_REPLICATE_BYTES,
)

memory_budget_option = gigabytes_option(
    "--memory-budget-gb",
    "RAM for rows, in 10^9 bytes; the largest tables beyond it stay in the mapped files. Default: all in RAM. "
    "With GPUs, RAM for rows that no card has room for, if that is less than --pinned-memory-gb.",
)


def max_memory_option(whose: str, where: str = "") -> Option:
    """Declare `--max-memory-gb`."""
    return gigabytes_option(
        "--max-memory-gb",
        f"{whose}RAM for the rows of all versions together{where}, in 10^9 bytes. A version beyond it is refused "
        "before it is loaded. Default: what is available.",
    )


stage_share_option = click.option(
    "--stage-cpu-share",
    type=FiniteRange(0.01, 1),
    default=0.5,
    show_default=True,
    metavar="SHARE",
    help="With --registry: of one core, for loading a version beside the live one.",
)

verify_option = click.option(
    "--verify/--no-verify",
    default=True,
    show_default=True,
    help="Compare every file's SHA-256 before serving; leave it out only for a local store that you trust.",
)

port_options = together(
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    _port_option("--http-port", 8080, "HTTP"),
    _port_option("--grpc-port", 8081, "gRPC"),
)

front_options = together(
    click.option(
        "--admin-port",
        type=click.IntRange(0, 65535),
        metavar="PORT",
        help="A port for probes and /metrics alone, which a thread of its own answers however busy the others are; "
        "0 takes a free one. Serving processes that share their ports share it too.",
    ),
    click.option(
        "--trusted-proxy",
        "trusted_proxies",
        multiple=True,
        metavar="ADDRESS[/BITS]",
        help="A balancer or proxy that stands for many clients: its connections are not counted, and it never has to "
        "wait. Repeatable.",
    ),
)

films_options = together(
    click.option(
        "--movielens",
        type=click.Path(path_type=Path, file_okay=False, exists=True),
        metavar="FOLDER",
        help="Folder with the files of MovieLens 100K (u.data, u.item, u.user, u.genre).",
    ),
    count_option("--ratings", "How many ratings to generate, without --movielens.", 1000, 10_000_000, default=40_000),
    count_option("--epochs", "Passes over the data; default: the trainer's own.", 1, 1000),
    count_option("--seed", "Of the split, the training, and of what is generated.", 0, 2**32 - 1, default=0),
)

ranking_options = together(
    count_option(
        "--ranking-replicas",
        "Ranking replicas of each serving process; each is a thread that scores one batch at a time. With rows on "
        "GPUs in this process they take turns over the cards. 0: no thread, the event loop scores between requests; "
        "only with all rows in this process's RAM, and the default there. Else 1, or one for each GPU.",
        0,
        64,
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16"]),
        default="auto",
        show_default=True,
        help="Number format of the dense model; auto is bfloat16 where the device has it and golden scores allow it.",
    ),
    click.option(
        "--limit",
        type=Assignment("NAME=VALUE"),
        multiple=True,
        metavar="NAME=VALUE",
        help="A limit, such as max_candidates=500; docs/api.md lists them. Repeatable.",
    ),
    click.option(
        "--limits",
        "limits_file",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        metavar="FILE",
        help="Limits as a JSON or TOML file; --limit overrides it.",
    ),
)


def device_option(default: str) -> Option:
    """Declare `--device`."""
    return click.option(
        "--device",
        default=default,
        show_default=True,
        metavar="DEVICE",
        help="Where rows lie and are pooled: cpu; cuda (one GPU for each card); cuda:0 or cuda:0,1 (these, with "
        "several logical cards on each if there are more cards); or auto: GPUs if CuPy and one for each card are here.",
    )


device_options = together(
    device_option("auto"),
    gigabytes_option(
        "--card-memory-gb",
        "With GPUs: memory of each card for the rows of one version, in 10^9 bytes. Default: half of what is "
        "free at the start, so that two versions fit side by side.",
        above_zero=True,
    ),
    gigabytes_option(
        "--pinned-memory-gb",
        "With GPUs: host memory for rows that no card has room for, which cards read in place. A "
        "version with more rows is refused.",
        default=DEFAULT_PINNED_GB,
    ),
    gigabytes_option(
        "--hot-gb",
        "With GPUs: memory of each card for copies of the hottest rows, which every card has. Default: what is "
        "left when all rows are on cards, else a sixteenth.",
    ),
    click.option(
        "--peer-access",
        type=click.Choice(["auto", "required"]),
        default="auto",
        show_default=True,
        help="With GPUs: required refuses to start unless every card reads the memory of every other. auto goes on "
        "without: then rows are on all cards, or in pinned host memory.",
    ),
)


def tls_options(client_ca_help: str) -> Option:
    """Declare `--tls-cert`, `--tls-key`, `--tls-client-ca`."""
    return together(
        _file_option(
            "--tls-cert",
            "Speak TLS with this certificate (PEM, with those between it and its CA). Files of TLS are read again when "
            "they change; open connections stay.",
        ),
        _file_option("--tls-key", "Private key of --tls-cert, PEM, without a password."),
        _file_option("--tls-client-ca", client_ca_help),
    )


node_tls_options = together(
    _file_option(
        "--node-ca",
        "Speak TLS to shard nodes at TCP addresses, with certificates of these CAs. Default: --tls-client-ca.",
    ),
    _file_option(
        "--node-cert", "Certificate to show to shard nodes. Default: --tls-cert, if shard nodes are spoken to by TLS."
    ),
    _file_option("--node-key", "Private key of --node-cert. Default: --tls-key."),
)

tokens_option = _file_option(
    "--tokens",
    "Let in only who has one of these tokens; see `shardrank token new`. Probes need none. Read again on change.",
)


def validated(schema: type[Config], values: Mapping[str, Any], prefix: str = "") -> Config:
    """Return a config made of flags. Raises click.UsageError, naming what is unknown or out of range."""
    from pydantic import ValidationError

    from loader.snapshot.manifest import schema_errors

    try:
        # Numbers may be strings, as they are on a command line.
        return schema.model_validate(values)
    except ValidationError as error:
        raise click.UsageError(prefix + "; ".join(map(str, schema_errors(error, [schema])))) from error


def snapshot_folder(store: Path | None, model: str | None, version: int | None, snapshot: Path | None) -> Path:
    """Return the folder of the snapshot that was named; the latest version where none was.

    Raises:
        click.UsageError: if the flags contradict each other or name nothing.
        SnapshotNotFoundError: if the store has no such model or version.
    """
    if snapshot is not None:
        if store is not None or model is not None or version is not None:
            raise click.UsageError("--snapshot names the folder itself: leave out --store, --model and --version.")
        return snapshot
    if store is None:
        raise click.UsageError("Name a snapshot: --store FOLDER [--model NAME] [--version N], or --snapshot FOLDER.")
    from loader.snapshot.store import Store

    opened = Store(store)
    opened.check_exists()
    if model is None:
        models = opened.models()
        if len(models) > 1:
            raise click.UsageError(f"--store {store} holds several models, name one with --model: {models}")
        model = models[0]
    return opened.snapshot_path(model, version)


def registry_url(registry: str | None, store: Path | None) -> str:
    """Return the registry that was named, or the store's own. Raises click.UsageError if neither was named."""
    if registry is not None:
        return registry
    if store is None:
        raise click.UsageError("Name the fleet: --registry URL, or --store FOLDER for the registry that lies in it.")
    from serving.fleet.local_fleet import STORE_REGISTRY

    return str(store.resolve() / STORE_REGISTRY)


@contextlib.asynccontextmanager
async def opened_registry(url: str) -> AsyncIterator[FleetRegistry]:
    """Open a registry, and close it when the block ends. Raises RegistryError."""
    from loader.registry.fleet import FleetRegistry
    from loader.registry.opening import open_registry

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
