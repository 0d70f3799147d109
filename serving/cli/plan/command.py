"""`shardrank plan`: what a model takes on a node of cards, and how fast its lookups can be; needs no card."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from serving.cli.devices import DEFAULT_PINNED_GB
from serving.cli.examples import WithExamples
from serving.cli.options import Assignment, FiniteRange, json_flag, replicate_option, sharding_option
from serving.cli.output import print_json

if TYPE_CHECKING:
    from shard_node.cuda.card_systems import CardSystem

SYSTEM_NAMES = ("a100", "h100", "h200", "gb200")
"""The keys of `SYSTEMS`, repeated because importing them would make `--help` slow; a test compares them."""


@click.command(cls=WithExamples)
@click.option(
    "--model",
    required=True,
    metavar="FILE",
    help="A model description, a snapshot's folder or manifest, or a published model by name: dlrm-v2, merlin-tiny, "
    "-small, -medium, -large, -jumbo, -colossal, textbook; with :SCALE for that share of its rows.",
)
@click.option("--system", type=click.Choice(SYSTEM_NAMES), default="h100", show_default=True, help="Whose bandwidths.")
@click.option("--cards", type=click.IntRange(1, 64), metavar="N", help="Cards of each node; default: the system's.")
@click.option(
    "--card-memory-gb",
    type=FiniteRange(min=0, min_open=True),
    metavar="GB",
    help="Memory of each card for rows and places, in 10^9 bytes; default: all of the system's card. An engine leaves "
    "an eighth of it to everything else if nothing is said.",
)
@click.option(
    "--pinned-memory-gb",
    type=FiniteRange(min=0),
    default=DEFAULT_PINNED_GB,
    show_default=True,
    metavar="GB",
    help="Host memory for rows that no card has room for, which cards read in place.",
)
@click.option(
    "--hot-gb",
    type=FiniteRange(min=0),
    metavar="GB",
    help="Memory of each card for copies of the hottest rows. Default: what is left when all rows are on cards, else "
    "a sixteenth.",
)
@click.option(
    "--versions",
    type=click.IntRange(1, 8),
    default=1,
    show_default=True,
    metavar="N",
    help="Versions side by side, each with its part of the memory; a rollout needs 2.",
)
@click.option(
    "--shards", type=click.IntRange(1, 1024), default=1, show_default=True, metavar="N", help="Nodes that share rows."
)
@sharding_option
@replicate_option
@click.option("--no-peer-access", is_flag=True, help="Plan for cards that can't read each other's memory.")
@click.option("--no-mapped", is_flag=True, help="Fail if rows would stay in the mapped snapshot.")
@click.option(
    "--batch",
    type=click.IntRange(1, 10_000_000),
    default=500,
    show_default=True,
    metavar="N",
    help="Candidates of a batch.",
)
@click.option(
    "--requests",
    type=click.IntRange(1, 10_000_000),
    default=1,
    show_default=True,
    metavar="N",
    help="Requests that a batch's candidates belong to; context features are looked up once for each.",
)
@click.option(
    "--hotness",
    type=Assignment("FEATURE=N"),
    multiple=True,
    metavar="FEATURE=N",
    help="Ids in a bag of a feature, in the mean. Default: what the published model or the snapshot's golden requests "
    "have, else 1. Repeatable.",
)
@click.option(
    "--zipf",
    type=FiniteRange(0, 8),
    metavar="S",
    help="Lookups of a table's row r in proportion to r^-S; 0 is uniform. Default: the published model's, else 0.",
)
@click.option(
    "--dtype",
    type=click.Choice(["int8", "int4", "fp16", "fp32"]),
    help="Rows stored so, in place of what the model says; published models are int8 by default.",
)
@click.option("--hbm-gb-per-s", type=FiniteRange(min=1), metavar="GB", help="What a copy within a card reaches.")
@click.option(
    "--nvlink-gb-per-s", type=FiniteRange(min=1), metavar="GB", help="Line rate between cards, one direction."
)
@click.option(
    "--host-gb-per-s", type=FiniteRange(min=1), metavar="GB", help="Line rate from host to card, one direction."
)
@json_flag("the plan")
def plan(**options: Any) -> None:
    """Reckon what a model takes on a node of cards.

    Prints bytes by card and tier, how tables are split, what does not fit, and the least time that a batch's lookups
    take: the engine's own placement, and bandwidths of docs/nvlink.md. Nothing is measured, and no card is needed.
    Exit code 1 if the model can't be served so at all.

    Examples:
      shardrank plan --model dlrm-v2 --cards 8 --card-memory-gb 80
      shardrank plan --model shop.json --cards 2 --hotness history=50 --zipf 1.05
      shardrank plan --model models/shop/3 --system gb200 --versions 2 --json
      shardrank plan --model textbook --dtype fp32 --shards 16 --cards 1 --batch 65536
    """
    from loader.manifest import NUM_BUCKETS
    from serving.cli.plan.capacity import CapacityOptions, CapacityPlan
    from serving.cli.plan.planned_model import planned_model
    from serving.cli.plan.view import print_plan

    spec, profile = planned_model(options["model"], options["dtype"])
    profile = profile.with_hotness(spec, {name: _number(name, text) for name, text in options["hotness"]})
    if options["zipf"] is not None:
        profile = profile.with_zipf(options["zipf"])
    if options["shards"] > NUM_BUCKETS and options["sharding"] != "table":
        raise click.UsageError(f"--shards: rows are divided by {NUM_BUCKETS} buckets, so into as many shards at most.")
    system = _system(options)
    found = CapacityPlan.make(
        spec,
        profile,
        CapacityOptions(
            system=system,
            cards=options["cards"] or system.cards,
            card_memory_gb=options["card_memory_gb"] or system.card_memory_gb,
            pinned_memory_gb=options["pinned_memory_gb"],
            hot_gb=options["hot_gb"],
            versions=options["versions"],
            shards=options["shards"],
            sharding=options["sharding"],
            replicate_bytes=options["replicate_bytes"],
            peer_access=not options["no_peer_access"],
            allow_mapped=not options["no_mapped"],
            requests=options["requests"],
            candidates=options["batch"],
        ),
    )
    if options["as_json"]:
        print_json(found)
    else:
        print_plan(found)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise click.UsageError(f"--hotness {name}={text}: {text!r} is not a number.") from None


def _system(options: dict[str, Any]) -> CardSystem:
    """The named system, with what was given in place of its own bandwidths."""
    from shard_node.cuda.card_systems import SYSTEMS

    system = SYSTEMS[options["system"]]
    changed: dict[str, object] = {}
    if options["hbm_gb_per_s"] is not None:
        changed["hbm_gb_per_s"] = options["hbm_gb_per_s"]
    if options["nvlink_gb_per_s"] is not None:
        changed["peer"] = system.peer.model_copy(update={"gb_per_s": options["nvlink_gb_per_s"]})
    if options["host_gb_per_s"] is not None:
        changed["host"] = system.host.model_copy(update={"gb_per_s": options["host_gb_per_s"]})
    return system.model_copy(update=changed)
