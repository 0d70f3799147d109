"""The peers' comparison: the model that all serve, every server checked and measured in turn, and what that comes to.

Each is kept busy, asked one request after the other, and offered a rate that it did not choose: a closed loop asks a
slow server less, so its latencies can't be compared with a fast one's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from rich.console import Console
from safetensors.torch import save_file

from loader.snapshot.manifest import Frozen
from loader.snapshot.row_source import TensorRows
from loader.snapshot.writer import export_snapshot
from loadtest.errors import RequestFailedError
from loadtest.load.closed_loop import Weighed, cpu_seconds, not_busy_because
from loadtest.load.config import OfferedLoad, RunConfig, bench_load
from loadtest.load.generator import Generators, ask_scores, open_payloads
from loadtest.load.result import LoadResult, Machine, this_machine, versions
from loadtest.peers.catalog import PEERS, Peer
from loadtest.report.comparison import Arm, Better, Comparison
from loadtest.rounds import Measure, compare_rounds, in_turn, show_comparison
from loadtest.servers import HOST, Server, ServerCommand, check_scores, running, serving
from loadtest.workloads.catalog import BENCH_SEED, BenchShape, BenchWorkload, bench_requests, bench_spec
from loadtest.workloads.payloads import Api, candidate_arrays
from loadtest.workloads.prepare import random_dense
from loadtest.workloads.workload import WorkloadRequest
from serving.models.ranking_models import DtypeChoice, choose_dtype
from shard_node.bags import Float32Array

ROWS = "rows"
# Rows are this wide, so that scores differ by much more than a tolerance.
ROW_DEVIATION = 0.3

SHARDRANK: dict[str, Api] = {"shardrank": "oip-http", "shardrank-grpc": "grpc-packed"}
"""shardrank's one server, by the name that each of its measured APIs has."""
CHECKED_REQUESTS = 2
# Peers compute in float32, but add in another order; shardrank's rows may be int8 and its MLP bfloat16.
PEER_TOLERANCE = 1e-4
SHARDRANK_TOLERANCE = 0.03
# Few connections would fall unevenly on the processes behind a port, which the kernel chooses by chance.
CHANNELS = 16
# Beyond these a request that was offered fails, and counts as later than any other.
OFFERED_TIMEOUT_MS = 5000.0
MAX_IN_FLIGHT = 2048
MAX_CONNECTIONS = 64
SETTLE_S = 1.0
WATCH_S = 2.0
MAX_IDLE_CORES = 0.05
"""A server that takes more while nothing is asked of it would slow the others down."""

Say = Callable[[str], None]
MIN_THROUGHPUT_RATIO = 3.0
MAX_P50_RATIO = 0.6
MAX_OFFERED_P99_RATIO = 0.5
"""What is aimed at, to the best peer: throughput, p50 with one request in flight, p99 at an equal rate."""
TITLES = {"shardrank": "shardrank", "shardrank-grpc": "shardrank, gRPC"}


def random_tensors(shape: BenchShape, seed: int) -> dict[str, torch.Tensor]:
    """Draw the table (`rows`) and the MLP (`mlp.layers.<i>.weight` and `.bias`), float32, by name."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn((shape.rows, shape.embedding_dim), generator=draw) * ROW_DEVIATION
    return {ROWS: rows, **random_dense(bench_spec(shape, "mlp"), seed)}


def write_snapshot(shape: BenchShape, tensors: dict[str, torch.Tensor], store: Path) -> Path:
    """Export the same weights for shardrank, and return the snapshot's folder. Raises ExportError."""
    dense = {name: tensor for name, tensor in tensors.items() if name != ROWS}
    rows = {ROWS: TensorRows(tensors[ROWS])}
    return export_snapshot(store, bench_spec(shape, "mlp"), rows=rows, dense=dense)


