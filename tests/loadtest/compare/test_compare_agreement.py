"""Arms must give the same scores: what is compared, and how a server is asked for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from loadtest.compare.arms import Budgets, CompareConfig, Dtype, ServedArm
from loadtest.compare.measure import ArmMeasure, ArmScores, check_agreement, largest_difference, served_dtype
from loadtest.compare.run import compared_snapshot
from loadtest.errors import GeneratorError, ScoresDifferError, ServerFailedError
from loadtest.load.config import OfferedLoad
from loadtest.load.generator import Generators, open_payloads
from loadtest.workloads.payloads import APIS, Api
from serving.embedded import Ranker

ONE, TWO = ServedArm(cards=1), ServedArm(cards=2)
CONFIG = CompareConfig(cards=(1, 2))


def answered(*scores: list[float], dtype: Dtype = "float32") -> ArmScores:
    return ArmScores(dtype, tuple(np.array(one, np.float32) for one in scores))


EXPECTED = answered([0.5, 0.25], [0.125, 0.75, 0.5])


def test_scores_that_differ_by_rounding_agree():
    found = answered([0.5, 0.25 + 6e-7], [0.125, 0.75 - 2e-7, 0.5])
    check_agreement(ONE, EXPECTED, TWO, found, CONFIG)
    assert largest_difference([EXPECTED, found]) == pytest.approx(6e-7, rel=0.1)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            [0.125, 0.75, 0.501],
            r"2 cards against 1 card in float32, request 1, candidate 2: its score is 0\.501000, expected 0\.500000; "
            r"they differ by 0\.001, allowed is 1e-05",
        ),
        ([0.125, 0.75, float("nan")], "2 cards .*, request 1, candidate 2: its score is nan"),
        ([0.125, 0.75], "2 cards against 1 card in float32, request 1: 2 scores, 3 expected"),
    ],
)
def test_another_score_ends_the_comparison_and_the_message_names_arm_request_and_difference(
    second: list[float], message: str
):
    with pytest.raises(ScoresDifferError, match=message):
        check_agreement(ONE, EXPECTED, TWO, answered([0.5, 0.25], second), CONFIG)


def test_bfloat16_may_differ_by_its_own_rounding_and_by_no_more():
    expected = answered([0.5], dtype="bfloat16")
    check_agreement(ONE, expected, TWO, answered([0.5035], dtype="bfloat16"), CONFIG)
    with pytest.raises(ScoresDifferError, match=r"in bfloat16, .*allowed is 0\.01"):
        check_agreement(ONE, expected, TWO, answered([0.52], dtype="bfloat16"), CONFIG)


@pytest.mark.parametrize(("wire_dtype", "agree"), [("float32", False), ("float16", True), ("auto", False)])
def test_shards_may_differ_by_the_rounding_of_float16_sums_where_they_are_told_to_send_such(wire_dtype, agree):
    config = CompareConfig(cards=(1,), shards=(2,), wire_dtype=wire_dtype)
    first, shards = config.arms
    found = answered([0.5004])
    if agree:
        check_agreement(first, answered([0.5]), shards, found, config)
    else:
        with pytest.raises(ScoresDifferError, match=r"allowed is 1e-05"):
            check_agreement(first, answered([0.5]), shards, found, config)


def test_an_arm_that_computes_in_another_number_format_is_no_equal():
    with pytest.raises(ScoresDifferError, match="2 cards: its dense model is computed in bfloat16, that of 1 card in"):
        check_agreement(ONE, answered([0.5]), TWO, answered([0.5], dtype="bfloat16"), CONFIG)


def test_a_server_gives_the_models_scores_over_every_api_and_says_its_number_format(tmp_path: Path):
    loads: dict[Api, OfferedLoad] = {
        api: OfferedLoad(
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
    pools = {api: open_payloads(load)[1] for api, load in loads.items()}
    with Ranker.open(snapshot, dtype="float32") as ranker:
        expected = ranker.rank(json.loads(pools["json"][1].body))["scores"]
    with Generators() as generators:
        measure = ArmMeasure(config, loads["json"], generators, snapshot, tmp_path, Console(quiet=True))
        with measure.serving(ONE) as server:
            assert served_dtype(ONE, server.http_port, pools["json"].model) == "float32"
            with pytest.raises(ServerFailedError, match=r"1 card does not describe its model at .* 'none' is not"):
                served_dtype(ONE, server.http_port, "none")
            for api, load in loads.items():
                found = generators.scores(load.model_copy(update={"target": server.target(api)}), 1)
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6, err_msg=api)
            nowhere = loads["oip-grpc"].model_copy(update={"target": f"grpc://127.0.0.1:{server.http_port}"})
            with pytest.raises(GeneratorError, match="oip-grpc: no scores of request 1: "):
                generators.scores(nowhere, 1)
