"""How much memory this process may still take: the machine's, and its control group's if that is less."""

from __future__ import annotations

from pathlib import Path

from shard_node.errors import MemoryBudgetError


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping or being killed for it.

    The smallest of MemAvailable (proc_meminfo(5)) and, for every control group from this process's own up to the root,
    its limit less its usage (cgroup v2 memory.max and memory.current, v1 memory.limit_in_bytes and
    memory.usage_in_bytes). Page cache that a group could drop counts as used, so the answer errs on the small side.

    Args:
        root: of the file system, so that tests can bring their own.

    Raises:
        MemoryBudgetError: if /proc/meminfo has no MemAvailable.
    """
    return min([_machine_bytes(root), *_control_group_bytes(root)])


def _machine_bytes(root: Path) -> int:
    path = root / "proc/meminfo"
    for line in path.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise MemoryBudgetError(f"{path} has no MemAvailable line")


def _control_group_bytes(root: Path) -> list[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    found: list[int] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = top / group.lstrip("/")
        # In a container the path may be the host's: then only the mounted top is there to be read.
        for level in [folder, *folder.parents]:
            if level.is_relative_to(top) and (left := _left_in(level, *names)) is not None:
                found.append(left)
    return found


def _left_in(folder: Path, limit_name: str, usage_name: str) -> int | None:
    try:
        limit = (folder / limit_name).read_text(encoding="ascii").strip()
        usage = (folder / usage_name).read_text(encoding="ascii").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None if limit == "max" else max(0, int(limit) - int(usage))