def reference_scores(tensors: dict[str, torch.Tensor], request: WorkloadRequest) -> Float32Array:
    """Compute float32 [candidates] by NumPy: what every server must answer, as far as rounding goes."""
    ids, lengths, dense = candidate_arrays(request)
    rows = tensors[ROWS].numpy()
    pooled = np.zeros((lengths.size, rows.shape[1]), np.float32)
    np.add.at(pooled, np.repeat(np.arange(lengths.size), lengths.ravel()), rows[ids])
    x = np.concatenate([dense, pooled.reshape(len(dense), -1)], 1)
    last = sum(name.endswith(".weight") for name in tensors) - 1
    for number in range(last + 1):
        x = x @ tensors[f"mlp.layers.{number}.weight"].numpy().T + tensors[f"mlp.layers.{number}.bias"].numpy()
        if number < last:
            x = np.maximum(x, 0)
    scores: Float32Array = (1 / (1 + np.exp(-x[:, 0]))).astype(np.float32)
    return scores


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
        dtype: of shardrank's dense model; `auto` is bfloat16 where the processor has it.
        offered_share: of the best peer's throughput in a round, the rate that every server is then offered in it.
    """

    shape: BenchShape = BenchShape()
    peers: tuple[str, ...] = Field(default=tuple(PEERS), min_length=1)
    hotness: tuple[int, ...] = Field(default=(1, 20), min_length=1)
    in_flight: int = Field(default=32, ge=1, le=1024)
    rounds: int = Field(default=5, ge=1, le=100)
    warmup_s: float = Field(default=1.0, ge=0)
    seconds: float = Field(default=5.0, gt=0)
    workers: int = Field(default=2, ge=1, le=64)
    batch: int = Field(default=8, ge=1, le=64)
    shardrank_workers: int = Field(default=2, ge=1, le=64)
    dtype: DtypeChoice = "auto"
    offered_share: float = Field(default=0.6, gt=0, lt=1)

    @property
    def servers(self) -> tuple[str, ...]:
        """List all that are measured, shardrank first."""
        return (*SHARDRANK, *self.peers)

    @property
    def shardrank_arguments(self) -> tuple[str, ...]:
        """List the flags of shardrank's server, beside where it listens and what it serves."""
        dtype = choose_dtype(self.dtype)
        return ("--no-verify", "--workers", str(self.shardrank_workers), "--dtype", dtype)

    def tolerance_of(self, name: str) -> float:
        """Say how far scores may be from the reference; shardrank's no further than a peer's if all is float32."""
        as_peers = self.shape.row_dtype == "fp32" and self.dtype == "float32"
        return PEER_TOLERANCE if name not in SHARDRANK or as_peers else SHARDRANK_TOLERANCE

    def load(self, name: str, server: Server, hotness: int, timeout_ms: float = 60_000) -> OfferedLoad:
        """Say how a server is asked: the same requests as every other, in its own encoding."""
        api = SHARDRANK[name] if name in SHARDRANK else PEERS[name].body
        return bench_load(
            server.target(api),
            api,
            BenchWorkload(shape=self.shape, head="mlp", hotness=hotness),
            path=None if name in SHARDRANK else PEERS[name].path,
            timeout_ms=timeout_ms,
            max_in_flight=MAX_IN_FLIGHT,
            max_connections=MAX_CONNECTIONS,
            grpc_channels=CHANNELS,
        )


@dataclass(frozen=True, slots=True)
class PeerRound:
    """One server in one round, at one hotness.

    Attributes:
        full: with `PeersConfig.in_flight` in flight.
        alone: with one in flight.
        offered: at the rate that every server in this round was offered.
    """

    round: int
    server: str
    hotness: int
    full: Weighed
    alone: Weighed
    offered: LoadResult


