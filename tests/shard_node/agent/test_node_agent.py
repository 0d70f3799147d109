"""The agent of a shard node stages, follows and retires real versions, trusts nothing, and watches its cards."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader.errors import RolloutError, SnapshotCorruptError, SnapshotError
from loader.registry.fleet import FleetRecord, PublishedVersion, WantedModel, delta_stream
from loader.snapshot.buckets import RowBuckets
from loader.snapshot.codecs import RowCodec
from loader.snapshot.reader import Snapshot
from router.outliers import ReplicaEvents
from router.plan import Plan
from router.shard import ReplicaSource, ReplicatedShard
from shard_node.agent.node_agent import join_fleet, share_of, stage_tables, watch_cards
from shard_node.cuda.card_set import CardSet
from shard_node.engine.loading import load_tables
from shard_node.engine.memory import RowMemory
from shard_node.errors import CardError, MemoryBudgetError
from shard_node.node import ShardNode
from shard_node.wire.address import Address
from shardrank_testing.agents import NodeUnderTest, plan_of, reached, running_node, user_3
from shardrank_testing.bags import assert_blocks_equal, bags_of, random_table_bags
from shardrank_testing.card_engines import options_for
from shardrank_testing.deltas import make_batch
from shardrank_testing.emulated_cards import EmulatedCards
from shardrank_testing.errors import raises_kind
from shardrank_testing.nodes import serving, soon, until
from shardrank_testing.rollout_fleet import published
from shardrank_testing.snapshots import make_spec, one_table_spec, restate_file, rewrite_manifest, write_snapshot
from shardrank_testing.topologies import make_node


@pytest.fixture
async def under(request, tmp_path):
    """The agent of a shard node runs on a registry of its own, with the settings of its `NodeConfig`."""
    settings = getattr(request, "param", {})
    async with running_node(str(tmp_path / "registry"), tmp_path / "store", **settings) as under:
        yield under


def answer(under: NodeUnderTest, version: int) -> list[np.ndarray]:
    bags = random_table_bags(
        np.random.default_rng(5), under.node.generations.payload("films", version).engine.layout, 200, 5
    )
    return under.node.pool("films", version, bags)


async def test_a_node_stages_and_retires_what_is_desired(under):
    first, second = await under.publish(1), await under.publish(2)
    await under.want("films", hold=(1,), live=1)
    await under.announced("films", 1, "ready")
    await under.want("films", hold=(1, 2))
    report = await under.announced("films", 2, "ready")
    assert report.identity == second.identity
    assert report.memory_bytes == sum(use.size_bytes for use in under.node.info().memory if use.version == 2)
    tiers = {use.tier for use in under.node.info().memory}
    assert (report.memory_tiers.keys(), sum(report.memory_tiers.values())) == (tiers, report.memory_bytes)
    await under.want("films", hold=(2,), live=2)
    assert (await under.announced("films", 1, "draining")).identity == first.identity
    await under.announced("films", 1, None)
    assert [(one.version, one.state) for one in under.node.info().versions] == [(2, "live")]
    record = (await under.fleet.nodes())[0]
    assert (record.kind, record.shard_index, record.num_shards, record.delta_format) == ("shard", 0, 1, 2)
    assert 0 < record.memory_available_bytes <= record.memory_total_bytes
    await under.want("films", hold=(2, 9))
    while not (report := await under.announced("films", 9, "waiting")).reason:
        pass
    assert "version 9 of 'films' is not published" in report.reason


SIZE = sum(table.num_embeddings * RowCodec(table.dtype, table.embedding_dim).row_bytes for table in make_spec().tables)


@pytest.mark.parametrize("under", [{"memory_cap_bytes": 2 * SIZE - 1}], indirect=True)
async def test_a_version_without_room_is_refused_until_another_goes(under):
    await under.publish(1)
    await under.publish(2)
    await under.want("films", hold=(1,), live=1)
    await under.announced("films", 1, "ready")
    await under.want("films", hold=(1, 2))
    report = await under.announced("films", 2, "refused")
    assert f"rows take {SIZE} bytes beside {SIZE} of the versions that are here" in report.reason
    assert f"at most {2 * SIZE - 1} are allowed" in report.reason
    await under.want("films", hold=(1,))
    await under.announced("films", 2, None)


ROOM = {f"{size} bytes": {"memory_cap_bytes": size} for size in (2 * SIZE - 1, 2 * SIZE)}


@pytest.mark.parametrize(
    ("under", "keeps"), [*zip(ROOM.values(), (False, True), strict=True)], ids=ROOM, indirect=["under"]
)
async def test_a_node_that_is_rolled_keeps_both_if_they_fit(under, keeps):
    for version in (1, 2):
        await under.publish(version)
    await under.want("films", hold=(1,), live=1)
    await under.announced("films", 1, "ready")
    left = (await under.fleet.nodes())[0].memory_available_bytes
    assert left == under.actions._config.memory_cap_bytes - SIZE
    for _ in range(2):
        await under.want("films", node_hold={"node": (2,)})
        await under.announced("films", 2, "ready")
        await under.announced("films", 1, "ready" if keeps else None)
        # Undone, it has the old version at once, or loads it again.
        await under.want("films", node_hold={})
        await under.announced("films", 2, None)
        await under.announced("films", 1, "ready")
    await under.want("films", node_hold={"node": (2,)})
    await under.announced("films", 2, "ready")
    await under.want("films", hold=(2,), live=2, node_hold={})
    await under.announced("films", 1, None)


async def append(under: NodeUnderTest, sequence: int) -> None:
    """A delta that makes all of user 3's row the sequence number."""
    batch = make_batch(make_spec(), "user", sequence, [3], np.full((1, 16), float(sequence), np.float32))
    await under.fleet.registry.append(delta_stream("films", 1), sequence, batch.encode())


