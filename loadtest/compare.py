"""`compare-cards`: what rows on several cards, or in shard processes, cost against rows in the serving process.

Each time an arm's server is started anew as users do, measured, and ended. So what differs from one start to the next
(which memory the kernel gives, which core a thread begins on) is in the rounds, over which confidence intervals are
drawn, and not frozen in a ratio; and an arm never shares memory and cores with the servers of the others. In the first
round all arms must give the same scores of a few requests.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click

from loadtest.bench.harness import AT_RATE, BUSY_MEASURES, CPU, Bench, BenchTable, Measure, Values, bench_command
from loadtest.cli import APIS, request_options, workload_option
from loadtest.load.config import INT8_SUMS_TOLERANCE, MAX_RATE, MAX_TIMEOUT_MS, RATE_SHARE, TOLERANCES, OfferedLoad
from loadtest.load.generator import Generators
from loadtest.servers import ANY_PORTS, HOST, ServerCommand, check_scores, free_ports, running_server, summed
from loadtest.workloads.catalog import open_workload
from loadtest.workloads.payloads import FORMS, GRPC_APIS
from loadtest.workloads.prepare import write_random_snapshot
from serving.cli import options as opts
from serving.cli.output import progress_bars
from serving.cli.settings import config_of
from serving.config import RowSettings
from serving.fleet.supervisor import shardrank_command
from serving.models.layers import choose_dtype
from shard_node.answer import WIRE_FORMS
from shard_node.bags import Float32Array
from shard_node.cuda.card_set import DeviceChoice

MAX_ARMS = 16
TRANSPORTS = {"unix": "Unix socket", "tcp": "TCP"}
"""Between serving and shard processes, as names of arms spell it."""
CHECKED_REQUESTS = 8
REHEARSAL_S = 1.0
MEASURES = (
    *BUSY_MEASURES,
    *(Measure(f"{CPU}, {role}", "ms") for role in ("serve", "nodes")),
    *(Measure(f"{percentile}, 1 in flight", "ms") for percentile in ("p50", "p99")),
    *(Measure(f"{percentile}, at the rate", "ms") for percentile in AT_RATE),
    Measure("bytes of a request, back", "B"),
    *(Measure(f"bytes of a request, back as {form}", "B") for form in WIRE_FORMS),
    Measure("bytes of a request, to shards", "B"),
)


@dataclass(frozen=True, slots=True)
class ServedArm:
    """What is compared: cards of each process that has rows, the serving one (`shards` is 0) or shard processes."""

    cards: int
    shards: int = 0
    transport: str = "unix"

    @property
    def name(self) -> str:
        """Write it as `2 cards`, `2 shards, Unix socket`, or `2 shards of 4 cards, TCP`."""
        cards = f"{self.cards} card{'s' if self.cards > 1 else ''}"
        if not self.shards:
            return cards
        each = "" if self.cards == 1 else f" of {cards}"
        return f"{self.shards} shard{'s' if self.shards > 1 else ''}{each}, {TRANSPORTS[self.transport]}"

    def addresses(self, folder: Path) -> tuple[str, ...]:
        """Choose where its shard nodes listen, the first one's first."""
        if self.transport == "unix":
            return tuple(f"unix:{folder / f'{number}.sock'}" for number in range(self.shards))
        # If another program takes one before its node does, the node ends.
        return tuple(f"{HOST}:{port}" for port in free_ports(self.shards))

    def commands(
        self, snapshot: Path, folder: Path, flags: Sequence[str] = (), serve_flags: Sequence[str] = ()
    ) -> list[ServerCommand]:
        """List its shard nodes, with flags of processes that have rows, and last what serves, with its flags."""
        # Tables are divided however small they are: replicated ones would hide what dividing costs.
        common = ("--no-verify", "--snapshot", str(snapshot), "--cards", str(self.cards), "--replicate-bytes", "0")

        def command(verb: str, name: str, *arguments: str) -> ServerCommand:
            line = shardrank_command(verb, *common, *arguments)
            return ServerCommand(name, line, folder / f"{name.replace(' ', '-')}.log")

        addresses = self.addresses(folder)
        nodes = [
            command("shard-node", f"shard {number}", "--shard", f"{number}/{self.shards}", "--listen", address, *flags)
            for number, address in enumerate(addresses)
        ]
        shards = [text for address in addresses for text in ("--shard", address)] if addresses else flags
        return [*nodes, command("serve", "server", "--shutdown-delay-s", "0", *ANY_PORTS, *serve_flags, *shards)]


