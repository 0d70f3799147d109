"""The page's paths on the port for operators: its files, its document, and its one button."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from loader.errors import ConfigError
from loader.rollout.requests import SeenRollout
from serving.api.bodies import read_body
from serving.api.tokens import Tokens
from serving.dashboard.board import Board
from serving.errors import InvalidRequestError, PermissionDeniedError, malformed
from shard_node.wire.address import Address

logger = logging.getLogger(__name__)

MAX_ROLLBACK_BYTES = 4096
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/plot.js": ("plot.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    # Nothing from elsewhere, nothing inline, and in nobody's frame.
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_DEFAULT_PORTS = (80, 443)
_NO_TOKENS = "rolling back needs an admin token, and this process was started without --tokens"


class _Rollback(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    rollout_id: str
    is_active: bool
    live: int | None


async def check_host(request: Request) -> None:
    """Raise InvalidRequestError if a request to a loopback port has another Host.

    A page from elsewhere could have its own name resolved to this machine, and then read and ask as this port's page.
    """
    host, port = request.headers.get("host", "").lower(), request.scope["server"][1]
    has_port = host.rpartition(":")[2].isdecimal() or port not in _DEFAULT_PORTS
    try:
        address = Address.parse(host if has_port else f"{host}:{port}")
    except ConfigError:
        address = Address()
    if address.port != port or not address.is_loopback:
        problem = f"Host: {host[:200]!r}; allowed are localhost:{port} and loopback addresses"
        raise InvalidRequestError("", problem, kind="misdirected")


def add_page(app: FastAPI, board: Board, tokens: Tokens | None) -> None:
    """Add the page and what it asks for. Its files say nothing of the fleet; all else needs what metrics need."""
    folder = Path(__file__).parent

    def check(request: Request) -> str:
        return "" if tokens is None else tokens.check(request.headers.get("authorization"), "admin")

    def file(name: str, content_type: str) -> Callable[[], Any]:
        content = (folder / name).read_bytes()

        async def answer() -> Response:
            return Response(content, media_type=content_type, headers=HEADERS)

        return answer

    async def access() -> Response:
        document = {"needs_token": tokens is not None, "fixed": board.fixed or ("" if tokens else _NO_TOKENS)}
        return JSONResponse(document, headers=HEADERS)

    async def status(request: Request) -> Response:
        check(request)
        document = await board.document(request.query_params.get("slot", ""))
        return Response(document, media_type="application/json", headers=HEADERS)

    async def rollback(request: Request) -> Response:
        if tokens is None:
            raise PermissionDeniedError(_NO_TOKENS)
        who = check(request)
        body = await read_body(request.receive, "MAX_ROLLBACK_BYTES", MAX_ROLLBACK_BYTES)
        try:
            request_body = msgspec.json.decode(body, type=_Rollback)
        except (msgspec.MsgspecError, RecursionError) as error:
            problem = f"the body must name model, rollout_id, is_active and live: {error}"
            raise malformed("", problem) from error
        seen = SeenRollout(request_body.rollout_id, request_body.is_active, request_body.live)
        begun = await board.roll_back(request_body.model, seen)
        to = begun.to_version if begun.state == "running" else begun.from_version
        logger.warning("token %r rolls %s back to version %s", who, request_body.model, to)
        return JSONResponse({"model": request_body.model, "to": to}, headers=HEADERS)

    for path, (name, content_type) in _FILES.items():
        app.add_api_route(path, file(name, content_type), methods=["GET"], include_in_schema=False)
    app.add_api_route("/status/access", access, methods=["GET"], include_in_schema=False)
    app.add_api_route("/status", status, methods=["GET"], include_in_schema=False)
    app.add_api_route("/status/rollback", rollback, methods=["POST"], include_in_schema=False)
