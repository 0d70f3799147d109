"""The page's paths, what they report of played fleets and of a process without one, and what is kept of minutes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from loader.errors import RegistryUnavailableError
from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import LATENCY_BOUNDS_MS, HotReport, NodeRecord, VersionReport, VersionStats, delta_stream
from loader.registry.memory import MemoryRegistry
from loader.rollout.requests import start_rollout
from loader.snapshot.reader import Snapshot
from router.plan import Plan
from serving.api.http import running_admin
from serving.api.tokens import Tokens, add_token, new_token
from serving.dashboard.board import Board, History
from serving.rank.service import RankingService
from shard_node.wire.address import Address
from shard_node.wire.server import NodeServer
from shardrank_testing.rollout_fleet import CONFIG, MODEL, NEW, OLD, Clock, PlayedFleet, PlayedNode
from shardrank_testing.serving_api import MODEL as API_MODEL
from shardrank_testing.serving_api import api_request, api_service, ask, run
from shardrank_testing.standalone import serving_alone
from shardrank_testing.topologies import make_node

MB = 10**6


class PlayedTraffic:
    """Gives every node what it would tell after some seconds under load: counts, deltas, memory."""

    def __init__(self, fleet: PlayedFleet, requests_per_s: float = 420.0, seed: int = 0) -> None:
        self._fleet = fleet
        self._rate = requests_per_s
        self._random = np.random.default_rng(seed)
        self._counts: dict[tuple[str, int], np.ndarray] = {}
        self._hot: dict[tuple[str, int], tuple[int, int]] = {}
        self._seconds = 0.0

    def pass_time(self, seconds: float, last_delta: int) -> None:
        """Answer requests for so long; all nodes but the last one have applied all deltas."""
        self._seconds += seconds
        swell = 1 + 0.15 * np.sin(self._seconds / 90)
        for node in self._fleet.serving():
            share = 0.05 if node.canary is not None else 0.0
            for version, part in ((node.live, 1 - share), (node.canary, share)):
                if version is not None and node.alive:
                    self._answer(node, version, seconds * self._rate * swell * part / len(self._fleet.serving()))
        for place, node in enumerate(self._fleet.shard_nodes()):
            node.delta_sequence = dict.fromkeys(node.held, max(0, last_delta - (place == 2)))
            size = (312 + 5 * place) * MB
            tiers = {"ram": size, "disk": 2 * size}
            node.told = {version: {"memory_tiers": tiers, "memory_bytes": size, "leases": 2} for version in node.held}
            node.machine = {"memory_total_bytes": 64_000 * MB, "memory_available_bytes": (41_000 - 700 * place) * MB}

    def _answer(self, node: PlayedNode, version: int, requests: float) -> None:
        count = self._random.poisson(requests)
        faster = 0.82 if version % 2 == 0 else 1.0
        latencies_ms = faster * self._random.lognormal(np.log(3.1), 0.42, count)
        buckets = np.searchsorted(LATENCY_BOUNDS_MS, latencies_ms)
        key = (node.node_id, version)
        counts = self._counts.get(key, np.zeros(len(LATENCY_BOUNDS_MS) + 1, np.int64))
        counts = self._counts[key] = counts + np.bincount(buckets, minlength=counts.size)
        lookups, hits = self._hot.get(key, (0, 0))
        lookups += 400 * count
        hits += self._random.binomial(400 * count, min(0.62, 0.3 + self._seconds / 1500))
        self._hot[key] = (lookups, hits)
        total = int(counts.sum())
        node.stats[version] = VersionStats(
            requests=total,
            latency_counts=tuple(counts.tolist()),
            score_count=100 * total,
            score_sum=31.4 * total,
            score_square_sum=14.2 * total,
            keys=80 * total,
            missing_keys=3 * total,
        )
        hot = HotReport(rows=180_000, size_bytes=25 * MB, lookups=lookups, hits=hits)
        node.told[version] = {"hot": hot, "leases": int(self._random.integers(1, 5))}
        node.machine = {"memory_total_bytes": 32_000 * MB, "memory_available_bytes": 21_400 * MB}


class Played:
    """A played fleet, and a board that reads it when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.fleet = PlayedFleet(DirectoryRegistry(folder, clock=self.clock), self.clock, CONFIG)
        self.board = Board(lambda: DirectoryRegistry(folder, clock=self.clock), clock=self.clock)

    async def state(self) -> dict[str, Any]:
        """What a page that is opened now is told."""
        await self.board.update()
        told = json.loads(await self.board.document(""))
        return {**told, **told.pop("state")}


