"""`drill broken`: broken snapshots are published and rolled out; none may go live, and the old version serves on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import math
import os
import shlex
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from loader.errors import ShardrankError
from loader.progress import Progress, no_progress
from loader.registry.fleet import PublishedVersion
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import CHECKSUM_NAME, MANIFEST_NAME
from loader.snapshot.publishing import publish
from loader.snapshot.tables import Frozen
from loadtest.drill.fleet import FIRST_VERSION, FleetReport, OracleFleet, OracleFleetConfig, oracle_fleet
from loadtest.drill.load import Answers, count_kinds, counted, latency_ms, percentile
from loadtest.drill.oracle import Kind, OracleShape, golden_requests, letter_of

DamageKind = Literal["truncated", "bit flipped"]
FULL_DISK_TIMEOUT_S = 120.0
_NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EFBIG))
ROWS_PER_FILE = 1024
EXAMPLES = 3
WARMUP_S = 2.0
Refusal = Literal["publish", "rollout", "none"]


class BrokenDrillConfig(OracleFleetConfig):
    """A drill against broken snapshots.

    Attributes:
        truncations: snapshots of which a file ends at a random byte.
        bit_flips: snapshots of which one bit is the other one.
        damaged_in_store: of each of these kinds, how many are damaged in the store, after they were published.
    """

    NAME: ClassVar[str] = "broken"
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

    @contextlib.asynccontextmanager
    async def exported(self, golden: GoldenRequests | None = None) -> AsyncIterator[Path]:
        """Export the next version of the letter that is not live, and delete it after the block."""
        folder = await asyncio.to_thread(
            self.fleet.export_next, FIRST_VERSION, golden=golden, rows_per_file=ROWS_PER_FILE
        )
        yield folder
        await asyncio.to_thread(shutil.rmtree, folder)

    async def attempt(self, folder: Path) -> tuple[Refusal, str]:
        """Publish a snapshot and, if that is not refused, roll it out. Returns who refused it, and why."""
        try:
            published = await publish(self.fleet.registry, folder, self.fleet.store, clock=time.time)
        except (ShardrankError, OSError) as error:
            return "publish", f"{type(error).__name__}: {error}"
        return await self.roll_out(published.record)

    async def roll_out(self, record: PublishedVersion) -> tuple[Refusal, str]:
        rollout = await self.fleet.roll_out(record.version)
        return ("none", "") if rollout.state == "done" else ("rollout", f"{rollout.state}: {rollout.reason}")

    async def published(self) -> tuple[PublishedVersion, Path]:
        """Publish a sound snapshot; its record, and its folder in the store."""
        async with self.exported() as source:
            made = await publish(self.fleet.registry, source, self.fleet.store, clock=time.time)
        return made.record, Path(made.where)


async def run_broken_drill(config: BrokenDrillConfig, folder: Path, progress: Progress = no_progress) -> BrokenReport:
    """Run the drill; stores, logs and answers go into the folder.

    Raises DrillError if a rollout does not end, or the load fails. What else goes wrong is in the report.
    """
    async with oracle_fleet(config, folder, progress) as fleet:
        await asyncio.sleep(WARMUP_S)
        in_files, forgeries = config.truncations + config.bit_flips, _forgeries(fleet)
        course = _Course(fleet, progress, in_files + 2 * config.damaged_in_store + 2 * len(forgeries) + 3)
        means = await _full_disk(course, folder)
        await _damaged(config, course)
        fleet.load.check()
        for what, forge in forgeries.items():
            await _forged(course, what, forge)
        # Sound in itself, but trained to other scores: those of the version that is live.
        async with course.exported(golden_requests(fleet.writer.spec, letter_of(FIRST_VERSION))) as snapshot:
            course.add("wrong golden scores", "golden scores of the live version", *await course.attempt(snapshot))
        fleet.load.check()
        control_begun = time.monotonic()
        async with course.exported() as snapshot:
            refused_by, _ = await course.attempt(snapshot)
        await asyncio.sleep(WARMUP_S)
        answers = await fleet.load.stop()
        facts = {**fleet.facts(), "disk_full_means": means, "control_went_live": refused_by == "none"}
        return make_broken_report(course.attempts, answers, control_begun, FIRST_VERSION, facts)


async def _full_disk(course: _Course, folder: Path) -> str:
    """Publish to disks on which a first file, and a last one, don't fit. Returns how the disks were made full."""
    fleet, means = course.fleet, ""
    async with course.exported() as snapshot:
        size_kb = sum(path.stat().st_size for path in snapshot.rglob("*") if path.is_file()) // 1024
        for number, room_kb in enumerate((size_kb // 8, size_kb // 2)):
            disk = folder / f"disk-{number}"
            disk.mkdir()
            url = fleet.registry.registry.url
            result = await asyncio.to_thread(publish_to_full_disk, snapshot, url, disk, room_kb)
            on_record = await fleet.registry.version(fleet.model, fleet.exported)
            means = result.means
            course.add(
                "disk full while publishing",
                f"{size_kb} KiB into a store with {room_kb} KiB",
                "publish" if result.refused and on_record is None else "none",
                f"exit code {result.exit_code}: {result.message}; left behind: {list(result.left_behind)}",
            )
    return means


async def _damaged(config: BrokenDrillConfig, course: _Course) -> None:
    """Damage in what training hands over, and on the store's disk: what was published is sound, what is read is not."""
    counts: dict[DamageKind, int] = {"truncated": config.truncations, "bit flipped": config.bit_flips}
    async with course.exported() as snapshot:
        for kind, count in counts.items():
            for damage in random_damages(snapshot, kind, count, config.seed):
                with damaged(snapshot, damage):
                    course.add(f"{kind} before publishing", str(damage), *await course.attempt(snapshot))
    for kind in counts:
        for number in range(config.damaged_in_store):
            record, folder = await course.published()
            damage = random_damages(folder, kind, 1, config.seed + 1 + number)[0]
            with damaged(folder, damage):
                course.add(f"{kind} in the store", str(damage), *await course.roll_out(record))


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


async def _forged(course: _Course, what: str, forge: Callable[[Path], None]) -> None:
    """Handed over by training, and then put on record without the checks of `publish`: nodes check for themselves."""
    async with course.exported() as snapshot:
        forge(snapshot)
        course.add(what, what, *await course.attempt(snapshot))
    record, folder = await course.published()
    forge(folder)
    registry = course.fleet.registry
    await registry.drop_version(record.model, record.version)
    identity = hashlib.sha256((folder / MANIFEST_NAME).read_bytes()).hexdigest()
    await registry.put_spec(record.model, record.version, course.fleet.writer.spec.model_dump_json())
    await registry.put_version(record.model_copy(update={"identity": identity}))
    course.add(f"{what}, on record unchecked", what, *await course.roll_out(record))


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
        groups={
            group: _group([one for one in attempts if one.group == group])
            for group in dict.fromkeys(one.group for one in attempts)
        },
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


def _group(own: Sequence[Attempt]) -> GroupResult:
    by = [one.refused_by for one in own]
    return GroupResult(
        tried=len(own),
        refused_by_publish=by.count("publish"),
        refused_by_rollout=by.count("rollout"),
        accepted=by.count("none"),
        examples=tuple(f"{one.what}: {one.reason}" for one in own[:EXAMPLES]),
    )


# Ways to break a snapshot: damage that checksums show, forgeries whose checksums are right, and a full disk.


@dataclass(frozen=True, slots=True)
class Damage:
    """One place of one file: it ends at byte `offset`, or bit `bit` of that byte is the other one."""

    kind: DamageKind
    path: str
    offset: int
    bit: int = 0

    def __str__(self) -> str:
        at = f"at byte {self.offset}" if self.kind == "truncated" else f"in bit {self.bit} of byte {self.offset}"
        return f"{self.path} {self.kind} {at}"


def random_damages(folder: Path, kind: DamageKind, count: int, seed: int) -> list[Damage]:
    """Places drawn at random: first the file, each as likely as any other, so that small files get their share."""
    rng = np.random.default_rng(seed)
    sizes = [
        (path.relative_to(folder).as_posix(), path.stat().st_size)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.stat().st_size
    ]
    found = []
    for _ in range(count):
        path, size = sizes[rng.integers(len(sizes))]
        bit = int(rng.integers(8)) if kind == "bit flipped" else 0
        found.append(Damage(kind, path, int(rng.integers(size)), bit))
    return found


@contextlib.contextmanager
def damaged(folder: Path, damage: Damage) -> Iterator[None]:
    """Return the damage is there while the block runs."""
    path = folder / damage.path
    with path.open("r+b") as file:
        file.seek(damage.offset)
        if damage.kind == "truncated":
            lost = file.read()
            file.truncate(damage.offset)
        else:
            lost = file.read(1)
            file.seek(damage.offset)
            file.write(bytes([lost[0] ^ 1 << damage.bit]))
    try:
        yield
    finally:
        with path.open("r+b") as file:
            file.seek(damage.offset)
            file.write(lost)


def forge_nan_row(folder: Path, table: str, row_offset: int) -> None:
    """Write a NaN into the first row of a table, `row_offset` bytes into it, and make the checksums right again.

    An int8 row's scale lies behind its codes.
    """
    with _manifest(folder) as document:
        files = next(files for files in document["tables"] if files["table"] == table)
        _write_nan(folder, files["rows"][0], row_offset)


def forge_nan_weight(folder: Path) -> None:
    """Write a NaN into the dense model's first weight, and make the checksums right again."""
    with _manifest(folder) as document:
        _write_nan(folder, document["dense"], 0)


def delete_table(folder: Path, table: str) -> None:
    """Delete a table's files. The manifest still names them."""
    shutil.rmtree(folder / "tables" / table)


def forge_without_table(folder: Path, table: str) -> None:
    """Delete a table with its features from the files and from the manifest, and make its checksum right again."""
    delete_table(folder, table)
    with _manifest(folder) as document:
        spec = document["spec"]
        gone = {name for one in spec["tables"] if one["name"] == table for name in one["feature_names"]}
        spec["tables"] = [one for one in spec["tables"] if one["name"] != table]
        spec["features"] = [one for one in spec["features"] if one["name"] not in gone]
        document["tables"] = [files for files in document["tables"] if files["table"] != table]
        # Golden requests with features that the model has not would show it at once.
        document["golden"] = None


def _write_nan(folder: Path, stated: dict[str, Any], offset: int) -> None:
    """Write a NaN into the data of a safetensors file, and restate its checksum in what the manifest says of it."""
    path = folder / stated["path"]
    content = bytearray(path.read_bytes())
    # The header's length as uint64, the header, the data.
    struct.pack_into("<f", content, 8 + struct.unpack_from("<Q", content)[0] + offset, math.nan)
    path.write_bytes(content)
    stated["sha256"] = hashlib.sha256(content).hexdigest()


@contextlib.contextmanager
def _manifest(folder: Path) -> Iterator[dict[str, Any]]:
    """Give the manifest to be changed; it is written after the block, with its checksum."""
    document = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    yield document
    content = json.dumps(document).encode()
    (folder / MANIFEST_NAME).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    (folder / CHECKSUM_NAME).write_text(f"{digest}  {MANIFEST_NAME}\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class FullDiskResult:
    """What came of publishing to a full disk.

    Attributes:
        means: `tmpfs` (mounted in a namespace of its own) or `RLIMIT_FSIZE`.
        message: the end of what it wrote.
        left_behind: names in the model's folder of the store that a reader could take for a version.
    """

    means: str
    exit_code: int
    message: str
    left_behind: tuple[str, ...]

    @property
    def refused(self) -> bool:
        """It failed for want of room, and there is no half version."""
        told = any(reason in self.message for reason in _NO_ROOM)
        return self.exit_code != 0 and told and not self.left_behind and "Traceback" not in self.message


def publish_to_full_disk(snapshot: Path, registry: str, folder: Path, size_kb: int) -> FullDiskResult:
    """Publish a snapshot into an empty folder, which becomes a store with room for `size_kb` KiB.

    The disk is a small tmpfs, or where none can be mounted, a limit on the size of files stands in for it.
    """
    store, model = folder / "store", snapshot.parent.name
    listing = f"ls -1 {shlex.quote(str(store / model))} 2>/dev/null"
    publish = shlex.join([sys.executable, "-m", "serving.cli", "publish", str(snapshot), "--store", str(store)])
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = f"mount -t tmpfs -o size={size_kb}k tmpfs {shlex.quote(str(folder))}"
    means = "tmpfs" if _run([*alone, "bash", "-c", mount], registry)[0] == 0 else "RLIMIT_FSIZE"
    if means == "tmpfs":
        # The mount is seen by nobody else and ends with the namespace; the listing must be made inside.
        script, command = f"{mount} && {publish}; code=$?", alone
    else:
        # Python ignores SIGXFSZ, so the write fails as it would on a full disk, with another error number.
        script, command = f"ulimit -f {size_kb // 16}; {publish}; code=$?", []
    script += f"; echo; echo LISTING; {listing}; exit $code"
    code, output = _run([*command, "bash", "-c", script], registry)
    message, _, names = output.rpartition("LISTING\n")
    left = tuple(name for name in names.split() if name.isdecimal())
    return FullDiskResult(means, code, message.strip()[-500:], left)


def _run(command: Sequence[str], registry: str) -> tuple[int, str]:
    try:
        ran = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "SHARDRANK_REGISTRY": registry},
            timeout=FULL_DISK_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return 127, ""
    return ran.returncode, ran.stdout.decode("utf-8", "replace")
