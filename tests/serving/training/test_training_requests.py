from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from loader.manifest import fingerprint_strings
from serving.models.factory import build_model
from serving.training.dataset import FilmsDataset
from serving.training.description import FilmsOptions, films_spec, films_vocabularies
from serving.training.errors import TrainingError
from serving.training.requests import evaluation_json, evaluation_requests, first_requests, training_requests
from shardrank_testing.movielens import small_interactions

DATA = small_interactions()
DATASET = FilmsDataset.split(DATA, seed=0)


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
    bodies = evaluation_json(labelled, spec, films_vocabularies(DATA, spec))
    assert len(bodies) == labelled.requests.num_requests
    body, labels = bodies[3]
    sample = labelled.samples[int(labelled.requests.num_candidates[:3].sum())]
    user, film = DATA.user_index[sample], DATA.film_index[sample]
    assert list(body) == ["context", "candidates"]
    assert body["context"]["sparse"]["user_id"] == [int(DATA.users.ids[user])]
    assert body["context"]["dense"] == []
    assert body["candidates"]["dense"] == []
    assert list(body["context"]["sparse"]) == ["user_id", "history"]
    sparse = body["candidates"]["sparse"]
    assert list(sparse) == ["film_id", "genre"]
    assert sparse["film_id"][0] == DATA.films.ids[film]
    first, last = DATA.films.genre_offsets[film : film + 2]
    assert sparse["genre"][0] == DATA.films.genre_ids[first:last].tolist()
    assert len(sparse["film_id"]) == len(sparse["genre"]) == len(labels)
    assert json.loads(json.dumps(body)) == body


def test_profile_requests_carry_words_and_dense_inputs() -> None:
    spec = films_spec(DATA, FilmsOptions(profile=True))
    labelled = evaluation_requests(DATASET, spec)
    vocabularies = films_vocabularies(DATA, spec)
    body, labels = evaluation_json(labelled, spec, vocabularies)[0]
    user = DATA.user_index[labelled.samples[0]]
    assert body["context"]["sparse"]["occupation"] == [DATA.users.occupations[user]]
    assert body["context"]["sparse"]["age"] == [DATA.users.ages[user] // 5]
    assert body["context"]["sparse"]["zip_code"] == [int(DATA.users.zip_codes[user][:3])]
    assert np.array(body["candidates"]["dense"]).shape == (len(labels), 2)
    flat = labelled.requests.values["occupation"][0]
    assert flat == fingerprint_strings([DATA.users.occupations[user]])[0]


def test_the_first_requests_are_those_one_by_one() -> None:
    spec = films_spec(DATA, FilmsOptions(profile=True))
    requests = evaluation_requests(DATASET, spec).requests
    first = first_requests(requests, spec, 5)
    first.check(spec)
    assert first.num_requests == 5
    for index in range(5):
        ours, theirs = first.request(index), requests.request(index)
        for name in spec.features:
            np.testing.assert_array_equal(ours.values[name.name], theirs.values[name.name])
        np.testing.assert_array_equal(ours.candidate_dense, theirs.candidate_dense)
    assert first_requests(requests, spec, 10**6).num_requests == requests.num_requests


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
