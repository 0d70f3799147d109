"""Options that several commands share, so that one flag means one thing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import click

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

DEFAULT_REPLICATE_BYTES = 1 << 20
"""The router's default, repeated because importing the router would make `--help` slow; a test compares them."""


Sharding: TypeAlias = Literal["hash", "range", "table"]
SHARDINGS: tuple[Sharding, ...] = ("hash", "range", "table")


class FiniteRange(click.FloatRange):
    """A number within bounds, which neither `nan` nor `inf` is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; fails if it is not finite or not within the bounds."""
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
        """(I, N); fails unless 0 <= I < N."""
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
        """(NAME, VALUE); fails if either is empty."""
        if isinstance(value, tuple):
            return value
        name, _, text = value.partition("=")
        if not name or not text:
            self.fail(f"{value!r} is not {self.name}.", param, ctx)
        return name, text


def snapshot_options(function: Decorated) -> Decorated:
    """`--store`, `--model`, `--version`, or `--snapshot` in their place."""
    function = click.option(
        "--snapshot",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="FOLDER",
        help="The snapshot's own folder, in place of --store, --model and --version.",
    )(function)
    function = click.option(
        "--version", type=click.IntRange(min=1), metavar="N", help="The version; without it, the store's latest."
    )(function)
    function = click.option("--model", metavar="NAME", help="The model; without it, the store's only one.")(function)
    return click.option(
        "--store",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="FOLDER",
        help="The folder that holds <model>/<version>/ snapshots.",
    )(function)


def cards_option(default: int) -> Callable[[Decorated], Decorated]:
    """`--cards`."""
    return click.option(
        "--cards",
        type=click.IntRange(1, 64),
        default=default,
        show_default=True,
        metavar="N",
        help="Cards of each shard node: GPUs, or logical cards on one (see --device); on the CPU arenas of rows.",
    )


def sharding_option(function: Decorated) -> Decorated:
    """`--sharding`."""
    return click.option(
        "--sharding",
        type=click.Choice(SHARDINGS),
        default="hash",
        show_default=True,
        help="What a shard owns: rows by hash, contiguous ranges of rows, or whole tables. hash and range need tables "
        "exported with that bucketing, but for those that --replicate-bytes or a single shard leaves whole.",
    )(function)


def port_options(http_port: int, grpc_port: int) -> Callable[[Decorated], Decorated]:
    """`--host`, `--http-port`, `--grpc-port`."""

    def decorate(function: Decorated) -> Decorated:
        function = click.option(
            "--grpc-port",
            type=click.IntRange(0, 65535),
            default=grpc_port,
            show_default=True,
            metavar="PORT",
            help="gRPC port; 0 takes a free one.",
        )(function)
        function = click.option(
            "--http-port",
            type=click.IntRange(0, 65535),
            default=http_port,
            show_default=True,
            metavar="PORT",
            help="HTTP port; 0 takes a free one.",
        )(function)
        return click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")(function)

    return decorate


def front_options(function: Decorated) -> Decorated:
    """`--admin-port`, `--trusted-proxy`: what a serving process does for operators, and whom it takes for many."""
    function = click.option(
        "--trusted-proxy",
        "trusted_proxies",
        multiple=True,
        metavar="ADDRESS[/BITS]",
        help="A balancer or proxy that stands for many clients: its connections are not counted, and it never has to "
        "wait. Repeatable.",
    )(function)
    return click.option(
        "--admin-port",
        type=click.IntRange(0, 65535),
        metavar="PORT",
        help="A port for probes and /metrics alone, which a thread of its own answers however busy the others are; "
        "0 takes a free one. Serving processes that share their ports share it too.",
    )(function)


