"""What it costs that requests vary: each server asked with equal requests, and with varied ones of the same mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from rich.console import Console

from loadtest.load.closed_loop import Weighed, not_busy_because
from loadtest.load.result import Machine, this_machine, versions
from loadtest.peers.catalog import PEERS, FormTrial
from loadtest.peers.run import TITLES, Bench, PeersConfig, Say, about, peers_bench
from loadtest.rounds import Arm, Comparison, Measure, compare_rounds, in_turn, show_comparison
from loadtest.workloads.catalog import EQUAL_REQUESTS, VARIED_AROUND_100

Requests: TypeAlias = Literal["equal", "varied"]
REQUESTS: Mapping[Requests, Mapping[str, object]] = {"equal": EQUAL_REQUESTS, "varied": VARIED_AROUND_100}
"""What of the shape each of them changes."""
MIN_VARIED_SHARE = 0.9
MIN_THROUGHPUT_RATIO = 2.5
"""What is aimed at: varied to equal requests a second, and on varied ones shardrank's to the best peer's."""

VariedRound: TypeAlias = Mapping[tuple[int, Requests], Weighed]
"""Of one server in one round: its loads by hotness and requests."""


def run_varied(
    config: PeersConfig, pythons: Mapping[str, Path], folder: Path, say: Say
) -> tuple[dict[str, list[VariedRound]], tuple[FormTrial, ...]]:
    """Keep every server busy with both, one right after the other, in every round at every hotness.

    Scores are checked, and the better forms of peers found, with varied requests.

    Raises:
        LoadError: a server does not serve, answers with other scores, or a request failed.
        ShardrankError: a snapshot can't be written.
    """
    configs = {
        kind: config.model_copy(update={"shape": config.shape.model_copy(update=dict(changed))})
        for kind, changed in REQUESTS.items()
    }
    found: dict[str, list[VariedRound]] = {name: [] for name in config.servers}
    with peers_bench(configs["varied"], pythons, folder, say) as bench:
        for number in range(config.rounds):
            for name in in_turn(config.servers, number):
                say(f"round {number + 1}: {name}")
                found[name].append(_round(bench, configs, name, number))
        return found, bench.trials


def _round(bench: Bench, configs: Mapping[Requests, PeersConfig], name: str, number: int) -> VariedRound:
    loads: dict[tuple[int, Requests], Weighed] = {}
    with bench.servers.serving(name) as server:
        for hotness in bench.config.hotness:
            for kind in in_turn(tuple(configs), number):
                load = configs[kind].load(name, server, hotness, form=bench.form(name, hotness))
                loads[hotness, kind] = bench.busy(load, bench.config.in_flight, server)
    return loads


def _measures(hotness: int) -> list[Measure[VariedRound]]:
    def of(kind: Requests, value: Callable[[Weighed], float]) -> Callable[[VariedRound], float]:
        return lambda one: value(one[hotness, kind])

    def share(one: VariedRound) -> float:
        return one[hotness, "varied"].requests_per_s / one[hotness, "equal"].requests_per_s

    found = [
        Measure(_name(hotness, kind), "/s", "higher", of(kind, lambda one: one.requests_per_s)) for kind in REQUESTS
    ]
    found += [
        Measure(f"processor time, {kind} requests, hotness {hotness}", "ms", "lower", of(kind, lambda one: one.cpu_ms))
        for kind in REQUESTS
    ]
    return [*found, Measure(f"varied to equal requests/s, hotness {hotness}", "×", "higher", share)]


def compared_varied(
    config: PeersConfig,
    rounds: Mapping[str, Sequence[VariedRound]],
    trials: Sequence[FormTrial],
    machine: Machine | None = None,
) -> Comparison:
    """Make the document of `--json` and the page of `--html`. Raises ComparisonError if a server has no rounds."""
    measures = [one for hotness in config.hotness for one in _measures(hotness)]
    shape = config.shape.model_copy(update=dict(VARIED_AROUND_100))
    titles = {name: TITLES.get(name) or PEERS[name].title for name in rounds}
    return compare_rounds(
        [(Arm(name=titles[name]), of_server) for name, of_server in rounds.items()],
        measures,
        title="varied requests against equal ones of the same mean",
        setup=about(config.model_copy(update={"shape": shape}), trials)
        | {"equal requests": "100 candidates, fixed bags"},
        invalid_because=[
            f"{titles[name]}, hotness {hotness}, {kind}, round {number + 1}: {reason}"
            for name, of_server in rounds.items()
            for number, one in enumerate(of_server)
            for (hotness, kind), load in one.items()
            for reason in not_busy_because(load)
        ],
        machine=machine or this_machine(),
        versions={**versions(), **{name: PEERS[name].pinned for name in config.peers}},
    )


def _name(hotness: int, kind: Requests) -> str:
    return f"throughput, {kind} requests, hotness {hotness}"


def show_varied(console: Console, config: PeersConfig, comparison: Comparison) -> None:
    """Print every measure, what varied requests are to equal ones, and shardrank to the best peer of each round."""
    console.print(f"requests: {comparison.setup['requests']}")
    show_comparison(console, comparison)
    values = {one.name: np.array(one.values) for one in comparison.measures}
    for hotness in config.hotness:
        varied, equal = values[_name(hotness, "varied")], values[_name(hotness, "equal")]
        best = varied[-len(config.peers) :]
        shares = np.median(varied / equal, axis=1)
        best_peer = config.peers[int(np.median(best, axis=1).argmax())]
        console.print(
            f"hotness {hotness}: varied to equal requests/s, shardrank {shares[0]:.2f}× (aim ≥ {MIN_VARIED_SHARE:g}×), "
            f"the best peer ({PEERS[best_peer].title}) {shares[config.servers.index(best_peer)]:.2f}×; "
            f"on varied requests shardrank to the best peer {np.median(varied[0] / best.max(0)):.2f}× "
            f"(aim ≥ {MIN_THROUGHPUT_RATIO:g}×)"
        )
