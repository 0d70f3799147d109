"""The oracle models, two versions of which every answer is known in advance, exactly; their requests, and the judge.

Row r of a table is `factor * pattern(r)`, a vector of small whole numbers: 1 in dimension 0, and in the others numbers
that depend on the row. The factor is 1 in version A and 1024 in version B. So a sum-pooled bag of n ids has exactly n
or 1024 n in dimension 0, its other dimensions tell whether the right rows were added, and a bag of which one part came
from A and one from B gives neither. All numbers are exact in every row format used here: an int8 row has its smallest
value (the bias) in dimension 0 and 255 factors more in its last, so its scale is the factor itself.

The dense model (an `mlp` without hidden layers) reads dimension 0 alone. With t = sum_f w_f n_f / K over the features,

    score of A = sigmoid(t),    score of B = sigmoid(t + STAMP),

since B's weights are A's divided by 1024, which is exact. STAMP is negative and t grows with n, so embeddings and dense
parts of different versions, or embeddings of both, never give the score of either: with d = sum_f w_f b_f / K >= w/K
for the b_f ids that came from the wrong version, the logit is off by 1023 d in A, by -d * 1023/1024 in B, and by STAMP
or t * 1023/1024 if the dense part alone is the wrong one. No logit leaves [-1, 2.5], so no sigmoid is saturated, and
the smallest of these moves a score by 0.0029, against a tolerance of 0.00001.

Odd versions are A, even ones B. Tables of keyed oracles name row r by `ids_of`, any number of 64 bits; one id of 17 in
their questions is a key that was never there, which adds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from loader.errors import ShardrankError
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec, Side
from loader.snapshot.row_source import RowSource
from loader.snapshot.tables import RowDtype, TableSpec
from loader.snapshot.writer import export_snapshot
from loadtest.drill.config import OracleShape
from loadtest.load.senders import Failure, Outgoing, Sender, make_sender
from loadtest.servers import Server
from loadtest.workloads.payloads import Payload
from loadtest.workloads.workload import ID_FACTOR
from serving.client import AsyncClient, LookupResult, RankResult
from serving.client.features import RankFeatures, lookup_request, read_lookup, read_rank
from shard_node.bags import Float32Array, Int64Array

Method = Literal["rank", "lookup"]

FACTORS = np.array([1.0, 1024.0], np.float32)
STAMPS = (0.0, -1.0)
"""The dense model's bias in A and in B."""
LOGIT_SCALE = 24.0
"""K."""
SCORE_TOLERANCE = 1e-5
GOLDEN_TOLERANCE = 1e-4
NUM_GOLDEN = 16
MAX_HOTNESS = 8
FREE_ROWS = 8
"""The last of each table are in no question."""
ABSENT_SHARE = 16
"""In questions to tables with keys, one more id for so many is of none."""
MAX_CANDIDATES = 16
MAX_LOOKUP_BAGS = 4

BLOCK_ROWS = 1 << 16
ROW_FACTOR = np.int64(pow(int(ID_FACTOR), -1, 1 << 64) - (1 << 64))
"""The inverse of `ID_FACTOR` modulo 2^64."""

# Row dtype, and how many different numbers a row is made of: 32 * 1024 is the largest power of two that float16 holds.
TABLES: dict[str, tuple[RowDtype, int]] = {"items": ("int8", 256), "users": ("fp32", 256), "tags": ("fp16", 32)}
FEATURES: dict[str, tuple[str, Side, float]] = {
    "user": ("users", "context", 1.0),
    "history": ("items", "context", 1.25),
    "topic": ("tags", "context", 1.5),
    "item": ("items", "candidate", 1.75),
    "tag": ("tags", "candidate", 2.0),
}
"""Table, side and w_f of each, in the order of the model."""
FEATURE_WEIGHTS = np.array([weight for _, _, weight in FEATURES.values()])


def oracle_spec(shape: OracleShape) -> ModelSpec:
    """Return three tables and five features, context and candidates, two tables with two features each."""
    return ModelSpec(
        model=shape.model,
        tables=tuple(
            TableSpec(
                name=name,
                num_embeddings=num_rows + (num_rows + 3) // 4 * shape.keyed,
                keys="int64" if shape.keyed else None,
                embedding_dim=shape.embedding_dim,
                feature_names=tuple(feature for feature, (table, _, _) in FEATURES.items() if table == name),
                dtype=dtype,
            )
            for name, (dtype, _) in TABLES.items()
            for num_rows in [getattr(shape, name)]
        ),
        features=tuple(FeatureSpec(name=feature, side=side) for feature, (_, side, _) in FEATURES.items()),
        dense_model=DenseModelSpec(kind="mlp", config={"hidden": []}),
    )


def letter_of(version: int) -> int:
    """Return 0 for A, an odd version; 1 for B."""
    return (version + 1) % 2


