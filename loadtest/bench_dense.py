"""What dense steps cost, and whether an answer is ever mixed: `python -m loadtest.bench_dense [--json FILE]`.

A real fleet (registry, shard nodes, a serving process) answers while a trainer publishes changed rows and, every few
seconds, a dense step. Every row of the one table is the number of the delta that wrote it, and each step has a bias of
its own, so a score tells which delta its row was of and which step scored it. An answer is *mixed* if its row is older
than its step allows, if it was scored by another step than it names, or by two. Windows with and without updates take
turns, so that both see the same noise.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np
import numpy.typing as npt
import torch

from loader.deltas.publisher import DeltaPublisher
from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.row_source import rows_of
from loader.snapshot.tables import TableSpec
from loader.snapshot.writer import export_snapshot
from loadtest.load.result import this_machine
from serving.client import AsyncClient, ClientError
from serving.client.client import RetryPolicy
from serving.fleet.local_fleet import FleetConfig, running_fleet

MODEL, TABLE = "clock", "ticks"
ROWS = 500
"""Of the table; each delta writes them all."""
CANDIDATES = 5
SCALE = 1 / 1024
"""Of a logit, for each delta."""
OFFSET = -1.5
FRACTIONS = 8
"""Steps in a row whose biases differ, by that part of SCALE."""
TOLERANCE = 0.03
"""Of a delta's number: a score in float32 tells it to 0.002."""
SETTLE_S = 1.0


def spec() -> ModelSpec:
    """Describe a table of delta numbers, and a logit that is linear in them."""
    return ModelSpec(
        model=MODEL,
        tables=(TableSpec(name=TABLE, num_embeddings=ROWS, embedding_dim=2, feature_names=("tick",), dtype="fp32"),),
        features=(FeatureSpec(name="tick", side="candidate"),),
        dense_model=DenseModelSpec(kind="mlp", config={"hidden": []}),
    )


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    """Make a step's weights: its bias tells which of FRACTIONS it is."""
    bias = OFFSET + SCALE * (step % FRACTIONS) / FRACTIONS
    return {"mlp.layers.0.weight": torch.tensor([[SCALE, 0.0]]), "mlp.layers.0.bias": torch.tensor([bias])}


def deltas_of(scores: npt.NDArray[np.float32], step: int) -> npt.NDArray[np.float64]:
    """Find the numbers of the deltas that rows are of, if that step scored them: whole ones."""
    exact = scores.astype(np.float64)
    logits = np.log(exact / (1 - exact))
    found: npt.NDArray[np.float64] = (logits - OFFSET) / SCALE - (step % FRACTIONS) / FRACTIONS
    return found


def is_mixed(scores: npt.NDArray[np.float32], step: int, min_delta: int) -> bool:
    """Tell whether scores are not those of one step with rows of delta `min_delta` or later."""
    deltas = deltas_of(scores, step)
    whole = np.rint(deltas)
    return bool((np.abs(deltas - whole) > TOLERANCE).any() or (whole < min_delta).any())


@dataclass(slots=True)
class Answered:
    """What was answered: latencies of windows with updates and without, in seconds."""

    latencies_s: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    steps: set[int] = field(default_factory=set)
    mixed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Trainer:
    """Publishes while `publishing` is set. `min_deltas` is what each step needs; 0 for the snapshot's own."""

    publishing: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    min_deltas: dict[int, int] = field(default_factory=lambda: {0: 0})
    failure: str = ""

    def run(self, registry: str, store: Path, rows_per_s: int, every_s: float) -> None:
        """Publish until `ended`."""
        pause_s, step, next_step = ROWS / rows_per_s, 0, 0.0
        try:
            with DeltaPublisher(registry, MODEL, 1, store) as publisher:
                while not self.ended.is_set():
                    if not self.publishing.wait(0.1):
                        continue
                    began = time.monotonic()
                    values = np.zeros((ROWS, 2), np.float32)
                    values[:, 0] = publisher.sequence + 1
                    sequence = publisher.publish(TABLE, np.arange(ROWS), values)
                    if began >= next_step:
                        step, next_step = step + 1, began + every_s
                        # Known before anybody can answer with it.
                        self.min_deltas[step] = sequence
                        publisher.publish_dense(step, tensors_of(step), sequence=sequence)
                    time.sleep(max(0.0, pause_s - (time.monotonic() - began)))
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"


@contextmanager
def training(registry: str, store: Path, rows_per_s: int, every_s: float) -> Iterator[Trainer]:
    """Run a trainer, which publishes nothing yet, while the block runs."""
    trainer = Trainer()
    thread = threading.Thread(target=trainer.run, args=(registry, store, rows_per_s, every_s), daemon=True)
    thread.start()
    try:
        yield trainer
    finally:
        trainer.ended.set()
        thread.join(30)


