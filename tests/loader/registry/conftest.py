from __future__ import annotations

import itertools

import pytest

from shardrank_testing.registries import REGISTRY_KINDS, RedisServer, redis_server

_fleets = itertools.count()


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory) -> RedisServer:
    """One server for all tests that let it live; each has a fleet of its own there."""
    with redis_server(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture(params=REGISTRY_KINDS)
def new_url(request, tmp_path):
    """Gives the URL of another empty registry with each call."""
    if request.param == "directory":
        return lambda: str(tmp_path / f"registry-{next(_fleets)}")
    server = request.getfixturevalue("shared_redis")
    return lambda: f"{server.url}?fleet=test-{next(_fleets)}"


@pytest.fixture
def url(new_url) -> str:
    """The URL of an empty registry."""
    return new_url()
