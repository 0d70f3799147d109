from __future__ import annotations

import pytest

from shardrank_testing.nodes import EVERY_PLACE, Place


@pytest.fixture
def place() -> Place:
    """Where a test runs that is not parametrized with places."""
    return EVERY_PLACE[-1]


@pytest.fixture
def anyio_backend(place: Place) -> tuple[str, dict[str, bool]]:
    """The event loop of a test's place."""
    return "asyncio", {"use_uvloop": place.loop == "uvloop"}
