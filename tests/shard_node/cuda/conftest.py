"""Cards for tests: the same test runs on emulated cards and, with `-m gpu`, on real ones."""

from __future__ import annotations

import pytest

from shardrank_testing.card_engines import CardFactory, card_factory

REAL = [pytest.param(kind, marks=pytest.mark.gpu) for kind in ("logical", "devices")]


@pytest.fixture(params=["emulated", "as late as can be", *REAL])
def cards(request: pytest.FixtureRequest) -> CardFactory:
    """`cards(num_cards)` makes cards of a kind."""
    return card_factory(request.param)
