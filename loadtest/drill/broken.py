"""`drill broken`: broken snapshots are published and rolled out; none may go live, and the old version serves on."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import shutil
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from loader.errors import ShardrankError
from loader.progress import Progress
from loader.snapshot.manifest import Manifest, ModelSpec, manifest_texts, read_manifest
from loader.snapshot.publishing import publish
from loadtest.drill.config import BrokenDrillConfig, Judged, Limit, Report, answer_limits
from loadtest.drill.fleet import FIRST_VERSION, OracleFleet, count_kinds, oracle_fleet
from loadtest.drill.oracle import golden_requests, write_oracle
from loadtest.load.result import OK, Rows

WATCH_S = 2.0
"""Answers of the version that goes live at the end."""

Refusal: TypeAlias = Literal["publish", "rollout", "none"]
When: TypeAlias = Literal["before publishing", "in the store", "on record unchecked"]
"""A snapshot is broken: as training hands it over; once it is published; likewise, and the record is put right again,
as if it had been published without a check."""
STAGE_TIMEOUT_S = 10.0
Break: TypeAlias = Callable[[Path], str | None]
"""Breaks the snapshot in a folder, and says what it did if its group does not."""


class Attempt(NamedTuple):
    """One broken snapshot: the kind of damage, the damage, who refused it (`none` if it went live), and why."""

    group: str
    what: str
    refused_by: Refusal
    reason: str


async def run_drill(config: BrokenDrillConfig, folder: Path, progress: Progress) -> Report:
    """Run the drill with its files in the folder. Raises LoadError if a rollout does not end."""
    # A file that is missing may come: the fleet goes back once that has lasted too long.
    async with oracle_fleet(config, folder, progress, stage_timeout_s=STAGE_TIMEOUT_S) as fleet:
        breaks, attempts = plan_breaks(config, fleet.spec), list[Attempt]()
        for group, when, break_ in breaks:
            progress("broken snapshots", len(attempts), len(breaks))
            attempts.append(await _attempt(fleet, group, when, break_))
        progress("broken snapshots", len(breaks), len(breaks))
        control_begun = time.monotonic()
        control = await _attempt(fleet, "sound", "before publishing", lambda snapshot: None)
        await asyncio.sleep(WATCH_S)
        return await fleet.report(partial(broken_figures, attempts, control_begun, control.refused_by == "none"))


def plan_breaks(config: BrokenDrillConfig, spec: ModelSpec) -> list[tuple[str, When, Break]]:
    """List the group of each broken snapshot, when it is broken and how."""
    rng = np.random.default_rng(config.seed)
    breaks: list[tuple[str, When, Break]] = []
    for damage, count in (("truncated", config.truncations), ("bit flipped", config.bit_flips)):
        break_ = partial(damage_at_random, damage=damage, rng=rng)
        breaks += [(f"{damage} before publishing", "before publishing", break_)] * count
        breaks += [(f"{damage} in the store", "in the store", break_)] * config.damaged_in_store
    forgeries: dict[str, Break] = {
        # An int8 row's scale is after its codes.
        "NaN as the scale of an int8 row": partial(forge_nan, table="items", offset=config.embedding_dim),
        "NaN in a float32 row": partial(forge_nan, table="users"),
        "NaN in a float16 row": partial(forge_nan, table="tags"),
        "NaN as a weight of the dense model": forge_nan,
        "files of a table are missing": delete_users,
        "a table is missing in files and manifest": partial(delete_users, in_manifest=True),
    }
    for what, forge in forgeries.items():
        breaks.append((what, "before publishing", forge))
        breaks.append((f"{what}, on record unchecked", "on record unchecked", forge))
    # Sound in itself, but trained to other scores: those of the version that is live.
    return [*breaks, ("wrong golden scores", "before publishing", partial(export_with_live_scores, spec=spec))]


async def _attempt(fleet: OracleFleet, group: str, when: When, break_: Break) -> Attempt:
    """Export a version of the letter that is not live, break it, and publish and roll it out as far as it is let."""
    source = fleet.folder / "source" if when == "before publishing" else fleet.store
    snapshot = await asyncio.to_thread(fleet.export_next, source, FIRST_VERSION)
    if when != "before publishing":
        record = (await publish(fleet.registry, snapshot, fleet.store, clock=time.time)).record
    what = break_(snapshot) or group
    if when == "before publishing":
        try:
            await publish(fleet.registry, snapshot, fleet.store, clock=time.time)
        except (ShardrankError, OSError) as error:
            return Attempt(group, what, "publish", f"{type(error).__name__}: {error}")
        finally:
            await asyncio.to_thread(shutil.rmtree, snapshot)
    elif when == "on record unchecked":
        _, identity = read_manifest(snapshot)
        await fleet.registry.drop_version(record.model, record.version)
        await fleet.registry.put_spec(record.model, record.version, fleet.spec.model_dump_json())
        await fleet.registry.put_version(record.model_copy(update={"identity": identity}))
    rollout = await fleet.run_rollout(fleet.exported)
    if rollout.state == "done":
        return Attempt(group, what, "none", "")
    return Attempt(group, what, "rollout", f"{rollout.state}: {rollout.reason}")


def broken_figures(attempts: Sequence[Attempt], control_begun: float, went_live: bool, answers: Rows) -> Judged:
    """Return what attempts and answers say, and the limits; the first version was live until the control began."""
    before = answers[(answers["ended"] < control_begun) & (answers["code"] == OK)]
    groups: dict[str, dict[str, Any]] = {}
    for group in dict.fromkeys(attempt.group for attempt in attempts):
        tried = [attempt for attempt in attempts if attempt.group == group]
        refusals = Counter(attempt.refused_by for attempt in tried)
        groups[group] = {
            "tried": len(tried),
            "refused_by_publish": refusals["publish"],
            "refused_by_rollout": refusals["rollout"],
            "accepted": refusals["none"],
            "examples": [f"{attempt.what}: {attempt.reason}" for attempt in tried[:3]],
        }
    accepted = sum(group["accepted"] for group in groups.values())
    figures = {
        "tried": len(attempts),
        "refused": len(attempts) - accepted,
        "accepted": accepted,
        **count_kinds(answers["code"]),
        "other_versions": int((before["version"] != FIRST_VERSION).sum()),
        "groups": groups,
        "control_went_live": went_live,
    }
    limits = [Limit(f"accepted: {name}", group["accepted"], 0) for name, group in groups.items()]
    # If a sound snapshot does not go live, refusals prove nothing.
    limits.append(Limit("control_went_live", went_live, 1, "at least"))
    return figures, [*limits, *answer_limits(figures, "other_versions")]


def damage_at_random(folder: Path, damage: str, rng: np.random.Generator) -> str:
    """Damage one place, in any file with equal likelihood, so that small ones get their share."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
    path = files[rng.integers(len(files))]
    content = bytearray(path.read_bytes())
    offset = int(rng.integers(len(content)))
    what = f"{path.relative_to(folder).as_posix()} {damage} at byte {offset}"
    if damage == "truncated":
        del content[offset:]
    else:
        bit = int(rng.integers(8))
        content[offset] ^= 1 << bit
        what += f", bit {bit}"
    path.write_bytes(content)
    return what


