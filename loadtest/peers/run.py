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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from rich.console import Console
from safetensors.torch import save_file

from loader.snapshot.row_source import TensorRows
from loader.snapshot.tables import Frozen
from loader.snapshot.writer import export_snapshot
from loadtest.errors import RequestFailedError
from loadtest.load.closed_loop import Weighed, cpu_seconds, not_busy_because
from loadtest.load.config import OfferedLoad, RunConfig, bench_load
from loadtest.load.generator import Generators, ask_scores, open_payloads
from loadtest.load.result import LoadResult, Machine, this_machine, versions
from loadtest.peers.catalog import FORMS, PEERS, Form, FormTrial, Peer
from loadtest.rounds import Arm, Better, Comparison, Measure, compare_rounds, in_turn, show_comparison
from loadtest.servers import HOST, Server, ServerCommand, check_scores, running, serving
from loadtest.workloads.catalog import BENCH_SEED, BenchShape, BenchWorkload, bench_requests, bench_spec, bench_workload
from loadtest.workloads.payloads import Api, Encoding, side_arrays
from loadtest.workloads.prepare import random_dense
from loadtest.workloads.workload import Workload, WorkloadRequest
from serving.models.ranking_models import DtypeChoice, choose_dtype
from shard_node.bags import Float32Array

ROWS = "rows"
# Rows are this wide, so that scores differ by much more than a tolerance.
ROW_DEVIATION = 0.3

FLOAT32 = "shardrank-float32"
SHARDRANK: dict[str, Api] = {"shardrank": "oip-http", "shardrank-grpc": "grpc-packed", FLOAT32: "oip-http"}
"""shardrank's API, by the name of what is measured; the first two are one server."""
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
TITLES = {"shardrank": "shardrank", "shardrank-grpc": "shardrank, gRPC", FLOAT32: "shardrank, float32"}
FORM_ROUNDS = 2
MAX_REPEATS = 3
"""How often a load at an equal rate is repeated at most, where the client was late."""


class Aims(Frozen):
    """What is aimed at, to the best peer: throughput, p50 with one request in flight, p99 at an equal rate."""

    throughput: float
    p50: float
    offered_p99: float

    @classmethod
    def of(cls, shape: BenchShape) -> Aims:
        """Take those for requests with a context, or for those of candidates alone."""
        if shape.context_features:
            return cls(throughput=3.5, p50=0.4, offered_p99=0.4)
        return cls(throughput=2.5, p50=0.6, offered_p99=0.5)


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


