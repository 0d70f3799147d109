"""Compare shardrank with its peers: the model that all serve, every server checked and measured in alternation."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import click
import torch
from safetensors.torch import save_file

from loader.errors import ConfigError
from loader.snapshot.row_source import ArrayRows
from loader.snapshot.tables import RowDtype
from loader.snapshot.writer import export_snapshot
from loadtest.bench.harness import BUSY_MEASURES, Bench, BenchTable, Measure, Values, bench_command
from loadtest.cli import same_option, side_split_option
from loadtest.errors import RequestFailedError
from loadtest.load.config import TOLERANCES, OfferedLoad, bench_load
from loadtest.load.generator import Generators, ask_scores
from loadtest.servers import HOST, Server, ServerCommand, check_scores, free_ports, running, serving
from loadtest.workloads.catalog import BENCH_SEED, BenchShape, BenchWorkload, SideSplit, bench_spec, bench_workload
from loadtest.workloads.payloads import Encoding
from loadtest.workloads.prepare import golden_of, random_dense
from serving.cli import options as opts
from serving.models.layers import DtypeChoice, choose_dtype
from shard_node.bags import Float32Array

FOLDER = Path(__file__).parent
ENVIRONMENTS = Path.home() / ".cache/shardrank/peers"


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
            made_by = f"python -m venv {environments / self.name} && {python} -m pip install -r {self.requirements}"
            raise ConfigError(f"{environments} has no environment for {self.name}: `{made_by}`, or choose by --peer")
        return python


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
CHANNELS = 16
"""gRPC connections: few would fall unevenly on the processes behind a port, which the kernel chooses by chance."""
BEST = "best peer"
MEASURES = (*BUSY_MEASURES, *(Measure(f"{percentile}, one in flight", "ms") for percentile in ("p50", "p99")))


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


def subjects_of(shape: BenchShape, peers: Sequence[Peer]) -> list[Subject]:
    """List what is measured: of a peer all columns for each candidate, and the context sent once."""
    subjects = [Subject("shardrank", None, "oip-http"), Subject("shardrank, gRPC", None, "grpc-packed")]
    for peer in peers:
        subjects.append(Subject(peer.title, peer, peer.encodings[0]))
        if shape.context_features:
            subjects.append(Subject(f"{peer.title}, context once", peer, peer.encodings[1]))
    return subjects


@contextlib.contextmanager
def peer_serving(peer: Peer, python: Path, weights: Path, workers: int, first: OfferedLoad) -> Iterator[Server]:
    """Serve a file of weights while the block runs; it is ready when it answers the `first` load's first request.

    Raises LoadError: it ends, or does not answer in time.
    """
    # Another program could take the port before the peer does; then the peer ends, and says why.
    (port,) = free_ports()
    settings = {"WEIGHTS": weights.resolve(), "PORT": port, "WORKERS": workers}
    environment = os.environ | {f"PEER_{name}": str(value) for name, value in settings.items()}
    # mosec takes its own address from here. The peer's environment alone is searched for modules.
    environment |= {"MOSEC_PORT": str(port), "MOSEC_ADDRESS": HOST, "PYTHONNOUSERSITE": "1"}
    environment.pop("PYTHONPATH", None)
    line = str(python.absolute()), str(FOLDER / "servers" / f"{peer.name}_server.py")
    command = ServerCommand("its server", line, weights.with_name(f"{peer.name}.log"), environment)
    load = first.model_copy(update={"target": Server(port, 0, ()).target(first.spoken)})

    def why_not_ready() -> str:
        try:
            ask_scores(load)
        except RequestFailedError as error:
            return str(error)
        return ""

    with running(peer.title, [command], why_not_ready) as process_ids:
        yield Server(port, 0, process_ids)


def check_subjects(
    shape: BenchShape,
    subjects: Sequence[Subject],
    hotness: Sequence[int],
    dtype: DtypeChoice,
    generators: Generators,
    servers: Mapping[Peer | None, Server],
) -> None:
    """Compare the scores of all subjects with a peer's. Raises LoadError."""
    is_float32 = shape.row_dtype == "fp32" and dtype == "float32"
    for ids in hotness:
        expected = list[Float32Array]()
        for subject in reversed(subjects):  # The last is a peer.
            load = subject.load(shape, servers[subject.peer], ids)
            scores = [generators.scores(load, number) for number in range(CHECKED_REQUESTS)]
            expected = expected or scores
            # Peers compute in float32, but add in another order; shardrank's rows may be int8 and its MLP bfloat16.
            allowed = TOLERANCES["float32" if subject.peer or is_float32 else "int8"]
            check_scores(subject.title, scores, expected, allowed)


def best_of(peers: Sequence[str], values: Mapping[str, Values]) -> Values:
    """Return the best value of these subjects in a round, measure by measure."""
    return {
        measure.name: (max if measure.better == "higher" else min)(values[peer][measure.name] for peer in peers)
        for measure in MEASURES
    }


