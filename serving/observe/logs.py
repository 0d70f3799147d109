"""Lines of a process on stderr and for whoever started it: text, or JSON for a collector of logs (docs/logs.md)."""

from __future__ import annotations

import contextlib
import json
import logging
import select
import sys
from datetime import UTC, datetime
from typing import Final, Literal, TextIO, TypeAlias

import click

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogFormat: TypeAlias = Literal["text", "json"]

_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MAX_WAIT_S: Final = 0.05
"""For room on stderr."""
_PACKAGES: Final = ("loader", "shard_node", "router", "serving", "loadtest")
ERROR_PREFIX: Final = "error: "
"""Of an error that is raised on purpose; nothing but the exit follows it."""

logger = logging.getLogger("shardrank")


class TextFormatter(logging.Formatter):
    """Adds a record's `fields` to its message, as `name=value`; what could end the line is escaped."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        """Return the line of a record, without a traceback."""
        fields = {name: str(value) for name, value in getattr(record, "fields", {}).items()}
        shown = (f"{name}={value if value.isprintable() else ascii(value)}" for name, value in fields.items())
        return " ".join((super().formatMessage(record), *shown))


class JsonFormatter(logging.Formatter):
    """Writes a JSON object on one line: time, level, logger, message, the record's `fields`, traceback `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Drops lines, and later says how many, where nobody reads stderr: a server must not wait for that."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record's line unless there is no room for it."""
        try:
            # A pipe that can be written to has room for a page.
            has_room = bool(select.select([], [self.stream], [], 0.0 if self._dropped else MAX_WAIT_S)[1])
        except (OSError, ValueError):
            has_room = True  # no file, as in tests
        self._dropped += not has_room
        if has_room:
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                logger.warning("%d lines of the log were dropped: nobody read them", dropped)
            super().emit(record)


def start_logging(log_level: LogLevel, log_format: LogFormat) -> None:
    """Log to stderr from now on, libraries from warning up; in JSON also warnings, and the error a process dies of.

    It may be called again: its handler is replaced.
    """
    is_json, root, handler = log_format == "json", logging.getLogger(), StderrHandler()
    handler.setFormatter(JsonFormatter() if is_json else TextFormatter(_TEXT))
    others = (other for other in root.handlers if not isinstance(other.formatter, TextFormatter | JsonFormatter))
    root.handlers = [*others, handler]
    root.setLevel("DEBUG" if log_level == "debug" else "WARNING")
    for name in (*_PACKAGES, logger.name):
        logging.getLogger(name).setLevel(log_level.upper())
    logging.captureWarnings(is_json)
    sys.excepthook = (lambda *error: logger.critical("uncaught", exc_info=error)) if is_json else sys.__excepthook__


def announce(text: str, level: int = logging.INFO) -> None:
    """Print a line for whoever started the process, an error on stderr, others on stdout; JSON where logs are."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            text = handler.formatter.format(logging.LogRecord(logger.name, level, "", 0, text, (), None))
    click.echo(text, err=level >= logging.ERROR)


def message_of(line: str) -> str:
    """Return the message of a line of a log: all of it, unless it is in JSON."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(line)["message"])
    return line
