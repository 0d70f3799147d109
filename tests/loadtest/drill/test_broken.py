"""Broken snapshots: each damage is found by who checks a snapshot, and what is accepted is a problem."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from loader.registry import open_registry
from loader.snapshot.reader import verify_snapshot
from loadtest.drill.broken import Attempt, broken_figures, damage_at_random
from loadtest.drill.config import OracleShape
from loadtest.drill.fleet import ANSWER, running_redis
from loadtest.drill.oracle import oracle_spec, write_oracle
from serving.fleet.supervisor import shardrank_command

SMALL = OracleShape(items=600, users=300, tags=50)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_oracle(oracle_spec(SMALL), tmp_path_factory.mktemp("store"), 2)


@pytest.mark.parametrize("damage", ["truncated", "bit flipped"])
def test_damage_comes_to_every_file_and_is_found(snapshot: Path, tmp_path: Path, damage: str):
    copy = Path(shutil.copytree(snapshot, tmp_path / "oracle" / "2"))
    files = [path.relative_to(snapshot) for path in snapshot.rglob("*") if path.is_file()]
    hit, rng = set(), np.random.default_rng(1)
    for _ in range(60):
        what = damage_at_random(copy, damage, rng)
        (path,) = [path for path in files if (copy / path).read_bytes() != (snapshot / path).read_bytes()]
        assert what.startswith(f"{path} {damage} at byte ")
        assert not verify_snapshot(copy).ok
        shutil.copy(snapshot / path, copy / path)
        hit.add(path)
    assert hit == set(files)


@pytest.mark.nightly
def test_what_does_not_fit_leaves_nothing_behind(snapshot: Path, tmp_path: Path):
    (tmp_path / "store").mkdir()
    # Else Python would leave compiled modules that are cut off at the limit.
    environment = {**os.environ, "SHARDRANK_REGISTRY": str(tmp_path / "registry"), "PYTHONDONTWRITEBYTECODE": "1"}
    publishing = shardrank_command("publish", str(snapshot), "--store", str(tmp_path / "store"))
    command = ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", *publishing]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("store/*/[0-9]*"))


@pytest.mark.timeout(120)
async def test_a_killed_redis_comes_back_with_its_data_or_without(tmp_path: Path):
    async with running_redis(tmp_path) as (url, child):
        registry = open_registry(url)
        await registry.put("versions/a", b"1", 0)
        for is_emptied in (False, True):
            killed = child.pid
            child.kill()
            await child.wait()
            if is_emptied:
                shutil.rmtree(tmp_path / "redis")
                (tmp_path / "redis").mkdir()
            while child.pid in (None, killed) or child.state != "ready":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            entry = await registry.get("versions/a")
            assert (entry is None) == is_emptied
        await registry.close()


REFUSED, ACCEPTED = Attempt("bit flipped", "in a file", "publish", "SHA-256"), Attempt("NaN", "in a row", "none", "")


@pytest.mark.parametrize(
    ("attempts", "control_begun", "went_live", "problems"),
    [
        ([REFUSED], 8.0, True, []),
        ([REFUSED, ACCEPTED], 8.0, True, ["accepted: NaN"]),
        ([REFUSED], 9.0, True, ["other_versions"]),
        ([REFUSED], 8.0, False, ["control_went_live"]),
    ],
)
def test_each_limit_is_kept_by_itself(
    attempts: list[Attempt], control_begun: float, went_live: bool, problems: list[str]
):
    answers = np.zeros(10, ANSWER)
    answers["ended"] = np.arange(10)
    answers["version"] = [1] * 8 + [4] * 2
    figures, limits = broken_figures(attempts, control_begun, went_live, answers)
    assert figures["tried"] == len(attempts) == figures["refused"] + figures["accepted"]
    assert figures["groups"]["bit flipped"]["refused_by_publish"] == 1
    assert [limit.name for limit in limits if not limit.ok] == problems
