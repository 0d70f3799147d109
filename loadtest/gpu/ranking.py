"""Measure one ranking request end to end in local mode, from a parsed request to its scores.

What is timed is `RankingService.wait_in_thread`: queue, mapping of ids, packing, one copy up, pooling, the dense model,
scores down, and both changes of thread. Parsing JSON or protobuf is not in it.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from pydantic import JsonValue

from loader.snapshot.manifest import DenseModelSpec, ModelSpec
from loadtest.gpu.parts import BenchSize, Work
from loadtest.workloads.distributions import Fixed, Uniform
from loadtest.workloads.prepare import write_random_snapshot
from loadtest.workloads.workload import SyntheticWorkload
from serving.cli.capacity import CatalogModel, catalog_model
from serving.formats.requests import Answer, RankAnswer, RankRequest
from serving.limits import RequestLimits
from serving.models.ranking_models import DtypeChoice
from serving.observe.calls import Call
from serving.rank.batcher import Pending
from serving.rank.service import RankingService
from serving.versions.loading import ModelSource, load_served_model
from shard_node.bags import Float32Array
from shard_node.cuda.card_set import CardOptions, CardSet
from shard_node.cuda.cards import Cards

ModelKind = Literal["dlrm", "dcn_v2"]
KINDS: tuple[ModelKind, ...] = ("dlrm", "dcn_v2")
BOTTOM, TOP = (512, 256, 128), (1024, 1024, 512, 256)
CROSS_LAYERS, CROSS_RANK = 3, 512


def served_spec(kind: ModelKind, found: CatalogModel, size: BenchSize) -> ModelSpec:
    """Describe DLRM-v2 with smaller tables and hidden layers; the bottom MLP still ends with dim 128."""
    divisor = size.layer_divisor
    config: dict[str, JsonValue] = {"bottom_mlp": [*(layer // divisor for layer in BOTTOM[:-1]), BOTTOM[-1]]}
    top: list[JsonValue] = [layer // divisor for layer in TOP]
    if kind == "dlrm":
        config["top_mlp"] = top
    else:
        config |= {"deep": top, "num_cross_layers": CROSS_LAYERS, "low_rank": CROSS_RANK // divisor}
    tables = tuple(
        table.model_copy(update={"num_embeddings": min(table.num_embeddings, size.request_table_rows)})
        for table in found.spec.tables
    )
    dense_model = DenseModelSpec(kind=kind, config=config)
    name = f"bench-{kind.replace('_', '-')}"
    return found.spec.model_copy(update={"model": name, "tables": tables, "dense_model": dense_model})


def requests_of(spec: ModelSpec, found: CatalogModel, size: BenchSize) -> dict[int, list[RankRequest]]:
    """Draw requests as an API's codec would make them, by number of candidates; ids are uniform."""
    hotness = {feature: min(ids, size.request_hotness) for feature, ids in found.hotness.items()}
    made: dict[int, list[RankRequest]] = {}
    for count in size.candidates:
        workload = SyntheticWorkload(spec.model, spec, hotness, Uniform(), Fixed(count), ragged=False)
        drawn = [workload.request(np.random.default_rng(seed)) for seed in range(DISTINCT_REQUESTS)]
        made[count] = [RankRequest(one.bags, count, one.context_dense, one.candidate_dense, TIMEOUT_S) for one in drawn]
    return made


SEED = 5
DISTINCT_REQUESTS = 8
WARM_UP = 100
"""Requests before the timed ones: every replica makes a graph of their class at its second one."""
STAGES = ("queue", "lookup", "rank")
IN_FLIGHT = 8
TIMEOUT_S = 60.0
GRAPHS_MEANT = 0.9
"""Share of the timed requests that a row with graphs is about; the others came before a replica had made its graph."""
CONFIGURATION_S = 8.0
"""About what one model on one number of cards takes to load and measure."""
TOLERANCE: dict[DtypeChoice, float] = {"float32": 1e-2, "bfloat16": 0.25}
"""Of a score, against float32 on the CPU engine, as a share of the standard deviation of scores."""
NOTES = (
    "From a parsed request to its scores, within one process: queue, id mapping, packing, copy up, pooling, dense "
    "model, scores down, two changes of thread. Parsing of JSON or protobuf is not in it.",
    "DLRM-v2: 26 features, all of them the candidates', 214 uniform ids a candidate, dim 128, 13 dense floats. Its "
    "largest tables are cut (facts: table_rows), still far larger than a cache.",
    "mean_stage_ms: queue, then lookup, the host's share (ids to rows, packing), then rank, from there until the "
    "scores are back. The rest of a request is changes of thread, merging and ordering.",
    "No row is replicated (hot_gb 0), so that on 4 logical cards three quarters of the rows are another card's.",
)


