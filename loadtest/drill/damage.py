"""Ways to break a snapshot: damage that checksums show, forgeries whose checksums are right, and a full disk."""

from __future__ import annotations

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from loader.snapshot.manifest import CHECKSUM_NAME, MANIFEST_NAME

DamageKind = Literal["truncated", "bit flipped"]
FULL_DISK_TIMEOUT_S = 120.0
_NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EFBIG))


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