def on_played(folder: Path, scenario: Callable[[Played], Awaitable[None]]) -> None:
    async def main() -> None:
        played = Played(folder)
        await scenario(played)
        await played.board.fleet.registry.close()

    run(main())


def node_of(state: dict[str, Any], node_id: str) -> dict[str, Any]:
    return next(one for one in state["nodes"] if one["node_id"] == node_id)


def test_a_rollout_is_told_step_by_step_with_its_guards(tmp_path):
    async def scenario(played: Played) -> None:
        fleet = played.fleet
        await fleet.begin(2, 2, 2)
        await played.state()
        traffic = PlayedTraffic(fleet)
        await start_rollout(
            fleet.fleet, MODEL, NEW, canary_share=0.05, bake_s=6.0, clock=fleet.clock, rollout_id="a" * 32
        )
        seen = []
        while (await fleet.rollout()).active:
            traffic.pass_time(0.3, 0)
            await fleet.round()
            (model,) = (await played.state())["models"]
            seen.append(
                (model["rollout"]["step"], model["live"], model["rollback"]["to"], model["rollback"]["why_not"])
            )
        order = ["stage_shards", "stage_serving", "replay", "canary", "flip", "retire_serving", "retire_shards"]
        assert list(dict.fromkeys(step for step, *_ in seen)) == order
        # It is taken back until the old version is being retired; then it can't be, and afterwards it is rolled back.
        assert {step: (to, bool(why)) for step, _, to, why in seen[:-1]}["canary"] == (OLD, False)
        assert any(why for step, _, _, why in seen if step == "retire_serving")
        assert seen[-1] == ("retire_shards", NEW, OLD, "")
        state = await played.state()
        assert state["models"][0]["rollout"]["guards"] is None
        assert "flip" in {one["step"] for one in state["models"][0]["rollout"]["events"]}
        version = next(one for one in state["models"][0]["versions"] if one["version"] == NEW)
        assert (version["role"], version["shards"], version["replicas"]) == ("live", 2, 4)
        assert (version["serving"], version["answering"]) == (2, 2)
        assert version["recent"]["requests_per_s"] > 0
        assert 0 < version["recent"]["hit_rate"] < 1
        assert version["recent"]["missing_rate"] == 3 / 80

    on_played(tmp_path, scenario)


def test_nodes_that_come_and_go_and_rows_that_lag_are_told(tmp_path):
    async def scenario(played: Played) -> None:
        fleet = played.fleet
        await fleet.begin(2, 1, 1)
        for sequence in range(1, 6):
            await fleet.registry.append(delta_stream(MODEL, OLD), sequence, b"rows")
        fleet.node("shard-0-0").delta_sequence[OLD] = 5
        fleet.node("shard-1-0").delta_sequence[OLD] = 3
        await fleet.round()
        state = await played.state()
        assert [node_of(state, f"shard-{shard}-0")["versions"][0]["lag"] for shard in (0, 1)] == [0, 2]
        assert node_of(state, "serve-0")["versions"][0]["lag"] is None
        fleet.node("shard-1-0").kill()
        fleet.node("serve-0").draining = True
        await fleet.round(2.0)
        await fleet.round(2.0)
        state = await played.state()
        assert all(one["node_id"] != "shard-1-0" for one in state["nodes"])
        assert node_of(state, "serve-0")["state"] == "ending"
        fleet.node("shard-1-0").restart()
        await fleet.round()
        state = await played.state()
        assert node_of(state, "shard-1-0")["state"] == "up"

    on_played(tmp_path, scenario)


def test_what_is_known_stays_while_the_registry_does_not_answer(tmp_path, monkeypatch):
    async def scenario(played: Played) -> None:
        await played.fleet.begin(1, 1, 1)
        before = await played.state()
        assert before["problem"] == ""

        async def fails() -> Any:
            raise RegistryUnavailableError("registry x: gone")

        with monkeypatch.context() as patched:
            patched.setattr(played.board.fleet, "nodes", fails)
            state = await played.state()
        assert (state["problem"], state["read_at"]) == ("registry x: gone", before["read_at"])
        assert state["nodes"] == before["nodes"]
        assert (await played.state())["problem"] == ""

    on_played(tmp_path, scenario)