async def test_deltas_reach_only_versions_that_follow(under):
    await under.publish(1)
    await under.want("films", hold=(1,), live=1)
    await under.announced("films", 1, "ready")
    await append(under, 1)
    assert user_3(under) != [1.0] * 16
    await under.want("films", follow=(1,))
    await reached(under, 1)
    assert user_3(under) == [1.0] * 16
    await under.want("films", follow=())
    await until(lambda: "deltas films 1" not in {task.get_name() for task in asyncio.all_tasks()})
    await append(under, 2)
    assert (await under.announced("films", 1, "ready")).delta_sequence == 1
    assert user_3(under) == [1.0] * 16
    # It goes on where it was.
    await under.want("films", follow=(1,))
    await reached(under, 2)
    assert user_3(under) == [2.0] * 16


@pytest.mark.parametrize("lost", [False, True])
async def test_a_followed_version_is_staged_with_its_deltas(under, lost, caplog):
    """A node that comes back must not answer with old rows; if deltas are lost, it may be the only one and does."""
    under.agent_runs.cancel()
    await asyncio.wait([under.agent_runs])
    await under.publish(1)
    for sequence in (1, 2, 3):
        await append(under, sequence)
    if lost:
        await under.fleet.registry.trim(delta_stream("films", 1), 3)
    desired = WantedModel(model="films", epoch=1, live=1, hold=(1,), follow=(1,))
    await under.actions.stage("films", 1, desired, lambda fraction: None)
    report = under.actions.reports()[0]
    assert (report.state, report.delta_sequence) == ("ready", 0 if lost else 3)
    if not lost:
        assert user_3(under) == [3.0] * 16
        # From now on it follows as any other does.
        await under.actions.reconcile(desired)
        await append(under, 4)
        await reached(under, 4)
    assert ("version 1 of films is loaded without deltas after 0" in caplog.text) == lost


async def test_readiness_is_of_the_live_version_with_its_deltas(under):
    """Neither a version that is staged nor one that waits changes it, unless it takes the live one's place."""

    def missing() -> str:
        return under.actions.problems(under.agent).get("films", "")

    async def seen_until(version: int, state: str) -> set[str]:
        """What was missing until the version is announced in that state."""
        seen = set()
        while (report := await under.report("films", version)) is None or report.state != state:
            seen.add(missing())
            await under.step()
        return seen

    await until(lambda: not under.actions.problems(under.agent))
    await under.publish(1)
    for sequence in (1, 2, 3):
        await append(under, sequence)
    await under.want("films", hold=(1,), live=1)
    await seen_until(1, "ready")
    await until(lambda: not missing())
    await under.want("films", follow=(1,))
    await until(lambda: under.agent.desired["films"].follow == (1,) and not missing())
    assert user_3(under) == [3.0] * 16
    await under.publish(2)
    await under.want("films", hold=(1, 2))
    assert await seen_until(2, "ready") <= {""}
    await under.want("films", hold=(1, 2, 9))
    assert await seen_until(9, "waiting") <= {""}
    await under.want("films", live=9)
    await until(lambda: missing().startswith("version 9 is waiting UnavailableError: "))
    await under.want("films", live=1, hold=(1,), node_hold={"node": (3,)})
    await under.publish(3)
    assert any(each.startswith("version 3 is ") for each in await seen_until(3, "ready"))
    await until(lambda: not missing())
    await under.agent.leave()
    assert under.actions.problems(under.agent) == {"": "it is leaving its fleet"}


