from __future__ import annotations

import numpy as np
import pytest

from serving.training.errors import TrainingError
from serving.training.synthetic import SyntheticOptions, generate_interactions

SMALL = SyntheticOptions(num_users=60, num_films=50, num_ratings=700, seed=4)


def test_exactly_as_many_different_pairs_are_rated_as_were_asked_for() -> None:
    data = generate_interactions(SMALL)
    assert data.num_ratings == 700
    assert len(set(zip(data.user_index.tolist(), data.film_index.tolist(), strict=True))) == 700
    assert data.user_index.max() < 60
    assert data.film_index.max() < 50


def test_more_than_half_of_the_ratings_are_liked_and_all_are_from_one_to_five() -> None:
    ratings = generate_interactions(SMALL).ratings
    assert set(ratings.tolist()) == {1.0, 2.0, 3.0, 4.0, 5.0}
    assert (ratings >= 4).mean() == pytest.approx(0.55, abs=0.01)


def test_every_film_has_one_to_three_known_genres() -> None:
    films = generate_interactions(SMALL).films
    counts = np.diff(films.genre_offsets)
    assert counts.min() >= 1
    assert counts.max() <= 3
    assert films.genre_ids.min() >= 1
    assert films.genre_ids.max() < len(films.genre_names)


def test_the_same_seed_generates_the_same_ratings() -> None:
    first, again = generate_interactions(SMALL), generate_interactions(SMALL)
    other = generate_interactions(SMALL.model_copy(update={"seed": 5}))
    np.testing.assert_array_equal(first.ratings, again.ratings)
    np.testing.assert_array_equal(first.film_index, again.film_index)
    assert not np.array_equal(first.film_index, other.film_index)


def test_more_ratings_than_a_quarter_of_all_pairs_are_refused_with_the_numbers() -> None:
    with pytest.raises(TrainingError, match=r"num_ratings 751 is more than 750, .* 60 users and 50 films"):
        generate_interactions(SMALL.model_copy(update={"num_ratings": 751}))
