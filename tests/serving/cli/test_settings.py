"""Options become configs, limits and cards, and children are given the same."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click
import pytest

from router.hot_rows import HotRowsConfig
from serving.cli.settings import config_of, num_replicas, open_card_set
from serving.config import ServeConfig, ShardNodeConfig
from serving.fleet.workers import Membership
from serving.shard_server import serve_shard
from shard_node.buckets import NodeIdentity
from shard_node.cuda.card_engine import CardEngine
from shard_node.cuda.card_set import CardOptions, CardSet
from shard_node.node import ShardNode
from shardrank_testing.command_line import shardrank
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.serving_api import MODEL, ApiModel


def test_a_config_has_the_options_that_are_its_fields() -> None:
    options = {"size_bytes": "7", "policy": None, "threads": 7}
    assert config_of(HotRowsConfig, options) == HotRowsConfig(size_bytes=7)
    with pytest.raises(click.UsageError, match=r"up: size_bytes: .* greater than"):
        config_of(HotRowsConfig, options | {"size_bytes": 0}, "up: ")


CARDS = {"device": "cuda:0,1", "card_memory_gb": 0.5, "pinned_memory_gb": 3, "hot_gb": 0.25, "peer_access": "required"}
OPTIONS = CardOptions(card_memory_gb=0.5, pinned_memory_gb=3, hot_gb=0.25, require_peer_access=True)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Whatever device is named, it is emulated cards; tells which were asked for."""
    asked: list[tuple[str, int]] = []

    def open_cards(choice: object, num_cards: int) -> EmulatedCards:
        asked.append((str(choice), num_cards))
        return EmulatedCards(num_cards)

    monkeypatch.setattr("shard_node.cuda.card_set.open_cards", open_cards)
    return asked


@pytest.mark.parametrize(
    ("flag", "num_cards", "may_block", "expected"),
    [
        (None, 4, False, 4), (None, 4, True, 4), (3, 4, False, 3), (3, 4, True, 3),
        (3, None, False, 3), (3, None, True, 3), (None, None, False, 0), (0, None, False, 0), (None, None, True, 1),
        (0, None, True, None), (0, 1, False, None),
    ],
)  # fmt: skip
def test_how_many_replicas_rank(flag: int | None, num_cards: int | None, may_block: bool, expected: int | None) -> None:
    """One for each card; without cards the event loop ranks, unless a row may block it."""
    card_set = None if num_cards is None else CardSet(EmulatedCards(num_cards))
    if expected is None:
        with pytest.raises(click.UsageError, match="ranking_replicas 0 is only for rows in this process's RAM"):
            num_replicas(flag, card_set, may_block=may_block)
    else:
        assert num_replicas(flag, card_set, may_block=may_block) == expected


def test_cuda_without_cupy_ends_the_command_with_what_is_missing(
    api_model: ApiModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "shard_node.cuda.cupy_cards", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    result = shardrank("serve", "--snapshot", api_model.path, "--device", "cuda", code=1)
    assert "pip install 'shardrank[cuda]'" in result.output
    assert open_card_set(ServeConfig(snapshot=Path("x"))) is None


def test_a_shard_node_has_its_rows_on_the_cards_that_its_flags_name(
    api_model: ApiModel, emulated: list[tuple[str, int]], folder: Path
) -> None:
    config = ShardNodeConfig(snapshot=api_model.path, shard=(0, 1), listen=(f"unix:{folder}/x",), **CARDS)
    node, card_set = (
        ShardNode(NodeIdentity(shard_index=0, num_shards=1, num_cards=1, sharding="hash")),
        open_card_set(config),
    )

    async def program() -> None:
        running = asyncio.create_task(serve_shard(config, Membership.of(config), node, card_set, None))
        while not node.generations.live_versions():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert isinstance(node.generations.payload(MODEL, 1).engine, CardEngine)
        assert {use.tier for use in node.info().memory} != {"ram"}
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(program())
    assert emulated == [("cuda:0,1", 1)]
    assert card_set is not None
    assert card_set.options == OPTIONS
    node.close()
