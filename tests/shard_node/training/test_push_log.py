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
        return [(kind, bytes(content)) for kind, content in log.records()]
    finally:
        log.close()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    log = PushLog(tmp_path, b"{}")
    log.append(PUSH_KIND, b"first ", b"push")
    log.append(LEAVE_KIND, b"1234")
    log.append(PUSH_KIND, b"third")
    log.commit()
    log.close()
    return tmp_path


ALL = [(PUSH_KIND, b"first push"), (LEAVE_KIND, b"1234"), (PUSH_KIND, b"third")]


def test_a_log_that_ends_anywhere_has_its_whole_records(written):
    content = (written / "log-0").read_bytes()
    # A record has 8 bytes, its kind, and what is in it; the header's is first.
    ends = np.cumsum([9 + 2, *(9 + len(content) for _, content in ALL)])
    assert ends[-1] == len(content)
    for size in range(len(content)):
        (written / "log-0").write_bytes(content[:size])
        expected = ALL[: int((ends[1:] <= size).sum())]
        assert records_of(written) == expected
        # What follows is read, too.
        log = PushLog(written, b"{}")
        list(log.records())
        log.append(PUSH_KIND, b"next")
        log.commit()
        log.close()
        assert records_of(written) == [*expected, (PUSH_KIND, b"next")]


def test_damage_before_whole_records_is_refused(written):
    content = bytearray((written / "log-0").read_bytes())
    content[content.index(b"first")] ^= 1
    (written / "log-0").write_bytes(content)
    with pytest.raises(TrainingLogError, match="the record at byte 11 is damaged, whole ones follow it"):
        records_of(written)


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
    # Of one that was being written.
    (written / "log-2").write_bytes(b"")
    (written / "checkpoint-2.new").write_bytes(b"half")
    again = PushLog(written, b"{}")
    assert again.tensors()["x"].tolist() == [0, 1, 2]
    assert [bytes(content) for _, content in again.records()] == [b"later"]
    again.close()
    assert sorted(path.name for path in written.iterdir()) == ["checkpoint-1.safetensors", "lock", "log-1"]
