"""Is this process ready, and what do its shards tell? Asked in the background, so that a probe costs nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, NoReturn, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loader.errors import ShardrankError
from serving.versions.version_choice import VersionChoice
from shard_node.agent.node_agent import ENOUGH_FAULTS
from shard_node.errors import CardError, GenerationNotFoundError
from shard_node.generation import Generation
from shard_node.node import NodeInfo, ServedVersion

logger = logging.getLogger(__name__)

REFRESH_INTERVAL_S = 1.0
Sample: TypeAlias = tuple[str, tuple[str, ...], float]
"""A family's name without its prefix, labels, value."""

_NODE = ("model", "version", "shard", "replica")
_VERSION = ("model", "version")
_GAUGES = {
    "memory_bytes": ("Bytes of embedding rows by card and tier.", (*_NODE, "card", "tier")),
    "cards_peer_access": (
        "1 if each card of a node reads the memory of every other, 0 if rows are copied or kept on the host instead.",
        _NODE,
    ),
    "cards_failed": ("1 if the cards of a version fail, and the node is about to end, else 0.", _NODE),
    "delta_sequence": ("The last delta that is applied.", _NODE),
    "delta_lag": ("Deltas that are published but not applied.", _NODE),
    "delta_staleness_seconds": ("How old the newest change may be that is not applied.", _NODE),
    "live_version": ("The version that answers requests.", ("model",)),
    "version_state": (
        "1 for each version that is here, with its state: live, staged or draining.",
        (*_VERSION, "state"),
    ),
    "lookup_tier_seconds": (
        "Time of the last lookups, of those with all rows in memory (ram), or that waited for a disk.",
        (*_NODE, "tier", "quantile"),
    ),
    "version_leases": ("Requests that use a version now.", _VERSION),
    "canary_share": ("Share of the requests that the canary gets.", _VERSION),
    "degraded": ("1 if /readyz names the model under `degraded`.", ("model",)),
}
_COUNTERS = {
    "rows_looked_up": ("Rows looked up by table and tier.", (*_NODE, "table", "tier")),
    "disk_reads": ("Rows that were read from disk.", _NODE),
    "disk_read_bytes": ("Bytes that were read from disk for rows.", _NODE),
    "disk_read_failures": ("Rows that could not be read from disk.", _NODE),
    "card_bad_values": (
        "Values that kernels found to name no row of their table, or one that is on no card; pooled as zeros.",
        (*_NODE, "reason"),
    ),
    "delta_absent_keys": ("Keys that deltas were to delete and that were not there.", _NODE),
    "delta_forks": (
        "Times that a node's deltas were not those of their stream any more: its rows are replaced.",
        _NODE,
    ),
}
NODE_FAMILIES = {*_GAUGES, *_COUNTERS} - {"live_version", "canary_share", "degraded"}
"""What a shard node tells at a port of its own, by the names under which serving processes tell it too."""


class _Report(NamedTuple):
    """What one model's shards last said: their nodes by address, else what is wrong; how often in turn cards failed.

    `degraded` is what is wrong while nodes of the fallback answer.
    """

    nodes: Sequence[tuple[str, NodeInfo]] = ()
    problem: str = ""
    faults: int = 0
    degraded: str = ""


