"""Ratings of films by users, in flat arrays: read from the files of MovieLens 100K, or generated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from loader.errors import ShardrankError
from shard_node.bags import Float32Array, Int64Array

GENRES = ("unknown", "Action", "Adventure", "Animation", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
          "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War")  # fmt: skip
OCCUPATIONS = ("artist", "doctor", "educator", "engineer", "librarian", "programmer", "student", "writer")
_FIRST_WORDS = ("Silent", "Last", "Golden", "Broken", "Distant", "Crimson", "Hidden", "Winter", "Electric", "Paper")
_SECOND_WORDS = ("River", "Garden", "Engine", "Letter", "Harbour", "Orchard", "Signal", "Mirror", "Station", "Parade")
_START_SECONDS = 880_000_000
_YEAR_SECONDS = 365 * 24 * 3600
NUM_TASTES = 4
PAIRS_PER_RATING = 4
# Some two hundred times the real files: a folder with something else is refused before it is read.
MAX_FILE_BYTES = 512 * 1024 * 1024
MAX_RATING = 5

Fields: TypeAlias = Mapping[str, Callable[[str], Any]]
"""How each field of a line is read, by the name that an error calls it."""


class TrainingError(ShardrankError, kind="bad_training", http_status=400, grpc_status="INVALID_ARGUMENT"):
    """Options, or a dataset, that no model can be trained with. The message names the option, or the file and line."""


@dataclass(frozen=True, slots=True, eq=False)
class Users:
    """All users: ids int64 [U], ascending, ages int64 [U] in years, and a word of each other kind for each user."""

    ids: Int64Array
    ages: Int64Array
    genders: tuple[str, ...]
    occupations: tuple[str, ...]
    zip_codes: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Films:
    """All films: ids int64 [F], ascending, and a title each.

    Film f has the genres genre_ids[genre_offsets[f] : genre_offsets[f + 1]], positions in `genre_names`.
    """

    ids: Int64Array
    titles: tuple[str, ...]
    genre_offsets: Int64Array
    genre_ids: Int64Array
    genre_names: tuple[str, ...]

    @classmethod
    def of_flags(
        cls, ids: Int64Array, titles: Sequence[str], flags: npt.NDArray[np.bool_], genre_names: tuple[str, ...]
    ) -> Films:
        """Make films of a matrix of genre flags, bool [F, genres]."""
        genre_ids = np.nonzero(flags)[1].astype(np.int64)
        return cls(ids, tuple(titles), offsets_of(flags.sum(axis=1)), genre_ids, genre_names)

    def genres_of(self, film: int) -> list[int]:
        """Return the genres of the film at a position."""
        genres: list[int] = self.genre_ids[self.genre_offsets[film] : self.genre_offsets[film + 1]].tolist()
        return genres


@dataclass(frozen=True, slots=True, eq=False)
class Interactions:
    """Ratings float32 [n], 1 to 5, with positions in `users` and `films`, and times in seconds, int64 [n] each."""

    source: str
    users: Users
    films: Films
    user_index: Int64Array
    film_index: Int64Array
    ratings: Float32Array
    timestamps: Int64Array


def offsets_of(lengths: npt.NDArray[np.integer]) -> Int64Array:
    """Return int64 [B + 1], where each of the lists of lengths [B] begins in one flat array, and the end."""
    offsets = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def positions_in(offsets: Int64Array, chosen: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the lengths of chosen lists, int64 [C], and the positions of their elements, int64 [lengths.sum()].

    The lists are stored in one flat array with `offsets` as of `offsets_of`.
    """
    starts = offsets[chosen]
    lengths = offsets[chosen + 1] - starts
    before = offsets_of(lengths)[:-1]
    return lengths, np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - before, lengths)


