from __future__ import annotations

from collections.abc import Iterator

import pytest

from serving.service import RankingService
from shardrank_testing.serving_api import ApiModel, served_service, write_api_model


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
