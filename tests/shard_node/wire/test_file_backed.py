"""Values made from files: when they are made again, and what happens while they can't be."""

from __future__ import annotations

from pathlib import Path

import pytest

from loader.errors import CheckpointError
from shard_node.wire.tls import FileBacked
from shardrank_testing.rollout_fleet import Clock


class Numbers:
    """A file with a number in it, a clock, and how often the file was read."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "number"
        self.clock = Clock(0.0)
        self.reads = 0

    def write(self, text: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(text)
        new.replace(self.path)

    def read(self) -> int:
        self.reads += 1
        try:
            return int(self.path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def backed(self) -> FileBacked[int]:
        return FileBacked([self.path], self.read, self.clock, interval_s=1.0)


def test_a_change_is_seen_after_the_interval(tmp_path):
    numbers = Numbers(tmp_path)
    numbers.write("1")
    value = numbers.backed()
    numbers.write("2")
    assert value.get() == 1
    numbers.clock.now = 1.0
    assert [value.get(), value.get()] == [2, 2]
    for numbers.clock.now in (2.0, 3.0, 4.0):
        assert value.get() == 2
    assert numbers.reads == 2


def test_an_unreadable_file_is_an_error_first_and_then_a_warning(tmp_path, caplog):
    numbers = Numbers(tmp_path)
    with pytest.raises(CheckpointError, match="No such file"):
        numbers.backed()
    numbers.write("1")
    value = numbers.backed()
    numbers.write("x")
    for numbers.clock.now in (1.0, 2.0, 3.0):
        assert value.get() == 1
    assert numbers.reads == 3
    numbers.path.unlink()
    for numbers.clock.now in (4.0, 5.0):
        assert value.get() == 1
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    numbers.write("3")
    numbers.clock.now = 6.0
    assert value.get() == 3
