"""A stream of ratings in order of time: a file of records that grows, which each worker reads at its own positions.

A record has 28 bytes, little-endian: user int64, film int64, rating float32, time int64 in seconds. A stream is
complete once a file of the same name and `.end` lies beside it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from serving.training.dataset import LIKED_RATING, TrainingError, generate_interactions, read_movielens
from shard_node.bags import Float32Array

RATING: Final = np.dtype([("user", "<i8"), ("film", "<i8"), ("rating", "<f4"), ("time", "<i8")])
MAX_CSV_BYTES: Final = 2 << 30
POLL_S: Final = 0.02
Ratings: TypeAlias = npt.NDArray[Any]
"""Records of `RATING`."""


def read_ratings(movielens: Path | None, ratings: int | Path, seed: int) -> Ratings:
    """Read or generate ratings, in order of time: of a folder, of a CSV file, or so many with planted tastes.

    A CSV file has a line `userId,movieId,rating,timestamp`, then these of each rating, as later MovieLens sets have.
    Raises TrainingError.
    """
    if isinstance(ratings, Path):
        given = _read_csv(ratings)
    else:
        data = generate_interactions(ratings, seed=seed) if movielens is None else read_movielens(movielens)
        given = np.empty(data.ratings.size, RATING)
        given["user"], given["film"] = data.users.ids[data.user_index], data.films.ids[data.film_index]
        given["rating"], given["time"] = data.ratings, data.timestamps
    return given[np.argsort(given["time"], kind="stable")]


def _read_csv(path: Path) -> Ratings:
    try:
        if (size := path.stat().st_size) > MAX_CSV_BYTES:
            raise TrainingError(f"{path}: {size} bytes, allowed: {MAX_CSV_BYTES}")
        with path.open(encoding="utf-8") as file:
            if (head := file.readline().strip()) != "userId,movieId,rating,timestamp":
                raise TrainingError(f"{path}: the first line is {head[:80]!r}, not userId,movieId,rating,timestamp")
            given = np.loadtxt(file, RATING, delimiter=",", ndmin=1)
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path}: {error}") from error
    if not given.size or not np.isfinite(given["rating"]).all():
        raise TrainingError(f"{path}: expected ratings, finite numbers, at least 1; got {given.size}")
    return given


def labels_of(ratings: Ratings) -> Float32Array:
    """Return 1 for each film that was liked, else 0: float32 [n]."""
    return (ratings["rating"] >= LIKED_RATING).astype(np.float32)


class RatingStream:
    """The file of a stream. One process appends, any number read."""

    def __init__(self, path: Path) -> None:
        self._path, self._end = path, path.with_name(f"{path.name}.end")

    def append(self, ratings: Ratings) -> None:
        """Append ratings, which readers see from then on; a record that somebody did not end goes."""
        with self._path.open("ab") as file:
            file.truncate(len(self) * RATING.itemsize)
            file.write(ratings.astype(RATING, copy=False).tobytes())

    def end(self) -> None:
        """Mark the stream as complete."""
        self._end.touch()

    @property
    def is_complete(self) -> bool:
        """Whether no more ratings come."""
        return self._end.exists()

    def __len__(self) -> int:
        """Count the ratings that are there by now."""
        return self._path.stat().st_size // RATING.itemsize if self._path.exists() else 0

    async def read(self, begin: int, count: int) -> Ratings | None:
        """Return `count` ratings from a position on, once they are there; None if the stream ends before."""
        while len(self) < begin + count:
            # What was appended before the end was marked is seen after the mark.
            if self.is_complete and len(self) < begin + count:
                return None
            await asyncio.sleep(POLL_S)
        return self.read_now(begin, count)

    def read_now(self, begin: int, count: int) -> Ratings:
        """Return `count` ratings from a position on, or as many as there are."""
        return np.fromfile(self._path, RATING, count, offset=begin * RATING.itemsize)