@dataclass(frozen=True, slots=True)
class Configuration:
    """How a model is served: on how many logical cards, with graphs or without."""

    logical_cards: int
    graphs: bool


CONFIGURATIONS = (Configuration(1, True), Configuration(4, True), Configuration(1, False), Configuration(4, False))


@dataclass(frozen=True, eq=False)
class ScoredRequest:
    """A request, and its scores in float32 on the CPU engine."""

    request: RankRequest
    expected: Float32Array

    def difference(self, scores: Float32Array) -> float:
        """Find the largest difference of a score; infinite if one is not finite."""
        largest = float(np.abs(scores - self.expected).max())
        return largest if np.isfinite(largest) else float("inf")


@dataclass(frozen=True, eq=False)
class RankingBench:
    """A model's snapshot, and the requests that it has to answer, by number of candidates."""

    kind: ModelKind
    snapshot: Path
    size: BenchSize
    questions: dict[int, list[ScoredRequest]]


def measure(work: Work, opened: Callable[[int], Cards], size: BenchSize) -> None:
    """Measure every model, configuration and number of candidates, until the time is spent."""
    work.note(*NOTES)
    work.part.facts["table_rows"] = size.request_table_rows
    found = catalog_model("dlrm-v2")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for kind in KINDS:
            if work.out_of_time(CONFIGURATION_S):
                return
            began = time.perf_counter()
            work.say(f"exporting {kind} with tables of at most {size.request_table_rows} rows")
            spec = served_spec(kind, found, size)
            snapshot = write_random_snapshot(spec, Path(folder), seed=SEED)
            with _serving(ModelSource(snapshot=snapshot, verify=False, dtype="float32"), size) as served:
                questions = {
                    count: [ScoredRequest(one, served.rank(one)) for one in requests]
                    for count, requests in requests_of(spec, found, size).items()
                }
            bench = RankingBench(kind, snapshot, size, questions)
            work.part.facts[f"{kind}_prepare_s"] = time.perf_counter() - began
            _measure_model(work, bench, opened)


def _measure_model(work: Work, bench: RankingBench, opened: Callable[[int], Cards]) -> None:
    for configuration in CONFIGURATIONS:
        if work.out_of_time(CONFIGURATION_S):
            work.note(f"stopped before {bench.kind}, {configuration}.")
            return
        cards = opened(configuration.logical_cards)
        # Emulated cards rank on the CPU, which may have no bfloat16.
        dtype: DtypeChoice = "bfloat16" if cards.cards[0].torch_device.type == "cuda" else "float32"
        if dtype == "bfloat16" and configuration == CONFIGURATIONS[0]:
            # Rounded to bfloat16, a small mistake would not show.
            _measure_configuration(work, bench, cards, Configuration(1, False), "float32", timed=False)
        _measure_configuration(work, bench, cards, configuration, dtype)


class InProcess:
    """A version served in this process."""

    def __init__(self, service: RankingService, model: str) -> None:
        self._service, self._model = service, model

    def rank(self, request: RankRequest) -> Float32Array:
        """Rank a request: float32 [candidates], its scores."""
        began, future = self._service.clock(), Future[Answer]()
        call, lease = Call("embedded", "rank", began, parsed=began), self._service.lease(self._model)
        pending = Pending(request, lease, began + TIMEOUT_S, call, future, None)
        return cast(RankAnswer, self._service.wait_in_thread(pending)).scores

    def stage_seconds(self) -> dict[str, float]:
        """Read the seconds that requests have spent in each stage so far."""
        found = self._samples("shardrank_stage_seconds_sum", "stage")
        return {stage: seconds for stage, seconds in found.items() if stage in STAGES}

    def batches(self) -> dict[str, float]:
        """Count batches so far, by how they were put on a card: `graph` or `launches`."""
        return {"graph": 0.0, "launches": 0.0, **self._samples("shardrank_card_batches_total", "how")}

    def _samples(self, name: str, label: str) -> dict[str, float]:
        families = text_string_to_metric_families(self._service.metrics.render().decode())
        return {one.labels[label]: one.value for family in families for one in family.samples if one.name == name}


@contextmanager
def _serving(source: ModelSource, size: BenchSize) -> Iterator[InProcess]:
    service = RankingService(RequestLimits(max_batch_candidates=size.max_batch_candidates))
    try:
        served = load_served_model(source, service)
        service.install(served)
        yield InProcess(service, served.model)
    finally:
        service.close()


