"""Documents that `--json` of a load test writes, and how their values are printed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import psutil
from pydantic import BaseModel, Field
from rich.console import Console

from loader.errors import ConfigError
from loader.snapshot.tables import Frozen
from serving.cli.output import table_of

LIBRARIES = ("shardrank", "uvloop", "httptools", "grpcio")
MAX_COLUMNS = 12
"""Of a printed table; the file has all."""
SINGLE = (int, float, str, type(None))
DocumentTable: TypeAlias = tuple[str, Sequence[str], Sequence[Sequence[Any]]]
"""Title, names of columns, if they have any, and rows."""


class Machine(Frozen):
    """Where it ran: host name, model of its processors, cores that the process may use, RAM, and kernel."""

    name: str
    cpu: str
    cores: int = Field(ge=0)
    memory_bytes: int = Field(ge=0)
    system: str


def this_machine() -> Machine:
    """Describe the machine that this process runs on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return Machine(
        name=platform.node() or "unnamed",
        cpu=next(names, platform.processor() or platform.machine()),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()}",
    )


def versions() -> dict[str, str]:
    """List the versions of Python and of the libraries that the generator sends with."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in LIBRARIES}}


def write_document(document: BaseModel, file: Path) -> None:
    """Write a document as JSON. Raises as `write_text`."""
    write_text(document.model_dump_json(indent=1) + "\n", file)


def write_text(text: str, file: Path) -> None:
    """Write a file. Raises ConfigError if it can't be written."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error


def line(console: Console, text: str) -> None:
    """Print a line as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def significant(value: float) -> str:
    """Write at least three significant digits, and all of those before the point: 0.482, 12.3, 1,234."""
    return f"{value:,.0f}" if value == 0 or abs(value) >= 99.95 else f"{value:#.3g}"


def ratio_text(value: float) -> str:
    """Write one thing to another: three significant digits, at least two decimals."""
    return f"{value:.2f}" if value >= 0.995 else significant(value)


def tables_of(document: Mapping[str, Any], title: str = "") -> Iterator[DocumentTable]:
    """Lay a document out: its values by name, then the lists, records and documents in it."""
    nested = {name: value for name, value in document.items() if isinstance(value, dict | list | tuple)}
    yield title, (), [(name, value) for name, value in document.items() if name not in nested]
    for name, value in nested.items():
        records = list(value.values()) if isinstance(value, dict) else value
        if records and all(isinstance(record, dict) for record in records):
            keys = [[key] for key in value] if isinstance(value, dict) else [[]] * len(records)
            rows = [[*key, *record.values()] for key, record in zip(keys, records, strict=True)]
            yield name, [*([""] if keys[0] else []), *records[0]], rows
        elif isinstance(value, dict):
            yield from tables_of(value, name)
        elif value:
            yield name, (), [[each] for each in value]


def value_text(value: Any) -> str:
    """Write a value of a document: floats to three significant digits."""
    if isinstance(value, float):
        return significant(value)
    return "–" if value is None else f"{value:,}" if type(value) is int else str(value)


def show_document(console: Console, document: Mapping[str, Any]) -> None:
    """Print a document's tables, up to `MAX_COLUMNS` columns of each; lists of numbers are left out."""
    for title, head, rows in tables_of(document):
        columns = [at for at, value in enumerate(rows[0]) if isinstance(value, SINGLE)][:MAX_COLUMNS] if rows else []
        if columns and (head or len(rows[0]) == 2 or isinstance(rows[0][0], str)):
            names = [head[at].replace("_", "\n") if head else "" for at in columns]
            table = table_of("", names, [[value_text(row[at]) for at in columns] for row in rows])
            table.show_header = bool(head)
            if title:
                line(console, title)
            console.print(table)