def reference_scores(tensors: dict[str, torch.Tensor], workload: Workload, request: WorkloadRequest) -> Float32Array:
    """Compute float32 [candidates] by NumPy: what every server must answer, as far as rounding goes."""
    _, candidates = side_arrays(workload.schema, request, once=False)
    ids, lengths, dense = candidates.ids, candidates.lengths, candidates.dense
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
        beside_float32: whether shardrank with float32 rows and dense model is measured beside the one that is chosen.
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
    beside_float32: bool = True
    offered_share: float = Field(default=0.5, gt=0, lt=1)

    @property
    def servers(self) -> tuple[str, ...]:
        """List all that are measured, shardrank first."""
        return (*self.own, *self.peers)

    @property
    def own(self) -> tuple[str, ...]:
        """List those of `servers` that are shardrank."""
        return tuple(name for name in SHARDRANK if name != FLOAT32 or (self.beside_float32 and not self.is_float32))

    @property
    def is_float32(self) -> bool:
        """Tell whether what is chosen for shardrank is float32 everywhere."""
        return self.shape.row_dtype == "fp32" and self.dtype == "float32"

    @property
    def forms(self) -> tuple[Form, ...]:
        """List how peers can be asked: without context there is one way."""
        return FORMS if self.shape.context_features or self.shape.context_dense else FORMS[:1]

    def shardrank_arguments(self, name: str = "shardrank") -> tuple[str, ...]:
        """List the flags of a server of shardrank's, beside where it listens and what it serves."""
        dtype = choose_dtype("float32" if name == FLOAT32 else self.dtype)
        return ("--no-verify", "--workers", str(self.shardrank_workers), "--dtype", dtype)

    def tolerance_of(self, name: str) -> float:
        """Say how far scores may be from the reference; shardrank's no further than a peer's if all is float32."""
        as_peers = self.is_float32 or name == FLOAT32
        return PEER_TOLERANCE if name not in SHARDRANK or as_peers else SHARDRANK_TOLERANCE

    def load(
        self, name: str, server: Server, hotness: int, timeout_ms: float = 60_000, *, form: Form = FORMS[0]
    ) -> OfferedLoad:
        """Say how a server is asked: the same requests as every other, in its own encoding; a peer in that form."""
        api: Encoding = SHARDRANK[name] if name in SHARDRANK else PEERS[name].forms[form]
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
        repeats: loads at that rate before it, in which the client was late.
    """

    round: int
    server: str
    hotness: int
    full: Weighed
    alone: Weighed
    offered: LoadResult
    repeats: int = 0


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
        name = "shardrank" if name == "shardrank-grpc" else name
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


@dataclass(frozen=True, slots=True)
class Bench:
    """Servers that answer with the right scores, a client, and the better form of each peer.

    Attributes:
        trials: of each peer at each hotness; empty if there is one form only.
    """

    config: PeersConfig
    generators: Generators
    servers: _Servers
    say: Say
    trials: tuple[FormTrial, ...] = ()

    def form(self, name: str, hotness: int) -> Form:
        """Name the form in which a server is asked."""
        found = [one.better for one in self.trials if (one.peer, one.hotness) == (name, hotness)]
        return found[0] if found else FORMS[0]

    def busy(self, load: OfferedLoad, in_flight: int, server: Server) -> Weighed:
        """Keep a server busy for the seconds of a load."""
        config = self.config
        return self.generators.busy(load, in_flight, config.warmup_s, config.seconds, server.process_ids)

    def tried(self) -> Bench:
        """Measure the forms of every peer, A B B A, and take the better one of each. Raises LoadError."""
        config, trials = self.config, list[FormTrial]()
        for name in config.peers if len(config.forms) > 1 else ():
            with self.servers.serving(name) as server:
                for hotness in config.hotness:
                    self.say(f"{name}, hotness {hotness}: which form is better")
                    found: dict[Form, list[float]] = {form: [] for form in config.forms}
                    for number in range(FORM_ROUNDS):
                        for form in in_turn(config.forms, number):
                            load = config.load(name, server, hotness, form=form)
                            found[form].append(self.busy(load, config.in_flight, server).requests_per_s)
                    medians = {form: float(np.median(values)) for form, values in found.items()}
                    trials.append(FormTrial(name, hotness, medians))
        return replace(self, trials=tuple(trials))


@contextlib.contextmanager
def peers_bench(config: PeersConfig, pythons: Mapping[str, Path], folder: Path, say: Say) -> Iterator[Bench]:
    """Have all servers while the block runs, after their scores were compared with the reference.

    Raises:
        LoadError: a server does not serve, answers with other scores, or a request failed.
        ShardrankError: a snapshot can't be written.
    """
    shape = config.shape
    say(f"writing {shape.rows} rows")
    tensors = random_tensors(shape, BENCH_SEED)
    weights = folder / "weights.safetensors"
    save_file(tensors, weights)
    shapes = {"shardrank": shape, FLOAT32: shape.model_copy(update={"row_dtype": "fp32"})}
    snapshots = {
        name: write_snapshot(of, tensors, folder / name) for name, of in shapes.items() if name in config.servers
    }
    expected = {
        hotness: [
            reference_scores(tensors, bench_workload(shape, "mlp", hotness), one)
            for one in bench_requests(shape, "mlp", hotness, CHECKED_REQUESTS)
        ]
        for hotness in config.hotness
    }
    del tensors

    def start(name: str) -> AbstractContextManager[Server]:
        log = folder / f"{name}.log"
        if name in snapshots:
            return serving("local", snapshots[name], config.shardrank_arguments(name), log)
        return peer_serving(config, PEERS[name], pythons[name], weights, log)

    with ExitStack() as stack:
        servers = _Servers(start, stack, say)
        bench = Bench(config, stack.enter_context(Generators()), servers, say)
        say("comparing scores with the reference")
        for name in config.servers:
            with servers.serving(name) as server:
                for form in FORMS[:1] if name in SHARDRANK else config.forms:
                    for hotness, scores in expected.items():
                        load = config.load(name, server, hotness, form=form)
                        for number, one in enumerate(scores):
                            found = bench.generators.scores(load, number)
                            check_scores(f"{name}, {form}, request {number}", found, one, config.tolerance_of(name))
        yield bench.tried()


def run_peers(
    config: PeersConfig, pythons: Mapping[str, Path], folder: Path, say: Say
) -> tuple[list[PeerRound], tuple[FormTrial, ...]]:
    """Find the better form of each peer, then measure every server in every round at every hotness.

    Raises:
        LoadError: a server does not serve, answers with other scores, or a request failed.
        ShardrankError: a snapshot can't be written.
    """
    with peers_bench(config, pythons, folder, say) as bench:
        turns = [(number, hotness) for number in range(config.rounds) for hotness in config.hotness]
        return [one for number, hotness in turns for one in _measured_round(bench, number, hotness)], bench.trials


def _measured_round(bench: Bench, number: int, hotness: int) -> list[PeerRound]:
    """Measure one round at one hotness, of all servers."""
    config, turn = bench.config, in_turn(bench.config.servers, number)
    where = f"round {number + 1}, hotness {hotness}"
    loads: dict[str, tuple[Weighed, Weighed]] = {}
    for name in turn:
        bench.say(f"{where}: {name}")
        with bench.servers.serving(name) as server:
            load = config.load(name, server, hotness, form=bench.form(name, hotness))
            loads[name] = bench.busy(load, config.in_flight, server), bench.busy(load, 1, server)
    rate = config.offered_share * best_throughput([loads[name][0] for name in config.peers])
    # Servers with the same seed get requests at the same times.
    run = RunConfig(rate=rate, warmup_s=config.warmup_s, duration_s=config.seconds, seed=BENCH_SEED + number)
    rounds = []
    for name in turn:
        bench.say(f"{where}: {name} at {rate:.0f}/s")
        with bench.servers.serving(name) as server:
            load = config.load(name, server, hotness, OFFERED_TIMEOUT_MS, form=bench.form(name, hotness))
            offered, repeats = offered_in_time(partial(bench.generators.offer, load, run), bench.say)
        rounds.append(PeerRound(number, name, hotness, *loads[name], offered, repeats))
    return rounds


def offered_in_time(offer: Callable[[], LoadResult], say: Say) -> tuple[LoadResult, int]:
    """Offer a load again while its numbers would be the client's, `MAX_REPEATS` times at most.

    Returns:
        The last result, which is not valid if no repeat was, and how many there were before it.
    """
    for repeats in range(MAX_REPEATS):
        if (offered := offer()).valid:
            return offered, repeats
        say(f"repeated: {offered.invalid_because[0]}")
    return offer(), MAX_REPEATS


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
        server: which of shardrank's.
        hotness: ids a bag.
        throughput: shardrank's to the best peer's, under full load; the median of the rounds.
        p50, p99: the same of the latencies with one request in flight; below 1 is faster.
        offered_p99: the same of the p99 at an equal rate.
    """

    server: str = "shardrank"
    hotness: int
    throughput: float
    p50: float
    p99: float
    offered_p99: float

    def met(self, aims: Aims) -> dict[str, bool]:
        """Tell which of them are what is aimed at."""
        return {
            "throughput": self.throughput >= aims.throughput,
            "p50": self.p50 <= aims.p50,
            "offered_p99": self.offered_p99 <= aims.offered_p99,
        }


