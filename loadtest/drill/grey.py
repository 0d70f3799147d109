"""`drill grey`: processes that hang, networks that lose or delay, full disks and memory; what do clients see of it?"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from loader.errors import ShardrankError
from loader.progress import Progress
from loader.snapshot.publishing import rows_bytes_of
from loadtest.drill.config import Fault, GreyDrillConfig, Judged, Limit, Report
from loadtest.drill.crash import GIVE_UP_S, MAX_RECOVERY_S, PREFIXES
from loadtest.drill.fleet import OracleFleet, TimeSpan, count_kinds, oracle_fleet, overlaps, polled
from loadtest.drill.oracle import oracle_spec
from loadtest.drill.proxy import TcpProxy, listening
from loadtest.drill.trainer import running_trainer
from loadtest.errors import LoadError
from loadtest.load.result import OK, Rows, percentiles
from loadtest.servers import HOST, free_ports

DELAY_S: Final = 0.2
DISK_MB: Final = 128
NODE_VERSIONS: Final = 2
"""A shard node has memory for the rows of all shards of so many versions,"""
LARGER: Final = 8
"""and none for a version with so many times the users."""
BEHIND_PROXY, ON_DISK = "shard-0-1", "shard-1-1"
ON_DISK_GB: Final = 0.0005
"""Memory of `ON_DISK`, whose rows are on disk: too little for any row that deltas change."""
DISKS: Final = {"full-store": "store", "full-redis": "redis", "full-recordings": "recordings"}
OF_SHARD_NODES: Final = ("stop-shard-node", "lose-requests", "lose-replies", "delay", "memory-version", "memory-deltas")
REFUSING: Final = ("full-store", "memory-version", "memory-deltas")
"""Something must be refused during these; after them, a version is rolled out."""


async def run_drill(config: GreyDrillConfig, folder: Path, progress: Progress) -> Report:
    """Run the drill with its files in the folder. Raises LoadError if it can't be run to its end."""
    (node_port, *ports), results = free_ports(1 + 2 * config.workers), list[dict[str, Any]]()
    memory_gb = NODE_VERSIONS * rows_bytes_of(oracle_spec(config)) / 1e9
    config = config.model_copy(update={"serve": {"record_share": 1.0}, "shard_node": {"max_memory_gb": memory_gb}})
    async with contextlib.AsyncExitStack() as stack:
        for fault in sorted(set(config.faults) & DISKS.keys()):
            stack.enter_context(small_disk(folder / DISKS[fault]))
        proxy = await stack.enter_async_context(listening(TcpProxy(lambda: asyncio.open_connection(HOST, node_port))))
        processes: dict[str, dict[str, Any]] = {
            BEHIND_PROXY: {"listen": [f"{HOST}:{node_port}"], "advertise": f"{HOST}:{proxy.port}"},
            ON_DISK: {"memory_budget_gb": 0.0, "max_memory_gb": ON_DISK_GB},
        }
        for worker in range(config.workers):
            record = folder / "recordings" / str(worker)
            processes[f"serve-{worker}"] = {"http_port": ports.pop(), "grpc_port": ports.pop(), "record": record}
        fleet = await stack.enter_async_context(oracle_fleet(config, folder, progress, processes=processes))
        cases = [(fault, number) for fault in config.faults for number in range(config.times)]
        for fault, number in cases:
            progress("faults", len(results), len(cases))
            results.append(await _run_case(fleet, config, proxy, fault, number))
            if results[-1]["lag"]:
                # What a further fault would show says nothing about that fault.
                break
        progress("faults", len(cases), len(cases))
        return await fleet.report(partial(grey_figures, config, results))


async def _run_case(
    fleet: OracleFleet, config: GreyDrillConfig, proxy: TcpProxy, fault: Fault, number: int
) -> dict[str, Any]:
    """Return the figures of the report but those of answers; times are of CLOCK_MONOTONIC."""
    begin = time.monotonic()
    async with placed(fleet, proxy, fault, number) as where:
        refusal = await _refusal(fleet, config, fault, begin + config.seconds) if fault in REFUSING else ""
        await asyncio.sleep(begin + config.seconds - time.monotonic())
    ended = time.monotonic()
    lag = await polled(fleet.lag, lambda reason: not reason, GIVE_UP_S)
    settled_s = time.monotonic() - ended
    if fault in REFUSING and not lag:
        try:
            await fleet.swap_to(await fleet.publish_next(differs_from=await fleet.live_version()))
        except ShardrankError as error:
            lag = str(error)
    await asyncio.sleep(ended + config.seconds - time.monotonic())
    times = {"begin": begin, "ended": ended, "watched_until": ended + config.seconds}
    settled = {"settled_s": None if lag else settled_s, "lag": lag, "refusal": refusal}
    return {"fault": fault, "where": where, **times, **settled}