def generate_interactions(
    num_ratings: int = 40_000, *, num_users: int | None = None, num_films: int = 800, seed: int = 0
) -> Interactions:
    """Draws users, films and ratings; no user rates a film twice.

    A user's opinion of a film is quality + generosity + taste . character + noise; taste and character are latent
    vectors, and a film's character is mostly that of its genres. The rating, 1 to 5, is where the opinion
    stands among all: 55% are 4 or 5, as with MovieLens 100K. Without `num_users` there are 600, or more where there are
    more than 64 ratings for each.

    Raises TrainingError for more ratings than a quarter of all pairs of a user and a film.
    """
    num_users = num_users or max(600, num_ratings // 64)
    most = num_users * num_films // PAIRS_PER_RATING
    if num_ratings > most:
        pairs = f"all pairs of {num_users} users and {num_films} films"
        raise TrainingError(f"num_ratings {num_ratings} is more than {most}, a quarter of {pairs}")
    draw = np.random.default_rng(seed)
    users = Users(
        ids=np.arange(1, num_users + 1, dtype=np.int64),
        ages=draw.integers(12, 75, size=num_users),
        genders=tuple("FM"[i] for i in draw.integers(2, size=num_users)),
        occupations=tuple(OCCUPATIONS[i] for i in draw.integers(len(OCCUPATIONS), size=num_users)),
        zip_codes=tuple(f"{number:05d}" for number in draw.integers(100_000, size=num_users)),
    )
    # One to three genres each; 0, "unknown", is left to files that have it.
    flags = np.zeros((num_films, len(GENRES)), bool)
    for number_of_genres in range(1, 4):
        chosen = np.flatnonzero(draw.random(num_films) < 1.0 / number_of_genres)
        flags[chosen, draw.integers(1, len(GENRES), size=chosen.size)] = True
    years = draw.integers(1940, 1999, size=num_films).tolist()
    words = draw.integers((len(_FIRST_WORDS), len(_SECOND_WORDS)), size=(num_films, 2)).tolist()
    titles = [
        f"{_FIRST_WORDS[first]} {_SECOND_WORDS[second]} {number} ({year})"
        for number, ((first, second), year) in enumerate(zip(words, years, strict=True), start=1)
    ]
    genre_character = draw.normal(size=(len(GENRES), NUM_TASTES))
    character = flags @ genre_character / np.sqrt(flags.sum(axis=1, keepdims=True))
    character += 0.5 * draw.normal(size=character.shape)
    taste = draw.normal(size=(num_users, NUM_TASTES)) / np.sqrt(NUM_TASTES)
    quality, generosity = draw.normal(size=num_films), 0.7 * draw.normal(size=num_users)
    user_index, film_index = _pairs(num_ratings, num_users, num_films, draw)
    opinion = quality[film_index] + generosity[user_index]
    opinion += 1.2 * np.einsum("nk,nk->n", taste[user_index], character[film_index])
    opinion += draw.normal(size=opinion.size)
    ratings = 1.0 + np.searchsorted(np.quantile(opinion, [0.06, 0.17, 0.45, 0.79]), opinion)
    return Interactions(
        source="synthetic",
        users=users,
        films=Films.of_flags(np.arange(1, num_films + 1, dtype=np.int64), titles, flags, GENRES),
        user_index=user_index,
        film_index=film_index,
        ratings=ratings.astype(np.float32),
        timestamps=_START_SECONDS + draw.integers(_YEAR_SECONDS, size=opinion.size),
    )


def _pairs(num_ratings: int, num_users: int, num_films: int, draw: np.random.Generator) -> tuple[Int64Array, ...]:
    activity = draw.gamma(1.5, size=num_users)
    popularity = 1.0 / (10.0 + draw.permutation(num_films))
    pairs = np.zeros(0, np.int64)
    # Few pairs are taken at this density, so each round brings new ones.
    while pairs.size < num_ratings:
        user = draw.choice(num_users, size=2 * num_ratings, p=activity / activity.sum())
        film = draw.choice(num_films, size=2 * num_ratings, p=popularity / popularity.sum())
        pairs = np.concatenate([pairs, user.astype(np.int64) * num_films + film])
        pairs = pairs[np.sort(np.unique(pairs, return_index=True)[1])]
    return np.divmod(pairs[:num_ratings], num_films)


def read_movielens(folder: str | Path) -> Interactions:
    """Read u.data, u.item, u.user and u.genre of MovieLens 100K (GroupLens) from a folder.

    Raises DatasetError for a file that is missing, too large, empty or malformed; the message names file and line.
    """
    folder = Path(folder)
    genres, numbers = _columns(folder / "u.genre", "|", {"genre": str, "genre number": _whole})
    for expected, number in enumerate(numbers):
        if number != expected:
            raise TrainingError(f"{folder / 'u.genre'}: genre number {number} is not {expected}, the next one")
    words = dict.fromkeys(("title", "release date", "video release date", "URL"), str)
    fields: Fields = {"film id": _whole, **words, **{f"genre {name}": _flag for name in genres}}
    ids, titles, _, _, _, *flags = _columns(folder / "u.item", "|", fields)
    order = _ascending(folder / "u.item", "film id", ids)
    film_flags = np.array(flags, bool).T[order]
    films = Films.of_flags(np.array(ids, np.int64)[order], [titles[i] for i in order], film_flags, genres)
    fields = {"user id": _whole, "age": _whole, "gender": str, "occupation": str, "zip code": str}
    people = list(zip(*_columns(folder / "u.user", "|", fields), strict=True))
    order = _ascending(folder / "u.user", "user id", [person[0] for person in people])
    ids, ages, genders, occupations, zip_codes = zip(*(people[i] for i in order), strict=True)
    users = Users(np.array(ids, np.int64), np.array(ages, np.int64), genders, occupations, zip_codes)
    path = folder / "u.data"
    fields = {"user id": _whole, "film id": _whole, "rating": _rating, "timestamp": _whole}
    table = np.array(_columns(path, "\t", fields), np.int64)
    return Interactions(
        source="movielens-100k",
        users=users,
        films=films,
        user_index=_positions(path, "user id", table[0], users.ids, "u.user"),
        film_index=_positions(path, "film id", table[1], films.ids, "u.item"),
        ratings=table[2].astype(np.float32),
        timestamps=table[3],
    )


def _columns(path: Path, separator: str, fields: Fields) -> list[tuple[Any, ...]]:
    """Read the columns of a file whose lines have these fields; empty lines are left out."""
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise TrainingError(f"{path}: {size} bytes, allowed: {MAX_FILE_BYTES}")
        text = path.read_text(encoding="latin-1")
    except OSError as error:
        raise TrainingError(f"{path}: {error.strerror or error}") from error
    rows: list[list[Any]] = []
    # Not splitlines: latin-1 text may hold characters (such as U+0085) that it takes for line ends.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        values = line.rstrip("\r").split(separator)
        if len(values) != len(fields):
            found = f"{len(values)} fields separated by {separator!r}, expected {len(fields)}"
            raise TrainingError(f"{path}, line {number}: {found}")
        rows.append([])
        for (name, read), value in zip(fields.items(), values, strict=True):
            try:
                rows[-1].append(read(value))
            except ValueError as error:
                raise TrainingError(f"{path}, line {number}: {name} {value!r:.40} is not {error}") from error
    if not rows:
        raise TrainingError(f"{path}: holds no line")
    return list(zip(*rows, strict=True))


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise ValueError("a whole number below 10^18")
    return int(text)


def _rating(text: str) -> int:
    if not 1 <= _whole(text) <= MAX_RATING:
        raise ValueError(f"in 1..{MAX_RATING}")
    return int(text)


def _flag(text: str) -> bool:
    if text not in {"0", "1"}:
        raise ValueError("0 or 1")
    return text == "1"


def _ascending(path: Path, name: str, ids: Sequence[int]) -> list[int]:
    order = sorted(range(len(ids)), key=ids.__getitem__)
    for before, after in itertools.pairwise(order):
        if ids[before] == ids[after]:
            raise TrainingError(f"{path}: {name} {ids[after]} is there twice")
    return order


def _positions(path: Path, name: str, wanted: Int64Array, ids: Int64Array, listed_in: str) -> Int64Array:
    positions = np.searchsorted(ids, wanted)
    unknown = ids[np.minimum(positions, ids.size - 1)] != wanted
    if unknown.any():
        row = int(unknown.argmax())
        raise TrainingError(f"{path}: rating {row + 1}: {name} {wanted[row]} is not in {listed_in}")
    return positions.astype(np.int64)