def json_flag(what: str) -> Callable[[Decorated], Decorated]:
    """`--json` as a flag: print JSON in place of tables."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print {what} as JSON.")


def replicate_option(function: Decorated) -> Decorated:
    """`--replicate-bytes`."""
    return click.option(
        "--replicate-bytes",
        type=click.IntRange(min=0),
        default=DEFAULT_REPLICATE_BYTES,
        show_default=True,
        metavar="N",
        help="Tables of at most this many bytes are held whole by every shard.",
    )(function)


def memory_budget_option(function: Decorated) -> Decorated:
    """`--memory-budget-gb`."""
    return click.option(
        "--memory-budget-gb",
        type=FiniteRange(min=0),
        metavar="GB",
        help="RAM for rows, in 10^9 bytes; the largest tables beyond it stay in the mapped files. Default: all in RAM. "
        "With GPUs, RAM for rows that no card has room for, if that is less than --pinned-memory-gb.",
    )(function)


def verify_option(function: Decorated) -> Decorated:
    """`--verify/--no-verify`."""
    return click.option(
        "--verify/--no-verify",
        default=True,
        show_default=True,
        help="Compare every file's SHA-256 before serving; leave it out only for a local store that you trust.",
    )(function)


def films_options(function: Decorated) -> Decorated:
    """`--movielens`, `--ratings`, `--epochs`, `--seed`: what the demo's trainer learns from."""
    function = click.option(
        "--seed",
        type=click.IntRange(0, 2**32 - 1),
        default=0,
        show_default=True,
        metavar="N",
        help="Of the split, the training, and of what is generated.",
    )(function)
    function = click.option(
        "--epochs", type=click.IntRange(1, 1000), metavar="N", help="Passes over the data; default: the trainer's own."
    )(function)
    function = click.option(
        "--ratings",
        type=click.IntRange(1000, 10_000_000),
        default=40_000,
        show_default=True,
        metavar="N",
        help="How many ratings to generate, without --movielens.",
    )(function)
    return click.option(
        "--movielens",
        type=click.Path(path_type=Path, file_okay=False, exists=True),
        metavar="FOLDER",
        help="Folder with the files of MovieLens 100K (u.data, u.item, u.user, u.genre).",
    )(function)


def ranking_options(function: Decorated) -> Decorated:
    """`--ranking-replicas`, `--dtype`, `--limit`, `--limits`: how a serving process ranks."""
    function = click.option(
        "--limits",
        "limits_file",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        metavar="FILE",
        help="Limits as a JSON or TOML file; --limit overrides it.",
    )(function)
    function = click.option(
        "--limit",
        type=Assignment("NAME=VALUE"),
        multiple=True,
        metavar="NAME=VALUE",
        help="A limit, such as max_candidates=500; docs/api.md lists them. Repeatable.",
    )(function)
    function = click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16"]),
        default="auto",
        show_default=True,
        help="Number format of the dense model; auto is bfloat16 where the device has it and golden scores allow it.",
    )(function)
    return click.option(
        "--ranking-replicas",
        type=click.IntRange(0, 64),
        metavar="N",
        help="Ranking replicas of each serving process; each is a thread that scores one batch at a time. With rows on "
        "GPUs in this process they take turns over the cards. 0: no thread, the event loop scores between requests; "
        "only with all rows in this process's RAM, and the default there. Else 1, or one for each GPU.",
    )(function)


def registry_option(function: Decorated) -> Decorated:
    """`--registry`; the variable keeps a password out of the list of processes."""
    return click.option(
        "--registry",
        metavar="URL",
        envvar="SHARDRANK_REGISTRY",
        help="redis://… or rediss://… (with ?fleet=NAME for one of several), or a folder. "
        "Better given as the variable SHARDRANK_REGISTRY if it has a password.",
    )(function)


def fleet_options(function: Decorated) -> Decorated:
    """`--registry`, or `--store` for the registry that lies in it."""
    function = click.option(
        "--store",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="FOLDER",
        help="The fleet's store, if its registry lies in it.",
    )(function)
    return registry_option(function)


def member_options(function: Decorated) -> Decorated:
    """`--registry`, `--store`, `--model` (several), `--version`, `--snapshot`: what it serves."""
    function = click.option(
        "--snapshot",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="FOLDER",
        help="Without --registry: the snapshot's own folder, in place of --store, --model and --version.",
    )(function)
    function = click.option(
        "--version",
        type=click.IntRange(min=1),
        metavar="N",
        help="Without --registry: the version; by default the store's latest.",
    )(function)
    function = click.option(
        "--model",
        "models",
        multiple=True,
        metavar="NAME",
        help="With --registry only this model, repeatable; by default all. Without, the model; default: the only one.",
    )(function)
    function = click.option(
        "--store",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="FOLDER",
        help="The folder that holds <model>/<version>/ snapshots.",
    )(function)
    return registry_option(function)
