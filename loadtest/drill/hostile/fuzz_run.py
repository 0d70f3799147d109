"""Mutated requests of every kind, one kind after the other, and whether the server is the same afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from loader.progress import Progress
from loadtest.drill.errors import DrillError, LoadProcessError
from loadtest.drill.hostile.attack_process import child_environment
from loadtest.drill.hostile.attacker import AttackConfig
from loadtest.drill.hostile.fuzz_process import SHARES, FuzzConfig, FuzzTally, pool_frames
from loadtest.drill.hostile.report import MAX_MEMORY_GROWTH_BYTES, FuzzResult
from loadtest.drill.hostile.target import Target, memory_of
from loadtest.grpc_channels import as_it_is
from loadtest.workloads.catalog import BenchShape, bench_workload
from loadtest.workloads.payloads import APIS, Api, Payloads
from serving.client import Client
from serving.fleet.supervisor import shardrank_command
from serving.proto.inference import open_inference_pb2
from shard_node.wire.frame import HEADER

COMPARED_REQUESTS = 5
ASK_TIMEOUT_S = 30.0
SETTLE_S = 10.0
NODE_TIMEOUT_S = 60.0
FIRST_SOURCE = 1000
_INFER_ID = re.compile(rb'"id":"[0-9a-f]*",?')
_NODE_PORT = re.compile(rb"listens on \S+:(\d+)")


@dataclass(frozen=True, slots=True)
class Place:
    """What is fuzzed.

    Attributes:
        port: of HTTP, or of the shard node.
        grpc_port: if it has one.
        memory: resident bytes now.
        tracebacks: that it has written so far.
        answers: to valid requests, as bytes.
        alive: whether its process runs.
    """

    port: int
    grpc_port: int
    memory: Callable[[], int]
    tracebacks: Callable[[], int]
    answers: Callable[[], list[bytes]]
    alive: Callable[[], bool]


async def run_fuzz(
    mutations: int,
    seed: int,
    shape: BenchShape,
    folder: Path,
    target: Target,
    core: int | None,
    progress: Progress,
) -> tuple[FuzzResult, ...]:
    """Sends mutated requests to the server, and mutated frames to a shard node if the server is the drill's own.

    Args:
        mutations: of all kinds together.
        seed: of them.
        shape: of the model.
        folder: for files.
        target: the server.
        core: for the sending process.
        progress: told the kinds done.

    Raises:
        DrillError: a process of the drill failed.
    """
    results = []
    async with contextlib.AsyncExitStack() as stack:
        server = Place(
            target.http_port,
            target.grpc_port,
            target.memory_bytes,
            lambda: target.log_marks()[1],
            lambda: server_answers(target, shape),
            target.alive,
        )
        node = None
        if target.snapshot is not None:
            node = await stack.enter_async_context(_running_node(target.snapshot, shape, target.model, folder))
        for number, (surface, share) in enumerate(SHARES.items()):
            progress("mutated requests", number, len(SHARES))
            place = node if surface.startswith("wire") else server
            if place is None:
                continue
            attack = AttackConfig(
                name=surface,
                host=target.host,
                http_port=place.port,
                grpc_port=place.grpc_port,
                model=target.model,
                features=target.features,
                dense=shape.dense,
                seconds=1,
                core=core,
                source=FIRST_SOURCE + number,
                seed=seed,
            )
            config = FuzzConfig(
                attack=attack,
                shape=shape,
                surface=surface,
                mutations=max(1, round(mutations * share)),
                schema_digest=await asyncio.to_thread(_digest, target),
                folder=folder,
            )
            results.append(await _fuzz(config, place))
        progress("mutated requests", len(SHARES), len(SHARES))
    return tuple(results)


async def _fuzz(config: FuzzConfig, place: Place) -> FuzzResult:
    answers = await asyncio.to_thread(place.answers)
    if config.surface not in ("http1-bytes", "http2-bytes", "wire-bytes"):
        # What a process needs for its first thousand wrong requests it keeps.
        await _send(config.model_copy(update={"mutations": min(1000, config.mutations)}))
    before, tracebacks = place.memory(), place.tracebacks()
    begin = time.monotonic()
    tally = await _send(config)
    seconds = time.monotonic() - begin
    stopped, same = "", False
    if place.alive():
        try:
            same = await asyncio.to_thread(place.answers) == answers
        except (OSError, grpc.RpcError, DrillError) as error:
            stopped = f"valid requests fail afterwards: {error!r}"
    else:
        stopped = "the process has ended"
    if place.memory() - before > MAX_MEMORY_GROWTH_BYTES:
        await asyncio.sleep(SETTLE_S)
    return FuzzResult(
        name=config.surface,
        mutations=tally.mutations,
        seconds=seconds,
        answers=tally.answers,
        wrong_answers=tally.wrong_answers,
        tracebacks=place.tracebacks() - tracebacks,
        same_answers=same,
        memory_before_bytes=before,
        memory_after_bytes=place.memory(),
        examples=tuple(tally.examples),
        stopped=stopped,
    )


async def _send(config: FuzzConfig) -> FuzzTally:
    path = config.folder / f"fuzz-{config.surface}.json"
    path.write_text(config.model_dump_json(), encoding="utf-8")
    log = path.with_suffix(".log")
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "loadtest.drill.hostile.fuzz_process", str(path)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=child_environment(),
            start_new_session=True,
        )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise LoadProcessError(f"fuzz {config.surface} ended with {process.returncode}: {log.read_text()[-2000:]}")
    return FuzzTally.model_validate_json(output)


def server_answers(target: Target, shape: BenchShape) -> list[bytes]:
    """Answers to fixed valid requests over every API, asked one after the other so that each is a batch of its own.

    Raises:
        OSError, grpc.RpcError: one is not answered, or not with success.
    """
    answers = []
    for api in APIS:
        pool = Payloads(bench_workload(shape, "mlp", 1), api, count=COMPARED_REQUESTS, seed=99, timeout_ms=10_000)
        if pool.is_grpc:
            with grpc.insecure_channel(f"{target.host}:{target.grpc_port}") as channel:
                call = channel.unary_unary(pool.path, as_it_is, as_it_is)
                answers += [without_id(api, call(one.body, timeout=ASK_TIMEOUT_S)) for one in pool]
            continue
        for one in pool:
            url = f"http://{target.host}:{target.http_port}{pool.path}"
            post = urllib.request.Request(url, one.body, dict(one.headers))
            with urllib.request.urlopen(post, timeout=ASK_TIMEOUT_S) as response:
                answers.append(without_id(api, response.read()))
    return answers


def without_id(api: Api, answer: bytes) -> bytes:
    """An answer without the id that the server draws for each infer request that brings none."""
    if api == "oip-http":
        return _INFER_ID.sub(b"", answer)
    if api == "oip-grpc":
        message = open_inference_pb2.ModelInferResponse.FromString(answer)
        message.ClearField("id")
        return message.SerializeToString(deterministic=True)
    return answer


def _digest(target: Target) -> str:
    with Client(f"grpc://{target.host}:{target.grpc_port}", timeout_ms=int(1000 * ASK_TIMEOUT_S)) as client:
        return client.describe(target.model).schema_digest


@contextlib.asynccontextmanager
async def _running_node(snapshot: Path, shape: BenchShape, model: str, folder: Path) -> AsyncIterator[Place]:
    """A shard node with all rows."""
    log = folder / "shard-node.log"
    command = shardrank_command(
        *("shard-node", "--snapshot", str(snapshot), "--shard", "0/1", "--listen", "127.0.0.1:0", "--no-verify")
    )
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=child_environment(),
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        port = await asyncio.wait_for(_node_port(process.stdout), NODE_TIMEOUT_S)
        yield Place(
            port,
            port,
            lambda: memory_of((process.pid,)),
            lambda: log.read_text(encoding="utf-8", errors="replace").count("Traceback (most recent"),
            lambda: node_answers(port, shape, model),
            lambda: process.returncode is None,
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _node_port(output: asyncio.StreamReader) -> int:
    told = b""
    while line := await output.readline():
        told += line
        if found := _NODE_PORT.search(told):
            return int(found[1])
    raise DrillError(f"the shard node has ended before it listened: {told!r}")


def node_answers(port: int, shape: BenchShape, model: str) -> list[bytes]:
    """Whole answers to fixed valid frames. Raises OSError and DrillError."""
    with socket.create_connection(("127.0.0.1", port), ASK_TIMEOUT_S) as sock, sock.makefile("rb") as file:
        answers = []
        for frame in pool_frames(shape, model)[:-1]:
            sock.sendall(frame)
            head = file.read(HEADER.size)
            if len(head) < HEADER.size:
                raise DrillError("the shard node closed the connection")
            answers.append(head + file.read(HEADER.unpack(head)[4]))
        return answers
