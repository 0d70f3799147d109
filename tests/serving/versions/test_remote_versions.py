"""A fleet whose store is at a URL: it swaps versions, takes dense weights, and answers as one with a folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from loader.deltas.publisher import AsyncDeltaPublisher
from loader.registry import open_registry
from loader.snapshot.manifest import MANIFEST_NAME, read_manifest
from loader.stores import open_store
from loader.stores.cache import StoreUrl
from shardrank_testing.agent_fleet import agent_fleet, with_live
from shardrank_testing.s3_server import Bucket
from shardrank_testing.serving_api import MODEL, ApiModel, api_request, running_api


@pytest.mark.nightly
async def test_versions_of_a_store_at_a_url_are_swapped(
    versions: dict[int, ApiModel], folder: Path, bucket: Bucket, tmp_path: Path
) -> None:
    size = sum(path.stat().st_size for path in versions[1].path.rglob("*") if path.is_file())
    # Room for one and a half: the second version fits once nobody reads the first one's files any more.
    place = StoreUrl(url=bucket.url, cache=tmp_path / "cache", cache_bytes=size * 3 // 2)
    router = place.model_copy(update={"cache": tmp_path / "router"})
    request = api_request(3)
    for model in versions.values():
        open_store(place).put(model.path, read_manifest(model.path)[1])

    async with agent_fleet(folder, place, shards=1, replicas=1) as fleet:
        fleet.store = router
        _, service = await with_live(fleet, versions)
        async with running_api(service) as api:

            async def scores() -> list[float]:
                return (await api.http.post(f"/v1/models/{MODEL}:rank", json=request)).json()["scores"]

            expected = versions[1].scores(request).reshape(-1)
            np.testing.assert_allclose(await scores(), expected, atol=1e-5)
            # Whoever leaves rows to shard nodes has none of their files.
            assert not list((tmp_path / "router").rglob("rows-*"))
            assert list((tmp_path / "cache").rglob("rows-*"))
            registry = open_registry(fleet.fleet.registry.url)
            publisher = AsyncDeltaPublisher(registry, MODEL, 1, router)
            # What is served is what was published, whatever lies in its place by now.
            bucket.put(f"{MODEL}/1/{MANIFEST_NAME}", (versions[2].path / MANIFEST_NAME).read_bytes())
            tensors = {name: 1.01 * tensor for name, tensor in versions[1].tensors.items()}
            await publisher.publish_dense(1, tensors, max_drift=1)
            await registry.close()
            changed = ApiModel(versions[1].path, versions[1].spec, versions[1].tables, tensors).scores(request)
            assert np.abs(changed.reshape(-1) - expected).max() > 1e-4
            while not np.allclose(await scores(), changed.reshape(-1), atol=1e-5):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await fleet.want(MODEL, hold=(1, 2), serve=(1, 2))
            await fleet.until_state("serve-0", MODEL, 2, "ready")
            await fleet.want(MODEL, live=2, hold=(2,), serve=(2,))
            await fleet.until("serve-0", lambda told: told.live == {MODEL: 2})
            await fleet.until_state("serve-0", MODEL, 1, None)
            np.testing.assert_allclose(await scores(), versions[2].scores(request).reshape(-1), atol=1e-5)
            here = {path.parents[2].name for path in (tmp_path / "cache").rglob("rows-*") if "parts" not in path.parts}
            assert here == {"2"}
