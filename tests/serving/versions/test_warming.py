"""A version ranks recorded requests before it is ready: how many, of which rows, and what is left out."""

from __future__ import annotations

import asyncio
import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from serving.cli import settings
from serving.config import ServeConfig
from serving.embedded import ModelSource, load_served_model
from serving.fleet.workers import worker_config
from serving.observe.recording import RequestRecorder
from serving.rank.service import RankingService
from serving.results import RankResult
from serving.versions import warming
from serving.versions.warming import Warming
from shardrank_testing.parsing import parse_json
from shardrank_testing.serving_api import MODEL, ApiModel, api_request

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


def warmed(model: ApiModel, how: Warming) -> tuple[float, dict[str, int]]:
    """How many requests warmed a version before it was live, and the rows that were looked up by table."""
    with closing(RankingService()) as service:
        source = ModelSource(snapshot=model.path, dtype="float32", num_replicas=1, warming=how)
        with closing(load_served_model(source, service)) as served:
            ((_, node),) = asyncio.run(served.nodes())
            assert service.generations.all() == []
            name = f'shardrank_warmed_requests_total{{model="{MODEL}",version="1"}} '
            (count,) = re.findall(re.escape(name) + "(.*)", service.metrics.render().decode())
            return float(count), {table.table: table.rows for table in node.lookups if table.rows}


def test_the_last_recorded_requests_warm_a_version(api_model: ApiModel, recorded: Path) -> None:
    """A recorded id that has no row any more keeps no version from serving."""
    count, rows = warmed(api_model, Warming(folder=recorded, requests=6))
    assert count == 6
    # Of a request: its candidates, and a history of four.
    assert rows["films"] == sum(size + 4 for size in SIZES[4:])
    assert rows["users"] in (5, 6)


@pytest.mark.parametrize(
    ("folder", "changed", "value", "logged"),
    [
        ("none", "LIMIT_S", 10.0, "is not warmed any further"),
        # A bug: a TypeError in the middle of a batch.
        ("", "BATCH_TIMEOUT_S", None, "TypeError"),
        ("", "LIMIT_S", 0.0, ""),
    ],
)
def test_warming_that_fails_keeps_no_version_from_serving(
    api_model, recorded, caplog, monkeypatch, folder, changed, value, logged
) -> None:
    monkeypatch.setattr(warming, changed, value)
    count, rows = warmed(api_model, Warming(folder=recorded / folder))
    assert count == 0
    assert logged in caplog.text
    assert rows == {} or changed != "LIMIT_S"


def test_settings_name_the_folder_that_warms(tmp_path: Path) -> None:
    def warming_by(**values: object) -> Warming | None:
        config = ServeConfig(snapshot=tmp_path, **values)
        both = [settings.warming(config), settings.warming(worker_config(config, 1))]
        assert [folder is None for folder in both] in ([True, True], [False, False])
        return both[0]

    record = tmp_path / "r"
    assert warming_by() is None
    assert warming_by(record=record) == Warming(folder=record)
    assert warming_by(record=record, warm_requests=0) is None
    named = Warming(folder=tmp_path, requests=9)
    assert warming_by(record=record, warm_from=tmp_path, warm_requests=9) == named