@contextlib.contextmanager
def peer_serving(config: PeersConfig, peer: Peer, python: Path, weights: Path, log: Path) -> Iterator[Server]:
    """Serve a file of weights while the block runs, by the Python of a peer's environment.

    Raises:
        ServerFailedError: the peer ends, or does not answer in time.
    """
    # Another program could take it before the peer does; then the peer ends, and says why.
    with socket.create_server((HOST, 0)) as held:
        port: int = held.getsockname()[1]
    settings = {"WEIGHTS": weights.resolve(), "PORT": port, "WORKERS": config.workers, "BATCH": config.batch}
    environment = os.environ | {f"PEER_{name}": str(value) for name, value in settings.items()}
    # mosec takes its own address from here. The peer's environment alone is searched for modules.
    environment |= {"MOSEC_PORT": str(port), "MOSEC_ADDRESS": HOST, "PYTHONNOUSERSITE": "1"}
    environment.pop("PYTHONPATH", None)
    command = ServerCommand("its server", (str(python.absolute()), str(peer.script)), log, environment)
    load = config.load(peer.name, Server(port, 0, ()), config.hotness[0])
    _, pool = open_payloads(load)

    def why_not_ready() -> str:
        try:
            ask_scores(load, pool, 0)
        except RequestFailedError as error:
            return str(error)
        return ""

    with running(peer.title, [command], why_not_ready) as started:
        yield Server(port, 0, started.process_ids)


class _Servers:
    """The servers of a comparison: those that are quiet when nobody asks stay up, others run in their turn alone."""

    def __init__(self, start: Callable[[str], AbstractContextManager[Server]], stack: ExitStack, say: Say) -> None:
        self._start = start
        self._stack = stack
        self._say = say
        self._up: dict[str, Server] = {}
        self._restless: set[str] = set()

    @contextlib.contextmanager
    def serving(self, name: str) -> Iterator[Server]:
        """Have a server up while the block runs, alone with servers that are quiet. Raises ServerFailedError."""
        name = "shardrank" if name in SHARDRANK else name
        if name in self._up:
            yield self._up[name]
            return
        with ExitStack() as stack:
            self._say(f"starting {name}")
            server = stack.enter_context(self._start(name))
            if name not in self._restless:
                time.sleep(SETTLE_S)
                before = cpu_seconds(server.process_ids)
                time.sleep(WATCH_S)
                idle_cores = (cpu_seconds(server.process_ids) - before) / WATCH_S
                if idle_cores <= MAX_IDLE_CORES:
                    self._up[name] = server
                    self._stack.push(stack.pop_all())
                else:
                    self._say(f"{name} takes {idle_cores:.2f} of a core while idle: it runs in its turn alone")
                    self._restless.add(name)
            yield server


def run_peers(config: PeersConfig, pythons: Mapping[str, Path], folder: Path, say: Say) -> list[PeerRound]:
    """Measure every server in every round at every hotness.

    Raises:
        LoadError: a server does not serve, answers with other scores, or a request failed.
        ShardrankError: the snapshot can't be written.
    """
    say(f"writing {config.shape.rows} rows")
    tensors = random_tensors(config.shape, BENCH_SEED)
    weights = folder / "weights.safetensors"
    save_file(tensors, weights)
    snapshot = write_snapshot(config.shape, tensors, folder / "store")
    expected = {
        hotness: [
            reference_scores(tensors, one) for one in bench_requests(config.shape, "mlp", hotness, CHECKED_REQUESTS)
        ]
        for hotness in config.hotness
    }
    del tensors

    def start(name: str) -> AbstractContextManager[Server]:
        log = folder / f"{name}.log"
        if name == "shardrank":
            return serving("local", snapshot, config.shardrank_arguments, log)
        return peer_serving(config, PEERS[name], pythons[name], weights, log)

    with ExitStack() as stack:
        servers = _Servers(start, stack, say)
        generators = stack.enter_context(Generators())
        say("comparing scores with the reference")
        for name in config.servers:
            most = config.tolerance_of(name)
            with servers.serving(name) as server:
                for hotness, scores in expected.items():
                    for number, one in enumerate(scores):
                        found = generators.scores(config.load(name, server, hotness), number)
                        check_scores(f"{name}, request {number}", found, one, most)
        measure = _Measure(config, generators, servers, say)
        return [
            one for number in range(config.rounds) for hotness in config.hotness for one in measure(number, hotness)
        ]


