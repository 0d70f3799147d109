"""One user's films: a rank request for all of them, and request lines to paste into a shell."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from serving.client import Client
from serving.demo.measure import rank_arguments
from serving.training.dataset import NO_FOLD, FilmsDataset
from serving.training.description import HISTORY_LIMIT
from shard_node.bags import Int64Array

TOP_FILMS = 10
MAX_CANDIDATES = 2000
_PASTED_HISTORY = 5
_PASTED_CANDIDATES = 5


@dataclass(frozen=True, slots=True)
class TopFilm:
    """One line of the table."""

    place: int
    film_id: int
    title: str
    genres: str
    score: float


@dataclass(frozen=True, slots=True)
class UsersFilms:
    """One user, and positions of films in the dataset.

    Attributes:
        user: position of the user.
        history: liked in the training part, latest first.
        unseen: films that the user did not rate in the training part, the most rated first.
    """

    user: int
    history: Int64Array
    unseen: Int64Array


def films_of_user(dataset: FilmsDataset, user: int) -> UsersFilms:
    """Gathers what a product would know of a user when it asks for a ranking."""
    data = dataset.interactions
    _, history = dataset.histories(np.array([user]), np.array([NO_FOLD]), HISTORY_LIMIT)
    users, films = data.user_index[dataset.train], data.film_index[dataset.train]
    popularity = np.bincount(films, minlength=data.films.ids.size)
    rated = np.zeros(data.films.ids.size, bool)
    rated[films[users == user]] = True
    unseen = np.argsort(-popularity, kind="stable")
    return UsersFilms(user, history, unseen[~rated[unseen]][:MAX_CANDIDATES].astype(np.int64))


def rank_document(dataset: FilmsDataset, films: UsersFilms) -> dict[str, Any]:
    """The JSON form of a rank request for the user and the unseen films."""
    data = dataset.interactions
    offsets, genres = data.films.genre_offsets, data.films.genre_ids
    return {
        "context": {
            "sparse": {
                "user_id": [int(data.users.ids[films.user])],
                "history": data.films.ids[films.history].tolist(),
            }
        },
        "candidates": {
            "sparse": {
                "film_id": data.films.ids[films.unseen].tolist(),
                "genre": [genres[offsets[film] : offsets[film + 1]].tolist() for film in films.unseen],
            }
        },
    }


def rank_top_films(client: Client, model: str, dataset: FilmsDataset, films: UsersFilms) -> list[TopFilm]:
    """Asks the running server for the user's top films. Raises ClientError."""
    answer = client.rank(model, **rank_arguments(rank_document(dataset, films)), top_k=TOP_FILMS)
    table = dataset.interactions.films
    return [
        TopFilm(
            place=place,
            film_id=int(table.ids[film]),
            title=table.titles[film],
            genres=", ".join(
                table.genre_names[genre]
                for genre in table.genre_ids[table.genre_offsets[film] : table.genre_offsets[film + 1]]
            ),
            score=float(answer.scores[position]),
        )
        for place, position in enumerate(answer.order.tolist(), start=1)
        for film in [int(films.unseen[position])]
    ]


def liked_titles(dataset: FilmsDataset, films: UsersFilms, limit: int = 3) -> Sequence[str]:
    """Titles that the user liked last."""
    return [dataset.interactions.films.titles[film] for film in films.history[:limit]]


def short_request(dataset: FilmsDataset, films: UsersFilms, timeout_ms: int) -> dict[str, Any]:
    """A rank request that is short enough to paste."""
    few = UsersFilms(films.user, films.history[:_PASTED_HISTORY], films.unseen[:_PASTED_CANDIDATES])
    return {**rank_document(dataset, few), "timeout_ms": timeout_ms}


def curl_line(host: str, port: int, model: str, document: dict[str, Any]) -> str:
    """The request as a `curl` command."""
    at = f"[{host}]" if ":" in host else host
    return f"curl -s http://{at}:{port}/v1/models/{model}:rank -d {shlex.quote(json.dumps(document))}"


def grpc_document(model: str, document: dict[str, Any]) -> dict[str, Any]:
    """The request in the JSON form of `shardrank.v1.RankRequest`."""
    sides = {}
    for side in ("context", "candidates"):
        sparse = {}
        for name, ids in document[side]["sparse"].items():
            if ids and isinstance(ids[0], list):
                flat = [one for bag in ids for one in bag]
                sparse[name] = {"ids": flat, "lengths": [len(bag) for bag in ids]}
            else:
                sparse[name] = {"ids": ids}
        sides[side] = {"sparse": sparse}
    return {"model": model, **sides, "timeout_ms": document["timeout_ms"]}


def grpcurl_line(host: str, port: int, model: str, document: dict[str, Any]) -> str:
    """The request as a `grpcurl` command; the server's reflection tells it the messages."""
    at = f"[{host}]" if ":" in host else host
    body = shlex.quote(json.dumps(grpc_document(model, document)))
    return f"grpcurl -plaintext -d {body} {at}:{port} shardrank.v1.RankingService/Rank"
