"""The directory tells which nodes have a version ready, and forgets nobody too early."""

from __future__ import annotations

import threading

from loader.registry.fleet import FleetRecord, NodeRecord, VersionReport
from router.replica_directory import ReplicaDirectory
from shard_node.wire.address import Address
from shardrank_testing.waiting import Clock

MODEL = "films"


def address(number: int) -> Address:
    return Address("10.0.0.1", 7000 + number)


def node(number: int, shard: int = 0, draining: bool = False, **states: str) -> NodeRecord:
    """A shard node at `address(number)`; `v3="ready"` says what it tells of version 3."""
    return NodeRecord(
        node_id=f"node-{number}",
        kind="shard",
        process_id=number,
        address=str(address(number)),
        shard_index=shard,
        num_shards=2,
        sharding="hash",
        replicate_bytes=0,
        num_cards=1,
        draining=draining,
        versions=tuple(
            VersionReport(model=MODEL, version=int(name[1:]), state=state) for name, state in states.items()
        ),
    )


def test_only_ready_nodes_that_do_not_drain_are_replicas():
    directory = ReplicaDirectory(Clock())
    assert directory.topology() is None
    directory.update(
        [
            node(0, v1="ready", v2="staging"),
            node(1, v1="draining", v2="ready"),
            node(2, v1="ready", draining=True),
            node(3, shard=1, v1="ready"),
            NodeRecord(node_id="serve-0", kind="serving", process_id=9, address="http://10.0.0.9:80"),
        ]
    )
    assert directory.current(MODEL, 1, 0)[1] == (address(0),)
    assert directory.current(MODEL, 2, 0)[1] == (address(1),)
    assert directory.current(MODEL, 1, 1)[1] == (address(3),)
    assert directory.current(MODEL, 3, 0)[1] == directory.current("other", 1, 0)[1] == ()
    assert directory.topology() == FleetRecord(num_shards=2, sharding="hash", replicate_bytes=0)
    directory.update([node(0), node(1, shard=1).model_copy(update={"replicate_bytes": 7})])
    assert directory.topology() is None


def test_the_epoch_counts_changes_of_replicas():
    directory = ReplicaDirectory(Clock())
    directory.update([node(0, v1="ready")])
    epoch = directory.current(MODEL, 1, 0)[0]
    directory.update([node(0, v1="ready").model_copy(update={"memory_available_bytes": 5})])
    assert directory.current(MODEL, 1, 0)[0] == epoch
    directory.update([node(0, v1="ready"), node(1, v1="ready")])
    assert directory.current(MODEL, 1, 0) == (epoch + 1, (address(0), address(1)))
    directory.update([node(0, v1="ready").model_copy(update={"address": str(address(5))}), node(1, v1="ready")])
    assert directory.current(MODEL, 1, 0) == (epoch + 2, (address(5), address(1)))


def test_a_missing_node_is_forgotten_after_a_while():
    clock = Clock()
    directory = ReplicaDirectory(clock, forget_after_s=10)
    for _ in range(3):
        # One that comes back in time is missed anew later.
        directory.update([node(0, v1="ready"), node(1, v1="ready")])
        directory.update([node(1, v1="ready")])
        clock.now += 6
    assert directory.current(MODEL, 1, 0)[1] == (address(0), address(1))
    for seconds, replicas in ((3.9, (address(0), address(1))), (0.2, (address(1),))):
        clock.now += seconds
        directory.update([node(1, v1="ready")])
        assert directory.current(MODEL, 1, 0)[1] == replicas


def test_an_emptied_registry_does_not_empty_the_directory():
    clock = Clock()
    directory = ReplicaDirectory(clock, forget_after_s=10)
    directory.update([node(0, v1="ready"), node(1, shard=1, v1="ready")])
    for _ in range(2):
        clock.now += 1000
        directory.update([])
    assert directory.current(MODEL, 1, 0)[1] == (address(0),)
    # The other shard's node is back: only its own shard's missing ones are forgotten.
    directory.update([node(2, shard=1, v1="ready")])
    assert directory.current(MODEL, 1, 0)[1] == (address(0),)
    assert directory.current(MODEL, 1, 1)[1] == (address(2),)


def test_readers_see_an_epoch_with_its_addresses():
    directory = ReplicaDirectory(Clock())
    directory.update([node(0, v1="ready")])
    first = directory.current(MODEL, 1, 0)[0]
    seen: set[tuple[int, tuple[Address, ...]]] = set()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            epoch, addresses = directory.current(MODEL, 1, 0)
            seen.add(((epoch - first) % 2, tuple(addresses)))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(300):
        directory.update([node(1, v1="ready"), node(0)])
        directory.update([node(0, v1="ready"), node(1)])
    stop.set()
    reader.join()
    assert seen <= {(0, (address(0),)), (1, (address(1),))}


def test_a_node_that_goes_and_comes_back_is_logged_once_each(caplog):
    caplog.set_level("INFO", "router")
    directory, both = ReplicaDirectory(Clock()), [node(0, v1="ready"), node(1, v1="ready")]
    for nodes in (both, both, both[:1], both[:1], both, both):
        directory.update(nodes)
    came = [f"shard node node-{number} is there, at {address(number)}" for number in (0, 1)]
    assert caplog.messages == [*came, "shard node node-1 is gone", came[1]]


def test_an_invalid_announcement_is_logged_and_harms_no_other(caplog):
    directory = ReplicaDirectory(Clock())
    good, other = node(0, v1="ready"), node(1, v1="ready")
    bad = [
        good.model_copy(update={"node_id": "no-shards", "num_shards": 0}),
        good.model_copy(update={"node_id": "nowhere", "address": "not an address"}),
    ]
    for _ in range(3):
        directory.update([*bad, good, other])
    assert directory.current(MODEL, 1, 0)[1] == (address(0), address(1))
    assert directory.topology() == FleetRecord(num_shards=2, sharding="hash", replicate_bytes=0)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.split(":")[0] for line in warnings] == ["shard node no-shards", "shard node nowhere"]
    # A node that was known before is still asked, as one whose announcement is missing.
    directory.update([good, other.model_copy(update={"num_shards": 5000})])
    assert directory.current(MODEL, 1, 0)[1] == (address(0), address(1))