@dataclass(frozen=True, slots=True)
class _Measure:
    """One round at one hotness, of all servers."""

    config: PeersConfig
    generators: Generators
    servers: _Servers
    say: Say

    def __call__(self, number: int, hotness: int) -> list[PeerRound]:
        config, turn = self.config, in_turn(self.config.servers, number)
        where = f"round {number + 1}, hotness {hotness}"
        loads: dict[str, tuple[Weighed, Weighed]] = {}
        for name in turn:
            self.say(f"{where}: {name}")
            with self.servers.serving(name) as server:
                load = config.load(name, server, hotness)
                full, alone = (
                    self.generators.busy(load, in_flight, config.warmup_s, config.seconds, server.process_ids)
                    for in_flight in (config.in_flight, 1)
                )
            loads[name] = full, alone
        rate = config.offered_share * best_throughput([loads[name][0] for name in config.peers])
        # Servers with the same seed get requests at the same times.
        seed = BENCH_SEED + number
        run = RunConfig(rate=rate, warmup_s=config.warmup_s, duration_s=config.seconds, seed=seed)
        rounds = []
        for name in turn:
            self.say(f"{where}: {name} at {rate:.0f}/s")
            with self.servers.serving(name) as server:
                offered = self.generators.offer(config.load(name, server, hotness, OFFERED_TIMEOUT_MS), run)
            rounds.append(PeerRound(number, name, hotness, *loads[name], offered))
        return rounds


def best_throughput(loads: Sequence[Weighed]) -> float:
    """Give the answers a second of whichever gave most."""
    return max(one.requests_per_s for one in loads)


def _late(latency_ms: float | None) -> float:
    """Replace a percentile that failures reach by the time that they were waited for, which is the least it can be."""
    return OFFERED_TIMEOUT_MS if latency_ms is None else latency_ms


_MEASURES: tuple[tuple[str, str, Better, Callable[[PeerRound], float]], ...] = (
    ("throughput, {in_flight} in flight, hotness {hotness}", "/s", "higher", lambda one: one.full.requests_per_s),
    ("p50, one in flight, hotness {hotness}", "ms", "lower", lambda one: one.alone.p50_ms),
    ("p99, one in flight, hotness {hotness}", "ms", "lower", lambda one: one.alone.p99_ms),
    ("p50, {in_flight} in flight, hotness {hotness}", "ms", "lower", lambda one: one.full.p50_ms),
    ("p99, {in_flight} in flight, hotness {hotness}", "ms", "lower", lambda one: one.full.p99_ms),
    ("p50, equal rate, hotness {hotness}", "ms", "lower", lambda one: _late(one.offered.latency_of_due.p50_ms)),
    ("p99, equal rate, hotness {hotness}", "ms", "lower", lambda one: _late(one.offered.latency_of_due.p99_ms)),
)
# Rows in which shardrank is held against the best peer.
_AHEAD = tuple(_MEASURES[row][0] for row in (0, 1, 2, -1))


class Ahead(Frozen):
    """shardrank against the best peer, of each round the one that was best in it.

    Attributes:
        hotness: ids a bag.
        throughput: shardrank's to the best peer's, under full load; the median of the rounds.
        p50, p99: the same of the latencies with one request in flight; below 1 is faster.
        offered_p99: the same of the p99 at an equal rate.
    """

    hotness: int
    throughput: float
    p50: float
    p99: float
    offered_p99: float

    @property
    def met(self) -> dict[str, bool]:
        """Tell which of them are what is aimed at."""
        return {
            "throughput": self.throughput >= MIN_THROUGHPUT_RATIO,
            "p50": self.p50 <= MAX_P50_RATIO,
            "offered_p99": self.offered_p99 <= MAX_OFFERED_P99_RATIO,
        }


def ahead(config: PeersConfig, comparison: Comparison) -> list[Ahead]:
    """Compute it for each hotness; shardrank over binary HTTP, as the peers are asked."""
    values = {one.name: np.array(one.values) for one in comparison.measures}
    found = []
    for hotness in config.hotness:
        ratios: dict[str, float] = {}
        for field, measure in zip(("throughput", "p50", "p99", "offered_p99"), _AHEAD, strict=True):
            # [servers, rounds]; the peers come after shardrank's own.
            table = values[measure.format(in_flight=config.in_flight, hotness=hotness)]
            peers = table[-len(config.peers) :]
            ratios[field] = float(np.median(table[0] / (peers.max(0) if field == "throughput" else peers.min(0))))
        found.append(Ahead(hotness=hotness, **ratios))
    return found


