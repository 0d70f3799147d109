"""Options that several commands share, so that one flag means one thing. Imports nothing heavy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import click

from serving.cli.settings import registry_url, store_of

Option: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

# Repeated from the router and the engine because importing them would make `--help` slow; tests compare them.
DEFAULT_REPLICATE_BYTES = 1 << 20
DEFAULT_PINNED_GB = 16.0

DEFAULT_NETWORK_GB_PER_S = 12.5
DEFAULT_NETWORK_US = 20.0
"""100 Gb/s Ethernet, and a round trip through a switch and two kernels: assumed."""

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class FiniteRange(click.FloatRange):
    """A number within bounds, which neither `nan` nor `inf` is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number; fail if it is not finite or not within the bounds."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


FOLDER = click.Path(path_type=Path, file_okay=False)
FILE = click.Path(path_type=Path, dir_okay=False)
EXISTING_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
ABOVE_ZERO = FiniteRange(0, min_open=True)
PART = FiniteRange(0, 1, min_open=True)
WRITABLE_FILE = click.Path(path_type=Path, dir_okay=False, writable=True)
EXISTING = click.Path(path_type=Path, exists=True)
EXISTING_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
PORT = click.IntRange(0, 65535)


def shard_number(text: str) -> tuple[int, int]:
    """Read `I/N`, shard I of N counted from 0."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise click.BadParameter(f"{text!r} is not I/N with 0 <= I < N, such as 0/2.")
    return int(index), int(count)


def share(text: str) -> float:
    """Read a part of a whole, `5%` or `0.05`: above 0 and below 1."""
    text = text.strip()
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = math.nan
    if not 0 < number < 1:
        raise click.BadParameter(f"{text!r} is not a share above 0% and below 100%, such as 5% or 0.05.")
    return number


def byte_size(text: str) -> int:
    """Read a number of bytes, 1 or more: `64GB`, `1.5 TB`, `4096`; powers of 1000, as `human_bytes` writes them."""
    number = text.strip().removesuffix("B").rstrip("kMGT ")
    unit = text.strip().removesuffix("B")[len(number) :].strip()
    try:
        size = float(number) * {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}[unit]
    except (ValueError, KeyError):
        size = math.nan
    if not 1 <= size < 2**63:
        raise click.BadParameter(f"{text!r} is not a number of bytes, 1 or more, such as 64GB or 1.5TB.")
    return round(size)


def seconds(text: str) -> float:
    """Read a time in seconds: `60s`, `2m`, `500ms`, `1h`, or a plain number of seconds."""
    text = text.strip()
    number = text.rstrip("hms")
    try:
        time_s = float(number) * _SECONDS[text[len(number) :] or "s"]
    except (ValueError, KeyError):
        time_s = math.nan
    if not 0 <= time_s < math.inf:
        raise click.BadParameter(f"{text!r} is not a time such as 60s, 2m, 500ms or 1h.")
    return time_s


def option(flag: str, text: str, kind: Any = None, default: Any = None, **more: Any) -> Option:
    """Declare an option.

    Args:
        flag: `--flag`, or `--flag METAVAR`; what the kinds here are called by themselves needs none.
        text: its help.
        kind: a click type, or a function that reads a text.
        default: shown in the help.
        more: of `click.option`, `name` for another name than the flag's, and `also` for a second flag.
    """
    flag, _, metavar = flag.partition(" ")
    if not metavar and isinstance(kind, click.IntRange):
        metavar = "PORT" if kind is PORT else "N"
    elif not metavar and isinstance(kind, click.Path):
        metavar = "FILE" if kind.dir_okay is False else "FOLDER" if kind.file_okay is False else "PATH"
    if default is not None:
        more["default"] = default
    names = [flag, *(more.pop(word) for word in ("also", "name") if word in more)]
    return click.option(*names, type=kind, show_default=True, metavar=metavar or None, help=text, **more)


def count(flag: str, text: str, low: int = 1, high: int | None = None, default: int | None = None) -> Option:
    """Declare an option for a whole number."""
    return option(flag, text, click.IntRange(low, high), default)


def duration(flag: str, text: str, **more: Any) -> Option:
    """Declare an option for a time; the command gets seconds."""
    return option(f"{flag} TIME", text, seconds, **more)


def gigabytes(flag: str, text: str, default: float | None = None, *, above_zero: bool = False) -> Option:
    """Declare an option for memory in 10^9 bytes."""
    return option(f"{flag} GB", text, FiniteRange(0, min_open=above_zero), default)


def choice(flag: str, values: Sequence[str], text: str, default: str | None = None) -> Option:
    """Declare an option for one of a few words; the first is the default if no other is named."""
    return option(flag, text, click.Choice(values), default or values[0])


def numbers(flag: str, text: str, low: float, high: float, default: str | None = None) -> Option:
    """Declare an option for numbers from `low` to `high` with commas between; the command gets a tuple of floats."""

    def listed(given: str) -> tuple[float, ...]:
        try:
            found = tuple(float(part) for part in given.split(",")) if given else ()
        except ValueError:
            found = (math.nan,)
        if not all(low <= one <= high for one in found):
            raise click.BadParameter(f"{given!r} is not numbers from {low:g} to {high:g} with commas between.")
        return found

    return option(flag, text, listed, default)


def assignments(flag: str, text: str) -> Option:
    """Declare a repeatable option for `NAME=VALUE`, both not empty; the command gets pairs."""
    metavar = flag.partition(" ")[2]

    def assignment(given: str) -> tuple[str, str]:
        name, _, value = given.partition("=")
        if not name or not value:
            raise click.BadParameter(f"{given!r} is not {metavar}.")
        return name, value

    return option(flag, f"{text} Repeatable.", assignment, multiple=True)


def switch(flag: str, text: str, **more: Any) -> Option:
    """Declare an option without a value."""
    return option(flag, text, is_flag=True, **more)


def json_flag(what: str) -> Option:
    """Declare `--json` as a flag: print JSON in place of tables."""
    return switch("--json", f"Print {what} as JSON.", name="as_json")


def removed_option(flag: str, instead: str) -> Option:
    """Declare an option of earlier releases, hidden, that raises UsageError if it is given."""

    def refuse(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
        if value is not None:
            raise click.UsageError(f"{param.opts[0]} is gone: {instead}", ctx)

    return option(flag, "", callback=refuse, expose_value=False, hidden=True)


def together(*options: Option) -> Option:
    """Join options into one decorator; the help lists them in this order."""
    return lambda function: functools.reduce(lambda done, one: one(done), reversed(options), function)


pruning_options = together(
    switch("--prune", "Leave out rows that nobody asked for, of the tables that have --counts."),
    option(
        "--keep-share X",
        "With --prune: keep the hottest rows that have this share of a table's lookups. Default: 1, all that were "
        "looked up.",
        PART,
    ),
)
ids_option = option(
    "--ids FILE",
    "A trace of raw ids, as `shardrank fit --trace` takes it: FEATURE=FILE.npy, or a .csv or .parquet file whose "
    "columns are features. It sizes tables with num_embeddings auto, and its lookups count as --counts do. Repeatable.",
    multiple=True,
)


def store_text(text: str) -> str | Path:
    """Read where a store or a snapshot is: the text of a URL, and the path of anything else, which is no file."""
    if "://" in text:
        return text
    if (path := Path(text)).is_file():
        raise click.BadParameter(f"{text!r} is a file; expected a folder, or a URL.")
    return path


STORE_FLAGS = ("store_cache", "store_cache_gb", "store_timeout_s")


def store_options(text: str, **more: Any) -> Option:
    """Declare `--store` for a folder or a URL, and what goes with a URL; the command gets `store`, a StorePlace."""

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(*args: Any, store: str | Path | None, **options: Any) -> Any:
            own = {name: options.pop(name) for name in STORE_FLAGS}
            return function(*args, store=None if store is None else store_of(store, **own), **options)

        return together(
            option("--store FOLDER|URL", text, store_text, **more),
            option(
                "--store-cache",
                "Of a store at a URL: the folder that versions are fetched into, which processes of a machine may "
                "share. Default: ~/.cache/shardrank/stores.",
                FOLDER,
                envvar="SHARDRANK_STORE_CACHE",
            ),
            option(
                "--store-cache-gb GB",
                "What that folder may hold, in 10^9 bytes; what was used longest ago goes. Default: 100.",
                ABOVE_ZERO,
                envvar="SHARDRANK_STORE_CACHE_GB",
            ),
            option(
                "--store-timeout-s S",
                "How long a store at a URL may take for one request, retries included. Default: 60.",
                FiniteRange(0, 3600, min_open=True),
            ),
        )(command)

    return declare


store_option = store_options(
    "What holds <model>/<version>/ snapshots: a folder, or s3://, gs:// or az://BUCKET/PREFIX."
)
out_store_option = option("--store", "Where the snapshot goes: FOLDER/<model>/<version>/.", FOLDER, required=True)
snapshot_options = together(
    store_option,
    option("--model NAME", "The model; without it, the store's only one."),
    count("--version", "The version; without it, the store's latest."),
    option("--snapshot", "The snapshot's own folder, in place of --store, --model and --version.", FOLDER),
)
registry_option = option(
    "--registry URL",
    "redis://…, rediss://… or redis+sentinel://HOST,HOST/MASTER (with ?fleet=NAME for one of several), or a folder. "
    "Use the variable SHARDRANK_REGISTRY if it has a password.",
    envvar="SHARDRANK_REGISTRY",
)


def fleet_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Declare `--registry` and `--store` of a fleet; the command gets the `url` of its registry."""

    @functools.wraps(function)
    def command(*args: Any, registry: str | None, store: Path | None, **rest: Any) -> Any:
        return function(*args, url=registry_url(registry, store), **rest)

    return registry_option(option("--store", "The fleet's store, if its registry lies in it.", FOLDER)(command))