def ahead(config: PeersConfig, comparison: Comparison) -> list[Ahead]:
    """Compute it for each hotness; shardrank over binary HTTP, as the peers are asked, also in float32."""
    values = {one.name: np.array(one.values) for one in comparison.measures}
    found = []
    for arm, name in enumerate(config.own):
        for hotness in config.hotness if SHARDRANK[name] == "oip-http" else ():
            ratios: dict[str, float] = {}
            for field, measure in zip(("throughput", "p50", "p99", "offered_p99"), _AHEAD, strict=True):
                # [servers, rounds]; the peers come after shardrank's own.
                table = values[measure.format(in_flight=config.in_flight, hotness=hotness)]
                peers = table[-len(config.peers) :]
                best = peers.max(0) if field == "throughput" else peers.min(0)
                ratios[field] = float(np.median(table[arm] / best))
            found.append(Ahead(server=name, hotness=hotness, **ratios))
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


def about(config: PeersConfig, trials: Sequence[FormTrial]) -> dict[str, str]:
    """Say what results say of the model, the servers and how they were asked."""
    shape = config.shape
    return {
        "model": f"{shape.features} features over one table of {shape.rows} x {shape.embedding_dim}, MLP",
        "requests": f"{shape.requests}; {shape.dense} dense inputs",
        "in flight": str(config.in_flight),
        "seconds of each load": f"{config.seconds:g}",
        "processes of each peer": f"{config.workers}, one thread each",
        "largest batch of a peer": f"{config.batch} requests",
        "processes of shardrank": str(config.shardrank_workers),
        "peers": "float32",
        "shardrank": f"{config.shape.row_dtype} rows, {' '.join(config.shardrank_arguments())}",
        **{f"form of {_title(one.peer)}, hotness {one.hotness}": one.told for one in trials},
    }


