"""`shardrank plan`: what a model takes on a node of CPUs or cards, and how fast its lookups can be; needs no card."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from serving.cli import WithExamples
from serving.cli import options as opts
from serving.cli.output import MAX_ROWS, print_document, print_json
from serving.cli.settings import Options, config_of
from serving.config import DEFAULT_PINNED_GB, DivisionSettings

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from loader.access_counts import AccessCounts
    from loader.snapshot.manifest import ModelSpec
    from loader.snapshot.reader import Snapshot
    from router.planning.inputs import CapacityOptions, LookupProfile
    from shard_node.planning.hotness import Head

MANIFEST_NAME = "manifest.json"
DTYPES = ("int8", "int4", "fp16", "fp32")
SYSTEM_NAMES = ("a100", "h100", "h200", "gb200")
"""The keys of `SYSTEMS`, repeated because importing them would make `--help` slow; a test compares them."""
ROWS_PER_S = 20e6
"""Of a core, assumed: docs/measurements/2026-11-21-lookup.md has 15 to 50 million for int8 of 64 and 128."""
MAX_MEASURED_BYTES = 1 << 30
_OF_GPUS = ("cards", "card_memory_gb", "pinned_memory_gb", "hot_gb", "no_peer_access")
_OF_CPUS = ("cores", "ram_gb", "disk_gb", "rows_per_s", "measure")


def _head(text: str) -> Head:
    from shard_node.planning.hotness import Head

    rows, _, share = text.partition(":")
    try:
        head = Head(int(rows), float(share))
    except ValueError:
        head = Head(0, 0.0)
    if not (1 <= head.rows < 2**48 and 0 <= head.share <= 1):
        raise click.BadParameter(f"{text!r} is not ROWS:SHARE, such as 5000:0.85.")
    return head


@click.command(cls=WithExamples)
@opts.option(
    "--model FILE",
    "A model description, a snapshot's folder or manifest, or a published model by name: dlrm-v2, dlrm-criteo-113b, "
    "merlin-tiny, -small, -medium, -large, -jumbo, -colossal, textbook; with :SCALE for that share of its rows.",
)
@opts.option(
    "--system",
    "GPUs, whose bandwidths are known, or none. Default: cpu; h100 with --cards or another option of GPUs.",
    click.Choice(("cpu", *SYSTEM_NAMES)),
)
@opts.count("--cores", "With cpu: of each node. Default: this machine's, as of all that is of cpu.")
@opts.gigabytes(
    "--ram-gb", "With cpu: for rows, in 10^9 bytes. Default: all but what a node keeps free.", above_zero=True
)
@opts.gigabytes("--disk-gb", "With cpu: for tables that RAM has no room for. Default: what is free in this folder.")
@opts.option("--rows-per-s N", "With cpu: rows that a core pools. Default: 20 million, assumed.", opts.ABOVE_ZERO)
@opts.switch("--measure", "With cpu: measure --rows-per-s here, with rows like the model's; some seconds.")
@opts.count("--cards", "Cards of each node; default: the system's.", 1, 64)
@opts.gigabytes(
    "--card-memory-gb", "Of each card, for rows and places, in 10^9 bytes; default: all of the card.", above_zero=True
)
@opts.gigabytes("--pinned-memory-gb", f"Host memory for rows that no card has room for. Default: {DEFAULT_PINNED_GB}.")
@opts.gigabytes(
    "--hot-gb",
    "Of each card, for copies of the hottest rows. Default: what all rows leave of the card, else a sixteenth.",
)
@opts.count("--versions", "Versions side by side, each with its part of the memory; a rollout needs 2.", 1, 8, 1)
@opts.count("--shards", "Nodes that share rows.", 1, 1024, 1)
@opts.settings_options(DivisionSettings, "sharding", "replicate_bytes")
@opts.switch("--no-peer-access", "Plan for cards that can't read each other's memory.")
@opts.option("--batch", "Candidates of a batch.", click.IntRange(1, 10_000_000), 500, name="candidates")
@opts.count("--requests", "Requests of a batch; context features are looked up once for each.", 1, 10_000_000, 1)
@opts.assignments(
    "--hotness FEATURE=N",
    "Ids in a bag of a feature, in the mean. Default: what the published model or the snapshot's golden requests have, "
    "else 1.",
    float,
)
@opts.option(
    "--zipf S", "Row r is looked up in proportion to r^-S. Default: as published, else 0.", opts.FiniteRange(0, 8)
)
@opts.option(
    "--head ROWS:SHARE",
    "Only the first ROWS of a table follow --zipf, for that share of the lookups; the others go to all rows alike.",
    _head,
)
@opts.network_options
@opts.option(
    "--counts", "How often rows are looked up: what `shardrank counts` wrote. Default: the snapshot's.", opts.EXISTING
)
@opts.ids_option
@opts.option("--dtype", "Of stored rows. Default: the model's; published models have int8.", click.Choice(DTYPES))
@opts.pruning_options
@opts.assignments(
    "--what-if OPTION=VALUE",
    "Change an option of plan, such as shards=32, dtype=int4, hot-rows=5000, rows=N, dim=N, replicas=2, workers=8, "
    "update-rate=N or model=FILE: bytes of all tables and of a step, before and after, and which budget binds.",
)
@opts.count("--replicas", "With --what-if: nodes that have the same shard. Default: 1.")
@opts.option("--update-rate N", "With --what-if: rows a second that training changes. Default: 0.", opts.FiniteRange(0))
@opts.option(
    "--step-ms MS", "With --what-if: what a step may take on a line of the network. Default: 10.", opts.ABOVE_ZERO
)
@opts.switch("--training", "Reckon what a step of training sends, in place of serving.")
@opts.count("--params", "With --training: parameters of the dense half, P.")
@opts.count("--workers", "With --training: processes that train, K. With --what-if: that look rows up. Default: 1.")
@opts.count("--servers", "With --training: parameter servers, S.")
@opts.count("--rows", "With --training: rows of the table, V. With --what-if: of the largest; others in proportion.")
@opts.count("--dim", "With --training: numbers of a row. With --what-if: of the widest table; others in proportion.")
@opts.count("--worker-ids", "With --training: different rows that a worker looks up in a step.")
@opts.count("--number-bytes", "With --training: of a parameter and of a gradient. Default: 4.")
@opts.switch("--compare", "Choose for each table how it is divided, and compare with dividing all tables alike.")
@opts.option("--out", "Choose for each table, and write the plan to FILE, for `--plan`.", opts.WRITABLE_FILE)
@opts.json_flag("the plan")
def plan(compare: bool, out: Path | None, what_if: dict[str, str], training: bool, **options: Any) -> None:
    """Reckon what a model takes on a node, of CPUs or of cards.

    A description is planned with all that makes its tables smaller; with --counts also pruned. Prints bytes by card
    and tier, how tables are split, what does not fit, and the least time that a batch's lookups take: the engine's own
    placement, and rows that a core pools, or bandwidths of docs/nvlink.md. Nothing is measured but by --measure, and
    no card is needed. Exit code 1 if the model can't be served so at all.

    How tables are divided over shards is --sharding's to say, or with --compare or --out chosen for each table: whole
    on a shard, by rows, by columns, by both, or copied to every shard, by the time of the slowest shard and of the
    network, and by how often rows are looked up. docs/plan.md is about it.

    With --training: what a step of data-parallel training sends by parameter servers and by all-reduce. With --what-if:
    what a change relieves, the memory of a host, the network or row updates; nothing is placed.

    Examples:
      shardrank plan --model models/shop/3 --measure
      shardrank plan --model shop.json --system cpu --cores 16 --ram-gb 60 --shards 2 --versions 2
      shardrank plan --model dlrm-v2 --cards 8 --card-memory-gb 80
      shardrank plan --model shop.json --cards 2 --hotness history=50 --zipf 1.05
      shardrank plan --model models/shop/3 --system gb200 --versions 2 --json
      shardrank plan --model shop.json --counts shop-counts.safetensors
      shardrank plan --model shop.json --counts shop-counts.safetensors --prune --keep-share 0.999
      shardrank plan --model shop.json --ids item=clicked-items.npy --ids user=users.npy
      shardrank plan --model textbook --dtype fp32 --shards 16 --cards 1 --batch 65536
      shardrank plan --model merlin-jumbo --shards 4 --cards 8 --compare
      shardrank plan --model models/shop/3 --shards 2 --cards 4 --out plan.json
      shardrank plan --training --params 50000000 --workers 8 --servers 1 --rows 100000000 --dim 128 --worker-ids 4096
      shardrank plan --model textbook --dtype fp32 --shards 16 --ram-gb 64 --batch 65536 --what-if shards=32
    """
    from router.planning.training import TrainingStep, training_traffic
    from router.planning.what_if import StepOptions, compared_use, step_use

    if what_if and (compare or out is not None):
        raise click.UsageError("--what-if changes how all tables are divided alike: not with --compare or --out.")
    changed = _changed(options, what_if)
    in_training, in_steps = TrainingStep.model_fields, StepOptions.model_fields
    allowed = in_training if training else {*in_steps, "rows", "dim"} if what_if else ()
    if wrong := [name for name in (*in_training, *in_steps) if changed[name] is not None and name not in allowed]:
        mode = "--training" if wrong[0] in in_training else "--what-if"
        raise click.UsageError(f"--{wrong[0].replace('_', '-')} goes with {mode}.")
    if training and changed["model"] is not None:
        raise click.UsageError("--model does not go with --training, which takes --rows and --dim.")

    def use_of(options: Options) -> dict[str, Any]:
        if training:
            return training_traffic(config_of(TrainingStep, options))
        return step_use(*_inputs(options), config_of(StepOptions, options))

    if what_if:
        uses = [use_of(options), use_of(changed)]
        compared = dict(zip(("before", "after"), uses, strict=True)) if training else compared_use(*uses)
        document = {"what_if": what_if, **compared}
    else:
        document = use_of(options) if training else _planned(options, compare, out)
    print_json(document) if options["as_json"] else print_document(document, max_rows=MAX_ROWS)


_HOT_ROWS = {"hot_rows_gb": 0.0, "hot_rows": None, "hit_rate": None}


def _changed(options: Options, changes: dict[str, str]) -> Options:
    """Return options of `plan` with changes of `--what-if`; one of those that bound hot rows replaces the others."""
    context, changed = click.get_current_context(), dict(options)
    of_plan = [param for param in context.command.params if isinstance(param, click.Option) and param.name in options]
    known = {param.opts[0].removeprefix("--"): param for param in of_plan if not (param.is_flag or param.multiple)}
    for name, text in changes.items():
        if (param := known.get(name.replace("_", "-"))) is None:
            raise click.UsageError(f"--what-if {name}={text}: {name!r} is none of {', '.join(sorted(known))}.")
        changed |= _HOT_ROWS if param.name in _HOT_ROWS else {}
        changed[str(param.name)] = param.type_cast_value(context, text)
    return changed


def _inputs(options: Options) -> tuple[ModelSpec, LookupProfile, CapacityOptions]:
    """Return the model, what it looks up, and the nodes that are planned for. Raises as `planned_model`."""
    from loader.snapshot.tables import NUM_BUCKETS
    from router.planning.inputs import CapacityOptions, NetworkOptions
    from router.planning.what_if import resized

    if options["model"] is None:
        raise click.UsageError("Missing option '--model'.")
    spec, profile = planned_model(options)
    spec = resized(spec, profile, options["rows"], options["dim"])
    profile = profile.with_hotness(spec, options["hotness"])
    profile = replace(profile, **{name: options[name] for name in ("zipf", "head") if options[name] is not None})
    buckets = min(NUM_BUCKETS[table.bucketing] for table in spec.tables)
    if options["shards"] > buckets and options["sharding"] != "table":
        raise click.UsageError(f"--shards: rows are divided by {buckets} buckets, so into as many shards at most.")
    network = None
    if options["shards"] > 1:
        line = {"gb_per_s": options["network_gb_per_s"], "latency_us": options["network_us"]}
        network = config_of(NetworkOptions, options, **line)
    defaults = _system(options, spec, profile)
    given = defaults | {name: value for name, value in options.items() if value is not None}
    more = {"system": defaults["system"], "peer_access": not options["no_peer_access"], "network": network}
    return spec, profile, config_of(CapacityOptions, given, **more)


def _planned(options: Options, compare: bool, out: Path | None) -> dict[str, Any]:
    from pydantic_core import to_jsonable_python

    from router.planning.capacity import capacity
    from router.planning.division import best_division

    spec, profile, fleet = _inputs(options)
    division = best_division(spec, fleet, profile) if compare or out is not None else None
    document: dict[str, Any] = to_jsonable_python(capacity(spec, profile, fleet, division))
    if out is not None and division is not None:
        out.write_text(division[1].to_json(), encoding="utf-8")
    return document


def _system(options: Options, spec: ModelSpec, profile: LookupProfile) -> dict[str, Any]:
    """Return the system that is planned for, and its cards and memory where no option says these. Raises UsageError."""
    from router.planning.inputs import CpuNode
    from shard_node.engine.memory import MEMORY_RESERVE_BYTES, total_memory_bytes
    from shard_node.planning.cost_model import SYSTEMS

    given = {name for name, value in options.items() if value is not None and value is not False}
    of_gpus, of_cpus = ([name for name in names if name in given] for names in (_OF_GPUS, _OF_CPUS))
    name = options["system"] or ("h100" if of_gpus and not of_cpus else "cpu")
    if wrong := of_gpus if name == "cpu" else of_cpus:
        raise click.UsageError(f"--{wrong[0].replace('_', '-')} does not go with --system {name}.")
    if {"measure", "rows_per_s"} <= given:
        raise click.UsageError("--measure and --rows-per-s: one of them.")
    if name != "cpu":
        return {"pinned_memory_gb": DEFAULT_PINNED_GB, **dict(SYSTEMS[name]), "system": SYSTEMS[name]}
    here = {
        "cores": len(os.sched_getaffinity(0)),
        "ram_gb": (total_memory_bytes() - MEMORY_RESERVE_BYTES) / 1e9,
        "disk_gb": shutil.disk_usage(".").free / 1e9,
        "rows_per_s": ROWS_PER_S,
    }
    if "measure" in given:
        from shard_node.bags import TableLayout
        from shard_node.engine.pooling_rate import measured_rows_per_s

        layout = TableLayout.of(spec)
        lookups = profile.lookups(spec, layout, options["requests"], options["candidates"])
        values, bags = [table.values for table in lookups], [table.bags for table in lookups]
        here["rows_per_s"] = measured_rows_per_s(layout, values, bags, MAX_MEASURED_BYTES)
    node = CpuNode.of(**here | {name: options[name] for name in here.keys() & given})
    return {**dict(node), "system": node, "pinned_memory_gb": node.disk_gb}


def planned_model(options: Options) -> tuple[ModelSpec, LookupProfile]:
    """Return a model of the catalog, a snapshot or a description, stored as the flags say, and what it looks up.

    Raises UsageError, ExportError for a description or counts that can't be read, or SnapshotError.
    """
    from loader.access_counts import read_access_counts
    from loader.errors import ConfigError, nearest, no_path
    from loader.snapshot.reader import Snapshot
    from router.planning.inputs import CATALOG, LookupProfile, catalog_model
    from serving.cli.export import Pruned
    from serving.exporting import read_description

    named, dtype, profile = options["model"], options["dtype"], LookupProfile()
    name = named.partition(":")[0]
    path, files = Path(named), [] if options["counts"] is None else [options["counts"]]
    is_described = name not in CATALOG and path.is_file() and path.name != MANIFEST_NAME
    if not is_described and (options["prune"] or options["keep_share"] is not None or options["ids"]):
        raise click.UsageError(
            f"--ids, --prune and --keep-share go with a model description, which --model {named} is not."
        )
    if files and options["ids"]:
        raise click.UsageError("--counts and --ids were counted over different batches: give one of them.")
    if is_described:
        levers = {lever: options[lever] for lever in ("ids", "prune", "keep_share")}
        pruned = Pruned.of(path, read_description(path), files, **levers)
        for line in pruned.told:
            click.echo(line, err=True)
        spec, counts = pruned.spec, _stored_counts(pruned.spec, pruned.counts, pruned.kept)
    elif name in CATALOG:
        spec, profile = catalog_model(named, dtype or "int8")
        counts = _stored_counts(spec, read_access_counts(files, spec))
    elif path.exists():
        snapshot = Snapshot.open(path if path.is_dir() else path.parent, verify=False)
        spec, golden = snapshot.spec, snapshot.golden()
        lengths = {} if golden is None else golden.lengths
        profile = LookupProfile({name: float(bags.mean()) if bags.size else 0.0 for name, bags in lengths.items()})
        counts = _stored_counts(spec, read_access_counts(files, spec), snapshot=snapshot)
        if not counts and options["zipf"] is None:
            recorded = {table.name: snapshot.access_counts(table.slices[0].name) for table in spec.tables}
            counts = {table: rows for table, rows in recorded.items() if rows is not None}
    else:
        problem = no_path("model", path, "file, folder or published model")
        raise ConfigError(f"{problem}; published are {nearest(name, CATALOG)}" if path.name == named else problem)
    if dtype is not None:
        odd = [table.name for table in spec.stored_tables if dtype == "int4" and table.embedding_dim % 2]
        if odd:
            raise click.UsageError(f"--dtype int4 needs an even embedding_dim, which these tables do not have: {odd}.")
        tables = tuple(table.model_copy(update={"dtype": dtype}) for table in spec.tables)
        spec = spec.model_copy(update={"tables": tables})
    return spec, replace(profile, counts=counts)


def _stored_counts(
    spec: ModelSpec,
    counts: Mapping[str, AccessCounts | npt.NDArray[np.integer[Any]]],
    kept: Mapping[str, npt.NDArray[np.bool_]] = {},
    snapshot: Snapshot | None = None,
) -> dict[str, npt.NDArray[np.uint32]]:
    """Return how often rows of stored tables are looked up, by counts of tables as features see them.

    Which rows are in which part a snapshot says, or counts with the rows that are `kept` of tables that are pruned. Of
    a table that is divided by quotient_remainder there may be counts of its parts alone.
    """
    import numpy as np

    from loader.divided_rows import classes_by_counts, part_counts

    divided = {table.name: table for table in spec.divided}
    stored = {name: rows[:].astype(np.uint32, copy=False) for name, rows in counts.items() if name not in divided}
    for name in counts.keys() & divided.keys():
        table, rows, classes = divided[name], counts[name][:], None
        if table.num_classes > 1:
            by_row = snapshot.row_classes(name) if snapshot else None
            by_row = by_row or classes_by_counts(table, spec.parts(table), rows, kept.get(name))
            classes = by_row.classes()
        stored |= part_counts(table, spec.parts(table), rows, classes)
    return stored