@dataclass(eq=False, repr=False)
class Readiness:
    """Keeps what shards of live models last said. Arguments: see `RankingService`."""

    versions: VersionChoice
    max_staleness_s: Mapping[str, float]
    wall_clock: Callable[[], float]
    registry_problem: Callable[[], str] = str

    def __post_init__(self) -> None:
        # By model, once its shards were asked. Replaced by another dict: metrics read it on another thread.
        self._reports: dict[str, _Report] = {}
        self._shutting_down = False
        self._card_error: CardError | None = None
        self._cards_failed = asyncio.Event()

    def nodes(self) -> list[tuple[str, str, NodeInfo]]:
        """List what nodes of all shards last reported: a model, the address (`local` in this process), the info."""
        return [(model, *node) for model, report in self._reports.items() for node in report.nodes]

    def problems(self) -> dict[str, str]:
        """Say why the process is not ready, by model ("" for the process itself); empty if it is ready."""
        if self._card_error is not None:
            return {"": f"{self._card_error.kind}: {self._card_error}"}
        if self._shutting_down:
            return {"": "the process is shutting down"}
        expected = self.versions.expected
        if expected is None:
            return {"": "it is not known yet which models are wanted"}
        live, reports = self.versions.generations.live_versions(), self._reports
        # A model that comes later has had its golden requests answered by its shards; it does not make what serves
        # already not ready.
        unready = {
            model: "its shards were not asked yet" if model in live else "no live version"
            for model in expected
            if model not in live or model not in reports
        }
        return unready | {model: report.problem for model, report in reports.items() if report.problem}

    def degraded(self) -> dict[str, str]:
        """Return why a ready process is not as it should be: by model, rows or a dense step; by "", its registry."""
        live, now = self.versions.generations.live_versions(), self.wall_clock()
        reasons = defaultdict[str, list[str]](list)
        if problem := self.registry_problem():
            reasons[""].append(problem)
        for model, report in self._reports.items():
            if report.degraded:
                reasons[model].append(report.degraded)
            key = model, live.get(model)
            served = [each for _, info in report.nodes for each in info.versions if (each.model, each.version) == key]
            if forked := sum(each.forked for each in served):
                reasons[model].append(f"row updates of version {key[1]} have forked on {forked} of {len(served)} nodes")
            ages = [age for each in served if (age := staleness_s(each, now)) is not None]
            if (limit_s := self.max_staleness_s.get(model)) is None:
                continue
            if len(ages) < len(served):
                lacking = f"{len(served) - len(ages)} of {len(served)} nodes with version {key[1]}"
                reasons[model].append(f"{lacking} have not looked for deltas")
            elif stale := sum(age > limit_s for age in ages):
                reasons[model].append(
                    f"rows of version {key[1]} are {max(ages):.1f} s behind on {stale} of {len(ages)} nodes; "
                    f"max_staleness_s = {limit_s:g}"
                )
        for generation in self.versions.generations.all():
            if live.get(generation.model) == generation.version and generation.payload.dense_fallback:
                reasons[generation.model].append(generation.payload.dense_fallback)
        return {model: "; ".join(of_model) for model, of_model in reasons.items()}

    def begin_shutdown(self) -> None:
        """Not ready from now on."""
        self._shutting_down = True

    async def refresh(self) -> None:
        """Ask the shards of every live model once."""
        models = self.versions.generations.live_versions()
        await asyncio.gather(*map(self._refresh, models))
        self._reports = {model: report for model, report in self._reports.items() if model in models}

    async def cards_failed(self) -> NoReturn:
        """Wait until cards of this process have failed, and raise their CardError. It takes a new process."""
        await self._cards_failed.wait()
        raise self._card_error or CardError("the cards have failed")

    async def run(self) -> None:
        """Refresh until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(REFRESH_INTERVAL_S)

    def samples(self) -> Iterator[Sample]:
        """Yield samples of the shard nodes, as they last reported, and of the versions that are here now."""
        now, degraded, generations = self.wall_clock(), self.degraded(), self.versions.generations
        for model, replica, info in self.nodes():
            yield from node_samples(model, replica, info, now)
        yield from version_samples(generations.all())
        # All as of one moment: a scrape during a flip must not find a model without a live version.
        for model, version in generations.live_versions().items():
            yield "live_version", (model,), version
            yield "degraded", (model,), float(model in degraded)
            if (choice := self.versions.canary(model)) is not None:
                yield "canary_share", (model, str(choice.version)), choice.share

    async def _refresh(self, model: str) -> None:
        before = self._reports.get(model, _Report())
        try:
            with self.versions.generations.lease(model) as lease:
                report = _Report(await lease.payload.nodes())
        except GenerationNotFoundError:
            return
        except ShardrankError as error:
            # Only cards of this process: of those of shard nodes a router makes other errors.
            faults = before.faults + 1 if isinstance(error, CardError) else 0
            problem = f"{error.kind}: {error}"
            report = _Report(before.nodes, problem, faults)
            # Whatever it raises, the live version's problem stands.
            with contextlib.suppress(Exception):
                if (fallback := self.versions.fallbacks.get(model)) is not None:
                    with self.versions.generations.lease(model, fallback) as lease:
                        await lease.payload.nodes()
                    report = _Report(before.nodes, "", faults, f"only version {fallback} answers: {problem}")
            if report.problem and not before.problem:
                logger.warning("model %r is not ready: %s", model, error)
            if isinstance(error, CardError) and faults >= ENOUGH_FAULTS and self._card_error is None:
                logger.critical("the cards of this process have failed: %s", error)
                self._card_error = error
                self._cards_failed.set()
        except Exception as error:
            # A bug with one model must neither stop the watch over the others, nor pass for readiness.
            logger.exception("asking the shards of model %r failed", model)
            report = before._replace(problem=f"internal: asking its shards failed with {type(error).__name__}")
        if before.problem and not report.problem:
            logger.info("model %r is ready again", model)
        self._reports = {**self._reports, model: report}


def staleness_s(served: ServedVersion, now: float) -> float | None:
    """Return how old the newest change may be that a node lacks, in seconds; None while it does not know.

    It is 0 at the moment at which a node finds everything applied, and grows until it looks again. So it stays small
    while nothing is published, and grows while the registry can't be reached.
    """
    return None if served.delta_fresh_at is None else max(0.0, now - served.delta_fresh_at)


class StateCollector(Collector):
    """Makes the families of these names of what `samples` returns at the moment; what was freed is in none of them."""

    def __init__(
        self, samples: Callable[[], Iterable[Sample]], names: Collection[str] = (*_GAUGES, *_COUNTERS)
    ) -> None:
        self._samples, self._names = samples, names

    def collect(self) -> Iterable[Metric]:
        """Collect all families."""
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for kind, described in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (text, labels) in described.items():
                if name in self._names:
                    families[name] = kind(f"shardrank_{name}", text, labels=labels)
        for name, values, value in self._samples():
            families[name].add_metric(values, value)
        return families.values()


def version_samples(generations: Iterable[Generation[Any]]) -> Iterator[Sample]:
    """Yield the state of each version that is loaded."""
    for generation in generations:
        labels = (generation.model, str(generation.version))
        yield "version_state", (*labels, generation.state), 1.0
        yield "version_leases", labels, generation.leases


def node_samples(model: str, replica: str, info: NodeInfo, now: float) -> Iterator[Sample]:
    """Yield what a node said of one model, at a time in seconds since the epoch; `replica` is its address."""
    shard = str(info.identity.shard_index)

    def of_model(reports: Iterable[Any]) -> Iterator[tuple[Any, tuple[str, ...]]]:
        return ((of, (model, str(of.version), shard, replica)) for of in reports if of.model == model)

    for use, node in of_model(info.memory):
        yield "memory_bytes", (*node, str(use.card), use.tier), use.size_bytes
    for count, node in of_model(info.lookups):
        yield "rows_looked_up", (*node, count.table, count.tier), count.rows
    for disk, node in of_model(info.disks):
        counts = {"disk_reads": disk.reads, "disk_read_bytes": disk.size_bytes, "disk_read_failures": disk.failed}
        yield from ((name, node, count) for name, count in counts.items())
        for tier, quantile in product(("ram", "disk"), ("0.5", "0.99")):
            time_us = getattr(disk, f"{tier}_p{round(float(quantile) * 100)}_us")
            yield "lookup_tier_seconds", (*node, tier, quantile), time_us / 1e6
    for cards, node in of_model(info.cards):
        yield "cards_failed", node, 0.0
        yield "cards_peer_access", node, float(cards.peer_access)
        yield "card_bad_values", (*node, "outside_table"), cards.outside_table
        yield "card_bad_values", (*node, "not_here"), cards.not_here
    for served, node in of_model(info.versions):
        if served.delta_fresh_at is not None or served.delta_sequence > 0:
            yield "delta_sequence", node, served.delta_sequence
            yield "delta_lag", node, served.delta_lag
            yield "delta_forks", node, served.delta_forks
            yield "delta_absent_keys", node, served.absent_keys
            if (seconds := staleness_s(served, now)) is not None:
                yield "delta_staleness_seconds", node, seconds