def rows_in(table: TableSpec) -> int:
    """Return how many rows a version has when it is exported; a table with keys has room for a quarter more."""
    return table.num_embeddings * 4 // 5 if table.keys else table.num_embeddings


def ids_of(table: TableSpec, rows: Int64Array) -> Int64Array:
    """Return what names rows, int64 [n]: their keys, or they themselves."""
    return rows * ID_FACTOR if table.keys else rows


def _known(table: TableSpec, bag: Sequence[int]) -> Int64Array:
    ids = np.array(bag, np.int64)
    return ids[(ids * ROW_FACTOR).view(np.uint64) < table.num_embeddings] if table.keys else ids


def version_rows(table: TableSpec, version: int, rows: Int64Array) -> Float32Array:
    """Return rows of a version by their ids: float32 [n, dim], its factor times whole numbers from 1 to 256."""
    _, codes = TABLES[table.name]
    dims = np.arange(table.embedding_dim, dtype=np.uint64)
    # Two rounds of a multiplicative hash: neighbours in row and dimension get unrelated codes.
    mixed = rows.astype(np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15) + dims * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    pattern: Float32Array = (1 + (mixed >> np.uint64(40)) % np.uint64(codes)).astype(np.float32)
    pattern[:, 0], pattern[:, -1] = 1.0, codes
    pattern *= FACTORS[letter_of(version)]
    return pattern


class OracleRows(RowSource):
    """A table's rows in a version, made as they are asked for."""

    def __init__(self, table: TableSpec, version: int) -> None:
        super().__init__(rows_in(table), table.embedding_dim)
        self._table, self._version = table, version

    def blocks(self, first_row: int, max_rows: int) -> Iterator[Float32Array]:
        """Yield blocks of up to `BLOCK_ROWS`, as `RowSource.blocks`."""
        end = min(first_row + max_rows, self.num_embeddings)
        for first in range(first_row, end, BLOCK_ROWS):
            rows = np.arange(first, min(end, first + BLOCK_ROWS))
            yield version_rows(self._table, self._version, ids_of(self._table, rows))


