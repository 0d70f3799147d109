"""The client, in its own process: a closed loop or a rate, with each peer's own bytes."""

from __future__ import annotations

import sys
from functools import lru_cache, partial
from typing import Annotated, Literal

import uvloop
from pydantic import Field, TypeAdapter

from loader.memory import settle_heap
from loadtest.peers.offered_load import PeerRate, offer
from loadtest.peers.requests import requests_for
from loadtest.serving_cost.client_process import weigh
from loadtest.serving_cost.helper_process import answer_lines
from loadtest.serving_cost.messages import Offered, ServerLoad, Weighed
from loadtest.serving_cost.shape import SEED, Shape
from loadtest.workloads.payloads import changing_headers


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
    headers = changing_headers(shape.varied, SEED)

    def answer(line: str) -> Weighed | Offered:
        load = TO_CLIENT.validate_json(line)
        pool = pool_of(load.server, load.hotness)
        # A collection that walks all modules and requests would take longer than most answers.
        settle_heap()
        if isinstance(load, PeerRate):
            return uvloop.run(offer(load, pool, headers))
        return uvloop.run(weigh(load, pool, headers, load.server))

    answer_lines(answer)


if __name__ == "__main__":
    main()
