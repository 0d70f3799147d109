"""The client, in its own process: a closed loop or a rate, with each peer's own bytes."""

from __future__ import annotations

import sys
from functools import lru_cache, partial
from typing import Annotated, Literal

import uvloop
from pydantic import Field, TypeAdapter

from loadtest.peers.offered_load import PeerRate, offer
from loadtest.peers.requests import requests_for
from loadtest.serving_cost.client_process import weigh
from loadtest.serving_cost.errors import WrongAnswerError
from loadtest.serving_cost.helper_process import answer_lines
from loadtest.serving_cost.messages import Offered, ServerLoad, Weighed
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


TO_CLIENT: TypeAdapter[PeerLoad | PeerRate] = TypeAdapter(
    Annotated[PeerLoad | PeerRate, Field(discriminator="kind")],
)


def main() -> None:
    """`python -m loadtest.peers.client_process SHAPE`."""
    shape = Shape.model_validate_json(sys.argv[1])
    pool_of = lru_cache(maxsize=16)(partial(requests_for, shape))

    def answer(line: str) -> Weighed | Offered:
        load = TO_CLIENT.validate_json(line)
        if isinstance(load, PeerRate):
            return uvloop.run(offer(load, pool_of(load.server, load.hotness)))
        try:
            return uvloop.run(weigh(load, pool_of(load.server, load.hotness)))
        except BaseExceptionGroup as errors:
            # Several requests fail together when a server does; the first says why.
            raise WrongAnswerError(f"{load.server}: {errors.exceptions[0]}") from errors

    answer_lines(answer)


if __name__ == "__main__":
    main()
