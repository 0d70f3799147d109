"""`drill broken`: broken snapshots are published and rolled out; none may go live, and the old version serves on."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from loader.errors import ShardrankError
from loader.progress import Progress, no_progress
from loader.registry.fleet import PublishedVersion
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import MANIFEST_NAME, Frozen
from loader.snapshot.publishing import publish
from loadtest.drill.damage import (
    DamageKind,
    damaged,
    delete_table,
    forge_nan_row,
    forge_nan_weight,
    forge_without_table,
    publish_to_full_disk,
    random_damages,
)
from loadtest.drill.fleet import FIRST_VERSION, FleetReport, OracleFleet, OracleFleetConfig, oracle_fleet
from loadtest.drill.load import Answers, count_kinds, counted, latency_ms, percentile, running_load
from loadtest.drill.oracle import Kind, OracleShape, golden_requests, letter_of

ROWS_PER_FILE = 1024
EXAMPLES = 3
WARMUP_S = 2.0
_KINDS: tuple[DamageKind, ...] = ("truncated", "bit flipped")
Refusal = Literal["publish", "rollout", "none"]


class BrokenDrillConfig(OracleFleetConfig):
    """A drill against broken snapshots.

    Attributes:
        truncations: snapshots of which a file ends at a random byte.
        bit_flips: snapshots of which one bit is the other one.
        damaged_in_store: of each of these kinds, how many are damaged in the store, after they were published.
    """

    shape: OracleShape = OracleShape(items=4000, users=2000, tags=200)
    rate: float = Field(default=20.0, gt=0, le=100_000)
    truncations: int = Field(default=200, ge=0, le=1_000_000)
    bit_flips: int = Field(default=1000, ge=0, le=1_000_000)
    damaged_in_store: int = Field(default=5, ge=0, le=10_000)
    seed: int = 0


class Attempt(NamedTuple):
    """One broken snapshot: the kind of damage, the damage, who refused it (`none` if it went live), and why."""

    group: str
    what: str
    refused_by: Refusal
    reason: str


class GroupResult(Frozen):
    """All broken snapshots of one kind, with the first damages and the reasons that were told."""

    tried: int
    refused_by_publish: int
    refused_by_rollout: int
    accepted: int
    examples: tuple[str, ...]


class BrokenReport(FleetReport):
    """What `drill broken --json` writes.

    Attributes:
        other_versions: right answers that named another version than the one that was live throughout.
        disk_full_means: how a full disk was made.
        control_went_live: whether the sound snapshot at the end was published and rolled out.
    """

    tried: int
    refused: int
    accepted: int
    other_versions: int
    p99_ms: float | None
    disk_full_means: str
    control_went_live: bool
    groups: dict[str, GroupResult]


@dataclass(slots=True)
class _Course:
    """The drill as it goes."""

    fleet: OracleFleet
    progress: Progress
    total: int
    attempts: list[Attempt] = field(default_factory=list)

    def add(self, group: str, what: str, refused_by: Refusal, reason: str) -> None:
        self.attempts.append(Attempt(group, what, refused_by, reason))
        self.progress("broken snapshots", len(self.attempts), self.total)


async def run_broken_drill(config: BrokenDrillConfig, folder: Path, progress: Progress = no_progress) -> BrokenReport:
    """Run the drill; stores, logs and answers go into the folder.

    Raises:
        DrillError: a rollout did not end, or the load failed. What else goes wrong is in the report.
        ShardrankError: the fleet did not come up.
    """
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(oracle_fleet(config, folder, progress))
        load = await stack.enter_async_context(running_load(fleet.load_config(folder / "broken.answers")))
        await asyncio.sleep(WARMUP_S)
        in_files = config.truncations + config.bit_flips
        course = _Course(fleet, progress, in_files + 2 * config.damaged_in_store + 2 * len(_forgeries(fleet)) + 3)
        means = await _full_disk(course, folder)
        await _damaged_before(config, course)
        load.check()
        await _damaged_in_store(config, course)
        for what, forge in _forgeries(fleet).items():
            await _forged(course, what, forge)
        await _wrong_golden_scores(course)
        load.check()
        control_begun = time.monotonic()
        control = await _try(fleet, _export(fleet))
        await asyncio.sleep(WARMUP_S)
        answers = await load.stop()
        facts = {
            **config.facts(load),
            "disk_full_means": means,
            "control_went_live": control[0] == "none",
        }
        return make_broken_report(course.attempts, answers, control_begun, FIRST_VERSION, facts)


def _export(fleet: OracleFleet, golden: GoldenRequests | None = None) -> Path:
    """Return the next version of the letter that is not live, exported but not published."""
    return fleet.export_next(FIRST_VERSION, golden=golden, rows_per_file=ROWS_PER_FILE)


async def _try(fleet: OracleFleet, folder: Path) -> tuple[Refusal, str]:
    """Publish a snapshot and, if that is not refused, roll it out. Returns who refused it, and why."""
    try:
        published = await publish(fleet.registry, folder, fleet.store, clock=time.time)
    except (ShardrankError, OSError) as error:
        return "publish", f"{type(error).__name__}: {error}"
    return await _roll_out(fleet, published.record.version)


async def _roll_out(fleet: OracleFleet, version: int) -> tuple[Refusal, str]:
    rollout = await fleet.roll_out(version)
    return ("none", "") if rollout.state == "done" else ("rollout", f"{rollout.state}: {rollout.reason}")


async def _full_disk(course: _Course, folder: Path) -> str:
    """Return a copy into the store, and one whose last file does not fit. Returns how the disk was made full."""
    fleet = course.fleet
    snapshot = await asyncio.to_thread(_export, fleet)
    size_kb = sum(path.stat().st_size for path in snapshot.rglob("*") if path.is_file()) // 1024
    means = ""
    for number, room_kb in enumerate((size_kb // 8, size_kb // 2)):
        disk = folder / f"disk-{number}"
        disk.mkdir()
        url = fleet.registry.registry.url
        result = await publish_to_full_disk(snapshot, url, disk, room_kb)
        on_record = await fleet.registry.version(fleet.model, fleet.exported)
        refused = result.refused and on_record is None
        means = result.means
        course.add(
            "disk full while publishing",
            f"{size_kb} KiB into a store with {room_kb} KiB",
            "publish" if refused else "none",
            f"exit code {result.exit_code}: {result.message}; left behind: {list(result.left_behind)}",
        )
    shutil.rmtree(snapshot)
    return means


async def _damaged_before(config: BrokenDrillConfig, course: _Course) -> None:
    """Damage in what training hands over."""
    snapshot = await asyncio.to_thread(_export, course.fleet)
    counts = {"truncated": config.truncations, "bit flipped": config.bit_flips}
    for kind in _KINDS:
        for damage in random_damages(snapshot, kind, counts[kind], config.seed):
            with damaged(snapshot, damage):
                refused_by, reason = await _try(course.fleet, snapshot)
            course.add(f"{kind} before publishing", str(damage), refused_by, reason)
    await asyncio.to_thread(shutil.rmtree, snapshot)


async def _damaged_in_store(config: BrokenDrillConfig, course: _Course) -> None:
    """Damage on the store's disk: what was published is sound, what the nodes read is not."""
    fleet = course.fleet
    for kind in _KINDS:
        for number in range(config.damaged_in_store):
            source = await asyncio.to_thread(_export, fleet)
            published = await publish(fleet.registry, source, fleet.store, clock=time.time)
            damage = random_damages(published.folder, kind, 1, config.seed + 1 + number)[0]
            with damaged(published.folder, damage):
                refused_by, reason = await _roll_out(fleet, published.record.version)
            course.add(f"{kind} in the store", str(damage), refused_by, reason)
            await asyncio.to_thread(shutil.rmtree, source)


