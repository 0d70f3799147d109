"""Keyed tables against hashing on films that come and go: the script that measures it, as it is run, on little data."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.training.dataset import read_movielens
from shardrank_testing.movielens import small_interactions, write_movielens

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "keyed_movielens.py"
BLOCKS, FORGET_AFTER, NUM_RATINGS = 6, 2, 1500
BYTES_OF_KEY, BYTES_OF_ROW = 24 + 20, 24
FEATURES = {"users": "user_id", "films": "film_id"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_movielens(tmp_path_factory.mktemp("ml") / "small", small_interactions(num_ratings=NUM_RATINGS))


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    options = ("--blocks", str(BLOCKS), "--seeds", "1", "--forget-after", str(FORGET_AFTER))
    command = [sys.executable, str(SCRIPT), str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def expected_counts(folder: Path) -> tuple[Counter[str], int]:
    """What must come, go, and be missing when the second block on is served; and the most keys that are there at once.

    By a set for each block of the ids in it: a key is there if one of the last blocks has it.
    """
    data = read_movielens(folder)
    by_time = np.split(
        np.argsort(data.timestamps, kind="stable"), [NUM_RATINGS * b // BLOCKS for b in range(1, BLOCKS)]
    )
    counts, most = Counter[str](), 0
    columns = {"users": (data.users.ids, data.user_index), "films": (data.films.ids, data.film_index)}
    for name, (ids, index) in columns.items():
        blocks = [ids[index[positions]].tolist() for positions in by_time]
        there, peak = set(blocks[0]), len(set(blocks[0]))
        for number in range(1, BLOCKS):
            # A user is once in a request, and each film that the user rates.
            requested = set(blocks[number]) if name == "users" else blocks[number]
            counts[f"missing {FEATURES[name]}"] += sum(key not in there for key in requested)
            counts[f"upserted {name}"] += len(set(blocks[number]))
            there |= set(blocks[number])
            peak = max(peak, len(there))
            kept = set().union(*blocks[max(0, number - FORGET_AFTER + 1) : number + 1])
            counts[f"deleted {name}"] += len(there - kept)
            there &= kept
        most += peak
    return counts, most


@pytest.mark.nightly
def test_the_fleet_scores_as_the_trainer_does_after_every_block(report: dict[str, Any]) -> None:
    """Known keys by the rows that were upserted, new and deleted ones by the mean, with the dense weights in step."""
    forgetting = report["keyed, forgetting"]
    assert forgetting["served"]["max_score_diff"] < 2e-6
    assert forgetting["served"]["auc"] == pytest.approx(forgetting["auc"][0], abs=1e-5)


@pytest.mark.nightly
def test_keys_are_upserted_deleted_and_missing_as_they_come_and_go(report: dict[str, Any], folder: Path) -> None:
    expected, most = expected_counts(folder)
    assert min(expected.values()) > 0
    served = report["keyed, forgetting"]["served"]
    assert {name: served[name] for name in expected} == expected
    assert report["keyed, forgetting"]["bytes"] == most * BYTES_OF_KEY


@pytest.mark.nightly
def test_what_is_compared_has_the_bytes_that_it_says(report: dict[str, Any], folder: Path) -> None:
    data = read_movielens(folder)
    num_ids = np.unique(data.user_index).size + np.unique(data.film_index).size
    keyed = report["keyed"]["bytes"]
    assert keyed == num_ids * BYTES_OF_KEY
    for share in (1.0, 0.5, 0.25):
        # Of two tables with whole rows.
        assert 0 <= share * keyed - report[f"hashed, {share:.2f} of the bytes"]["bytes"] < 2 * BYTES_OF_ROW
    assert report["vocabulary of the first tenth"]["bytes"] < keyed
    assert report["keyed"]["to_keyed"] == [0]
