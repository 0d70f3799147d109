"""What a serving process lets go of: versions that are retired, that could not be installed, or were called off."""

from __future__ import annotations

import gc
import shutil
import weakref

import pytest

from loader.errors import SnapshotCorruptError
from shardrank_testing.agent_fleet import agent_fleet, with_live
from shardrank_testing.serving_api import MODEL, run, write_api_model


def test_a_retired_version_is_free_without_a_garbage_collection(versions, store, folder):
    async def main() -> None:
        async with agent_fleet(folder, store, shards=1, replicas=2) as fleet:
            gc.collect()
            gc.disable()
            _, service = await with_live(fleet, versions)
            (served,) = [one.payload for one in service.generations.all()]
            rankings = [replica.ranking for replica in served.replicas]
            parts = [served, *served.replicas, *rankings, served.schema, rankings[0].parts.models]
            parts += [rankings[0].router, rankings[0].router.mapper, *rankings[0].shards]
            watched = [(type(one).__name__, weakref.ref(one)) for one in parts]
            del served, rankings, parts
            await fleet.want(MODEL, live=2, hold=(1, 2), serve=(1, 2))
            await fleet.until("serve-0", lambda told: told.live == {MODEL: 2})
            await fleet.want(MODEL, hold=(2,), serve=(2,), follow=(2,))
            await fleet.until_state("serve-0", MODEL, 1, None)
            assert [name for name, one in watched if one() is not None] == []

    try:
        run(main())
    finally:
        gc.enable()


async def test_rows_of_another_snapshot_of_a_version_are_refused(versions, folder, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(versions[1].path, store / MODEL / "1")
    before = write_api_model(store, 2, seed=2)

    async with agent_fleet(folder, store, shards=1, replicas=0) as fleet:
        node, _ = await with_live(fleet, {1: versions[1], 2: before}, local=True)
        wanted = await fleet.fleet.wanted_model(MODEL)
        await node._local.actions.stage(MODEL, 2, wanted, lambda share: None)
        # Withdrawn, and published again as something else.
        await fleet.fleet.drop_version(MODEL, 2)
        shutil.rmtree(before.path)
        after = write_api_model(store, 2, seed=3)
        await fleet.publish(after.path)
        with pytest.raises(SnapshotCorruptError, match="is of the rows of version 2 of model 'films'"):
            await node.stage(MODEL, 2, wanted, lambda share: None)
