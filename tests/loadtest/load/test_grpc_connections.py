"""An open loop over gRPC has connections of its own, open before the first request."""

from __future__ import annotations

import os
import time

import psutil
import uvloop

from loadtest.load.config import bench_load
from loadtest.load.generator import offer, open_payloads
from loadtest.load.open_loop import arrival_times
from loadtest.load.recorder import Recorder
from loadtest.workloads.catalog import BenchShape, BenchWorkload
from shardrank_testing.loaded_server import CANDIDATES, Reply, loaded_grpc_server

CHANNELS = 16
SHAPE = BenchShape(features=3, embedding_dim=8, rows=200, dense=2, candidates=str(CANDIDATES))


def connections_to(port: int) -> int:
    """Of servers in this process."""
    found = psutil.Process(os.getpid()).net_connections("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED and one.laddr.port == port for one in found)


def test_all_connections_are_open_before_the_first_request() -> None:
    seen: list[int] = []

    def plan(number: int) -> Reply:
        if number == 0:
            seen.append(connections_to(server.port))
        return Reply()

    with loaded_grpc_server(plan) as server:
        target, workload = f"grpc://127.0.0.1:{server.port}", BenchWorkload(shape=SHAPE, head="mlp", hotness=1)
        load = bench_load(target, "grpc-packed", workload, timeout_ms=5000, grpc_channels=CHANNELS)
        _, pool = open_payloads(load)
        recorder, times = Recorder(time.monotonic() + 0.5), arrival_times("poisson", 100, 0.3)
        records = uvloop.run(offer(load, pool, times, recorder, cpu_s=(0, 0.3))).records
        after = connections_to(server.port)
    assert seen == [CHANNELS]
    assert (records.errors, records.answered.size > 0) == ({}, True)
    assert after == 0
