"""The films workload: its requests are those of the data, and the demo's trained model answers them."""

from __future__ import annotations

import numpy as np
import pytest

from loader.errors import ConfigError
from loadtest.load.config import OfferedLoad
from loadtest.load.generator import open_payloads
from loadtest.workloads.catalog import FilmsWorkload, open_workload
from loadtest.workloads.payloads import APIS, Payloads
from loadtest.workloads.workload import features_of, parse_candidates
from serving.training.dataset import FilmsDataset, FilmsOptions, TrainingError
from shardrank_testing.movielens import small_interactions, write_movielens
from shardrank_testing.workloads import assert_same_request, read_payload

DATA = small_interactions()
SEED = 4


def workload(**options) -> FilmsWorkload:
    return FilmsWorkload(DATA, FilmsOptions(profile=options.pop("profile", False)), split_seed=SEED, **options)


def by_name(films: FilmsWorkload, seed: int):
    request = films.request(np.random.default_rng(seed))
    return request, {feature.name: feature for feature in features_of(films.schema, request)}


@pytest.mark.parametrize("seed", range(5))
def test_a_request_is_a_user_with_films_rated_and_liked(seed):
    """Rated in the test part, liked in the training part; candidates bring the genres of their films."""
    dataset = FilmsDataset.split(DATA, seed=SEED)
    request, features = by_name(workload(), seed)
    user = int(np.flatnonzero(DATA.users.ids == features["user_id"].values[0])[0])
    tested = dataset.test[DATA.user_index[dataset.test] == user]
    assert sorted(features["film_id"].values) == sorted(DATA.films.ids[DATA.film_index[tested]])
    assert request.num_candidates == tested.size
    liked = [rating for rating in dataset.train if DATA.user_index[rating] == user and dataset.labels[rating] > 0]
    latest = sorted(liked, key=lambda rating: -DATA.timestamps[rating])[:50]
    assert sorted(DATA.timestamps[latest]) == sorted(DATA.timestamps[liked])[-len(latest) :]
    assert sorted(features["history"].values) == sorted(DATA.films.ids[DATA.film_index[latest]])
    starts = np.cumsum([0, *features["genre"].lengths])
    for number, film in enumerate(features["film_id"].values):
        at = int(np.flatnonzero(DATA.films.ids == film)[0])
        expected = DATA.films.genre_ids[DATA.films.genre_offsets[at] : DATA.films.genre_offsets[at + 1]]
        assert features["genre"].values[starts[number] : starts[number + 1]].tolist() == expected.tolist()


def test_every_user_of_the_test_part_comes():
    films = workload()
    users = {int(by_name(films, seed)[1]["user_id"].values[0]) for seed in range(3000)}
    assert len(users) == np.unique(DATA.user_index[FilmsDataset.split(DATA, seed=SEED).test]).size


@pytest.mark.parametrize("count", [1, 100, 300])
def test_rated_films_are_filled_up_to_a_number_of_candidates(count):
    _, of_user = by_name(workload(), 7)
    request, features = by_name(workload(candidates=parse_candidates(str(count))), 7)
    rated, found = of_user["film_id"].values, features["film_id"].values
    assert request.num_candidates == found.size == count
    assert found[: rated.size].tolist() == rated[:count].tolist()
    if count <= DATA.films.ids.size:
        assert np.unique(found).size == count
    assert not set(found[rated.size :].tolist()) & set(rated.tolist())


@pytest.mark.parametrize("profile", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_the_server_s_parser_reads_films_back(api, profile):
    films, rng = workload(profile=profile), np.random.default_rng(0)
    for payload in Payloads(films, api, count=5):
        request = films.request(rng)
        assert_same_request(read_payload(films, api, payload), request)
        assert bool(request.texts) == profile


def test_movielens_files_are_read_from_their_folder(tmp_path):
    folder = write_movielens(tmp_path / "ml", DATA)
    films = open_workload("films", movielens=folder, candidates="10")
    assert (films.spec.model, films.request(np.random.default_rng(0)).num_candidates) == ("films", 10)
    assert "candidates 10" in films.name
    assert open_workload("films:profile", movielens=folder).spec.dense_inputs.candidate == 2


def test_films_need_their_folder_and_bring_their_ids(tmp_path):
    for options, error, message in (
        ({}, ConfigError, "--movielens"),
        ({"movielens": tmp_path, "ids": "uniform"}, ConfigError, "none can be chosen"),
        ({"movielens": tmp_path}, TrainingError, None),
    ):
        with pytest.raises(error, match=message):
            open_workload("films", **options)


def test_the_seed_draws_other_users_from_the_same_split(tmp_path):
    folder = write_movielens(tmp_path, small_interactions(num_ratings=1000))

    def asked(seed: int, split_seed: int) -> tuple[str, list[bytes]]:
        films = {"workload": "films", "movielens": folder, "requests": 20, "split_seed": split_seed}
        name, pool = open_payloads(OfferedLoad(target="http://h", seed=seed, **films))
        return name, [payload.body for payload in pool]

    (name, first), (_, again), (_, drawn), (other, split) = asked(0, 0), asked(0, 0), asked(1, 0), asked(0, 1)
    assert first == again
    # A user's request is the same whenever it is drawn, unless other ratings are the test part.
    every = {body for seed in range(8) for body in asked(seed, 0)[1]}
    assert drawn != first
    assert set(drawn) <= every
    assert not set(split) & every
    assert other == f"{name}, split 1"
