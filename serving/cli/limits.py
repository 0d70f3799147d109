"""`--limit NAME=VALUE` and `--limits FILE`: the limits of a serving process."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from serving.limits import RequestLimits

MAX_FILE_BYTES = 1 << 20


def read_limits(path: Path | None, assignments: Sequence[tuple[str, str]]) -> RequestLimits:
    """The limits of a file (JSON, or TOML by its name), overridden by assignments.

    Raises:
        click.UsageError: naming the limit that is unknown or out of range, or what is wrong with the file.
    """
    from pydantic import ValidationError

    from loader.manifest import schema_errors
    from serving.limits import RequestLimits

    values = {} if path is None else _read(path)
    values |= dict(assignments)
    try:
        # From JSON text numbers may be strings, as they are on a command line.
        return RequestLimits.model_validate(values)
    except ValidationError as error:
        reasons = "; ".join(map(str, schema_errors(error, [RequestLimits])))
        raise click.UsageError(f"limits: {reasons}") from error


def limit_arguments(path: Path | None, assignments: Sequence[tuple[str, str]]) -> list[str]:
    """The flags that give a child process the same limits. Raises as `read_limits`, before any child is started."""
    limits = read_limits(path, assignments)
    changed = {name: getattr(limits, name) for name in type(limits).model_fields if name in limits.model_fields_set}
    texts = {name: ",".join(value) if isinstance(value, tuple) else str(value) for name, value in changed.items()}
    return [argument for name, text in texts.items() for argument in ("--limit", f"{name}={text}")]


def with_proxies(options: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """The `--limit` of a command, and what its `--trusted-proxy` say."""
    proxies = ",".join(options["trusted_proxies"])
    return (*options["limit"], ("trusted_proxies", proxies)) if proxies else options["limit"]


def _read(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise click.UsageError(f"{path}: more than {MAX_FILE_BYTES} bytes")
    text = path.read_text(encoding="utf-8")
    try:
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise click.UsageError(f"{path}: expected an object of limits by name")
    return values