def test_the_history_comes_with_each_new_slot(tmp_path):
    async def scenario(played: Played) -> None:
        await played.fleet.begin(1, 1, 1)
        await played.board.update()
        before = json.loads(await played.board.document(""))["history"]["slot"]
        assert json.loads(await played.board.document(str(before)))["history"] is None
        played.clock.now += played.board.history.slot_s
        await played.board.update()
        assert json.loads(await played.board.document(str(before)))["history"]["slot"] == before + 1

    on_played(tmp_path, scenario)


@contextlib.asynccontextmanager
async def page_of(
    source: Any, tokens: Tokens | None = None, service: RankingService | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        running_admin(service or RankingService(), "127.0.0.1", 0, tokens=tokens, page=source) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        yield client


async def test_files_are_served_and_all_else_needs_a_token(tmp_path):
    token, entry = new_token("ops", "admin")
    narrow, other = new_token("shop", "describe")
    for one in (entry, other):
        add_token(tmp_path / "tokens.json", one)
    played = Played(tmp_path / "registry")
    await played.fleet.begin(1, 1, 1)
    source = partial(Board, lambda: DirectoryRegistry(tmp_path / "registry", clock=played.clock))
    async with page_of(source, Tokens(tmp_path / "tokens.json")) as client:
        for path, kind in (("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")):
            answer = await client.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(kind)
            assert answer.headers["content-security-policy"].startswith("default-src 'self'; ")
            assert "http://" not in answer.text.replace("http://www.w3.org/", "")
            assert "innerHTML" not in answer.text
        assert (await client.get("/status/access")).json() == {"needs_token": True, "fixed": ""}
        asked = {"model": MODEL, "rollout_id": "a" * 32, "is_active": False, "live": OLD}
        for headers, status in (({}, 401), ({"authorization": f"Bearer {narrow}"}, 403)):
            assert (await client.get("/status", headers=headers)).status_code == status
            answer = await client.post("/status/rollback", headers=headers, json=asked)
            assert answer.status_code == status
        client.headers["authorization"] = f"Bearer {token}"
        shown = (await client.get("/status")).json()
        assert shown.keys() == {"read_at", "problem", "source", "state", "history"}
        for body, status in (({"model": MODEL}, 400), ({**asked, "more": 1}, 400), (asked, 409)):
            assert (await client.post("/status/rollback", json=body)).status_code == status
        assert (await client.post("/status/rollback", content=b" " * 5000)).status_code == 413
    assert not (await played.fleet.fleet.registry.entries("rollouts/"))


@pytest.mark.parametrize("change", [{"rollout_id": "b" * 32}, {"is_active": True}, {"live": OLD}, {}])
async def test_a_rollback_is_refused_if_what_was_seen_changed(tmp_path, change):
    """The page sends its rollout and live version; each is compared with the registry."""
    token, entry = new_token("ops", "admin")
    add_token(tmp_path / "tokens.json", entry)
    played = Played(tmp_path / "registry")
    fleet = played.fleet
    await fleet.begin(1, 1, 1)
    await start_rollout(fleet.fleet, MODEL, NEW, clock=fleet.clock, rollout_id="a" * 32)
    await fleet.ends("done", NEW)
    source = partial(Board, lambda: DirectoryRegistry(tmp_path / "registry", clock=played.clock))
    async with page_of(source, Tokens(tmp_path / "tokens.json")) as client:
        seen = {"model": MODEL, "rollout_id": "a" * 32, "is_active": False, "live": NEW, **change}
        headers = {"authorization": f"Bearer {token}"}
        answer = await client.post("/status/rollback", json=seen, headers=headers)
    assert (answer.status_code, (await fleet.rollout()).active) == ((409, False) if change else (200, True))
    assert not change or "has changed since the page showed it" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("localhost:{}", "LOCALHOST:{}", "127.0.0.2:{}", "[::1]:{}")),
        *((host, 421) for host in ("evil.example:{}", "localhost:1", "localhost", "10.0.0.1:{}")),
    ],
)
async def test_a_loopback_page_refuses_another_host(api_model, host, status):
    """A name of elsewhere that resolves to this machine (DNS rebinding) reads nothing."""
    with api_service(api_model) as service:
        source = partial(Board, partial(MemoryRegistry, "memory"))
        async with page_of(source, service=service) as client:
            for path in ("/", "/status/access", "/metrics"):
                answer = await client.get(path, headers={"host": host.format(client.base_url.port)})
                assert (path, answer.status_code) == (path, status)
                assert status == 200 or answer.json()["error"]["kind"] == "misdirected"


