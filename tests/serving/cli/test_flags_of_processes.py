"""Flags that real processes are started with: where versions are, where traces go, and by which plan."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import numpy as np
import pytest

from router.plan_file import PlanFile, RanksOfBuckets, TablePlan
from serving.embedded import Ranker
from shardrank_testing.command_line import ANY_PORTS, shardrank
from shardrank_testing.otlp_receiver import collector
from shardrank_testing.processes import running
from shardrank_testing.s3_server import Bucket
from shardrank_testing.serving_api import MODEL, ApiModel, api_request, api_spec, write_api_model
from shardrank_testing.snapshots import num_buckets


@pytest.mark.nightly
def test_a_version_at_a_url_is_served_as_from_its_folder(api_model: ApiModel, bucket: Bucket, tmp_path: Path) -> None:
    where = ("--store", bucket.url, "--store-cache", tmp_path / "cache", "--store-cache-gb", 0.5)
    registry = ("--registry", tmp_path / "registry")
    report = json.loads(shardrank("publish", api_model.path, *where, *registry, "--json").stdout)
    assert (report["folder"], report["copied"], report["is_new"]) == (f"{bucket.url}/{MODEL}/1", True, True)
    again = shardrank("publish", f"{bucket.url}/{MODEL}/1", *where[2:], *registry)
    assert f"folder {bucket.url}/{MODEL}/1, copied no" in again.output
    assert "may be served" in shardrank("verify", *where).output
    flags = ("--shutdown-delay-s", "0", "--dtype", "float32")
    request = api_request(1)
    with (
        running("serve", *map(str, where), *flags, *ANY_PORTS) as program,
        Ranker.open(api_model.path, dtype="float32") as ranker,
    ):
        assert program.rank(MODEL, request).json()["scores"] == ranker.rank(MODEL, **request).scores.tolist()
        assert program.stop() == 0


TRACE, SPAN = f"{7:032x}", f"{5:016x}"


@pytest.mark.nightly
def test_a_serving_process_and_a_node_send_one_trace(api_model, folder, monkeypatch):
    monkeypatch.setenv("SHARDRANK_TRACE_PROTOCOL", "grpc")
    settings = folder / "serve.toml"
    settings.write_text("trace_sample_share = 0\n")
    with collector("grpc") as found:
        told = ("--snapshot", str(api_model.path), "--trace-endpoint", found.url)
        address = f"unix:{folder}/n.sock"
        with (
            running("shard-node", *told, "--shard", "0/1", "--listen", address) as node,
            running("serve", *told, "--shard", address, "--config", str(settings), *ANY_PORTS) as server,
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


def swapped(table: TablePlan) -> TablePlan:
    """Return a table's plan with another owner of every bucket."""
    if table.sharding_type == "data_parallel":
        return table
    ranks = [RanksOfBuckets.of(3 - one.rank_of_bucket(num_buckets(table))) for one in table.slices]
    return table.model_copy(update={"slices": tuple(ranks)})


@pytest.mark.nightly
def test_a_fleet_serves_by_the_plan_in_the_snapshot_or_a_named_one(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(api_spec().model_dump_json())
    where = ("--shards", "2", "--cards", "2", "--replicate-bytes", "0", "--out", tmp_path / "plan.json")
    document = json.loads(shardrank("plan", "--model", tmp_path / "model.json", *where, "--json").stdout)
    division, file = document["division"], PlanFile.read(tmp_path / "plan.json")
    assert division["digest"] == file.digest
    assert [table["table"] for table in division["tables"]] == [table.name for table in api_spec().tables]
    assert [one["way"] for one in division["ways"]] == ["per table", "all row_wise", "all table_wise"]
    other = PlanFile.of(MODEL, 2, 2, [swapped(table) for table in file.tables])
    (tmp_path / "other.json").write_text(other.to_json())
    model = write_api_model(tmp_path / "models", spec=file.sliced(api_spec()), plan=file.to_json().encode())
    flags = ("up", "--snapshot", str(model.path), "--shards", "2", "--cards", "2", "--dtype", "float32", *ANY_PORTS)
    for plan, more in ((file, ()), (other, ("--plan", str(tmp_path / "other.json")))):
        with running(*flags, *more) as program:
            program.read_until(f"2 shards, plan {plan.digest[:12]}")
            answer = program.rank(MODEL, api_request(1)).json()
            np.testing.assert_allclose(answer["scores"], model.scores(api_request(1)), rtol=1e-4)
            assert program.stop() == 0
