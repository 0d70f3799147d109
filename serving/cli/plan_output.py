"""What `shardrank plan` prints of a plan as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import click

from router.planning.capacity import CapacityPlan
from router.planning.division import DividedUse, FleetPlan, TablePlacement
from router.planning.network import NetworkUse
from router.planning.options import Network
from serving.cli.output import human_bytes, human_count, print_table

MAX_TABLES = 8
MAX_LINES = 16
TIER_NAMES = {
    "hot": "hot: on every card",
    "card": "card: on the card that pools",
    "peer": "card: on one of the others",
    "pinned": "pinned host memory",
}


def print_plan(plan: CapacityPlan) -> None:
    """Print all but the smaller tables."""
    _print_head(plan)
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
    _print_tables(plan)
    _print_time(plan)
    if plan.network is not None and plan.options.network is not None:
        _print_network(plan.network, plan.options.shards, plan.options.network.network)
    pinned = f" with {human_bytes(plan.pinned_bytes)} in pinned host memory"
    fits = ": every row is on cards" if plan.fits_on_cards else pinned
    click.echo(f"fits{fits} (every row on cards needs {human_bytes(plan.all_on_cards_bytes)} of each)")


def _print_head(plan: CapacityPlan) -> None:
    options, size = plan.options, plan.size
    codes = f" (codes alone {human_bytes(size.code_bytes)})" if size.code_bytes < size.stored_bytes else ""
    tables = "1 table" if plan.num_tables == 1 else f"{plan.num_tables} tables"
    click.echo(
        f"{plan.model}: {tables}, {human_count(plan.num_rows)} rows; as float32 "
        f"{human_bytes(size.float32_bytes)}, stored {human_bytes(size.stored_bytes)}{codes}, on cards "
        f"{human_bytes(size.on_cards_bytes)}"
    )
    of_shards = f"shard {plan.shard_index} of {options.shards} (the fullest): " if options.shards > 1 else ""
    versions = f", for {options.versions} versions side by side" if options.versions > 1 else ""
    click.echo(
        f"{of_shards}{options.cards} x {options.system.name} with {options.card_memory_gb:g} GB each, "
        f"{options.pinned_memory_gb:g} GB pinned{versions}{'' if options.peer_access else ', no peer access'}"
    )


def _print_tables(plan: CapacityPlan) -> None:
    largest = sorted(plan.tables, key=lambda table: -table.on_cards_bytes)
    rows = [
        (table.name, table.embedding_dim, table.dtype, human_bytes(table.on_cards_bytes),
         *map(human_count, (table.lookups, table.hot_rows, table.card_rows, table.pinned_rows)))
        for table in largest[:MAX_TABLES]
    ]  # fmt: skip
    title = f"Tables, the largest {MAX_TABLES} of {len(largest)}" if len(largest) > MAX_TABLES else "Tables"
    columns = ("table", "#dim", "dtype", "#bytes", "#lookups", "#hot rows", "#card rows", "#pinned rows")
    print_table(title, columns, rows)


def _print_steps(title: str, steps: Sequence[tuple[str, float | None, float | None]]) -> None:
    """Print the parts of a time: name, bytes, microseconds."""
    rows = [
        (name, "" if size is None else human_bytes(round(size)), "" if us is None else f"{us:.1f}")
        for name, size, us in steps
    ]
    print_table(title, ("part", "#bytes", "#us"), rows)


def _print_time(plan: CapacityPlan) -> None:
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


def _print_parts(tables: Sequence[DividedUse]) -> None:
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


def print_division(plan: FleetPlan) -> None:
    """Print the ways compared, then the tables of the plan, those alike in one line, and the fullest ranks."""
    ways = []
    for way in plan.ways:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(way.kinds.items(), key=lambda kind: -kind[1]))
        left_over, times = human_bytes(way.left_over_bytes), ("", "", "does not fit")
        if not way.left_over_bytes:
            left_over = ""
            times = (f"{way.slowest.cards_us:.1f}", f"{way.network.alone_us:.1f}", f"{way.total_us:.1f}")
        ways.append((way.way, kinds, human_bytes(max(shard.card_bytes for shard in way.shards)), left_over, *times))
    columns = ("tables", "kinds", "#fullest card", "#left over", "#slowest shard us", "#network us", "#together us")
    print_table("Ways to divide tables", columns, ways)
    alike: dict[tuple[str, str, str], list[TablePlacement]] = defaultdict(list)
    for table in sorted(plan.tables, key=lambda table: -table.size_bytes):
        kind = table.sharding_type + (f" {'+'.join(map(str, table.column_dims))}" if table.column_dims else "")
        is_copy = table.sharding_type == "data_parallel"
        ranks = "one card of each shard" if is_copy else "; ".join(map(_ranks_text, table.ranks))
        alike[kind, table.compute_kernel, ranks].append(table)
    lines = [
        (tables[0].table + (f" and {len(tables) - 1} more" if len(tables) > 1 else ""), *shared,
         human_bytes(sum(table.size_bytes for table in tables)))
        for shared, tables in list(alike.items())[:MAX_LINES]
    ]  # fmt: skip
    title = f"Plan {plan.digest[:12]}" + (f", {MAX_LINES} of {len(alike)} lines" if len(alike) > MAX_LINES else "")
    print_table(title, ("param", "sharding type", "compute kernel", "ranks", "#bytes"), lines)
    by_size = sorted(plan.ranks, key=lambda rank: -rank.size_bytes)
    by_lookups = sorted(plan.ranks, key=lambda rank: -rank.lookup_share)
    ends = {"fullest": by_size[0], "emptiest": by_size[-1], "most lookups": by_lookups[0], "fewest": by_lookups[-1]}
    print_table(
        f"Ranks, of {len(plan.ranks)}",
        ("", "#rank", "#rows and places", "#lookups"),
        [(end, rank.rank, human_bytes(rank.size_bytes), f"{rank.lookup_share:.2%}") for end, rank in ends.items()],
    )


def _ranks_text(ranks: tuple[int, ...]) -> str:
    """Write `3`, `0..7` or `0, 8, 16, ... (32)`."""
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}..{ranks[-1]}"
    shown = ", ".join(map(str, ranks[:4]))
    return shown if len(ranks) <= 4 else f"{shown}, ... ({len(ranks)})"


def _print_network(use: NetworkUse, shards: int, network: Network) -> None:
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
