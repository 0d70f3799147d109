"""Ratings in order of time: what is read of files, and what readers of a growing stream get."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from serving.training.dataset import TrainingError
from serving.training.rating_stream import RATING, RatingStream, labels_of, read_ratings

HEAD = "userId,movieId,rating,timestamp"


def test_a_csv_file_is_read_in_order_of_time(tmp_path: Path):
    path = tmp_path / "ratings.csv"
    path.write_text(f"{HEAD}\n7,1,4.0,300\n9,2,3.5,100\n7,3,5.0,200\n8,1,0.5,200\n")
    ratings = read_ratings(None, path, 0)
    assert ratings.tolist() == [(9, 2, 3.5, 100), (7, 3, 5.0, 200), (8, 1, 0.5, 200), (7, 1, 4.0, 300)]
    assert labels_of(ratings).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("user,movie,rating\n", "the first line is 'user,movie,rating', not userId,movieId,rating,timestamp"),
        (f"{HEAD}\n", "at least 1; got 0"),
        (f"{HEAD}\n1,2,nan,4\n", "finite numbers"),
        (f"{HEAD}\n1,2,3.0\n", "requires 4 columns|number of columns|expected 4"),
        (f"{HEAD}\n1,x,3.0,4\n", "x"),
        (None, "No such file"),
    ],
)
@pytest.mark.filterwarnings("ignore:loadtxt")
def test_another_file_is_refused_by_name(tmp_path: Path, text: str | None, says: str):
    path = tmp_path / "ratings.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(TrainingError, match=f"{path}.*({says})"):
        read_ratings(None, path, 0)


def test_generated_ratings_are_in_order_of_time():
    ratings = read_ratings(None, 2000, 3)
    assert (ratings.size, bool((np.diff(ratings["time"]) >= 0).all())) == (2000, True)


async def test_a_reader_waits_for_what_is_appended_and_is_told_of_the_end(tmp_path: Path):
    stream, ratings = RatingStream(tmp_path / "stream"), np.zeros(10, RATING)
    ratings["user"] = np.arange(10)
    reading = asyncio.create_task(stream.read(4, 3))
    stream.append(ratings[:6])
    await asyncio.sleep(0.05)
    assert (reading.done(), len(stream)) == (False, 6)
    stream.append(ratings[6:])
    read = await reading
    assert read is not None
    assert read["user"].tolist() == [4, 5, 6]
    waiting = asyncio.create_task(stream.read(8, 3))
    await asyncio.sleep(0.05)
    stream.end()
    assert await waiting is None
    assert (await stream.read(8, 2))["user"].tolist() == [8, 9]
