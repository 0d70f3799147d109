"""Time ranking requests end to end in local mode, from a parsed request to its scores.

`RankingService.wait_in_thread` is timed: queue, mapping of ids, packing, one copy up, pooling, the dense model, scores
down, and both changes of thread. Parsing JSON or protobuf is not in it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from loadtest.gpu.rows import BenchSize, Results, Row, WrongAnswerError
from loadtest.servers import summed
from loadtest.workloads.catalog import open_workload
from loadtest.workloads.prepare import write_random_snapshot
from serving.embedded import ModelSource, load_served_model
from serving.formats.requests import RankRequest, Response
from serving.models.layers import DtypeChoice
from serving.observe.calls import Call
from serving.rank.service import RankingService
from serving.results import RankResult
from shard_node.bags import Float32Array
from shard_node.cuda.card_set import CardOptions, CardSet

if TYPE_CHECKING:
    from shard_node.cuda.cupy_cards import Cards

LOGICAL_CARDS = (1, 4)
DISTINCT_REQUESTS = 8
WARM_UP = 100
"""Requests before the timed ones: each replica makes a graph of their class at its second one."""
IN_FLIGHT = 8
TIMEOUT_S = 60.0
METRICS = (("shardrank_stage_seconds_sum", "stage"), ("shardrank_card_batches_total", "how"))
TOLERANCE: dict[DtypeChoice, float] = {"float32": 1e-2, "bfloat16": 0.25}
"""Of a score, against float32 on the CPU, as a fraction of the scores' standard deviation."""


def measure_ranking(results: Results, open_cards: Callable[[int], Cards], size: BenchSize) -> None:
    """Time each number of cards, with and without graphs, and each number of candidates."""
    requests: dict[int, list[RankRequest]] = {}
    for candidates in size.candidates:
        workload = open_workload(size.workload, candidates=str(candidates), varied=False)
        drawn = [workload.request(np.random.default_rng(seed)) for seed in range(DISTINCT_REQUESTS)]
        requests[candidates] = [
            RankRequest(each.bags, candidates, each.context_dense, each.candidate_dense, TIMEOUT_S) for each in drawn
        ]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        snapshot = write_random_snapshot(workload.spec, Path(folder))
        with closing(InProcess(ModelSource(snapshot=snapshot, verify=False, dtype="float32"))) as served:
            expected = {candidates: [served.rank(each) for each in drawn] for candidates, drawn in requests.items()}
        for graphs, num_cards in product((True, False), LOGICAL_CARDS):
            cards = open_cards(num_cards)
            # Emulated cards rank on the CPU, which may have no bfloat16.
            dtype: DtypeChoice = "bfloat16" if cards.cards[0].torch_device.type == "cuda" else "float32"
            source = ModelSource(
                snapshot=snapshot,
                cards=num_cards,
                card_set=CardSet(cards, CardOptions(hot_gb=0)),
                card_graphs=graphs,
                num_replicas=max(2, num_cards),
                verify=False,
                dtype=dtype,
            )
            with closing(InProcess(source)) as served:
                for candidates, scores in expected.items():
                    pairs = zip(requests[candidates], scores, strict=True)
                    differences = np.concatenate([served.rank(request) - right for request, right in pairs])
                    difference = float(np.abs(differences).max() / np.concatenate(scores).std())
                    if not difference <= TOLERANCE[dtype]:
                        raise WrongAnswerError(f"{num_cards} cards: a score is {difference:.2e} deviations off")
                    row: Row = {"candidates": candidates, "logical_cards": num_cards, "graphs": graphs, "dtype": dtype}
                    times = _times(served, requests[candidates], size.requests)
                    results.add("ranking", {**row, "difference": difference, **times})


class InProcess:
    """A model served in this process."""

    def __init__(self, source: ModelSource) -> None:
        self._service = RankingService()
        served = load_served_model(source, self._service)
        self._service.install(served)
        self._model = served.model

    def close(self) -> None:
        """Free everything."""
        self._service.close()

    def rank(self, request: RankRequest) -> Float32Array:
        """Return the scores of a request, float32 [candidates]."""
        now = self._service.clock()
        call = Call("embedded", "rank", now, parsed_at=now, deadline=now + TIMEOUT_S, future=Future[Response]())
        call.request, call.lease = request, self._service.lease(self._model)
        return cast(RankResult, self._service.wait_in_thread(call)).scores

    def metrics(self) -> list[dict[str, float]]:
        """Return the seconds of each stage, and the batches on cards by how they were launched."""
        text = self._service.metrics.render().decode()
        return [summed(text, name, label) for name, label in METRICS]


def _times(served: InProcess, requests: Sequence[RankRequest], count: int) -> Row:
    """Time requests one after the other, then IN_FLIGHT at a time, which the service joins into batches."""
    turns = [requests[number % len(requests)] for number in range(count)]
    for request in turns[:WARM_UP]:
        served.rank(request)
    stages, batches = served.metrics()
    times = np.empty(count)
    for number, request in enumerate(turns):
        started_at = time.perf_counter()
        served.rank(request)
        times[number] = (time.perf_counter() - started_at) * 1e3
    stages_after, batches_after = served.metrics()
    counts = {how: number - batches.get(how, 0.0) for how, number in batches_after.items()}
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(served.rank, turns[:WARM_UP]))  # Graphs of larger batches are made at their second one.
        started_at = time.perf_counter()
        list(pool.map(served.rank, turns))
        joined_s = time.perf_counter() - started_at
    return {
        "p50_ms": float(np.percentile(times, 50)),
        "p99_ms": float(np.percentile(times, 99)),
        "stage_ms": {stage: (total - stages.get(stage, 0.0)) / count * 1e3 for stage, total in stages_after.items()},
        "graph_fraction": counts.get("graph", 0.0) / sum(counts.values()),
        "in_flight": IN_FLIGHT,
        "requests_per_s": count / joined_s,
    }
