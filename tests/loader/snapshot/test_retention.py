"""What retention deletes, what it never does, and that a run which ended anywhere is ended by the next one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from loader.errors import RegistryUnavailableError
from loader.registry.directory import DirectoryRegistry
from loader.registry.fleet import (
    Canary,
    FleetRegistry,
    NodeRecord,
    PublishedVersion,
    VersionReport,
    WantedModel,
    delta_stream,
    rollout_key,
)
from loader.rollout.plan import Rollout, encode_rollout
from loader.snapshot.publishing import Retained, register, retain
from loader.snapshot.reader import Snapshot
from shardrank_testing.snapshots import one_table_spec, write_snapshot

T = TypeVar("T")
MODEL = "small"


def on(root: Path, work: Callable[[FleetRegistry], Awaitable[T]]) -> T:
    async def program() -> T:
        registry = DirectoryRegistry(root / "registry")
        try:
            return await work(FleetRegistry(registry))
        finally:
            await registry.close()

    return asyncio.run(program())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Five published versions in a store."""

    async def publish_all(fleet: FleetRegistry) -> None:
        for seed in range(5):
            folder, _ = write_snapshot(tmp_path / "store", one_table_spec(260), seed=seed)
            await register(fleet, Snapshot.open(folder, verify=False), clock=time.time)

    on(tmp_path, publish_all)
    return tmp_path


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "store" / MODEL).iterdir() if path.is_dir())


def records(root: Path) -> list[int]:
    return [record.version for record in on(root, lambda fleet: fleet.versions(MODEL))]


def kept(root: Path, keep: int) -> Retained:
    return on(root, lambda fleet: retain(fleet, root / "store", MODEL, keep))


def test_the_highest_versions_stay_and_the_others_go_from_store_and_record(root: Path) -> None:
    assert kept(root, 2) == Retained(kept=(4, 5), dropped=(1, 2, 3))
    assert folders(root) == ["4", "5"]
    assert records(root) == [4, 5]
    assert on(root, lambda fleet: fleet.spec(MODEL, 1)) is None
    assert Snapshot.open(root / "store" / MODEL / "4").version == 4
    assert kept(root, 2) == Retained(kept=(4, 5), dropped=())


WANTED = {
    "live": {"live": 1},
    "hold": {"hold": (1,)},
    "serve": {"serve": (1,)},
    "follow": {"follow": (1,)},
    "canary": {"canary": Canary(version=1, share=0.1)},
    "node_hold": {"node_hold": {"shard-0-0": (1,)}},
}


@pytest.mark.parametrize("name", WANTED)
def test_a_version_that_is_wanted_is_never_dropped(root: Path, name: str) -> None:
    record = WantedModel(model=MODEL, epoch=1, **WANTED[name])
    on(root, lambda fleet: fleet.put_wanted(record, None))
    assert kept(root, 1) == Retained(kept=(1, 5), dropped=(2, 3, 4))
    assert folders(root) == ["1", "5"]


def test_the_last_rollouts_versions_stay_so_that_a_rollback_has_somewhere_to_go(root: Path) -> None:
    rollout = Rollout(
        model=MODEL, epoch=3, rollout_id="0" * 32, from_version=2, to_version=3, previous_version=1, state="done",
        steps=("flip",), started_at=0, step_began_at=0, delta_base=3, last_delta=0,
    )  # fmt: skip
    on(root, lambda fleet: fleet.registry.put(rollout_key(MODEL), encode_rollout(rollout), 0))
    assert kept(root, 1) == Retained(kept=(1, 2, 3, 5), dropped=(4,))


def test_a_version_that_a_node_holds_stays_though_nothing_wants_it_any_more(root: Path) -> None:
    report = VersionReport(model=MODEL, version=2, state="draining")
    node = NodeRecord(node_id="n", kind="serving", process_id=1, address="h:1", live={MODEL: 3}, versions=(report,))
    on(root, lambda fleet: fleet.announce_node(node, 60))
    assert kept(root, 1) == Retained(kept=(2, 3, 5), dropped=(1, 4))


class FailingRegistry:
    """A real registry that answers so many calls and then no more."""

    def __init__(self, registry: DirectoryRegistry, calls: int) -> None:
        self._registry = registry
        self._left = calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._registry, name)
        if not asyncio.iscoroutinefunction(found):
            return found

        async def call(*arguments: Any) -> Any:
            if self._left == 0:
                raise RegistryUnavailableError("gone")
            self._left -= 1
            return await found(*arguments)

        return call


def test_wherever_a_run_ends_the_next_one_leaves_what_a_whole_one_would(root: Path) -> None:
    failures = 0
    for calls in range(1000):

        async def run(fleet: FleetRegistry, calls: int = calls) -> Retained | None:
            failing: Any = FailingRegistry(fleet.registry, calls)  # type: ignore[arg-type]
            try:
                return await retain(FleetRegistry(failing), root / "store", MODEL, 2)
            except RegistryUnavailableError:
                return None

        if (ended := on(root, run)) is not None:
            break
        failures += 1
        # Whatever is on record and in sight is whole, and the two that stay always are.
        assert {"4", "5"} <= set(folders(root))
    assert failures > 5
    assert ended is not None
    assert ended.kept == (4, 5)
    assert folders(root) == ["4", "5"]
    assert records(root) == [4, 5]


def test_streams_are_trimmed_to_what_kept_versions_have_to_replay(root: Path) -> None:
    async def prepare(fleet: FleetRegistry) -> None:
        for base in (1, 4):
            for sequence in range(1, 11):
                await fleet.registry.append(delta_stream(MODEL, base), sequence, b"rows")
        for version, last_delta in ((6, 5), (7, 8)):
            await fleet.put_version(
                PublishedVersion(
                    model=MODEL, version=version, identity="0", delta_base=4, last_delta=last_delta, rows_bytes=1,
                    published_at=0,
                )
            )  # fmt: skip

    on(root, prepare)
    assert kept(root, 2).kept == (6, 7)
    continued = on(root, lambda fleet: fleet.registry.bounds(delta_stream(MODEL, 4)))
    ended = on(root, lambda fleet: fleet.registry.bounds(delta_stream(MODEL, 1)))
    assert (continued.first, continued.last) == (6, 10)
    assert (ended.first, ended.last) == (11, 10)