def forge_nan(folder: Path, table: str = "", offset: int = 0) -> None:
    """Write a NaN `offset` bytes into the data of a table's first file, or the dense model's, with right checksums."""
    with _manifest(folder) as document:
        rows = {files["table"]: files["rows"][0] for files in document["tables"]}
        stated = rows[table] if table else document["dense"]
        content = bytearray((folder / stated["path"]).read_bytes())
        # The header's length as uint64, the header, the data.
        struct.pack_into("<f", content, 8 + struct.unpack_from("<Q", content)[0] + offset, math.nan)
        (folder / stated["path"]).write_bytes(content)
        stated["sha256"] = hashlib.sha256(content).hexdigest()


def delete_users(folder: Path, in_manifest: bool = False) -> None:
    """Delete a table's files, or also the table and its features in the manifest, with the right checksum."""
    shutil.rmtree(folder / "tables" / "users")
    if not in_manifest:
        return
    with _manifest(folder) as document:
        spec = document["spec"]
        (users,) = (table for table in spec["tables"] if table["name"] == "users")
        spec["tables"].remove(users)
        spec["features"] = [feature for feature in spec["features"] if feature["name"] not in users["feature_names"]]
        document["tables"] = [files for files in document["tables"] if files["table"] != "users"]
        # Golden requests with features that the model has not would show it at once.
        document["golden"] = None


def export_with_live_scores(folder: Path, spec: ModelSpec) -> str:
    """Export it anew with the golden requests of the first version."""
    shutil.rmtree(folder)
    write_oracle(spec, folder.parents[1], int(folder.name), golden_requests(spec, FIRST_VERSION))
    return "golden scores of the live version"


@contextlib.contextmanager
def _manifest(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the manifest to be changed; it is written after the block, with its checksum."""
    manifest, _ = read_manifest(folder)
    document = manifest.model_dump(mode="json")
    yield document
    for name, text in manifest_texts(Manifest.model_validate(document)).items():
        (folder / name).write_text(text, encoding="utf-8")
