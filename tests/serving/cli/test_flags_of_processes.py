"""Flags that real processes are started with: where versions are, where traces and profiles go, and by which plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.plan_file import PlanFile, RanksOfBuckets, TablePlan
from serving.embedded import Ranker
from serving.observe.calls import STAGES
from serving.proto.shardrank.v1 import ranking_pb2_grpc
from shardrank_testing.command_line import ANY_PORTS, shardrank
from shardrank_testing.otlp_receiver import collector
from shardrank_testing.processes import Program, running
from shardrank_testing.s3_server import Bucket
from shardrank_testing.serving_api import MODEL, ApiModel, api_request, api_spec, rank_message, write_api_model


def test_a_version_at_a_url_is_served_as_from_its_folder(api_model: ApiModel, bucket: Bucket, tmp_path: Path) -> None:
    where = ("--store", bucket.url, "--store-cache", tmp_path / "cache", "--store-cache-gb", 0.5)
    registry = ("--registry", tmp_path / "registry")
    report = json.loads(shardrank("publish", api_model.path, *where, *registry, "--json").stdout)
    assert (report["folder"], report["copied"], report["is_new"]) == (f"{bucket.url}/{MODEL}/1", True, True)
    again = shardrank("publish", f"{bucket.url}/{MODEL}/1", *where[2:], *registry)
    assert f"lies in {bucket.url}/{MODEL}/1" in again.output
    assert "may be served" in shardrank("verify", *where).output
    flags = ("--shutdown-delay-s", "0", "--dtype", "float32")
    request = api_request(1)
    with (
        running("serve", *map(str, where), *flags, *ANY_PORTS) as program,
        Ranker.open(api_model.path, dtype="float32") as ranker,
    ):
        assert program.rank(MODEL, request).json()["scores"] == ranker.rank(request)["scores"]
        assert program.stop() == 0


TRACE, SPAN = f"{7:032x}", f"{5:016x}"


def test_a_serving_process_and_a_node_send_one_trace(api_model, folder):
    with collector("grpc") as found:
        told = ("--snapshot", str(api_model.path), "--trace-endpoint", found.url, "--trace-protocol", "grpc")
        address = f"unix:{folder}/n.sock"
        with (
            running("shard-node", *told, "--shard", "0/1", "--listen", address) as node,
            running("serve", *told, "--shard", address, "--trace-sample-share", "0", *ANY_PORTS) as server,
        ):
            for headers in ({}, {"traceparent": f"00-{TRACE}-{SPAN}-01"}):
                url = f"{server.url}/v1/models/{MODEL}:rank"
                assert httpx.post(url, json=api_request(1), headers=headers, timeout=30).status_code == 200
            assert (server.stop(), node.stop()) == (0, 0), server.output + node.output
    assert sorted((span.service, span.name, span.trace) for span in found.spans) == [
        ("shardrank-serve", "http rank", TRACE),
        ("shardrank-serve", "shardrank.ask", TRACE),
        ("shardrank-serve", "shardrank.batch", TRACE),
        ("shardrank-serve", "shardrank.dense", TRACE),
        ("shardrank-serve", "shardrank.lookup", TRACE),
        ("shardrank-shard-node", "shardrank.pool", TRACE),
    ]


CANDIDATES, ROUNDS = 400, 20
# Of what is reported as unaccounted: a twentieth where nothing else runs, more beside other tests.
TOLERANCE = 0.2


def send_requests(program: Program) -> dict[str, float]:
    """Send requests to both APIs; a refused one and a lookup are no part of what ranking took.

    Returns:
        The seconds of each stage of `rank` by the server's own metrics.
    """
    with httpx.Client(base_url=program.url, timeout=30) as http, grpc.insecure_channel(program.grpc_target) as channel:
        stub = ranking_pb2_grpc.RankingServiceStub(channel)
        for _ in range(ROUNDS):
            body = api_request(1, CANDIDATES)
            assert http.post(f"/v1/models/{MODEL}:rank", json=body).status_code == 200
            assert len(stub.Rank(rank_message(api_request(2, CANDIDATES))).scores) == CANDIDATES
        assert http.post(f"/v1/models/{MODEL}:rank", content=b"{").status_code == 400
        assert http.post(f"/v1/models/{MODEL}:lookup", json={"sparse": {"film": [1, 2]}}).status_code == 200
        metrics = http.get("/metrics").text
    return {
        sample.labels["stage"]: sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == "shardrank_stage_seconds_sum" and sample.labels["method"] == "rank"
    }


def account(document: dict[str, Any], api: str, method: str) -> dict[str, Any]:
    expected = {"api": api, "method": method, "model": MODEL}
    (found,) = [one for one in document["accounts"] if one | expected == one]
    return found


def test_the_stages_of_a_profile_add_up_and_are_those_of_metrics(api_model: ApiModel, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    flags = ("--snapshot", str(api_model.path), "--dtype", "float32", "--profile", str(path), *ANY_PORTS)
    with running("serve", *flags, "--shutdown-delay-s", "0") as program:
        seconds = send_requests(program)
        # Written before the first request, so that a path that can't be written is refused at once.
        assert json.loads(path.read_bytes())["kind"] == "profile"
        assert program.stop() == 0
    document = json.loads(path.read_bytes())
    ranked = [account(document, api, "rank") for api in ("http", "grpc")]
    busy = dict.fromkeys(STAGES, 0.0)
    for one in ranked:
        assert one["requests"] == ROUNDS
        assert [stage["stage"] for stage in one["stages"]] == list(STAGES)
        total = sum(stage["seconds"] for stage in one["stages"])
        assert min(stage["seconds"] for stage in one["stages"]) >= 0
        assert total == pytest.approx(one["whole_s"], rel=TOLERANCE)
        assert one["unaccounted_s"] == pytest.approx(one["whole_s"] - total)
        for stage in one["stages"]:
            busy[stage["stage"]] += stage["busy_s"]
    assert busy == pytest.approx({stage: seconds[stage] for stage in STAGES}, rel=0.02, abs=2e-3)
    assert account(document, "http", "lookup")["requests"] == 1
    assert sum(one["batches"] for one in ranked) == 2 * ROUNDS
    assert document["cpu_s"] == pytest.approx(sum(document["cpu_s_by_thread"].values()), rel=0.1)
    assert document["cpu_s_by_thread"]["MainThread"] > 0


def swapped(table: TablePlan) -> TablePlan:
    """Return a table's plan with another owner of every bucket."""
    if table.sharding_type == "data_parallel":
        return table
    ranks = [RanksOfBuckets.of(3 - one.rank_of_bucket(table.num_buckets)) for one in table.slices]
    return table.model_copy(update={"slices": tuple(ranks)})


