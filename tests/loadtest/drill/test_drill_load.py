from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from loadtest.drill.load import (
    APIS,
    RECORD,
    AnswerLog,
    DrillLoad,
    DrillLoadConfig,
    RunningLoad,
    read_answers,
    read_details,
    running_load,
)
from loadtest.drill.oracle import OK, Kind, OracleShape, OracleWriter, Verdict
from loadtest.errors import LoadProcessError
from serving.rank.service import RankingService
from serving.server import Listening, ServerConfig, running_server
from serving.versions.loading import ModelSource, load_served_model
from shardrank_testing.serving_api import run

SMALL = OracleShape(items=700, users=300, tags=50)


@contextlib.asynccontextmanager
async def serving(store: Path, version: int) -> AsyncIterator[tuple[RankingService, Listening]]:
    """A version of the oracle behind real ports."""
    folder = OracleWriter(SMALL).write(store, version)
    service = RankingService(expected_models=[SMALL.model])
    service.install(load_served_model(ModelSource(snapshot=folder, dtype="float32"), service))
    try:
        async with running_server(service, ServerConfig(http_port=0, grpc_port=0, shutdown_delay_s=0)) as listening:
            yield service, listening
    finally:
        await asyncio.to_thread(service.close)


def config_for(listening: Listening, answers: Path, rate: float = 120) -> DrillLoadConfig:
    return DrillLoadConfig(
        addresses=(f"http://{listening.host}:{listening.http_port}", f"grpc://{listening.host}:{listening.grpc_port}"),
        shape=SMALL,
        rate=rate,
        answers=answers,
        questions_each=8,
    )


async def until(load: RunningLoad, answers: int, kind: Kind, apis: int = 1) -> None:
    """Waits for so many answers of a kind, over so many APIs."""
    while True:
        found = load.answers()
        found = found[found["kind"] == kind]
        if len(found) >= answers and len(np.unique(found["api"])) >= apis:
            return
        await asyncio.sleep(0.05)


def reached(answers: np.ndarray, details: list[str]) -> np.ndarray:
    """The answers that came from the server.

    On a machine that is busy with other things its loop may not get a core for a second: then a connection does not
    come about in time, which is gRPC's, or a deadline passes.
    """
    late = re.compile(r"^[0-9.]+ failed .*: (unavailable: .*timed out|deadline_exceeded: |overloaded: )")
    slow = [line for line in details if late.match(line)]
    lost = answers[answers["kind"] == Kind.FAILED]
    lost = lost[np.isin(np.char.mod("%.3f", lost["intended"]), [line.split()[0] for line in slow])]
    return answers[~np.isin(answers["intended"], lost["intended"])]


@pytest.mark.parametrize("version", [1, 2])
def test_every_answer_of_a_running_server_is_right_over_both_apis(tmp_path: Path, version: int):
    async def main() -> None:
        async with (
            serving(tmp_path, version) as (_, listening),
            running_load(config_for(listening, tmp_path / "load.answers")) as load,
        ):
            await until(load, 60, Kind.OK, apis=len(APIS))
            answers = await load.stop()
            details = load.details(len(answers))
        # Each was due in its turn, was sent when it was due or later, and ended after that.
        np.testing.assert_allclose(np.diff(np.sort(answers["intended"])), 1 / 120, atol=0.002)
        assert (answers["intended"] <= answers["sent"]).all()
        assert (answers["sent"] < answers["ended"]).all()
        answers = reached(answers, details)
        assert set(answers["kind"]) == {Kind.OK}, details
        assert set(answers["version"]) == {version}
        assert set(answers["api"]) == set(range(len(APIS)))

    run(main())


def test_errors_of_the_server_are_failed_answers_with_their_reason(tmp_path: Path):
    async def main() -> None:
        async with (
            serving(tmp_path, 1) as (_, listening),
            running_load(
                config_for(listening, tmp_path / "a").model_copy(
                    update={"shape": SMALL.model_copy(update={"model": "x"})}
                )
            ) as load,
        ):
            for told in ("failed http rank: model_not_found", "failed grpc lookup: model_not_found"):
                while not any(told in line for line in load.details(1000)):  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.05)
            answers = await load.stop()
        assert set(answers["kind"]) == {Kind.FAILED}
        assert set(answers["version"]) == {0}

    run(main())


