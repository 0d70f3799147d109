"""Measure one ranking request end to end in local mode, from a parsed request to its scores.

What is timed is `RankingService.rank_in_thread`: queue, mapping of ids, packing, one copy up, pooling, the dense model,
scores down, and both changes of thread. Parsing JSON or protobuf is not in it.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families
from pydantic import JsonValue

from loader.snapshot.manifest import DenseModelSpec, ModelSpec
from loader.snapshot.row_source import RowsFromBlocks
from loader.snapshot.writer import export_snapshot
from loadtest.bench_lookup import DISTINCT_ROWS, distinct_rows
from loadtest.gpu.parts import BenchSize, Work
from router.feature_schema import FeatureSchema
from serving.cli.capacity import catalog_model
from serving.formats.requests import Answer, RankAnswer, RankRequest
from serving.limits import RequestLimits
from serving.models.ranking_models import DtypeChoice, build_model
from serving.observe.calls import Call
from serving.rank.batcher import Pending
from serving.rank.service import RankingService
from serving.versions.loading import ModelSource, load_served_model
from shard_node.bags import Float32Array, KeyedBags
from shard_node.cuda.card_set import CardOptions, CardSet
from shard_node.cuda.cards import Cards

ModelKind = Literal["dlrm", "dcn_v2"]
KINDS: tuple[ModelKind, ...] = ("dlrm", "dcn_v2")
# With bags of up to 100 rows, products of pooled vectors, and so logits, stay of the order of 1.
ROW_SCALE = np.float32(0.05)
BOTTOM, TOP = (512, 256, 128), (1024, 1024, 512, 256)
CROSS_LAYERS, CROSS_RANK = 3, 512


@dataclass(frozen=True)
class BenchModel:
    """One of the models.

    Attributes:
        kind: of its dense part.
        spec: its description; features are all the candidates', as in DLRM-v2.
        hotness: by feature, ids in a bag.
    """

    kind: ModelKind
    spec: ModelSpec
    hotness: Mapping[str, int]

    @classmethod
    def make(cls, kind: ModelKind, table_rows: int, most_hotness: int, layer_divisor: int) -> BenchModel:
        """Make DLRM-v2 with tables of at most `table_rows`, and bags of at most `most_hotness` ids.

        Hidden layers are `layer_divisor` times smaller than published; the bottom MLP still ends with dim 128.
        """
        found = catalog_model("dlrm-v2")
        tables = tuple(
            table.model_copy(update={"num_embeddings": min(table.num_embeddings, table_rows)})
            for table in found.spec.tables
        )
        name = f"bench-{kind.replace('_', '-')}"
        spec = found.spec.model_copy(
            update={"model": name, "tables": tables, "dense_model": _dense_model(kind, layer_divisor)}
        )
        hotness = {feature: min(ids, most_hotness) for feature, ids in found.hotness.items()}
        return cls(kind, spec, hotness)

    def export(self, store: Path) -> Path:
        """Write a snapshot: rows that repeat after a while, random weights that keep the size of what passes ReLUs."""
        rows = {
            table.name: RowsFromBlocks(
                _blocks(table.num_embeddings, table.embedding_dim), table.num_embeddings, table.embedding_dim
            )
            for table in self.spec.tables
        }
        draw = torch.Generator().manual_seed(5)
        dense = {
            name: torch.randn(tensor.shape, generator=draw) * (2 / tensor.shape[-1]) ** 0.5
            for name, tensor in build_model(self.spec).state_dict().items()
        }
        return export_snapshot(store, self.spec, rows=rows, dense=dense)

    def request(self, candidates: int, seed: int) -> RankRequest:
        """Make a request as an API's codec would: uniform ids, and dense inputs of the order of 1."""
        rng = np.random.default_rng(seed)
        schema = FeatureSchema.of(self.spec)
        hotness = np.array([self.hotness[feature.name] for feature in schema.features])
        rows = np.array([table.num_embeddings for table in schema.layout.tables])[schema.table_index]
        values = rng.integers(0, np.repeat(rows, hotness * candidates))
        keys = np.arange(hotness.size, dtype=np.int32)
        bags_per_key = np.full(hotness.size, candidates, np.int64)
        bags = KeyedBags.from_lengths(keys, bags_per_key, np.repeat(hotness, candidates), values)
        dense = rng.standard_normal((candidates, self.spec.dense_inputs.candidate), dtype=np.float32)
        return RankRequest(bags, candidates, np.zeros(0, np.float32), dense, TIMEOUT_S)