def compared(
    config: PeersConfig,
    rounds: Sequence[PeerRound],
    machine: Machine | None = None,
    *,
    trials: Sequence[FormTrial] = (),
) -> Comparison:
    """Make the document of `--json` and the page of `--html`.

    Raises:
        ComparisonError: a server has no rounds.
    """
    at = {(one.server, one.round, one.hotness): one for one in rounds}
    by_server = {
        name: [{hotness: at[name, turn, hotness] for hotness in config.hotness} for turn in range(config.rounds)]
        for name in config.servers
    }
    repeats = sum(one.repeats for one in rounds)
    return compare_rounds(
        [(Arm(name=_title(name)), of_server) for name, of_server in by_server.items()],
        _measures(config),
        title="shardrank and what else could serve the model",
        setup={
            **about(config, trials),
            "equal rates": ", ".join(_rates(config, rounds)),
            "repeated since the client was late": f"{repeats} of {repeats + len(rounds)} loads at an equal rate",
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


def show(console: Console, comparison: Comparison, found: Sequence[Ahead], aims: Aims) -> None:
    """Print every measure of every server, and how far shardrank is ahead."""
    console.print(f"requests: {comparison.setup['requests']}")
    for name, text in comparison.setup.items():
        if name.startswith(("form of", "repeated")):
            console.print(f"{name}: {text}")
    show_comparison(console, comparison)
    for one in found:
        met = one.met(aims)
        shown = {name: f"[{'green' if met[name] else 'red'}]{getattr(one, name):.2f}×[/]" for name in met}
        console.print(
            f"{_title(one.server)}, hotness {one.hotness}, to the best peer of each round: "
            f"throughput {shown['throughput']} (aim ≥ {aims.throughput:g}×), "
            f"p50 {shown['p50']} (aim ≤ {aims.p50:g}×), p99 {one.p99:.2f}×, "
            f"p99 at an equal rate {shown['offered_p99']} (aim ≤ {aims.offered_p99:g}×)"
        )
