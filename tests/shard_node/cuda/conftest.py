"""Cards for tests: the same test runs on emulated cards and, with `-m gpu`, on real ones."""

from __future__ import annotations

import pytest

from shardrank_testing.card_sets import CardFactory, card_factory

REAL = [pytest.param(kind, marks=pytest.mark.gpu) for kind in ("logical", "devices")]


@pytest.fixture(params=["emulated", "deferred", *REAL])
def cards(request: pytest.FixtureRequest) -> CardFactory:
    """`cards(num_cards)` makes cards; `peer_access=False` and `total_bytes=` make lesser ones, on emulated cards only.

    Deferred ones are emulated too, but work only when somebody waits for it. Real ones are logical cards of device 0,
    or each on a device of its own.
    """
    return card_factory(request.param)
