"""The log of pushes: what was committed is there again, what was cut short is not, and no other folder is taken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shard_node.errors import TrainingLogError
from shard_node.training.push_log import LEAVE_KIND, PUSH_KIND, PushLog


def records_of(folder: Path, identity: bytes = b"{}") -> list[tuple[int, bytes]]:
    log = PushLog(folder, identity)
    try:
        return [(record.kind, bytes(record.content)) for record in log.records()]
    finally:
        log.close()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    log = PushLog(tmp_path, b"{}")
    log.append(PUSH_KIND, b"first ", b"push")
    log.commit()
    log.append(LEAVE_KIND, b"1234")
    log.append(PUSH_KIND, b"third")
    log.commit()
    log.close()
    return tmp_path


ALL = [(PUSH_KIND, b"first push"), (LEAVE_KIND, b"1234"), (PUSH_KIND, b"third")]


# A record has 20 bytes, its kind, and what is in it; the header's is first.
ENDS = np.cumsum([21 + 2, *(21 + len(content) for _, content in ALL)]).tolist()


def test_a_log_that_ends_anywhere_has_its_whole_records(written):
    content = (written / "log-0").read_bytes()
    assert ENDS[-1] == len(content)
    for size in range(len(content)):
        (written / "log-0").write_bytes(content[:size])
        expected = ALL[: sum(end <= size for end in ENDS[1:])]
        assert records_of(written) == expected
        # What follows is read, too.
        log = PushLog(written, b"{}")
        list(log.records())
        log.append(PUSH_KIND, b"next")
        log.commit()
        log.close()
        assert records_of(written) == [*expected, (PUSH_KIND, b"next")]


def test_damage_before_a_later_commit_is_refused_and_in_the_last_one_cut_off(written):
    content = (written / "log-0").read_bytes()
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 0x40
        (written / "log-0").write_bytes(damaged)
        if at < ENDS[1]:
            with pytest.raises(TrainingLogError, match="is damaged, later commits follow it"):
                records_of(written)
            assert (written / "log-0").read_bytes() == damaged
        else:
            # It may have been on its way to the disk; what is left of it is kept.
            assert records_of(written) == ALL[: 1 if at < ENDS[2] else 2]
            assert (written / "log-0.cut").read_bytes() == damaged[ENDS[1] if at < ENDS[2] else ENDS[2] :]


def test_what_was_not_committed_was_never_there(written):
    log = PushLog(written, b"{}")
    log.append(PUSH_KIND, b"lost")
    log.close()
    assert records_of(written) == ALL


def test_a_folder_is_of_one_training_and_of_one_process(written):
    with pytest.raises(TrainingLogError, match=r'is of \{\}, this process trains \{"lr": 1\}'):
        records_of(written, b'{"lr": 1}')
    held = PushLog(written, b"{}")
    with pytest.raises(TrainingLogError, match="another process trains in it"):
        PushLog(written, b"{}")
    held.close()
    assert records_of(written) == ALL


def test_a_checkpoint_takes_the_place_of_the_log(written):
    log = PushLog(written, b"{}")
    assert log.tensors() == {}
    log.replace({"x": np.arange(3)})
    log.append(PUSH_KIND, b"later")
    log.commit()
    log.close()
    # Of one that was being written; and what is somebody else's.
    (written / "log-2").write_bytes(b"")
    (written / "checkpoint-2.new").write_bytes(b"half")
    (written / "log-2026.txt").write_bytes(b"")
    (written / "checkpoint-best.safetensors").write_bytes(b"")
    again = PushLog(written, b"{}")
    assert again.tensors()["x"].tolist() == [0, 1, 2]
    assert [bytes(record.content) for record in again.records()] == [b"later"]
    again.close()
    assert sorted(path.name for path in written.iterdir()) == [
        "checkpoint-1.safetensors", "checkpoint-best.safetensors", "lock", "log-1", "log-2026.txt",
    ]  # fmt: skip
