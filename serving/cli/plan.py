"""`shardrank plan`: what a model takes on a node of cards, and how fast its lookups can be; needs no card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from serving.cli import WithExamples
from serving.cli import options as opts
from serving.cli.output import print_json
from serving.cli.settings import Options, config_of
from serving.cli.snapshots import read_description

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from loader.snapshot.manifest import ModelSpec
    from loader.snapshot.reader import Snapshot
    from loader.snapshot.tables import DividedTable, RowDtype
    from router.planning.lookups import LookupProfile
    from router.planning.options import NetworkOptions
    from shard_node.planning.cost_model import CardSystem
    from shard_node.planning.hotness import Head

MANIFEST_NAME = "manifest.json"
DTYPES = ("int8", "int4", "fp16", "fp32")
SYSTEM_NAMES = ("a100", "h100", "h200", "gb200")
"""The keys of `SYSTEMS`, repeated because importing them would make `--help` slow; a test compares them."""


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
@opts.gigabytes("--pinned-memory-gb", "Host memory for rows that no card has room for.", opts.DEFAULT_PINNED_GB)
@opts.gigabytes(
    "--hot-gb",
    "Of each card, for copies of the hottest rows. Default: what all rows leave of the card, else a sixteenth.",
)
@opts.count("--versions", "Versions side by side, each with its part of the memory; a rollout needs 2.", 1, 8, 1)
@opts.count("--shards", "Nodes that share rows.", 1, 1024, 1)
@opts.sharding_option
@opts.replicate_option
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
    "--counts",
    "How often rows are looked up: what `shardrank counts` wrote. Default: the snapshot's.",
    opts.EXISTING,
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
    from loader.snapshot.tables import NUM_BUCKETS
    from router.planning.capacity import CapacityPlan
    from router.planning.options import CapacityOptions
    from serving.cli.plan_output import print_plan

    planned = planned_model(options)
    spec, profile = planned.spec, planned.profile
    profile = profile.with_hotness(spec, {name: _number(name, text) for name, text in options["hotness"]})
    if options["zipf"] is not None:
        profile = replace(profile, zipf=options["zipf"], counts={})
    if options["head"] is not None:
        profile = replace(profile, head=_head(options["head"]))
    if counts := _counted(planned, options):
        profile = replace(profile, counts=counts)
    buckets = min(NUM_BUCKETS[table.bucketing] for table in spec.tables)
    if options["shards"] > buckets and options["sharding"] != "table":
        raise click.UsageError(f"--shards: rows are divided by {buckets} buckets, so into as many shards at most.")
    system = _system(options)
    node = config_of(
        CapacityOptions,
        options,
        system=system,
        cards=options["cards"] or system.cards,
        card_memory_gb=options["card_memory_gb"] or system.card_memory_gb,
        peer_access=not options["no_peer_access"],
        candidates=options["batch"],
        network=_network(options) if options["shards"] > 1 else None,
    )
    if compare or out is not None:
        found, file = CapacityPlan.per_table(spec, profile, node)
        if out is not None:
            try:
                out.write_text(file.to_json(), encoding="utf-8")
            except OSError as error:
                raise click.UsageError(f"--out {out}: {error.strerror or error}") from error
    else:
        found = CapacityPlan.make(spec, profile, node)
    if options["as_json"]:
        print_json(found)
    else:
        print_plan(found)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise click.UsageError(f"--hotness {name}={text}: {text!r} is not a number.") from None


def _head(text: str) -> Head:
    from shard_node.planning.hotness import Head

    rows, _, share = text.partition(":")
    try:
        found = Head(int(rows), float(share))
    except ValueError:
        found = Head(0, 0.0)
    if not (1 <= found.rows < 2**48 and 0 <= found.share <= 1):
        raise click.UsageError(f"--head {text}: {text!r} is not ROWS:SHARE, such as 5000:0.85.")
    return found


def _network(options: Options) -> NetworkOptions:
    from router.planning.options import Network, NetworkOptions

    network = Network(gb_per_s=options["network_gb_per_s"], latency_us=options["network_us"])
    return config_of(NetworkOptions, options, network=network)


def _counted(planned: Planned, options: Options) -> dict[str, npt.NDArray[np.uint32]]:
    """Return how often rows of stored tables are looked up, if that was given. Raises UsageError, ExportError."""
    import numpy as np

    from loader.access_counts import read_access_counts
    from loader.divided_rows import part_counts
    from loader.snapshot.tables import DividedTable

    counts, spec = options["counts"], planned.spec
    if counts is not None and options["ids"]:
        raise click.UsageError("--counts and --ids were counted over different batches: give one of them.")
    tables = {table.name: table for table in spec.logical_tables}
    given: dict[str, npt.NDArray[np.uint32]] = {}
    if counts is not None:
        given = {name: one[:] for name, one in read_access_counts([counts], spec).items()}
    elif options["ids"]:
        given = {name: one.astype(np.uint32, copy=False) for name, one in planned.counts.items()}
    # Of a table that is divided by quotient_remainder there may be counts of its parts alone.
    found = {name: one for name, one in given.items() if name not in tables}
    for name in given.keys() & tables.keys():
        table = tables[name]
        if isinstance(table, DividedTable):
            found |= part_counts(table, spec.parts(table), given[name], planned.classes(table, given[name]))
        else:
            found[name] = given[name]
    return found


def _system(options: Options) -> CardSystem:
    """Return the named system, with what was given in place of its own bandwidths."""
    from shard_node.planning.cost_model import SYSTEMS

    system = SYSTEMS[options["system"]]
    changed: dict[str, object] = {"hbm_gb_per_s": options["hbm_gb_per_s"] or system.hbm_gb_per_s}
    for link, flag in (("peer", "nvlink_gb_per_s"), ("host", "host_gb_per_s")):
        if options[flag] is not None:
            changed[link] = getattr(system, link).model_copy(update={"gb_per_s": options[flag]})
    return system.model_copy(update=changed)


class Planned(NamedTuple):
    """A model that is planned, and its lookups as far as they are known.

    Attributes:
        snapshot: that it is of, if it is of one.
        kept: which rows stay of tables that are pruned, if it is of a description.
        counts: how often rows are looked up, by table as features see it, by traces of ids and files of counts.
    """

    spec: ModelSpec
    profile: LookupProfile
    snapshot: Snapshot | None = None
    kept: Mapping[str, npt.NDArray[np.bool_]] = {}
    counts: Mapping[str, npt.NDArray[np.integer[Any]]] = {}

    def classes(self, table: DividedTable, counts: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8] | None:
        """Return which part each row of a table is in, by a snapshot or by counts; None if it has one class."""
        from loader.divided_rows import classes_by_counts

        if table.num_classes == 1:
            return None
        if self.snapshot is not None:
            return self.snapshot.row_classes(table.name).classes()
        return classes_by_counts(table, self.spec.parts(table), counts, self.kept.get(table.name)).classes()


def planned_model(options: Options) -> Planned:
    """Return a model of the catalog, a snapshot or a description, stored as the flags say.

    Raises UsageError, ExportError for a description that can't be read, or SnapshotError.
    """
    from router.planning.catalog import CATALOG, catalog_model
    from router.planning.lookups import LookupProfile
    from serving.cli.export import Pruned

    named, dtype = options["model"], options["dtype"]
    name, _, scale = named.partition(":")
    path = Path(named)
    is_described = name not in CATALOG and path.is_file() and path.name != MANIFEST_NAME
    if not is_described and (options["prune"] or options["keep_share"] is not None or options["ids"]):
        told = "--ids, --prune and --keep-share go"
        raise click.UsageError(f"{told} with a model description, which --model {named} is not.")
    if name in CATALOG:
        found = catalog_model(name, dtype or "int8", _scale(named, scale))
        return Planned(found.spec, LookupProfile(hotness=found.hotness, zipf=found.zipf))
    if is_described:
        counts = [] if options["counts"] is None else [options["counts"]]
        levers = {name: options[name] for name in ("ids", "prune", "keep_share")}
        pruned = Pruned.of(path, read_description(path), counts, **levers)
        for line in pruned.told:
            click.echo(line, err=True)
        planned = Planned(pruned.spec, LookupProfile(), kept=pruned.kept, counts=pruned.counts)
    elif path.exists():
        planned = _of_snapshot(path if path.is_dir() else path.parent)
    else:
        raise click.UsageError(f"--model {named}: no such file, and the catalog has only {', '.join(CATALOG)}.")
    return planned if dtype is None else planned._replace(spec=_stored_as(planned.spec, dtype))


def _scale(named: str, text: str) -> float:
    try:
        scale = float(text or 1)
    except ValueError:
        scale = 0.0
    if not 0 < scale <= 1:
        raise click.UsageError(f"--model {named}: the scale of its rows must be above 0 and at most 1.")
    return scale


def _of_snapshot(folder: Path) -> Planned:
    from loader.snapshot.reader import Snapshot
    from router.planning.lookups import LookupProfile

    snapshot = Snapshot.open(folder, verify=False)
    golden = snapshot.golden()
    profile = LookupProfile() if golden is None else LookupProfile.of_requests(golden)
    counts = {table.name: snapshot.access_counts(table.slices[0].name) for table in snapshot.spec.tables}
    profile = replace(profile, counts={name: one for name, one in counts.items() if one is not None})
    return Planned(snapshot.spec, profile, snapshot)


def _stored_as(spec: ModelSpec, dtype: RowDtype) -> ModelSpec:
    odd = [table.name for table in spec.stored_tables if dtype == "int4" and table.embedding_dim % 2]
    if odd:
        raise click.UsageError(f"--dtype int4 needs an even embedding_dim, which these tables do not have: {odd}.")
    tables = tuple(table.model_copy(update={"dtype": dtype}) for table in spec.tables)
    return spec.model_copy(update={"tables": tables})
