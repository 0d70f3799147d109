"""The load at an equal rate: over gRPC, its connections are its own and open before the first request."""

from __future__ import annotations

import os
import time

import psutil
import uvloop

from loadtest.load.generator import offer, open_payloads
from loadtest.load.open_loop import arrival_times
from loadtest.load.recorder import Recorder
from loadtest.peers.run import CHANNELS, PeersConfig
from loadtest.servers import Server
from loadtest.workloads.catalog import BenchShape
from shardrank_testing.loaded_server import CANDIDATES, Reply, loaded_grpc_server

SHAPE = BenchShape(features=3, embedding_dim=8, rows=200, dense=2, candidates=str(CANDIDATES))


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
        load = PeersConfig(shape=SHAPE).load("shardrank-grpc", Server(0, server.port, ()), 1, 5000)
        _, pool = open_payloads(load)
        recorder, times = Recorder(time.monotonic() + 0.5), arrival_times("poisson", 100, 0.3)
        records = uvloop.run(offer(load, pool, times, recorder, cpu_s=(0, 0.3))).records
        after = connections_to(server.port)
    assert seen == [CHANNELS]
    assert (records.errors, records.answered.size > 0) == ({}, True)
    assert after == 0
