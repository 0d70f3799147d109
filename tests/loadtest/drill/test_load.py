"""The load of the drills against a real server: every answer is judged and recorded with its API."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.drill.config import OracleShape
from loadtest.drill.fleet import RunningLoad, running_load
from loadtest.drill.load import APIS, RECORD, LoadConfig, TimeSpan, overlaps
from loadtest.drill.oracle import Kind, oracle_spec, write_oracle
from serving.errors import ChildFailedError
from serving.rank.service import RankingService
from serving.server import ServerConfig, running_server
from serving.versions.loading import ModelSource, load_served_model

SMALL = OracleShape(items=700, users=300, tags=50)
RATE = 120


@contextlib.asynccontextmanager
async def serving(folder: Path, version: int = 1, shape: OracleShape = SMALL) -> AsyncIterator[LoadConfig]:
    """Serves a version of the oracle, and yields the load of a shape on it."""
    snapshot = write_oracle(oracle_spec(SMALL), folder, version)
    service = RankingService(expected_models=[SMALL.model])
    service.install(load_served_model(ModelSource(snapshot=snapshot, dtype="float32"), service))
    try:
        async with running_server(service, ServerConfig(http_port=0, grpc_port=0, shutdown_delay_s=0)) as server:
            addresses = (f"http://{server.host}:{server.http_port}", f"grpc://{server.host}:{server.grpc_port}")
            yield LoadConfig(addresses=addresses, shape=shape, rate=RATE, answers=folder / "load.answers")
    finally:
        await asyncio.to_thread(service.close)


async def until(load: RunningLoad, kind: Kind, answers: int, apis: int = 1) -> None:
    """Waits for so many answers of a kind, over so many APIs."""
    while True:
        load.process.check()
        so_far = np.fromfile(load.path, RECORD)
        so_far = so_far[so_far["kind"] == kind]
        if len(so_far) >= answers and len(np.unique(so_far["api"])) >= apis:
            return
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("version", [1, 2])
async def test_right_answers_over_all_apis(tmp_path: Path, version: int):
    async with serving(tmp_path, version) as config, running_load(config) as load:
        await until(load, Kind.OK, 60, apis=len(APIS))
        answers = await load.stop()
    # Each was due in its turn, the load came to it when it was due or later, and it ended after that.
    np.testing.assert_allclose(np.diff(np.sort(answers["intended"])), 1 / RATE, atol=1e-6)
    assert (answers["intended"] <= answers["turn"]).all()
    assert (answers["turn"] < answers["ended"]).all()
    assert set(answers["kind"]) == {Kind.OK}, load.details()
    assert set(answers["version"]) == {version}


@pytest.mark.parametrize(
    ("changed", "kind", "detail"),
    [
        ({"model": "nosuch"}, Kind.FAILED, "failed grpc lookup: grpc_not_found: "),
        # It expects vectors of half the length.
        ({"embedding_dim": 8}, Kind.WRONG, "wrong grpc lookup: version 1 with "),
    ],
)
async def test_answers_that_are_not_right(tmp_path: Path, changed: dict[str, object], kind: Kind, detail: str):
    async with serving(tmp_path, shape=SMALL.model_copy(update=changed)) as config, running_load(config) as load:
        await until(load, kind, 12, apis=2)
        answers = await load.stop()
    assert set(answers[answers["api"] >= 2]["kind"]) == {kind}, load.details()
    assert any(detail in line for line in load.details())


async def test_the_load_outlives_its_server(tmp_path: Path):
    async with contextlib.AsyncExitStack() as server:
        config = await server.enter_async_context(serving(tmp_path))
        async with running_load(config) as load:
            await until(load, Kind.OK, 12)
            await server.aclose()
            gone = time.monotonic()
            await until(load, Kind.FAILED, 36)
            answers = await load.stop()
    assert set(answers["kind"]) <= {Kind.OK, Kind.FAILED}
    assert set(answers["kind"][answers["turn"] > gone]) == {Kind.FAILED}
    assert set(answers["version"][answers["kind"] == Kind.FAILED]) == {0}


async def test_a_load_that_can_not_begin_says_why(tmp_path: Path):
    addresses = ("http://nosuchhost.invalid:1", "grpc://127.0.0.1:1")
    with pytest.raises(ChildFailedError, match="gaierror"):
        async with running_load(LoadConfig(addresses=addresses, shape=SMALL, rate=1, answers=tmp_path / "a")):
            pass


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), max_size=9),
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), max_size=20),
)
def test_overlaps_are_those_of_the_definition(spans: list[tuple[float, float]], requests: list[tuple[float, float]]):
    answers = np.zeros(len(requests), RECORD)
    answers["intended"] = [begin for begin, _ in requests]
    answers["ended"] = [begin + duration for begin, duration in requests]
    spans = [TimeSpan(begin, begin + duration) for begin, duration in spans]
    expected = [any(span.begin <= row["ended"] and row["intended"] <= span.end for span in spans) for row in answers]
    assert overlaps(answers, spans).tolist() == expected
