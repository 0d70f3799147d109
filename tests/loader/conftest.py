"""Registries of both kinds, empty for each test, and a snapshot to damage."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from loader.registry import open_registry
from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import FleetRegistry
from loader.registry.memory import MemoryRegistry
from loader.registry.registry import Registry
from loader.snapshot.reader import Snapshot
from loader.snapshot.tables import VocabularyMapping
from shardrank_testing.registries import REGISTRY_KINDS, RedisServer, redis_server
from shardrank_testing.snapshots import make_spec, random_golden, write_snapshot

_fleets = itertools.count()


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for all tests that let it live; each has a fleet of its own there."""
    with redis_server(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture(params=REGISTRY_KINDS)
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Return the URL of another empty registry with each call."""
    return partial(_empty_url, request.param, request, tmp_path)


def _empty_url(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    if kind == "directory":
        return str(folder / f"registry-{next(_fleets)}")
    return f"{request.getfixturevalue('shared_redis').url}?fleet=test-{next(_fleets)}"


@pytest.fixture(params=[*REGISTRY_KINDS, "memory"])
async def any_registry(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Registry]:
    """An empty registry: a directory, Redis, and the memory of this process."""
    is_memory = request.param == "memory"
    opened = MemoryRegistry("memory") if is_memory else open_registry(_empty_url(request.param, request, tmp_path))
    yield opened
    await opened.close()


@pytest.fixture
def url(new_url: Callable[[], str]) -> str:
    """The URL of an empty registry."""
    return new_url()


@pytest.fixture
async def registry(url: str) -> AsyncIterator[Registry]:
    """An empty registry: a directory, and Redis."""
    opened = open_registry(url)
    yield opened
    await opened.close()


@pytest.fixture
async def directory(tmp_path: Path) -> AsyncIterator[DirectoryRegistry]:
    """An empty registry in a directory, for tests that Redis would only repeat."""
    opened = DirectoryRegistry(tmp_path / "registry")
    yield opened
    await opened.close()


@pytest.fixture
def fleet(registry: Registry) -> FleetRegistry:
    """The records of a fleet, none yet."""
    return FleetRegistry(registry)


@pytest.fixture
def store(snapshot: Snapshot) -> Path:
    """The store of the `snapshot` that a file of tests has."""
    return snapshot.path.parent.parent


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot with every kind of file: rows, vocabulary, dense, golden, manifest, checksum."""
    spec = make_spec()
    film = spec.tables[1].model_copy(update={"id_mapping": VocabularyMapping(id_type="string")})
    spec = spec.model_copy(update={"tables": (spec.tables[0], film, *spec.tables[2:])})
    path, _ = write_snapshot(
        tmp_path_factory.mktemp("store"),
        spec,
        vocabularies={"film": [f"tt{number}" for number in range(700)]},
        golden=random_golden(spec, seed=1),
        rows_per_file=512,
    )
    return path


@pytest.fixture
def copy(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "films" / "1")