_MEMBER_MODEL = "With --registry only this model, repeatable; default: all. Without, the model; default: the only one."
member_options = together(
    registry_option,
    store_option,
    option("--model NAME", _MEMBER_MODEL, multiple=True, name="models"),
    count("--version", "Without --registry: the version; default: the store's latest."),
    option(
        "--snapshot", "Without --registry: the snapshot's own folder, in place of --store, --model, --version.", FOLDER
    ),
)
follow_option = switch("--follow", "Show how far it is until it ends; exit code 1 unless it is done.")
hash_threads_option = count("--threads", "How many files are hashed at a time.", 1, 64, 2)


def cards_option(default: int) -> Option:
    """Declare `--cards`."""
    text = "Cards of each shard node: GPUs, or logical cards on one (see --device); on the CPU arenas of rows."
    return count("--cards", text, 1, 64, default)


sharding_option = choice(
    "--sharding",
    ["hash", "range", "table"],
    "What a shard owns: rows by hash, contiguous ranges of rows, or whole tables. hash needs tables exported with the "
    "bucketing mixed, range with range, except those that --replicate-bytes or a single shard leaves whole.",
)
network_options = together(
    option("--network-gb-per-s GB", "Of the router's line to the shards, one direction.",
           FiniteRange(0, min_open=True), DEFAULT_NETWORK_GB_PER_S),
    option("--network-us US", "A round trip between router and shard, unloaded.", FiniteRange(0, 1e6),
           DEFAULT_NETWORK_US),
    gigabytes("--hot-rows-gb", "Of the router's process, for the hottest rows, which it looks up itself.", 0.0),
    option("--hit-rate H", "Share of all lookups that such rows shall answer, in place of --hot-rows-gb.",
           FiniteRange(0, 1)),
    numbers("--compare-hit-rates H,...", "Print for each whether to replicate or to shard.", 0, 1, "0,0.5,0.85,0.99"),
    numbers("--compare-hot-rows N,...", "The same, for so many of the hottest rows at the router.", 0, 2**48),
)  # fmt: skip
plan_option = option(
    "--plan",
    "A plan file of `shardrank plan --out`, in place of --sharding. Default: the one in the snapshot, if it is for as "
    "many shards.",
    EXISTING_FILE,
    name="plan_file",
)
_REPLICATE = "Tables of at most this many bytes are held whole by every shard."
replicate_option = count("--replicate-bytes", _REPLICATE, 0, default=DEFAULT_REPLICATE_BYTES)
memory_budget_option = gigabytes(
    "--memory-budget-gb",
    "RAM for rows, in 10^9 bytes; the largest tables beyond it stay in the mapped files. Default: all in RAM. "
    "With GPUs, RAM for rows that no card has room for, if that is less than --pinned-memory-gb.",
)


