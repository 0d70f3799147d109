from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from serving.limits import RequestLimits
from serving.rank.service import RankingService
from shardrank_testing.golden import golden_of
from shardrank_testing.s3_server import bucket, s3_port
from shardrank_testing.serving_api import Api, ApiModel, served_api, served_service, write_api_model

__all__ = ["bucket", "s3_port"]


@pytest.fixture(scope="session")
def api_model(tmp_path_factory: pytest.TempPathFactory) -> ApiModel:
    """The model with one of everything, as version 1."""
    return write_api_model(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="session")
def api_service(api_model: ApiModel) -> Iterator[RankingService]:
    """The model live in this process, with default limits. Shared: tests must leave it as it is."""
    service = served_service(api_model)
    yield service
    service.close()


@pytest.fixture(scope="module")
def limits() -> RequestLimits:
    """Those of `api`; a module may have its own."""
    return RequestLimits()


@pytest.fixture(scope="module")
async def api(api_model: ApiModel, limits: RequestLimits) -> AsyncIterator[Api]:
    """A server of both APIs and clients of it, for all tests of a module, which must leave it as it is."""
    async with served_api(api_model, limits) as api:
        yield api


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[int, ApiModel]:
    """Two versions that answer differently, each with golden requests, in one store."""
    found = {}
    store = tmp_path_factory.mktemp("store")
    for version in (1, 2):
        draft = write_api_model(tmp_path_factory.mktemp("draft"), version, seed=version)
        found[version] = write_api_model(store, version, seed=version, golden=golden_of(draft))
    return found


@pytest.fixture
def store(versions: dict[int, ApiModel]) -> Path:
    """That the two versions lie in."""
    return versions[1].path.parent.parent


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a short path, as sockets need."""
    return tmp_path_factory.mktemp("f")
