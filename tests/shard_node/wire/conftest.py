from __future__ import annotations

import pytest

from shardrank_testing.nodes import EVERY_PLACE, Place


@pytest.fixture(params=EVERY_PLACE[1::2], ids=str)
def place(request: pytest.FixtureRequest) -> Place:
    """Each event loop, with Unix sockets."""
    return request.param


@pytest.fixture
def anyio_backend(place: Place) -> tuple[str, dict[str, bool]]:
    """The event loop of a test's place."""
    return "asyncio", {"use_uvloop": place.loop == "uvloop"}
