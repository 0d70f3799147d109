"""Measure training on shard nodes: bytes and links against the formulas, staleness, and what fresh rows are worth.

    python scripts/measure_training.py bytes|links|kinds|staleness|fresher [--movielens FOLDER] [--seeds N] --json FILE

Run it on a machine with nothing else to do: `bytes` and `kinds` count what goes over the loopback interface.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from loader.description import ModelDescription, TableDescription
from loader.registry import open_registry
from loader.registry.fleet import FleetRegistry
from loader.rollout.plan import read_rollout
from loader.rollout.requests import start_rollout
from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.publishing import publish
from loader.snapshot.row_source import ArrayRows
from loader.snapshot.writer import export_snapshot
from router.planning.training import TrainingStep, training_traffic
from serving.client import AsyncClient, RetryPolicy
from serving.demo import url_of
from serving.fleet.config import FleetConfig
from serving.fleet.local_fleet import running_fleet
from serving.models.ranking_models import build_model
from serving.online_demo import FRESH, FROZEN, LiveScores, replay
from serving.training.fleet_feed import FeedConfig, FleetFeed
from serving.training.online import OnlineTraining, free_port, running_training
from serving.training.online_model import DENSE, FIELDS, FILMS, USERS, DenseWeights, OnlineConfig
from serving.training.parameter_servers import ParameterServers
from serving.training.rating_stream import Ratings, RatingStream, labels_of, read_ratings
from serving.training.trainer import auc
from shard_node.bags import TableLayout
from shard_node.training.trained_rows import initial_rows

DIM = 128
DAILY = "ratings-daily"
RATINGS_PER_S = 400.0


def loopback_bytes() -> int:
    """Return what the loopback interface has received."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[0])


def spec_of(rows: int) -> ModelSpec:
    """Describe one float32 table of so many rows of 128 columns."""
    table = TableDescription(
        name="items", num_embeddings=rows, embedding_dim=DIM, feature_names=("item",), dtype="fp32"
    )
    dense = DenseModelSpec(kind="mlp", config={"hidden": [4]})
    features = (FeatureSpec(name="item", side="candidate"),)
    return ModelDescription(model="table", tables=(table,), features=features, dense_model=dense).compiled()


