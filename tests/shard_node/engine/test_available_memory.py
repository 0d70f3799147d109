"""What may be taken is the least that the machine and any control group above this process leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from shard_node.engine.memory import available_memory_bytes, total_memory_bytes
from shard_node.errors import MemoryBudgetError

MIB = 1 << 20


def files(root: Path, **contents: str) -> Path:
    for name, text in contents.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def machine(root: Path, cgroup: str | None = None) -> Path:
    files(root, proc__meminfo=f"MemTotal: 9 kB\nMemAvailable:  {8 * 1024} kB\n")
    if cgroup is not None:
        files(root, proc__self__cgroup=cgroup)
    return root


def limit(root: Path, folder: str, maximum: str, current: int, v1: bool = False) -> None:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if v1 else ("memory.max", "memory.current")
    path = root / folder
    path.mkdir(parents=True, exist_ok=True)
    (path / names[0]).write_text(maximum + "\n")
    (path / names[1]).write_text(f"{current}\n")


def test_without_control_groups_it_is_the_machines(tmp_path):
    assert available_memory_bytes(machine(tmp_path)) == 8 * MIB


def test_the_tightest_group_on_the_way_up_decides(tmp_path):
    machine(tmp_path, "0::/a/b\n")
    limit(tmp_path, "sys/fs/cgroup/a/b", "max", 5 * MIB)
    limit(tmp_path, "sys/fs/cgroup/a", str(6 * MIB), 5 * MIB)
    limit(tmp_path, "sys/fs/cgroup", str(7 * MIB), 5 * MIB)
    assert available_memory_bytes(tmp_path) == MIB


def test_in_a_container_the_mounted_top_is_read_though_the_path_is_the_hosts(tmp_path):
    machine(tmp_path, "0::/kubepods/pod1/c1\n")
    limit(tmp_path, "sys/fs/cgroup", str(4 * MIB), MIB)
    assert available_memory_bytes(tmp_path) == 3 * MIB


def test_version_one_groups_are_read_and_other_controllers_are_not(tmp_path):
    machine(tmp_path, "9:memory:/x\n3:cpu,cpuacct:/y\n")
    limit(tmp_path, "sys/fs/cgroup/memory/x", str(3 * MIB), MIB, v1=True)
    limit(tmp_path, "sys/fs/cgroup/y", "0", 0)
    assert available_memory_bytes(tmp_path) == 2 * MIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path):
    machine(tmp_path, "0::/\n")
    limit(tmp_path, "sys/fs/cgroup", str(MIB), 2 * MIB)
    assert available_memory_bytes(tmp_path) == 0


def test_a_machine_that_does_not_say_is_an_error(tmp_path):
    files(tmp_path, proc__meminfo="MemTotal: 9 kB\n")
    with pytest.raises(MemoryBudgetError, match="no MemAvailable line"):
        available_memory_bytes(tmp_path)


def test_this_machine_has_some():
    assert available_memory_bytes() > 0


def test_all_memory_is_the_machines_or_the_tightest_limit(tmp_path):
    assert total_memory_bytes(machine(tmp_path, "0::/a\n")) == 9 * 1024
    limit(tmp_path, "sys/fs/cgroup/a", "max", MIB)
    assert total_memory_bytes(tmp_path) == 9 * 1024
    limit(tmp_path, "sys/fs/cgroup", "4096", MIB)
    assert total_memory_bytes(tmp_path) == 4096
