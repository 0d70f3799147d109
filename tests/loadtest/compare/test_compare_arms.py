"""Which arms a comparison has, in which order, and how each is started."""

from __future__ import annotations

import re
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
    node_addresses,
    node_arguments,
    serve_arguments,
    server_commands,
)
from loadtest.compare.cli import Numbers, compare_cards
from loadtest.compare.measure import ArmMeasure
from loadtest.compare.run import compared_snapshot
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
    """Of the process that holds rows: a shard node, or the one that serves."""
    checked = CompareConfig.model_validate(config)
    if arm.shards is None:
        return by_flag(serve_arguments(arm, checked, SNAPSHOT))
    return by_flag(node_arguments(arm, checked, SNAPSHOT, arm.shards - 1, "unix:1.sock"))


def names(**config: object) -> list[str]:
    return [arm.name for arm in CompareConfig.model_validate(config).arms]


def test_arms_are_the_cards_and_then_the_shards_over_each_transport_and_the_first_is_the_baseline():
    assert names(cards=(1, 2, 4)) == ["1 card", "2 cards", "4 cards"]
    assert names(cards=(1, 2), shards=(1, 3), transports=("unix", "tcp")) == [
        "1 card",
        "2 cards",
        "1 shard, Unix socket",
        "1 shard, TCP",
        "3 shards, Unix socket",
        "3 shards, TCP",
    ]


def test_shards_have_the_first_number_of_cards_and_unix_sockets():
    assert names(cards=(4, 1), shards=(2,)) == ["4 cards", "1 card", "2 shards of 4 cards, Unix socket"]


def test_the_whole_table_of_single_against_many_fits():
    assert len(names(cards=(1, 2, 4, 8), shards=(1, 2, 4), transports=("unix", "tcp"))) == 10


@pytest.mark.parametrize("arms", [{"cards": (1,)}, {"cards": (2, 2)}, {"cards": tuple(range(1, 18))}])
def test_one_arm_the_same_arm_twice_or_too_many_are_refused(arms: dict[str, tuple[int, ...]]):
    with pytest.raises(ValidationError, match="2 to 16 different ones"):
        CompareConfig(**arms)


def test_shares_of_capacity_may_be_left_out():
    shares = Numbers(100, may_be_empty=True).convert("", None, None)
    assert CompareConfig(shares=shares).shares == ()
    with pytest.raises(click.BadParameter, match="'': expected numbers from 1 to 64"):
        Numbers(64).convert("", None, None)


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
    assert command == "shard-node"
    assert divided["--shard"] == "1/2"
    for same in ("--card-memory-gb", "--hot-gb", "--device", "--snapshot"):
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
    config = CompareConfig(cards=(1, 2), shards=(2,), transports=("tcp",), sharding="table", workers=3, dtype="float32")
    arm = config.arms[-1]
    alone = flags(config.arms[0], **config.model_dump())[1]
    _, node = by_flag(node_arguments(arm, config, SNAPSHOT, 1, "198.18.0.3:7000"))
    *asks, last, address = serve_arguments(arm, config, SNAPSHOT, ["198.18.0.1:7000", "198.18.0.3:7000"])
    assert (last, address) == ("--shard", "198.18.0.3:7000")
    asking = by_flag(tuple(asks))[1]
    for told in (alone, asking):
        assert (told["--sharding"], told["--workers"], told["--dtype"]) == ("table", "3", "float32")
    assert (node["--shard"], node["--listen"], node["--sharding"]) == ("1/2", "198.18.0.3:7000", "table")
    assert not {"--workers", "--dtype"} & node.keys()
    # Who asks has no rows: what rows may take is of the nodes alone.
    assert not {"--device", "--pinned-memory-gb"} & asking.keys()


def test_tables_are_divided_however_small_they_are_unless_it_is_asked_for():
    arm = ServedArm(cards=1, shards=2)
    assert flags(arm)[1]["--replicate-bytes"] == "0"
    assert flags(arm, budgets=Budgets(replicate_bytes=4096))[1]["--replicate-bytes"] == "4096"


def test_shard_nodes_are_started_before_what_serves_which_is_told_where_they_listen(tmp_path: Path):
    config = CompareConfig(cards=(1,), shards=(2,), transports=("unix", "tcp"))
    for arm in config.arms:
        *nodes, serves = server_commands(arm, config, SNAPSHOT, tmp_path)
        assert [one.name for one in (*nodes, serves)][: len(nodes)] == ["shard 0", "shard 1"][: arm.shards or 0]
        assert serves.name == "server"
        listen = [one.line[one.line.index("--listen") + 1] for one in nodes]
        asked = [address for flag, address in zip(serves.line, serves.line[1:], strict=False) if flag == "--shard"]
        assert listen == asked
        assert len({one.log for one in (*nodes, serves)}) == len(nodes) + 1


def test_nodes_listen_on_sockets_of_their_start_or_on_free_ports_of_this_machine(tmp_path: Path):
    unix, tcp = (ServedArm(cards=1, shards=3, transport=transport) for transport in ("unix", "tcp"))
    assert node_addresses(unix, tmp_path) == tuple(f"unix:{tmp_path}/{number}.sock" for number in range(3))
    addresses = node_addresses(tcp, tmp_path)
    assert len(set(addresses)) == 3
    for address in addresses:
        assert re.fullmatch(r"127\.0\.0\.1:\d+", address)
    assert node_addresses(ServedArm(cards=2), tmp_path) == ()


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
        (["--transport", "tcp"], "transports: ['tcp'] are between shards, of which there are none"),
        (["--shards", "2", "--transport", "tcp,shm"], "'tcp,shm': expected some of unix,tcp"),
        (["--shards", "2", "--transport", "tcp,tcp"], "2 to 16 different ones"),
        (["--shares", "30,101"], "'30,101': expected numbers from 1 to 100"),
        (["--shares", "30,30"], "shares: [30, 30] are not different percents from 1 to 100"),
        (["--hosts", "--shards", "2"], "--hosts is gone: use --transport tcp"),
        (["--shards", "2", "--hosts"], "--hosts is gone: use --transport tcp"),
        (["--delay-ms", "1"], "--delay-ms is gone: use `shardrank plan --network-us`"),
        (["--delay-ms=1"], "--delay-ms is gone: use `shardrank plan --network-us`"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_started(arguments: list[str], message: str):
    result = CliRunner().invoke(compare_cards, arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_the_command_is_one_of_loadtests():
    assert isinstance(loadtest, click.Group)
    assert {"--cards", "--shards", "--transport", "--shares", "--rounds", "--device", "--json", "--html"} <= flags_of(
        loadtest, "compare-cards"
    )
