"""`shardrank publish` into a full disk: a small tmpfs, or where none can be mounted a limit on the size of files."""

from __future__ import annotations

import asyncio
import errno
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 120.0
_NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EFBIG))


@dataclass(frozen=True, slots=True)
class FullDiskResult:
    """What came of it.

    Attributes:
        means: `tmpfs` (mounted in a namespace of its own) or `RLIMIT_FSIZE`.
        exit_code: of the command.
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


async def publish_to_full_disk(snapshot: Path, registry: str, folder: Path, size_kb: int) -> FullDiskResult:
    """Publishes a snapshot into a store that has room for a part of it.

    Args:
        snapshot: the snapshot's folder, `<model>/<version>`.
        registry: the fleet's, by URL or folder.
        folder: an empty folder, which becomes the store.
        size_kb: room, in KiB; less than the snapshot has.
    """
    store, model = folder / "store", snapshot.parent.name
    listing = f"ls -1 {shlex.quote(str(store / model))} 2>/dev/null"
    publish = shlex.join([sys.executable, "-m", "serving.cli", "publish", str(snapshot), "--store", str(store)])
    means = await _means(folder)
    if means == "tmpfs":
        # The mount is seen by nobody else and ends with the namespace; the listing must be made inside.
        script = f"mount -t tmpfs -o size={size_kb}k tmpfs {shlex.quote(str(folder))} && {publish}; code=$?"
        command = ["unshare", "--user", "--map-root-user", "--mount"]
    else:
        # Python ignores SIGXFSZ, so the write fails as it would on a full disk, with another error number.
        script = f"ulimit -f {size_kb // 16}; {publish}; code=$?"
        command = []
    script += f"; echo; echo LISTING; {listing}; exit $code"
    code, output = await _run([*command, "bash", "-c", script], registry)
    message, _, names = output.rpartition("LISTING\n")
    left = tuple(name for name in names.split() if name.isdecimal())
    return FullDiskResult(means, code, message.strip()[-500:], left)


async def _means(folder: Path) -> str:
    probe = f"mount -t tmpfs -o size=64k tmpfs {shlex.quote(str(folder))}"
    code, _ = await _run(["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", probe], "")
    return "tmpfs" if code == 0 else "RLIMIT_FSIZE"


async def _run(command: Sequence[str], registry: str) -> tuple[int, str]:
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "SHARDRANK_REGISTRY": registry},
        )
    except FileNotFoundError:
        return 127, ""
    try:
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    except BaseException:
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise
    assert process.returncode is not None
    return process.returncode, output.decode("utf-8", "replace")
