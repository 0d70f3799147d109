"""`shardrank plan`: what a model takes on a node of cards, and how fast its lookups can be; needs no card."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from serving.cli import WithExamples
from serving.cli import options as opts
from serving.cli.output import human_bytes, human_count, print_table
from serving.cli.settings import Options, config_of
from serving.cli.snapshots import read_description
from serving.config import DEFAULT_PINNED_GB, DivisionSettings

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from loader.access_counts import AccessCounts
    from loader.snapshot.manifest import ModelSpec
    from loader.snapshot.reader import Snapshot
    from router.planning.inputs import LookupProfile
    from shard_node.planning.cost_model import CardSystem
    from shard_node.planning.hotness import Head

MANIFEST_NAME = "manifest.json"
DTYPES = ("int8", "int4", "fp16", "fp32")
SYSTEM_NAMES = ("a100", "h100", "h200", "gb200")
"""The keys of `SYSTEMS`, repeated because importing them would make `--help` slow; a test compares them."""
MAX_TABLES, MAX_LINES = 8, 16
TIER_NAMES = {
    "hot": "hot: on every card",
    "card": "card: on the card that pools",
    "peer": "card: on one of the others",
    "pinned": "pinned host memory",
}


@click.command(cls=WithExamples)
@opts.option(
    "--model FILE",
    "A model description, a snapshot's folder or manifest, or a published model by name: dlrm-v2, merlin-tiny, -small, "
    "-medium, -large, -jumbo, -colossal, textbook; with :SCALE for that share of its rows.",
    required=True,
)
@opts.choice("--system", SYSTEM_NAMES, "Whose bandwidths.", "h100")
@opts.count("--cards", "Cards of each node; default: the system's.", 1, 64)
@opts.gigabytes(
    "--card-memory-gb", "Of each card, for rows and places, in 10^9 bytes; default: all of the card.", above_zero=True
)
@opts.gigabytes("--pinned-memory-gb", "Host memory for rows that no card has room for.", DEFAULT_PINNED_GB)
@opts.gigabytes(
    "--hot-gb",
    "Of each card, for copies of the hottest rows. Default: what all rows leave of the card, else a sixteenth.",
)
@opts.count("--versions", "Versions side by side, each with its part of the memory; a rollout needs 2.", 1, 8, 1)
@opts.count("--shards", "Nodes that share rows.", 1, 1024, 1)
@opts.settings_options(DivisionSettings, "sharding", "replicate_bytes")
@opts.switch("--no-peer-access", "Plan for cards that can't read each other's memory.")
@opts.count("--batch", "Candidates of a batch.", 1, 10_000_000, 500)
@opts.count("--requests", "Requests of a batch; context features are looked up once for each.", 1, 10_000_000, 1)
@opts.assignments(
    "--hotness FEATURE=N",
    "Ids in a bag of a feature, in the mean. Default: what the published model or the snapshot's golden requests have, "
    "else 1.",
)
@opts.option(
    "--zipf S", "Row r is looked up in proportion to r^-S. Default: as published, else 0.", opts.FiniteRange(0, 8)
)
@opts.option(
    "--head ROWS:SHARE",
    "Only the first ROWS of a table follow --zipf, for that share of the lookups; the others go to all rows alike.",
)
@opts.network_options
@opts.option(
    "--counts", "How often rows are looked up: what `shardrank counts` wrote. Default: the snapshot's.", opts.EXISTING
)
@opts.removed_option(
    "--trace TABLE=FILE", "use --ids FEATURE=FILE.npy, or --counts with what `shardrank counts` wrote."
)
@opts.ids_option
@opts.option("--dtype", "Of stored rows. Default: the model's; published models have int8.", click.Choice(DTYPES))
@opts.option("--hbm-gb-per-s GB", "What a copy within a card reaches.", opts.FiniteRange(1))
@opts.option("--nvlink-gb-per-s GB", "Line rate between cards, one direction.", opts.FiniteRange(1))
@opts.option("--host-gb-per-s GB", "Line rate from host to card, one direction.", opts.FiniteRange(1))
@opts.pruning_options
@opts.switch("--compare", "Choose for each table how it is divided, and compare with dividing all tables alike.")
@opts.option("--out", "Choose for each table, and write the plan to FILE, for `--plan`.", opts.WRITABLE_FILE)
@opts.json_flag("the plan")
def plan(compare: bool, out: Path | None, **options: Any) -> None:
    """Reckon what a model takes on a node of cards.

    A description is planned with all that makes its tables smaller; with --counts also pruned. Prints bytes by card
    and tier, how tables are split, what does not fit, and the least time that a batch's lookups take: the engine's own
    placement, and bandwidths of docs/nvlink.md. Nothing is measured, and no card is needed.
    Exit code 1 if the model can't be served so at all.

    How tables are divided over shards is --sharding's to say, or with --compare or --out chosen for each table: whole
    on a shard, by rows, by columns, by both, or copied to every shard, by the time of the slowest shard and of the
    network, and by how often rows are looked up. docs/plan.md is about it.

    Examples:
      shardrank plan --model dlrm-v2 --cards 8 --card-memory-gb 80
      shardrank plan --model shop.json --cards 2 --hotness history=50 --zipf 1.05
      shardrank plan --model models/shop/3 --system gb200 --versions 2 --json
      shardrank plan --model shop.json --counts shop-counts.safetensors
      shardrank plan --model shop.json --counts shop-counts.safetensors --prune --keep-share 0.999
      shardrank plan --model shop.json --ids item=clicked-items.npy --ids user=users.npy
      shardrank plan --model textbook --dtype fp32 --shards 16 --cards 1 --batch 65536
      shardrank plan --model merlin-jumbo --shards 4 --cards 8 --compare
      shardrank plan --model models/shop/3 --shards 2 --cards 4 --out plan.json
    """
    from pydantic_core import to_json

    from loader.snapshot.tables import NUM_BUCKETS
    from router.planning.capacity import capacity
    from router.planning.division import best_division
    from router.planning.inputs import CapacityOptions, Network, NetworkOptions

    spec, profile = planned_model(options)
    profile = profile.with_hotness(spec, {name: _number(name, text) for name, text in options["hotness"]})
    if options["zipf"] is not None:
        profile = replace(profile, zipf=options["zipf"])
    if options["head"] is not None:
        profile = replace(profile, head=_head(options["head"]))
    buckets = min(NUM_BUCKETS[table.bucketing] for table in spec.tables)
    if options["shards"] > buckets and options["sharding"] != "table":
        raise click.UsageError(f"--shards: rows are divided by {buckets} buckets, so into as many shards at most.")
    system, network = _system(options), None
    if options["shards"] > 1:
        line = Network(gb_per_s=options["network_gb_per_s"], latency_us=options["network_us"])
        network = config_of(NetworkOptions, options, network=line)
    node = config_of(
        CapacityOptions,
        options,
        system=system,
        cards=options["cards"] or system.cards,
        card_memory_gb=options["card_memory_gb"] or system.card_memory_gb,
        peer_access=not options["no_peer_access"],
        candidates=options["batch"],
        network=network,
    )
    division = best_division(spec, node, profile) if compare or out is not None else None
    text = to_json(capacity(spec, profile, node, division), indent=2).decode()
    if out is not None and division is not None:
        try:
            out.write_text(division[1].to_json(), encoding="utf-8")
        except OSError as error:
            raise click.UsageError(f"--out {out}: {error.strerror or error}") from error
    if options["as_json"]:
        click.echo(text)
    else:
        print_plan(json.loads(text, object_hook=lambda fields: SimpleNamespace(**fields)))


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise click.UsageError(f"--hotness {name}={text}: {text!r} is not a number.") from None


def _head(text: str) -> Head:
    from shard_node.planning.hotness import Head

    rows, _, share = text.partition(":")
    try:
        head = Head(int(rows), float(share))
    except ValueError:
        head = Head(0, 0.0)
    if not (1 <= head.rows < 2**48 and 0 <= head.share <= 1):
        raise click.UsageError(f"--head {text}: {text!r} is not ROWS:SHARE, such as 5000:0.85.")
    return head


def _system(options: Options) -> CardSystem:
    """Return the named system, with what was given in place of its own bandwidths."""
    from shard_node.planning.cost_model import SYSTEMS

    system = SYSTEMS[options["system"]]
    changed: dict[str, object] = {"hbm_gb_per_s": options["hbm_gb_per_s"] or system.hbm_gb_per_s}
    for link, flag in (("peer", "nvlink_gb_per_s"), ("host", "host_gb_per_s")):
        if options[flag] is not None:
            changed[link] = getattr(system, link).model_copy(update={"gb_per_s": options[flag]})
    return system.model_copy(update=changed)


def planned_model(options: Options) -> tuple[ModelSpec, LookupProfile]:
    """Return a model of the catalog, a snapshot or a description, stored as the flags say, and what it looks up.

    Raises UsageError, ExportError for a description or counts that can't be read, or SnapshotError.
    """
    from loader.access_counts import read_access_counts
    from loader.snapshot.reader import Snapshot
    from router.planning.inputs import CATALOG, LookupProfile, catalog_model
    from serving.cli.export import Pruned

    named, dtype, profile = options["model"], options["dtype"], LookupProfile()
    name, _, scale = named.partition(":")
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
        spec, profile = catalog_model(name, dtype or "int8", _scale(named, scale))
        counts = _stored_counts(spec, read_access_counts(files, spec))
    elif path.exists():
        snapshot = Snapshot.open(path if path.is_dir() else path.parent, verify=False)
        spec, golden = snapshot.spec, snapshot.golden()
        profile = LookupProfile() if golden is None else LookupProfile.of_requests(golden)
        counts = _stored_counts(spec, read_access_counts(files, spec), snapshot=snapshot)
        if not counts and options["zipf"] is None:
            recorded = {table.name: snapshot.access_counts(table.slices[0].name) for table in spec.tables}
            counts = {table: rows for table, rows in recorded.items() if rows is not None}
    else:
        raise click.UsageError(f"--model {named}: no such file, and the catalog has only {', '.join(CATALOG)}.")
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


def _scale(named: str, text: str) -> float:
    try:
        scale = float(text or 1)
    except ValueError:
        scale = 0.0
    if not 0 < scale <= 1:
        raise click.UsageError(f"--model {named}: the scale of its rows must be above 0 and at most 1.")
    return scale


def print_plan(plan: SimpleNamespace) -> None:
    """Print the document of `--json`, all but the smaller tables of it, with its fields as attributes."""
    options, size = plan.options, plan.size
    codes = f" (codes alone {human_bytes(size.code_bytes)})" if size.code_bytes < size.stored_bytes else ""
    num_tables = "1 table" if plan.num_tables == 1 else f"{plan.num_tables} tables"
    click.echo(
        f"{plan.model}: {num_tables}, {human_count(plan.num_rows)} rows; as float32 "
        f"{human_bytes(size.float32_bytes)}, stored {human_bytes(size.stored_bytes)}{codes}, on cards "
        f"{human_bytes(size.on_cards_bytes)}"
    )
    of_shards = f"shard {plan.shard_index} of {options.shards} (the fullest): " if options.shards > 1 else ""
    versions = f", for {options.versions} versions side by side" if options.versions > 1 else ""
    click.echo(
        f"{of_shards}{options.cards} x {options.system.name} with {options.card_memory_gb:g} GB each, "
        f"{options.pinned_memory_gb:g} GB pinned{versions}{'' if options.peer_access else ', no peer access'}"
    )
    if plan.divided:
        _print_parts(plan.divided)
    if plan.division is not None:
        print_division(plan.division)
    by_free = sorted(plan.cards, key=lambda card: card.free_bytes)
    ends = {" (fullest)": by_free[0], " (emptiest)": by_free[-1]} if len(by_free) > 1 else {"": by_free[0]}
    cards = [
        (f"{card.card}{end}", *map(human_bytes, (card.hot_bytes, card.own_bytes, card.places_bytes, card.free_bytes)))
        for end, card in ends.items()
    ]
    print_table("Bytes of a card", ("card", "#hot copies", "#own rows", "#places", "#free"), cards)
    tiers = [
        (TIER_NAMES[tier.tier], human_count(tier.rows), human_bytes(tier.size_bytes), f"{tier.lookup_share:.2%}",
         human_bytes(round(tier.bytes_per_batch)) if tier.bytes_per_batch else "")
        for tier in plan.tiers
    ]  # fmt: skip
    print_table("Ways to a row", ("tier", "#rows", "#bytes", "#lookups", "#bytes a batch"), tiers)
    largest = sorted(plan.tables, key=lambda table: -table.on_cards_bytes)
    tables = [
        (table.name, table.embedding_dim, table.dtype, human_bytes(table.on_cards_bytes),
         *map(human_count, (table.lookups, table.hot_rows, table.card_rows, table.pinned_rows)))
        for table in largest[:MAX_TABLES]
    ]  # fmt: skip
    title = f"Tables, the largest {MAX_TABLES} of {len(largest)}" if len(largest) > MAX_TABLES else "Tables"
    columns = ("table", "#dim", "dtype", "#bytes", "#lookups", "#hot rows", "#card rows", "#pinned rows")
    print_table(title, columns, tables)
    _print_time(plan)
    if plan.network is not None:
        _print_network(plan.network, plan.options.shards, plan.options.network.network)
    pinned = f" with {human_bytes(plan.pinned_bytes)} in pinned host memory"
    fits = ": every row is on cards" if plan.fits_on_cards else pinned
    click.echo(f"fits{fits} (every row on cards needs {human_bytes(plan.all_on_cards_bytes)} of each)")


def _print_steps(title: str, steps: Sequence[tuple[str, float | None, float | None]]) -> None:
    """Print the parts of a time: name, bytes, microseconds."""
    rows = [
        (name, "" if size is None else human_bytes(round(size)), "" if us is None else f"{us:.1f}")
        for name, size, us in steps
    ]
    print_table(title, ("part", "#bytes", "#us"), rows)


def _print_time(plan: SimpleNamespace) -> None:
    batch, time = plan.batch, plan.time
    _print_steps(
        f"A batch of {plan.options.candidates} candidates: {human_count(batch.lookups)} lookups in "
        f"{human_count(batch.bags)} bags, at least",
        (
            ("ids to the card", batch.upload_bytes, time.upload_us),
            ("launches", None, time.launch_us),
            ("the longest bag's rows, one after the other", None, time.latency_us),
            ("card memory", batch.card_memory_bytes, time.hbm_us),
            ("other cards, with packet headers", batch.peer_line_bytes, time.peer_us),
            ("host memory, with packet headers", batch.host_line_bytes, time.host_us),
        ),
    )
    busy = f"all {plan.options.cards} cards busy" if plan.options.cards > 1 else "busy all the time"
    click.echo(
        f"alone {time.alone_us:.1f} us, bound by {time.bound}; {busy} "
        f"{human_count(time.batches_per_s)} batches/s, {human_count(time.lookups_per_s)} lookups/s, "
        f"bound by {time.busy_bound}"
    )


def _print_parts(tables: Sequence[SimpleNamespace]) -> None:
    """Print the parts of divided tables, and what dividing them costs in addition."""
    rows = [
        (table.name, table.by, part.name,
         human_count(part.num_embeddings), part.embedding_dim, part.dtype, human_bytes(part.size_bytes),
         human_count(part.lookups))
        for table in tables
        for part in table.parts
    ]  # fmt: skip
    columns = ("table", "divided by", "part", "#rows", "#dim", "dtype", "#stored", "#lookups")
    print_table("Tables in parts", columns, rows)
    for table in tables:
        pruned = f", {human_count(table.pruned)} of them pruned" if table.pruned else ""
        line = f"{table.name}: {human_count(table.num_embeddings)} rows{pruned}; as float32 "
        line += f"{human_bytes(table.float32_bytes)}, stored {human_bytes(table.stored_bytes)}"
        line += f", {table.float32_bytes / table.stored_bytes:.1f} times less"
        if table.classes_bytes:
            line += f"; which row is where: {human_bytes(table.classes_bytes)}, a quarter more in every router"
        click.echo(line)


def print_division(division: SimpleNamespace) -> None:
    """Print the ways compared, then the tables of the plan, those alike in one line, and the fullest ranks."""
    ways = []
    for way in division.ways:
        by_count = sorted(vars(way.kinds).items(), key=lambda kind: -kind[1])
        kinds = ", ".join(f"{count} {kind}" for kind, count in by_count)
        fullest = human_bytes(max(shard.card_bytes for shard in way.shards))
        if left_over := sum(shard.left_over_bytes for shard in way.shards):
            ways.append((way.way, kinds, fullest, human_bytes(left_over), "", "", "does not fit"))
            continue
        network_us, slowest_us = way.network.alone_us, max(shard.cards_us for shard in way.shards)
        times = (f"{us:.1f}" for us in (slowest_us, network_us, network_us + slowest_us))
        ways.append((way.way, kinds, fullest, "", *times))
    columns = ("tables", "kinds", "#fullest card", "#left over", "#slowest shard us", "#network us", "#together us")
    print_table("Ways to divide tables", columns, ways)
    alike: dict[tuple[str, str, str], list[SimpleNamespace]] = defaultdict(list)
    for table in sorted(division.tables, key=lambda table: -table.size_bytes):
        kind = table.sharding_type + (f" {'+'.join(map(str, table.column_dims))}" if table.column_dims else "")
        is_copy = table.sharding_type == "data_parallel"
        ranks = "one card of each shard" if is_copy else "; ".join(map(_ranks_text, table.ranks))
        alike[kind, table.compute_kernel, ranks].append(table)
    lines = [
        (tables[0].table + (f" and {len(tables) - 1} more" if len(tables) > 1 else ""), *shared,
         human_bytes(sum(table.size_bytes for table in tables)))
        for shared, tables in list(alike.items())[:MAX_LINES]
    ]  # fmt: skip
    title = f"Plan {division.digest[:12]}" + (f", {MAX_LINES} of {len(alike)} lines" if len(alike) > MAX_LINES else "")
    print_table(title, ("param", "sharding type", "compute kernel", "ranks", "#bytes"), lines)
    by_size = sorted(division.ranks, key=lambda rank: -rank.size_bytes)
    by_lookups = sorted(division.ranks, key=lambda rank: -rank.lookup_share)
    ends = {"fullest": by_size[0], "emptiest": by_size[-1], "most lookups": by_lookups[0], "fewest": by_lookups[-1]}
    print_table(
        f"Ranks, of {len(division.ranks)}",
        ("", "#rank", "#rows and places", "#lookups"),
        [(end, rank.rank, human_bytes(rank.size_bytes), f"{rank.lookup_share:.2%}") for end, rank in ends.items()],
    )


def _ranks_text(ranks: list[int]) -> str:
    """Write `3`, `0..7` or `0, 8, 16, ... (32)`."""
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}..{ranks[-1]}"
    shown = ", ".join(map(str, ranks[:4]))
    return shown if len(ranks) <= 4 else f"{shown}, ... ({len(ranks)})"


def _print_network(use: SimpleNamespace, shards: int, network: SimpleNamespace) -> None:
    """Print what a batch moves, and whether to replicate or to shard."""
    time = use.time
    out, back = (us * network.gb_per_s * 1e3 for us in (time.out_us, time.back_us))
    _print_steps(
        f"Between router and {shards} shards, {network.gb_per_s:g} GB/s and {network.latency_us:g} us: a bag is asked "
        f"of {use.shards_hit:.3g} of them",
        (
            ("ids to shards", use.ids_bytes, None),
            ("offsets", use.offsets_bytes, None),
            ("tables and numbers of bags", use.keys_bytes, None),
            ("sums back", use.sums_bytes, None),
            ("headers and padding, both ways", use.framing_bytes, None),
            ("all of it, out and then back", out + back, time.out_us + time.back_us),
            ("latency of a round trip", None, time.latency_us),
        ),
    )
    if use.hot_rows:
        click.echo(
            f"hot rows at the router: {use.hot_rows} of {human_bytes(use.hot_bytes)}, hit rate {use.hit_rate:.4g}"
        )
    click.echo(
        f"request {use.request_us:.1f} us: shard {use.slowest_shard} (the slowest) {use.slowest_us:.1f} and the "
        f"network {time.alone_us:.1f}, bound by {use.bound}; busiest shard {use.busiest_to_mean:.2f} x the mean"
    )
    compared = [
        (f"{rate.hit_rate:.4f}", f"{rate.hot_rows}", human_bytes(rate.hot_bytes), f"{rate.moved_bytes / 1e6:.1f}",
         f"{rate.moved_us / 1e3:.2f}", f"{rate.network_bytes / 1e6:.2f}", f"{rate.network_us / 1e3:.3f}",
         f"{rate.request_us / 1e3:.3f}")
        for rate in use.compared
    ]  # fmt: skip
    heads = ("hit rate", "#hot rows", "#of", "#rows moved, MB", "#ms", "#ids and sums, MB", "#ms ", "#request, ms")
    print_table("Replicate or shard, by hit rate of hot rows at the router", heads, compared)
    copies, part = human_bytes(use.replicated_bytes), human_bytes(use.sharded_bytes)
    click.echo(f"replicated: {use.replicated_us / 1e3:.3f} ms in {copies} of each node; sharded: {part} of each node")
    if use.crossover_hit_rate is None:
        click.echo("no hit rate makes sharding as fast as replication: the network's latency alone takes longer")
    else:
        click.echo(
            f"crossover: from a hit rate of {use.crossover_hit_rate:.4f} on, with "
            f"{human_bytes(use.crossover_hot_bytes or 0)} of hot rows, sharding takes no longer than replication"
        )
