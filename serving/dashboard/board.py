"""The page: a fleet's state, read again and again and kept as one document, and the paths that show it.

These are on the port for operators: the page's files, its document, and its one button.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Set
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from loader.errors import ConfigError, RegistryError, RolloutError
from loader.registry import fleet
from loader.registry.registry import Registry
from loader.rollout.guards import percentile_ms
from loader.rollout.plan import Rollout
from loader.rollout.requests import FleetState, SeenRollout, read_fleet, roll_back
from serving.api.bodies import read_json
from serving.api.tokens import Tokens
from serving.errors import InvalidRequestError, PermissionDeniedError
from shard_node.wire.address import Address

MAX_MODELS = 32
MAX_NODES = 400
MAX_VERSIONS = 12
"""Of a model; those in use come first, then the newest."""
MAX_EVENTS = 60
"""Of a rollout."""
MAX_TEXT = 400
Document = dict[str, Any]
_Version: TypeAlias = tuple[str, int]
_REPORTED: Any = {
    **dict.fromkeys(("model", "version", "state", "progress", "memory_tiers", "leases", "delta_published_at"), True),
    **dict.fromkeys(("dense_step", "golden_difference"), True),
    "hot": {"rows", "size_bytes"},
}
"""Fields of a `VersionReport` that the page shows as they are."""
logger = logging.getLogger(__name__)
WATCHED_S = 0.5
"""Between two reads, at least."""
UNWATCHED_S = 2.5
"""While no page is open: often enough that no slot of the history is missed."""
READ_TIMEOUT_S = 4.0
_encode = msgspec.json.Encoder().encode
MAX_ROLLBACK_BYTES = 4096
_FILES = {"/": "index.html"} | {f"/{name}": name for name in ("page.js", "plot.js", "page.css", "icon.svg")}
HEADERS = {
    # Nothing from elsewhere, nothing inline, and in nobody's frame.
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_NO_TOKENS = "rolling back needs an admin token, and this process was started without --tokens"

SLOT_S = 5.0
NUM_SLOTS = 180
"""A quarter of an hour."""
MAX_TRACKS = 32
"""Versions of models that are shown, those that answered last."""
MAX_SOURCES = 4096
"""Counters of processes that are remembered, those of processes that have ended too."""
RECENT_S = 60.0
QUANTILES = (0.5, 0.95, 0.99)

_LATENCIES = 6  # before them requests, errors, lookups and hits, keys and missing ones
_NONE = np.zeros(_LATENCIES + len(fleet.LATENCY_BOUNDS_MS) + 1, np.int64)
Counts = npt.NDArray[np.int64]
_Source: TypeAlias = tuple[str, int, str, int]
"""One process's counters of a version: node, process, model, version; another process of the node counts anew."""


