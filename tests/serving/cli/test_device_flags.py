"""`--device` and its neighbours: what they choose, where they may stand, and that children are told the same."""

from __future__ import annotations

import re
import sys

import click
import pytest
from click.testing import CliRunner

from serving.cli import main
from serving.cli.options import device_options
from serving.cli.serve import _load, _may_wait, serve, shard_node
from serving.cli.settings import card_options, device_arguments, num_replicas, open_card_set
from shard_node.cuda.card_engine import CardEngine
from shard_node.cuda.card_set import CardOptions, CardSet
from shard_node.node import ShardNode
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.serving_api import MODEL, ApiModel

FLAGS = ["--device", "cuda:0,1", "--card-memory-gb", "0.5", "--pinned-memory-gb", "3", "--hot-gb", "0.25"]
FLAGS += ["--peer-access", "required"]
OPTIONS = CardOptions(card_memory_gb=0.5, pinned_memory_gb=3, hot_gb=0.25, require_peer_access=True)


@click.command()
@device_options
def rows(**options: object) -> None:
    """Holds rows."""


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Whatever device is named, it is emulated cards; tells which were asked for."""
    asked: list[tuple[str, int]] = []

    def open_cards(choice: object, num_cards: int) -> EmulatedCards:
        asked.append((str(choice), num_cards))
        return EmulatedCards(num_cards)

    monkeypatch.setattr("shard_node.cuda.card_set.open_cards", open_cards)
    return asked


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, arguments, prog_name="shardrank")
    return result.exit_code, re.sub(r"\s+", " ", result.output)


def test_flags_become_the_options_of_the_cards_and_a_child_is_told_the_same() -> None:
    given = rows.make_context("rows", list(FLAGS)).params
    assert card_options(given) == OPTIONS
    told = rows.make_context("rows", device_arguments(given)).params
    assert told == given


@pytest.mark.parametrize("may_block", [False, True])
def test_there_is_one_ranking_replica_for_each_card_if_nothing_else_is_said(may_block: bool) -> None:
    card_set = CardSet(EmulatedCards(4))
    assert num_replicas(None, card_set, may_block=may_block) == 4
    assert [num_replicas(3, cards, may_block=may_block) for cards in (None, card_set)] == [3, 3]


def test_without_cards_the_event_loop_ranks_unless_a_row_may_block_it() -> None:
    assert num_replicas(None, None, may_block=False) == num_replicas(0, None, may_block=False) == 0
    assert num_replicas(None, None, may_block=True) == 1
    for card_set, may_block in ((None, True), (CardSet(EmulatedCards(1)), False)):
        with pytest.raises(click.UsageError, match="--ranking-replicas 0 is only for rows in this process's RAM"):
            num_replicas(0, card_set, may_block=may_block)


def test_cuda_without_cupy_ends_the_command_with_what_is_missing(
    api_model: ApiModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "shard_node.cuda.cupy_cards", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    code, output = invoke("serve", "--snapshot", str(api_model.path), "--device", "cuda")
    assert code == 1
    assert "pip install 'shardrank[cuda]'" in output
    assert open_card_set(serve.make_context("serve", ["--snapshot", "x"]).params) is None


@pytest.mark.parametrize("flag", [FLAGS[at : at + 2] for at in range(0, len(FLAGS), 2)])
def test_flags_for_rows_are_refused_where_no_rows_are(api_model: ApiModel, flag: list[str]) -> None:
    code, output = invoke("serve", "--snapshot", str(api_model.path), "--shard", "h:1", *flag)
    assert (code, f"{flag[0]} is for rows in this process" in output) == (2, True)
    code, output = invoke("serve", "--registry", "r", "--store", "s", *flag)
    assert (code, f"{flag[0]}: with --registry only for --local rows" in output) == (2, True)


def test_a_shard_node_has_its_rows_on_the_cards_and_its_event_loop_waits_for_none(
    api_model: ApiModel, emulated
) -> None:
    given = ["--snapshot", str(api_model.path), "--shard", "0/1", "--listen", "unix:/tmp/x", "--cards", "3"]
    node = _load(api_model.path, shard_node.make_context("shard-node", given).params, None)
    assert emulated == [("auto", 3)]
    with node.generations.lease(MODEL) as lease:
        assert isinstance(lease.payload.engine, CardEngine)
        assert lease.payload.engine.plan.num_cards == 3
    assert _may_wait(node)
    node.close()


def test_a_registered_shard_node_opens_the_cards_that_its_flags_name(
    emulated: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[CardSet] = []

    async def program(
        options: object, record: object, agent: object, node: ShardNode, card_set: CardSet, *_: object
    ) -> None:
        opened.append(card_set)

    monkeypatch.setattr("serving.cli.serve._serve_rows_in_fleet", program)
    given = ["--registry", "r", "--store", "s", "--shard", "0/1", "--listen", "unix:/tmp/x", *FLAGS]
    assert CliRunner().invoke(shard_node, given).exit_code == 0
    assert emulated == [("cuda:0,1", 1)]
    assert [one.options for one in opened] == [OPTIONS]
