"""The comparison itself: every server started, checked and then measured in turn, round after round."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from loader.manifest import Frozen
from loadtest.peers.catalog import PEERS
from loadtest.peers.client_process import PeerLoad
from loadtest.peers.model import random_tensors, reference_scores, write_snapshot, write_weights
from loadtest.peers.processes import check_peer, peer_serving
from loadtest.peers.requests import PeerRequests, drawn_requests
from loadtest.serving_cost.helper_process import HelperProcess
from loadtest.serving_cost.messages import Weighed
from loadtest.serving_cost.one_answer import check_scores
from loadtest.serving_cost.servers import HOST, Server, serving
from loadtest.serving_cost.shape import SEED, Shape, payloads
from loadtest.workloads.payloads import Api
from shard_node.bags import Float32Array

CHECKED_REQUESTS = 2
# Peers compute in float32, but add in another order; shardrank's rows are int8 and its MLP may be bfloat16.
PEER_TOLERANCE = 1e-4
SHARDRANK_TOLERANCE = 0.03
ANSWER_SLACK_S = 300.0
SHARDRANK: dict[str, Api] = {"shardrank": "oip-http", "shardrank-grpc": "grpc"}
"""shardrank's one server, by the name that each of its measured APIs has."""

Say = Callable[[str], None]


class PeersConfig(Frozen):
    """What is measured, and for how long.

    Attributes:
        peers: names in `PEERS`.
        hotness: ids for each feature of each candidate.
        in_flight: requests of the client under full load.
        rounds: how often everything is measured.
        warmup_s: of each load.
        seconds: that each load is weighed for.
        workers: processes of each peer, one thread each.
        batch: requests that a peer with batching scores together at most.
        shardrank_workers: processes of shardrank's server.
    """

    shape: Shape = Shape()
    peers: tuple[str, ...] = Field(default=tuple(PEERS), min_length=1)
    hotness: tuple[int, ...] = Field(default=(1, 20), min_length=1)
    in_flight: int = Field(default=32, ge=1, le=1024)
    rounds: int = Field(default=5, ge=1, le=100)
    warmup_s: float = Field(default=1.0, ge=0)
    seconds: float = Field(default=5.0, gt=0)
    workers: int = Field(default=2, ge=1, le=64)
    batch: int = Field(default=8, ge=1, le=64)
    shardrank_workers: int = Field(default=2, ge=1, le=64)

    @property
    def servers(self) -> tuple[str, ...]:
        """All that are measured, shardrank first."""
        return (*SHARDRANK, *self.peers)


@dataclass(frozen=True, slots=True)
class Round:
    """One server in one round, at one hotness.

    Attributes:
        full: with `PeersConfig.in_flight` in flight.
        alone: with one in flight.
    """

    round: int
    server: str
    hotness: int
    full: Weighed
    alone: Weighed


def run_peers(config: PeersConfig, pythons: Mapping[str, Path], folder: Path, say: Say) -> list[Round]:
    """Measures everything.

    Args:
        config: what.
        pythons: of each peer's environment, by name.
        folder: for weights, snapshot and logs.
        say: told what is being done.

    Returns:
        Every server in every round at every hotness.

    Raises:
        PeerServerError: a peer does not serve, or answers with other scores.
        ServingBenchError: a request failed, or shardrank does not serve.
        ShardrankError: the snapshot can't be written.
    """
    say(f"writing {config.shape.rows} rows")
    tensors = random_tensors(config.shape, SEED)
    weights = folder / "weights.safetensors"
    write_weights(tensors, weights)
    snapshot = write_snapshot(config.shape, tensors, folder / "store")
    expected = {
        hotness: [reference_scores(tensors, one) for one in drawn_requests(config.shape, hotness, CHECKED_REQUESTS)]
        for hotness in config.hotness
    }
    del tensors
    found: list[Round] = []
    with contextlib.ExitStack() as stack:
        servers: dict[str, Server] = {}
        say("starting shardrank")
        flags = ("--no-verify", "--workers", str(config.shardrank_workers))
        own = stack.enter_context(serving("local", snapshot, flags, folder / "shardrank.log"))
        servers |= dict.fromkeys(SHARDRANK, own)
        for name in config.peers:
            peer = PEERS[name]
            say(f"starting {peer.title}")
            first = PeerRequests(config.shape, config.hotness[0], peer.path, peer.body)
            log, sizes = folder / f"{name}.log", {"workers": config.workers, "batch": config.batch}
            servers[name] = stack.enter_context(peer_serving(peer, pythons[name], weights, first, log, **sizes))
        say("comparing scores with the reference")
        for hotness, scores in expected.items():
            for number, one in enumerate(scores):
                for name, server in servers.items():
                    _check(config.shape, name, server, hotness, number, one)
        client = stack.enter_context(HelperProcess("loadtest.peers.client_process", config.shape))
        for number in range(config.rounds):
            for hotness in config.hotness:
                # Each server is first, second, ... in turn.
                shift = number % len(servers)
                for name in (*config.servers[shift:], *config.servers[:shift]):
                    say(f"round {number + 1}, hotness {hotness}: {name}")
                    full, alone = (
                        _load(config, client, name, servers[name], hotness, in_flight)
                        for in_flight in (config.in_flight, 1)
                    )
                    found.append(Round(number, name, hotness, full, alone))
    return found


def _check(shape: Shape, name: str, server: Server, hotness: int, number: int, expected: Float32Array) -> None:
    if name in SHARDRANK:
        pool = payloads(shape, "mlp", hotness, SHARDRANK[name], CHECKED_REQUESTS)
        check_scores(server, pool, number, expected, SHARDRANK_TOLERANCE)
    else:
        peer = PEERS[name]
        asked = PeerRequests(shape, hotness, peer.path, peer.body)
        check_peer(peer, server, asked, number, expected, PEER_TOLERANCE)


def _load(
    config: PeersConfig, client: HelperProcess, name: str, server: Server, hotness: int, in_flight: int
) -> Weighed:
    load = PeerLoad(
        host=HOST,
        http_port=server.http_port,
        grpc_port=server.grpc_port,
        server=name,
        hotness=hotness,
        in_flight=in_flight,
        warmup_s=config.warmup_s,
        seconds=config.seconds,
        process_ids=server.process_ids,
    )
    return client.ask(load, Weighed, config.warmup_s + config.seconds + ANSWER_SLACK_S)
