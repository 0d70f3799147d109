from __future__ import annotations

import json
import threading

import pytest

from serving.errors import ProfileFileError
from serving.observe.calls import BatchTimes, Call
from serving.observe.metrics import ServingMetrics
from serving.observe.profile import ProfileFile, StageAccount, profiled


def add_one(account: StageAccount) -> None:
    account.add(Call("http", "rank", 0.0, "films", batch=BatchTimes(rank_s=1.0)), 1.0)


def test_a_file_always_has_the_whole_account(tmp_path) -> None:
    account, path = StageAccount(), tmp_path / "profile.json"
    now = 100.0
    file = ProfileFile(path, account, clock=lambda: now, wall_clock=lambda: 1_700_000_000.0)
    for requests in (1, 2):
        add_one(account)
        now += 2.5
        file.write()
        document = json.loads(path.read_bytes())
        assert document["seconds"] == 2.5 * requests
        assert document["began_at"] == "2023-11-14T22:13:20+00:00"
        (told,) = document["accounts"]
        assert (told["requests"], told["whole_s"]) == (requests, requests)
    assert [one.name for one in tmp_path.iterdir()] == ["profile.json"]


def test_a_thread_that_has_ended_is_still_told(tmp_path) -> None:
    file = ProfileFile(tmp_path / "profile.json", StageAccount())
    may_end, has_worked = threading.Event(), threading.Event()

    def work() -> None:
        sum(number * number for number in range(2_000_000))
        has_worked.set()
        may_end.wait()

    thread = threading.Thread(target=work, name="works")
    thread.start()
    has_worked.wait()
    seen = file.document()["cpu_s_by_thread"]["works"]
    assert seen > 0
    may_end.set()
    thread.join()
    for _ in range(2):
        assert file.document()["cpu_s_by_thread"]["works"] == seen
    document = file.document()
    assert document["cpu_s"] >= seen
    assert sum(document["cpu_s_by_thread"].values()) >= document["cpu_s"] - 1e-6


def test_the_account_is_kept_for_the_time_of_the_block_alone(tmp_path) -> None:
    metrics, path = ServingMetrics(), tmp_path / "profile.json"
    with profiled(path, metrics):
        assert json.loads(path.read_text())["accounts"] == []
        assert metrics.on_answered is not None
        metrics.on_answered(Call("http", "rank", 0.0, "films", batch=BatchTimes(rank_s=1.0)), 1.0)
    assert metrics.on_answered is None
    assert json.loads(path.read_text())["accounts"][0]["requests"] == 1
    with profiled(None, metrics):
        assert metrics.on_answered is None


def test_a_folder_that_goes_away_ends_the_file_and_not_the_serving(tmp_path, caplog) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with profiled(folder / "profile.json", ServingMetrics()):
        (folder / "profile.json").unlink()
        folder.rmdir()
    assert "No such file or directory" in caplog.text
    again = profiled(folder / "profile.json", ServingMetrics())
    with pytest.raises(ProfileFileError, match=r"--profile .*profile\.json: No such file"), again:
        pass