def max_memory_option(whose: str, where: str = "") -> Option:
    """Declare `--max-memory-gb`."""
    return gigabytes(
        "--max-memory-gb",
        f"{whose}RAM for the rows of all versions together{where}, in 10^9 bytes. A version beyond it is refused "
        "before it is loaded. Default: what is available.",
    )


def name_options(metavar: str, advertised: str) -> Option:
    """Declare `--node-id` and `--advertise`."""
    name = "With --registry: the process' name, the same after a restart. Default: made of host, port and shard."
    where = f"With --registry: {advertised}."
    return together(
        option("--node-id NAME", name, envvar="SHARDRANK_NODE_ID"),
        option(f"--advertise {metavar}", where, envvar="SHARDRANK_ADVERTISE"),
    )


_STAGE_SHARE = "With --registry: share of one core for loading a version beside the live one."
stage_share_option = option("--stage-cpu-share SHARE", _STAGE_SHARE, FiniteRange(0.01, 1), 0.5)
verify_option = option(
    "--verify/--no-verify",
    "Compare every file's SHA-256 before serving; leave it out only for a local store that you trust.",
    default=True,
)
trust_exported_option = switch(
    "--trust-exported",
    "Run exported programs (dense.pt2). They are code and can do whatever this process can: only for a store to which "
    "nobody writes whom you do not trust. Without, a version that has one is refused.",
)
port_options = together(
    option("--host", "Address to listen on.", default="127.0.0.1"),
    option("--http-port", "HTTP port; 0 takes a free one.", PORT, 8080),
    option("--grpc-port", "gRPC port; 0 takes a free one.", PORT, 8081),
)
_ADMIN_PORT = (
    "A port for probes, /metrics and the status page at /, with a thread of its own, shared by all workers; 0 takes a "
    "free one."
)
front_options = together(
    option("--admin-port", _ADMIN_PORT, PORT),
    option("--trusted-proxy", "Ignored: addresses are not judged.", multiple=True, name="trusted_proxies", hidden=True),
)
_MOVIELENS = "Folder with the files of MovieLens 100K (u.data, u.item, u.user, u.genre)."
films_options = together(
    option("--movielens", _MOVIELENS, EXISTING_FOLDER),
    count("--ratings", "How many ratings to generate, without --movielens.", 1000, 10_000_000, 40_000),
    count("--epochs", "Passes over the data; default: the trainer's own.", 1, 1000),
    count("--seed", "Of the split, the training, and of what is generated.", 0, 2**32 - 1, 0),
)
_DENSE_DTYPE = (
    "Number format of the dense model; auto: the fastest that the device has (int8, bfloat16, float32) and golden "
    "scores allow."
)
_WIRE_DTYPE = (
    "Number format in which shard nodes send sums of rows; auto: float16 where golden scores allow it. Rows that need "
    "no adding travel as they are stored, and lose nothing."
)
ranking_options = together(
    option(
        "--ranking-replicas",
        "Ranking replicas of each serving process; each is a thread that scores one batch at a time. With rows on GPUs "
        "in this process they take turns over the cards. 0: the event loop scores between requests, the default where "
        "rows are in this process's RAM or on shard nodes. Else 1, or one for each GPU.",
        click.IntRange(0, 64),
    ),
    choice("--dtype", ["auto", "float32", "bfloat16", "int8"], _DENSE_DTYPE),
    choice("--wire-dtype", ["auto", "float32", "float16"], _WIRE_DTYPE),
    assignments(
        "--replica-policy NAME=VALUE",
        "When a shard's replicas are asked twice and when one is ejected, such as hedge_after_ms=50; docs/api.md lists "
        "what there is.",
    ),
    assignments("--limit NAME=VALUE", "A limit, such as max_candidates=500; docs/api.md lists them."),
    option("--limits", "Limits as a JSON or TOML file; --limit overrides it.", EXISTING_FILE, name="limits_file"),
)