@pytest.mark.parametrize(("live", "state"), [(None, "refused"), (1, "ready")])
async def test_a_version_with_a_gap_is_refused_unless_live(under, live, state):
    await under.publish(1)
    for sequence in (1, 2, 3):
        await append(under, sequence)
    await under.fleet.registry.trim(delta_stream("films", 1), 3)
    await under.want("films", hold=(1,), live=live)
    await under.announced("films", 1, "ready")
    before = answer(under, 1)
    await under.want("films", follow=(1,))
    while not (report := await under.announced("films", 1, state)).reason:
        pass
    assert "needs what follows delta 0, but deltas/films/1 begins with 3 after 2" in report.reason
    assert report.delta_sequence == 0
    missing = under.actions.problems(under.agent).get("films", "")
    assert ("has applied delta 0, not yet 3: " in missing) == (live == 1)
    for actual, expected in zip(answer(under, 1), before, strict=True):
        np.testing.assert_array_equal(actual, expected)


async def test_a_node_that_divides_rows_otherwise_is_refused(under):
    await join_fleet(under.fleet, FleetRecord(num_shards=2, sharding="hash", replicate_bytes=0))
    with pytest.raises(RolloutError, match=r"num_shards 3, .* its fleet in .* has 2, 'hash', 0"):
        await join_fleet(under.fleet, FleetRecord(num_shards=3, sharding="hash", replicate_bytes=0))
    # Of the number that a wanted version is divided over still: it restarts while a fleet goes to another one.
    await under.fleet.update_wanted("other", lambda _: WantedModel(model="other", epoch=1, num_shards={1: 3}))
    await join_fleet(under.fleet, FleetRecord(num_shards=3, sharding="hash", replicate_bytes=0))
    with pytest.raises(RolloutError, match="replicate_bytes 9"):
        await join_fleet(under.fleet, FleetRecord(num_shards=3, sharding="hash", replicate_bytes=9))


PROGRAM = """
import sys
from pathlib import Path
from loader.snapshot.reader import Snapshot
from loader.registry.fleet import PublishedVersion
from shard_node.node import ShardNode
from shard_node.engine.memory import RowMemory
from shard_node.agent.node_agent import stage_tables
from router.plan import Plan

folder, memory, samples_mb = Path(sys.argv[1]), RowMemory(), []
snapshot = Snapshot.open(folder, verify=False)
plan = Plan.make(snapshot.spec, cards_per_shard=2)
record = PublishedVersion(
    model="m", version=1, identity=snapshot.identity, delta_base=1, last_delta=0, rows_bytes=0, published_at=0.0)
node = ShardNode(plan.identity(0))
for version in range(1, 5):
    for change in ("stage", "retire"):
        if change == "stage":
            tables = stage_tables(folder, record, lambda _: (plan.partition(0), ""), memory=memory)
            node.generations.stage("m", version, tables)
            node.generations.flip("m", version)
        elif version > 1:
            assert node.generations.retire("m", version - 1).retired.wait(30)
        samples_mb.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6)
print(*samples_mb)
"""


def test_each_swap_frees_the_memory_of_a_version(tmp_path):
    folder, _ = write_snapshot(tmp_path, one_table_spec(200_000, 64), seed=1, version=1)
    size_mb = 200_000 * 72 / 1e6
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, check=True, timeout=120
    )
    samples_mb = list(map(float, done.stdout.split()))
    for two, one in zip(samples_mb[2::2], samples_mb[3::2], strict=True):
        assert two > samples_mb[1] + 0.8 * size_mb
        assert one < samples_mb[1] + 0.2 * size_mb


ENDING_PROGRAM = """
import sys
from loader.snapshot.reader import Snapshot
from router.plan import Plan
from shard_node.engine.loading import load_tables
from shard_node.node import ShardNode

snapshot = Snapshot.open(sys.argv[1])
plan = Plan.make(snapshot.spec, sharding="table", cards_per_shard=4)
node = ShardNode(plan.identity(0))
for version in range(1, 20):
    node.generations.stage("films", version, load_tables(snapshot, plan.partition(0), plan.digest))
node.close()
"""


