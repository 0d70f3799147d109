"""Samples as rank requests: one user with the films to score, in flat arrays and as the JSON of the HTTP API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.golden import GoldenRequests
from loader.manifest import ModelSpec, VocabularyMapping, fingerprint_strings
from loader.vocabulary import Vocabulary
from serving.training.dataset import NO_FOLD, NUM_FOLDS, FilmsDataset
from serving.training.description import HISTORY_LIMIT, NUM_AGE_BUCKETS, YEARS_PER_AGE_BUCKET
from serving.training.interactions import Users
from serving.training.ragged import positions_in
from shard_node.bags import Float32Array, Int64Array

NOT_A_US_ZIP_CODE = 1000


@dataclass(frozen=True, slots=True, eq=False)
class LabelledRequests:
    """Rank requests with the truth.

    Attributes:
        requests: the requests; their `scores` are zeros.
        labels: float32 [N], of the requests' candidates.
        samples: int64 [N], the interaction that each candidate is.
    """

    requests: GoldenRequests
    labels: Float32Array
    samples: Int64Array


def training_requests(dataset: FilmsDataset, spec: ModelSpec) -> LabelledRequests:
    """One request for each user and fold: the films rated in the fold, with a history from the others."""
    samples = dataset.train
    return _grouped(dataset, spec, samples, dataset.fold[samples])


def evaluation_requests(dataset: FilmsDataset, spec: ModelSpec) -> LabelledRequests:
    """One request for each user of the test part: the films rated there, with a history from the training part."""
    return _grouped(dataset, spec, dataset.test, np.full(dataset.test.size, NO_FOLD, np.int64))


def _grouped(dataset: FilmsDataset, spec: ModelSpec, samples: Int64Array, left_out: Int64Array) -> LabelledRequests:
    data = dataset.interactions
    group = data.user_index[samples] * (NUM_FOLDS + 1) + (left_out + 1)
    order = np.argsort(group, kind="stable")
    samples, left_out = samples[order], left_out[order]
    _, first, counts = np.unique(group[order], return_index=True, return_counts=True)
    users, films = data.user_index[samples[first]], data.film_index[samples]
    values, lengths = _context_bags(data.users, users, spec)
    genre_lengths, genre_positions = positions_in(data.films.genre_offsets, films)
    history_lengths, history = dataset.histories(users, left_out[first], HISTORY_LIMIT)
    values |= {
        "history": data.films.ids[history],
        "film_id": data.films.ids[films],
        "genre": data.films.genre_ids[genre_positions],
    }
    lengths |= {
        "history": history_lengths.astype(np.int32),
        "film_id": np.ones(films.size, np.int32),
        "genre": genre_lengths.astype(np.int32),
    }
    statistics = dataset.film_statistics(films, left_out)
    requests = GoldenRequests(
        num_candidates=counts.astype(np.int32),
        values=values,
        lengths=lengths,
        context_dense=np.zeros((users.size, 0), np.float32),
        candidate_dense=np.ascontiguousarray(statistics[:, : spec.dense_inputs.candidate]),
        scores=np.zeros(films.size, np.float32),
    )
    return LabelledRequests(requests, dataset.labels[samples], samples)


def _context_bags(
    users: Users, chosen: Int64Array, spec: ModelSpec
) -> tuple[dict[str, Int64Array], dict[str, npt.NDArray[np.int32]]]:
    """Values and lengths of the features of a user that have one id."""
    values = {"user_id": users.ids[chosen]}
    if any(feature.name == "age" for feature in spec.features):
        values |= {
            "age": np.minimum(users.ages // YEARS_PER_AGE_BUCKET, NUM_AGE_BUCKETS - 1)[chosen],
            "occupation": fingerprint_strings(users.occupations)[chosen],
            "zip_code": _zip_numbers(users)[chosen],
        }
    return values, {name: np.ones(chosen.size, np.int32) for name in values}


def _zip_numbers(users: Users) -> Int64Array:
    """The area of a US zip code (its first three digits), or `NOT_A_US_ZIP_CODE`."""
    return np.array([_zip_number(code) for code in users.zip_codes], np.int64)


def _zip_number(code: str) -> int:
    return int(code[:3]) if code.isascii() and code[:5].isdigit() else NOT_A_US_ZIP_CODE


def first_requests(requests: GoldenRequests, spec: ModelSpec, num_requests: int) -> GoldenRequests:
    """The first requests (all, if there are fewer), as views."""
    num_requests = min(num_requests, requests.num_requests)
    num_candidates = int(requests.num_candidates[:num_requests].sum())
    values, lengths, weights = {}, {}, {}
    for feature in spec.features:
        bags = num_requests if feature.side == "context" else num_candidates
        lengths[feature.name] = requests.lengths[feature.name][:bags]
        ids = int(lengths[feature.name].sum())
        values[feature.name] = requests.values[feature.name][:ids]
        if feature.weighted:
            weights[feature.name] = requests.weights[feature.name][:ids]
    return GoldenRequests(
        num_candidates=requests.num_candidates[:num_requests],
        values=values,
        lengths=lengths,
        weights=weights,
        context_dense=requests.context_dense[:num_requests],
        candidate_dense=requests.candidate_dense[:num_candidates],
        scores=requests.scores[:num_candidates],
    )


def to_json(
    requests: GoldenRequests, spec: ModelSpec, vocabularies: Mapping[str, Vocabulary]
) -> Iterator[dict[str, Any]]:
    """Each request as the body of `POST /v1/models/{model}:rank`.

    A candidate feature with one id for every candidate is a flat list, as the API allows.

    Args:
        requests: the requests, without weights.
        spec: their model.
        vocabularies: of its tables; string ids are written as strings.

    Yields:
        `{"context": {"sparse": ..., "dense": ...}, "candidates": {"sparse": ..., "dense": ...}}`.
    """
    strings = _strings_by_feature(spec, vocabularies)
    for index in range(requests.num_requests):
        request = requests.request(index)
        sparse: dict[str, dict[str, list[Any]]] = {"context": {}, "candidate": {}}
        for feature in spec.features:
            ids: list[Any] = request.values[feature.name].tolist()
            if feature.name in strings:
                ids = [strings[feature.name][number] for number in ids]
            lengths = request.lengths[feature.name].tolist()
            if feature.side == "candidate" and any(length != 1 for length in lengths):
                ends = np.cumsum(lengths).tolist()
                ids = [ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]
            sparse[feature.side][feature.name] = ids
        yield {
            "context": {"sparse": sparse["context"], "dense": request.context_dense[0].tolist()},
            "candidates": {
                "sparse": sparse["candidate"],
                "dense": request.candidate_dense.tolist() if spec.dense_inputs.candidate else [],
            },
        }


def evaluation_json(
    labelled: LabelledRequests, spec: ModelSpec, vocabularies: Mapping[str, Vocabulary]
) -> list[tuple[dict[str, Any], Float32Array]]:
    """Each request in its JSON form, with the labels of its candidates."""
    ends = np.cumsum(labelled.requests.num_candidates)[:-1]
    bodies = to_json(labelled.requests, spec, vocabularies)
    return list(zip(bodies, np.split(labelled.labels, ends), strict=True))


def _strings_by_feature(spec: ModelSpec, vocabularies: Mapping[str, Vocabulary]) -> dict[str, dict[int, str]]:
    strings: dict[str, dict[int, str]] = {}
    for table in spec.tables:
        if isinstance(table.id_mapping, VocabularyMapping) and table.id_mapping.id_type == "string":
            words = [str(word) for word in vocabularies[table.name]]
            by_number = dict(zip(fingerprint_strings(words).tolist(), words, strict=True))
            strings |= dict.fromkeys(table.feature_names, by_number)
    return strings