def compared_arms(cards: Sequence[int], shards: Sequence[int], transports: Sequence[str]) -> list[ServedArm]:
    """List the arms in the order of the table; the first is the baseline. Raises click.UsageError."""
    if unknown := set(transports) - TRANSPORTS.keys():
        raise click.UsageError(f"--transport: {sorted(unknown)} are none of {', '.join(TRANSPORTS)}")
    arms = [ServedArm(number) for number in cards]
    if cards:
        arms += [ServedArm(cards[0], count, transport) for count in shards for transport in transports]
    if len(set(arms)) != len(arms) or not 2 <= len(arms) <= MAX_ARMS:
        problem = f"{[arm.name for arm in arms]} are {len(arms)} arms; a comparison has 2 to {MAX_ARMS} different ones"
        raise click.UsageError(f"--cards, and --shards with each --transport: {problem}")
    return arms


def wire_bytes(before: str, after: str) -> Values:
    """Return the bytes to and from shards for each request answered between two metrics pages of a serving process.

    Empty where no bytes were sent.
    """

    def grown(sample: str, label: str) -> dict[str, float]:
        old, new = summed(before, sample, label), summed(after, sample, label)
        return {value: count - old.get(value, 0.0) for value, count in new.items()}

    replies = grown("shardrank_shard_answer_bytes_total", "form")
    answered = grown("shardrank_requests_total", "status").get("ok", 0.0)
    if not (answered and sum(replies.values())):
        return {}
    sent = {
        "back": sum(replies.values()),
        **{f"back as {form}": size for form, size in replies.items()},
        "to shards": sum(grown("shardrank_shard_request_bytes_total", "").values()),
    }
    return {f"bytes of a request, {way}": size / answered for way, size in sent.items()}


@dataclass(slots=True)
class ArmMeasure:
    """Measure one server after the other, asked by the same process with the same requests; `tolerance` is of scores.

    `expected` are those of the first arm that was measured, float32 [candidates] by request; `rate` is the requests/s
    of an open loop, 0 for none.
    """

    bench: Bench
    generators: Generators
    load: OfferedLoad
    snapshot: Path
    flags: Sequence[str]
    serve_flags: Sequence[str]
    in_flight: int
    seconds: float
    tolerance: float
    rate: float = 0.0
    expected: list[Float32Array] = field(default_factory=list)

    def measure(self, arm: ServedArm, number: int, seconds: float | None = None) -> Values:
        """Start, measure and end an arm's server. Raises LoadError: it ends, or gives other scores than the others."""
        folder, seconds = Path(tempfile.mkdtemp(dir=self.bench.folder)), self.seconds if seconds is None else seconds
        commands = arm.commands(self.snapshot, folder, self.flags, self.serve_flags)
        with running_server(arm.name, commands) as server:
            load = self.load.model_copy(update={"target": server.target(self.load.spoken)})
            alone, before = self.bench.busy_values(self.generators, load, server, 1, seconds), server.metrics()
            values = self.bench.busy_values(self.generators, load, server, self.in_flight, seconds)
            values |= wire_bytes(before, server.metrics())
            if self.rate:
                at_rate = self.bench.values_at(self.rate, self.generators, load, number, seconds)
                values |= {f"{name}, at the rate": value for name, value in at_rate.items() if name in AT_RATE}
            if number == 0:
                scores = [self.generators.scores(load, request) for request in range(CHECKED_REQUESTS)]
                self.expected = self.expected or scores
                check_scores(arm.name, scores, self.expected, self.tolerance)
        return values | {f"{percentile}, 1 in flight": alone[percentile] for percentile in ("p50", "p99")}


