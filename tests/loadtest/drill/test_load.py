"""The load of the drills against a real server: every answer is judged and recorded with its API."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.errors import ConfigError
from loadtest.drill.config import FleetDrillConfig
from loadtest.drill.fleet import ANSWER, KINDS, TimeSpan, overlaps, running_load
from loadtest.drill.oracle import APIS, oracle_spec, write_oracle
from loadtest.errors import LoadError
from loadtest.servers import Server
from serving.config import ServeConfig
from serving.embedded import ModelSource, load_served_model
from serving.rank.service import RankingService
from serving.server import running_server

SMALL = FleetDrillConfig(items=700, users=300, tags=50, rate=120)
UNDER_LOAD_S = 1.0


@contextlib.asynccontextmanager
async def serving(folder: Path, version: int = 1) -> AsyncIterator[Server]:
    """Serves a version of the oracle."""
    snapshot = write_oracle(oracle_spec(SMALL), folder, version)
    service = RankingService(expected_models=[SMALL.model])
    service.install(load_served_model(ModelSource(snapshot=snapshot, dtype="float32"), service))
    try:
        async with running_server(service, ServeConfig(http_port=0, grpc_port=0, shutdown_delay_s=0)) as server:
            yield Server(server.http_port, server.grpc_port, ())
    finally:
        await asyncio.to_thread(service.close)


@pytest.mark.nightly
@pytest.mark.parametrize("version", [1, 2])
async def test_right_answers_over_all_apis(tmp_path: Path, version: int):
    file = tmp_path / "answers.npy"
    async with serving(tmp_path, version) as server, running_load(SMALL, server, file) as load:
        await asyncio.sleep(UNDER_LOAD_S)
        answers, _, examples = await load.stop()
    # Each was due in its turn, the load came to it when it was due or later, and it ended after that.
    np.testing.assert_allclose(np.diff(np.sort(answers["due"])), 1 / SMALL.rate, atol=1e-6)
    assert (answers["due"] <= answers["turn"] + 1e-6).all()
    assert (answers["turn"] < answers["ended"]).all()
    assert set(answers["code"]) == {KINDS.index("ok")}, examples
    assert set(answers["version"]) == {version}
    assert set(answers["api"]) == set(range(len(APIS)))
    np.testing.assert_array_equal(np.load(file), answers)


@pytest.mark.parametrize(
    ("changed", "kind", "example"),
    [
        ({"model": "nosuch"}, "failed", " grpc lookup: "),
        # It expects vectors of half the length.
        ({"embedding_dim": 8}, "wrong", " grpc lookup: version 1 with "),
    ],
)
@pytest.mark.nightly
async def test_answers_that_are_not_right(tmp_path: Path, changed: dict[str, object], kind: str, example: str):
    config = SMALL.model_copy(update=changed)
    async with serving(tmp_path) as server, running_load(config, server, tmp_path / "answers.npy") as load:
        await asyncio.sleep(UNDER_LOAD_S)
        answers, _, examples = await load.stop()
    assert set(answers[answers["api"] >= 2]["code"]) == {KINDS.index(kind)}, examples
    assert any(example in text for text in examples)


@pytest.mark.nightly
async def test_the_load_outlives_its_server(tmp_path: Path):
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(tmp_path))
        async with running_load(SMALL, server, tmp_path / "answers.npy") as load:
            await asyncio.sleep(UNDER_LOAD_S)
            await stack.aclose()
            gone = time.monotonic()
            await asyncio.sleep(UNDER_LOAD_S)
            answers, _, _ = await load.stop()
    failed = answers["code"] == KINDS.index("failed")
    assert set(answers["code"][~failed]) == {KINDS.index("ok")}
    assert failed[answers["turn"] > gone].all()
    assert set(answers["version"][failed]) == {0}


@pytest.mark.nightly
async def test_a_killed_load_ends_the_drill(tmp_path: Path):
    async def drill() -> None:
        async with serving(tmp_path) as server, running_load(SMALL, server, tmp_path / "answers.npy") as load:
            os.kill(load.process_id, signal.SIGKILL)
            await asyncio.Event().wait()

    with pytest.raises(LoadError, match="ended by itself"):
        await drill()


@pytest.mark.nightly
async def test_a_load_that_can_not_begin_says_why(tmp_path: Path):
    async with serving(tmp_path) as server:
        with pytest.raises(ConfigError, match="No such file or directory"):
            await running_load(SMALL, server, tmp_path / "nosuch" / "answers.npy").__aenter__()


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), max_size=9),
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), max_size=20),
)
def test_overlaps_are_those_of_the_definition(spans: list[tuple[float, float]], requests: list[tuple[float, float]]):
    answers = np.zeros(len(requests), ANSWER)
    answers["due"] = [begin for begin, _ in requests]
    answers["ended"] = [begin + duration for begin, duration in requests]
    spans = [TimeSpan(begin, begin + duration) for begin, duration in spans]
    expected = [any(span.begin <= row["ended"] and row["due"] <= span.end for span in spans) for row in answers]
    assert overlaps(answers, spans).tolist() == expected
