"""What is attacked: a server of the drill's own, which can be started again, or one that runs already; a shard node."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import psutil
from pydantic import Field

from loader.snapshot.tables import Frozen
from loadtest.drill.hostile.fuzz import pool_frames
from loadtest.drill.processes import child_process, memory_of
from loadtest.errors import DrillError
from loadtest.load.senders import as_it_is
from loadtest.servers import serving
from loadtest.workloads.catalog import BenchShape, bench_spec, bench_workload
from loadtest.workloads.payloads import APIS, Api, Payloads
from loadtest.workloads.prepare import write_random_snapshot
from serving.fleet.supervisor import shardrank_command
from serving.proto.inference import open_inference_pb2
from shard_node.wire.frame import HEADER

COMPARED_REQUESTS = 5
ASK_TIMEOUT_S = 30.0
NODE_TIMEOUT_S = 60.0
_INFER_ID = re.compile(rb'"id":"[0-9a-f]*",?')
_NODE_PORT = re.compile(rb"listens on \S+:(\d+)")


class AttackedConfig(Frozen):
    """Which server is attacked.

    Attributes:
        shape: of the model that is served.
        http, grpc, process_id: a server that runs already, `HOST:PORT` each and its process; None to start one.
    """

    shape: BenchShape = BenchShape(rows=100_000)
    http: str | None = None
    grpc: str | None = None
    process_id: int | None = Field(default=None, ge=1)


class Attacked:
    """A server of a model under attack: where it is, its processes, and the logs of the drill's own."""

    def __init__(self, shape: BenchShape) -> None:
        spec = bench_spec(shape, "mlp")
        self.shape, self.model = shape, spec.model
        self.features = tuple(feature.name for feature in spec.features)
        self.host, self.http_port, self.grpc_port = "127.0.0.1", 0, 0
        self.process_ids: tuple[int, ...] = ()
        self.logs: list[Path] = []

    def alive(self) -> bool:
        """Whether its process runs."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.process_ids[0]).status() != psutil.STATUS_ZOMBIE
        return False

    def memory_bytes(self) -> int:
        """Return the resident memory of its processes."""
        return memory_of(self.process_ids)

    def log_marks(self) -> tuple[int, int]:
        """Return (lines, tracebacks) that the drill's own has written so far, before restarts too."""
        texts = [log.read_text(encoding="utf-8", errors="replace") for log in self.logs]
        return sum(text.count("\n") for text in texts), sum(text.count("Traceback (most recent") for text in texts)

    def answers(self) -> list[bytes]:
        """Return answers to fixed valid requests, asked one after the other so that each is a batch of its own.

        Raises OSError, grpc.RpcError or DrillError if one is not answered with success.
        """
        raise NotImplementedError


class AttackedServer(Attacked):
    """A server of all APIs; without a snapshot, one that runs already."""

    def __init__(self, shape: BenchShape, snapshot: Path | None, folder: Path) -> None:
        super().__init__(shape)
        self.snapshot, self._folder = snapshot, folder
        self._running = contextlib.ExitStack()

    def attach(self, http: str, grpc: str, process_id: int) -> None:
        """Take a server that runs. Raises DrillError."""
        self.host, self.http_port = _split(http)
        _, self.grpc_port = _split(grpc)
        self.process_ids = (process_id,)
        if not self.alive():
            raise DrillError(f"--pid {process_id}: there is no such process")

    async def restart(self) -> None:
        """Start the drill's own server, again and on the same ports if it runs. Does nothing to another one."""
        if self.snapshot is None:
            return
        await self.stop()
        self.logs.append(self._folder / f"server-{len(self.logs) + 1}.log")
        ports = ("--http-port", str(self.http_port), "--grpc-port", str(self.grpc_port))
        made = serving("local", self.snapshot, ("--no-verify", "--dtype", "float32", *ports), self.logs[-1])
        server = await asyncio.to_thread(self._running.enter_context, made)
        self.http_port, self.grpc_port, self.process_ids = server.http_port, server.grpc_port, server.process_ids

    async def stop(self) -> None:
        """Stop the drill's own."""
        await asyncio.to_thread(self._running.close)

    def answers(self) -> list[bytes]:
        """Return answers over every API."""
        answers = []
        for api in APIS:
            pool = Payloads(
                bench_workload(self.shape, "mlp", 1), api, count=COMPARED_REQUESTS, seed=99, timeout_ms=10_000
            )
            if pool.is_grpc:
                with grpc.insecure_channel(f"{self.host}:{self.grpc_port}") as channel:
                    call = channel.unary_unary(pool.path, as_it_is, as_it_is)
                    answers += [without_id(api, call(one.body, timeout=ASK_TIMEOUT_S)) for one in pool]
                continue
            for one in pool:
                url = f"http://{self.host}:{self.http_port}{pool.path}"
                post = urllib.request.Request(url, one.body, dict(one.headers))
                with urllib.request.urlopen(post, timeout=ASK_TIMEOUT_S) as response:
                    answers.append(without_id(api, response.read()))
        return answers