class History:
    """Counts of requests, errors, latencies, hot rows and keys by version, of the last `num_slots` x `slot_s` seconds.

    A slot in which nothing was observed, or which was not seen from its beginning, is unknown. `now` is in seconds, of
    whatever clock; one that is set back adds to the last slot.
    """

    def __init__(self, num_slots: int = NUM_SLOTS, slot_s: float = SLOT_S) -> None:
        self.slot_s, self.num_slots = slot_s, num_slots
        # The newest last, which is not full yet: what was counted, by version, or None where that is unknown.
        self._slots: deque[dict[_Version, Counts] | None] = deque([None] * num_slots, num_slots)
        self._last: dict[_Source, Counts] = {}
        self._slot = -1
        self._observed_at = float("-inf")

    def observe(self, nodes: Iterable[fleet.NodeRecord], now: float) -> None:
        """Add what nodes have counted since they were observed last."""
        slot = max(self._slot, int(now // self.slot_s))
        if slot > self._slot:
            self._slots += [*[None] * min(slot - self._slot - 1, self.num_slots), {}]
        # After a pause nobody knows when what was counted meanwhile happened.
        if not 0 <= now - self._observed_at <= 2 * self.slot_s:
            self._slots[-1] = None
        for node in nodes:
            for report in node.versions:
                if report.stats is not None:
                    self._add((node.node_id, node.process_id, report.model, report.version), report.stats, report.hot)
        while len(self._last) > MAX_SOURCES:
            del self._last[next(iter(self._last))]
        self._slot, self._observed_at = slot, now

    @property
    def last_slot(self) -> int:
        """The last full slot, which ended at `(last_slot + 1) * slot_s`."""
        return self._slot - 1

    def document(self) -> dict[str, Any]:
        """Return all full slots, the oldest first: a list for each number, None where it is unknown."""
        full = list(self._slots)[:-1]
        shown = dict.fromkeys(version for slot in reversed(self._slots) for version in slot or ())
        tracks = []
        for model, version in sorted(list(shown)[:MAX_TRACKS]):
            numbers = [_UNKNOWN if slot is None else _numbers(slot.get((model, version))) for slot in full]
            track = {name: [slot[name] for slot in numbers] for name in _UNKNOWN}
            tracks.append({"model": model, "version": version, **track})
        return {"slot": self.last_slot, "slot_s": self.slot_s, "num_slots": self.num_slots, "tracks": tracks}

    def recent(self, model: str, version: int) -> dict[str, float | None] | None:
        """Return rates (a second), shares and percentiles (ms) of the last minute; None if nothing is known of it."""
        num_slots = min(int(RECENT_S / self.slot_s), self.num_slots - 1)
        known = [slot for slot in list(self._slots)[-1 - num_slots : -1] if slot is not None]
        if not known:
            return None
        numbers = _numbers(sum((slot.get((model, version), _NONE) for slot in known), _NONE))
        requests, errors = numbers.pop("requests") or 0, numbers.pop("errors") or 0
        rates = {"requests_per_s": requests / (len(known) * self.slot_s)}
        return {**rates, "error_rate": errors / requests if requests else None, **numbers}

    def _add(self, source: _Source, stats: fleet.VersionStats, hot: fleet.HotReport | None) -> None:
        # One of another release may have other buckets: what it has beyond these would be shown as the last one.
        latencies = stats.latency_counts[: _NONE.size - _LATENCIES]
        lookups = (0, 0) if hot is None else (hot.lookups, hot.hits)
        counts = _NONE.copy()
        counts[: _LATENCIES + len(latencies)] = (
            *(stats.requests, stats.errors, *lookups, stats.keys, stats.missing_keys),
            *latencies,
        )
        # Taken out and put in again, so that those that have ended are the first.
        before = self._last.pop(source, None)
        self._last[source] = counts
        # What counts fewer than before was staged anew, and what was not there before has just begun.
        news = counts if before is None or (counts < before).any() else counts - before
        if (slot := self._slots[-1]) is not None and news.any():
            slot[source[2:]] = slot.get(source[2:], _NONE) + news


def _numbers(counts: Counts | None) -> dict[str, float | None]:
    requests, errors, lookups, hits, keys, missing, *latencies = (_NONE if counts is None else counts).tolist()
    percentiles = {f"p{100 * quantile:g}": percentile_ms(latencies, quantile) for quantile in QUANTILES}
    shares = {"hit_rate": hits / lookups if lookups else None, "missing_rate": missing / keys if keys else None}
    return {"requests": requests, "errors": errors, **shares, **percentiles}


_UNKNOWN = dict.fromkeys(_numbers(None))


def state_document(state: FleetState, history: History) -> Document:
    """Return models with their versions and rollouts, and nodes, in the order in which they are shown."""
    view, models = _View(state, history), state.models()
    nodes = sorted(state.nodes, key=lambda node: (node.kind != "shard", node.shard_index or 0, node.node_id))
    return {
        "coordinator": state.coordinator,
        "num_shards": None if state.division is None else state.division.num_shards,
        "models": list(map(view.model, models[:MAX_MODELS])),
        "more_models": max(0, len(models) - MAX_MODELS),
        "nodes": list(map(view.node, nodes[:MAX_NODES])),
        "more_nodes": max(0, len(nodes) - MAX_NODES),
    }


class _View:
    """A state as the page shows it, with what nodes report of each version and how many processes answer with it."""

    def __init__(self, state: FleetState, history: History) -> None:
        self.state, self.history = state, history
        self.reports: defaultdict[_Version, list[tuple[fleet.NodeRecord, fleet.VersionReport]]] = defaultdict(list)
        self.answering: Counter[_Version] = Counter()
        for node in state.nodes:
            for report in node.versions:
                self.reports[report.model, report.version].append((node, report))
            if node.kind == "serving":
                self.answering.update(node.live.items())

    def node(self, node: fleet.NodeRecord) -> Document:
        return node.model_dump(include={"node_id", "kind", "shard_index", "memory_available_bytes", "live"}) | {
            "address": node.address[:MAX_TEXT],
            "state": "ending" if node.draining else "up",
            "versions": list(map(self.report, node.versions[-MAX_VERSIONS:])),
        }

    def report(self, report: fleet.VersionReport) -> Document:
        # Only who holds rows applies deltas.
        has_rows = bool(report.plan_digest or report.memory_tiers)
        desired = self.state.wanted.get(report.model)
        follows = has_rows and desired is not None and report.version in desired.follow
        last_delta = self.state.last_delta(report.model, report.version) if follows else None
        return report.model_dump(include=_REPORTED) | {
            "reason": "; ".join(filter(None, (report.reason, report.dense_refused)))[:MAX_TEXT],
            "delta_sequence": report.delta_sequence if has_rows else None,
            "lag": None if last_delta is None else max(0, last_delta - report.delta_sequence),
        }

    def model(self, model: str) -> Document:
        desired, rollout = self.state.wanted.get(model), self.state.rollouts.get(model)
        quality = self.state.qualities.get(model)
        named = set() if desired is None else desired.named()
        used = {version for name, version in self.reports if name == model} | named
        known = used | {version for name, version in self.state.published if name == model}
        shown = sorted(known, key=lambda version: (version not in used, -version))[:MAX_VERSIONS]
        # The fleet's number of shards is that of further versions; one from before it changed is divided as it was.
        num_shards, before = self.state.view(model).num_shards, {} if desired is None else desired.num_shards
        return {
            "model": model,
            "live": None if desired is None else desired.live,
            "quality": None if quality is None else quality.model_dump(exclude={"model"}),
            "canary": None if desired is None or desired.canary is None else desired.canary.model_dump(),
            "versions": [
                self.version(model, version) | {"num_shards": before.get(version, num_shards)}
                for version in sorted(shown, reverse=True)
            ],
            "rollout": None if rollout is None else _rollout(self.state, rollout),
            "rollback": _rollback(self.state, model, rollout),
        }

    def version(self, model: str, version: int) -> Document:
        reports, desired = self.reports.get((model, version), []), self.state.wanted.get(model)
        ready = [node for node, report in reports if report.state == "ready"]
        shards = {node.shard_index for node in ready if node.kind == "shard"}
        published = self.state.published.get((model, version))
        return {
            "version": version,
            "role": _role(desired, version, {report.state for _, report in reports}),
            "published_at": None if published is None else published.published_at,
            "rows_bytes": None if published is None else published.rows_bytes,
            "shards": len(shards),
            "replicas": sum(node.kind == "shard" for node in ready),
            "serving": sum(node.kind == "serving" for node in ready),
            "answering": self.answering.get((model, version), 0),
            "last_delta": self.state.last_delta(model, version),
            "recent": self.history.recent(model, version),
        }


def _role(desired: fleet.WantedModel | None, version: int, states: Set[str]) -> str:
    if desired is not None and desired.live == version:
        return "live"
    if desired is not None and desired.canary is not None and desired.canary.version == version:
        return f"canary, {100 * desired.canary.share:g}%"
    # What is most in the way of its use is what people look for.
    order = ("refused", "staging", "waiting", "draining", "ready")
    return next((state for state in order if state in states), "published")


def _rollout(state: FleetState, rollout: Rollout) -> Document:
    status = state.status(rollout.model)
    return status.model_dump(mode="json", exclude={"nodes", "wanted", "model"}) | {
        "events": [event.model_dump() | {"text": event.text[:MAX_TEXT]} for event in status.events[-MAX_EVENTS:]],
        "waiting_for": [text[:MAX_TEXT] for text in status.waiting_for[:8]],
        "more_waiting": max(0, len(status.waiting_for) - 8),
        "limits": rollout.guards.model_dump(),
        "active": rollout.active,
    }


def _rollback(state: FleetState, model: str, rollout: Rollout | None) -> Document:
    """Say where a rollback would go, or why there is none; `shardrank rollback` decides when it is asked."""
    to, why = None if rollout is None else rollout.rollback_target, ""
    if rollout is None or (to is None and not rollout.active):
        why = "there is no earlier version to go back to"
    elif rollout.active:
        to = rollout.from_version
        if rollout.state == "undoing":
            why = "the rollout is being taken back already"
        elif rollout.committed:
            why = "the old version is being retired: once the rollout is done it can be rolled back"
    elif (model, to) not in state.published:
        why = f"version {to} is not on record any more"
    return {"to": to, "aborts": rollout is not None and rollout.active, "why_not": why}


class Board:
    """What the page shows of a fleet. Belongs to one event loop; `run_board` makes one that runs.

    Args:
        open_registry: opens the fleet's registry, which `close` closes.
        note: what the page must say of its numbers; "" for nothing.
        fixed: why nothing can be changed, and no coordinator is missed; "" for a fleet that others belong to.
        clock: gives seconds since the epoch.
    """

    def __init__(
        self,
        open_registry: Callable[[], Registry],
        note: str = "",
        fixed: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.fleet = fleet.FleetRegistry(open_registry())
        self.note, self.fixed = note, fixed
        self.history = History()
        self._clock = clock
        self._state = FleetState()
        self._read_at: float | None = None
        self._problem = "nothing was read yet"
        # As JSON, since it is requested again and again; None until then.
        self._state_json: msgspec.Raw | None = None
        self._wake = asyncio.Event()
        # What is kept is read and written by one thread at a time, alongside the event loop.
        self._keeping = asyncio.Lock()

    async def document(self, slot: str) -> bytes:
        """Return what is shown, as JSON; the history only if its last slot is another one than `slot`."""
        async with self._keeping:
            document = await asyncio.to_thread(self._encode, slot)
        self._wake.set()
        return document

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            await self.update()
            await asyncio.sleep(WATCHED_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(UNWATCHED_S - WATCHED_S):
                    await self._wake.wait()
            self._wake.clear()

    async def update(self) -> None:
        """Read once."""
        state, problem = None, ""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                state = await read_fleet(self.fleet)
        except TimeoutError:
            problem = f"{self.fleet.name} has not answered within {READ_TIMEOUT_S:g} s"
        except RegistryError as error:
            problem = str(error)
        except Exception as error:
            # A defect must not end the page for good.
            logger.exception("reading %s failed", self.fleet.name)
            problem = f"internal error: {type(error).__name__}"
        async with self._keeping:
            await asyncio.to_thread(self._keep, state, problem)

    def _keep(self, state: FleetState | None, problem: str) -> None:
        now, self._problem = self._clock(), problem
        if state is not None:
            self._read_at, self._state, self._state_json = now, state, None
            self.history.observe(state.nodes, now)

    def _encode(self, slot: str) -> bytes:
        if self._state_json is None:
            self._state_json = msgspec.Raw(_encode(state_document(self._state, self.history)))
        return _encode(
            {
                "read_at": self._read_at,
                "problem": self._problem,
                "source": {"name": self.fleet.name, "note": self.note, "fixed": self.fixed},
                "state": self._state_json,
                "history": None if slot == str(self.history.last_slot) else self.history.document(),
            }
        )


@asynccontextmanager
async def run_board(open_board: Callable[[], Board]) -> AsyncIterator[Board]:
    """Run a board while the block runs. Raises RegistryError if its registry can't be opened."""
    board = open_board()
    running = asyncio.create_task(board.run(), name="read the fleet")
    try:
        yield board
    finally:
        running.cancel()
        await asyncio.wait([running])
        await board.fleet.registry.close()


class _Rollback(SeenRollout, frozen=True, forbid_unknown_fields=True):
    model: str


async def check_host(request: Request) -> None:
    """Raise InvalidRequestError if a request to a loopback port has another Host.

    A page from elsewhere could have its own name resolved to this machine, and then read and ask as this port's page.
    """
    host, port = request.headers.get("host", "").lower(), request.scope["server"][1]
    has_port = host.rpartition(":")[2].isdecimal() or port not in (80, 443)
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

    def file(name: str) -> Response:
        return FileResponse(folder / name, headers=HEADERS)

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
        limit, form = ("MAX_ROLLBACK_BYTES", MAX_ROLLBACK_BYTES), "name model, rollout_id, is_active and live"
        body = await read_json(request.receive, *limit, _Rollback, form)
        if board.fixed:
            raise RolloutError(f"{body.model}: {board.fixed}")
        begun = await roll_back(board.fleet, body.model, rollout_id=secrets.token_hex(16), seen=body)
        to = begun.to_version if begun.state == "running" else begun.from_version
        logger.warning("token %r rolls %s back to version %s", who, body.model, to)
        return JSONResponse({"model": body.model, "to": to}, headers=HEADERS)

    for path, name in _FILES.items():
        app.add_api_route(path, partial(file, name), methods=["GET"], include_in_schema=False)
    app.add_api_route("/status/access", access, methods=["GET"], include_in_schema=False)
    app.add_api_route("/status", status, methods=["GET"], include_in_schema=False)
    app.add_api_route("/status/rollback", rollback, methods=["POST"], include_in_schema=False)
