"""Documents that `--json` of a load test writes, and how their values are printed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel, Field
from rich import box
from rich.console import Console
from rich.table import Table

from loader.snapshot.tables import Frozen
from loadtest.errors import ResultFileError
from serving.cli.output import human_bytes

LIBRARIES = ("shardrank", "uvloop", "httptools", "grpcio")
MAX_COLUMNS = 12
"""Of a printed table; the file has all."""
SINGLE = (int, float, str, type(None))
"""Types of values that are no records."""


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


def check_writable(*files: Path | None) -> None:
    """Raise ResultFileError if a file can't be written. An older one stays until there is a new one."""
    for file in files:
        if file is not None:
            try:
                file.open("a").close()
            except OSError as error:
                raise ResultFileError(f"{file}: {error.strerror or error}") from error


def write_document(document: BaseModel, file: Path) -> None:
    """Write a document as JSON. Raises ResultFileError if the file can't be written."""
    try:
        file.write_text(document.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ResultFileError(f"{file}: {error.strerror or error}") from error


def make_table(words: Iterable[str], numbers: Iterable[str], *, title: str | None = None) -> Table:
    """Make a table without rows: columns of words, then those of numbers. Without a title it has no lines between."""
    table = Table(title=title) if title else Table(box=box.SIMPLE)
    for name in words:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=not title)
    table.show_header = any(column.header for column in table.columns)
    return table


def line(console: Console, text: str) -> None:
    """Print a line as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def significant(value: float) -> str:
    """Write at least three significant digits, and all of those before the point: 0.482, 12.3, 1,234."""
    return f"{value:,.0f}" if value == 0 or abs(value) >= 99.95 else f"{value:#.3g}"


def ratio_text(value: float) -> str:
    """Write one thing to another: three significant digits, at least two decimals."""
    return f"{value:.2f}" if value >= 0.995 else significant(value)


def show_document(console: Console, document: Mapping[str, Any]) -> None:
    """Print the records in a document as tables, then its other values by name; lists of numbers are left out."""
    singles, texts = make_table(("", ""), ()), list[str]()
    for name, value in document.items():
        values = (
            value if isinstance(value, dict) else {"": value} if isinstance(value, SINGLE) else dict(enumerate(value))
        )
        records = [record for record in values.values() if isinstance(record, dict)]
        if records and len(records) == len(values):
            columns = [key for key, field in records[0].items() if isinstance(field, SINGLE)][:MAX_COLUMNS]
            table = make_table((name, *(column.replace("_", "\n") for column in columns)), ())
            for key, record in zip(values, records, strict=True):
                table.add_row(str(key), *(_cell(column, record[column]) for column in columns))
            console.print(table)
        elif isinstance(value, (*SINGLE, dict)):
            for key, each in values.items():
                if isinstance(each, SINGLE):
                    singles.add_row(f"{name} {key}".strip(), _cell(name, each))
        else:
            texts += [text for text in value if isinstance(text, str)]
    console.print(singles)
    for text in texts:
        line(console, f"  {text}")


def _cell(name: str, value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "-", False: "no", True: "yes"}[value]
    if isinstance(value, float):
        return f"{value:.3%}" if "_share" in name else significant(value)
    return human_bytes(value) if isinstance(value, int) and "bytes" in name else str(value)