def _dense_model(kind: ModelKind, divisor: int) -> DenseModelSpec:
    bottom = [*(size // divisor for size in BOTTOM[:-1]), BOTTOM[-1]]
    top = [size // divisor for size in TOP]
    config: dict[str, JsonValue] = {"bottom_mlp": [*bottom], "top_mlp": [*top]}
    if kind == "dcn_v2":
        cross: dict[str, JsonValue] = {"num_cross_layers": CROSS_LAYERS, "low_rank": CROSS_RANK // divisor}
        config = {"bottom_mlp": [*bottom], "deep": [*top], **cross}
    return DenseModelSpec(kind=kind, config=config)


@lru_cache(maxsize=1)
def _block(embedding_dim: int) -> Float32Array:
    return distinct_rows(embedding_dim) * ROW_SCALE


def _blocks(num_rows: int, embedding_dim: int) -> Iterator[Float32Array]:
    block = _block(embedding_dim)
    for first in range(0, num_rows, DISTINCT_ROWS):
        yield block[: num_rows - first]


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

    model: BenchModel
    snapshot: Path
    size: BenchSize
    questions: dict[int, list[ScoredRequest]]


def measure(work: Work, opened: Callable[[int], Cards], size: BenchSize) -> None:
    """Measure every model, configuration and number of candidates, until the time is spent."""
    work.note(*NOTES)
    work.part.facts["table_rows"] = size.request_table_rows
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for kind in KINDS:
            if work.out_of_time(CONFIGURATION_S):
                return
            model = BenchModel.make(kind, size.request_table_rows, size.request_hotness, size.layer_divisor)
            began = time.perf_counter()
            work.say(f"exporting {kind} with tables of at most {size.request_table_rows} rows")
            snapshot = model.export(Path(folder))
            bench = RankingBench(model, snapshot, size, _questions(model, snapshot, size))
            work.part.facts[f"{kind}_prepare_s"] = time.perf_counter() - began
            _measure_model(work, bench, opened)


def _measure_model(work: Work, bench: RankingBench, opened: Callable[[int], Cards]) -> None:
    for configuration in CONFIGURATIONS:
        if work.out_of_time(CONFIGURATION_S):
            work.note(f"stopped before {bench.model.kind}, {configuration}.")
            return
        cards = opened(configuration.logical_cards)
        # Emulated cards rank on the CPU, which may have no bfloat16.
        dtype: DtypeChoice = "bfloat16" if cards.cards[0].torch_device.type == "cuda" else "float32"
        if dtype == "bfloat16" and configuration == CONFIGURATIONS[0]:
            # Rounded to bfloat16, a small mistake would not show.
            _measure_configuration(work, bench, cards, Configuration(1, False), "float32", timed=False)
        _measure_configuration(work, bench, cards, configuration, dtype)


def _questions(model: BenchModel, snapshot: Path, size: BenchSize) -> dict[int, list[ScoredRequest]]:
    source = ModelSource(snapshot=snapshot, verify=False, dtype="float32")
    with _serving(source, size) as served:
        requests = {
            count: [model.request(count, seed) for seed in range(DISTINCT_REQUESTS)] for count in size.candidates
        }
        return {count: [ScoredRequest(one, served.rank(one)) for one in some] for count, some in requests.items()}


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
        text = self._service.metrics.render().decode()
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
        return {one.labels[label]: one.value for one in samples if one.name == name}


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
    work.say(f"{bench.model.kind}, {dtype}: {configuration}")
    began = time.perf_counter()
    with _serving(_source(bench.snapshot, cards, configuration, dtype), bench.size) as served:
        load_s = time.perf_counter() - began
        for candidates, questions in bench.questions.items():
            row: dict[str, Any] = {
                "model": bench.model.kind,
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
                    work.note(
                        f"{bench.model.kind}, {candidates} candidates: not by graphs as meant, see share_by_graph."
                    )
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
