"""What the rounds come to: a comparison of all servers with shardrank, and how far ahead of the best peer it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console

from loader.snapshot.manifest import Frozen
from loadtest.compare.result import show_comparison
from loadtest.load.processes import not_busy_because
from loadtest.load.result import Machine, this_machine, versions
from loadtest.peers.catalog import PEERS
from loadtest.peers.run import OFFERED_TIMEOUT_MS, PeerRound, PeersConfig
from loadtest.report.comparison import Arm, Better, Comparison, measured

MIN_THROUGHPUT_RATIO = 3.0
MAX_P50_RATIO = 0.6
MAX_OFFERED_P99_RATIO = 0.5
"""What is aimed at, to the best peer: throughput, p50 with one request in flight, p99 at an equal rate."""
TITLES = {"shardrank": "shardrank", "shardrank-grpc": "shardrank, gRPC"}


@dataclass(frozen=True, slots=True)
class _Measure:
    name: str
    unit: str
    better: Better
    value: Callable[[PeerRound], float]


def _late(latency_ms: float | None) -> float:
    """Replace a percentile that failures reach by the time that they were waited for, which is the least it can be."""
    return OFFERED_TIMEOUT_MS if latency_ms is None else latency_ms


_MEASURES = (
    _Measure("throughput, {in_flight} in flight", "/s", "higher", lambda one: one.full.requests / one.full.seconds),
    _Measure("p50, one in flight", "ms", "lower", lambda one: one.alone.p50_ms),
    _Measure("p99, one in flight", "ms", "lower", lambda one: one.alone.p99_ms),
    _Measure("p50, {in_flight} in flight", "ms", "lower", lambda one: one.full.p50_ms),
    _Measure("p99, {in_flight} in flight", "ms", "lower", lambda one: one.full.p99_ms),
    _Measure("p50, equal rate", "ms", "lower", lambda one: _late(one.offered.latency_of_due.p50_ms)),
    _Measure("p99, equal rate", "ms", "lower", lambda one: _late(one.offered.latency_of_due.p99_ms)),
)


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


def ahead(config: PeersConfig, rounds: Sequence[PeerRound]) -> list[Ahead]:
    """Compute it for each hotness; shardrank over binary HTTP, as the peers are asked."""
    values = _values(config, rounds)
    found = []
    for number, hotness in enumerate(config.hotness):
        # [measures, servers, rounds]; the peers come after shardrank's own.
        own, peers = values[number][:, 0], values[number][:, -len(config.peers) :]
        best = np.stack([peers[0].max(0), *peers[1:].min(1)])
        throughput, p50, p99, *_, offered_p99 = np.median(own / best, axis=1).tolist()
        found.append(Ahead(hotness=hotness, throughput=throughput, p50=p50, p99=p99, offered_p99=offered_p99))
    return found


def compared(config: PeersConfig, rounds: Sequence[PeerRound], machine: Machine | None = None) -> Comparison:
    """Make the document of `--json` and the page of `--html`.

    Raises:
        ComparisonError: a latency of 0.
    """
    values = _values(config, rounds)
    reasons = [
        f"{_title(one.server)}, hotness {one.hotness}, round {one.round + 1}: {reason}"
        for one in rounds
        for reason in (*not_busy_because(one.full), *one.offered.invalid_because)
    ]
    shape = config.shape
    return Comparison(
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
            "shardrank": f"int8 rows, {' '.join(config.shardrank_arguments)}",
            "equal rates": ", ".join(_rates(config, rounds)),
        },
        arms=tuple(Arm(name=_title(name)) for name in config.servers),
        baseline=0,
        rounds=config.rounds,
        measures=tuple(
            measured(
                f"{measure.name.format(in_flight=config.in_flight)}, hotness {hotness}",
                measure.unit,
                measure.better,
                values[number][index].tolist(),
            )
            for number, hotness in enumerate(config.hotness)
            for index, measure in enumerate(_MEASURES)
        ),
        valid=not reasons,
        invalid_because=tuple(reasons),
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


def _values(config: PeersConfig, rounds: Sequence[PeerRound]) -> list[npt.NDArray[np.float64]]:
    """For each hotness, float64 [measures, servers, rounds]."""
    at = {(one.server, one.hotness, one.round): one for one in rounds}
    return [
        np.array(
            [
                [[measure.value(at[name, hotness, turn]) for turn in range(config.rounds)] for name in config.servers]
                for measure in _MEASURES
            ]
        )
        for hotness in config.hotness
    ]


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
