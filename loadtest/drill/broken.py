"""`drill broken`: broken snapshots are published and rolled out; none may go live, and the old version serves on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from loader.errors import ShardrankError
from loader.progress import Progress
from loader.registry.fleet import PublishedVersion
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import CHECKSUM_NAME, MANIFEST_NAME
from loader.snapshot.publishing import publish
from loadtest.drill.answers import Answers, answer_limits, count_kinds, latency_ms, percentile
from loadtest.drill.config import BrokenDrillConfig
from loadtest.drill.fleet import FIRST_VERSION, OracleFleet, oracle_fleet
from loadtest.drill.oracle import Kind, golden_requests, letter_of
from loadtest.drill.report import Limit, Report

FULL_DISK_TIMEOUT_S = 120.0
# Without a tmpfs the size of files is limited, to so small a part of the room.
FILE_SHARE = 16
_NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EFBIG))
# The mount ends with its namespace, so what was left behind is listed there.
_FULL_DISK = f"""
if mount -t tmpfs -o "size=$1k" tmpfs "$2" 2>/dev/null; then echo tmpfs
else ulimit -f $(($1 / {FILE_SHARE})); echo RLIMIT_FSIZE; fi
"${{@:4}}" 2>&1; code=$?
echo; ls -1 "$2/store/$3" 2>/dev/null | tr '\\n' ' '
exit $code
"""
ROWS_PER_FILE = 1024
EXAMPLES = 3
WARMUP_S = 2.0

Refusal = Literal["publish", "rollout", "none"]
Break: TypeAlias = Callable[[Path], None]
"""Breaks the snapshot in a folder."""


class Attempt(NamedTuple):
    """One broken snapshot: the kind of damage, the damage, who refused it (`none` if it went live), and why."""

    group: str
    what: str
    refused_by: Refusal
    reason: str


@dataclass(slots=True)
class _Course:
    """The drill as it goes; `total` attempts will be made."""

    fleet: OracleFleet
    progress: Progress
    total: int
    attempts: list[Attempt] = field(default_factory=list)

    def add(self, group: str, what: str, refused_by: Refusal, reason: str) -> None:
        self.attempts.append(Attempt(group, what, refused_by, reason))
        self.progress("broken snapshots", len(self.attempts), self.total)

    async def export(self, golden: GoldenRequests | None = None) -> Path:
        """Export the next version of the letter that is not live."""
        export = partial(self.fleet.export_next, FIRST_VERSION, golden=golden, rows_per_file=ROWS_PER_FILE)
        return await asyncio.to_thread(export)

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

    async def hand_over(self, group: str, what: str, snapshot: Path, break_: Break) -> None:
        """Break a copy of what training hands over, and attempt it."""
        copy = self.fleet.folder / "broken" / snapshot.parent.name / snapshot.name
        await asyncio.to_thread(shutil.copytree, snapshot, copy)
        break_(copy)
        self.add(group, what, *await self.attempt(copy))
        await asyncio.to_thread(shutil.rmtree, copy)

    async def publish_sound(self) -> tuple[PublishedVersion, Path]:
        """Publish a sound snapshot; return its record, and its folder in the store."""
        published = await publish(self.fleet.registry, await self.export(), self.fleet.store, clock=time.time)
        return published.record, Path(published.where)


async def run_drill(config: BrokenDrillConfig, folder: Path, progress: Progress) -> Report:
    """Run the drill; stores, logs and answers go into the folder.

    Raises DrillError if a rollout does not end. What else goes wrong is in the report.
    """
    async with oracle_fleet(config, folder, progress) as fleet:
        await asyncio.sleep(WARMUP_S)
        forgeries = _forgeries(config.embedding_dim)
        in_files = config.truncations + config.bit_flips
        course = _Course(fleet, progress, in_files + 2 * config.damaged_in_store + 2 * len(forgeries) + 3)
        means = await _full_disk(course, folder)
        await _damaged(config, course)
        fleet.load.check()
        for what, forge in forgeries.items():
            await _forged(course, what, forge)
        # Sound in itself, but trained to other scores: those of the version that is live.
        snapshot = await course.export(golden_requests(fleet.spec, letter_of(FIRST_VERSION)))
        course.add("wrong golden scores", "golden scores of the live version", *await course.attempt(snapshot))
        fleet.load.check()
        control_begun = time.monotonic()
        refused_by, _ = await course.attempt(await course.export())
        await asyncio.sleep(WARMUP_S)
        answers = await fleet.load.stop()
        figures = {
            **broken_figures(course.attempts, answers, control_begun),
            "disk_full_means": means,
            "control_went_live": refused_by == "none",
        }
        return fleet.report(figures, broken_limits(figures))


async def _full_disk(course: _Course, folder: Path) -> str:
    """Publish to disks on which a first file, and a last one, don't fit. Returns how the disks were made full."""
    registry, means, snapshot = course.fleet.registry, "", await course.export()
    size_kb = sum(path.stat().st_size for path in snapshot.rglob("*") if path.is_file()) // 1024
    for number, room_kb in enumerate((size_kb // 8, size_kb // 2)):
        disk = folder / f"disk-{number}"
        disk.mkdir()
        means, refused_by, reason = await asyncio.to_thread(
            publish_to_full_disk, snapshot, registry.registry.url, disk, room_kb
        )
        if await registry.version(course.fleet.model, course.fleet.exported) is not None:
            refused_by = "none"
        what = f"{size_kb} KiB into a store with {room_kb} KiB"
        course.add("disk full while publishing", what, refused_by, reason)
    return means


async def _damaged(config: BrokenDrillConfig, course: _Course) -> None:
    """Damage what training hands over, and the store's disk: what was published is sound, what is read is not."""
    snapshot = await course.export()
    counts = {truncate: config.truncations, flip_bit: config.bit_flips}
    for damage, count in counts.items():
        for what, break_ in random_damages(snapshot, damage, count, config.seed):
            await course.hand_over(f"{DAMAGES[damage]} before publishing", what, snapshot, break_)
    for damage in counts:
        for number in range(config.damaged_in_store):
            record, folder = await course.publish_sound()
            ((what, break_),) = random_damages(folder, damage, 1, config.seed + 1 + number)
            break_(folder)
            course.add(f"{DAMAGES[damage]} in the store", what, *await course.roll_out(record))


def _forgeries(embedding_dim: int) -> dict[str, Break]:
    """Return what breaks a snapshot, and leaves its checksums right."""
    return {
        # An int8 row's scale is after its codes.
        "NaN as the scale of an int8 row": partial(forge_nan_row, table="items", row_offset=embedding_dim),
        "NaN in a float32 row": partial(forge_nan_row, table="users", row_offset=0),
        "NaN in a float16 row": partial(forge_nan_row, table="tags", row_offset=0),
        "NaN as a weight of the dense model": forge_nan_weight,
        "files of a table are missing": partial(delete_table, table="users"),
        "a table is missing in files and manifest": partial(forge_without_table, table="users"),
    }


async def _forged(course: _Course, what: str, forge: Break) -> None:
    """Hand it over as training does, then put it on record without the checks of `publish`: nodes must check too."""
    await course.hand_over(what, what, await course.export(), forge)
    record, folder = await course.publish_sound()
    forge(folder)
    registry = course.fleet.registry
    await registry.drop_version(record.model, record.version)
    identity = hashlib.sha256((folder / MANIFEST_NAME).read_bytes()).hexdigest()
    await registry.put_spec(record.model, record.version, course.fleet.spec.model_dump_json())
    await registry.put_version(record.model_copy(update={"identity": identity}))
    course.add(f"{what}, on record unchecked", what, *await course.roll_out(record))


def broken_figures(attempts: Sequence[Attempt], answers: Answers, control_begun: float) -> dict[str, Any]:
    """Return what attempts and answers say; the first version was live until the sound snapshot at the end."""
    before = answers[(answers["ended"] < control_begun) & (answers["kind"] == Kind.OK)]
    groups: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        groups.setdefault(attempt.group, []).append(attempt)
    accepted = [attempt.refused_by for attempt in attempts].count("none")
    return {
        "tried": len(attempts),
        "refused": len(attempts) - accepted,
        "accepted": accepted,
        **count_kinds(answers["kind"]),
        "other_versions": int((before["version"] != FIRST_VERSION).sum()),
        "p99_ms": percentile(latency_ms(answers), 99),
        "groups": {group: _group_figures(members) for group, members in groups.items()},
    }


def _group_figures(attempts: Sequence[Attempt]) -> dict[str, Any]:
    refusals = [attempt.refused_by for attempt in attempts]
    return {
        "tried": len(attempts),
        "refused_by_publish": refusals.count("publish"),
        "refused_by_rollout": refusals.count("rollout"),
        "accepted": refusals.count("none"),
        "examples": [f"{attempt.what}: {attempt.reason}" for attempt in attempts[:EXAMPLES]],
    }


def broken_limits(figures: Mapping[str, Any]) -> list[Limit]:
    """Return what decides the verdict. If a sound snapshot does not go live, refusals prove nothing."""
    limits = [Limit(f"accepted: {group}", result["accepted"], 0) for group, result in figures["groups"].items()]
    went_live = Limit("control_went_live", figures["control_went_live"], 1, "at least")
    return [*limits, *answer_limits(figures, "other_versions"), went_live]


def truncate(folder: Path, path: str, offset: int, bit: int) -> None:
    """End a file at a byte."""
    del bit
    os.truncate(folder / path, offset)


def flip_bit(folder: Path, path: str, offset: int, bit: int) -> None:
    """Flip one bit of a byte of a file."""
    content = bytearray((folder / path).read_bytes())
    content[offset] ^= 1 << bit
    (folder / path).write_bytes(content)


Damage: TypeAlias = Callable[..., None]
DAMAGES: dict[Damage, str] = {truncate: "truncated", flip_bit: "bit flipped"}


def random_damages(folder: Path, damage: Damage, count: int, seed: int) -> Iterator[tuple[str, Break]]:
    """Draw places at random: first the file, each as likely as any other, so that small files get their share."""
    rng = np.random.default_rng(seed)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
    for _ in range(count):
        path = files[rng.integers(len(files))]
        name, offset, bit = (
            path.relative_to(folder).as_posix(),
            int(rng.integers(path.stat().st_size)),
            int(rng.integers(8)),
        )
        what = f"{name} {DAMAGES[damage]} at byte {offset}" + (f", bit {bit}" if damage is flip_bit else "")
        yield what, partial(damage, path=name, offset=offset, bit=bit)


def forge_nan_row(folder: Path, table: str, row_offset: int) -> None:
    """Write a NaN into the first row of a table, `row_offset` bytes into it, and make the checksums right again."""
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
        (dropped,) = (stated for stated in spec["tables"] if stated["name"] == table)
        spec["tables"].remove(dropped)
        spec["features"] = [stated for stated in spec["features"] if stated["name"] not in dropped["feature_names"]]
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
    """Yield the manifest to be changed; it is written after the block, with its checksum."""
    document = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    yield document
    content = json.dumps(document).encode()
    (folder / MANIFEST_NAME).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    (folder / CHECKSUM_NAME).write_text(f"{digest}  {MANIFEST_NAME}\n", encoding="utf-8")


def publish_to_full_disk(snapshot: Path, registry: str, folder: Path, size_kb: int) -> tuple[str, Refusal, str]:
    """Publish a snapshot into an empty folder, which becomes a store with room for `size_kb` KiB.

    Returns how the disk was made full, a `tmpfs` or where none can be mounted a limit on the size of files
    (`RLIMIT_FSIZE`); whether it was refused for want of room, without a half version; and what was said.
    """
    namespace: tuple[str, ...] = ("unshare", "--user", "--map-root-user", "--mount")
    try:
        subprocess.run((*namespace, "true"), check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        namespace = ()
    publish = (sys.executable, "-m", "serving.cli", "publish", str(snapshot), "--store", str(folder / "store"))
    disk = (str(size_kb), str(folder), snapshot.parent.name)
    result = subprocess.run(
        (*namespace, "bash", "-c", _FULL_DISK, "bash", *disk, *publish),
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "SHARDRANK_REGISTRY": registry},
        timeout=FULL_DISK_TIMEOUT_S,
    )
    means, _, output = result.stdout.partition("\n")
    message, _, names = output.rpartition("\n")
    left_behind = [name for name in names.split() if name.isdecimal()]
    says_why = any(reason in message for reason in _NO_ROOM) and "Traceback" not in message
    is_refused = result.returncode != 0 and says_why and not left_behind
    reason = f"exit code {result.returncode}: {message.strip()[-500:]}; left behind: {left_behind}"
    return means, "publish" if is_refused else "none", reason
