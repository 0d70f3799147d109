"""A small model with one of everything, requests to it, the scores it must give, and real servers over it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import torch

from loader.registry.fleet import VersionStats
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import DenseInputs, DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.tables import HashMapping, VocabularyMapping
from router.id_mapping import hashed_rows
from router.plan import Plan
from serving.config import ServeConfig
from serving.embedded import ModelSource, load_served_model
from serving.formats.json_reader import JsonCodec
from serving.formats.requests import Buffer, Codec, Encoded, Method, Response
from serving.formats.schema import RequestSchema
from serving.limits import RequestLimits
from serving.models.inputs import SequenceInput
from serving.models.ranking_models import build_model
from serving.observe.calls import Call
from serving.proto.shardrank.v1 import ranking_pb2, ranking_pb2_grpc
from serving.rank.service import RankingService, answer
from serving.server import Listening, running_server
from serving.versions.loaded_version import LoadedVersion, LoadOptions
from shard_node.answer import Answer as ShardAnswer
from shard_node.answer import ReplyEncoding
from shard_node.bags import Bags
from shard_node.node import ShardNode
from shardrank_testing.nodes import NearShard
from shardrank_testing.ranking import inputs_of, random_tensors
from shardrank_testing.snapshots import table_of, write_snapshot
from shardrank_testing.topologies import decoded_tables, make_node

MODEL = "films"
CITIES = ["Paris", "Oslo", "Zürich", "北京", "Lima"]
HASH_SEED = 5
FILMS = 777


def api_spec() -> ModelSpec:
    """Identity, hash, string vocabulary; sum, mean, none; weights; context and candidates; reject and skip."""
    return ModelSpec(
        model=MODEL,
        tables=(
            table_of("users", 1000, 8, "user"),
            table_of("films", FILMS, 8, "film", "history"),
            table_of("genres", 19, 4, "genre", pooling="mean", dtype="fp32", unknown_id="skip"),
            table_of("tags", 257, 4, "tag", "liked-tag", dtype="int4"),
            table_of("cities", len(CITIES), 4, "city", dtype="fp16", id_mapping=VocabularyMapping(id_type="string")),
            table_of("devices", 64, 4, "device", dtype="fp32", id_mapping=HashMapping(seed=HASH_SEED)),
        ),
        features=(
            FeatureSpec(name="user", side="context"),
            FeatureSpec(name="history", side="context", pooling="none"),
            FeatureSpec(name="film", side="candidate"),
            FeatureSpec(name="genre", side="candidate"),
            FeatureSpec(name="tag", side="candidate", weighted=True),
            FeatureSpec(name="liked-tag", side="context", weighted=True),
            FeatureSpec(name="city", side="context"),
            FeatureSpec(name="device", side="candidate"),
        ),
        dense_inputs=DenseInputs(context=2, candidate=3),
        dense_model=DenseModelSpec(
            kind="target_attention",
            config={"history_feature": "history", "target_feature": "film", "attention_hidden": [8], "hidden": [8]},
        ),
    )


def api_request(seed: int = 0, num_candidates: int = 5) -> dict[str, Any]:
    """A valid rank request in the JSON form, with empty bags, duplicates, weights and flat lists."""
    rng = np.random.default_rng(seed)

    def bags(limit: int, count: int, longest: int = 3) -> list[list[int]]:
        return [rng.integers(0, limit, int(rng.integers(0, longest + 1))).tolist() for _ in range(count)]

    def floats(*shape: int) -> Any:
        return rng.standard_normal(shape, dtype=np.float32).tolist()

    tags = bags(257, num_candidates)
    return {
        "context": {
            "sparse": {
                "user": [int(rng.integers(1000))],
                "history": rng.integers(0, FILMS, 4).tolist(),
                "liked-tag": [3, 3, 200],
                "city": [CITIES[int(rng.integers(len(CITIES)))], "Oslo"],
            },
            "weights": {"liked-tag": [0.5, -1.0, 2.0]},
            "dense": floats(2),
        },
        "candidates": {
            "sparse": {
                "film": rng.integers(0, FILMS, num_candidates).tolist(),
                "genre": bags(25, num_candidates),
                "tag": tags,
                "device": [[2**63 - 1 - int(one)] for one in rng.integers(0, 100, num_candidates)],
            },
            "weights": {"tag": [floats(len(bag)) for bag in tags]},
            "dense": floats(num_candidates, 3),
        },
        "timeout_ms": 30_000,
    }


@dataclass
class ApiModel:
    """A snapshot on disk and what it was made from."""

    path: Path
    spec: ModelSpec
    tables: dict[str, np.ndarray]
    tensors: dict[str, torch.Tensor]

    def rows(self, name: str, ids: list[Any]) -> list[int]:
        """The rows that ids of a feature map to, unknown ones left out, by definition."""
        table = self.spec.table_of(name)
        if name == "city":
            return [CITIES.index(text) for text in ids]
        if name == "device":
            return [
                int(hashed_rows(np.array([one]), np.array([HASH_SEED], np.uint64), np.array([64], np.uint64))[0])
                for one in ids
            ]
        return [one for one in ids if one < table.num_embeddings]

    def pooled(self, name: str, ids: list[Any], weights: list[float] | None) -> np.ndarray:
        table = self.tables[self.spec.table_of(name).name].astype(np.float64)
        rows = self.rows(name, ids)
        total = np.zeros(table.shape[1])
        for position, row in enumerate(rows):
            total += (1.0 if weights is None else weights[position]) * table[row]
        return total / max(1, len(rows)) if self.spec.pooling_of(name) == "mean" else total

    def scores(self, request: dict[str, Any]) -> np.ndarray:
        """float32 [N], what the float32 torch model gives for a request, by plain loops over the decoded rows."""
        context, candidates = request["context"], request["candidates"]
        count = len(candidates["dense"])
        rows = []
        for number in range(count):
            columns = []
            for feature in self.spec.features:
                if self.spec.pooling_of(feature.name) == "none":
                    continue
                part = context if feature.side == "context" else candidates
                ids = part["sparse"][feature.name]
                weights = part.get("weights", {}).get(feature.name)
                if feature.side == "candidate":
                    ids = ids[number] if isinstance(ids[number], list) else [ids[number]]
                    weights = None if weights is None else weights[number]
                columns.append(self.pooled(feature.name, ids, weights))
            rows.append(np.concatenate(columns))
        dense = np.array([[*context["dense"], *one] for one in candidates["dense"]], np.float32)
        history = self.tables["films"][context["sparse"]["history"]].astype(np.float32)
        sequence = SequenceInput(torch.from_numpy(history)[None], torch.ones(1, len(history), dtype=torch.bool))
        inputs = inputs_of(
            self.spec,
            torch.from_numpy(dense),
            torch.from_numpy(np.stack(rows).astype(np.float32)),
            torch.zeros(count, dtype=torch.int64),
            {"history": sequence},
        )
        model = build_model(self.spec)
        model.load_state_dict(self.tensors)
        with torch.inference_mode():
            return model.eval().scores(inputs)[0].numpy()


def write_api_model(
    store: Path,
    version: int = 1,
    seed: int = 0,
    golden: GoldenRequests | None = None,
    scale: float = 1.0,
    spec: ModelSpec | None = None,
    **export: Any,
) -> ApiModel:
    """Exports the model, or one with another spec; its dense weights are of the order of `scale`."""
    spec = spec or api_spec()
    tensors = {name: scale * tensor for name, tensor in random_tensors(spec, seed).items()}
    path, tables = write_snapshot(
        store,
        spec,
        seed,
        dense=tensors,
        vocabularies={"cities": CITIES},
        version=version,
        golden=golden,
        **export,
    )
    return ApiModel(path, spec, decoded_tables(spec, tables), tensors)


def served_service(model: ApiModel, limits: RequestLimits | None = None, **options: Any) -> RankingService:
    """A service with the model live in float32, its rows in this process. The caller closes it."""
    service = RankingService(limits, expected_models=[MODEL])
    options = {"dtype": "float32", "sharding": "hash", **options}
    service.install(load_served_model(ModelSource(snapshot=model.path, **options), service))
    return service


@dataclass
class Api:
    """A running server and clients of it."""

    service: RankingService
    listening: Listening
    http: httpx.AsyncClient
    channel: grpc.aio.Channel
    gate: Gate | None = None
    stub: ranking_pb2_grpc.RankingServiceStub = field(init=False)

    def __post_init__(self) -> None:
        self.stub = ranking_pb2_grpc.RankingServiceStub(self.channel)

    @property
    def http_address(self) -> str:
        return f"{self.listening.host}:{self.listening.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"{self.listening.host}:{self.listening.grpc_port}"


@contextlib.asynccontextmanager
async def running_api(service: RankingService) -> AsyncIterator[Api]:
    """HTTP and gRPC over a service, on free ports."""
    config = ServeConfig(http_port=0, grpc_port=0, shutdown_delay_s=0)
    async with running_server(service, config, drain_timeout_s=1.0) as listening:
        base = f"http://{listening.host}:{listening.http_port}"
        async with (
            httpx.AsyncClient(base_url=base, timeout=30) as http,
            grpc.aio.insecure_channel(f"{listening.host}:{listening.grpc_port}") as channel,
        ):
            yield Api(service, listening, http, channel)


class KeptAnswers:
    """A codec that keeps each answer as it was before it was encoded."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.api, self.method = codec.api, codec.method
        self.answers: list[Response] = []

    def read(self, body: Buffer, limits: RequestLimits) -> Any:
        read = self._codec.read(body, limits)

        def keep(answer: Response) -> Encoded:
            self.answers.append(answer)
            return read.encode(answer)

        return SimpleNamespace(model=read.model, version=read.version, key=read.key, parse=read.parse, encode=keep)


