"""Commands of processes: their flags are the fields of a model, which variables and the file of `--config` set, too."""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from pydantic import ValidationError

from serving.cli import LOGGED, WithExamples
from serving.cli.options import FILE, option, settings_options, switch, together
from serving.fleet.config import KNOWN_VARIABLES
from serving.observe.logs import start_logging
from serving.settings import Settings, assignments, plain_type

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20
_PREFIX = "SHARDRANK_"
_OTHERS = frozenset({"SHARDRANK_TOKEN", "SHARDRANK_WORKER", "SHARDRANK_FORK_SERVER"})
"""Variables of which something else reads the value."""
_KUBERNETES = ("tcp://", "udp://", "sctp://")
"""How SHARDRANK_GRPC_PORT begins where Kubernetes makes it of a service's name."""


def configured(name: str, schema: type[Settings]) -> Callable[[Callable[..., Any]], click.Command]:
    """Declare a command whose function gets the `config` that its flags, its variables and its file make."""
    named = [name for name in schema.names() if name not in LOGGED and not schema.is_file_only(name)]
    options = together(
        settings_options(schema, *named),
        option("--config", "Settings as TOML, by name; variables and flags override it.", FILE),
        switch("--print-config", "Print the settings as TOML, without passwords, and exit."),
    )
    return lambda function: click.command(name, cls=ConfiguredCommand, schema=schema)(options(function))


GROUPS = {
    "Memory": "hot_rows_gb pinned_memory_gb replicate_bytes store_cache store_cache_gb",
    "Cards": "cards device",
    "Network and TLS": "host http_port grpc_port admin_port admin_listen advertise tokens tls_cert tls_key "
    "tls_client_ca node_ca node_cert node_key limits",
    "Observing": "log_level log_format log_dir access_log trace_endpoint record record_share",
}
"""What of a process' options is under which heading of its help; all others come first."""


class ConfiguredCommand(WithExamples):
    """A command that is called with the `config` that its flags, its variables and its file make."""

    def __init__(self, name: str | None, *, schema: type[Settings], **more: Any) -> None:
        super().__init__(name, **more)
        self.schema = schema

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under the headings of GROUPS."""
        heading = {name: title for title, names in GROUPS.items() for name in names.split()}
        params = self.get_params(ctx)
        for title in ("Basics", *GROUPS):
            shown = [param.get_help_record(ctx) for param in params if heading.get(str(param.name), "Basics") == title]
            if records := [record for record in shown if record is not None]:
                with formatter.section(title):
                    formatter.write_dl(records)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Leave `config` as the only parameter, or print it and exit. Raises UsageError, StoreError."""
        left = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            self.log(ctx)
            config = read_config(ctx, self.schema)
            ctx.meta.update({name: getattr(config, name) for name in LOGGED})
            if ctx.params["print_config"]:
                click.echo(config.to_toml(masked=True), nl=False)
                ctx.exit()
            ctx.params = {"config": config}
        return left


def read_config(ctx: click.Context, schema: type[Settings]) -> Settings:
    """Return the settings of a command: each by its flag, else its variable, else the file, else its default.

    Settings by name, such as limits, are merged name by name. Raises UsageError naming what is unknown or out of range,
    and where it is from.
    """
    path: Path | None = ctx.params["config"]
    is_given = ctx.get_parameter_source
    file = {} if path is None else read_file(path, schema)
    if file.get("log_format") == "json" and "log_format" not in ctx.meta:
        # Of what variables are warned of, too.
        start_logging("warning", "json")
    options = ctx.params.keys() & schema.model_fields
    logged = {name: ctx.meta[name] for name in LOGGED if name in ctx.meta}
    flags = {name: ctx.params[name] for name in options if is_given(name) is ParameterSource.COMMANDLINE}
    sources = {f"--config {path}: ": file, _PREFIX: read_variables(schema, os.environ), "": logged | flags}
    origin = {name: source for source, values in sources.items() for name in values}
    merged: dict[str, Any] = {}
    for source, values in sources.items():
        for name, value in values.items():
            try:
                by_name = assignments(value) if plain_type(schema.model_fields[name]) is dict else None
            except ValueError as error:
                raise click.UsageError(f"{_label(schema, name, source)}: {error}", ctx) from error
            merged[name] = merged.get(name, {}) | by_name if isinstance(by_name, dict) else value
    # A supervisor has checked what it writes into a file for its children.
    is_supervised = (ctx.find_root().obj or {}).get("is_supervised", False)
    given = {name for name in merged if origin[name] != _PREFIX and not (is_supervised and origin[name])}
    try:
        return schema.model_validate(merged, context={"given": given})
    except ValidationError as error:
        raise click.UsageError("; ".join(_problems(schema, error, origin)), ctx) from error


def _label(schema: type[Settings], name: str, source: str) -> str:
    """Return how a person finds a setting: its flag, its variable, or its key in a file."""
    if source == _PREFIX:
        return f"{_PREFIX}{name.upper()}"
    return f"{source}{name}" if source or schema.is_file_only(name) else schema.flag(name)


def _problems(schema: type[Settings], error: ValidationError, origin: Mapping[str, str]) -> Iterator[str]:
    for item in error.errors(include_url=False, include_input=False):
        name, *inner = item["loc"] or ("",)
        problem = item["msg"].removeprefix("Value error, ")
        if item["type"] == "missing":
            yield f"Missing option {schema.flag(str(name))!r}, or {name} in the file of --config"
        elif name:
            source = ".".join((_label(schema, str(name), origin.get(str(name), "")), *map(str, inner)))
            yield f"{source}: {problem}"
        else:
            yield problem


def read_file(path: Path, schema: type[Settings]) -> dict[str, Any]:
    """Return the settings of a file. Raises UsageError for a file that is not TOML, and for keys that are none."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise click.UsageError(f"--config {path}: more than {MAX_FILE_BYTES} bytes")
        values = tomllib.loads(text.decode())
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--config {path}: {error}") from error
    allowed = schema.names()
    if unknown := [name for name in values if name not in allowed]:
        raise click.UsageError(f"--config {path}: unknown key {', '.join(map(repr, unknown))}; allowed are {allowed}")
    return values


def read_variables(schema: type[Settings], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that variables have, and warn of those that are none."""
    values: dict[str, Any] = {}
    ignored = []
    for variable, text in environment.items():
        if not variable.startswith(_PREFIX) or not text:
            continue
        name = variable.removeprefix(_PREFIX).lower()
        is_service = variable.endswith("_PORT") and text.startswith(_KUBERNETES)
        if is_service or variable not in KNOWN_VARIABLES | _OTHERS:
            ignored.append(variable)
        elif name in schema.names():
            values[name] = text.split() if plain_type(schema.model_fields[name]) in (tuple, dict) else text
    if ignored:
        logger.warning("ignored, no setting: %s", ", ".join(sorted(ignored)))
    return values
