"""Recorded requests sent again: over both APIs, to the version that answered, to another one, and at which times."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace as changed

from loader.errors import ConfigError
from loadtest.cli import replay as replay_command
from loadtest.load.replay import ReplayConfig, ReplayResult, due_times, execute, prepare, replay
from serving.observe.recording import RequestRecorder, read_file, recorded_files
from shardrank_testing.serving_api import MODEL, ApiModel, api_request, api_service, run, running_api, write_api_model

COUNT = 8


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[int, ApiModel]:
    store = tmp_path_factory.mktemp("store")
    return {version: write_api_model(store, version, seed=version) for version in (1, 2)}


@pytest.fixture(scope="module")
def folder(versions: dict[int, ApiModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What version 1 was asked and answered: strings, weights, empty bags, dense inputs."""
    recorded = tmp_path_factory.mktemp("recorded")
    with api_service(versions[1]) as service:
        recorder = RequestRecorder(recorded, 1.0)
        service.on_ranked += (recorder.offer,)

        async def ask() -> None:
            async with running_api(service) as api:
                for seed in range(COUNT):
                    response = await api.http.post(f"/v1/models/{MODEL}:rank", json=api_request(seed, 3 + seed))
                    assert response.status_code == 200

        run(ask())
        recorder.close()
    return recorded


def replayed(
    model: ApiModel, folder: Path, scheme: str, change_scores: float = 0.0, recorder: RequestRecorder | None = None
) -> ReplayResult:
    async def work() -> ReplayResult:
        with api_service(model) as service:
            service.on_ranked += () if recorder is None else (recorder.offer,)
            async with running_api(service) as api:
                ports = {"http": api.listening.http_port, "grpc": api.listening.grpc_port}
                target = f"{scheme}://127.0.0.1:{ports[scheme]}"
                config = ReplayConfig(folder=folder, target=target, rate=200.0, timeout_ms=30_000)
                prepared = prepare(config)
                first = prepared.recorded[0]
                prepared.recorded[0] = changed(first, scores=[score + change_scores for score in first.scores])
                return await replay(config, prepared)

    return run(work())


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_the_same_version_gives_the_same_scores_again(versions, folder: Path, scheme: str) -> None:
    result = replayed(versions[1], folder, scheme)
    assert (result.recorded, result.sent, result.answered, result.errors) == (COUNT, COUNT, COUNT, {})
    assert (result.compared, result.different, result.not_comparable) == (COUNT, 0, 0)
    assert result.identical + result.within == COUNT
    assert result.max_difference is not None
    assert result.max_difference < 1e-6
    assert result.answers_by_version == {1: COUNT}
    assert result.latency.p50_ms is not None


def test_a_replay_is_not_recorded_by_a_server_that_records(versions, folder: Path, tmp_path: Path) -> None:
    recorder = RequestRecorder(tmp_path, 1.0)
    assert replayed(versions[1], folder, "grpc", recorder=recorder).answered == COUNT
    recorder.close()
    assert recorded_files(tmp_path) == []


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.02)])
def test_the_tolerance_is_of_the_answering_model_s_number_format(
    versions, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtype, tolerance
) -> None:
    """It is told, and scores of a format that depends on the batch may be further off."""

    with api_service(versions[1]) as service:
        described = service.describe(MODEL)
    of_dtype = described.dense_model.model_copy(update={"dtype": dtype})
    monkeypatch.setattr(
        "loadtest.load.replay.describe", lambda target, model: described.model_copy(update={"dense_model": of_dtype})
    )
    execute(ReplayConfig(folder=folder, target="http://127.0.0.1:1", rate=1000.0), None)
    assert f"tolerance {tolerance:g}: the default for a model in {dtype}" in capsys.readouterr().out


def test_other_versions_are_not_compared_but_differences_are(versions, folder: Path) -> None:
    result = replayed(versions[2], folder, "http")
    assert (result.answered, result.compared, result.not_comparable, result.max_difference) == (COUNT, 0, COUNT, None)
    result = replayed(versions[1], folder, "http", change_scores=0.25)
    assert (result.compared, result.different) == (COUNT, 1)
    assert result.max_difference == pytest.approx(0.25, abs=1e-6)


def test_requests_are_due_at_their_times_or_faster_or_evenly(folder: Path) -> None:
    (path,) = recorded_files(folder)
    recorded = [changed(one, arrived_at=100.0 + number**2) for number, one in enumerate(read_file(path))][:4]
    assert due_times(recorded, 1.0, None) == [0.0, 1.0, 4.0, 9.0]
    assert due_times(recorded, 2.0, None) == [0.0, 0.5, 2.0, 4.5]
    assert due_times(recorded, 1.0, 4.0) == [0.0, 0.25, 0.5, 0.75]
    last = prepare(ReplayConfig(folder=folder, target="http://h:1", requests=3))
    assert (len(last.recorded), last.total) == (3, COUNT)
    assert [len(one.scores) for one in last.recorded] == [8, 9, 10]


def test_a_folder_of_several_models_needs_a_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = recorded_files(folder)
    first, second = list(read_file(path))[:2]
    other = changed(second, model="books")
    monkeypatch.setattr("loadtest.load.replay.read_file", lambda path: [first, other])
    with pytest.raises(ConfigError, match=f"--model: .* has requests of several: books, {MODEL}"):
        prepare(ReplayConfig(folder=folder, target="http://h:1"))
    named = prepare(ReplayConfig(folder=folder, target="http://h:1", model="books"))
    assert (named.total, [payload.path for payload in named.pool]) == (1, ["/v1/models/books:rank"])


def test_what_can_not_be_replayed_is_refused(folder: Path, tmp_path: Path) -> None:
    of_books = "no requests of model 'books'"
    for where, model, message in ((folder, "books", of_books), (tmp_path, None, "no requests are")):
        with pytest.raises(ConfigError, match=message):
            prepare(ReplayConfig(folder=where, target="http://h:1", model=model))
    for wrong, message in (
        (["--target", "ftp://h:1"], "ftp"),
        (["--target", "http://h:1", "--speed", "2", "--rate", "3"], "one of them"),
        (["--target", "http://h:1", "--speed", "0"], "speed"),
    ):
        result = CliRunner().invoke(replay_command, [str(folder), *wrong])
        assert result.exit_code == 2
        assert message in result.output