@contextlib.asynccontextmanager
async def table_servers(rows: int, workers: int, servers: int) -> AsyncIterator[list[str]]:
    """Run shard nodes on ports of 127.0.0.1 that train one table of so many rows."""
    spec = spec_of(rows)
    with tempfile.TemporaryDirectory() as folder:
        export_snapshot(
            f"{folder}/models", spec, rows={"items": ArrayRows(np.zeros((rows, DIM), np.float32))},
            dense=build_model(spec).state_dict(), version=1,
        )  # fmt: skip
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(servers)]
        processes = [
            subprocess.Popen(  # noqa: ASYNC220 - it starts at once
                [sys.executable, "-m", "serving.cli", "shard-node", "--snapshot", f"{folder}/models/table/1", "--shard",
                 f"{shard}/{servers}", "--listen", address, "--replicate-bytes", "0", "--train", "--train-folder",
                 f"{folder}/{shard}", "--train-workers", str(workers), "--train-optimizer", "sgd"],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
            for shard, address in enumerate(addresses)
        ]  # fmt: skip
        try:
            yield addresses
        finally:
            for process in processes:
                process.terminate()
                process.wait()


async def steps_of_table(rows: int, ids_per_worker: int, workers: int, servers: int, steps: int = 5) -> dict[str, Any]:
    """Pull and push rows as workers do, by `bsp`; bytes a step, by counters and on the sockets."""
    spec, rng = spec_of(rows), np.random.default_rng(0)
    async with table_servers(rows, workers, servers) as addresses:
        clients = [ParameterServers(addresses, spec, 1, worker, 0.0) for worker in range(workers)]
        for client in clients:
            await client.resume_step()
        gradients = np.ones((ids_per_worker, DIM), np.float32)
        before, started_at = loopback_bytes(), time.monotonic()

        async def work(client: ParameterServers, step: int) -> None:
            ids = np.sort(rng.permutation(rows)[:ids_per_worker])
            await client.pull({0: ids})
            await client.push(step, {0: (ids, gradients)})

        for step in range(1, steps + 1):
            await asyncio.gather(*(work(client, step) for client in clients))
        seconds, on_sockets = time.monotonic() - started_at, loopback_bytes() - before
        links = [
            sum(client.pulled_bytes[shard] + client.pushed_bytes[shard] for client in clients) / steps
            for shard in range(servers)
        ]
        for client in clients:
            await client.close()
    return {
        "workers": workers, "servers": servers, "payload_bytes": sum(links), "busiest_link_bytes": max(links),
        "socket_bytes": on_sockets / steps, "steps_per_s": steps / seconds,
    }  # fmt: skip


def _ring(rank: int, workers: int, port: int, size: int, steps: int, done: Any) -> None:
    group(rank, workers, port)
    tensor = torch.ones(size)
    distributed.barrier()
    before = loopback_bytes()
    for _ in range(steps):
        distributed.all_reduce(tensor)
    distributed.barrier()
    if rank == 0:
        done.put((loopback_bytes() - before) / steps)


def group(rank: int, workers: int, port: int) -> None:
    """Join the processes of an all-reduce."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=workers, timeout=timedelta(seconds=120)
    )


def spawned(target: Any, workers: int, *more: Any) -> Any:
    """Run a function in so many processes; return what rank 0 puts into its queue."""
    context = multiprocessing.get_context("spawn")
    done, port = context.SimpleQueue(), free_port()
    processes = [context.Process(target=target, args=(rank, workers, port, *more, done)) for rank in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return done.get()


def say(what: object) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def measure_bytes(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the sparse case of the chapter at a thousandth: V = 100,000 rows, K = 8 workers."""
    workers, rows, ids = 8, 100_000, 4096
    step = training_traffic(
        TrainingStep(params=50_000, workers=workers, servers=1, rows=rows, dim=DIM, worker_ids=ids, number_bytes=4)
    )
    sparse = asyncio.run(steps_of_table(rows, ids, workers, 1))
    ring = spawned(_ring, workers, rows * DIM, 2)
    return {"formula": step, "servers": sparse, "allreduce_of_the_table_socket_bytes": ring}


def measure_links(args: argparse.Namespace) -> dict[str, Any]:
    """Measure links while each worker pulls and pushes a whole table, P = 20,000 x 128 numbers, in each step."""
    rows, P = 20_000, 20_000 * DIM * 4  # noqa: N806 - the chapter's letter
    runs = [asyncio.run(steps_of_table(rows, rows, workers, servers)) for workers in (1, 2, 4) for servers in (1, 2, 4)]
    return {
        "P_bytes": P,
        "runs": [run | {"formula_link_bytes": 2 * run["workers"] * P / run["servers"]} for run in runs],
    }


def _everything(rank: int, workers: int, port: int, config: OnlineConfig, ratings: Ratings, done: Any) -> None:
    """Train with whole tables on each worker, whose gradients are added up by an all-reduce."""
    group(rank, workers, port)
    optimizer, size = config.row_optimizer, workers * config.batch
    dense = DenseWeights(config.spec, config.seed, optimizer)
    keys = {name: np.unique(ratings[field]) for name, field in FIELDS.items()}
    rows = {name: initial_rows(of, config.dim, config.init_scale) for name, of in keys.items()}
    state = {name: np.zeros((of.size, optimizer.state_width(config.dim)), np.float32) for name, of in keys.items()}
    distributed.barrier()
    before, started_at, losses = loopback_bytes(), time.monotonic(), []
    for step in range(1, ratings.size // size + 1):
        batch = ratings[(step - 1) * size + rank * config.batch :][: config.batch]
        index = {name: np.searchsorted(keys[name], batch[field]) for name, field in FIELDS.items()}
        result = dense.learn({name: of.copy() for name, of in rows.items()}, index, labels_of(batch), 1 / size)
        losses.append(result.loss / batch.size)
        for name, gradients in result.gradients.items():
            distributed.all_reduce(torch.from_numpy(gradients))
            touched = gradients.any(axis=1)
            values, of_rows = rows[name][touched], state[name][touched]
            optimizer.update(values, of_rows, gradients[touched])
            rows[name][touched], state[name][touched] = values, of_rows
        summed = dense.gradients.copy()
        distributed.all_reduce(torch.from_numpy(summed))
        dense.apply(summed, step)
    seconds, loss = time.monotonic() - started_at, torch.tensor([statistics.fmean(losses) / workers])
    distributed.all_reduce(loss)
    if rank == 0:
        steps = len(losses)
        done.put({
            "steps_per_s": steps / seconds, "loss": float(loss), "steps": steps,
            "socket_bytes_per_step": (loopback_bytes() - before) / steps,
        })  # fmt: skip


async def held_out_auc(training: OnlineTraining, held_out: Ratings) -> float:
    """Score ratings that nobody learns by rows and dense weights as the servers have them now; return the AUC."""
    config = training.config
    servers = ParameterServers(training.addresses, config.trained_spec, 1, 0, config.init_scale)
    tables, dense = TableLayout.of(config.trained_spec).index, DenseWeights(config.spec, 0, config.row_optimizer)
    ids, index = {DENSE: np.arange(dense.rows.shape[0])}, {}
    for name, field in FIELDS.items():
        ids[name], index[name] = np.unique(held_out[field], return_inverse=True)
    rows = await servers.pull({tables[name]: of for name, of in ids.items()})
    await servers.close()
    dense.rows[:] = rows[tables[DENSE]]
    with torch.inference_mode():
        vectors = (torch.from_numpy(rows[tables[name]][index[name]]) for name in (USERS, FILMS))
        return auc(labels_of(held_out), dense.logits(*vectors).numpy())


async def trained(
    config: OnlineConfig, ratings: Ratings, window_s: float | None = None, held_out: Ratings | None = None
) -> dict[str, Any]:
    """Train online on all ratings; with a window, also what all workers had done after so many seconds."""
    config.folder.mkdir(parents=True)
    stream = RatingStream(config.folder / "stream")
    stream.append(ratings)
    before = loopback_bytes()
    async with running_training(config) as training:
        stream.end()
        early: dict[str, Any] = {}
        if window_s is not None:
            await asyncio.sleep(window_s)
            statuses = training.statuses()
            early = {"steps_per_s_in_window": sum(each.steps / max(each.seconds, 1e-9) for each in statuses)}
            if held_out is not None:
                early["held_out_auc_after_window"] = await held_out_auc(training, held_out)
        report = (await training.wait()).model_dump()
        if held_out is not None:
            report["held_out_auc"] = await held_out_auc(training, held_out)
    report["socket_bytes_per_step"] = (loopback_bytes() - before) / max(report["step"], 1)
    return report | early


def measure_kinds(args: argparse.Namespace) -> dict[str, Any]:
    """Hybrid, servers for everything, and all-reduce of everything, on the same ratings."""
    ratings = read_ratings(args.movielens, 40_000, 0)[:40_000]
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, dense in (("hybrid", "allreduce"), ("servers", "server")):
            config = OnlineConfig(folder=Path(folder) / name, workers=4, servers=1, dense=dense, over_tcp=True)
            runs[name] = asyncio.run(trained(config, ratings))
        config = OnlineConfig(folder=Path(folder) / "all", workers=4, servers=1)
        runs["allreduce"] = spawned(_everything, 4, config, ratings)
    return runs


def measure_staleness(args: argparse.Namespace) -> dict[str, Any]:
    """Four workers, one of which needs 30 ms more for each step."""
    ratings, runs = read_ratings(args.movielens, 40_000, 0), []
    cut = ratings.size * 9 // 10
    for seed in range(args.seeds):
        for consistency in ("bsp", "ssp:1", "ssp:4", "ssp:16", "asp"):
            with tempfile.TemporaryDirectory() as folder:
                config = OnlineConfig(
                    folder=Path(folder) / "online", workers=4, servers=1, consistency=consistency, dense="server",
                    batch=64, seed=seed, delays_s=(0.0, 0.0, 0.0, 0.03),
                )  # fmt: skip
                report = asyncio.run(trained(config, ratings[:cut], window_s=4.0, held_out=ratings[cut:]))
                names = ("held_out_auc", "held_out_auc_after_window", "seconds", "steps_per_s_in_window")
                runs.append({"seed": seed, "consistency": consistency} | {name: report[name] for name in names})
                say(runs[-1])
    args.json.with_suffix(".svg").write_text(plot_of(runs), encoding="utf-8")
    return {"runs": runs}


def plot_of(runs: list[dict[str, Any]]) -> str:
    """Draw held-out AUC over steps a second, a point and its range over the seeds for each consistency, as SVG."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_kind.setdefault(run["consistency"], []).append(run)
    aucs, rates = ([run[name] for run in runs] for name in ("held_out_auc", "steps_per_s_in_window"))
    low, high, fastest = min(aucs) - 0.001, max(aucs) + 0.001, 1.1 * max(rates)

    def at(rate: float, value: float) -> tuple[float, float]:
        return 70 + 500 * rate / fastest, 280 - 240 * (value - low) / (high - low)

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 340" font-family="sans-serif" font-size="13">',
        '<rect width="640" height="340" fill="white"/><path d="M70 30V280H580" fill="none" stroke="black"/>',
        '<text x="250" y="325">steps a second, all workers</text><text x="10" y="20">held-out AUC</text>',
    ]
    for value in np.linspace(low, high, 5):
        parts.append(f'<text x="12" y="{at(0, value)[1] + 4:.1f}">{value:.4f}</text>')
    for rate in range(0, int(fastest), 50):
        parts.append(f'<text x="{at(rate, low)[0] - 8:.1f}" y="298">{rate}</text>')
    for kind, of_kind in by_kind.items():
        values = [run["held_out_auc"] for run in of_kind]
        x, y = at(statistics.fmean(run["steps_per_s_in_window"] for run in of_kind), statistics.fmean(values))
        parts.append(f'<path d="M{x:.1f} {at(0, min(values))[1]:.1f}V{at(0, max(values))[1]:.1f}" stroke="steelblue"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="steelblue"/>')
        parts.append(f'<text x="{x + 8:.1f}" y="{y + 4:.1f}">{kind}</text>')
    return "\n".join([*parts, "</svg>\n"])


def measure_fresher(args: argparse.Namespace) -> dict[str, Any]:
    """Frozen, a version a day of data, and deltas: the same ratings, scored by one fleet before they are learned."""
    ratings, runs = read_ratings(args.movielens, 40_000, 0), []
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            runs.append({"seed": seed} | asyncio.run(fresher(Path(folder), ratings, seed, args.days)))
            say(runs[-1])
    return {"runs": runs}


async def fresher(folder: Path, ratings: Ratings, seed: int, days: int) -> dict[str, Any]:
    """Serve three models over two shards with two replicas, and score so many days of ratings by each."""
    store, registry = folder / "models", str(folder / "registry")
    config = OnlineConfig(folder=folder / "online", model=FRESH, seed=seed, write_dense_s=0.5)
    per_step = config.workers * config.batch
    learned = ratings.size // 2 // per_step * per_step
    day_of = (ratings["time"] - ratings["time"][0]) // 86_400
    settings = {"publish_registry": registry, "publish_rows_s": 0.25}
    async with contextlib.AsyncExitStack() as stack:
        training = await stack.enter_async_context(running_training(config, settings))
        training.stream.append(ratings[:learned])

        feeding = FleetFeed(training, FeedConfig(store=store, registry=registry, publish_dense_s=0.5))
        stack.push_async_callback(feeding.close)
        await feeding.until_learned(learned // per_step)
        models = (FRESH, FROZEN, DAILY)
        for model in models:
            await feeding.export(model)
        fleet = FleetConfig(
            store=store,
            registry=registry,
            models=models,
            shards=2,
            replicas=2,
            replicate_bytes=0,
            http_port=0,
            grpc_port=0,
        )
        at = await stack.enter_async_context(running_fleet(fleet))
        client = AsyncClient(url_of(at, "http"), timeout_ms=2000, retry=RetryPolicy(max_attempts=1))
        live = LiveScores(await stack.enter_async_context(client), models)
        opened, ending = FleetRegistry(open_registry(registry)), asyncio.Event()
        task = asyncio.create_task(feeding.run(ending))

        async def nothing(count: int) -> None:
            pass

        appended, versions = learned, 1
        for day in range(int(day_of[learned]), int(day_of[learned]) + days):
            of_day = ratings[appended:][day_of[appended:] <= day]
            if not of_day.size:
                continue
            await replay(training, live, of_day, chunk=50, ratings_per_s=RATINGS_PER_S, on_chunk=nothing)
            appended += of_day.size
            await feeding.until_learned(appended // per_step)
            path = await feeding.export(DAILY)
            versions = (await publish(opened, path, store, clock=time.time)).record.version
            await start_rollout(opened, DAILY, versions, rollout_id=f"{versions:032x}")
            while (last := await read_rollout(opened, DAILY)) is not None and last.rollout.active:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert last is not None
            assert last.rollout.state == "done", last.rollout.reason
        training.stream.end()
        ending.set()
        await task
        await opened.registry.close()
        seconds = np.percentile(live.seconds_to_score, (50, 99)).tolist()
        return {
            "scored": live.scored, "auc": {model: live.auc(model) for model in models}, "errors": live.errors[:5],
            "daily_versions": versions, "seconds_to_score": seconds, "new_users": len(live.seconds_to_score),
            "unseen": live.unseen,
        }  # fmt: skip


MEASURES = {
    "bytes": measure_bytes, "links": measure_links, "kinds": measure_kinds, "staleness": measure_staleness,
    "fresher": measure_fresher,
}  # fmt: skip


def main() -> None:
    """Run one measure and write what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=MEASURES)
    parser.add_argument("--movielens", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--days", type=int, default=40)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    args.json.write_text(json.dumps(MEASURES[args.what](args), indent=1, default=str) + "\n", encoding="utf-8")
    say(args.json.read_text())


if __name__ == "__main__":
    main()
