"""`shardrank fit`: how large a model's tables must be for the ids that come, and what makes them smaller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from serving.cli import WithExamples
from serving.cli import options as opts
from serving.cli.output import MAX_ROWS, human_bytes, print_document, print_json
from serving.cli.settings import Options

if TYPE_CHECKING:
    from loader.access_counts import AccessCounts
    from loader.description import ModelDescription
    from router.table_shrinking import LeveredTable
    from router.table_sizing import RowLookups

_NO_LEVERS: Options = {"ids": (), "prune": False, "keep_share": None}
_BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}


def _levers(text: str) -> tuple[str, ...]:
    from router.table_shrinking import LEVERS

    named = tuple(text.split(","))
    if unknown := [name for name in named if name not in LEVERS]:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(LEVERS)}.")
    return named


@click.command(cls=WithExamples)
@click.argument("model", metavar="MODEL")
@opts.option(
    "--trace FILE",
    "Ids that were asked for: a .csv or .parquet file whose columns are features, or FEATURE=FILE.npy. Repeatable.",
    multiple=True,
    name="traces",
)
@opts.option(
    "--counts",
    "In place of --trace: how often rows were looked up, as `shardrank counts` writes it. "
    "Of rows, not ids: collisions can't be measured. Default: a snapshot's own.",
    opts.EXISTING,
)
@opts.option("--bytes SIZE", "Propose levers until all rows fit in, such as 64GB.", opts.byte_size, name="limit_bytes")
@opts.option(
    "--max-collision-share SHARE",
    "Of a hashed table's lookups, those whose id shares its row with another one that came: 5% or 0.05.",
    opts.share,
    "5%",
)
@opts.option("--keep-share SHARE", "Of lookups, what pruning leaves alone.", opts.PART, 0.999)
@opts.option("--levers LEVER,...", "Which may be proposed, such as prune,precision. Default: all.", _levers)
@opts.option("--out", "Write the proposal as a model description.", opts.WRITABLE_FILE)
@opts.json_flag("what is found")
def fit(model: str, **options: Any) -> None:
    """Fit a model's tables to the ids that come.

    Prints bytes by dtype, codes and what is stored with scales; with a trace, for each table, the ids and rows asked
    for, head and tail, and collisions as chance has them and as measured. With --bytes, what to do until all fits:
    first what needs no training (pruning, fewer bits), then hash sizes, quotient-remainder or fewer dims, whichever
    changes the fewest lookups for the bytes it saves, and only then shards; with bytes before and after each, the
    lookups that it changes, and whether the model must be trained again. docs/levers.md is about it.

    MODEL is a description, a snapshot's folder, or a published model's name, as for `shardrank plan`.

    Examples:
      shardrank fit shop.json
      shardrank fit shop.json --trace clicks.parquet --bytes 64GB --out smaller.json
      shardrank fit shop.json --trace item=items.npy --trace user=users.npy --max-collision-share 1% --json
      shardrank fit shop.json --counts shop-counts.safetensors --bytes 8GB --levers prune,precision
    """
    from router.table_shrinking import LEVERS, LeveredTable, Propose
    from router.table_sizing import measure

    if options["out"] is not None and options["limit_bytes"] is None:
        raise click.UsageError("--out needs --bytes: without it nothing is proposed.")
    description, traces, observed = _read_lookups(model, options)
    tables = tuple(LeveredTable.of(table, traces, observed.get(table.name)) for table in description.tables)
    measured = [measure(each.table, each.stored_bytes, each.rows, each.ids) for each in tables if each.rows is not None]
    document: dict[str, Any] = {
        "model": description.model,
        "bytes": byte_table(tables),
        "tables": [measures.model_dump() for measures in measured],
        "proposal": None,
    }
    proposal, done = None, tables
    if options["limit_bytes"] is not None:
        limits = {name: options[name] for name in ("limit_bytes", "max_collision_share", "keep_share")}
        proposal, done = Propose(**limits, levers=options["levers"] or LEVERS).make(tables)
        document["proposal"] = proposal.model_dump()
        if options["out"] is not None:
            proposed = description.model_copy(update={"tables": tuple(table.table for table in done)})
            options["out"].write_text(proposed.model_dump_json(indent=2, exclude_none=True) + "\n", encoding="utf-8")
    if options["as_json"]:
        print_json(document)
    else:
        print_document(document, max_rows=MAX_ROWS)
    if measured and not traces:
        message = "Counts are of rows, not of ids, so collisions can't be measured: for those give a --trace."
        click.echo(message, err=True)
    if proposal is not None and proposal.bytes_after > proposal.limit_bytes and proposal.shards == 1:
        left = human_bytes(proposal.bytes_after)
        click.echo(f"does not fit: {left} are left, and --levers leaves out shard", err=True)


def _read_lookups(
    named: str, options: Options
) -> tuple[ModelDescription, Mapping[str, AccessCounts], dict[str, RowLookups]]:
    """Return a model, its ids by feature, and its rows' lookups by table.

    Raises UsageError, ExportError, TraceError, FittingError.
    """
    from loader.access_counts import read_access_counts
    from loader.traces import read_traces
    from router.table_sizing import RowLookups, fitted

    counts, traces = options["counts"], options["traces"]
    if counts is not None and traces:
        raise click.UsageError("--counts and --trace were counted over different batches: give one of them.")
    described, row_counts = _read_model(named)
    traced = read_traces(traces, *described.traced_features)
    described = fitted(described, traced)
    if traces:
        return described, traced, {}
    if counts is not None:
        # Of quotients and remainders there may be counts of parts alone, which say nothing of ids.
        read = read_access_counts([counts], described.compiled())
        row_counts = {table.name: read[table.name].counts for table in described.tables if table.name in read}
    return described, {}, {name: RowLookups.alone(of_rows, of_ids=False) for name, of_rows in row_counts.items()}


def _read_model(named: str) -> tuple[ModelDescription, dict[str, Any]]:
    """Return a model, and, of a snapshot, how often its rows were looked up, by table. Raises as `_read_lookups`."""
    from loader.description import ModelDescription, TableDescription
    from loader.errors import ExportError
    from serving.cli.plan import MANIFEST_NAME, planned_model
    from serving.exporting import read_description

    path = Path(named)
    if path.is_file() and path.name != MANIFEST_NAME:
        return read_description(path), {}
    spec, profile = planned_model({"model": named, "dtype": None, "counts": None, "zipf": None, **_NO_LEVERS})
    if spec.divided:
        raise ExportError(f"{named}: its tables are divided already; give the description that it was made from")
    tables = tuple(TableDescription(**dict(iter(table))) for table in spec.tables)
    fields = {name: getattr(spec, name) for name in ModelDescription.model_fields}
    return ModelDescription(**{**fields, "tables": tables}), dict(profile.counts)


def byte_table(tables: Sequence[LeveredTable]) -> list[dict[str, Any]]:
    """Count the model's bytes in each dtype, and by popularity: codes or elements alone, and what is stored with them.

    Each row has the name of the dtypes, `code_bytes`, `scale_bytes`, `class_bytes`, `stored_bytes` and `of_float32`.
    """
    from router.table_shrinking import DTYPE_ROUNDS

    float32 = sum(4 * table.num_embeddings * table.table.width for table in tables)
    by_dtypes = {"as described": list(tables)}
    for hot, cold, share in (("fp32", "fp32", 1.0), *sorted(DTYPE_ROUNDS, key=lambda dtypes: dtypes[0] != dtypes[1])):
        name = hot if hot == cold else f"hottest {share:.0%} {hot}, others {cold}"
        by_dtypes[name] = [table.in_dtypes(hot, cold, share) for table in tables]
    rows = []
    for name, sized in by_dtypes.items():
        parts = [part for table in sized for part in table.stored[0]]
        codes = sum(part.num_embeddings * part.embedding_dim * _BITS[part.dtype] // 8 for part in parts)
        classes = sum(table.class_bytes for table in sized)
        stored = sum(table.stored_bytes for table in sized)
        sizes = {"code_bytes": codes, "scale_bytes": stored - codes - classes, "class_bytes": classes}
        rows.append({"dtype": name, **sizes, "stored_bytes": stored, "of_float32": stored / float32})
    return rows
