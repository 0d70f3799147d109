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
    groups = (None if limit is None else max(0, limit - usage) for limit, usage in _control_groups(root))
    return min([_machine_bytes(root, "MemAvailable"), *(left for left in groups if left is not None)])


def total_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that there are: the machine's, or the smallest limit of a control group of this process.

    Raises:
        MemoryBudgetError: if /proc/meminfo has no MemTotal.
    """
    limits = (limit for limit, _ in _control_groups(root) if limit is not None)
    return min([_machine_bytes(root, "MemTotal"), *limits])


def _machine_bytes(root: Path, name: str) -> int:
    path = root / "proc/meminfo"
    for line in path.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise MemoryBudgetError(f"{path} has no {name} line")


def _control_groups(root: Path) -> list[tuple[int | None, int]]:
    """(limit, usage) in bytes of each group, from this process's own upwards; None for no limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    found: list[tuple[int | None, int]] = []
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
            if level.is_relative_to(top) and (use := _read_group(level, *names)) is not None:
                found.append(use)
    return found


def _read_group(folder: Path, limit_name: str, usage_name: str) -> tuple[int | None, int] | None:
    try:
        limit = (folder / limit_name).read_text(encoding="ascii").strip()
        usage = (folder / usage_name).read_text(encoding="ascii").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return (None if limit == "max" else int(limit)), int(usage)
