"""Compare shardrank with its peers: the model that all serve, every server checked and measured in alternation."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from safetensors.torch import save_file

from loader.errors import ConfigError
from loader.snapshot.row_source import ArrayRows
from loader.snapshot.writer import export_snapshot
from loadtest.documents import this_machine, versions
from loadtest.errors import RequestFailedError
from loadtest.load.config import OfferedLoad, bench_load
from loadtest.load.generator import Generators, ask_scores
from loadtest.load.loops import not_busy_because
from loadtest.rounds import Arm, Comparison, Measure, compare_rounds, rotated
from loadtest.servers import HOST, Server, ServerCommand, check_scores, running, serving
from loadtest.workloads.catalog import BENCH_SEED, BenchShape, BenchWorkload, bench_spec
from loadtest.workloads.payloads import Encoding
from loadtest.workloads.prepare import random_dense
from serving.models.layers import DtypeChoice, choose_dtype
from shard_node.bags import Float32Array

FOLDER = Path(__file__).parent
PIP_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that is not shardrank, and the encodings of its requests: all columns a candidate, the context once."""

    title: str
    encodings: tuple[Encoding, Encoding]

    @property
    def name(self) -> str:
        """The name of its environment, its requirements and its server's file."""
        return self.title.lower()

    @property
    def requirements(self) -> Path:
        """The file that pip reads."""
        return FOLDER / "requirements" / f"{self.name}.txt"

    def python(self, environments: Path) -> Path:
        """Return the Python of its environment. Raises ConfigError: it is not installed."""
        python = environments / self.name / "bin" / "python"
        if not python.exists():
            how = "run `shardrank loadtest peers --install` with the same --env-dir, or choose others by --peer"
            raise ConfigError(f"{environments} has no environment for {self.name}; {how}")
        return python

    def install(self, environments: Path) -> None:
        """Make its environment, or bring it to the pinned versions. Raises ConfigError."""
        folder = environments / self.name
        try:
            if not (folder / "bin" / "python").exists():
                venv.create(folder, with_pip=True)
            pip = [str(self.python(environments)), "-m", "pip", "install", "--quiet", "-r", str(self.requirements)]
            subprocess.run(pip, timeout=PIP_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"{folder}: {error}") from error


PEERS = {
    peer.name: peer
    for peer in (
        Peer("FastAPI", ("flat", "flat-once")),
        Peer("mosec", ("flat", "flat-once")),
        Peer("Triton", ("tensors", "tensors-once")),
    )
}

ROW_DEVIATION = 0.3
"""Rows are this wide, so that scores differ by much more than a tolerance."""
CHECKED_REQUESTS = 2
FLOAT32_TOLERANCE, SHARDRANK_TOLERANCE = 1e-4, 0.03
"""Of a score. Peers compute in float32, but add in another order; shardrank's rows may be int8 and its MLP bfloat16."""
CHANNELS = 16
"""gRPC connections: few would fall unevenly on the processes behind a port, which the kernel chooses by chance."""
Row: TypeAlias = tuple[str, Literal["/s", "ms"]]
"""Name and unit of a measure."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A server, sent requests in one way; without a peer it is shardrank's."""

    title: str
    peer: Peer | None
    encoding: Encoding

    def load(self, shape: BenchShape, server: Server, hotness: int) -> OfferedLoad:
        """Return the requests, the same as to every other subject, in this one's encoding."""
        workload = BenchWorkload(shape=shape, head="mlp", hotness=hotness)
        return bench_load(server.target(self.encoding), self.encoding, workload, grpc_channels=CHANNELS)


@dataclass(frozen=True, slots=True)
class PeersConfig:
    """What is measured, for `seconds` each, after a fifth of them as a warm-up; the number formats are shardrank's."""

    shape: BenchShape
    peers: tuple[Peer, ...]
    hotness: tuple[int, ...]
    in_flight: int
    rounds: int
    seconds: float
    workers: int
    dtype: DtypeChoice

    @property
    def subjects(self) -> list[Subject]:
        """Everything that is measured: a peer with all columns for each candidate, and with the context sent once."""
        subjects = [Subject("shardrank", None, "oip-http"), Subject("shardrank, gRPC", None, "grpc-packed")]
        for peer in self.peers:
            subjects.append(Subject(peer.title, peer, peer.encodings[0]))
            if self.shape.context_features:
                subjects.append(Subject(f"{peer.title}, context once", peer, peer.encodings[1]))
        return subjects


@contextlib.contextmanager
def peer_serving(config: PeersConfig, peer: Peer, python: Path, weights: Path) -> Iterator[Server]:
    """Serve a file of weights while the block runs. Raises LoadError: it ends, or does not answer in time."""
    # Another program could take the port before the peer does; then the peer ends, and says why.
    with socket.create_server((HOST, 0)) as unused:
        port: int = unused.getsockname()[1]
    settings = {"WEIGHTS": weights.resolve(), "PORT": port, "WORKERS": config.workers}
    environment = os.environ | {f"PEER_{name}": str(value) for name, value in settings.items()}
    # mosec takes its own address from here. The peer's environment alone is searched for modules.
    environment |= {"MOSEC_PORT": str(port), "MOSEC_ADDRESS": HOST, "PYTHONNOUSERSITE": "1"}
    environment.pop("PYTHONPATH", None)
    line = str(python.absolute()), str(FOLDER / "servers" / f"{peer.name}_server.py")
    command = ServerCommand("its server", line, weights.with_name(f"{peer.name}.log"), environment)
    load = Subject(peer.title, peer, peer.encodings[0]).load(config.shape, Server(port, 0, ()), config.hotness[0])

    def why_not_ready() -> str:
        try:
            ask_scores(load)
        except RequestFailedError as error:
            return str(error)
        return ""

    with running(peer.title, [command], why_not_ready) as process_ids:
        yield Server(port, 0, process_ids)


