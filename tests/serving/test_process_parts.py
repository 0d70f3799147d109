"""What processes make of their settings."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click
import pytest

from serving.config import ServeConfig, ShardNodeConfig
from serving.fleet.membership import Membership
from serving.process_parts import load_options, open_card_set, shard_of
from serving.shard_server import serve_shard
from shard_node.cuda.card_engine import CardEngine
from shard_node.cuda.card_set import CardOptions, CardSet
from shard_node.node import ShardNode
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.serving_api import MODEL, ApiModel


@pytest.mark.parametrize(
    ("replicas", "num_cards", "more", "expected"),
    [
        *((None, 4, more, 4) for more in ({}, {"memory_budget_gb": 1})),
        *((3, num_cards, more, 3) for num_cards in (None, 4) for more in ({}, {"memory_budget_gb": 1})),
        *((replicas, None, {}, 0) for replicas in (None, 0)),
        *((replicas, None, {"shards": ("h:1",)}, 0) for replicas in (None, 0)),
        *((None, None, more, 1) for more in ({"memory_budget_gb": 1}, {"registry": "r", "store": "s", "local": True})),
        *((0, num_cards, {"memory_budget_gb": 1}, None) for num_cards in (None, 1)),
        (0, 1, {}, None),
    ],
)
def test_how_many_replicas_rank(
    replicas: int | None, num_cards: int | None, more: dict[str, Any], expected: int | None
) -> None:
    """One for each card; without cards the event loop ranks, unless a row may block it."""
    card_set = None if num_cards is None else CardSet(EmulatedCards(num_cards))
    config = ServeConfig(ranking_replicas=replicas, **more)
    if expected is None:
        with pytest.raises(click.UsageError, match="--ranking-replicas 0 is only for rows in this process's RAM"):
            load_options(config, (), card_set)
    else:
        assert load_options(config, (), card_set).num_replicas == expected


def test_a_shard_node_has_its_rows_on_the_cards_that_were_chosen(
    api_model: ApiModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, int]] = []

    def open_cards(choice: object, num_cards: int) -> EmulatedCards:
        opened.append((str(choice), num_cards))
        return EmulatedCards(num_cards)

    monkeypatch.setattr("shard_node.cuda.card_set.open_cards", open_cards)
    limits = {"card_memory_gb": 60.5, "pinned_memory_gb": 8.0, "hot_gb": 1.5}
    address = f"unix:{folder}/x"
    config = ShardNodeConfig(
        snapshot=api_model.path, shard=(0, 1), listen=(address,), device="cuda:0,1", peer_access="required", **limits
    )
    node, card_set = ShardNode(shard_of(config, 0, 1)), open_card_set(config)

    async def program() -> None:
        running = asyncio.create_task(serve_shard(config, Membership.of(config), node, card_set))
        while not node.generations.models():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert isinstance(node.generations.payload(MODEL, 1).engine, CardEngine)
        assert {use.tier for use in node.info().memory} != {"ram"}
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(program())
    assert opened == [("cuda:0,1", 1)]
    assert card_set is not None
    assert card_set.options == CardOptions(require_peer_access=True, **limits)
    node.close()
