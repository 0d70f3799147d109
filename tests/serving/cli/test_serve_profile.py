"""`shardrank serve --profile`: what real processes write about the requests that they have answered."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.observe.calls import IN_BATCH, STAGES
from serving.proto.shardrank.v1 import ranking_pb2_grpc
from shardrank_testing.processes import Program, running
from shardrank_testing.serving_api import MODEL, api_request, rank_message

ANY_PORTS = ("--http-port", "0", "--grpc-port", "0", "--shutdown-delay-s", "0")
CANDIDATES = 400
# Of what is told as unaccounted: a twentieth where nothing else runs, more beside other tests.
TOLERANCE = 0.2


def ports(program: Program) -> tuple[str, str]:
    url = program.read_until(r"HTTP: (http://127.0.0.1:\d+)")[1]
    return url, program.read_until(r"gRPC: (127.0.0.1:\d+)")[1]


def stage_sums(metrics: str) -> dict[tuple[str, str], float]:
    return {
        (one.labels["method"], one.labels["stage"]): one.value
        for family in text_string_to_metric_families(metrics)
        for one in family.samples
        if one.name == "shardrank_stage_seconds_sum"
    }


async def ask(url: str, target: str, rounds: int) -> dict[tuple[str, str], float]:
    """Asks over both APIs, several at a time. Returns what stages' histograms have grown by."""
    body, message = api_request(1, CANDIDATES), rank_message(api_request(2, CANDIDATES))
    limits = httpx.Limits(max_connections=4)
    async with (
        httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as http,
        grpc.aio.insecure_channel(target) as channel,
    ):
        stub = ranking_pb2_grpc.RankingServiceStub(channel)
        before = stage_sums((await http.get("/metrics")).text)

        async def over_http() -> None:
            for _ in range(rounds):
                assert (await http.post(f"/v1/models/{MODEL}:rank", json=body)).status_code == 200

        async def over_grpc() -> None:
            for _ in range(rounds):
                assert len((await stub.Rank(message)).scores) == CANDIDATES

        await asyncio.gather(*(over_http() for _ in range(3)), *(over_grpc() for _ in range(3)))
        # A refused request, and a lookup: neither belongs to what ranking took.
        assert (await http.post(f"/v1/models/{MODEL}:rank", content=b"{")).status_code == 400
        assert (await http.post(f"/v1/models/{MODEL}:lookup", json={"sparse": {"film": [1, 2]}})).status_code == 200
        after = stage_sums((await http.get("/metrics")).text)
    return {key: seconds - before.get(key, 0.0) for key, seconds in after.items()}


Document = dict[str, Any]


def read(path: Path) -> Document:
    return json.loads(path.read_bytes())


def account(document: Document, api: str, method: str = "rank") -> Document:
    wanted = {"api": api, "method": method, "model": MODEL}
    (found,) = [one for one in document["accounts"] if one | wanted == one]
    return found


def busy(accounts: list[Document], stage: str) -> float:
    return sum(one["busy_s"] for each in accounts for one in each["stages"] if one["stage"] == stage)


def check_adds_up(one: Document) -> None:
    assert [stage["stage"] for stage in one["stages"]] == list(STAGES)
    seconds = [stage["seconds"] for stage in one["stages"]]
    assert min(seconds) >= 0
    assert sum(seconds) == pytest.approx(one["whole_s"], rel=TOLERANCE)
    assert one["unaccounted_s"] == pytest.approx(one["whole_s"] - sum(seconds))


def test_the_stages_of_a_real_server_add_up_to_the_whole_and_are_those_of_its_metrics(api_model, tmp_path) -> None:
    path = tmp_path / "profile.json"
    arguments = ("--snapshot", str(api_model.path), "--dtype", "float32", "--profile", str(path))
    with running("serve", *arguments, *ANY_PORTS) as program:
        told = asyncio.run(ask(*ports(program), rounds=20))
        # Written before the first request, so that a path that can't be written is told at once.
        assert read(path)["kind"] == "profile"
        assert program.stop() == 0
    document = read(path)
    ranked = [account(document, "http"), account(document, "grpc")]
    for one in ranked:
        assert one["requests"] == 60
        check_adds_up(one)
    assert account(document, "http", "lookup")["requests"] == 1
    assert 0 < sum(one["batches"] for one in ranked) <= 120
    for stage in STAGES:
        assert busy(ranked, stage) == pytest.approx(told["rank", stage], rel=0.02, abs=2e-3), stage
    for stage in IN_BATCH:
        # Measured once and told twice.
        assert busy(ranked, stage) == pytest.approx(told["rank", stage]), stage
    assert document["cpu_s"] == pytest.approx(sum(document["cpu_s_by_thread"].values()), rel=0.1)
    assert document["cpu_s_by_thread"]["MainThread"] > 0
