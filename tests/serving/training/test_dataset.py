"""The split, that nothing a training sample is told comes from that sample, and the requests made of samples."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from serving.training.dataset import (
    HISTORY_LIMIT,
    FilmsDataset,
    FilmsOptions,
    LabelledRequests,
    TrainingError,
    films_description,
    labelled_requests,
    read_movielens,
)
from shardrank_testing.movielens import small_interactions, write_movielens

DATA = small_interactions()
DATASET = FilmsDataset.split(DATA, seed=1)


def histories_of(labelled: LabelledRequests) -> list[list[int]]:
    """Film ids of each request's history."""
    requests = labelled.requests
    ends = np.cumsum(requests.lengths["history"])[:-1]
    return [part.tolist() for part in np.split(requests.values["history"], ends)]


def samples_of(labelled: LabelledRequests) -> list[np.ndarray]:
    return np.split(labelled.samples, np.cumsum(labelled.requests.num_candidates)[:-1])


def test_the_split_is_80_to_20_and_the_same_for_the_same_seed() -> None:
    again, other = FilmsDataset.split(DATA, seed=1), FilmsDataset.split(DATA, seed=2)
    assert DATASET.test.size == 600
    assert sorted([*DATASET.train, *DATASET.test]) == list(range(3000))
    np.testing.assert_array_equal(again.test, DATASET.test)
    np.testing.assert_array_equal(again.fold, DATASET.fold)
    assert not np.array_equal(other.test, DATASET.test)
    # A film is liked that is rated with four or more.
    assert DATASET.labels.tolist() == [float(rating >= 4) for rating in DATA.ratings]


def test_a_training_history_holds_no_film_of_its_own_fold() -> None:
    labelled = labelled_requests(DATASET, films_description(DATA).compiled(), DATASET.train)
    assert sorted(labelled.samples) == sorted(DATASET.train)
    for history, samples in zip(histories_of(labelled), samples_of(labelled), strict=True):
        user, fold = {*DATA.user_index[samples]}, {*DATASET.fold[samples]}
        assert len(user) == len(fold) == 1
        allowed = [
            int(DATA.films.ids[DATA.film_index[sample]])
            for sample in DATASET.train
            if DATA.user_index[sample] in user and DATASET.fold[sample] not in fold and DATASET.labels[sample]
        ]
        assert len(history) == min(len(allowed), HISTORY_LIMIT)
        assert set(history) <= set(allowed)
        assert not set(history) & {int(DATA.films.ids[DATA.film_index[sample]]) for sample in samples}


def test_an_evaluation_history_is_of_training_latest_first() -> None:
    labelled = labelled_requests(DATASET, films_description(DATA).compiled(), DATASET.test)
    assert sorted(labelled.samples) == sorted(DATASET.test)
    np.testing.assert_array_equal(labelled.labels, DATASET.labels[labelled.samples])
    for history, samples in zip(histories_of(labelled), samples_of(labelled), strict=True):
        liked = [s for s in DATASET.train if DATA.user_index[s] == DATA.user_index[samples[0]] and DATASET.labels[s]]
        when = {int(DATA.films.ids[DATA.film_index[s]]): int(DATA.timestamps[s]) for s in liked}
        assert set(history) <= set(when)
        assert len(history) == min(len(when), HISTORY_LIMIT)
        times = [when[film] for film in history]
        assert times == sorted(when.values(), reverse=True)[:HISTORY_LIMIT]


def test_a_samples_own_label_changes_nothing_that_it_is_told() -> None:
    options = FilmsOptions(profile=True)
    sample = int(DATASET.train[7])
    ratings = DATA.ratings.copy()
    ratings[sample] = 1 if ratings[sample] >= 4 else 5
    flipped_data = dataclasses.replace(DATA, ratings=ratings)
    flipped = dataclasses.replace(DATASET, interactions=flipped_data, labels=(ratings >= 4).astype(np.float32))
    spec = films_description(DATA, options).compiled()
    told = []
    for dataset in (DATASET, flipped):
        labelled = labelled_requests(dataset, spec, dataset.train)
        candidate = int(np.flatnonzero(labelled.samples == sample)[0])
        request = int(np.searchsorted(np.cumsum(labelled.requests.num_candidates), candidate, side="right"))
        told.append((histories_of(labelled)[request], labelled.requests.candidate_dense[candidate]))
    assert told[0][0] == told[1][0]
    # The overall mean that statistics are drawn to is of all labels, so one label moves it by one part in 2400.
    np.testing.assert_allclose(told[0][1], told[1][1], atol=5e-4)


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
        (
            "u.data",
            3,
            "1\t2\t3",
            r"u\.data, line 3: '1\\t2\\t3' is not user id, film id, rating in 1\.\.5 and timestamp",
        ),
        ("u.data", 1, "1\t2\t6\t0", r"u\.data, line 1: .* is not user id, film id, rating in 1\.\.5"),
        ("u.data", 2, "1\tx\t3\t0", r"u\.data, line 2: .* is not user id, film id"),
        ("u.data", 2, "1\t-1\t3\t0", r"u\.data, line 2: .* is not user id, film id"),
        ("u.data", 5, "1\t99999\t3\t0", r"u\.data: rating 5: film id 99999 is not in u\.item"),
        ("u.data", 5, "99999\t1\t3\t0", r"u\.data: rating 5: user id 99999 is not in u\.user"),
        ("u.user", 4, "4|x|M|writer|12345", r"u\.user, line 4: '4\|x\|M\|writer\|12345' is not user id\|age"),
        ("u.user", 4, "3|20|M|writer|12345", r"u\.user: user id 3 is there twice"),
        ("u.genre", 2, "Action|7", r"u\.genre: genre number 7 is not 1"),
        ("u.item", 1, "1|A (1990)|||", r"u\.item, line 1: .* is not film id\|title.* 16 genres"),
        ("u.item", 2, "2|A (1990)|||" + "|2" * 16, r"u\.item, line 2: .* is not film id\|title"),
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
