"""Measure rows by tier in little memory: hit rate, requests a second, times, and reads against the disk's rate.

    python scripts/measure_row_tiers.py STORE [--rows N] [--seconds S] --json FILE

Writes a table of N int8 rows of 128 into STORE, once. Each way to serve it is a process in a control group of its own,
whose memory is a tenth of the table's bytes: rows by tier, the page cache alone (one mapped file), and reads of random
rows with nothing else. Ids follow the law of the chapter, 85 % of them by r^-1.1 of the first 5,000 rows, the others
anywhere; a request has 100 bags of 20. Needs the right to make control groups: else it says so, and ends.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from loader.snapshot.buckets import RowBuckets
from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.reader import Snapshot
from loader.snapshot.tables import TableSpec
from loader.snapshot.writer import export_snapshot
from loadtest.workloads.prepare import RandomRows, random_dense
from router.plan import Plan
from shard_node.bags import Bags
from shard_node.engine.kernels import as_tensor, pool_rows
from shard_node.engine.loading import prepare_load
from shard_node.engine.memory import SLOT_BYTES, RowMemory
from shard_node.engine.row_files import RowFile, RowFiles

DIM, HEAD, BAGS, IDS = 128, 5000, 100, 20
ROW_BYTES = DIM + 8
# What a process has in memory beside rows: Python, NumPy and torch.
PROCESS_BYTES = 450 << 20
THREADS = 8


def spec_of(rows: int) -> ModelSpec:
    """Describe one table of as many rows in one file."""
    table = TableSpec(name="rows", num_embeddings=rows, embedding_dim=DIM, feature_names=("ids",), dtype="int8")
    return ModelSpec(
        model="tiers",
        tables=(table,),
        features=(FeatureSpec(name="ids", side="candidate"),),
        dense_model=DenseModelSpec(kind="mlp", config={"hidden": [8]}),
    )


def export(store: Path, rows: int) -> Path:
    """Write the table, if it is not there, with counts of the law's head."""
    if (folder := store / "tiers" / "1").exists():
        return folder
    spec = spec_of(rows)
    head = np.zeros(rows, np.uint32)
    head[:HEAD] = np.ceil(1e6 * np.arange(1, HEAD + 1) ** -1.1)
    source, dense = {"rows": RandomRows(0, "rows", rows, DIM)}, random_dense(spec, 0)
    one_file = 1 << (rows - 1).bit_length()
    return export_snapshot(store, spec, rows=source, dense=dense, access_counts={"rows": head}, rows_per_file=one_file)


def draw(rng: np.random.Generator, rows: int, size: int) -> np.ndarray:
    """Draw ids by the chapter's law, int64 [size]."""
    weights = np.cumsum(np.arange(1, HEAD + 1) ** -1.1)
    head = weights.searchsorted(rng.random(size) * weights[-1])
    return np.where(rng.random(size) < 0.85, head, rng.integers(HEAD, rows, size))


def bags_of(ids: np.ndarray) -> Bags:
    """Put ids into bags of one table."""
    return Bags.from_lengths(np.zeros(1, np.int32), np.array([BAGS]), np.full(BAGS, IDS), ids)


class OnlyReads:
    """Reads random rows as fast as the disk gives them."""

    def __init__(self, snapshot: Snapshot, _: int) -> None:
        self.rows = snapshot.spec.tables[0].num_embeddings
        self._files = RowFiles([RowFile(*snapshot.rows_at("rows", 0), self.rows)], ROW_BYTES)

    def pool(self, ids: np.ndarray) -> None:
        """Read as many rows as there are cold ones in a request, from anywhere."""
        self._files.read(np.random.default_rng(int(ids[0])).integers(0, self.rows, int((ids >= HEAD).sum())))

    def report(self) -> dict[str, Any]:
        """Return nothing."""
        return {}


class PageCache:
    """Pools from the mapped file: the kernel chooses which rows are in memory, and reads single pages."""

    def __init__(self, snapshot: Snapshot, _: int) -> None:
        table, (path, offset) = snapshot.spec.tables[0], snapshot.rows_at("rows", 0)
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        mapped.madvise(mmap.MADV_RANDOM)
        self._mapped = as_tensor("int8", np.frombuffer(mapped, np.uint8, offset=offset).reshape(-1, ROW_BYTES))
        self._order = RowBuckets.of(table).in_file(1 << (table.num_embeddings - 1).bit_length(), 0)

    def pool(self, ids: np.ndarray) -> None:
        """Pool a request."""
        pool_rows("int8", self._mapped, self._order.positions(ids), np.arange(BAGS + 1) * IDS, None)

    def report(self) -> dict[str, Any]:
        """Return nothing."""
        return {}


