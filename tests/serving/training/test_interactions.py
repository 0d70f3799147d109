from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from serving.training.interactions import TrainingError, read_movielens
from shardrank_testing.movielens import small_interactions, write_movielens


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    written = small_interactions()
    read = read_movielens(write_movielens(tmp_path, written))
    assert read.source == "movielens-100k"
    for name in ("user_index", "film_index", "ratings", "timestamps"):
        np.testing.assert_array_equal(getattr(read, name), getattr(written, name))
    for name in ("ids", "genre_offsets", "genre_ids"):
        np.testing.assert_array_equal(getattr(read.films, name), getattr(written.films, name))
    np.testing.assert_array_equal(read.users.ages, written.users.ages)
    assert read.films.titles == written.films.titles
    assert read.films.genre_names == written.films.genre_names
    assert read.users.occupations == written.users.occupations
    assert read.users.zip_codes == written.users.zip_codes


@pytest.mark.parametrize(
    ("file", "line", "text", "problem"),
    [
        ("u.data", 3, "1\t2\t3", r"u\.data, line 3: 3 fields separated by '\\t', expected 4"),
        ("u.data", 1, "1\t2\t6\t0", r"u\.data, line 1: rating '6' is not in 1\.\.5"),
        ("u.data", 2, "1\tx\t3\t0", r"u\.data, line 2: film id 'x' is not a whole number"),
        ("u.data", 2, "1\t-1\t3\t0", r"u\.data, line 2: film id '-1' is not a whole number"),
        ("u.data", 5, "1\t99999\t3\t0", r"u\.data: rating 5: film id 99999 is not in u\.item"),
        ("u.data", 5, "99999\t1\t3\t0", r"u\.data: rating 5: user id 99999 is not in u\.user"),
        ("u.user", 4, "4|x|M|writer|12345", r"u\.user, line 4: age 'x' is not a whole number"),
        ("u.user", 4, "3|20|M|writer|12345", r"u\.user: user id 3 is there twice"),
        ("u.genre", 2, "Action|7", r"u\.genre: genre number 7 is not 1"),
        ("u.item", 1, "1|A (1990)|||", r"u\.item, line 1: 5 fields"),
        ("u.item", 2, "2|A (1990)|||" + "|2" * 16, r"u\.item, line 2: genre unknown '2' is not 0 or 1"),
    ],
)
def test_a_malformed_line_is_refused_by_file_and_line(
    tmp_path: Path, file: str, line: int, text: str, problem: str
) -> None:
    folder = write_movielens(tmp_path, small_interactions())
    lines = (folder / file).read_text("latin-1").split("\n")
    lines[line - 1] = text
    (folder / file).write_text("\n".join(lines), "latin-1")
    with pytest.raises(TrainingError, match=problem):
        read_movielens(folder)


@pytest.mark.parametrize("file", ["u.data", "u.item", "u.user", "u.genre"])
def test_a_missing_or_empty_file_is_refused_by_name(tmp_path: Path, file: str) -> None:
    folder = write_movielens(tmp_path, small_interactions())
    (folder / file).write_text("\n\n")
    with pytest.raises(TrainingError, match=f"{file}: holds no line"):
        read_movielens(folder)
    (folder / file).unlink()
    with pytest.raises(TrainingError, match=f"{file}: No such file"):
        read_movielens(folder)


def test_the_same_seed_generates_the_same_ratings() -> None:
    first, again, other = (small_interactions(seed, num_ratings=700) for seed in (4, 4, 5))
    np.testing.assert_array_equal(first.ratings, again.ratings)
    np.testing.assert_array_equal(first.film_index, again.film_index)
    assert not np.array_equal(first.film_index, other.film_index)
