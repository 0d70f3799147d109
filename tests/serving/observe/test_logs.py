"""Lines of logs as text and as JSON, and the access log's."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys

import pytest

from loader.errors import OverloadedError
from serving.api.bodies import left_early
from serving.observe.access import AccessLog
from serving.observe.calls import Call
from serving.observe.logs import StderrHandler, announce, logger, message_of, start_logging


@pytest.fixture(autouse=True)
def usual_logging():
    loggers = [
        logging.getLogger(name) for name in ("", "shardrank", "serving", "loader", "router", "shard_node", "loadtest")
    ]
    levels = [one.level for one in loggers]
    yield
    for changed, level in zip(loggers, levels, strict=True):
        changed.setLevel(level)
    logging.captureWarnings(False)
    sys.excepthook = sys.__excepthook__
    handlers = logging.getLogger().handlers
    handlers[:] = [handler for handler in handlers if not isinstance(handler, StderrHandler)]


def test_a_json_line_has_time_level_logger_message_fields_and_traceback(capsys):
    start_logging("info", "json")
    logger = logging.getLogger("serving.anything")
    logger.debug("unseen")
    try:
        raise ValueError("no\nluck")
    except ValueError:
        logger.exception("it failed: %s", "ä")
    logging.getLogger("uvicorn.error").warning("of a library")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["time"].endswith("+00:00")
    assert (first["level"], first["logger"], first["message"]) == ("error", "serving.anything", "it failed: ä")
    assert first["exception"].splitlines()[-2:] == ["ValueError: no", "luck"]
    assert (second["level"], second["logger"]) == ("warning", "uvicorn.error")


def test_a_process_that_dies_of_a_bug_says_so_in_json(capsys):
    start_logging("error", "json")
    sys.excepthook(KeyError, KeyError("gone"), None)
    assert json.loads(capsys.readouterr().err)["exception"] == "KeyError: 'gone'"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_announced_error_is_found_as_the_last_line_of_a_log(capsys, log_format):
    start_logging("error", log_format)
    announce("films is ready")
    announce("error: no room", logging.ERROR)
    output = capsys.readouterr()
    assert (message_of(output.out.strip()), message_of(output.err.strip())) == ("films is ready", "error: no room")
    assert output.out.startswith("{") == (log_format == "json")


@pytest.mark.parametrize(
    ("api", "error", "kind", "status"),
    [
        ("http", None, "ok", 200),
        ("oip_grpc", None, "ok", "OK"),
        ("oip_http", OverloadedError("full"), "overloaded", 503),
        ("grpc", OverloadedError("full"), "overloaded", "RESOURCE_EXHAUSTED"),
        ("http", left_early(), "client_gone", 499),
        ("grpc", asyncio.CancelledError(), "client_gone", "CANCELLED"),
        ("http", KeyError("a bug"), "internal", 500),
    ],
)
def test_the_access_log_has_each_calls_status(capsys, api, error, kind, status):
    start_logging("error", "json")
    log = AccessLog()
    log.add(Call(api, "rank", 0.0, 200 * "x", "films", 3), 0.0123456, kind, error)
    log.write()
    line = json.loads(capsys.readouterr().err)
    assert (line["logger"], line["level"], line["ms"]) == ("shardrank.access", "info", 12.346)
    assert (line["model"], line["version"], line["status"]) == ("films", 3, status)
    assert line.get("error") == (None if error is None else kind)
    assert len(line["request_id"]) == 128


def test_an_id_of_a_client_can_not_forge_a_line(capsys):
    start_logging("info", "text")
    log = AccessLog()
    log.add(Call("http", "rank", 0.0, "x\n2026-11-28 ERROR \x1b[31m"), 0.5, "ok", None)
    log.write()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(r"request_id='x\n2026-11-28 ERROR \x1b[31m'")


def test_a_pipe_that_nobody_reads_costs_lines_and_no_process_waits_for_it(monkeypatch):
    reading, writing = os.pipe()
    with open(reading), open(writing, "w") as writer:
        monkeypatch.setattr(sys, "stderr", writer)
        start_logging("info", "text")
        for _ in range(1000):
            logger.info("%s", 1000 * "x")
        os.set_blocking(reading, False)
        written = len(os.read(reading, 1 << 20).splitlines())
        logger.info("again")
        told, last = os.read(reading, 1 << 20).decode().splitlines()
    assert 0 < written < 100
    assert told.endswith(f": {1000 - written} lines of the log were dropped: nobody read them")
    assert last.endswith("again")


def test_a_line_of_text_ends_with_the_clients_id(capsys):
    start_logging("info", "text")
    log = AccessLog()
    log.add(Call("http", "lookup", 0.0, "a status=500"), 0.5, "ok", None)
    log.write()
    expected = " INFO shardrank.access: request api=http method=lookup status=200 ms=500.0 request_id=a status=500\n"
    assert capsys.readouterr().err.endswith(expected)
