"""The split, that nothing a training sample is told comes from that sample, and the requests made of samples."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from loader.snapshot.tables import fingerprint_strings
from serving.models.ranking_models import build_model
from serving.training.dataset import (
    HISTORY_LIMIT,
    NO_FOLD,
    NUM_FOLDS,
    FilmsDataset,
    FilmsOptions,
    LabelledRequests,
    evaluation_requests,
    films_spec,
    training_requests,
)
from serving.training.interactions import TrainingError
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


def test_a_label_says_whether_the_rating_is_four_or_more() -> None:
    assert DATASET.labels.tolist() == [float(rating >= 4) for rating in DATA.ratings]


def test_ratings_that_are_all_liked_are_refused() -> None:
    liked = dataclasses.replace(DATA, ratings=np.full_like(DATA.ratings, 5))
    with pytest.raises(TrainingError, match="2400 of the 2400 training ratings are 4 or more"):
        FilmsDataset.split(liked, seed=0)


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


def test_an_evaluation_history_is_the_films_liked_in_training_latest_first() -> None:
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


def test_a_history_is_cut_to_the_limit() -> None:
    lengths, films = DATASET.histories(np.arange(5), np.full(5, NO_FOLD), limit=3)
    assert lengths.max() <= 3
    assert films.size == lengths.sum()


@pytest.mark.parametrize("fold", [NO_FOLD, 0, NUM_FOLDS - 1])
def test_film_statistics_count_the_other_folds_only(fold: int) -> None:
    films = np.arange(20)
    statistics = DATASET.film_statistics(films, np.full(20, fold))
    seen = DATASET.train[DATASET.fold[DATASET.train] != fold]
    overall = DATASET.labels[DATASET.train].mean()
    for film in films:
        labels = DATASET.labels[seen[DATA.film_index[seen] == film]]
        expected = [np.log10(1 + labels.size), (labels.sum() + 5 * overall) / (labels.size + 5)]
        np.testing.assert_allclose(statistics[film], expected, rtol=1e-5)


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


@pytest.mark.parametrize("kind", ["target_attention", "dlrm", "dcn_v2", "mlp"])
@pytest.mark.parametrize("profile", [False, True])
def test_every_description_is_valid_and_every_request_fits_it(kind: str, profile: bool) -> None:
    spec = films_spec(DATA, FilmsOptions.model_validate({"kind": kind, "profile": profile}))
    build_model(spec)
    training_requests(DATASET, spec).requests.check(spec)
    evaluation_requests(DATASET, spec).requests.check(spec)


def test_a_request_is_four_sparse_features_and_no_dense_input() -> None:
    spec = films_spec(DATA)
    labelled = evaluation_requests(DATASET, spec)
    request = labelled.requests.request(3)
    sample = labelled.samples[int(labelled.requests.num_candidates[:3].sum())]
    user, film = DATA.user_index[sample], DATA.film_index[sample]
    assert [one.name for one in spec.features if one.side == "context"] == ["user_id", "history"]
    assert [one.name for one in spec.features if one.side == "candidate"] == ["film_id", "genre"]
    assert request.values.keys() == {one.name for one in spec.features}
    assert request.values["user_id"].tolist() == [DATA.users.ids[user]]
    assert (request.context_dense.shape[1], request.candidate_dense.shape[1]) == (0, 0)
    assert request.values["film_id"][0] == DATA.films.ids[film]
    first, last = DATA.films.genre_offsets[film : film + 2]
    assert request.lengths["genre"][0] == last - first
    assert request.values["genre"][: last - first].tolist() == DATA.films.genre_ids[first:last].tolist()
    assert request.lengths["film_id"].size == request.lengths["genre"].size == request.num_candidates[0]


def test_profile_requests_carry_words_and_dense_inputs() -> None:
    spec = films_spec(DATA, FilmsOptions(profile=True))
    labelled = evaluation_requests(DATASET, spec)
    request, user = labelled.requests.request(0), DATA.user_index[labelled.samples[0]]
    assert request.values["occupation"].tolist() == fingerprint_strings([DATA.users.occupations[user]]).tolist()
    assert request.values["age"].tolist() == [DATA.users.ages[user] // 5]
    assert request.values["zip_code"].tolist() == [int(DATA.users.zip_codes[user][:3])]
    assert request.candidate_dense.shape == (request.num_candidates[0], 2)


def test_the_first_requests_are_those_one_by_one() -> None:
    spec = films_spec(DATA, FilmsOptions(profile=True))
    requests = evaluation_requests(DATASET, spec).requests
    first = evaluation_requests(DATASET, spec, 5).requests
    first.check(spec)
    assert first.num_requests == 5
    for index in range(5):
        ours, theirs = first.request(index), requests.request(index)
        for name in spec.features:
            np.testing.assert_array_equal(ours.values[name.name], theirs.values[name.name])
        np.testing.assert_array_equal(ours.candidate_dense, theirs.candidate_dense)
    assert evaluation_requests(DATASET, spec, 10**6).requests.num_requests == requests.num_requests


def test_a_film_id_that_would_need_a_huge_table_is_refused() -> None:
    films = dataclasses.replace(DATA.films, ids=DATA.films.ids + 10**9)
    with pytest.raises(TrainingError, match=r"film id 1000000120: .* at most 10000000 is allowed"):
        films_spec(dataclasses.replace(DATA, films=films))


def test_postal_codes_of_other_countries_share_one_id() -> None:
    codes = ("V3N4P", "", "12", "02139", "²1234")
    users = dataclasses.replace(DATA.users, zip_codes=codes + DATA.users.zip_codes[len(codes) :])
    dataset = FilmsDataset.split(dataclasses.replace(DATA, users=users), seed=0)
    requests = training_requests(dataset, films_spec(DATA, FilmsOptions(profile=True))).requests
    by_user = dict(zip(requests.values["user_id"].tolist(), requests.values["zip_code"].tolist(), strict=True))
    assert {by_user[user] for user in (1, 2, 5) if user in by_user} == {1000}
    assert by_user.get(4, 21) == 21
