"""Is a child ready? Asked at its own public endpoints, the way its users would."""

from __future__ import annotations

import asyncio
import http.client
import json
from typing import Any

from loader.errors import ShardrankError
from serving.fleet.child import NotReadyError, Probe
from shard_node.address import Address
from shard_node.client import ShardClient


def shard_node_probe(address: Address, model: str, version: int) -> Probe:
    """Asks a shard node over the wire whether the version is live on it."""

    async def probe() -> None:
        client = ShardClient(address)
        try:
            info = await client.info()
        except ShardrankError as error:
            raise NotReadyError(str(error)) from error
        finally:
            await client.close()
        if not any((one.model, one.version, one.state) == (model, version, "live") for one in info.versions):
            here = [f"{one.model} {one.version} ({one.state})" for one in info.versions]
            raise NotReadyError(f"version {version} of {model!r} is not live; here: {', '.join(here) or 'nothing'}")

    return probe


def http_probe(host: str, port: int, path: str = "/readyz", timeout_s: float = 2.0) -> Probe:
    """Asks a serving process over HTTP; ready is status 200."""

    async def probe() -> None:
        try:
            status, body = await asyncio.to_thread(_get, host, port, path, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise NotReadyError(f"http://{host}:{port}{path}: {error}") from error
        if status != http.client.OK:
            raise NotReadyError(f"http://{host}:{port}{path} answered {status}: {_short(body)}")

    return probe


def _get(host: str, port: int, path: str, timeout_s: float) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read(65_536)
    finally:
        connection.close()


def _short(body: bytes) -> str:
    try:
        document: Any = json.loads(body)
    except ValueError:
        return repr(body[:200])
    return json.dumps(document)[:300]