class Tiers:
    """Pools by tier, with the hottest rows in so many bytes."""

    def __init__(self, snapshot: Snapshot, hot_bytes: int) -> None:
        plan, self.rows = Plan.make(snapshot.spec), snapshot.spec.tables[0].num_embeddings
        load = prepare_load(snapshot, plan.partition(0), plan.digest, memory_budget_bytes=hot_bytes)
        self.engine = load.run(load.take(RowMemory(reserve_bytes=0))).engine

    def pool(self, ids: np.ndarray) -> None:
        """Pool a request."""
        self.engine.pool(bags_of(ids))

    def report(self) -> dict[str, Any]:
        """Return lookups by tier, and what was read."""
        lookups = {count.tier: count.rows for count in self.engine.rows_looked_up()}
        rng = np.random.default_rng(0)
        for _ in range(500):  # Alone: with all rows in memory, and with all on disk.
            self.engine.pool(bags_of(rng.integers(0, HEAD, BAGS * IDS)))
        for _ in range(100):
            self.engine.pool(bags_of(rng.integers(HEAD, self.rows, BAGS * IDS)))
        use = self.engine.disk_use()
        assert use is not None
        return {"hit_rate": lookups["ram"] / sum(lookups.values()), **use.model_dump(exclude={"model", "version"})}


WAYS: dict[str, Callable[[Snapshot, int], Any]] = {
    "reads": OnlyReads,
    "page cache": PageCache,
    "tiers": Tiers,
}


def serve(sender: Connection, way: str, folder: Path, hot_bytes: int, seconds: float, group: Path | None) -> None:
    """Serve requests on threads, and send what was measured."""
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    started_at = time.monotonic()
    served = WAYS[way](Snapshot.open(folder, verify=False), hot_bytes)
    load_s, rows = time.monotonic() - started_at, Snapshot.open(folder, verify=False).spec.tables[0].num_embeddings
    until, times = time.monotonic() + seconds * 1.5, list[list[tuple[float, float]]]()

    def work(number: int) -> None:
        rng, of_thread = np.random.default_rng(number), list[tuple[float, float]]()
        times.append(of_thread)
        while (now := time.monotonic()) < until:
            ids = draw(rng, rows, BAGS * IDS)
            begun_at = time.monotonic()
            served.pool(ids)
            of_thread.append((now, time.monotonic() - begun_at))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The first third warms up.
    measured = np.array([took for of_thread in times for at, took in of_thread if at > until - seconds])
    result: dict[str, Any] = {
        "way": way,
        "hot_bytes": hot_bytes,
        "load_s": load_s,
        "requests_per_s": measured.size / seconds,
    }
    if measured.size:
        result |= dict(zip(("p50_ms", "p99_ms"), (1e3 * np.percentile(measured, [50, 99])).tolist(), strict=True))
    result["cpu_s"] = time.process_time()
    if way == "reads":
        result["reads_per_s"] = result["requests_per_s"] * BAGS * IDS * 0.15
    sender.send(result | served.report())


def control_group(limit_bytes: int) -> Path | None:
    """Make a group with a limit of memory below this process's own; None, with the reason printed, if it may not."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        top, name = (
            ("/sys/fs/cgroup", "memory.max") if not controllers else ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
        )
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = Path(top + group) / f"row-tiers-{os.getpid()}"
        try:
            folder.mkdir()
            (folder / name).write_text(str(limit_bytes))
        except OSError as error:
            sys.stderr.write(f"{folder}: {error}\n")
            continue
        return folder
    return None


def forget_pages(folder: Path) -> None:
    """Drop the files' pages from the page cache, so that each way begins with none, and all are of its group."""
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    """Measure all ways, twice in turn, and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--rows", type=int, default=75_000_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    folder = export(options.store, options.rows)
    limit = options.rows * ROW_BYTES // 10
    group = control_group(limit)
    if group is None:
        raise SystemExit("no control group with a limit of memory can be made: not measured")
    head_bytes = HEAD * (ROW_BYTES + SLOT_BYTES)
    ways = [
        ("reads", 0),
        ("page cache", 0),
        ("tiers", head_bytes),
        ("tiers", max(head_bytes, limit - PROCESS_BYTES)),
    ]
    results: list[dict[str, Any]] = []
    try:
        for _ in range(options.rounds):
            for way, hot_bytes in ways:
                forget_pages(folder)
                receiver, sender = multiprocessing.Pipe(duplex=False)
                arguments = sender, way, folder, hot_bytes, options.seconds, group
                process = multiprocessing.get_context("spawn").Process(target=serve, args=arguments)
                process.start()
                sender.close()
                try:
                    results.append(receiver.recv())
                except EOFError:
                    results.append({"way": way, "hot_bytes": hot_bytes, "failed": "the process ended: out of memory?"})
                process.join()
                sys.stdout.write(f"{results[-1]}\n")
                sys.stdout.flush()
    finally:
        group.rmdir()
    document = {"rows": options.rows, "table_bytes": options.rows * ROW_BYTES, "limit_bytes": limit, "results": results}
    options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