class Waiting:
    """Whoever waits for an answer: stays, and takes it at once."""

    owner = ""

    def __init__(self, watch: Callable[[Callable[[], None]], Any] = lambda callback: None) -> None:
        self.watch = watch

    def once_sent(self, callback: Callable[[], None]) -> None:
        callback()


async def ask(
    service: RankingService,
    request: Any,
    method: Method = "rank",
    watch: Any = None,
    model: str = MODEL,
    call: Call | None = None,
) -> Any:
    """The answer to a request in the JSON form, as the one road gives it to any API."""
    codec = KeptAnswers(JsonCodec(method, model, "embedded"))

    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    call = call or service.admit(codec.api, method, None)
    await answer(service, call, codec, body, Waiting() if watch is None else Waiting(watch))
    return codec.answers[0]


class Gate:
    """Holds lookups back until it is opened: makes a replica busy for as long as a test wants."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.waiting = threading.Semaphore(0)

    async def wait_until_busy(self) -> None:
        """Returns once one more lookup waits at the gate."""
        await asyncio.to_thread(self.waiting.acquire)

    async def pass_through(self) -> None:
        self.waiting.release()
        await asyncio.to_thread(self.open.wait)


class GatedShard(NearShard):
    """A shard in this process that answers when its gate is open."""

    def __init__(self, node: ShardNode, gate: Gate) -> None:
        super().__init__(node)
        self._gate = gate

    async def answer(self, model: str, version: int, bags: Bags, forms: ReplyEncoding) -> ShardAnswer:
        if not self._gate.open.is_set():
            await self._gate.pass_through()
        return await super().answer(model, version, bags, forms)


@contextlib.contextmanager
def gated_service(model: ApiModel, gate: Gate, limits: RequestLimits | None = None) -> Iterator[RankingService]:
    """A service of one replica whose lookups wait at a gate, which is opened at the end at the latest."""
    service, snapshot = RankingService(limits, expected_models=[MODEL]), Snapshot.open(model.path)
    plan = Plan.make(snapshot.spec)
    node = make_node(snapshot, plan, 0)
    served = LoadedVersion.load(
        snapshot,
        plan,
        lambda on_retry: [GatedShard(node, gate)],
        LoadOptions(dtype="float32"),
        limits=service.limits,
        metrics=service.metrics,
        clock=service.clock,
        on_close=node.close,
    )
    service.install(served)
    try:
        yield service
    finally:
        gate.open.set()
        service.close()


@contextlib.contextmanager
def api_service(model: ApiModel, limits: RequestLimits | None = None, **options: Any) -> Iterator[RankingService]:
    """A service that is closed at the end."""
    service = served_service(model, limits, **options)
    try:
        yield service
    finally:
        service.close()


@contextlib.asynccontextmanager
async def served_api(model: ApiModel, limits: RequestLimits | None = None, **options: Any) -> AsyncIterator[Api]:
    """HTTP and gRPC over a service of their own."""
    with api_service(model, limits, **options) as service:
        async with running_api(service) as api:
            yield api


@contextlib.asynccontextmanager
async def gated_api(model: ApiModel, limits: RequestLimits | None = None) -> AsyncIterator[Api]:
    """HTTP and gRPC over a service whose lookups wait at `gate`."""
    gate = Gate()
    with gated_service(model, gate, limits) as service:
        async with running_api(service) as api:
            api.gate = gate
            yield api


async def until(condition: Callable[[], object]) -> None:
    """Waits for another party's state, which notifies nobody when it changes."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def counted_turns() -> AsyncIterator[list[int]]:
    """Count the turns that others have on the loop meanwhile, in a list of one."""
    turns = [0]

    async def count() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    yield turns
    counting.cancel()