async def test_a_process_alone_tells_itself_and_its_shards(api_model, folder):
    snapshot = Snapshot.open(api_model.path)
    server, address = (
        NodeServer(make_node(snapshot, Plan.make(snapshot.spec, replicate_bytes=0), 0)),
        Address(path=f"{folder}/0"),
    )
    await server.start([address])
    service = RankingService()
    async with serving_alone(service, api_model.path, [[address]]) as member:
        await ask(service, api_request(1))
        await service.watch.refresh()
        source = partial(Board, lambda: member.fleet.registry, fixed="it is alone")
        async with page_of(source, service=service) as client:
            told = (await client.get("/status/access")).json()
            assert (told["needs_token"], told["fixed"]) == (False, "it is alone")
            assert (await client.post("/status/rollback", json={})).status_code == 403
            while True:
                shown = (await client.get("/status")).json()
                history, state = shown["history"], shown["state"]
                reports = [node["versions"][0] for node in state["nodes"] if node["versions"]]
                if len(reports) == 2 and reports[0]["memory_tiers"]:
                    break
        assert history["num_slots"] == 180
        (model,) = state["models"]
        assert (model["model"], model["live"], model["rollout"]) == (API_MODEL, 1, None)
        assert [node["kind"] for node in state["nodes"]] == ["shard", "serving"]
        assert (state["nodes"][0]["address"], state["nodes"][1]["live"]) == (str(address), {API_MODEL: 1})
        assert reports[1]["golden_difference"] is None
    await asyncio.to_thread(service.close)
    await server.close()


SLOT_S = 5.0


def node(counts: dict[int, int], *, name: str = "serve-0", process: int = 1, hits: int = 0) -> NodeRecord:
    """A serving process that has answered so many requests of each version, all in the same bucket."""
    versions = [
        VersionReport(
            model="films",
            version=version,
            state="ready",
            stats=VersionStats(
                requests=count, errors=count // 10, latency_counts=(0, 0, count), keys=4 * hits, missing_keys=hits
            ),
            hot=HotReport(lookups=2 * hits, hits=hits) if hits else None,
        )
        for version, count in counts.items()
    ]
    return NodeRecord(node_id=name, kind="serving", process_id=process, address="", versions=tuple(versions))


def requests(history: History, version: int = 1) -> list[int | None]:
    (found,) = [one["requests"] for one in history.document()["tracks"] if one["version"] == version]
    return found


def test_each_slot_has_what_was_counted_in_it():
    history = History(num_slots=4)
    for second, count in enumerate(range(100, 122)):
        history.observe([node({1: count}, hits=count)], 1000.0 + second)
        assert history.last_slot == 199 + second // 5
    # The first slot was seen from its beginning, but what was counted before is not of it; the last is not full.
    assert requests(history) == [5, 5, 5]
    told = history.document()
    assert (told["slot"], told["slot_s"]) == (history.last_slot, SLOT_S) == (203, 5.0)
    recent = history.recent("films", 1)
    assert recent is not None
    assert (recent["requests_per_s"], recent["hit_rate"], recent["missing_rate"]) == (1.0, 0.5, 0.25)
    assert recent["p50"] == recent["p99"] == LATENCY_BOUNDS_MS[2]


def test_a_process_that_starts_anew_and_one_that_comes_count_from_nothing():
    history = History(num_slots=4)
    history.observe([node({1: 50})], 0.0)
    history.observe([node({1: 60})], 6.0)
    # The process is another one, a version was staged anew, and another node has come.
    history.observe([node({1: 7}, process=2)], 7.0)
    history.observe([node({1: 3}, process=2), node({1: 4}, name="serve-1")], 8.0)
    history.observe([], 11.0)
    assert requests(history)[-1] == 10 + 7 + 3 + 4
