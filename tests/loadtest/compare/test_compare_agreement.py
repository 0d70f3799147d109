"""Arms must give the same scores: what is compared, and how a server is asked for it."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import numpy as np
import pytest

from loadtest.compare.closed_process import ScoresAsked
from loadtest.compare.command import compared_snapshot
from loadtest.compare.config import Budgets, CompareConfig, Dtype, ServedArm
from loadtest.compare.errors import ArmsDisagreeError, ArmServerError
from loadtest.compare.rounds import ArmScores, check_agreement, largest_difference, served_dtype
from loadtest.compare.server import free_ports, running_arm, server_commands
from loadtest.load.config import LoadConfig
from loadtest.load.generator_process import open_payloads
from loadtest.load.messages import ProcessConfig
from loadtest.serving_cost.errors import HelperProcessError
from loadtest.serving_cost.helper_process import HelperProcess
from loadtest.serving_cost.messages import Scores
from loadtest.serving_cost.one_answer import scores_of
from loadtest.serving_cost.servers import Server
from loadtest.workloads.payloads import APIS, Api
from serving.embedded import Ranker

ONE, TWO = ServedArm(cards=1), ServedArm(cards=2)


def answered(*scores: list[float], dtype: Dtype = "float32") -> ArmScores:
    return ArmScores(dtype, tuple(np.array(one, np.float32) for one in scores))


EXPECTED = answered([0.5, 0.25], [0.125, 0.75, 0.5])


def test_scores_that_differ_by_rounding_agree():
    found = answered([0.5, 0.25 + 6e-7], [0.125, 0.75 - 2e-7, 0.5])
    check_agreement(ONE, EXPECTED, TWO, found)
    assert largest_difference([EXPECTED, found]) == pytest.approx(6e-7, rel=0.1)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            [0.125, 0.75, 0.501],
            r"2 cards, request 1, candidate 2: its score is 0\.501000, but 0\.500000 with 1 card; they differ by "
            r"0\.001, allowed is 1e-05 in float32",
        ),
        ([0.125, 0.75, float("nan")], "2 cards, request 1, candidate 2: its score is nan"),
        ([0.125, 0.75], "2 cards, request 1: 2 scores, but 3 with 1 card"),
    ],
)
def test_another_score_ends_the_comparison_and_the_message_names_arm_request_and_difference(
    second: list[float], message: str
):
    with pytest.raises(ArmsDisagreeError, match=message):
        check_agreement(ONE, EXPECTED, TWO, answered([0.5, 0.25], second))


def test_bfloat16_may_differ_by_its_own_rounding_and_by_no_more():
    expected = answered([0.5], dtype="bfloat16")
    check_agreement(ONE, expected, TWO, answered([0.5035], dtype="bfloat16"))
    with pytest.raises(ArmsDisagreeError, match=r"allowed is 0\.01 in bfloat16"):
        check_agreement(ONE, expected, TWO, answered([0.52], dtype="bfloat16"))


def test_an_arm_that_computes_in_another_number_format_is_no_equal():
    with pytest.raises(ArmsDisagreeError, match="2 cards: its dense model is computed in bfloat16, that of 1 card in"):
        check_agreement(ONE, answered([0.5]), TWO, answered([0.5], dtype="bfloat16"))


def test_a_server_gives_the_models_scores_over_every_api_and_says_its_number_format(tmp_path: Path):
    loads: dict[Api, LoadConfig] = {
        api: LoadConfig(
            target=f"{'grpc' if 'grpc' in api else 'http'}://127.0.0.1:1",
            api=api,
            workload="merlin-tiny:0.0001",
            candidates="3",
            requests=2,
        )
        for api in APIS
    }
    config = CompareConfig(budgets=Budgets(device="cpu"), dtype="float32")
    snapshot = compared_snapshot(config, loads["json"], tmp_path / "store")
    pools = {api: open_payloads(ProcessConfig(load=load, process=0))[1] for api, load in loads.items()}
    with Ranker.open(snapshot, dtype="float32") as ranker:
        expected = ranker.rank(json.loads(pools["json"][1].body))["scores"]

    async def main() -> None:
        ports = free_ports(random.Random())
        async with running_arm(ONE, server_commands(ONE, config, snapshot, ports, tmp_path), ports):
            assert await served_dtype(ONE, ports.http, pools["json"].model) == "float32"
            with pytest.raises(ArmServerError, match=r"1 card does not describe its model at .* 'none' is not"):
                await served_dtype(ONE, ports.http, "none")
            for pool in pools.values():
                found = await asyncio.to_thread(scores_of, Server(ports.http, ports.grpc, ()), pool, 1)
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6, err_msg=pool.api)
            asked = ScoresAsked(http_port=ports.http, grpc_port=ports.grpc, request=1)
            with HelperProcess("loadtest.compare.closed_process", loads["oip-grpc"]) as client:
                told = await asyncio.to_thread(client.ask, asked, Scores, 60)
                np.testing.assert_allclose(told.scores, expected, rtol=0, atol=1e-6)
                nowhere = asked.model_copy(update={"grpc_port": ports.http})
                with pytest.raises(HelperProcessError, match="WrongAnswerError: oip-grpc: request 1: "):
                    await asyncio.to_thread(client.ask, nowhere, Scores, 60)

    asyncio.run(main())