@contextlib.contextmanager
def refused_call(code: grpc.StatusCode, kind: str = "", says: str = "") -> Iterator[None]:
    """A gRPC call in the block is refused with this status, kind of error (if given) and part of its text."""
    with pytest.raises(grpc.aio.AioRpcError, match=says or None) as refusal:
        yield
    assert refusal.value.code() is code
    assert not kind or dict(refusal.value.trailing_metadata())["shardrank-error-kind"] == kind


def stats_of(service: RankingService, version: int) -> VersionStats:
    """What a version that is here has done."""
    return next(one.payload.counter.stats() for one in service.generations.all() if one.version == version)


def sparse_message(ids: list[Any], weights: list[Any] | None, *, is_context: bool) -> ranking_pb2.SparseFeature:
    """One feature of the JSON form as a message."""
    nested = [ids] if is_context else ids
    flat = [one for bag in nested for one in bag] if nested and isinstance(nested[0], list) else list(nested)
    message = ranking_pb2.SparseFeature()
    if any(isinstance(one, str) for one in flat):
        message.string_ids.extend(flat)
    else:
        message.ids.extend(flat)
    if not is_context and nested and isinstance(nested[0], list):
        message.lengths.extend(len(bag) for bag in nested)
    if weights is not None:
        message.weights.extend(
            [one for bag in weights for one in bag] if weights and isinstance(weights[0], list) else weights
        )
    return message