@contextlib.asynccontextmanager
async def placed(fleet: OracleFleet, proxy: TcpProxy, fault: Fault, number: int) -> AsyncIterator[str]:
    """Have a fault while the block runs, of several processes in each in turn. Yields where it is."""
    if fault.startswith("stop-"):
        children = fleet.local.supervisor.children
        names = [name for name in children if name.startswith(PREFIXES.get(fault.removeprefix("stop-"), "-"))]
        child = children[names[number % len(names)]] if names else fleet.redis
        if child is None or (stopped := child.pid) is None:
            raise LoadError(f"{fault}: it does not run")
        os.kill(stopped, signal.SIGSTOP)
        try:
            yield child.spec.name
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGCONT)
    elif fault in DISKS:
        with filled(fleet.folder / DISKS[fault]):
            yield DISKS[fault]
    elif fault in REFUSING:
        yield ON_DISK if fault == "memory-deltas" else "shard nodes"
    else:
        direction = proxy.requests if fault == "lose-requests" else proxy.replies
        direction.is_black, direction.delay_s = fault != "delay", DELAY_S if fault == "delay" else 0.0
        try:
            yield BEHIND_PROXY
        finally:
            direction.is_black, direction.delay_s = False, 0.0


async def _refusal(fleet: OracleFleet, config: GreyDrillConfig, fault: Fault, ends: float) -> str:
    """Do what must be refused during a fault. Returns the reason; empty if it was not refused."""
    live = await fleet.live_version()
    if fault == "memory-deltas":
        async with running_trainer(fleet, config, Counter(), {}):
            await asyncio.sleep(ends - time.monotonic())
            nodes = {node.node_id: node for node in await fleet.registry.nodes()}
        report = nodes[ON_DISK].report(config.model, live) if ON_DISK in nodes else None
        return "" if report is None else report.reason
    larger = {"users": LARGER * config.users} if fault == "memory-version" else {}
    try:
        version = await fleet.publish_next(live, oracle_spec(config.model_copy(update=larger)))
        return (await fleet.run_rollout(version)).reason
    except (ShardrankError, OSError) as error:
        left = [path.name for path in fleet.store.glob(f"*/{fleet.exported}")]
        return "" if left else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a file system of `DISK_MB` at a new folder. Raises LoadError for a user who may not."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=0700", "shardrank-drill", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LoadError(f"a small disk at {folder}: {done.stderr.strip()}; without the right to mount leave full-* out")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Leave no room on a folder's disk while the block runs."""
    # What others write meanwhile may take the last bytes of it.
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    try:
        yield
    finally:
        (folder / "filler").unlink()


def grey_figures(config: GreyDrillConfig, cases: Sequence[Mapping[str, Any]], answers: Rows) -> Judged:
    """Return what the cases and all answers say, by the names of the report, and the limits."""
    figures: dict[str, Any] = {**count_kinds(answers["code"]), "faults": {}, "results": []}
    limits = [Limit(name, figures[name], 0) for name in ("mixed", "wrong")]
    for fault in config.faults:
        results = [dict(case) for case in cases if case["fault"] == fault]
        for result in results:
            seen = answers[overlaps(answers, [TimeSpan(result["begin"], result["watched_until"])])]
            # It has not settled while requests fail.
            late_s = (seen["due"] - result["ended"])[seen["code"] != OK].tolist()
            if result["settled_s"] is not None:
                result["settled_s"] = max(result["settled_s"], *late_s, 0.0)
            result.update(count_kinds(seen["code"]))
        seen = answers[overlaps(answers, [TimeSpan(result["begin"], result["watched_until"]) for result in results])]
        settled = [result["settled_s"] for result in results]
        counts = count_kinds(seen["code"])
        share = 1 - counts["failed"] / counts["answers"] if seen.size else None
        settled_s = None if None in settled or not settled else max(settled)
        p99_ms = percentiles((seen["ended"] - seen["due"])[seen["code"] == OK]).p99_ms
        figures["faults"][fault] = {**counts, "answered_share": share, "p99_ms": p99_ms, "settled_s_max": settled_s}
        figures["results"] += results
        least = {
            "times": (len(results), config.times),
            "answered_share": (share, 0.999 if fault in OF_SHARD_NODES else 0.99),
        }
        if fault in REFUSING:
            least["refused"] = sum(bool(result["refusal"]) for result in results), config.times
        limits += [Limit(f"{fault}: {name}", *value, "at least") for name, value in least.items()]
        limits.append(Limit(f"{fault}: settled_s_max", settled_s, MAX_RECOVERY_S))
    return figures, limits