class AttackedNode(Attacked):
    """A shard node with all rows; `http_port` is that of the wire protocol."""

    def answers(self) -> list[bytes]:
        """Return answers to frames."""
        place = (self.host, self.http_port)
        with socket.create_connection(place, ASK_TIMEOUT_S) as sock, sock.makefile("rb") as file:
            answers = []
            for frame in pool_frames(self.shape, self.model)[:-1]:
                sock.sendall(frame)
                head = file.read(HEADER.size)
                if len(head) < HEADER.size:
                    raise DrillError("the shard node closed the connection")
                answers.append(head + file.read(HEADER.unpack(head)[4]))
            return answers


@contextlib.asynccontextmanager
async def running_target(config: AttackedConfig, folder: Path) -> AsyncIterator[AttackedServer]:
    """Give the server that the settings name, or a new one while the block runs.

    Raises:
        DrillError: settings that name half a server, or one that isn't there.
        ShardrankError: it does not come up.
    """
    if config.http is not None and config.grpc is not None and config.process_id is not None:
        target = AttackedServer(config.shape, None, folder)
        target.attach(config.http, config.grpc, config.process_id)
        yield target
        return
    if (config.http, config.grpc, config.process_id) != (None, None, None):
        raise DrillError("--http, --grpc and --pid go together")
    spec = bench_spec(config.shape, "mlp")
    snapshot = await asyncio.to_thread(write_random_snapshot, spec, folder / "store")
    target = AttackedServer(config.shape, snapshot, folder)
    try:
        await target.restart()
        yield target
    finally:
        await target.stop()


@contextlib.asynccontextmanager
async def running_node(shape: BenchShape, snapshot: Path, folder: Path) -> AsyncIterator[AttackedNode]:
    """Run a shard node while the block runs. Raises DrillError."""
    node = AttackedNode(shape)
    node.logs.append(folder / "shard-node.log")
    command = shardrank_command(
        *("shard-node", "--snapshot", str(snapshot), "--shard", "0/1", "--listen", "127.0.0.1:0", "--no-verify")
    )
    async with child_process(command, node.logs[0]) as process:
        assert process.stdout is not None
        told = b""
        async with asyncio.timeout(NODE_TIMEOUT_S):
            while (found := _NODE_PORT.search(told)) is None:
                line = await process.stdout.readline()
                if not line:
                    raise DrillError(f"the shard node has ended before it listened: {told!r}")
                told += line
        node.http_port, node.process_ids = int(found[1]), (process.pid,)
        yield node


def without_id(api: Api, answer: bytes) -> bytes:
    """Return an answer without the id that the server draws for each infer request that brings none."""
    if api == "oip-http":
        return _INFER_ID.sub(b"", answer)
    if api == "oip-grpc":
        message = open_inference_pb2.ModelInferResponse.FromString(answer)
        message.ClearField("id")
        return message.SerializeToString(deterministic=True)
    return answer


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise DrillError(f"{address!r} is not HOST:PORT")
    return host, int(port)
