"""Logging of the command line: the standard library's, one line an event, to stderr."""

from __future__ import annotations

import logging
import sys

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def set_up_logging(level: str) -> None:
    """Sends records of `level` and above to stderr; libraries stay at warning unless `level` is debug.

    Args:
        level: one of `LOG_LEVELS`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    root = logging.getLogger()
    root.handlers = [handler]  # not added to: the group may run more than once in one process
    root.setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    for package in ("loader", "shard_node", "router", "serving", "loadtest"):
        logging.getLogger(package).setLevel(level.upper())
