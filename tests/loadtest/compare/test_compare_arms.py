"""Which arms a comparison has, in which order, and how each is started."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from pydantic import ValidationError
from rich.console import Console

from loadtest.compare.arms import (
    Budgets,
    CompareConfig,
    ServedArm,
    asking_arguments,
    node_arguments,
    server_arguments,
)
from loadtest.compare.cli import compare_cards
from loadtest.compare.run import ArmMeasure, compared_snapshot
from loadtest.errors import CompareStoreError, ServerFailedError
from loadtest.load.cli import loadtest
from loadtest.load.config import OfferedLoad
from loadtest.load.generator import Generators
from loadtest.rounds import in_turn
from router.errors import PlanError
from serving.cli import main as shardrank
from shardrank_testing.command_line import flags_of

WORKLOAD = "merlin-tiny:0.0001"


SNAPSHOT = Path("m/films/1")


def by_flag(arguments: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    command, *rest = arguments
    rest.remove("--no-verify")
    return command, dict(zip(rest[::2], rest[1::2], strict=True))


def flags(arm: ServedArm, **config: object) -> tuple[str, dict[str, str]]:
    return by_flag(server_arguments(arm, CompareConfig.model_validate(config), SNAPSHOT, Path("r")))


def test_arms_are_the_cards_with_each_number_of_shards_and_the_first_is_the_baseline():
    assert [arm.name for arm in CompareConfig(cards=(1, 2, 4)).arms] == ["1 card", "2 cards", "4 cards"]
    arms = CompareConfig(cards=(1, 2), shards=(1, 3)).arms
    assert [arm.name for arm in arms] == [
        "1 shard of 1 card",
        "1 shard of 2 cards",
        "3 shards of 1 card",
        "3 shards of 2 cards",
    ]


@pytest.mark.parametrize("arms", [{"cards": (1,)}, {"cards": (2, 2)}, {"cards": tuple(range(1, 18))}])
def test_one_arm_the_same_arm_twice_or_too_many_are_refused(arms: dict[str, tuple[int, ...]]):
    with pytest.raises(ValidationError, match="2 to 16 different ones"):
        CompareConfig(**arms)


def test_each_arm_is_measured_once_in_a_round_and_each_is_first_in_turn():
    rounds = [in_turn(range(3), number) for number in range(6)]
    assert all(sorted(one) == [0, 1, 2] for one in rounds)
    for place in range(3):
        assert Counter(one[place] for one in rounds) == {0: 2, 1: 2, 2: 2}


def test_cards_keep_their_memory_and_shards_divide_the_hosts():
    budgets = Budgets(device="cuda", card_memory_gb=3, pinned_memory_gb=8, memory_budget_gb=6, hot_gb=0.5)
    command, alone = flags(ServedArm(cards=4), budgets=budgets)
    assert command == "serve"
    assert alone["--cards"] == "4"
    command, divided = flags(ServedArm(cards=2, shards=2), budgets=budgets)
    assert command == "up"
    assert (divided["--shards"], divided["--registry"]) == ("2", "r")
    for same in ("--card-memory-gb", "--hot-gb", "--device", "--http-port", "--snapshot"):
        assert alone[same] == divided[same]
    for flag, of_all in (("--pinned-memory-gb", 8), ("--memory-budget-gb", 6)):
        assert float(alone[flag]) == 2 * float(divided[flag]) == of_all


def test_serving_processes_that_hold_all_rows_each_divide_every_budget_and_those_that_ask_shards_none():
    budgets = Budgets(card_memory_gb=3, pinned_memory_gb=8, memory_budget_gb=6, hot_gb=0.5)
    memory = ("--card-memory-gb", "--pinned-memory-gb", "--memory-budget-gb", "--hot-gb")
    _, one = flags(ServedArm(cards=1), budgets=budgets)
    _, two = flags(ServedArm(cards=1), budgets=budgets, workers=2)
    assert [float(one[flag]) for flag in memory] == [2 * float(two[flag]) for flag in memory]
    sharded = [flags(ServedArm(cards=1, shards=4), budgets=budgets, workers=workers)[1] for workers in (1, 2)]
    assert [sharded[0][flag] for flag in memory] == [sharded[1][flag] for flag in memory]


def test_sharding_workers_and_number_format_reach_every_process_that_has_to_know():
    config = CompareConfig(cards=(1, 2), shards=(2,), hosts=True, sharding="table", workers=3, dtype="float32")
    arm = config.arms[0]
    serve, up = (flags(one, **config.model_dump())[1] for one in (ServedArm(cards=1), arm))
    _, node = by_flag(node_arguments(arm, config, SNAPSHOT, 1, "198.18.0.3:7000"))
    *asks, last, address = asking_arguments(arm, config, SNAPSHOT, ["198.18.0.1:7000", "198.18.0.3:7000"])
    assert (last, address) == ("--shard", "198.18.0.3:7000")
    for told in (serve, up, by_flag(tuple(asks))[1]):
        assert (told["--sharding"], told["--workers"], told["--dtype"]) == ("table", "3", "float32")
    assert (node["--shard"], node["--listen"], node["--sharding"]) == ("1/2", "198.18.0.3:7000", "table")
    assert not {"--workers", "--dtype"} & node.keys()


@pytest.mark.parametrize("arm", [ServedArm(cards=1), ServedArm(cards=1, shards=2)])
def test_servers_are_started_with_flags_that_their_commands_have(arm: ServedArm):
    budgets = Budgets(card_memory_gb=1, hot_gb=1, memory_budget_gb=1)
    command, given = flags(arm, budgets=budgets)
    assert isinstance(shardrank, click.Group)
    assert {*given, "--no-verify"} <= flags_of(shardrank, command)


def test_a_server_that_ends_before_it_is_ready_says_why(tmp_path: Path):
    config = CompareConfig(budgets=Budgets(device="cpu"))
    with Generators() as generators:
        measure = ArmMeasure(config, load(WORKLOAD), generators, tmp_path / "none" / "1", tmp_path, Console(quiet=True))
        why = r"(?s)1 card: server has ended before it served: exit code 1.*no such snapshot folder"
        with pytest.raises(ServerFailedError, match=why), measure.serving(ServedArm(cards=1)):
            raise AssertionError("it has nothing to serve")


def load(workload: str) -> OfferedLoad:
    return OfferedLoad(target="http://127.0.0.1:1", workload=workload)


def test_a_stores_model_is_served_if_it_is_the_workloads_and_refused_if_not(tmp_path: Path):
    config = CompareConfig()
    written = compared_snapshot(config, load(WORKLOAD), tmp_path)
    assert compared_snapshot(config, load(WORKLOAD), tmp_path) == written
    assert written == (tmp_path / "merlin-tiny" / "1").resolve()
    with pytest.raises(CompareStoreError, match=r"its tables .* are not those of the workload 'merlin-tiny:0\.001'"):
        compared_snapshot(config, load("merlin-tiny:0.001"), tmp_path)


def test_rows_are_written_in_the_order_that_the_sharding_needs_and_another_order_is_refused(tmp_path: Path):
    budgets = Budgets(replicate_bytes=0)
    by_range, by_hash = (CompareConfig(shards=(1, 2), budgets=budgets, sharding=one) for one in ("range", "hash"))
    written = compared_snapshot(by_range, load(WORKLOAD), tmp_path)
    assert compared_snapshot(by_range, load(WORKLOAD), tmp_path) == written
    with pytest.raises(PlanError, match="is stored with 'range'"):
        compared_snapshot(by_hash, load(WORKLOAD), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cards", "1,x"], "'1,x': expected numbers from 1 to 64"),
        (["--cards", "0,1"], "'0,1': expected numbers from 1 to 64"),
        (["--cards", "1"], "2 to 16 different ones"),
        (["--cards", "1,65"], "'1,65': expected numbers from 1 to 64"),
        (["--slo-ms", "2000"], "slo_ms: 2000 is more than timeout_ms"),
        (["--hosts"], "hosts: there are none without shards"),
        (["--shards", "1,2", "--delay-ms", "1"], "delay_ms: 1 is of the network between hosts"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_started(arguments: list[str], message: str):
    result = CliRunner().invoke(compare_cards, arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_the_command_is_one_of_loadtests():
    assert isinstance(loadtest, click.Group)
    assert {"--cards", "--shards", "--rounds", "--device", "--json", "--html"} <= flags_of(loadtest, "compare-cards")
