"""Who reads only a part of a snapshot checks only that part, and nobody takes headers or sizes on trust."""

from __future__ import annotations

from pathlib import Path

import pytest

from loader.errors import SnapshotCorruptError
from loader.snapshot.reader import Snapshot
from shardrank_testing.snapshots import make_spec, random_golden, write_snapshot


@pytest.fixture
def path(tmp_path) -> Path:
    spec = make_spec()
    return write_snapshot(tmp_path, spec, seed=1, golden=random_golden(spec, 2))[0]


def damage(path: Path, kind: str) -> None:
    """Changes the last byte of a row file, or of the dense model."""
    file = sorted((path / "tables" / "user").iterdir())[0] if kind == "rows" else path / "dense.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(("damaged", "blind"), [("rows", "other"), ("other", "rows")])
def test_damage_is_found_by_who_reads_the_file_and_not_by_who_does_not(path, damaged, blind):
    damage(path, damaged)
    for files in ("all", damaged):
        with pytest.raises(SnapshotCorruptError, match="SHA-256"):
            Snapshot.open(path, files=files)
        with pytest.raises(SnapshotCorruptError, match="SHA-256"):
            Snapshot.open(path, verify=False, files=files).check_content(files)
    Snapshot.open(path, files=blind).check_content(blind)


def test_every_byte_is_hashed_by_one_of_the_two_halves(path):
    def hashed(files: str) -> int:
        seen: list[tuple[str, int, int]] = []
        Snapshot.open(path, files=files, progress=lambda *step: seen.append(step))
        return seen[-1][2]

    assert hashed("rows") + hashed("other") == hashed("all") == Snapshot.open(path).size_bytes


@pytest.mark.parametrize("files", ["rows", "other"])
def test_a_file_that_is_too_short_is_found_by_everybody(path, files):
    (path / "dense.safetensors").write_bytes(b"")
    with pytest.raises(SnapshotCorruptError, match=r"dense\.safetensors: 0 bytes"):
        Snapshot.open(path, verify=False, files=files)
