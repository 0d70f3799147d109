"""A version ranks recorded requests before it is ready: how many, of which rows, and what is left out."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import numpy as np
import pytest

from serving.cli.serve import _source, serve, worker_arguments
from serving.formats.requests import RankAnswer
from serving.limits import RequestLimits
from serving.observe.recording import RecordingConfig, RequestRecorder
from serving.rank.service import RankingService
from serving.versions import warming
from serving.versions.loading import ModelSource, load_served_model
from serving.versions.warming import Warming
from shardrank_testing.parsing import parse_json
from shardrank_testing.serving_api import MODEL, ApiModel, api_request, api_service

SIZES = (3, 4, 5, 40, 6, 7, 8, 9, 10, 11)


@pytest.fixture(scope="module")
def recorded(api_model: ApiModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten requests, one of them of 40 candidates, and one id that has no row."""
    folder = tmp_path_factory.mktemp("recorded")
    own = RequestRecorder(RecordingConfig(folder=folder, share=1.0))
    with api_service(api_model) as service, service.lease(MODEL) as lease:
        schema = lease.payload.schema
    for seed, count in enumerate(SIZES):
        request = parse_json(schema, one_asked(seed, count))
        scores = np.zeros(count, np.float32)
        own.offer(schema, request, RankAnswer(MODEL, 1, scores, np.arange(count)), 0.0)
    own.close()
    return folder


def one_asked(seed: int, count: int) -> dict:
    asked = api_request(seed, count)
    if seed == len(SIZES) - 1:
        asked["context"]["sparse"]["user"] = [999_999]
    return asked


def warmed(model: ApiModel, how: Warming, **limits: int) -> tuple[str, dict[str, int]]:
    """What the metrics say before the version is live, and the rows that were looked up by table."""
    service = RankingService(RequestLimits(**limits))
    source = ModelSource(snapshot=model.path, dtype="float32", num_replicas=1, warming=how)
    served = load_served_model(source, service)
    try:
        (told,) = asyncio.run(served.nodes())
        rows = {one.table: one.rows for one in told[1].lookups if one.rows}
        assert service.generations.all() == []
        return service.metrics.render().decode(), rows
    finally:
        served.close()
        service.close()


def users_and_histories(first: int, left_out: int | None = None) -> int:
    """Rows of the table of films that requests from `first` on look up: candidates, and a history of four."""
    return sum(count + 4 for count in SIZES[first:] if count != left_out)


def test_the_last_recorded_requests_warm_a_version(api_model: ApiModel, recorded: Path) -> None:
    text, rows = warmed(api_model, Warming(folder=recorded, requests=6))
    assert f'shardrank_warmed_requests_total{{model="{MODEL}",version="1"}} 6.0' in text
    assert rows["films"] == users_and_histories(4)
    # A recorded id that has no row any more keeps nobody from serving.
    assert rows["users"] in (5, 6)


def test_warming_that_fails_keeps_no_version_from_serving(
    api_model: ApiModel, recorded: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        text, _ = warmed(api_model, Warming(folder=recorded / "none"))
    assert f'shardrank_warmed_requests_total{{model="{MODEL}",version="1"}} 0.0' in text
    assert "is not warmed any further" in caplog.text
    with monkeypatch.context() as broken:
        # Nor does what nobody raised on purpose: here a TypeError in the middle of a batch.
        broken.setattr(warming, "BATCH_TIMEOUT_S", None)
        text, _ = warmed(api_model, Warming(folder=recorded))
    assert f'shardrank_warmed_requests_total{{model="{MODEL}",version="1"}} 0.0' in text
    assert "TypeError" in caplog.text
    monkeypatch.setattr(warming, "LIMIT_S", 0.0)
    text, rows = warmed(api_model, Warming(folder=recorded))
    assert f'shardrank_warmed_requests_total{{model="{MODEL}",version="1"}} 0.0' in text
    assert rows == {}


def test_flags_say_which_folder_warms(tmp_path: Path) -> None:
    def told(*flags: str) -> Warming | None:
        options = serve.make_context("serve", ["--snapshot", str(tmp_path), *flags]).params
        worker = serve.make_context("serve", worker_arguments(options, tmp_path, 1)).params
        found = [_source(one, tmp_path, None).warming for one in (options, worker)]
        assert [one is None for one in found] in ([True, True], [False, False])
        return found[0]

    record = tmp_path / "r"
    assert told() is None
    assert told("--record", str(record)) == Warming(folder=record)
    assert told("--record", str(record), "--warm-requests", "0") is None
    wanted = Warming(folder=tmp_path, requests=9)
    assert told("--record", str(record), "--warm-from", str(tmp_path), "--warm-requests", "9") == wanted
