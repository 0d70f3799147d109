"""How a capacity plan looks in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from serving.cli.output import human_bytes, print_table

if TYPE_CHECKING:
    from serving.cli.plan.capacity import CapacityPlan, CardUse

MAX_TABLES = 8
TIER_NAMES = {
    "hot": "hot: on every card",
    "card": "card: on the card that pools",
    "peer": "card: on one of the others",
    "pinned": "pinned host memory",
    "mapped": "mapped snapshot",
}


def print_plan(plan: CapacityPlan) -> None:
    """Prints all but the smaller tables."""
    _print_head(plan)
    print_table(
        "Bytes of a card",
        ("card", "#hot copies", "#own rows", "#places", "#free"),
        [_card_row(name, one) for name, one in _ends(plan)],
    )
    print_table(
        "Ways to a row",
        ("tier", "#rows", "#bytes", "#lookups", "#bytes a batch"),
        [
            (
                TIER_NAMES[one.tier],
                _human_count(one.rows),
                human_bytes(one.size_bytes),
                f"{one.lookup_share:.2%}",
                human_bytes(round(one.bytes_per_batch)) if one.bytes_per_batch else "",
            )
            for one in plan.tiers
        ],
    )
    _print_tables(plan)
    _print_time(plan)
    _print_verdict(plan)


def _print_head(plan: CapacityPlan) -> None:
    options, size = plan.options, plan.size
    codes = f" (codes alone {human_bytes(size.code_bytes)})" if size.code_bytes < size.stored_bytes else ""
    tables = "1 table" if plan.num_tables == 1 else f"{plan.num_tables} tables"
    click.echo(
        f"{plan.model}: {tables}, {_human_count(plan.num_rows)} rows; as float32 "
        f"{human_bytes(size.float32_bytes)}, stored {human_bytes(size.stored_bytes)}{codes}, on cards "
        f"{human_bytes(size.on_cards_bytes)} and {human_bytes(size.places_bytes)} of places on each"
    )
    of_shards = f"shard {plan.shard_index} of {options.shards} (the fullest): " if options.shards > 1 else ""
    versions = f", for {options.versions} versions side by side" if options.versions > 1 else ""
    click.echo(
        f"{of_shards}{options.cards} x {options.system.name} with {options.card_memory_gb:g} GB each, "
        f"{options.pinned_memory_gb:g} GB pinned{versions}{'' if options.peer_access else ', no peer access'}"
    )


def _ends(plan: CapacityPlan) -> list[tuple[str, CardUse]]:
    if len(plan.cards) == 1:
        return [("0", plan.cards[0])]
    by_free = sorted(plan.cards, key=lambda one: one.free_bytes)
    return [(f"{by_free[0].card} (fullest)", by_free[0]), (f"{by_free[-1].card} (emptiest)", by_free[-1])]


def _card_row(name: str, one: CardUse) -> tuple[str, ...]:
    sizes = (one.hot_bytes, one.own_bytes, one.places_bytes, one.free_bytes)
    return (name, *(human_bytes(size) for size in sizes))


def _print_tables(plan: CapacityPlan) -> None:
    largest = sorted(plan.tables, key=lambda one: -one.on_cards_bytes)
    rest = len(largest) - MAX_TABLES
    print_table(
        f"Tables, the largest {MAX_TABLES} of {len(largest)}" if rest > 0 else "Tables",
        ("table", "#dim", "dtype", "#bytes", "#lookups", "#hot rows", "#card rows", "#pinned rows", "#mapped rows"),
        [
            (
                one.name,
                one.embedding_dim,
                one.dtype,
                human_bytes(one.on_cards_bytes),
                _human_count(one.lookups),
                *(_human_count(rows) for rows in (one.hot_rows, one.card_rows, one.pinned_rows, one.mapped_rows)),
            )
            for one in largest[:MAX_TABLES]
        ],
    )


def _print_time(plan: CapacityPlan) -> None:
    batch, time = plan.batch, plan.time
    print_table(
        f"A batch of {plan.options.candidates} candidates: {_human_count(batch.lookups)} lookups in "
        f"{_human_count(batch.bags)} bags, at least",
        ("part", "#bytes", "#us"),
        [
            ("ids to the card", human_bytes(round(batch.upload_bytes)), f"{time.upload_us:.1f}"),
            ("launches", "", f"{time.launch_us:.1f}"),
            ("the longest bag's rows, one after the other", "", f"{time.latency_us:.1f}"),
            ("card memory", human_bytes(round(batch.card_memory_bytes)), f"{time.hbm_us:.1f}"),
            ("other cards, with packet headers", human_bytes(round(batch.peer_line_bytes)), f"{time.peer_us:.1f}"),
            ("host memory, with packet headers", human_bytes(round(batch.host_line_bytes)), f"{time.host_us:.1f}"),
            ("mapped rows, one CPU thread", "", f"{time.mapped_us:.1f}"),
        ],
    )
    click.echo(
        f"alone {time.alone_us:.1f} us, bound by {time.bound}; {_busy_cards(plan.options.cards)} "
        f"{_human_count(time.batches_per_s)} batches/s, {_human_count(time.lookups_per_s)} lookups/s, "
        f"bound by {time.busy_bound}"
    )


def _print_verdict(plan: CapacityPlan) -> None:
    needed = f"every row on cards needs {human_bytes(plan.all_on_cards_bytes)} of each"
    if plan.fits_on_cards:
        click.echo(f"fits: every row is on cards ({needed})")
    elif not plan.left_over_bytes:
        click.echo(f"fits with {human_bytes(plan.pinned_bytes)} in pinned host memory ({needed})")
    else:
        click.echo(
            f"does not fit in memory: {human_bytes(plan.left_over_bytes)} stay in the mapped snapshot, beside "
            f"{human_bytes(plan.pinned_bytes)} in pinned host memory ({needed})"
        )


def _busy_cards(cards: int) -> str:
    return f"all {cards} cards busy" if cards > 1 else "busy all the time"


def _human_count(count: float) -> str:
    """`950`, `12.3 k`, `4.56 M`, `1.2 G`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:.0f} {unit}"
    return f"{count:.3g}"