@pytest.mark.nightly
def test_closing_a_node_at_the_end_of_a_process_never_aborts(tmp_path: Path):
    path, _ = write_snapshot(tmp_path, make_spec(), seed=1)
    command = [sys.executable, "-c", ENDING_PROGRAM, str(path)]
    for _ in range(5):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


GIB = 1 << 30


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    path, _ = write_snapshot(tmp_path_factory.mktemp("store"), make_spec(), seed=3, rows_per_file=256)
    return path


@pytest.fixture
def copy(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "films" / "1"))


def record_of(folder: Path) -> PublishedVersion:
    return published(1, identity=Snapshot.open(folder, verify=False, files="rows").identity)


def stage(folder: Path, published: PublishedVersion | None = None, memory: RowMemory | None = None, **options):
    return stage_tables(folder, published or record_of(folder), plan_of, memory=memory or RowMemory(), **options)


@pytest.mark.parametrize("budget", [None, 0, 20_000])
def test_a_sound_version_is_staged_as_loaded(pristine, budget):
    shares: list[float] = []
    memory = RowMemory()
    tables = stage(pristine, memory=memory, memory_budget_bytes=budget, progress=share_of(shares.append))
    snapshot = Snapshot.open(pristine)
    bags = random_table_bags(np.random.default_rng(1), tables.engine.layout, 50, 5)
    expected = load_tables(snapshot, *plan_of(snapshot)).engine.pool(bags)
    assert_blocks_equal(tables.engine.pool(bags), expected, scale=1.0)
    assert tables.manifest_identity == snapshot.identity
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert memory.held_bytes == sum(use.size_bytes for use in tables.engine.memory() if use.tier == "ram")
    tables.close()
    assert memory.held_bytes == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_bit_flip_anywhere_in_a_row_file_is_refused(copy, data):
    files = sorted((copy / "tables").rglob("rows-*"))
    path = data.draw(st.sampled_from(files))
    content = path.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    published = record_of(copy)
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)
    memory = RowMemory()
    try:
        with pytest.raises(SnapshotError):
            stage(copy, published, memory)
    finally:
        path.write_bytes(content)
    assert memory.held_bytes == 0


@pytest.mark.parametrize("budget", [None, 0], ids=["in ram", "on disk"])
def test_a_row_with_a_nan_scale_is_refused_by_name(copy, budget):
    # Of table film, dim 16 in int8: the scale is bytes 16 to 20 of a row of 24.
    (path,) = (copy / "tables" / "film").iterdir()
    content = bytearray(path.read_bytes())
    snapshot = Snapshot.open(copy)
    table = snapshot.spec.table_of("film")
    rows = snapshot.rows_file("film", 0)
    position = int(RowBuckets.of(table).in_file(4096, 0).positions(np.array([700]))[0])
    start = len(content) - rows.nbytes + position * 24
    content[start + 16 : start + 20] = np.float32(np.nan).tobytes()
    path.write_bytes(content)
    restate_file(copy, str(path.relative_to(copy)))
    memory = RowMemory()
    with pytest.raises(SnapshotCorruptError, match=r"table 'film', row 700: decodes to NaN or inf"):
        stage(copy, memory=memory, memory_budget_bytes=budget)
    assert memory.held_bytes == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda copy: shutil.rmtree(copy / "tables" / "city"), "city"),
        (lambda copy: rewrite_manifest(copy, lambda manifest: manifest["tables"].pop()), "tables"),
        (
            lambda copy: rewrite_manifest(copy, lambda manifest: manifest["metadata"].update(changed="later")),
            "published was",
        ),
    ],
)
def test_another_snapshot_than_the_published_one_is_refused(copy, damage, message):
    published = record_of(copy)
    damage(copy)
    with pytest.raises(SnapshotError, match=message):
        stage(copy, published)


def test_a_version_that_does_not_fit_is_refused_unread(pristine):
    tables = stage(pristine)
    size = sum(use.size_bytes for use in tables.engine.memory())
    seen: list[tuple[object, ...]] = []
    memory = RowMemory(cap_bytes=2 * size - 1)
    memory.take(size).filled()
    with pytest.raises(MemoryBudgetError, match=f"take {size} bytes beside {size} .* {2 * size}, .* {2 * size - 1} "):
        stage(pristine, memory=memory, progress=lambda *step: seen.append(step))
    assert seen == []
    assert memory.held_bytes == size