@bench_command
@opts.numbers("--cards N,...", "In the serving process; each number is an arm, the first the baseline.", 1, 64, "1,2,4")
@opts.numbers("--shards N,...", "Arms of so many shard processes, with the first of --cards each.", 1, 64)
@opts.option(
    "--transport unix,tcp",
    "Between the serving process and the shards, an arm for each: Unix sockets, TCP over loopback.",
    lambda text: tuple(text.split(",")),
    "unix",
    name="transports",
)
@workload_option
@request_options
@opts.choice("--api", APIS, "oip: Open Inference Protocol, over HTTP with binary tensors.")
@opts.count("--requests", "Distinct ones. Default: 1024.")
@opts.count("--in-flight", "Requests that are always out while throughput, CPU and bytes of a request are measured.",
            1, 4096, 32)  # fmt: skip
@opts.option("--rate R", "Arrivals a second of an open loop, for latency under load. Default: half of what the first "
             "arm answers.", click.FloatRange(0.1, MAX_RATE))  # fmt: skip
@opts.option("--seconds S", "Of each of the three measures, after a fifth of them as a warm-up.",
             click.FloatRange(0.1, 3600), 5.0)  # fmt: skip
@opts.count("--seed", "Of rows and requests.", low=0, default=0)
@opts.count("--workers", "Serving processes of each server. In arms without shards each holds all rows.", 1, 64, 1)
@opts.choice("--dtype", ["auto", "float32", "bfloat16", "int8"], "Number format of the dense model.")
@opts.setting_option(RowSettings, "device")
def compare_cards(
    bench: Bench,
    cards: tuple[int, ...],
    shards: tuple[int, ...] | None,
    transports: tuple[str, ...],
    in_flight: int,
    rate: float | None,
    seconds: float,
    workers: int,
    dtype: Any,
    device: str,
    **given: object,
) -> None:
    """Measure what rows on several cards, or in shard processes, cost against rows in the serving process.

    The same model and requests for each arm, as ratios to the first number of cards. In every round each arm's server
    is started anew and asked one request after the other, then as fast as it answers, for the processor time and the
    bytes of a request, then at a rate, for latency under load. Arms take turns, and must give the same scores. Other
    settings of the servers are variables, such as SHARDRANK_WIRE_DTYPE or, for the memory of cards, SHARDRANK_HOT_GB.

    Examples:
      shardrank loadtest compare-cards --cards 1,2,4,8 --shards 1,2,4 --transport unix,tcp --json many.json
      shardrank loadtest compare-cards --cards 1,2 --device cuda --in-flight 64
      shardrank loadtest compare-cards --cards 1 --shards 2 --rounds 10 --workers 2 --workload bench-mlp:20
    """
    arms = compared_arms(cards, shards or (), transports)
    # Until a server has its port: the settings are checked before anything is started.
    target = "grpc://127.0.0.1:1" if given["api"] in GRPC_APIS else "http://127.0.0.1:1"
    load = config_of(OfferedLoad, {**given, "target": target, "timeout_ms": MAX_TIMEOUT_MS})
    DeviceChoice.parse(device)
    serve_flags = ("--workers", str(workers), "--dtype", dtype)
    with Generators() as generators:
        with progress_bars() as bars:
            workload, store = open_workload(str(given["workload"])), bench.folder / "store"
            snapshot = write_random_snapshot(workload.spec, store, seed=load.seed, workloads=[workload], progress=bars)
        measured = ArmMeasure(
            bench, generators, load, snapshot, ("--device", device), serve_flags, in_flight, bench.seconds(seconds),
            max(TOLERANCES[choose_dtype(dtype)], INT8_SUMS_TOLERANCE if shards else 0.0),
        )  # fmt: skip
        # What the first start on a machine pays, such as reading files from the disk, would be in one arm alone.
        rehearsed = measured.measure(arms[0], 1, bench.seconds(REHEARSAL_S))
        bench.problems.clear()
        measured.rate = rate or RATE_SHARE * rehearsed["requests"]
        subjects = {arm.name: partial(measured.measure, arm) for arm in arms}
        setup = {
            "workload": generators.prepare(load)[0].workload,
            "api": load.spoken,
            "requests are": FORMS[load.varied],
            "rate": f"{measured.rate:.1f}/s",
            "serving processes": f"{workers}",
            "device": device,
            "dense model": dtype,
        }
        bench.run([BenchTable(f"cards and shards, {in_flight} in flight", MEASURES, subjects, setup)])
