"""Who rated which film how: the in-memory form that every dataset is brought into."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shard_node.bags import Float32Array, Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class Users:
    """All users.

    Attributes:
        ids: int64 [U], ascending.
        ages: int64 [U], in years.
        genders: a letter each.
        occupations: a word each.
        zip_codes: a US zip code or another country's postal code each.
    """

    ids: Int64Array
    ages: Int64Array
    genders: tuple[str, ...]
    occupations: tuple[str, ...]
    zip_codes: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Films:
    """All films.

    Attributes:
        ids: int64 [F], ascending.
        titles: a title each.
        years: int64 [F], year of release, 0 where it is not known.
        genre_offsets: int64 [F + 1], film f has genres genre_ids[genre_offsets[f] : genre_offsets[f + 1]].
        genre_ids: int64, positions in `genre_names`.
        genre_names: a name for each genre.
    """

    ids: Int64Array
    titles: tuple[str, ...]
    years: Int64Array
    genre_offsets: Int64Array
    genre_ids: Int64Array
    genre_names: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Interactions:
    """Ratings, one row each.

    Attributes:
        source: the dataset's name.
        users: all users.
        films: all films.
        user_index: int64 [n], position in `users`.
        film_index: int64 [n], position in `films`.
        ratings: float32 [n], 1 to 5.
        timestamps: int64 [n], seconds.
    """

    source: str
    users: Users
    films: Films
    user_index: Int64Array
    film_index: Int64Array
    ratings: Float32Array
    timestamps: Int64Array

    @property
    def num_ratings(self) -> int:
        """N."""
        return self.ratings.size


def genres_of_flags(flags: npt.NDArray[np.bool_]) -> tuple[Int64Array, Int64Array]:
    """(offsets int64 [F + 1], genre ids) of a matrix of flags, bool [F, genres]."""
    offsets = np.zeros(flags.shape[0] + 1, np.int64)
    np.cumsum(flags.sum(axis=1), out=offsets[1:])
    return offsets, np.nonzero(flags)[1].astype(np.int64)