def _measures(config: PeersConfig) -> list[Measure[Mapping[int, PeerRound]]]:
    """List the rows, of a server's rounds by hotness."""

    def of(hotness: int, value: Callable[[PeerRound], float]) -> Callable[[Mapping[int, PeerRound]], float]:
        return lambda rounds: value(rounds[hotness])

    return [
        Measure(name.format(in_flight=config.in_flight, hotness=hotness), unit, better, of(hotness, value))
        for hotness in config.hotness
        for name, unit, better, value in _MEASURES
    ]


def compared(config: PeersConfig, rounds: Sequence[PeerRound], machine: Machine | None = None) -> Comparison:
    """Make the document of `--json` and the page of `--html`.

    Raises:
        ComparisonError: a server has no rounds.
    """
    at = {(one.server, one.round, one.hotness): one for one in rounds}
    by_server = {
        name: [{hotness: at[name, turn, hotness] for hotness in config.hotness} for turn in range(config.rounds)]
        for name in config.servers
    }
    shape = config.shape
    return compare_rounds(
        [(Arm(name=_title(name)), of_server) for name, of_server in by_server.items()],
        _measures(config),
        title="shardrank and what else could serve the model",
        setup={
            "model": f"{shape.features} features over one table of {shape.rows} x {shape.embedding_dim}, MLP",
            "requests": f"{shape.requests}; {shape.dense} dense inputs a candidate",
            "in flight": str(config.in_flight),
            "seconds of each load": f"{config.seconds:g}",
            "processes of each peer": f"{config.workers}, one thread each",
            "largest batch of a peer": f"{config.batch} requests",
            "processes of shardrank": str(config.shardrank_workers),
            "peers": "float32",
            "shardrank": f"{config.shape.row_dtype} rows, {' '.join(config.shardrank_arguments)}",
            "equal rates": ", ".join(_rates(config, rounds)),
        },
        invalid_because=[
            f"{_title(one.server)}, hotness {one.hotness}, round {one.round + 1}: {reason}"
            for one in rounds
            for reason in (*not_busy_because(one.full), *one.offered.invalid_because)
        ],
        machine=machine or this_machine(),
        versions={**versions(), **{name: PEERS[name].pinned for name in config.peers}},
    )


def _title(name: str) -> str:
    return TITLES.get(name) or PEERS[name].title


def _rates(config: PeersConfig, rounds: Sequence[PeerRound]) -> list[str]:
    """Return what every server was offered, by hotness: a share of what the best peer had just answered."""
    share = f"{config.offered_share:.0%} of the best peer's throughput"
    found = []
    for hotness in config.hotness:
        rates = [one.offered.rate for one in rounds if one.hotness == hotness]
        found.append(f"hotness {hotness}: {min(rates):.0f} to {max(rates):.0f}/s ({share})")
    return found


def show(console: Console, comparison: Comparison, found: Sequence[Ahead]) -> None:
    """Print every measure of every server, and how far shardrank is ahead."""
    console.print(f"requests: {comparison.setup['requests']}")
    show_comparison(console, comparison)
    for one in found:
        shown = {name: f"[{'green' if met else 'red'}]{getattr(one, name):.2f}×[/]" for name, met in one.met.items()}
        console.print(
            f"hotness {one.hotness}, to the best peer of each round: "
            f"throughput {shown['throughput']} (aim ≥ {MIN_THROUGHPUT_RATIO:g}×), "
            f"p50 {shown['p50']} (aim ≤ {MAX_P50_RATIO:g}×), p99 {one.p99:.2f}×, "
            f"p99 at an equal rate {shown['offered_p99']} (aim ≤ {MAX_OFFERED_P99_RATIO:g}×)"
        )
