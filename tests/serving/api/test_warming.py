"""A version answers golden and recorded requests before it is ready: how many, of which rows, and what is left out."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from loader.snapshot.reader import Snapshot
from serving.api import warming
from serving.api.warming import warm, warming_requests
from serving.embedded import ModelSource, load_served_model
from serving.observe.recording import RequestRecorder
from serving.rank.service import RankingService
from serving.results import RankResult
from serving.versions.loaded_version import LoadedVersion
from shardrank_testing.golden import golden_of
from shardrank_testing.parsing import parse_json
from shardrank_testing.serving_api import MODEL, ApiModel, api_request, write_api_model

SIZES = (3, 4, 5, 40, 6, 7, 8, 9, 10, 11)


@pytest.fixture(scope="module")
def recorded(api_model: ApiModel, api_service: RankingService, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten requests; the last one has an id without a row."""
    folder = tmp_path_factory.mktemp("recorded")
    recorder = RequestRecorder(folder, 1.0)
    with api_service.lease(MODEL) as lease:
        schema = lease.payload.schema
    for seed, count in enumerate(SIZES):
        request = api_request(seed, count)
        if seed == len(SIZES) - 1:
            request["context"]["sparse"]["user"] = [999_999]
        answer = RankResult(MODEL, 1, np.zeros(count, np.float32), np.arange(count))
        recorder.offer(schema, parse_json(schema, request), answer, 0.0)
    recorder.close()
    return folder


async def warmed(model: ApiModel, folder: Path | None) -> tuple[float, dict[str, int]]:
    """How many requests warmed a version, and the rows that were looked up by table; clients' counts stay 0."""
    with closing(RankingService()) as service:
        source = ModelSource(snapshot=model.path, dtype="float32", num_replicas=1)
        with closing(load_served_model(source, service)) as served:
            before = await rows_of(served)
            await warm(service, served, warming_requests(served, Snapshot.open(model.path), folder))
            assert service.generations.all() == []
            rows = {table: rows - before.get(table, 0) for table, rows in (await rows_of(served)).items()}
            found = dict(re.findall(r"(?m)^shardrank_(.*) (\S+)$", service.metrics.render().decode()))
            counted = re.compile("(version_)?requests_total|.*_count")
            counts = {name: count for name, count in found.items() if counted.match(name)}
            assert {*counts.values()} <= {"0.0"}
            assert served.counter.totals().last is None
            return float(found[f'warmed_requests_total{{model="{MODEL}",version="1"}}']), rows


async def rows_of(served: LoadedVersion) -> dict[str, int]:
    ((_, node),) = await served.nodes()
    return {table.table: table.rows for table in node.lookups if table.rows}


async def test_the_last_recorded_requests_warm_a_version(
    api_model: ApiModel, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded id that has no row any more keeps no version from serving."""
    monkeypatch.setattr(warming, "MAX_RECORDED", 6)
    count, rows = await warmed(api_model, recorded)
    assert count == 5
    # Of a request: its candidates, and a history of four.
    assert rows["films"] == sum(size + 4 for size in SIZES[4:])
    assert rows["users"] in (5, 6)


async def test_golden_requests_warm_a_version(api_model: ApiModel, tmp_path: Path) -> None:
    model = write_api_model(tmp_path, 1, golden=golden_of(api_model))
    count, rows = await warmed(model, None)
    assert count == len(warming.SIZES) + 8
    assert rows["films"] > sum(warming.SIZES)


@pytest.mark.parametrize(
    ("folder", "changed", "value", "logged"),
    [
        ("none", "LIMIT_S", 10.0, "recorded requests do not warm it"),
        # A bug, in the middle of it.
        ("", "PAUSES", "", "is not warmed any further"),
        ("", "LIMIT_S", 0.0, ""),
    ],
)
async def test_warming_that_fails_keeps_no_version_from_serving(
    api_model, recorded, caplog, monkeypatch, folder, changed, value, logged
) -> None:
    monkeypatch.setattr(warming, changed, value)
    count, rows = await warmed(api_model, recorded / folder)
    assert count == (changed == "PAUSES")
    assert logged in caplog.text
    assert rows == {} or changed == "PAUSES"
