"""Cards of every kind that a test can run on; engines with rows of one snapshot, in the tiers that a test asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

import pytest

from loader.snapshot.manifest import ModelSpec
from loader.snapshot.reader import Snapshot
from router.plan import Plan
from shard_node.cuda.card_engine import CardEngine
from shard_node.cuda.card_set import CardOptions, CardSet, DeviceChoice, open_cards
from shard_node.cuda.kernel_params import RowFormat
from shard_node.engine.base import Engine
from shard_node.engine.loading import load_tables
from shard_node.errors import CardsUnavailableError, DeviceChoiceError
from shard_node.node import LoadedTables
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.snapshots import sharding_of

if TYPE_CHECKING:
    from shard_node.cuda.cupy_cards import Cards

Kind = Literal["emulated", "as late as can be", "no peer access", "logical", "devices"]
"""Emulated cards, which work at once, only when somebody waits for it, or without access to each other's memory; or
real ones: logical cards of device 0, or devices of their own."""
CardFactory: TypeAlias = "Callable[[int], Cards]"
"""Makes so many cards, or skips the test if there are none such here."""


def card_factory(kind: Kind) -> CardFactory:
    """Return what makes cards of this kind."""
    return partial(_make, kind)


def _make(kind: Kind, num_cards: int) -> Cards:
    if kind not in ("logical", "devices"):
        deferred, peer_access = kind == "as late as can be", kind != "no peer access"
        return EmulatedCards(num_cards, peer_access, deferred=deferred)
    if kind == "devices" and num_cards == 1:
        pytest.skip("one card on a device of its own is the one logical card of device 0")
    try:
        cards = open_cards(DeviceChoice.parse("cuda:0" if kind == "logical" else "cuda"), num_cards)
    except (CardsUnavailableError, DeviceChoiceError) as reason:
        pytest.skip(str(reason))
    assert cards is not None
    if not cards.peer_access:
        pytest.skip(f"{cards.name}: without access to each other's memory")
    return cards


Tiers = Literal["hot", "peers", "pinned", "every tier"]


@dataclass(frozen=True)
class OnCards:
    """An engine that a test runs on.

    Attributes:
        num_cards: how many.
        tiers: where rows lie: all copied to every card, each on one card, all in pinned memory, or some of each.
        kind: of cards.
    """

    num_cards: int
    tiers: Tiers
    kind: Kind = "emulated"

    def __str__(self) -> str:
        return f"{self.kind}, {self.num_cards} cards, {self.tiers}"

    def cards(self) -> Cards:
        """Makes them, or skips the test."""
        return card_factory(self.kind)(self.num_cards)

    def card_set(self, spec: ModelSpec) -> CardSet:
        """The cards, with as much of each kind of memory as puts a model's rows into the tiers asked for."""
        return CardSet(self.cards(), options_for(spec, self.num_cards, self.tiers))

    def load(self, snapshot: Snapshot) -> CardEngine:
        """An engine with all rows of a snapshot."""
        engine = self.tables(snapshot).engine
        assert isinstance(engine, CardEngine)
        return engine

    def tables(self, snapshot: Snapshot) -> LoadedTables:
        """The engine, with the rest of what a node serves with."""
        plan = Plan.make(snapshot.spec, sharding=sharding_of(snapshot.spec), cards_per_shard=self.num_cards)
        return load_tables(snapshot, plan.partition(0), plan.digest, card_set=self.card_set(snapshot.spec))


@dataclass(frozen=True)
class OnCpu:
    """A CPU engine that a test runs on.

    Attributes:
        num_cards: over how many its rows are divided.
        in_ram: the fraction of the float32 rows' bytes that there is RAM for; the others are on disk.
        sharding: of tables over cards; None: as the tables are stored.
    """

    num_cards: int = 1
    in_ram: float | None = None
    sharding: str | None = None

    def load(self, snapshot: Snapshot) -> Engine:
        """An engine with all rows of a snapshot."""
        return self.tables(snapshot).engine

    def tables(self, snapshot: Snapshot) -> LoadedTables:
        """The engine, with the rest of what a node serves with."""
        sharding = self.sharding or sharding_of(snapshot.spec)
        plan = Plan.make(snapshot.spec, sharding=sharding, cards_per_shard=self.num_cards)
        budget = None if self.in_ram is None else int(self.in_ram * snapshot.float32_bytes)
        return load_tables(snapshot, plan.partition(0), plan.digest, memory_budget_bytes=budget)


CARD_ENGINES = (
    OnCards(1, "peers"),
    OnCards(3, "peers"),
    OnCards(8, "every tier"),
    OnCards(2, "pinned"),
    OnCards(2, "every tier", "no peer access"),
    OnCards(3, "every tier", "as late as can be"),
)
REAL_ENGINES = tuple(
    OnCards(num_cards, tiers, kind)
    for kind in ("logical", "devices")
    for num_cards, tiers in ((1, "peers"), (2, "pinned"), (3, "peers"), (8, "every tier"))
)


def engine_params(emulated: tuple[OnCards, ...] = CARD_ENGINES, real: tuple[OnCards, ...] = REAL_ENGINES) -> list:
    """Parameters of a test or fixture; those on real cards are marked `gpu`."""
    return [
        *(pytest.param(one, id=str(one)) for one in emulated),
        *(pytest.param(one, id=str(one), marks=pytest.mark.gpu) for one in real),
    ]


def options_for(spec: ModelSpec, num_cards: int, tiers: Tiers) -> CardOptions:
    """Budgets that put the rows of a model into some tiers."""
    rows = sum(one.num_embeddings * RowFormat.of(one.dtype, one.embedding_dim).stride for one in spec.stored_tables)
    places = sum(4 * one.num_embeddings for one in spec.stored_tables)
    own = -(-rows // num_cards)
    card, hot, pinned = {
        "hot": (places + rows, rows, 0),
        # A card may get more than its share of a table.
        "peers": (places + 2 * rows, 0, 0),
        "pinned": (places, 0, 2 * rows),
        "every tier": (places + rows // 10 + own // 3, rows // 10, rows),
    }[tiers]
    # Half a byte more, so that none is lost to rounding on the way back.
    in_gb = [(size + 0.5) / 1e9 if size else 0.0 for size in (card, hot, pinned)]
    return CardOptions(card_memory_gb=in_gb[0], hot_gb=in_gb[1], pinned_memory_gb=in_gb[2])
