"""The load at an equal rate: over gRPC, its connections are its own and open before the first request."""

from __future__ import annotations

import os

import psutil
import uvloop

from loadtest.peers.config import CHANNELS
from loadtest.peers.offered_load import PeerRate, offer
from loadtest.peers.requests import requests_for
from loadtest.serving_cost.shape import Shape
from loadtest.workloads.payloads import changing_headers
from shardrank_testing.loaded_server import CANDIDATES, Reply, loaded_grpc_server

SHAPE = Shape(features=3, embedding_dim=8, rows=200, dense=2, candidates=str(CANDIDATES))


def connections_to(port: int) -> int:
    """Of servers in this process."""
    found = psutil.Process(os.getpid()).net_connections("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED and one.laddr.port == port for one in found)


def test_all_connections_over_grpc_are_open_before_the_first_request_and_none_is_shared() -> None:
    seen: list[int] = []

    def plan(number: int) -> Reply:
        if number == 0:
            seen.append(connections_to(server.port))
        return Reply()

    with loaded_grpc_server(plan) as server:
        pool = requests_for(SHAPE, "shardrank-grpc", 1)
        load = PeerRate(
            host="127.0.0.1",
            http_port=server.port,
            grpc_port=server.port,
            channels=CHANNELS,
            server="shardrank-grpc",
            hotness=1,
            rate=100,
            warmup_s=0,
            seconds=0.3,
            seed=1,
        )
        offered = uvloop.run(offer(load, pool, changing_headers(True, 1)))
        after = connections_to(server.port)
    assert seen == [CHANNELS]
    assert offered.answered == offered.due > 0
    assert after == 0