def test_staging_memory_counts_before_the_system_sees_it():
    assert RowMemory(available=lambda: 0).take(0).sizes == (0,)
    memory = RowMemory(available=lambda: 10 * GIB, reserve_bytes=GIB)
    first = memory.take(5 * GIB)
    with pytest.raises(MemoryBudgetError, match=f"rows take {5 * GIB} bytes, but {10 * GIB} are available and {GIB} "):
        memory.take(5 * GIB)
    memory.take(4 * GIB).give_back()
    first.give_back()
    first.give_back()
    memory.take(9 * GIB).filled()
    assert memory.held_bytes == 9 * GIB


FAULT = "device 0: launching pool_int8 with 4 x 1 blocks: cudaErrorIllegalAddress"
SPEC = one_table_spec(100)
BAGS = bags_of({0: [[5], [6, 7]]})


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory) -> Snapshot:
    path, _ = write_snapshot(tmp_path_factory.mktemp("store"), SPEC, seed=1)
    return Snapshot.open(path)


PLAN = Plan.make(SPEC, cards_per_shard=2)


def node_on(cards: EmulatedCards, snapshot: Snapshot) -> ShardNode:
    return make_node(snapshot, PLAN, 0, card_set=CardSet(cards, options_for(SPEC, 2, "peers")))


class Looks:
    """Stands between two looks: at each, the next of `faults` is what the cards answer with; then the watch ends."""

    def __init__(self, cards: EmulatedCards, faults: list[str]) -> None:
        self._cards, self._faults = cards, faults

    async def sleep(self, seconds: float) -> None:
        del seconds
        if not self._faults:
            raise asyncio.CancelledError
        self._cards.fault = self._faults.pop(0)


async def test_cards_that_keep_failing_end_the_watch(snapshot):
    """A call that failed once does not; cards without a version are watched too."""
    cards = EmulatedCards(2)
    node = node_on(cards, snapshot)
    with pytest.raises(asyncio.CancelledError):
        await watch_cards(node, None, Looks(cards, ["", FAULT, "", FAULT, ""]).sleep)
    with pytest.raises(CardError, match="cudaErrorIllegalAddress"):
        await watch_cards(node, None, Looks(cards, ["", FAULT, FAULT, ""]).sleep)
    cards.fault = ""
    node.close()
    empty = ShardNode(PLAN.identity(0))
    for watched, error in ((None, asyncio.CancelledError), (cards, CardError)):
        with pytest.raises(error):
            await watch_cards(empty, watched, Looks(cards, [FAULT, FAULT, FAULT]).sleep)
    empty.close()


async def test_a_router_avoids_a_node_whose_cards_failed(snapshot, tmp_path: Path):
    cards = [EmulatedCards(2), EmulatedCards(2)]
    nodes = [node_on(one, snapshot) for one in cards]
    expected = nodes[0].pool(SPEC.model, snapshot.version, BAGS)[0]
    async with (
        serving(Address.parse(f"unix:{tmp_path}/0.sock"), nodes[0]) as first,
        serving(Address.parse(f"unix:{tmp_path}/1.sock"), nodes[1]) as second,
    ):
        addresses = [server.addresses[0] for server in (first, second)]
        retries: list[str] = []
        source, events = ReplicaSource.fixed(addresses), ReplicaEvents(retried=retries.append)
        shard = ReplicatedShard(PLAN, 0, snapshot, source, events)

        async def ask() -> np.ndarray:
            return (await shard.pool(SPEC.model, snapshot.version, BAGS, soon())).sums[0]

        for _ in range(4):
            np.testing.assert_array_equal(await ask(), expected)
        # On a slow machine one may be asked because the other is late.
        assert "card" not in retries
        for failed in range(2):
            cards[failed].fault = FAULT
            for _ in range(6):
                np.testing.assert_array_equal(await ask(), expected)
            assert [address for address, _ in await shard.infos()] == [str(addresses[1 - failed])]
            cards[failed].fault = ""
        assert "card" in retries
        cards[0].fault = cards[1].fault = FAULT
        with raises_kind("shard_unavailable", match=r"card: .*cudaErrorIllegalAddress"):
            await ask()
        cards[0].fault = cards[1].fault = ""
        await shard.close()
    for node in nodes:
        node.close()
