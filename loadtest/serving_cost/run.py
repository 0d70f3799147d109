"""The benchmark itself: servers, limit and client side by side, one measured after the other, round after round."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families
from pydantic import Field

from loader.snapshot.manifest import Frozen
from loadtest.load.machine import this_machine, versions
from loadtest.serving_cost.helper_process import ANSWER_SLACK_S, HelperProcess
from loadtest.serving_cost.messages import Compute, Computed, LimitConfig, Load, Score, Scores, Weighed
from loadtest.serving_cost.one_answer import check_scores
from loadtest.serving_cost.result import Saturated, ServingBench, Unloaded
from loadtest.serving_cost.servers import HOST, Mode, Server, serving
from loadtest.serving_cost.shape import Head, Shape, model_spec, payloads
from loadtest.workloads.export import write_random_snapshot
from loadtest.workloads.payloads import Api
from serving.models.ranking_models import choose_dtype

CHECKED_REQUESTS = 2
# Scores are between 0 and 1. The server's batches are of other sizes, so sums are rounded otherwise.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.02}

Say = Callable[[str], None]


class BenchConfig(Frozen):
    """What is measured, and for how long.

    Attributes:
        hotness: ids for each feature of each candidate.
        in_flight: requests of the client under full load.
        rounds: how often everything is measured.
        warmup_s: of each load.
        seconds: that a full load is weighed for.
        limit_s: that the limit computes for.
        unloaded_s: that one request after the other is sent for.
        modes: that are asked without load; full load is put on `local` alone.
        workers: processes of each server.
        ranking_replicas: of each of them; None for the server's default.
        profile_folder: where the servers under full load write their profiles; None for nowhere.
    """

    shape: Shape = Shape()
    heads: tuple[Head, ...] = Field(default=("mlp", "dlrm"), min_length=1)
    hotness: tuple[int, ...] = Field(default=(1, 20), min_length=1)
    apis: tuple[Api, ...] = Field(default=("grpc-packed", "grpc", "oip-http", "json"), min_length=1)
    modes: tuple[Mode, ...] = ("local", "two_shards")
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    in_flight: int = Field(default=32, ge=1, le=1024)
    rounds: int = Field(default=5, ge=1, le=100)
    warmup_s: float = Field(default=1.0, ge=0)
    seconds: float = Field(default=5.0, gt=0)
    limit_s: float = Field(default=3.0, gt=0)
    unloaded_s: float = Field(default=2.0, gt=0)
    workers: int = Field(default=1, ge=1, le=64)
    ranking_replicas: int | None = Field(default=None, ge=1, le=64)
    profile_folder: Path | None = None

    def quick(self) -> BenchConfig:
        """The same in about a minute: the MLP alone, once, for short times. Its numbers are rough."""
        short = {"rounds": 1, "warmup_s": 0.5, "seconds": 2.0, "limit_s": 1.0, "unloaded_s": 1.0}
        return self.model_copy(update={"heads": self.heads[:1], **short})


def run_bench(config: BenchConfig, folder: Path, say: Say) -> ServingBench:
    """Measures everything.

    Args:
        config: what.
        folder: for snapshots and logs.
        say: told what is being done.

    Raises:
        ServingBenchError: a process ended or a request failed.
        ShardrankError: the snapshots can't be written.
    """
    began_at = datetime.now(UTC).isoformat(timespec="seconds")
    dtype = served_dtype(config)
    saturated: list[Saturated] = []
    unloaded: list[Unloaded] = []
    with HelperProcess("loadtest.serving_cost.client_process", config.shape) as client:
        for head in config.heads:
            say(f"{head}: writing {config.shape.rows} rows")
            snapshot = write_random_snapshot(model_spec(config.shape, head), folder / "store")
            with contextlib.ExitStack() as stack:
                say(f"{head}: starting servers")
                limit_config = LimitConfig(snapshot=str(snapshot), shape=config.shape, head=head, dtype=dtype)
                limit = stack.enter_context(HelperProcess("loadtest.serving_cost.limit_process", limit_config))
                servers: dict[Mode, Server] = {}
                for mode in dict.fromkeys(("local", *config.modes)):
                    arguments = server_arguments(config, dtype, head, mode)
                    log = folder / f"{head}-{mode}.log"
                    servers[mode] = stack.enter_context(serving(mode, snapshot, arguments, log))
                measure = _Measure(config, head, client, limit, servers, say)
                for hotness in config.hotness:
                    measure.check(hotness, TOLERANCES[dtype])
                for number in range(config.rounds):
                    for hotness in config.hotness:
                        saturated += measure.saturated(number, hotness)
                        unloaded += measure.unloaded(number, hotness)
    return ServingBench(
        began_at=began_at,
        machine=machine_text(),
        versions=all_versions(),
        shape=config.shape,
        dtype=dtype,
        server_arguments=server_arguments(config, dtype, config.heads[0], "local"),
        in_flight=config.in_flight,
        seconds=config.seconds,
        rounds=config.rounds,
        saturated=tuple(saturated),
        unloaded=tuple(unloaded),
    )


def served_dtype(config: BenchConfig) -> Literal["float32", "bfloat16"]:
    """What servers compute their dense model in."""
    return "bfloat16" if choose_dtype(config.dtype) is torch.bfloat16 else "float32"


def machine_text() -> str:
    """The processor and its cores."""
    machine = this_machine()
    return f"{machine.cpu}, {machine.cores} cores"


def all_versions() -> dict[str, str]:
    """Of what clients and servers run with."""
    return {**versions(), "torch": torch.__version__, "numpy": np.__version__}


def load_on(
    server: Server, config: BenchConfig, head: Head, hotness: int, api: Api, in_flight: int, seconds: float
) -> Load:
    """What the client is asked for."""
    return Load(
        **server.place,
        head=head,
        hotness=hotness,
        api=api,
        in_flight=in_flight,
        warmup_s=config.warmup_s,
        seconds=seconds,
        process_ids=server.process_ids,
    )


def server_arguments(config: BenchConfig, dtype: str, head: Head, mode: Mode) -> tuple[str, ...]:
    """The flags of a server, beside where it listens and what it serves."""
    arguments: tuple[str, ...] = ("--dtype", dtype, "--no-verify", "--workers", str(config.workers))
    if config.ranking_replicas is not None:
        arguments += ("--ranking-replicas", str(config.ranking_replicas))
    if config.profile_folder is not None and mode == "local":
        arguments += ("--profile", str(config.profile_folder / f"profile-{head}.json"))
    return arguments


class _Measure:
    """One model's servers, its limit and the client."""

    def __init__(
        self,
        config: BenchConfig,
        head: Head,
        client: HelperProcess,
        limit: HelperProcess,
        servers: dict[Mode, Server],
        say: Say,
    ) -> None:
        self._config = config
        self._head: Head = head
        self._client = client
        self._limit = limit
        self._servers = servers
        self._say = say

    def check(self, hotness: int, tolerance: float) -> None:
        """Compares a few answers of every server, over every API, with the limit's scores."""
        self._say(f"{self._head}, hotness {hotness}: comparing scores")
        for request in range(CHECKED_REQUESTS):
            told = self._limit.ask(Score(hotness=hotness, request=request), Scores, ANSWER_SLACK_S)
            expected = np.array(told.scores, np.float32)
            for api in self._config.apis:
                pool = payloads(self._config.shape, self._head, hotness, api, CHECKED_REQUESTS)
                for server in self._servers.values():
                    check_scores(server, pool, request, expected, tolerance)

    def saturated(self, number: int, hotness: int) -> list[Saturated]:
        """Full load over each API, with the limit right after each."""
        config, server = self._config, self._servers["local"]
        found = []
        # Each API is first, second, ... in turn.
        shift = number % len(config.apis)
        for api in (*config.apis[shift:], *config.apis[:shift]):
            self._say(f"{self._head}, hotness {hotness}, round {number + 1}: {api} at {config.in_flight} in flight")
            before = _batches(server)
            load = self._load(server, hotness, api, config.in_flight, config.seconds)
            after = _batches(server)
            batch_requests = max(1.0, (after[0] - before[0]) / (after[1] - before[1]))
            computed = self._compute(hotness, batch_requests, config.limit_s)
            cpu_ms = load.server_cpu_s / load.requests * 1e3
            limit_cpu_ms = computed.cpu_s / computed.requests * 1e3
            found.append(
                Saturated(
                    round=number,
                    head=self._head,
                    hotness=hotness,
                    api=api,
                    cpu_ms=cpu_ms,
                    limit_cpu_ms=limit_cpu_ms,
                    ratio=cpu_ms / limit_cpu_ms,
                    batch_requests=batch_requests,
                    requests_per_s=load.requests / load.seconds,
                    server_cores=load.server_cpu_s / load.seconds,
                    client_cores=load.client_cpu_s / load.seconds,
                    p50_ms=load.p50_ms,
                    p99_ms=load.p99_ms,
                )
            )
        return found

    def unloaded(self, number: int, hotness: int) -> list[Unloaded]:
        """One request after the other, over each API and to each server."""
        if not self._config.modes:
            return []
        self._say(f"{self._head}, hotness {hotness}, round {number + 1}: one request after the other")
        alone = self._compute(hotness, 1.0, self._config.unloaded_s)
        found = []
        for mode in self._config.modes:
            for api in self._config.apis:
                load = self._load(self._servers[mode], hotness, api, 1, self._config.unloaded_s)
                found.append(
                    Unloaded(
                        round=number,
                        head=self._head,
                        hotness=hotness,
                        api=api,
                        mode=mode,
                        p50_ms=load.p50_ms,
                        limit_ms=alone.batch_p50_ms,
                        extra_ms=load.p50_ms - alone.batch_p50_ms,
                    )
                )
        return found

    def _load(self, server: Server, hotness: int, api: Api, in_flight: int, seconds: float) -> Weighed:
        load = load_on(server, self._config, self._head, hotness, api, in_flight, seconds)
        return self._client.measure(load, Weighed)

    def _compute(self, hotness: int, batch_requests: float, seconds: float) -> Computed:
        asked = Compute(hotness=hotness, batch_requests=batch_requests, seconds=seconds)
        return self._limit.ask(asked, Computed, seconds + ANSWER_SLACK_S)


def _batches(server: Server) -> tuple[float, float]:
    """Requests in batches, and batches, so far."""
    with urllib.request.urlopen(f"http://{HOST}:{server.http_port}/metrics", timeout=ANSWER_SLACK_S) as response:
        text = response.read().decode()
    found = {
        one.name: one.value
        for family in text_string_to_metric_families(text)
        if family.name == "shardrank_batch_requests"
        for one in family.samples
        if not one.name.endswith("_bucket")
    }
    return found.get("shardrank_batch_requests_sum", 0.0), found.get("shardrank_batch_requests_count", 0.0)
