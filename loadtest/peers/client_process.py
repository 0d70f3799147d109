"""The client, in its own process: the closed loop of `loadtest.serving_cost`, with each peer's own bytes."""

from __future__ import annotations

import sys
from functools import lru_cache, partial
from typing import Literal

import uvloop

from loadtest.peers.requests import requests_for
from loadtest.serving_cost.client_process import weigh
from loadtest.serving_cost.errors import WrongAnswerError
from loadtest.serving_cost.helper_process import answer_lines
from loadtest.serving_cost.messages import ServerLoad, Weighed
from loadtest.serving_cost.shape import Shape


class PeerLoad(ServerLoad):
    """To the client: keep this server busy.

    Attributes:
        server: a peer's name, `shardrank` or `shardrank-grpc`.
        hotness: ids for each feature of each candidate.
    """

    kind: Literal["peer_load"] = "peer_load"
    server: str
    hotness: int


def main() -> None:
    """`python -m loadtest.peers.client_process SHAPE`."""
    shape = Shape.model_validate_json(sys.argv[1])
    pool_of = lru_cache(maxsize=16)(partial(requests_for, shape))

    def answer(line: str) -> Weighed:
        load = PeerLoad.model_validate_json(line)
        try:
            return uvloop.run(weigh(load, pool_of(load.server, load.hotness)))
        except BaseExceptionGroup as errors:
            # Several requests fail together when a server does; the first says why.
            raise WrongAnswerError(f"{load.server}: {errors.exceptions[0]}") from errors

    answer_lines(answer)


if __name__ == "__main__":
    main()
