"""Cards for tests: the same test runs on emulated cards and, with `-m gpu`, on real ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shard_node.cuda.card_engine import CardEngine
from shardrank_testing.card_engines import CardFactory, card_factory, engine_params

REAL = [pytest.param(kind, marks=pytest.mark.gpu) for kind in ("logical", "devices")]


@pytest.fixture(params=["emulated", "as late as can be", *REAL])
def cards(request: pytest.FixtureRequest) -> CardFactory:
    """`cards(num_cards)` makes cards of a kind."""
    return card_factory(request.param)


@pytest.fixture(params=engine_params())
def engine(request, stored) -> Iterator[CardEngine]:
    """Engines with the rows of a module's `stored` snapshot."""
    engine = request.param.load(stored[0])
    yield engine
    engine.close()
