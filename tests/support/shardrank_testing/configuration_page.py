"""The page docs/configuration.md, made of the models of settings: `python -m shardrank_testing.configuration_page`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_origin

from serving.fleet.config import PROCESSES
from serving.settings import Settings, plain_type

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"
COMMANDS = dict(zip(("serve", "shard-node", "coordinator", "up"), PROCESSES, strict=True))
SIGNS = {"gt": "above", "ge": "from", "le": "to"}


def values_of(schema: type[Settings], name: str) -> str:
    """Return which values a setting may have, and its default: `hash, range or table; hash`."""
    field = schema.model_fields[name]
    kind = plain_type(field)
    rules = [
        f"{word} {getattr(rule, sign)}"
        for sign, word in SIGNS.items()
        for rule in field.metadata
        if hasattr(rule, sign)
    ]
    allowed = ", ".join(map(str, get_args(kind))) if get_origin(kind) else " ".join(rules)
    default: Any = "required" if field.is_required() else field.default
    shown = "" if default in (None, (), {}) else default if default == "required" else json.dumps(default)
    return "; ".join(part for part in (allowed, f"`{shown}`" if shown else "") if part)


def row_of(schema: type[Settings], name: str) -> str:
    """Return the row of a setting: its key, its flag, its values and its help."""
    flag = "" if schema.is_file_only(name) else f"`{schema.flag(name)}`"
    help_text = schema.help(name).replace("|", "\\|")
    return f"| `{name}` | {flag} | {values_of(schema, name)} | {help_text} |"


def page_of(text: str) -> str:
    """Return a page with the tables of this release below its own text."""
    parts = [text.partition("\n## `")[0].rstrip()]
    for command, schema in COMMANDS.items():
        rows = [row_of(schema, name) for name in schema.names()]
        parts.append(
            "\n".join((f"## `{command}`", "", "| key | flag | values; default | |", "|---|---|---|---|", *rows))
        )
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page_of(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