_HOT_ROWS = (
    "What is held: learning, the rows looked up most of late; static, those that the snapshot's access counts name."
)
hot_rows_options = together(
    gigabytes(
        "--hot-rows-gb",
        "Copies of the hottest rows in each serving process, of rows on shard nodes: memory for one version's, index "
        "included, in 10^9 bytes. 0: none.",
        0.0,
    ),
    choice("--hot-rows", ["learning", "static"], _HOT_ROWS),
)


_RECORD = (
    "Record a share of the rank requests that are answered in this folder, with their scores: for `loadtest replay`, "
    "and to warm new versions with. Ids, weights and floats; no headers, tokens or keys."
)
_WARM = "Before a version is ready it ranks requests that were recorded in this folder."
record_options = together(
    option("--record", _RECORD, FOLDER),
    option("--record-share SHARE", "How many of them, above 0 and up to 1.", PART, 0.01),
    count("--record-max-mb", "Bytes of the folder at most, in 10^6; the oldest go first.", 1, 10_000_000, 256),
    option("--warm-from", f"{_WARM} Default: the folder of --record.", EXISTING_FOLDER),
    count("--warm-requests", "The last so many of them; 0: none.", 0, 100_000, 512),
)


def device_option(default: str) -> Option:
    """Declare `--device`."""
    return option(
        "--device DEVICE",
        "Where rows lie and are pooled: cpu; cuda (one GPU for each card); cuda:0 or cuda:0,1 (these, with several "
        "logical cards on each if there are more cards); or auto: GPUs if CuPy and one for each card are here.",
        default=default,
    )