def _forgeries(fleet: OracleFleet) -> dict[str, Callable[[Path], None]]:
    """Snapshots whose checksums are right."""
    dim = fleet.config.shape.embedding_dim
    return {
        "NaN as the scale of an int8 row": partial(forge_nan_row, table="items", row_offset=dim),
        "NaN in a float32 row": partial(forge_nan_row, table="users", row_offset=0),
        "NaN in a float16 row": partial(forge_nan_row, table="tags", row_offset=0),
        "NaN as a weight of the dense model": forge_nan_weight,
        "files of a table are missing": partial(delete_table, table="users"),
        "a table is missing in files and manifest": partial(forge_without_table, table="users"),
    }


async def _wrong_golden_scores(course: _Course) -> None:
    """Sound in itself, but trained to other scores: those of the version that is live."""
    snapshot = await asyncio.to_thread(
        _export, course.fleet, golden_requests(course.fleet.writer.spec, letter_of(FIRST_VERSION))
    )
    refused_by, reason = await _try(course.fleet, snapshot)
    course.add("wrong golden scores", "golden scores of the live version", refused_by, reason)
    await asyncio.to_thread(shutil.rmtree, snapshot)


async def _forged(course: _Course, what: str, forge: Callable[[Path], None]) -> None:
    """Handed over by training, and then put on record without the checks of `publish`: nodes check for themselves."""
    fleet = course.fleet
    snapshot = await asyncio.to_thread(_export, fleet)
    forge(snapshot)
    refused_by, reason = await _try(fleet, snapshot)
    course.add(what, what, refused_by, reason)
    await asyncio.to_thread(shutil.rmtree, snapshot)
    source = await asyncio.to_thread(_export, fleet)
    published = await publish(fleet.registry, source, fleet.store, clock=time.time)
    shutil.rmtree(published.folder)
    forge(source)
    source.rename(published.folder)
    await _put_on_record(fleet, published.record, published.folder)
    refused_by, reason = await _roll_out(fleet, published.record.version)
    course.add(f"{what}, on record unchecked", what, refused_by, reason)


