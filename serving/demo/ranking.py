"""The demo's requests: every test request over one API, one in flight; one user's top films; lines to paste."""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from loader.progress import Progress, no_progress
from serving.client import Client, ClientError
from serving.errors import ServingError
from serving.training.dataset import HISTORY_LIMIT, NO_FOLD, FilmsDataset
from shard_node.bags import Float32Array, Int64Array

TOP_FILMS = 10
MAX_CANDIDATES = 2000
MAX_ERROR_EXAMPLES = 5
_PASTED_IDS = 5


class DemoError(ServingError, kind="demo"):
    """Something that went wrong on the demo's own side of the API."""


class RankCallError(DemoError, kind="rank_call"):
    """A request that was not answered with scores. The message has the status and what the server said."""


class DemoStoppedError(DemoError, kind="demo_stopped"):
    """The demo was asked to stop while it measured."""


@dataclass(slots=True, eq=False)
class Answers:
    """What came back over one API.

    Attributes:
        scores: float32 [N], all requests' candidates one after the other; NaN where a request failed.
        latencies_ms: of the answered requests, the client's packing included, warm-up left out.
        requests: sent, warm-up included; `errors` of them failed.
        versions: that the answers named.
    """

    scores: Float32Array
    latencies_ms: list[float] = field(default_factory=list)
    requests: int = 0
    errors: int = 0
    error_examples: list[str] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)

    def percentile_ms(self, percent: float) -> float | None:
        """Returns a percentile of the latencies; None if nothing was answered."""
        return float(np.percentile(self.latencies_ms, percent)) if self.latencies_ms else None

    def failed(self, error: Exception) -> None:
        """Counts a failed request."""
        self.errors += 1
        if len(self.error_examples) < MAX_ERROR_EXAMPLES:
            self.error_examples.append(str(error))


def rank_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """Turns the JSON form of a rank request into arguments of `Client.rank`. For models without weighted features."""
    context, candidates = body["context"], body["candidates"]
    return {
        "context": context["sparse"],
        "candidates": candidates["sparse"],
        "context_dense": context.get("dense") or None,
        "candidate_dense": candidates.get("dense") or None,
    }


def rank_all(
    api: str,
    client: Client,
    model: str,
    requests: Sequence[dict[str, Any]],
    num_candidates: list[int],
    *,
    warmup_requests: int,
    stop: threading.Event,
    progress: Progress = no_progress,
) -> Answers:
    """Ranks every request (arguments of `Client.rank`) once, after a warm-up with the first ones.

    An answer with another number of scores than `num_candidates` counts as failed; `stop` is set to end it early.

    Raises:
        DemoStoppedError: when `stop` was set.
    """
    answers = Answers(np.full(sum(num_candidates), np.nan, np.float32))
    schedule = [(index % len(num_candidates), False) for index in range(warmup_requests)]
    schedule += [(index, True) for index in range(len(num_candidates))]
    starts = np.cumsum([0, *num_candidates])
    for done, (index, counts) in enumerate(schedule, start=1):
        if stop.is_set():
            raise DemoStoppedError("stopped while ranking")
        answers.requests += 1
        try:
            began = time.perf_counter()
            answer = client.rank(model, **requests[index])
            seconds = time.perf_counter() - began
            if answer.scores.size != num_candidates[index]:
                raise RankCallError(f"{answer.scores.size} scores for {num_candidates[index]} candidates")
        except (ClientError, RankCallError) as error:
            answers.failed(error)
        else:
            answers.versions.add(answer.version)
            if counts:
                answers.scores[starts[index] : starts[index + 1]] = answer.scores
                answers.latencies_ms.append(1000 * seconds)
        progress(f"ranking over {api}", done, len(schedule))
    return answers


@dataclass(frozen=True, slots=True)
class UsersFilms:
    """The position of a user, and of films: liked in training, latest first; not rated there, the most rated first."""

    dataset: FilmsDataset
    user: int
    history: Int64Array
    unseen: Int64Array

    @classmethod
    def of(cls, dataset: FilmsDataset, user: int) -> UsersFilms:
        """Gathers what a product would know of a user when it asks for a ranking."""
        data = dataset.interactions
        _, history = dataset.histories(np.array([user]), np.array([NO_FOLD]), HISTORY_LIMIT)
        users, films = data.user_index[dataset.train], data.film_index[dataset.train]
        popular_first = np.argsort(-np.bincount(films, minlength=data.films.ids.size), kind="stable")
        unseen = popular_first[~np.isin(popular_first, films[users == user])]
        return cls(dataset, user, history, unseen[:MAX_CANDIDATES])

    def body(self, most_ids: int | None = None) -> dict[str, Any]:
        """Writes a rank request for the unseen films in its JSON form, with at most `most_ids` of a kind."""
        users, films = self.dataset.interactions.users, self.dataset.interactions.films
        unseen = self.unseen[:most_ids]
        context = {"user_id": [int(users.ids[self.user])], "history": films.ids[self.history[:most_ids]].tolist()}
        candidates = {"film_id": films.ids[unseen].tolist(), "genre": [films.genres_of(film) for film in unseen]}
        return {"context": {"sparse": context}, "candidates": {"sparse": candidates}}

    def ask(self, client: Client, model: str) -> list[tuple[str, str, float]]:
        """Asks the running server for the user's top films: (title, genres, score). Raises ClientError."""
        answer, films = (
            client.rank(model, **rank_arguments(self.body()), top_k=TOP_FILMS),
            self.dataset.interactions.films,
        )
        top = []
        for position in answer.order.tolist():
            film = self.unseen[position]
            genres = ", ".join(films.genre_names[genre] for genre in films.genres_of(film))
            top.append((films.titles[film], genres, float(answer.scores[position])))
        return top

    def request_lines(self, host: str, http_port: int, grpc_port: int, model: str, timeout_ms: int) -> list[str]:
        """Writes a short request as a `curl` and as a `grpcurl` command."""
        body = {**self.body(_PASTED_IDS), "timeout_ms": timeout_ms}
        message: dict[str, Any] = {"model": model, "timeout_ms": timeout_ms}
        for side in ("context", "candidates"):
            sparse = {name: {"ids": ids} for name, ids in body[side]["sparse"].items() if name != "genre"}
            message[side] = {"sparse": sparse}
        bags = body["candidates"]["sparse"]["genre"]
        message["candidates"]["sparse"]["genre"] = {"ids": list(chain(*bags)), "lengths": [len(bag) for bag in bags]}
        return [
            f"curl -s http://{host}:{http_port}/v1/models/{model}:rank -d {shlex.quote(json.dumps(body))}",
            f"grpcurl -plaintext -d {shlex.quote(json.dumps(message))} {host}:{grpc_port} "
            "shardrank.v1.RankingService/Rank",
        ]
