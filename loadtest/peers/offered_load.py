"""A server under a rate that it did not choose: requests come at random times, whatever became of those before.

A closed loop asks a slow server less, so its latencies can't be compared with a fast one's. Here every server is
offered the same requests at the same times, and latency counts from when a request was due.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from loadtest.load.arrivals import arrival_times
from loadtest.load.cpu_time import cpu_between
from loadtest.load.grpc_sender import GrpcSender
from loadtest.load.histogram import DIGITS
from loadtest.load.http_sender import HttpSender
from loadtest.load.open_loop import OpenLoop
from loadtest.load.outgoing import Sender
from loadtest.load.recorder import Recorder, merged
from loadtest.serving_cost.client_process import RequestPool
from loadtest.serving_cost.messages import AtServer, Offered
from loadtest.workloads.payloads import Headers

# Beyond these a request fails, and counts as later than any other.
TIMEOUT_S = 5.0
MAX_IN_FLIGHT = 2048
MAX_CONNECTIONS = 64
# For connections to be opened.
LEAD_S = 0.5


class PeerRate(AtServer):
    """To the client: offer a server so many requests a second.

    Attributes:
        server: a peer's name, `shardrank` or `shardrank-grpc`.
        hotness: ids for each feature of each candidate.
        rate: requests a second; gaps are exponential.
        seed: of the gaps: servers with the same one get requests at the same times.
    """

    kind: Literal["peer_rate"] = "peer_rate"
    server: str
    hotness: int
    rate: float = Field(gt=0)
    seed: int = Field(ge=0)


async def offer(load: PeerRate, pool: RequestPool, headers: Iterator[Headers]) -> Offered:
    """Offers the load and waits until every request is over. Each is sent with the next of `headers` beside its own."""
    until_s = load.warmup_s + load.seconds
    recorder = Recorder(load.warmup_s, until_s, TIMEOUT_S)
    times = arrival_times("poisson", load.rate, until_s, seed=load.seed)
    begin = time.monotonic() + LEAD_S
    loop = OpenLoop(times, begin, len(pool), recorder, timeout_s=TIMEOUT_S, max_in_flight=MAX_IN_FLIGHT)
    sender = await _open_sender(load, pool, headers, recorder, loop)
    cpu = asyncio.create_task(cpu_between(begin + load.warmup_s, begin + until_s))
    try:
        await loop.run(sender)
        cpu_s = await cpu
    finally:
        cpu.cancel()
        await sender.close()
    records = recorder.records()
    latency, lag = merged([records.latency], digits=DIGITS), merged([records.lag], digits=DIGITS)
    due = latency.count + sum(records.errors.values())
    of_due = latency.percentiles(out_of=due)
    return Offered(
        due=due,
        answered=latency.count,
        p50_ms=of_due.p50_ms,
        p99_ms=of_due.p99_ms,
        lag_p99_ms=lag.percentiles().p99_ms,
        client_cpu_s=cpu_s,
        seconds=load.seconds,
    )


async def _open_sender(
    load: PeerRate, pool: RequestPool, headers: Iterator[Headers], recorder: Recorder, loop: OpenLoop
) -> Sender:
    if pool.is_grpc:
        channels = GrpcSender(
            load.host,
            load.grpc_port,
            pool,
            recorder,
            loop.on_over,
            headers=headers,
            channels=load.channels,
            timeout_s=TIMEOUT_S,
        )
        await channels.open()
        return channels
    address = (load.host, load.http_port)
    # Opened as they are needed: of many that come at once, one process of a server whose processes share a listening
    # socket takes all.
    return HttpSender(
        address, load.host, pool, recorder, loop.on_over, headers=headers, max_connections=MAX_CONNECTIONS
    )
