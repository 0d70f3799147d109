"""Real requests: users of MovieLens with their histories, ranking films that they went on to rate."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from loader.snapshot.manifest import fingerprint_strings
from loadtest.workloads.distributions import CandidateCounts
from loadtest.workloads.workload import WorkloadRequest
from router.feature_schema import FeatureSchema
from serving.training.dataset import NO_FOLD, FilmsDataset, evaluation_requests
from serving.training.description import FilmsOptions, films_spec
from serving.training.interactions import Interactions, offsets_of, positions_in, read_movielens
from shard_node.bags import Float32Array, Int64Array, KeyedBags

PROFILE = "profile"


class FilmsWorkload:
    """Makes requests to the model that `shardrank demo` and `shardrank train` make.

    A request is a user of the test part, each as likely, with the history from the training part. Its candidates are
    the films that the user rated in the test part; with `candidates`, that many films: those first, then others that
    the user did not rate there, at random.

    Args:
        interactions: the data.
        options: what the model is made of; requests differ only by its `profile`.
        candidates: how many candidates; None for the user's own.
        split_seed: the same as the trainer's, so that the server has not learnt the answers.

    Raises:
        TrainingError: if the data can't be split.
    """

    def __init__(
        self,
        interactions: Interactions,
        options: FilmsOptions | None = None,
        *,
        candidates: CandidateCounts | None = None,
        split_seed: int = 0,
    ) -> None:
        options = options or FilmsOptions()
        self.interactions = interactions
        self.options = options
        self.spec = films_spec(interactions, options)
        self.schema = FeatureSchema.of(self.spec)
        own = "their own" if candidates is None else candidates.name
        self.name = f"films{f':{PROFILE}' if options.profile else ''}, {interactions.source}, candidates {own}"
        if split_seed:
            self.name += f", split {split_seed}"
        self._candidates = candidates
        dataset = FilmsDataset.split(interactions, seed=split_seed)
        labelled = evaluation_requests(dataset, self.spec)
        requests = labelled.requests
        self._films = interactions.films
        self._rated = np.split(interactions.film_index[labelled.samples], np.cumsum(requests.num_candidates)[:-1])
        self._context = {
            feature.name: (requests.values[feature.name], offsets_of(requests.lengths[feature.name]))
            for feature in self.spec.features
            if feature.side == "context"
        }
        every_film = np.arange(self._films.ids.size)
        statistics = dataset.film_statistics(every_film, np.full(every_film.size, NO_FOLD))
        self._film_dense: Float32Array = statistics[:, : self.spec.dense_inputs.candidate]
        words = sorted(set(interactions.users.occupations))
        self._words = dict(zip(fingerprint_strings(words).tolist(), words, strict=True))

    @property
    def num_users(self) -> int:
        """Count the users who have films in the test part."""
        return len(self._rated)

    def request(self, rng: np.random.Generator) -> WorkloadRequest:
        """Draw a user and make the request."""
        user = int(rng.integers(self.num_users))
        films = self._chosen(rng, user)
        bags = {name: self._context_bag(name, user) for name in self._context}
        genre_lengths, genres = positions_in(self._films.genre_offsets, films)
        bags["film_id"] = (self._films.ids[films], np.ones(films.size, np.int64))
        bags["genre"] = (self._films.genre_ids[genres], genre_lengths)
        ordered = [bags[feature.name] for feature in self.schema.features]
        return WorkloadRequest(
            bags=KeyedBags.from_lengths(
                np.arange(len(ordered), dtype=np.int32),
                np.array([lengths.size for _, lengths in ordered], np.int64),
                np.concatenate([lengths for _, lengths in ordered]),
                np.concatenate([values for values, _ in ordered]),
            ),
            num_candidates=films.size,
            context_dense=np.zeros(0, np.float32),
            candidate_dense=np.ascontiguousarray(self._film_dense[films]),
            texts={name: self._texts(bags[name][0]) for name in self.schema.string_features},
        )

    def _chosen(self, rng: np.random.Generator, user: int) -> Int64Array:
        rated = self._rated[user]
        if self._candidates is None:
            return rated
        count = self._candidates.draw(rng)
        missing = max(0, count - rated.size)
        every_film = np.arange(self._films.ids.size)
        others = np.setdiff1d(every_film, rated) if rated.size < every_film.size else every_film
        # Where there are too few films, one comes more than once, as a request may have it.
        return np.concatenate([rated, rng.choice(others, missing, replace=missing > others.size)])[:count]

    def _context_bag(self, name: str, user: int) -> tuple[Int64Array, Int64Array]:
        values, offsets = self._context[name]
        own = values[offsets[user] : offsets[user + 1]]
        return own, np.array([own.size], np.int64)

    def _texts(self, fingerprints: Int64Array) -> tuple[str, ...]:
        return tuple(self._words[number] for number in fingerprints.tolist())


def movielens_workload(
    folder: Path, *, profile: bool = False, candidates: CandidateCounts | None = None, split_seed: int = 0
) -> FilmsWorkload:
    """Open a folder with u.data, u.item, u.user and u.genre of MovieLens 100K.

    Raises:
        DatasetError: a file is missing or malformed.
        TrainingError: if the ratings can't be split.
    """
    options = FilmsOptions(profile=profile)
    return FilmsWorkload(read_movielens(folder), options, candidates=candidates, split_seed=split_seed)