def _source(snapshot: Path, cards: Cards, configuration: Configuration, dtype: DtypeChoice) -> ModelSource:
    return ModelSource(
        snapshot=snapshot,
        cards=configuration.logical_cards,
        card_set=CardSet(cards, CardOptions(hot_gb=0)),
        card_graphs=configuration.graphs,
        num_replicas=max(2, configuration.logical_cards),
        verify=False,
        dtype=dtype,
    )


def _measure_configuration(
    work: Work,
    bench: RankingBench,
    cards: Cards,
    configuration: Configuration,
    dtype: DtypeChoice,
    *,
    timed: bool = True,
) -> None:
    work.say(f"{bench.kind}, {dtype}: {configuration}")
    began = time.perf_counter()
    with _serving(_source(bench.snapshot, cards, configuration, dtype), bench.size) as served:
        load_s = time.perf_counter() - began
        for candidates, questions in bench.questions.items():
            row: dict[str, Any] = {
                "model": bench.kind,
                "candidates": candidates,
                "logical_cards": configuration.logical_cards,
                "graphs": configuration.graphs,
                "dtype": dtype,
                "load_s": load_s,
            }
            difference = max(question.difference(served.rank(question.request)) for question in questions)
            if timed:
                latencies, in_latencies = _latencies(served, questions, bench.size.requests)
                throughput, in_throughput = _throughput(served, questions, bench.size.throughput_s)
                row |= {**latencies, **throughput}
                if configuration.graphs and latencies["share_by_graph"] < GRAPHS_MEANT:
                    work.note(f"{bench.kind}, {candidates} candidates: not by graphs as meant, see share_by_graph.")
                difference = max(difference, in_latencies, in_throughput)
            spread = float(np.concatenate([question.expected for question in questions]).std())
            right = difference <= TOLERANCE[dtype] * spread
            work.add({**row, "largest_difference": difference, "spread_of_scores": spread, "correct": right})


def _latencies(served: InProcess, questions: list[ScoredRequest], count: int) -> tuple[dict[str, Any], float]:
    """One request in flight: figures, and the largest difference of a score."""
    for number in range(min(WARM_UP, count)):
        served.rank(questions[number % len(questions)].request)
    before, batches_before = served.stage_seconds(), served.batches()
    taken, difference = np.empty(count), 0.0
    for number in range(count):
        question = questions[number % len(questions)]
        began = time.perf_counter()
        scores = served.rank(question.request)
        taken[number] = time.perf_counter() - began
        difference = max(difference, question.difference(scores))
    stages = {name: (seconds - before[name]) / count * 1e3 for name, seconds in served.stage_seconds().items()}
    low, p50, p90, p99 = (np.percentile(taken, (10, 50, 90, 99)) * 1e3).tolist()
    batches = {how: number - batches_before[how] for how, number in served.batches().items()}
    figures = {"requests": count, "p10_ms": low, "p50_ms": p50, "p90_ms": p90, "p99_ms": p99, "mean_stage_ms": stages}
    figures["share_by_graph"] = batches["graph"] / sum(batches.values())
    return figures, difference


def _throughput(served: InProcess, questions: list[ScoredRequest], seconds: float) -> tuple[dict[str, Any], float]:
    """IN_FLIGHT requests in flight all the time, which the service joins into batches; as `_latencies`."""
    _answer(served, questions, seconds / 2)  # Graphs of batches of several requests are made at their second coming.
    answered, taken_s, difference = _answer(served, questions, seconds)
    figures = {
        "in_flight": IN_FLIGHT,
        "requests_per_s": answered / taken_s,
        "candidates_per_s": answered * questions[0].expected.size / taken_s,
    }
    return figures, difference


def _answer(served: InProcess, questions: list[ScoredRequest], seconds: float) -> tuple[int, float, float]:
    """Return requests answered, at least one for each client; the seconds that it took; the largest difference."""
    ended = threading.Event()

    def client(number: int) -> tuple[int, float]:
        answered, difference = 0, 0.0
        while not ended.is_set() or not answered:
            question = questions[(number + answered) % len(questions)]
            difference = max(difference, question.difference(served.rank(question.request)))
            answered += 1
        return answered, difference

    began = time.perf_counter()
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        clients = [pool.submit(client, number) for number in range(IN_FLIGHT)]
        ended.wait(seconds)
        ended.set()
        counts, differences = zip(*(one.result() for one in clients), strict=True)
    return sum(counts), time.perf_counter() - began, max(differences)