def test_a_server_that_goes_away_is_failed_answers_and_the_load_goes_on(tmp_path: Path):
    async def main() -> None:
        async with contextlib.AsyncExitStack() as server:
            _, listening = await server.enter_async_context(serving(tmp_path, 1))
            async with running_load(config_for(listening, tmp_path / "a")) as load:
                await until(load, 12, Kind.OK)
                await server.aclose()
                gone = time.monotonic()
                await until(load, int((load.answers()["kind"] == Kind.FAILED).sum()) + 24, Kind.FAILED)
                answers = await load.stop()
        assert set(answers["kind"]) <= {Kind.OK, Kind.FAILED}
        assert set(answers["kind"][answers["sent"] > gone]) == {Kind.FAILED}

    run(main())


def test_answers_of_the_wrong_oracle_are_not_taken_for_right(tmp_path: Path):
    async def main() -> None:
        async with serving(tmp_path, 1) as (_, listening):
            # It expects vectors of half the length.
            other = config_for(listening, tmp_path / "a").model_copy(
                update={"shape": SMALL.model_copy(update={"embedding_dim": 8})}
            )
            async with running_load(other) as load:
                await until(load, 12, Kind.WRONG)
                answers = await load.stop()
                details = load.details(len(answers))
        lookups = answers[answers["api"] >= 2]
        assert Kind.OK not in lookups["kind"]
        assert Kind.MIXED not in lookups["kind"]
        assert set(reached(lookups, details)["kind"]) == {Kind.WRONG}, details

    run(main())


def test_a_load_that_can_not_begin_says_why(tmp_path: Path):
    async def main() -> None:
        config = DrillLoadConfig(
            addresses=("http://127.0.0.1:1", "grpc://127.0.0.1:1"), shape=SMALL, rate=1, answers=tmp_path / "a"
        )
        (tmp_path / "a").mkdir()
        with pytest.raises(LoadProcessError, match="IsADirectoryError"):
            async with running_load(config):
                pass

    run(main())


def test_the_log_can_be_read_while_it_grows_and_a_record_that_is_half_written_is_left_out(tmp_path: Path):
    path = tmp_path / "a"
    log = AnswerLog(path)
    log.add(0, 1.0, 1.5, 2.0, 7, OK)
    log.add(3, 2.0, 2.0, 4.0, 0, Verdict(Kind.FAILED, "no answer within 5 s"))
    answers = read_answers(path)
    assert answers.tolist() == [(1.0, 1.5, 2.0, 7, 0, 0), (2.0, 2.0, 4.0, 0, 3, 1)]
    assert read_details(path) == ["2.000 failed grpc lookup: no answer within 5 s"]
    with path.open("ab") as file:
        file.write(b"\0" * (RECORD.itemsize - 1))
    assert read_answers(path, 1).tolist() == answers[1:].tolist()
    assert read_answers(path, 2).size == 0
    log.close()


def test_a_load_that_is_ended_waits_for_the_answers_that_are_out(tmp_path: Path):
    async def main() -> None:
        log, asked = AnswerLog(tmp_path / "a"), asyncio.Event()

        async def ask(number: int) -> tuple[int, Callable[[], Verdict]]:
            asked.set()
            await asyncio.sleep(0.05)
            return 7, lambda: OK

        load = asyncio.create_task(DrillLoad([ask], [0], 1.0, log).run())
        await asked.wait()
        load.cancel()
        await load
        assert read_answers(tmp_path / "a")["version"].tolist() == [7]

    run(main())


def test_a_defect_of_the_load_ends_it(tmp_path: Path):
    async def ask(number: int) -> tuple[int, Callable[[], Verdict]]:
        raise KeyError(number)

    with pytest.raises(ExceptionGroup) as told:
        run(DrillLoad([ask], [0], 1.0, AnswerLog(tmp_path / "a")).run())
    assert isinstance(told.value.exceptions[0], KeyError)
