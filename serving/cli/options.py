"""Options that several commands share, so that one flag means one thing. Imports nothing heavy."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, get_origin

import click
from click.core import ParameterSource

from serving.cli.settings import config_of, registry_url
from serving.config import StoreSettings
from serving.settings import Settings, plain_type, seconds, store_or_path
from serving.settings import assignments as read_assignments

Option: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

DEFAULT_NETWORK_GB_PER_S = 12.5
DEFAULT_NETWORK_US = 20.0
"""100 Gb/s Ethernet, and a round trip through a switch and two kernels: assumed."""


class FiniteRange(click.FloatRange):
    """A number within bounds, which neither `nan` nor `inf` is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number; fail if it is not finite or not within the bounds."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class WritableFile(click.Path):
    """A file to write at the end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return its path; fail at once if it can't be written."""
        path = Path(str(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"{path}: there is no folder {str(path.parent)!r}", param, ctx)
        if not (path.exists() or os.access(path.parent, os.W_OK)):
            self.fail(f"{path}: the folder {str(path.parent)!r} can't be written", param, ctx)
        return path


FOLDER = click.Path(path_type=Path, file_okay=False)
FILE = click.Path(path_type=Path, dir_okay=False)
EXISTING_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
ABOVE_ZERO = FiniteRange(0, min_open=True)
PART = FiniteRange(0, 1, min_open=True)
WRITABLE_FILE = WritableFile(path_type=Path, dir_okay=False, writable=True)
EXISTING = click.Path(path_type=Path, exists=True)
EXISTING_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
PORT = click.IntRange(0, 65535)


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
    """Read a number of bytes, 1 or more: `64GB`, `1.5 tb`, `300KB`, `2GiB`, `4096`; without an i powers of 1000."""
    found = re.fullmatch(r"([\d.e+]+) *(?:([KMGT])(I?))?B?", text.strip(), re.IGNORECASE | re.ASCII)
    try:
        number, unit, binary = found.groups() if found else ("", None, None)
        size = float(number) * float(1024 if binary else 1000) ** (1 + "KMGT".index(unit.upper()) if unit else 0)
    except ValueError:
        size = math.nan
    if not 1 <= size < 2**63:
        raise click.BadParameter(f"{text!r} is not a number of bytes, 1 or more, such as 64GB or 1.5TB.")
    return round(size)


def option(flag: str, text: str, kind: Any = None, default: Any = None, **more: Any) -> Option:
    """Declare an option.

    Args:
        flag: `--flag`, or `--flag METAVAR`; what the kinds here are called by themselves needs none.
        text: its help.
        kind: a click type, or a function that reads a text.
        default: shown in the help.
        more: of `click.option`, and `name` for another name than the flag's.
    """
    flag, _, metavar = flag.partition(" ")
    if not metavar and isinstance(kind, click.IntRange):
        metavar = "PORT" if kind is PORT else "N"
    elif not metavar and isinstance(kind, click.Path):
        metavar = "FILE" if kind.dir_okay is False else "FOLDER" if kind.file_okay is False else "PATH"
    if default is not None:
        more["default"] = default
    names = [flag, more.pop("name")] if "name" in more else [flag]
    return click.option(*names, type=kind, show_default=True, metavar=metavar or None, help=text, **more)


def count(flag: str, text: str, low: int = 1, high: int | None = None, default: int | None = None) -> Option:
    """Declare an option for a whole number."""
    return option(flag, text, click.IntRange(low, high), default)


def _reader(read: Callable[[Any], Any]) -> Callable[[str], Any]:
    """Return a function that reads an option's text, and whose ValueError is a usage error."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise click.BadParameter(f"{error}.") from None

    return convert


def duration(flag: str, text: str, **more: Any) -> Option:
    """Declare an option for a time; the command gets seconds."""
    return option(f"{flag} TIME", text, _reader(seconds), **more)


def gigabytes(flag: str, text: str, default: float | None = None, *, above_zero: bool = False) -> Option:
    """Declare an option for memory in 10^9 bytes."""
    return option(f"{flag} GB", text, FiniteRange(0, min_open=above_zero), default)


def choice(flag: str, values: Sequence[str], text: str) -> Option:
    """Declare an option for one of a few words; the first is the default."""
    return option(flag, text, click.Choice(values), values[0])


def numbers(flag: str, text: str, low: int, high: int, default: str | None = None) -> Option:
    """Declare an option for whole numbers from `low` to `high` with commas between; the command gets a tuple."""

    def listed(given: str) -> tuple[int, ...]:
        try:
            found = tuple(int(part) for part in given.split(",")) if given else ()
        except ValueError:
            found = (low - 1,)
        if not all(low <= each <= high for each in found):
            raise click.BadParameter(f"{given!r} is not whole numbers from {low} to {high} with commas between.")
        return found

    return option(flag, text, listed, default)


def assignments(flag: str, text: str, kind: Callable[[str], Any] = str) -> Option:
    """Declare a repeatable option for `NAME=VALUE`, both not empty; the command gets a dict, values as `kind` reads."""

    def read(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
        try:
            return {name: kind(value) for name, value in read_assignments(given).items()}
        except ValueError:
            raise click.BadParameter(f"{' '.join(given)!r} is not {param.metavar}.") from None

    return option(flag, f"{text} Repeatable.", multiple=True, callback=read)


def switch(flag: str, text: str, **more: Any) -> Option:
    """Declare an option without a value."""
    return option(flag, text, is_flag=True, **more)


def json_flag(what: str) -> Option:
    """Declare `--json` as a flag: print JSON in place of tables."""
    return switch("--json", f"Print {what} as JSON.", name="as_json")


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

out_store_option = option("--store", "Where the snapshot goes: FOLDER/<model>/<version>/.", FOLDER, required=True)

store_text = _reader(store_or_path)
"""Reads where a store or a snapshot is: the text of a URL, and the path of anything else, which is no file."""


def setting_option(schema: type[Settings], name: str, **more: Any) -> Option:
    """Declare the option of a setting: help, type, bounds and default are the field's; `more` of `click.option`."""
    field, metavar = schema.model_fields[name], schema.metavar(name)
    kind, flag, text = plain_type(field), schema.flag(name), str(more.pop("help", schema.help(name)))
    bounds = {end: getattr(rule, end) for rule in field.metadata for end in ("ge", "gt", "le") if hasattr(rule, end)}
    default = more.pop("default", None if field.is_required() else field.default)
    value_type: Any = None
    if kind in (tuple, dict):
        default, text, more["multiple"] = None, f"{text} Repeatable.", True
    elif kind is bool:
        flag, more["is_flag"] = f"{flag}/--no-{flag[2:]}" if default else flag, True
    elif get_origin(kind) is Literal:
        value_type = click.Choice(get_args(kind))
    elif kind in (int, float) and metavar != "TIME":
        number, metavar = (click.IntRange, metavar) if kind is int else (FiniteRange, metavar or "X")
        value_type = number(bounds.get("gt", bounds.get("ge")), bounds.get("le"), min_open="gt" in bounds)
    elif kind is Path:
        value_type = FOLDER if metavar == "FOLDER" else FILE
    else:
        value_type = str
    return option(f"{flag} {metavar}", text, value_type, default, name=name, **more)


def settings_options(schema: type[Settings], *names: str) -> Option:
    """Declare the options of settings."""
    return together(*(setting_option(schema, name) for name in names))


_STORE = ("store", "store_cache", "store_cache_gb", "store_timeout_s")


def store_options(text: str, **more: Any) -> Option:
    """Declare `--store` for a folder or a URL, and what goes with a URL; the command gets `store`, a StorePlace."""

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(*args: Any, **options: Any) -> Any:
            values = {name: options.pop(name) for name in _STORE}
            source = click.get_current_context().get_parameter_source
            given = {name for name in _STORE if source(name) is ParameterSource.COMMANDLINE}
            return function(*args, store=config_of(StoreSettings, values, "", given).store_place, **options)

        cache = (setting_option(StoreSettings, name, envvar=f"SHARDRANK_{name.upper()}") for name in _STORE[1:])
        return together(setting_option(StoreSettings, "store", help=text, **more), *cache)(command)

    return declare


snapshot_options = together(
    store_options(StoreSettings.help("store")),
    option("--model NAME", "The model; without it, the store's only one."),
    count("--version", "The version; without it, the store's latest."),
    option("--snapshot", "The snapshot's own folder, in place of --store, --model and --version.", FOLDER),
)
registry_option = setting_option(StoreSettings, "registry", envvar="SHARDRANK_REGISTRY")


def fleet_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Declare `--registry` and `--store` of a fleet; the command gets the `url` of its registry."""

    @functools.wraps(function)
    def command(*args: Any, registry: str | None, store: Path | None, **remaining: Any) -> Any:
        return function(*args, url=registry_url(registry, store), **remaining)

    return registry_option(option("--store", "The fleet's store, if its registry lies in it.", FOLDER)(command))


follow_option = switch("--follow", "Show how far it is until it ends; exit code 1 unless it is done.")
network_options = together(
    option("--network-gb-per-s GB", "Of the router's line to the shards, one direction.",
           FiniteRange(0, min_open=True), DEFAULT_NETWORK_GB_PER_S),
    option("--shard-gb-per-s GB", "Of each shard's line. Default: it never binds.", FiniteRange(0, min_open=True)),
    option("--sums", "Format of sums that shards send.", click.Choice(("float32", "float16", "int8")), "float16"),
    option("--network-us US", "A round trip between router and shard, unloaded.", FiniteRange(0, 1e6),
           DEFAULT_NETWORK_US),
    gigabytes("--hot-rows-gb", "Of the router's process, for the hottest rows, which it looks up itself.", 0.0),
    count("--hot-rows", "How many such rows, in place of --hot-rows-gb.", 0),
    option("--hit-rate H", "Share of all lookups that such rows shall answer, in place of both.",
           FiniteRange(0, 1)),
)  # fmt: skip


def _ratings(given: str | int) -> int | Path:
    """Read how many ratings to generate, or the name of a file that has some."""
    text = str(given)
    if not text.isdecimal():
        if not Path(text).is_file():
            raise click.BadParameter(f"{text!r} is neither a number nor a file.")
        return Path(text)
    number: int = click.IntRange(1000, 10_000_000)(text)
    return number


films_options = together(
    option("--movielens", "Folder of MovieLens 100K's u.data, u.item, u.user, u.genre.", EXISTING_FOLDER),
    option(
        "--ratings N|FILE",
        "How many ratings to generate, without --movielens; with --online also a CSV file with "
        "userId,movieId,rating,timestamp.",
        _ratings,
        40_000,
    ),
    count("--epochs", "Passes over the data; default: the trainer's own.", 1, 1000),
    count("--seed", "Of the split, the training, and of what is generated.", 0, 2**32 - 1, 0),
)
