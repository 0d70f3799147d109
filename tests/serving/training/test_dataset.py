"""The split, that nothing a training sample is told comes from that sample, and the requests made of samples."""

from __future__ import annotations

import dataclasses

import numpy as np

from serving.training.dataset import (
    HISTORY_LIMIT,
    FilmsDataset,
    FilmsOptions,
    LabelledRequests,
    evaluation_requests,
    films_spec,
    training_requests,
)
from shardrank_testing.movielens import small_interactions

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
    labelled = training_requests(DATASET, films_spec(DATA))
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
    labelled = evaluation_requests(DATASET, films_spec(DATA))
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
    spec = films_spec(DATA, options)
    told = []
    for dataset in (DATASET, flipped):
        labelled = training_requests(dataset, spec)
        candidate = int(np.flatnonzero(labelled.samples == sample)[0])
        request = int(np.searchsorted(np.cumsum(labelled.requests.num_candidates), candidate, side="right"))
        told.append((histories_of(labelled)[request], labelled.requests.candidate_dense[candidate]))
    assert told[0][0] == told[1][0]
    # The overall mean that statistics are drawn to is of all labels, so one label moves it by one part in 2400.
    np.testing.assert_allclose(told[0][1], told[1][1], atol=5e-4)