async def ask_until(
    client: AsyncClient, ends: float, trainer: Trainer, seen: Answered, rng: np.random.Generator
) -> None:
    """Ask one request after the other until the clock says `ends`, and judge each answer."""
    is_updated = trainer.publishing.is_set()
    while (began := time.monotonic()) < ends:
        ids = rng.integers(0, ROWS, CANDIDATES)
        try:
            answer = await client.rank(MODEL, context={}, candidates={"tick": ids})
        except ClientError as error:
            seen.failed.append(f"{error.kind}: {error}")
            continue
        seen.latencies_s[is_updated].append(time.monotonic() - began)
        seen.steps.add(answer.dense_step)
        if is_mixed(answer.scores, answer.dense_step, trainer.min_deltas[answer.dense_step]):
            seen.mixed.append(f"step {answer.dense_step}: {answer.scores.tolist()}")


async def hot_hits(address: str) -> int:
    """Ask a serving process how many rows it looked up among its hot ones."""
    async with httpx.AsyncClient(timeout=10) as client:
        text = (await client.get(f"http://{address}/metrics")).text
    return sum(int(float(one)) for one in re.findall(r"^shardrank_hot_hits_total\{.*\} ([0-9.e+]+)$", text, re.M))


async def measure(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a fleet under load, with and without updates in turn, and say what was seen."""
    store, registry, seen = folder / "store", str(folder / "registry"), Answered()
    export_snapshot(store, spec(), rows={TABLE: rows_of(np.zeros((ROWS, 2), np.float32))}, dense=tensors_of(0))
    config = FleetConfig(
        store=store,
        models=(MODEL,),
        registry=registry,
        shards=options["shards"],
        replicas=options["replicas"],
        replicate_bytes=0,
        http_port=0,
        grpc_port=0,
        serve_arguments=("--dtype", "float32", "--hot-rows-gb", str(0.01 if options["hot_rows"] else 0)),
    )
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(config, lambda name: None))
        address = f"grpc://{fleet.host}:{fleet.grpc_port}"
        clients = [AsyncClient(address, timeout_ms=5000, retry=RetryPolicy(max_attempts=1)) for _ in range(4)]
        for client in clients:
            stack.push_async_callback(client.close)
        trainer = stack.enter_context(training(registry, store, options["rows_per_s"], options["every_s"]))
        rng, windows = np.random.default_rng(0), 0
        ends = time.monotonic() + options["seconds"]
        while time.monotonic() < ends or windows % 2:
            if windows % 2:
                trainer.publishing.set()
            else:
                trainer.publishing.clear()
            await asyncio.sleep(SETTLE_S)
            window_ends = time.monotonic() + options["window_s"]
            await asyncio.gather(
                *(
                    ask_until(clients[number % len(clients)], window_ends, trainer, seen, rng)
                    for number in range(options["in_flight"])
                )
            )
            windows += 1
            click.echo(
                f"{windows} windows, {sum(map(len, seen.latencies_s.values()))} answers, {len(seen.mixed)} mixed"
            )
        hits = await hot_hits(f"{fleet.host}:{fleet.http_port}")
    with_updates, without = (np.percentile(np.array(seen.latencies_s[one]) * 1e3, [50, 99]) for one in (True, False))
    return {
        **options,
        "machine": str(this_machine()),
        "answers": {"with updates": len(seen.latencies_s[True]), "without": len(seen.latencies_s[False])},
        "hot rows looked up": hits,
        "mixed": len(seen.mixed),
        "failed": len(seen.failed),
        "details": [*seen.mixed[:5], *seen.failed[:5], *filter(None, [trainer.failure])],
        "dense steps published": len(trainer.min_deltas) - 1,
        "dense steps that answered": len(seen.steps - {0}),
        "p50_ms": {"with updates": with_updates[0], "without": without[0]},
        "p99_ms": {"with updates": with_updates[1], "without": without[1]},
        "p99_ratio": with_updates[1] / without[1],
    }


@click.command()
@click.option("--seconds", type=click.FloatRange(1), default=60.0, show_default=True, help="Of all windows together.")
@click.option("--window-s", type=click.FloatRange(0.5), default=5.0, show_default=True)
@click.option("--rows-per-s", type=click.IntRange(ROWS), default=5000, show_default=True)
@click.option("--every-s", type=click.FloatRange(0.1), default=2.0, show_default=True, help="Between two dense steps.")
@click.option("--in-flight", type=click.IntRange(1, 256), default=8, show_default=True)
@click.option("--shards", type=click.IntRange(1, 16), default=2, show_default=True)
@click.option("--replicas", type=click.IntRange(1, 8), default=2, show_default=True)
@click.option("--hot-rows", is_flag=True, help="Keep copies of hot rows in the serving process.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(json_file: Path | None, **options: Any) -> None:
    """Ask a fleet while rows and dense weights change; exits with 1 if an answer was mixed, or failed."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-dense-") as folder:
        found = asyncio.run(measure(options, Path(folder)))
    click.echo(json.dumps(found, indent=2))
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if found["mixed"] or found["failed"] or not found["dense steps that answered"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
