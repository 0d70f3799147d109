"""Cards and shards compared: which arms there are, how each is started, and a comparison of real servers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from loadtest.compare import ServedArm, compare_cards, compared_arms, wire_bytes
from loadtest.errors import LoadError
from loadtest.load.config import OfferedLoad
from loadtest.load.generator import Generators, open_payloads
from loadtest.servers import running_server
from loadtest.workloads.catalog import open_workload
from loadtest.workloads.payloads import APIS
from loadtest.workloads.prepare import write_random_snapshot
from serving.cli import main
from serving.embedded import Ranker
from shardrank_testing.command_line import flags_of

WORKLOAD = "merlin-tiny:0.0001"
SNAPSHOT = Path("m/films/1")


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (((1, 2, 4), (), ("unix",)), ["1 card", "2 cards", "4 cards"]),
        (((4, 1), (2,), ("unix",)), ["4 cards", "1 card", "2 shards of 4 cards, Unix socket"]),
        (
            ((1,), (1, 3), ("unix", "tcp")),
            ["1 card", "1 shard, Unix socket", "1 shard, TCP", "3 shards, Unix socket", "3 shards, TCP"],
        ),
    ],
)
def test_arms_are_cards_and_then_shards_over_each_transport(given, names):
    assert [arm.name for arm in compared_arms(*given)] == names


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_every_process_has_the_flags_that_it_needs(tmp_path, transport):
    *nodes, serves = ServedArm(2, 2, transport).commands(SNAPSHOT, tmp_path, ("--device", "cpu"), ("--workers", "3"))
    assert [command.name for command in (*nodes, serves)] == ["shard 0", "shard 1", "server"]
    assert len({command.log for command in (*nodes, serves)}) == 3
    [alone] = ServedArm(2).commands(SNAPSHOT, tmp_path, ("--device", "cpu"), ("--workers", "3"))
    assert isinstance(main, click.Group)
    for command in (*nodes, serves, alone):
        verb, flags = command.line[3], {text for text in command.line if text.startswith("--")}
        assert flags <= flags_of(main, verb)
        # Rows are in the nodes alone.
        assert ("--device" in flags) == (command is not serves)
        assert ("--workers" in flags) == (verb == "serve")
    listening = [line[line.index("--listen") + 1] for line in (command.line for command in nodes)]
    asked = [serves.line[at + 1] for at, text in enumerate(serves.line) if text == "--shard"]
    assert listening == asked


def test_nodes_listen_on_sockets_or_free_ports(tmp_path):
    assert ServedArm(1, 3).addresses(tmp_path) == tuple(f"unix:{tmp_path}/{number}.sock" for number in range(3))
    addresses = ServedArm(1, 3, "tcp").addresses(tmp_path)
    assert len(set(addresses)) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cards", "1,x"], "'1,x' is not whole numbers from 1 to 64"),
        (["--cards", "0,1"], "'0,1' is not whole numbers from 1 to 64"),
        (["--cards", "1,1.5"], "'1,1.5' is not whole numbers from 1 to 64"),
        (["--cards", ""], "2 to 16 different ones"),
        (["--cards", "1"], "2 to 16 different ones"),
        (["--cards", ",".join(map(str, range(1, 18)))], "2 to 16 different ones"),
        (["--workers", "65"], "65 is not in the range 1<=x<=64"),
        (["--shards", "2", "--transport", "tcp,shm"], "--transport: ['shm'] are none of unix, tcp"),
        (["--shards", "2", "--transport", "tcp,tcp"], "2 to 16 different ones"),
    ],
)
def test_settings_that_do_not_fit_are_refused_at_once(arguments, message):
    result = CliRunner().invoke(compare_cards, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


METRICS = """\
# TYPE shardrank_requests counter
shardrank_requests_total{{api="grpc",method="rank",model="m",status="ok"}} {ok}
shardrank_requests_total{{api="grpc",method="infer",model="m",status="ok"}} 5
shardrank_requests_total{{api="grpc",method="rank",model="m",status="deadline"}} {late}
# TYPE shardrank_shard_answer_bytes counter
shardrank_shard_answer_bytes_total{{form="float16",model="m",shard="0"}} {half}
shardrank_shard_answer_bytes_total{{form="float16",model="m",shard="1"}} {half}
shardrank_shard_answer_bytes_total{{form="float32",model="m",shard="1"}} 70
# TYPE shardrank_shard_request_bytes counter
shardrank_shard_request_bytes_total{{model="m"}} {asked}
"""


def test_bytes_are_the_growth_of_counters_for_each_answer():
    before = METRICS.format(ok=100, late=3, half=1000, asked=500.0)
    after = METRICS.format(ok=110, late=9, half=6000, asked=3500.0)
    counted = {name.rpartition(", ")[2]: size for name, size in wire_bytes(before, after).items()}
    assert counted == {"back": 1000, "back as float16": 1000, "back as float32": 0, "to shards": 300}
    assert wire_bytes("", "") == wire_bytes(after, after) == {}


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_every_arm_is_measured_and_has_the_same_scores(tmp_path: Path):
    arms = ("--cards", "1", "--shards", "2", "--transport", "unix,tcp", "--device", "cpu")
    sizes = ("--workload", WORKLOAD, "--candidates", "3", "--requests", "20", "--seconds", "0.3", "--in-flight", "4")
    flags = (*arms, *sizes, "--rounds", "1", "--dtype", "float32", "--json", str(tmp_path / "cards.json"))
    result = CliRunner().invoke(main, ["loadtest", "compare-cards", *flags], catch_exceptions=False)
    document = json.loads((tmp_path / "cards.json").read_text())
    assert result.exit_code == (1 if document["problems"] else 0), result.output
    (subjects,) = (table["subjects"] for table in document["tables"].values())
    assert list(subjects) == ["1 card", "2 shards, Unix socket", "2 shards, TCP"]
    for name in ("CPU of a request, nodes", "bytes of a request, back", "bytes of a request, to shards"):
        assert [measures[name]["median"] > 0 for measures in subjects.values()] == [False, True, True]
    for measures in subjects.values():
        assert measures["p99, 1 in flight"]["median"] > 0
        # Percentiles at a rate are those of all that were due, and missing, which is a problem, where some failed.
        assert measures["p99, at the rate"]["median"] > 0 or document["problems"]
    for name in ("requests", "CPU of a request", "p50, 1 in flight", "p99, 1 in flight", "CPU of the client"):
        assert all(measures[name]["median"] > 0 for measures in subjects.values())


@pytest.mark.nightly
def test_a_server_has_the_models_scores_over_every_api(tmp_path: Path):
    loads = {
        api: OfferedLoad(
            target=f"{'grpc' if 'grpc' in api else 'http'}://127.0.0.1:1",
            api=api,
            workload=WORKLOAD,
            candidates="3",
            requests=2,
        )
        for api in APIS
    }
    snapshot = write_random_snapshot(open_workload(WORKLOAD).spec, tmp_path / "store")
    _, payloads = open_payloads(loads["json"])
    with Ranker.open(snapshot, dtype="float32") as ranker:
        expected = ranker.rank(snapshot.parent.name, **json.loads(payloads[1].body)).scores
    commands = ServedArm(1).commands(snapshot, tmp_path, ("--device", "cpu"), ("--dtype", "float32"))
    with Generators() as generators, running_server("1 card", commands) as server:
        for api, load in loads.items():
            scores = generators.scores(load.model_copy(update={"target": server.target(api)}), 1)
            np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-6, err_msg=api)
        nowhere = loads["oip-grpc"].model_copy(update={"target": f"grpc://127.0.0.1:{server.http_port}"})
        with pytest.raises(LoadError, match="oip-grpc: no scores of request 1: "):
            generators.scores(nowhere, 1)