async def _put_on_record(fleet: OracleFleet, record: PublishedVersion, folder: Path) -> None:
    """Make the record of a version that of the snapshot which lies there now."""
    await fleet.registry.drop_version(record.model, record.version)
    identity = hashlib.sha256((folder / MANIFEST_NAME).read_bytes()).hexdigest()
    await fleet.registry.put_spec(record.model, record.version, fleet.writer.spec.model_dump_json())
    await fleet.registry.put_version(record.model_copy(update={"identity": identity}))


def make_broken_report(
    attempts: Sequence[Attempt], answers: Answers, control_begun: float, version: int, facts: Mapping[str, Any]
) -> BrokenReport:
    """Draw up the report; `version` was live until the sound snapshot at the end was begun. `facts` are the rest."""
    before = answers[(answers["ended"] < control_begun) & (answers["kind"] == Kind.OK)]
    accepted = [one for one in attempts if one.refused_by == "none"]
    report = BrokenReport(
        tried=len(attempts),
        refused=len(attempts) - len(accepted),
        accepted=len(accepted),
        **count_kinds(answers),
        other_versions=int((before["version"] != version).sum()),
        p99_ms=percentile(latency_ms(answers), 99),
        groups={group: _group(attempts, group) for group in dict.fromkeys(one.group for one in attempts)},
        **facts,
    )
    problems = [f"accepted: {one.group}: {one.what}" for one in accepted]
    problems += counted(
        {
            "failed": report.failed,
            "are mixed": report.mixed,
            "are wrong": report.wrong,
            f"named another version than {version}": report.other_versions,
        }
    )
    if not report.control_went_live:
        problems.append("the sound snapshot at the end did not go live, so refusals prove nothing")
    return report.model_copy(update={"problems": tuple(problems)})


def _group(attempts: Sequence[Attempt], group: str) -> GroupResult:
    own = [one for one in attempts if one.group == group]
    by = [one.refused_by for one in own]
    return GroupResult(
        tried=len(own),
        refused_by_publish=by.count("publish"),
        refused_by_rollout=by.count("rollout"),
        accepted=by.count("none"),
        examples=tuple(f"{one.what}: {one.reason}" for one in own[:EXAMPLES]),
    )