def test_a_fleet_serves_by_the_plan_in_the_snapshot_or_a_named_one(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(api_spec().model_dump_json())
    where = ("--shards", "2", "--cards", "2", "--replicate-bytes", "0", "--out", tmp_path / "plan.json")
    document = json.loads(shardrank("plan", "--model", tmp_path / "model.json", *where, "--json").stdout)
    division, file = document["division"], PlanFile.read(tmp_path / "plan.json")
    assert division["digest"] == file.digest
    assert [table["table"] for table in division["tables"]] == [table.name for table in api_spec().tables]
    assert [one["way"] for one in division["ways"]] == ["per table", "all row_wise", "all table_wise"]
    assert sum(rank["lookup_share"] for rank in division["ranks"]) == pytest.approx(1)
    other = PlanFile.of(MODEL, 2, 2, [swapped(table) for table in file.tables])
    (tmp_path / "other.json").write_text(other.to_json())
    model = write_api_model(tmp_path / "models", spec=file.sliced(api_spec()), plan=file.to_json().encode())
    flags = ("up", "--snapshot", str(model.path), "--shards", "2", "--cards", "2", "--dtype", "float32", *ANY_PORTS)
    for plan, more in ((file, ()), (other, ("--plan", str(tmp_path / "other.json")))):
        with running(*flags, *more) as program:
            program.read_until(f"by plan {plan.digest[:12]} over 2 shards: ")
            answer = program.rank(MODEL, api_request(1)).json()
            np.testing.assert_allclose(answer["scores"], model.scores(api_request(1)), rtol=1e-4)
            assert program.stop() == 0