device_options = together(
    device_option("auto"),
    gigabytes(
        "--card-memory-gb",
        "With GPUs: memory of each card for the rows of one version, in 10^9 bytes. Default: half of what is free at "
        "the start, so that two versions fit side by side.",
        above_zero=True,
    ),
    gigabytes(
        "--pinned-memory-gb",
        "With GPUs: host memory for rows that no card has room for, which cards read in place. A version "
        "with more rows is refused.",
        DEFAULT_PINNED_GB,
    ),
    gigabytes(
        "--hot-gb",
        "With GPUs: memory of each card for copies of the hottest rows, which every card has. Default: what is left "
        "when all rows are on cards, else a sixteenth.",
    ),
    choice(
        "--peer-access",
        ["auto", "required"],
        "With GPUs: required refuses to start unless every card reads the memory of every other. auto goes on without: "
        "then rows are on all cards, or in pinned host memory.",
    ),
)


def tls_options(client_ca_help: str) -> Option:
    """Declare `--tls-cert`, `--tls-key`, `--tls-client-ca`."""
    certificate = (
        "Speak TLS with this certificate (PEM, with those between it and its CA). Files of TLS are read again "
    )
    return together(
        option("--tls-cert", f"{certificate}when they change; open connections stay.", FILE),
        option("--tls-key", "Private key of --tls-cert, PEM, without a password.", FILE),
        option("--tls-client-ca", client_ca_help, FILE),
    )


_NODE_CA = "Speak TLS to shard nodes at TCP addresses, with certificates of these CAs. Default: --tls-client-ca."
_TOKENS = "Let in only who has one of these tokens; see `shardrank token new`. Probes need none. Read again on change."
tls_role_option = assignments(
    "--tls-role ROLE=URI",
    "On the wire, a URI in certificates (subjectAltName) that stands for the role router, node or operator, such as a "
    "SPIFFE id, beside shardrank:ROLE.",
)
node_tls_options = together(
    option("--node-ca", _NODE_CA, FILE),
    option("--node-cert", "Certificate to show to shard nodes. Default: --tls-cert, if TLS is spoken to them.", FILE),
    option("--node-key", "Private key of --node-cert. Default: --tls-key.", FILE),
    tls_role_option,
)
tokens_option = option("--tokens", _TOKENS, FILE)

_TRACES = (
    "Send traces of sampled requests to this OpenTelemetry collector, over OTLP; needs the extra otel. Default: what "
    "OTEL_EXPORTER_OTLP_ENDPOINT says, else nowhere. docs/traces.md."
)
trace_options = together(
    option("--trace-endpoint URL", _TRACES),
    option(
        "--trace-protocol",
        "OTLP over gRPC or HTTP. Default: what OTEL_EXPORTER_OTLP_PROTOCOL says, else grpc at port 4317, and http.",
        click.Choice(["grpc", "http"]),
    ),
)
serving_trace_options = together(
    trace_options,
    option(
        "--trace-sample-share SHARE",
        "Of requests whose `traceparent` does not say whether they are sampled, the share that is. Default: 0.01.",
        FiniteRange(0, 1),
    ),
)