def run_peers(config: PeersConfig, environments: Path, folder: Path, say: Callable[[str], None]) -> Comparison:
    """Start all servers, compare their scores, and measure each subject in every round at every hotness.

    Raises ShardrankError: a peer is not installed, a server does not serve, scores differ, or a request failed.
    """
    pythons = {peer: peer.python(environments) for peer in config.peers}
    say(f"writing {config.shape.rows} rows")
    weights = folder / "weights.safetensors"
    spec, draw = bench_spec(config.shape, "mlp"), torch.Generator().manual_seed(BENCH_SEED)
    rows = torch.randn((config.shape.rows, config.shape.embedding_dim), generator=draw) * ROW_DEVIATION
    dense = random_dense(spec, BENCH_SEED)
    save_file({"rows": rows, **dense}, weights)
    snapshot = export_snapshot(folder / "store", spec, rows={"rows": ArrayRows(rows)}, dense=dense)
    arguments = ("--no-verify", "--workers", str(config.workers), "--dtype", choose_dtype(config.dtype))
    figures = {subject: [dict[Row, float]() for _ in range(config.rounds)] for subject in config.subjects}
    reasons: list[str] = []
    with Generators() as generators, ExitStack() as stack:
        say("starting shardrank")
        shardrank = stack.enter_context(serving(snapshot, arguments, folder / "shardrank.log"))
        servers: dict[Peer | None, Server] = {None: shardrank}
        for peer, python in pythons.items():
            say(f"starting {peer.title}")
            servers[peer] = stack.enter_context(peer_serving(config, peer, python, weights))
        say("comparing scores")
        check_subjects(config, generators, servers)
        for number in range(config.rounds):
            for subject in rotated(config.subjects, number):
                say(f"round {number + 1}: {subject.title}")
                for hotness in config.hotness:
                    server = servers[subject.peer]
                    load = subject.load(config.shape, server, hotness)
                    full, alone = (
                        generators.busy(load, in_flight, config.seconds / 5, config.seconds, server.process_ids)
                        for in_flight in (config.in_flight, 1)
                    )
                    where = f"{subject.title}, hotness {hotness}, round {number + 1}"
                    reasons += [f"{where}: {reason}" for reason in not_busy_because(full)]
                    figures[subject][number] |= {
                        (f"throughput, hotness {hotness}", "/s"): full.requests_per_s,
                        (f"p50, hotness {hotness}", "ms"): full.p50_ms,
                        (f"p99, hotness {hotness}", "ms"): full.p99_ms,
                        (f"p50, one in flight, hotness {hotness}", "ms"): alone.p50_ms,
                        (f"p99, one in flight, hotness {hotness}", "ms"): alone.p99_ms,
                    }
    return compare_peers(config, figures, reasons)


def check_subjects(config: PeersConfig, generators: Generators, servers: Mapping[Peer | None, Server]) -> None:
    """Compare the scores of all subjects with a peer's. Raises LoadError."""
    is_float32 = config.shape.row_dtype == "fp32" and config.dtype == "float32"
    for hotness, number in product(config.hotness, range(CHECKED_REQUESTS)):
        expected: Float32Array | None = None
        for subject in reversed(config.subjects):  # The last is a peer.
            scores = generators.scores(subject.load(config.shape, servers[subject.peer], hotness), number)
            expected = scores if expected is None else expected
            allowed = FLOAT32_TOLERANCE if subject.peer or is_float32 else SHARDRANK_TOLERANCE
            check_scores(f"{subject.title}, request {number}", scores, expected, allowed)


def compare_peers(
    config: PeersConfig, figures: Mapping[Subject, Sequence[Mapping[Row, float]]], reasons: Sequence[str]
) -> Comparison:
    """Return ratios to the best peer of each round and measure."""
    shape, peers = config.shape, [rounds for subject, rounds in figures.items() if subject.peer]

    def best(row: Row, rounds: Sequence[Mapping[Row, float]]) -> float:
        return (max if row[1] == "/s" else min)(figures[row] for figures in rounds)

    arms = [(Arm(name="best peer"), list(zip(*peers, strict=True)))]
    arms += [(Arm(name=subject.title), [(each,) for each in rounds]) for subject, rounds in figures.items()]
    return compare_rounds(
        arms,
        [Measure(row[0], row[1], "higher" if row[1] == "/s" else "lower", partial(best, row)) for row in peers[0][0]],
        title="shardrank and what else could serve the model",
        setup={
            "model": f"{shape.features} features over one table of {shape.rows} x {shape.embedding_dim}, MLP",
            "requests": f"{shape.requests}; {config.in_flight} in flight, or one, for {config.seconds:g} s each",
            "processes of each server": str(config.workers),
            "peers": "float32, one thread each, batches of up to 8 requests",
            "shardrank": f"{shape.row_dtype} rows, {choose_dtype(config.dtype)} dense model",
        },
        invalid_because=reasons,
        machine=this_machine(),
        versions=versions() | {peer.name: " ".join(peer.requirements.read_text().split()) for peer in config.peers},
    )