def write_model(folder: Path, shape: BenchShape, hotness: Sequence[int]) -> tuple[Path, Path]:
    """Write the model's snapshot into a store in a folder, and its weights as a file for peers; return both paths."""
    click.echo(f"writing {shape.rows} rows")
    weights, spec = folder / "weights.safetensors", bench_spec(shape, "mlp")
    rows = torch.randn((shape.rows, shape.embedding_dim), generator=torch.Generator().manual_seed(BENCH_SEED))
    rows, dense = rows * ROW_DEVIATION, random_dense(spec, BENCH_SEED)
    save_file({"rows": rows, **dense}, weights)
    export = partial(export_snapshot, folder / "store", spec, rows={"rows": ArrayRows(rows)}, dense=dense)
    workloads = [bench_workload(BenchWorkload(shape=shape, head="mlp", hotness=ids)) for ids in hotness]
    return export(golden=golden_of(export(), workloads)), weights


@bench_command
@opts.option("--peer", "Repeatable; else all.", click.Choice(list(PEERS)), tuple(PEERS), name="names", multiple=True)
@opts.option("--env-dir", "Has each environment.", opts.FOLDER, ENVIRONMENTS, name="environments")
@opts.option("--seconds S", "Of each load, after a fifth of them as a warm-up.", click.FloatRange(0.1, 3600), 5.0)
@opts.numbers("--hotness N,...", "Ids a bag.", 1, 1000, "1,20")
@opts.count("--in-flight", "Requests that are always out while throughput is measured.", 1, 1024, 32)
@opts.count("--rows", "Of the one table.", 1, 2**31, 1_000_000)
@side_split_option("product")
@same_option
@opts.count("--workers", "Of each server. Default: the cores.", 1, 64)
@opts.choice("--row-dtype", ["int8", "fp16", "fp32"], "Of shardrank's rows.")
@opts.choice("--dtype", get_args(DtypeChoice), "Of shardrank's dense model.")
def peers(
    bench: Bench,
    names: tuple[str, ...],
    environments: Path,
    seconds: float,
    hotness: tuple[int, ...],
    in_flight: int,
    rows: int,
    side_split: SideSplit,
    varied: bool,
    workers: int | None,
    row_dtype: RowDtype,
    dtype: DtypeChoice,
) -> None:
    """Compare shardrank with what one would serve the model with instead, on this machine.

    Every server has the same weights and is sent the same requests by the same client, and scores are compared before
    anything is measured; each peer is sent the context's columns with every candidate, and once. Ratios are to the best
    peer of each round. --row-dtype and --dtype are of shardrank's rows and dense model; peers compute in float32. The
    exit code is 1 if the client was the bottleneck, so that the numbers can't be believed.

    Examples:
      shardrank loadtest peers --env-dir ~/peers --json peers.json
      shardrank loadtest peers --env-dir ~/peers --workload candidates --same
      shardrank loadtest peers --env-dir ~/peers --row-dtype fp32 --dtype float32
    """
    pythons = {PEERS[name]: PEERS[name].python(environments) for name in dict.fromkeys(names)}
    shape = BenchShape.of(rows, row_dtype, varied=varied, side_split=side_split)
    workers = workers or len(os.sched_getaffinity(0))
    setup = {
        "model": f"{shape.features} features over one table of {rows} x {shape.embedding_dim}, MLP",
        "requests": f"{shape.requests}; {in_flight} in flight, or one, for {seconds:g} s each",
        "processes of each server": f"{workers}",
        "peers": "float32, one thread each, batches of up to 8 requests",
        "shardrank": f"{row_dtype} rows, {choose_dtype(dtype)} dense model",
        **{peer.name: " ".join(peer.requirements.read_text().split()) for peer in pythons},
    }
    subjects = subjects_of(shape, [*pythons])
    with Generators() as generators, ExitStack() as stack:
        snapshot, weights = write_model(bench.folder, shape, hotness)
        click.echo("starting shardrank")
        arguments = ("--no-verify", "--workers", str(workers), "--dtype", choose_dtype(dtype))
        shardrank = stack.enter_context(serving(snapshot, arguments, bench.folder / "shardrank.log"))
        servers: dict[Peer | None, Server] = {None: shardrank}
        for peer, python in pythons.items():
            click.echo(f"starting {peer.title}")
            first = Subject(peer.title, peer, peer.encodings[0]).load(shape, shardrank, 1)
            servers[peer] = stack.enter_context(peer_serving(peer, python, weights, workers, first))
        click.echo("comparing scores")
        check_subjects(shape, subjects, hotness, dtype, generators, servers)

        def measured(subject: Subject, ids: int, number: int) -> Values:
            server, load = servers[subject.peer], subject.load(shape, servers[subject.peer], ids)
            full, alone = (
                bench.busy_values(generators, load, server, count, bench.seconds(seconds)) for count in (in_flight, 1)
            )
            return full | {f"{percentile}, one in flight": alone[percentile] for percentile in ("p50", "p99")}

        best, tables = (BEST, partial(best_of, [subject.title for subject in subjects if subject.peer])), []
        for count in hotness:
            title = f"shardrank and what else could serve the model, hotness {count}"
            by_title = {subject.title: partial(measured, subject, count) for subject in subjects}
            tables.append(BenchTable(title, MEASURES, by_title, setup, best))
        bench.run(tables)
