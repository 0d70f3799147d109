"""Which arms a comparison has, how each is started, and which settings are refused."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from loader.errors import ConfigError
from loadtest.cli import compare_cards
from loadtest.compare import CompareConfig, ServedArm, compared_snapshot, node_addresses, server_commands
from loadtest.load.config import OfferedLoad
from router.errors import PlanError
from serving.cli import main as shardrank
from shardrank_testing.command_line import flags_of

WORKLOAD = "merlin-tiny:0.0001"
SNAPSHOT = Path("m/films/1")
MEMORY = ("--card-memory-gb", "--hot-gb", "--pinned-memory-gb", "--memory-budget-gb")
BUDGETS = {"card_memory_gb": 3, "pinned_memory_gb": 8, "memory_budget_gb": 6, "hot_gb": 0.5}


def flags(arm: ServedArm, folder: Path, **config: object) -> list[dict[str, str]]:
    """Of each process of an arm, the one that serves last; `command` is its command."""
    found = []
    for command in server_commands(arm, CompareConfig.model_validate(config), SNAPSHOT, folder):
        start = command.line.index("--no-verify")
        arguments = command.line[start + 1 :]
        pairs = zip(arguments[::2], arguments[1::2], strict=True)
        found.append({"command": command.line[start - 1], **dict(pairs)})
    return found


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"cards": (1, 2, 4)}, ["1 card", "2 cards", "4 cards"]),
        ({"cards": (4, 1), "shards": (2,)}, ["4 cards", "1 card", "2 shards of 4 cards, Unix socket"]),
        (
            {"cards": (1,), "shards": (1, 3), "transports": ("unix", "tcp")},
            ["1 card", "1 shard, Unix socket", "1 shard, TCP", "3 shards, Unix socket", "3 shards, TCP"],
        ),
    ],
)
def test_arms_are_cards_and_then_shards_over_each_transport(config, names):
    assert [arm.name for arm in CompareConfig(**config).arms] == names


def test_budgets_are_divided_by_those_that_hold_rows(tmp_path):
    """Shards divide the host's memory, each has cards of its own; serving processes with rows divide all."""

    def shares(arm: ServedArm, workers: int = 1) -> list[float]:
        holder = flags(arm, tmp_path, workers=workers, **BUDGETS)[0]
        return [float(alone[flag]) / float(holder[flag]) for flag in MEMORY]

    [alone] = flags(ServedArm(cards=4), tmp_path, **BUDGETS)
    assert (alone["command"], alone["--cards"]) == ("serve", "4")
    assert shares(ServedArm(cards=2, shards=2)) == shares(ServedArm(cards=2, shards=2), workers=2) == [1, 1, 2, 2]
    assert shares(ServedArm(cards=4), workers=2) == [2, 2, 2, 2]


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_every_process_has_the_flags_that_it_needs(tmp_path, transport):
    settings = {"sharding": "table", "workers": 3, "dtype": "float32", "replicate_bytes": 4096, **BUDGETS}
    arm = ServedArm(cards=1, shards=2, transport=transport)
    *nodes, serves = flags(arm, tmp_path, **settings)
    for process in (*nodes, serves):
        assert (process["--sharding"], process["--replicate-bytes"]) == ("table", "4096")
    assert (serves["--workers"], serves["--dtype"]) == ("3", "float32")
    # Rows are in the nodes alone.
    assert not {*MEMORY, "--device"} & serves.keys()
    assert not {"--workers", "--dtype"} & nodes[0].keys()
    assert [(node["command"], node["--shard"]) for node in nodes] == [("shard-node", "0/2"), ("shard-node", "1/2")]
    commands = server_commands(arm, CompareConfig(), SNAPSHOT, tmp_path)
    assert [command.name for command in commands] == ["shard 0", "shard 1", "server"]
    assert len({command.log for command in commands}) == 3
    line = commands[-1].line
    asked = [address for flag, address in pairwise(line) if flag == "--shard"]
    assert asked == [command.line[command.line.index("--listen") + 1] for command in commands[:2]]
    assert isinstance(shardrank, click.Group)
    for process in (*nodes, serves, *flags(ServedArm(cards=1), tmp_path, **settings)):
        assert {*process, "--no-verify"} - {"command"} <= flags_of(shardrank, process["command"])


def test_nodes_listen_on_sockets_or_free_ports(tmp_path):
    unix, tcp = (ServedArm(cards=1, shards=3, transport=transport) for transport in ("unix", "tcp"))
    assert node_addresses(unix, tmp_path) == tuple(f"unix:{tmp_path}/{number}.sock" for number in range(3))
    addresses = node_addresses(tcp, tmp_path)
    assert len(set(addresses)) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)


def load(workload: str) -> OfferedLoad:
    return OfferedLoad(target="http://127.0.0.1:1", workload=workload)


def test_a_stores_model_is_served_if_it_is_the_workloads(tmp_path):
    by_hash, by_range = (CompareConfig(shards=(1, 2), sharding=sharding) for sharding in ("hash", "range"))
    written = compared_snapshot(by_range, load(WORKLOAD), tmp_path)
    assert compared_snapshot(by_range, load(WORKLOAD), tmp_path) == written
    assert written == (tmp_path / "merlin-tiny" / "1").resolve()
    with pytest.raises(PlanError, match="is stored with 'range'"):
        compared_snapshot(by_hash, load(WORKLOAD), tmp_path)
    with pytest.raises(ConfigError, match=r"its tables are not those of the workload 'merlin-tiny:0\.001'"):
        compared_snapshot(by_range, load("merlin-tiny:0.001"), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cards", "1,x"], "'1,x' is not numbers from 1 to 64"),
        (["--cards", "0,1"], "'0,1' is not numbers from 1 to 64"),
        (["--cards", "1,1.5"], "cards.1: Input should be a valid integer"),
        (["--cards", ""], "cards: Tuple should have at least 1 item"),
        (["--cards", "1"], "2 to 16 different ones"),
        (["--cards", ",".join(map(str, range(1, 18)))], "2 to 16 different ones"),
        (["--slo-ms", "2000"], "slo_ms: 2000 is more than timeout_ms"),
        (["--rate", "nan"], "rate: Input should be a finite number"),
        (["--workers", "65"], "workers: Input should be less than or equal to 64"),
        (["--transport", "tcp"], "transports: ['tcp'] are between shards, of which there are none"),
        (["--shards", "2", "--transport", "tcp,shm"], "transports.1: Input should be 'unix' or 'tcp'"),
        (["--shards", "2", "--transport", "tcp,tcp"], "2 to 16 different ones"),
        (["--shares", "30,101"], "'30,101' is not numbers from 1 to 100"),
        (["--shares", "30,30"], "shares: [30, 30] are not different percents"),
    ],
)
def test_settings_that_do_not_fit_are_refused_at_once(arguments, message):
    result = CliRunner().invoke(compare_cards, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