def sigmoid(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """1 / (1 + exp(-x)); no logit of the oracle, of a mixture neither, is so far below 0 that this overflows."""
    return 1.0 / (1.0 + np.exp(-x))


def golden_requests(spec: ModelSpec, version: int) -> GoldenRequests:
    """Return rank questions with the scores of a version."""
    questions = make_questions(spec, NUM_GOLDEN, seed=1)["rank"]
    sides = [question.sides() for question in questions]
    requests = [{"context": {"sparse": context}, "candidates": {"sparse": bags}} for context, bags in sides]
    scores = np.concatenate([question.expected[letter_of(version)] for question in questions])
    return GoldenRequests.from_requests(requests, scores)


def write_oracle(spec: ModelSpec, store: Path, version: int, golden: GoldenRequests | None = None) -> Path:
    """Export a version into a store, and return its folder; `golden` replaces the right golden requests."""
    letter, dim = letter_of(version), spec.tables[0].embedding_dim
    weight = torch.zeros(1, dim * len(spec.features))
    # w_f / (K factor) in the column of each feature's dimension 0.
    weight[0, ::dim] = torch.from_numpy(FEATURE_WEIGHTS / LOGIT_SCALE) / float(FACTORS[letter])
    keyed = [table for table in spec.tables if table.keys]
    return export_snapshot(
        store,
        spec,
        rows={table.name: OracleRows(table, version) for table in spec.tables},
        keys={table.name: ids_of(table, np.arange(rows_in(table))) for table in keyed},
        dense={"mlp.layers.0.weight": weight, "mlp.layers.0.bias": torch.tensor([STAMPS[letter]])},
        golden=golden or golden_requests(spec, version),
        golden_tolerance=GOLDEN_TOLERANCE,
        version=version,
    )


Bags: TypeAlias = dict[str, list[list[int]]]
"""Ids by feature and bag."""


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """One request and what A and B answer to it.

    Attributes:
        bags: of all features for rank, one for the context and one for each candidate; of some for lookup.
        counts: int64, ids per bag that are there: [candidates, features] for rank; [bags] for lookup, by feature.
        expected: float32 [2, values], the answers of A and B: scores, or all features' vectors one after the other.
    """

    method: Method
    bags: Bags
    counts: Int64Array
    expected: Float32Array

    def sides(self) -> tuple[dict[str, list[int]], Bags]:
        """Return the ids of the context's features, and the candidates' bags, as a client has them."""
        context = {name: bags[0] for name, bags in self.bags.items() if FEATURES[name][1] == "context"}
        return context, {name: bags for name, bags in self.bags.items() if name not in context}


def make_questions(spec: ModelSpec, num_each: int, seed: int = 0) -> dict[Method, list[Question]]:
    """Draw `num_each` questions of each method, the same for the same seed; bags have 1 to 8 ids."""
    rng, tables = np.random.default_rng(seed), {table.name: table for table in spec.tables}

    def draw(sizes: Mapping[str, int]) -> Bags:
        bags: Bags = {}
        for name, size in sizes.items():
            table = tables[FEATURES[name][0]]
            rows = rows_in(table) - FREE_ROWS
            num_drawn = rows + rows // ABSENT_SHARE if table.keys else rows
            drawn = [rng.integers(0, num_drawn, length) for length in rng.integers(1, 1 + MAX_HOTNESS, size)]
            # Beyond the capacity, so that these keys never come.
            bags[name] = [ids_of(table, bag + table.num_embeddings * (bag >= rows)).tolist() for bag in drawn]
        return bags

    def known(bags: Bags) -> list[tuple[TableSpec, list[Int64Array]]]:
        of_features = [(tables[FEATURES[name][0]], of_feature) for name, of_feature in bags.items()]
        return [(table, [_known(table, bag) for bag in of_feature]) for table, of_feature in of_features]

    questions: dict[Method, list[Question]] = {"rank": [], "lookup": []}
    for _ in range(num_each):
        candidates = int(rng.integers(1, MAX_CANDIDATES + 1))
        bags = draw({name: 1 if side == "context" else candidates for name, (_, side, _) in FEATURES.items()})
        lengths = [np.broadcast_to([len(bag) for bag in of_feature], candidates) for _, of_feature in known(bags)]
        counts = np.stack(lengths, axis=1)
        scores = sigmoid(counts @ FEATURE_WEIGHTS / LOGIT_SCALE + np.array(STAMPS)[:, None])
        questions["rank"].append(Question("rank", bags, counts, scores.astype(np.float32)))
        chosen = rng.permutation(list(FEATURES))[: rng.integers(1, len(FEATURES) + 1)].tolist()
        bags = draw({name: int(rng.integers(1, MAX_LOOKUP_BAGS + 1)) for name in chosen})
        # Whole numbers below 2^24 even times 1024, so they are exact in any order.
        rows = [(table, bag) for table, of_feature in known(bags) for bag in of_feature]
        vectors = np.concatenate([version_rows(table, 1, bag).sum(axis=0) for table, bag in rows])
        counts = np.array([bag.size for _, bag in rows])
        questions["lookup"].append(Question("lookup", bags, counts, FACTORS[:, None] * vectors))
    return questions


def judge(question: Question, version: int, values: Float32Array) -> Failure | None:
    """Judge an answer that names a version: its scores, or vectors in the order of `question.bags`, float32 [n].

    Returns None if it is exactly that of the version; `mixed` if it is made of parts of A and of B, or of one while it
    names the other; `wrong` if it is anything else.
    """
    expected = question.expected
    if version < 1 or values.shape != expected.shape[1:]:
        return Failure("wrong", f"version {version} with {values.size} values, expected {expected.shape[1]}")
    letter = letter_of(version)
    # A NaN is not within any tolerance.
    right = np.abs(values - expected[letter]) <= (SCORE_TOLERANCE if question.method == "rank" else 0.0)
    if right.all():
        return None
    if question.method == "rank":
        is_mixed = _is_mixed_rank(question, values, right)
    else:
        is_mixed = _is_mixed_lookup(question, letter, values)
    wrong = int(np.argmin(right))
    a, b = expected[:, wrong].tolist()
    difference = (
        f"{question.method}: names version {version} ({'AB'[letter]}), but value {wrong} of {values.size} is "
        f"{values[wrong]!r}; A has {a!r}, B has {b!r}; {int((~right).sum())} values differ"
    )
    return Failure("mixed" if is_mixed else "wrong", difference)


def _is_mixed_lookup(question: Question, letter: int, values: Float32Array) -> bool:
    """Whether each bag of n ids has a + 1024 b in dimension 0 with a + b = n, and not all b are the named version's."""
    first = values.reshape(len(question.counts), -1)[:, 0].astype(np.float64)
    from_b = (first - question.counts) / float(FACTORS[1] - FACTORS[0])
    possible = (from_b == np.floor(from_b)) & (from_b >= 0) & (from_b <= question.counts)
    return bool(possible.all() and (from_b != letter * question.counts).any())


def _is_mixed_rank(question: Question, values: Float32Array, right: np.ndarray) -> bool:
    """Whether each score that is not right is that of some choice of A or B for each row and for the dense model."""
    for candidate in np.flatnonzero(~right).tolist():
        # The logit depends on sum_f w_f b_f alone, so different choices of the b_f fall together: some hundred.
        reached = np.zeros(1)
        for count, weight in zip(question.counts[candidate].tolist(), FEATURE_WEIGHTS.tolist(), strict=True):
            reached = np.unique(reached[:, None] + weight * np.arange(count + 1))
        embeddings = question.counts[candidate] @ FEATURE_WEIGHTS + float(FACTORS[1] - FACTORS[0]) * reached
        scores = sigmoid(embeddings / (LOGIT_SCALE * FACTORS[:, None]) + np.array(STAMPS)[:, None])
        if not (np.abs(scores - values[candidate]) <= SCORE_TOLERANCE).any():
            return False
    return True


APIS = ("http rank", "grpc rank", "http lookup", "grpc lookup")
# Which of `APIS` request i goes over, i mod 6: two of three are ranked, one of two goes over HTTP.
API_PATTERN = (0, 1, 2, 0, 1, 3)
METHODS: tuple[Method, ...] = ("rank", "lookup")
PROTOBUF = (("content-type", "application/x-protobuf"), ("accept", "application/x-protobuf"))
# Deadline of each request, which brings it; from when it is due, it is also what the load waits at most.
TIMEOUT_MS = 5000
QUESTIONS_EACH = 256
# Opened before the load begins, so that each serving process has some; requests wait for them.
HTTP_CONNECTIONS = 16


def api_of(number: int) -> int:
    """Return the place in `APIS` of what request `number` of a load goes over."""
    return API_PATTERN[number % len(API_PATTERN)]


def oracle_questions(shape: OracleShape) -> list[Question]:
    """Return the questions of a load: request i asks number i modulo their count, over its API."""
    by_method = make_questions(oracle_spec(shape), QUESTIONS_EACH)
    return [by_method[METHODS[api // 2]][number] for number in range(QUESTIONS_EACH) for api in API_PATTERN]


def judge_result(question: Question, request: Outgoing, result: RankResult | LookupResult) -> Failure | None:
    """Judge what a client has read, and note the version that it names."""
    request.verdict = result.version
    if isinstance(result, RankResult):
        return judge(question, result.version, result.scores)
    # Vectors that are missing are values too few, which is judged.
    vectors: dict[str, Any] = {**dict.fromkeys(question.bags, ()), **result.embeddings}
    return judge(question, result.version, np.concatenate([vectors[name] for name in question.bags], axis=None))


class ClientSender:
    """Asks the questions of a load by the Python client, with its retries, of the servers at some addresses."""

    def __init__(self, shape: OracleShape, addresses: Sequence[str]) -> None:
        self._model, self._questions, self._client = shape.model, oracle_questions(shape), AsyncClient(addresses)

    async def open(self, within_s: float) -> None:
        """Ask for the model's description."""
        await self._client.describe(self._model, timeout_ms=int(1000 * within_s))

    async def aclose(self) -> None:
        """Close the client."""
        await self._client.close()

    async def ask(self, request: Outgoing) -> Failure | None:
        """Ask a question. Returns why there is no right answer; None if there is."""
        question, request.sent = self._questions[request.number % len(self._questions)], time.monotonic()
        try:
            if question.method == "rank":
                return judge_result(question, request, await self._client.rank(self._model, *question.sides()))
            return judge_result(question, request, await self._client.lookup(self._model, question.bags))
        except ShardrankError as error:
            return Failure(error.kind, str(error))
        finally:
            request.finished_at = time.monotonic()


async def oracle_senders(shape: OracleShape, server: Server | Sequence[Server]) -> Sequence[Sender | ClientSender]:
    """Make the senders of the oracle's questions, over HTTP and over gRPC, with the judge of their answers.

    Several servers are asked by the Python client; one is by senders that never repeat a request.
    """
    if not isinstance(server, Server):
        return [ClientSender(shape, [each.target(api) for each in server]) for api in ("json", "grpc")]
    questions = oracle_questions(shape)
    over_http, over_grpc = list[Payload](), list[Payload]()
    for question in questions:
        message: Any = lookup_request(question.bags, {})
        if question.method == "rank":
            message = RankFeatures(*question.sides(), weights={}, context_dense=None, candidate_dense=None).by_name()
        message.model, message.timeout_ms = shape.model, TIMEOUT_MS
        body = message.SerializeToString()
        over_http.append(Payload(f"/v1/models/{shape.model}:{question.method}", body, PROTOBUF, 0))
        over_grpc.append(Payload(f"/shardrank.v1.RankingService/{question.method.title()}", body, (), 0))

    def check(request: Outgoing, body: bytes) -> Failure | None:
        question = questions[request.number % len(questions)]
        try:
            return judge_result(question, request, read_rank(body) if question.method == "rank" else read_lookup(body))
        except ShardrankError as error:
            return Failure(error.kind, str(error))

    http_sender = await make_sender(server.target("json"), over_http, check, connections=HTTP_CONNECTIONS)
    return http_sender, await make_sender(server.target("grpc"), over_grpc, check)
