"""Which tables are in RAM, and how much memory there is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.memory import HUGE_PAGE_BYTES, allocate_rows
from shard_node.buckets import Partition
from shard_node.engine.arena_builder import choose_tiers
from shard_node.engine.memory import available_memory_bytes, total_memory_bytes
from shard_node.errors import InvalidBagsError, MemoryBudgetError


@given(st.lists(st.integers(0, 1000), min_size=1), st.integers(0, 5000))
def test_the_smallest_tables_that_fit_half_of_the_budget_are_in_ram(sizes, budget):
    tiers = choose_tiers(sizes, budget)
    in_ram = [size for size, tier in zip(sizes, tiers, strict=True) if tier == "ram"]
    on_disk = [size for size, tier in zip(sizes, tiers, strict=True) if tier == "disk"]
    assert bool(on_disk) == (sum(sizes) > budget)
    assert sum(in_ram) <= (budget // 2 if on_disk else budget)
    assert not on_disk or not in_ram or max(in_ram) <= min(on_disk)
    # Not one table more than needed was left out.
    assert not on_disk or sum(in_ram) + min(on_disk) > budget // 2
    assert choose_tiers(sizes, None) == ["ram"] * len(sizes)


@pytest.mark.parametrize("size", [72, HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES + 72])
def test_allocated_rows_are_zero_contiguous_and_writable(size):
    rows = allocate_rows(size // 72, 72)
    assert rows.shape == (size // 72, 72)
    assert rows.flags.c_contiguous
    assert not rows.any()
    rows[-1] = 7
    assert rows[-1].tolist() == [7] * 72


@pytest.mark.parametrize(
    ("cards", "message"),
    [((np.full(256, 2, np.int16),), r"within -1\.\.1"), ((np.full(4096, -2, np.int16),), r"within -1\.\.1")],
)
def test_a_partition_that_names_no_card_is_refused(cards, message):
    with pytest.raises(InvalidBagsError, match=message):
        Partition(2, cards)


MIB = 1 << 20


GROUP = "sys/fs/cgroup"


def machine(root: Path, cgroup: str, groups: dict[str, tuple[str, int]]) -> Path:
    """A machine with 8 MiB available, and groups by folder: their limit and usage."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:  {8 * 1024} kB\n")
    if cgroup:
        (root / "proc/self/cgroup").write_text(cgroup)
    for folder, (maximum, current) in groups.items():
        is_v1 = folder.startswith(f"{GROUP}/memory")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_v1 else ("memory.max", "memory.current")
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name, value in zip(names, (maximum, current), strict=True):
            (root / folder / name).write_text(f"{value}\n")
        if folder.endswith("/c"):
            (root / folder / "memory.stat").write_text(f"anon 5\ninactive_file {2 * MIB}\nactive_file {MIB}\n")
    return root


@pytest.mark.parametrize(
    ("cgroup", "groups", "available"),
    [
        ("", {}, 8),
        # The tightest group on the way up decides.
        ("0::/a/b\n", {"/a/b": ("max", 5), "/a": (str(6 * MIB), 5), "": (str(7 * MIB), 5)}, 1),
        # In a container the mounted top is read, though the path is the host's.
        ("0::/kubepods/pod1/c1\n", {"": (str(4 * MIB), 1)}, 3),
        # Version one: other controllers are not read.
        ("9:memory:/x\n3:cpu,cpuacct:/y\n", {"/memory/x": (str(3 * MIB), 1), "/y": ("0", 0)}, 2),
        ("0::/\n", {"": (str(MIB), 2)}, 0),
        # Files that were read once are given up first.
        ("0::/c\n", {"/c": (str(4 * MIB), 3), "": ("max", 2)}, 3),
    ],
)
def test_available_memory_is_the_least_of_all_groups(tmp_path, cgroup, groups, available):
    folders = {GROUP + folder: (maximum, current * MIB) for folder, (maximum, current) in groups.items()}
    assert available_memory_bytes(machine(tmp_path, cgroup, folders)) == available * MIB
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\n")
    with pytest.raises(MemoryBudgetError, match="no MemAvailable line"):
        available_memory_bytes(tmp_path)
    assert available_memory_bytes() > 0


def test_total_memory_is_the_machines_or_the_tightest_limit(tmp_path):
    groups = {f"{GROUP}/a": ("max", MIB), GROUP: ("4096", MIB)}
    assert total_memory_bytes(machine(tmp_path, "0::/a\n", groups)) == 4096
    (tmp_path / GROUP / "memory.max").write_text("max\n")
    assert total_memory_bytes(tmp_path) == 9 * 1024