def rank_message(request: dict[str, Any], model: str = MODEL) -> ranking_pb2.RankRequest:
    """The JSON form of a rank request as a message."""
    message = ranking_pb2.RankRequest(
        model=model,
        timeout_ms=request.get("timeout_ms", 0),
        top_k=request.get("top_k", 0),
        request_id=request.get("request_id", ""),
        routing_key=request.get("routing_key", ""),
    )
    for name in {"version", "max_age_ms", "min_sequence"} & request.keys():
        setattr(message, name, request[name])
    for part, features in (("context", message.context), ("candidates", message.candidates)):
        given = request.get(part, {})
        for name, ids in given.get("sparse", {}).items():
            weights = given.get("weights", {}).get(name)
            features.sparse[name].CopyFrom(sparse_message(ids, weights, is_context=part == "context"))
        dense = given.get("dense", [])
        features.dense.extend([one for row in dense for one in row] if part == "candidates" else dense)
    return message


def packed_message(schema: RequestSchema, request: dict[str, Any], model: str = MODEL) -> ranking_pb2.RankRequest:
    """The JSON form of a rank request as a packed message."""
    message = rank_message(request, model)
    message.num_candidates = len(request["candidates"]["dense"])
    ids: list[int] = []
    lengths: list[int] = []
    weights: list[float] = []
    has_weights = False
    for name, is_context, _ in schema.kinds:
        feature = (message.context if is_context else message.candidates).sparse[name]
        size = len(feature.ids) + len(feature.string_ids)
        ids += feature.ids
        message.packed.string_ids.extend(feature.string_ids)
        lengths += [size] if is_context else feature.lengths or [1] * size
        weights += feature.weights or [1.0] * size
        has_weights |= bool(feature.weights)
    message.packed.schema_digest = schema.features.digest
    message.packed.ids = np.array(ids, "<i8").tobytes()
    message.packed.lengths = np.array(lengths, "<i4").tobytes()
    message.packed.weights = np.array(weights if has_weights else [], "<f4").tobytes()
    message.packed.context_dense = np.array(message.context.dense, "<f4").tobytes()
    message.packed.candidate_dense = np.array(message.candidates.dense, "<f4").tobytes()
    message.ClearField("context")
    message.ClearField("candidates")
    return message


def run(main: Any) -> Any:
    """Runs a coroutine on uvloop, as the server does."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(main, 60))
