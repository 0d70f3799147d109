"""The comparison itself: every server started, checked and then measured in turn, round after round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.peers.catalog import PEERS
from loadtest.peers.client_process import PeerLoad
from loadtest.peers.config import SHARDRANK, PeersConfig
from loadtest.peers.model import random_tensors, reference_scores, write_snapshot, write_weights
from loadtest.peers.offered_load import PeerRate
from loadtest.peers.processes import check_peer
from loadtest.peers.requests import PeerRequests, drawn_requests
from loadtest.peers.started import Started
from loadtest.serving_cost.helper_process import HelperProcess
from loadtest.serving_cost.messages import Offered, Weighed
from loadtest.serving_cost.one_answer import check_scores
from loadtest.serving_cost.servers import Server
from loadtest.serving_cost.shape import SEED, Shape, payloads
from shard_node.bags import Float32Array

CHECKED_REQUESTS = 2
# Peers compute in float32, but add in another order; shardrank's rows are int8 and its MLP may be bfloat16.
PEER_TOLERANCE = 1e-4
SHARDRANK_TOLERANCE = 0.03
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Round:
    """One server in one round, at one hotness.

    Attributes:
        full: with `PeersConfig.in_flight` in flight.
        alone: with one in flight.
        rate: requests a second that it was offered, as every server in this round.
        offered: what came of them.
    """

    round: int
    server: str
    hotness: int
    full: Weighed
    alone: Weighed
    rate: float
    offered: Offered


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
    with Started(config, pythons, weights, snapshot, folder, say) as servers:
        say("comparing scores with the reference")
        for name in ("shardrank", *config.peers):
            with servers.serving(name) as server:
                for api in SHARDRANK if name == "shardrank" else (name,):
                    for hotness, scores in expected.items():
                        for number, one in enumerate(scores):
                            _check(config.shape, api, server, hotness, number, one)
        client = servers.enter(HelperProcess("loadtest.peers.client_process", config.shape))
        measure = _Measure(config, client, servers, say)
        return [
            one for number in range(config.rounds) for hotness in config.hotness for one in measure(number, hotness)
        ]


@dataclass(frozen=True, slots=True)
class _Measure:
    """One round at one hotness, of all servers."""

    config: PeersConfig
    client: HelperProcess
    servers: Started
    say: Callable[[str], None]

    def __call__(self, number: int, hotness: int) -> list[Round]:
        names = self.config.servers
        # Each server is first, second, ... in turn.
        turn = (*names[number % len(names) :], *names[: number % len(names)])
        where = f"round {number + 1}, hotness {hotness}"
        loads: dict[str, tuple[Weighed, Weighed]] = {}
        for name in turn:
            self.say(f"{where}: {name}")
            with self.servers.serving(name) as server:
                full, alone = (self._load(name, server, hotness, in_flight) for in_flight in (self.config.in_flight, 1))
            loads[name] = full, alone
        rate = self.config.offered_share * best_throughput([loads[name][0] for name in self.config.peers])
        offered: dict[str, Offered] = {}
        for name in turn:
            self.say(f"{where}: {name} at {rate:.0f}/s")
            with self.servers.serving(name) as server:
                offered[name] = self._offer(name, server, hotness, rate, number)
        return [Round(number, name, hotness, *loads[name], rate, offered[name]) for name in turn]

    def _load(self, name: str, server: Server, hotness: int, in_flight: int) -> Weighed:
        config = self.config
        load = PeerLoad(
            **server.place,
            **config.load,
            server=name,
            hotness=hotness,
            in_flight=in_flight,
            process_ids=server.process_ids,
        )
        return self.client.measure(load, Weighed)

    def _offer(self, name: str, server: Server, hotness: int, rate: float, number: int) -> Offered:
        config = self.config
        load = PeerRate(**server.place, **config.load, server=name, hotness=hotness, rate=rate, seed=SEED + number)
        return self.client.measure(load, Offered)


def best_throughput(loads: Sequence[Weighed]) -> float:
    """Answers a second of whichever gave most."""
    return max(one.requests / one.seconds for one in loads)


def _check(shape: Shape, name: str, server: Server, hotness: int, number: int, expected: Float32Array) -> None:
    if name in SHARDRANK:
        pool = payloads(shape, "mlp", hotness, SHARDRANK[name], CHECKED_REQUESTS)
        check_scores(server, pool, number, expected, SHARDRANK_TOLERANCE)
    else:
        peer = PEERS[name]
        asked = PeerRequests(shape, hotness, peer.path, peer.body)
        check_peer(peer, server, asked, number, expected, PEER_TOLERANCE)
