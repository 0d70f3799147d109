"""Is a child ready? Found out from its own endpoints and from what it announces, the way its users would."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json

from loader.errors import RegistryError
from loader.registry.records import NodeRecord, WantedModel
from loader.registry.typed import FleetRegistry
from serving.fleet.supervisor import NotYetError, Probe, RefusedError


def node_probe(fleet: FleetRegistry, node_id: str, models: tuple[str, ...]) -> Probe:
    """Finds out from what a node announces whether it has the live version of each model.

    Args:
        fleet: where it announces itself.
        node_id: of the node.
        models: what it shall have; one of which no version is live yet asks for nothing.
    """

    async def probe(process_id: int) -> None:
        try:
            record = next((node for node in await fleet.nodes() if node.node_id == node_id), None)
            wanted = await fleet.wanted()
        except RegistryError as error:
            raise NotYetError(str(error)) from error
        if record is None or record.process_id != process_id:
            raise NotYetError(f"{node_id} has not announced itself yet")
        for model in models:
            if model in wanted:
                _check_live(record, wanted[model])

    return probe


def _check_live(record: NodeRecord, wanted: WantedModel) -> None:
    """Raises NotYetError or RefusedError unless the node does what is wanted of it for one model."""
    model, version = wanted.model, wanted.live
    if record.kind == "shard":
        held = wanted.held_by(record.node_id)
        # In a rollout by replica this node's turn may have come: then it shall hold the new version alone.
        version = version if version in held else next(iter(held), None)
    if version is None:
        return
    report = record.report(model, version)
    if report is not None and report.state == "refused":
        raise RefusedError(f"version {version} of {model!r}: {report.reason}")
    if report is None or report.state != "ready":
        told = "not there yet" if report is None else f"{report.state} {report.reason}".rstrip()
        raise NotYetError(f"version {version} of {model!r} is {told}")
    if record.kind == "serving" and record.live.get(model) != version:
        raise NotYetError(f"version {version} of {model!r} is not live yet")


def lock_probe(fleet: FleetRegistry, key: str) -> Probe:
    """Finds out whether anybody holds a lock: a process that stands by is as good as the one that has it."""

    async def probe(process_id: int) -> None:
        del process_id
        try:
            holder = await fleet.registry.holder(key)
        except RegistryError as error:
            raise NotYetError(str(error)) from error
        if holder is None:
            raise NotYetError(f"nobody holds {key} yet")

    return probe


def http_probe(host: str, port: int, path: str = "/readyz", timeout_s: float = 2.0) -> Probe:
    """Asks a serving process over HTTP; ready is status 200."""

    async def probe(process_id: int) -> None:
        del process_id
        try:
            status, body = await asyncio.to_thread(_get, host, port, path, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise NotYetError(f"http://{host}:{port}{path}: {error}") from error
        if status != http.client.OK:
            raise NotYetError(f"http://{host}:{port}{path} answered {status}: {_short(body)}")

    return probe


def _get(host: str, port: int, path: str, timeout_s: float) -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection(host, port, timeout=timeout_s)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read(65_536)


def _short(body: bytes) -> str:
    try:
        return json.dumps(json.loads(body))[:300]
    except ValueError:
        return repr(body[:200])
