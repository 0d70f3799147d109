"""Generated interactions with planted tastes, for a demo and for tests without a data file."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from loader.manifest import Frozen
from serving.training.errors import TrainingError
from serving.training.interactions import Films, Interactions, Users, genres_of_flags
from shard_node.bags import Int64Array

GENRES = ("unknown", "Action", "Adventure", "Animation", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
          "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War")  # fmt: skip
OCCUPATIONS = ("artist", "doctor", "educator", "engineer", "librarian", "programmer", "student", "writer")
_FIRST_WORDS = ("Silent", "Last", "Golden", "Broken", "Distant", "Crimson", "Hidden", "Winter", "Electric", "Paper")
_SECOND_WORDS = ("River", "Garden", "Engine", "Letter", "Harbour", "Orchard", "Signal", "Mirror", "Station", "Parade")
_START_SECONDS = 880_000_000
PAIRS_PER_RATING = 4
_YEAR_SECONDS = 365 * 24 * 3600


class SyntheticOptions(Frozen):
    """How much is generated.

    Attributes:
        num_users: how many users; None gives 600, or more where there are more than 64 ratings for each.
        num_films: how many films.
        num_ratings: how many ratings; no user rates a film twice, and at most a quarter of all pairs is rated.
        num_tastes: dimensions of the planted tastes.
        seed: of everything that is drawn.
    """

    num_users: int | None = Field(default=None, ge=2, le=1_000_000)
    num_films: int = Field(default=800, ge=2, le=100_000)
    num_ratings: int = Field(default=40_000, ge=10, le=10_000_000)
    num_tastes: int = Field(default=4, ge=1, le=64)
    seed: int = Field(default=0, ge=0, lt=2**32)

    @property
    def users(self) -> int:
        """How many users, in numbers."""
        return self.num_users or max(600, self.num_ratings // 64)


def generate_interactions(options: SyntheticOptions | None = None) -> Interactions:
    """Draws users, films and ratings.

    A user's opinion of a film is quality + generosity + taste . character + noise; taste and character are latent
    vectors, and a film's character is mostly that of its genres. The rating, 1 to 5, is where the opinion
    stands among all: 55% are 4 or 5, as with MovieLens 100K.

    Raises:
        TrainingError: if more ratings are asked for than a quarter of all pairs of a user and a film.
    """
    options = options or SyntheticOptions()
    most = options.users * options.num_films // PAIRS_PER_RATING
    if options.num_ratings > most:
        raise TrainingError(
            f"num_ratings {options.num_ratings} is more than {most}, a quarter of all pairs of {options.users} users "
            f"and {options.num_films} films"
        )
    draw = np.random.default_rng(options.seed)
    users, films = _users(options, draw), _films(options, draw)
    flags = np.zeros((options.num_films, len(GENRES)), bool)
    flags[np.repeat(np.arange(options.num_films), np.diff(films.genre_offsets)), films.genre_ids] = True
    genre_character = draw.normal(size=(len(GENRES), options.num_tastes))
    character = flags @ genre_character / np.sqrt(flags.sum(axis=1, keepdims=True))
    character += 0.5 * draw.normal(size=character.shape)
    taste = draw.normal(size=(options.users, options.num_tastes)) / np.sqrt(options.num_tastes)
    quality, generosity = draw.normal(size=options.num_films), 0.7 * draw.normal(size=options.users)

    user_index, film_index = _pairs(options, draw)
    opinion = quality[film_index] + generosity[user_index]
    opinion += 1.2 * np.einsum("nk,nk->n", taste[user_index], character[film_index])
    opinion += draw.normal(size=opinion.size)
    ratings = 1.0 + np.searchsorted(np.quantile(opinion, [0.06, 0.17, 0.45, 0.79]), opinion)
    return Interactions(
        source="synthetic",
        users=users,
        films=films,
        user_index=user_index,
        film_index=film_index,
        ratings=ratings.astype(np.float32),
        timestamps=_START_SECONDS + draw.integers(_YEAR_SECONDS, size=opinion.size),
    )


def _users(options: SyntheticOptions, draw: np.random.Generator) -> Users:
    count = options.users
    return Users(
        ids=np.arange(1, count + 1, dtype=np.int64),
        ages=draw.integers(12, 75, size=count),
        genders=tuple("FM"[i] for i in draw.integers(2, size=count)),
        occupations=tuple(OCCUPATIONS[i] for i in draw.integers(len(OCCUPATIONS), size=count)),
        zip_codes=tuple(f"{number:05d}" for number in draw.integers(100_000, size=count)),
    )


def _films(options: SyntheticOptions, draw: np.random.Generator) -> Films:
    count = options.num_films
    # One to three genres each; 0, "unknown", is left to files that have it.
    flags = np.zeros((count, len(GENRES)), bool)
    for number_of_genres in range(1, 4):
        chosen = np.flatnonzero(draw.random(count) < 1.0 / number_of_genres)
        flags[chosen, draw.integers(1, len(GENRES), size=chosen.size)] = True
    offsets, genre_ids = genres_of_flags(flags)
    years = draw.integers(1940, 1999, size=count)
    words = draw.integers((len(_FIRST_WORDS), len(_SECOND_WORDS)), size=(count, 2))
    return Films(
        ids=np.arange(1, count + 1, dtype=np.int64),
        titles=tuple(
            f"{_FIRST_WORDS[first]} {_SECOND_WORDS[second]} {number} ({year})"
            for number, ((first, second), year) in enumerate(zip(words.tolist(), years.tolist(), strict=True), start=1)
        ),
        years=years,
        genre_offsets=offsets,
        genre_ids=genre_ids,
        genre_names=GENRES,
    )


def _pairs(options: SyntheticOptions, draw: np.random.Generator) -> tuple[Int64Array, Int64Array]:
    """Different (user, film) pairs; some users rate more, some films are rated more."""
    activity = draw.gamma(1.5, size=options.users)
    popularity = 1.0 / (10.0 + draw.permutation(options.num_films))
    pairs = np.zeros(0, np.int64)
    # Few pairs are taken at this density, so each round brings new ones.
    while pairs.size < options.num_ratings:
        user = draw.choice(options.users, size=2 * options.num_ratings, p=activity / activity.sum())
        film = draw.choice(options.num_films, size=2 * options.num_ratings, p=popularity / popularity.sum())
        pairs = np.concatenate([pairs, user.astype(np.int64) * options.num_films + film])
        _, first = np.unique(pairs, return_index=True)
        pairs = pairs[np.sort(first)]
    return np.divmod(pairs[: options.num_ratings], options.num_films)
