"""`shardrank fit`: how large a model's tables must be for the ids that come, and what makes them smaller."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from serving.cli import WithExamples
from serving.cli import options as opts
from serving.cli.output import human_bytes, print_json, print_table
from serving.cli.settings import Options

if TYPE_CHECKING:
    from loader.description import ModelDescription
    from loader.id_counts import IdCounts
    from loader.snapshot.tables import RowDtype
    from router.fitting import RowLookups, TableMeasures
    from router.levers import LeveredTable, Proposal

MAX_TABLES = 20
MAX_CHANGES = 8
LEVER_NAMES = ("fit", "prune", "unify", "compose", "dims", "precision", "shard")
"""Repeated from the router because importing it would make `--help` slow; a test compares them."""
DEFAULT_COLLISION_SHARE, DEFAULT_KEEP_SHARE = "5%", 0.999
_NO_LEVERS: Options = {"ids": (), "prune": False, "keep_share": None}
DTYPES: tuple[RowDtype, ...] = ("fp32", "fp16", "int8", "int4")
_BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}
_BY_POPULARITY: tuple[tuple[RowDtype, RowDtype, float], ...] = (
    ("fp16", "int4", 0.1),
    ("int8", "int4", 0.1),
    ("int8", "int4", 0.5),
)


_ABOVE_0 = opts.FiniteRange(0, 1, min_open=True)


def _levers(text: str) -> tuple[str, ...]:
    named = tuple(text.split(","))
    if unknown := [one for one in named if one not in LEVER_NAMES]:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(LEVER_NAMES)}.")
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
    "In place of --trace: how often rows were looked up, as `shardrank counts` writes it, or a folder of <table>.npy. "
    "Of rows, not ids: collisions can't be measured. Default: a snapshot's own.",
    opts.EXISTING,
)
@opts.option("--bytes SIZE", "Propose levers until all rows fit in, such as 64GB.", opts.byte_size, name="limit_bytes")
@opts.option(
    "--max-collision-share SHARE",
    "Of a hashed table's lookups, those whose id shares its row with another one that came: 5% or 0.05.",
    opts.share,
    DEFAULT_COLLISION_SHARE,
)
@opts.option("--keep-share SHARE", "Of lookups, what pruning leaves alone.", _ABOVE_0, DEFAULT_KEEP_SHARE)
@opts.option(
    "--levers LEVER,...", "Which may be proposed. Default: all, in this order.", _levers, ",".join(LEVER_NAMES)
)
@opts.option("--out", "Write the proposal as a model description.", opts.WRITABLE_FILE)
@opts.option(
    "--counts-out",
    "Write how often rows are looked up by the --trace, at the sizes proposed, for `export`; not of vocabularies.",
    opts.WRITABLE_FILE,
)
@opts.option("--plot", "Draw bytes against the share of lookups changed, SVG.", opts.WRITABLE_FILE)
@opts.json_flag("what is found")
def fit(model: str, **options: Any) -> None:
    """Fit a model's tables to the ids that come.

    Prints bytes by dtype, codes and what is stored with scales; with a trace, for each table, the ids and rows asked
    for, head and tail, collisions as chance has them and as measured, and what share of lookups a memory of the hottest
    rows answers. With --bytes, what to do until all fits: hash sizes, pruning, one table for several features,
    quotient-remainder, fewer dims, fewer bits, and only then shards; with bytes before and after each, the lookups that
    it changes, and whether the model must be trained again. docs/levers.md is about it.

    MODEL is a description, a snapshot's folder, or a published model's name, as for `shardrank plan`.

    Examples:
      shardrank fit shop.json
      shardrank fit shop.json --trace clicks.parquet --bytes 64GB --out smaller.json --plot smaller.svg
      shardrank fit shop.json --trace item=items.npy --trace user=users.npy --max-collision-share 1% --json
      shardrank fit shop.json --counts shop-counts.safetensors --bytes 8GB --levers prune,precision
    """
    from router.fitting import measure
    from router.levers import Propose, levered, size_curve

    if options["out"] is not None and options["limit_bytes"] is None:
        raise click.UsageError("--out needs --bytes: without it nothing is proposed.")
    description, traced, observed = _asked(model, options)
    tables = levered(description.tables, traced, observed)
    measured = [measure(one.table, one.stored_bytes, one.rows, one.asked) for one in tables if one.rows is not None]
    document: dict[str, Any] = {
        "model": description.model,
        "bytes": byte_table(tables),
        "tables": [one.model_dump() for one in measured],
        "hash_sizes": [one.model_dump() for one in size_curve(tables)],
        "proposal": None,
    }
    proposal, done = None, tables
    if options["limit_bytes"] is not None:
        names = ("limit_bytes", "max_collision_share", "keep_share", "levers")
        proposal, done = Propose(**{name: options[name] for name in names}).make(tables)
        document["proposal"] = proposal.model_dump()
        if options["out"] is not None:
            proposed = description.model_copy(update={"tables": tuple(one.table for one in done)})
            _write(options["out"], proposed.model_dump_json(indent=2, exclude_none=True) + "\n")
    if options["counts_out"] is not None:
        _write_counts(options["counts_out"], done)
    if options["plot"] is not None:
        _write(options["plot"], _drawn(document))
    if options["as_json"]:
        print_json(document)
        return
    _print_bytes(document["bytes"])
    if measured:
        _print_measures(measured, ids_known=bool(traced))
    _print_curve(document["hash_sizes"])
    if proposal is not None:
        _print_proposal(proposal)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"{path}: {error.strerror or error}") from error


def _write_counts(path: Path, tables: Sequence[LeveredTable]) -> None:
    from loader.snapshot.per_row import write_access_counts

    asked = {one.table.name: one.asked.row_counts(one.table) for one in tables if one.asked is not None}
    counts = {name: one for name, one in asked.items() if one is not None}
    if not counts:
        raise click.UsageError("--counts-out: there is no --trace of a table whose rows are known.")
    write_access_counts(
        path, counts, {one.table.name: one.num_embeddings for one in tables if one.table.name in counts}
    )


def _asked(named: str, options: Options) -> tuple[ModelDescription, dict[str, IdCounts], dict[str, RowLookups]]:
    """Return a model, its ids by feature, and its rows' lookups by table.

    Raises UsageError, ExportError, TraceError, FittingError.
    """
    from loader.id_counts import read_traces
    from router.fitting import RowLookups, fitted
    from serving.cli.export import read_counts

    counts, traces = options["counts"], options["traces"]
    if counts is not None and traces:
        raise click.UsageError("--counts and --trace were counted over different batches: give one of them.")
    described, of_snapshot = _model(named)
    traced = read_traces(traces, {one.name for one in described.features})
    described = fitted(described, traced)
    if traces or (counts is None and not of_snapshot):
        return described, traced, {}
    found = of_snapshot
    if counts is not None:
        # Of quotients and remainders there may be counts of parts alone, which say nothing of ids.
        seen = {one.name for one in described.tables}
        found = {name: one for name, one in read_counts([counts], described.compiled()).items() if name in seen}
    return described, {}, {name: RowLookups.alone(one, of_ids=False) for name, one in found.items()}


def _model(named: str) -> tuple[ModelDescription, dict[str, Any]]:
    """Return a model, and, of a snapshot, how often its rows were looked up, by table. Raises as `_asked`."""
    from loader.description import ModelDescription, TableDescription
    from loader.errors import ExportError
    from serving.cli.plan import MANIFEST_NAME, planned_model
    from serving.cli.snapshots import read_description

    path = Path(named)
    if path.is_file() and path.name != MANIFEST_NAME:
        return read_description(path), {}
    planned = planned_model({"model": named, "dtype": None, "counts": None, **_NO_LEVERS})
    spec, counts = planned.spec, planned.profile.counts
    if spec.divided:
        raise ExportError(f"{named}: its tables are divided already; give the description that it was made from")
    fields = {name: getattr(spec, name) for name in ModelDescription.model_fields}
    tables = tuple(
        TableDescription(**{name: getattr(one, name) for name in type(one).model_fields}) for one in spec.tables
    )
    return ModelDescription(**{**fields, "tables": tables}), dict(counts)


def byte_table(tables: Sequence[LeveredTable]) -> list[dict[str, Any]]:
    """Count the model's bytes in each dtype, and by popularity: codes or elements alone, and what stands beside."""

    def row(name: str, sized: Sequence[LeveredTable]) -> dict[str, Any]:
        parts = [part for one in sized for part in one.stored[0]]
        codes = sum(part.num_embeddings * part.embedding_dim * _BITS[part.dtype] // 8 for part in parts)
        classes, stored = sum(one.class_bytes for one in sized), sum(one.stored_bytes for one in sized)
        projections = sum(one.projection_bytes for one in sized)
        beside = {"scale_bytes": stored - codes - classes - projections, "class_bytes": classes + projections}
        return {"dtype": name, "code_bytes": codes, **beside, "stored_bytes": stored, "of_float32": stored / float32}

    float32 = sum(4 * one.num_embeddings * one.table.width for one in tables)
    found = [row("as described", tables)]
    found += [row(dtype, [one.in_dtypes(dtype, dtype, 1.0) for one in tables]) for dtype in DTYPES]
    for hot, cold, share in _BY_POPULARITY:
        found.append(
            row(f"hottest {share:.0%} {hot}, others {cold}", [one.in_dtypes(hot, cold, share) for one in tables])
        )
    return found


def _print_bytes(found: Sequence[Mapping[str, Any]]) -> None:
    parts = ("code_bytes", "scale_bytes", "class_bytes", "stored_bytes")
    rows = [
        (
            one["dtype"],
            f"{one['code_bytes']:,}",
            *(human_bytes(one[part]) for part in parts),
            f"{one['of_float32']:.1%}",
        )
        for one in found
    ]
    columns = ("rows", "#bytes of codes", "#codes", "#scales, biases", "#which are hot", "#together", "#of fp32")
    print_table("Bytes of all rows", columns, rows)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _print_measures(measured: Sequence[TableMeasures], *, ids_known: bool) -> None:
    from router.fitting import CACHE_SHARES

    largest = sorted(measured, key=lambda one: -one.stored_bytes)[:MAX_TABLES]
    title = f"the largest {MAX_TABLES} of {len(measured)}" if len(measured) > MAX_TABLES else "all with a trace"
    rows = [
        (one.table, _count(one.num_embeddings), human_bytes(one.stored_bytes), _count(one.lookups),
         _count(one.distinct_ids), _count(one.ids_seen_once), _count(one.rows_used), _share(one.rows_unused_share),
         *(_share(head.share_of_lookups) for head in one.head), _share(one.unseen_share))
        for one in largest
    ]  # fmt: skip
    columns = ("table", "#rows", "#bytes", "#lookups", "#ids", "#seen once", "#rows used", "#rows not",
               "#hottest 1 %", "#hottest 10 %", "#new to come")  # fmt: skip
    print_table(f"Tables, {title}; lookups of the hottest rows used, and those to come of rows not used", columns, rows)
    if not ids_known:
        click.echo("Counts are of rows, not of ids, so collisions can't be measured: for those give a --trace.\n")
    _print_collisions([one for one in largest if one.expected_rows_used is not None and one.distinct_ids])
    caches = [
        (one.table, *(f"{human_bytes(cache.size_bytes)}: {cache.hit_rate:.1%}" for cache in one.caches))
        for one in largest
    ]
    names = [f"#{share:.1%}" for share in CACHE_SHARES]
    print_table(
        "Lookups that a memory of the hottest rows answers, by its share of the table", ("table", *names), caches
    )


def _print_collisions(hashed: Sequence[TableMeasures]) -> None:
    if hashed:
        rows = [
            (one.table, _count(one.distinct_ids), f"{(one.expected_rows_used or 0) / (one.distinct_ids or 1):.2%}",
             f"{one.rows_used / (one.distinct_ids or 1):.2%}", _share(one.expected_ids_alone_share),
             _share(one.ids_alone_share), _share(one.lookups_colliding_share))
            for one in hashed
        ]  # fmt: skip
        columns = ("table", "#ids", "#rows used / ids, by chance", "#measured", "#ids alone in their row, by chance",
                   "#measured", "#lookups in a collision")  # fmt: skip
        print_table("Collisions of hashed tables", columns, rows)


def _print_curve(found: Sequence[Mapping[str, Any]]) -> None:
    if found:
        rows = [
            (f"{one['rows_per_id']:.0%}", human_bytes(one["stored_bytes"]), _share(one["changed_share"]))
            for one in found
        ]
        print_table("Hashed tables with so many rows for each id", ("rows / ids", "#model", "#lookups changed"), rows)


def _print_proposal(proposal: Proposal) -> None:
    rows = []
    for one in proposal.steps:
        training = "yes" if one.needs_training else "no"
        sizes = human_bytes(one.bytes_before), human_bytes(one.bytes_after)
        rows.append((one.lever, *sizes, _share(one.changed_share), _share(one.all_changed_share), training))
    columns = ("lever", "#before", "#after", "#lookups it changes", "#all changed", "train again")
    print_table(f"Into {human_bytes(proposal.limit_bytes)}: {human_bytes(proposal.bytes_before)} now", columns, rows)
    for step in proposal.steps:
        if step.note:
            click.echo(f"{step.lever}: {step.note}")
        for change in sorted(step.tables, key=lambda one: one.bytes_after - one.bytes_before)[:MAX_CHANGES]:
            shrunk = f"{human_bytes(change.bytes_before)} -> {human_bytes(change.bytes_after)}"
            click.echo(f"{step.lever}: {change.table}: {change.before} -> {change.after} ({shrunk})")
        if (left := len(step.tables) - MAX_CHANGES) > 0:
            click.echo(f"{step.lever}: and {left} tables more (--json has all)")
    if proposal.bytes_after <= proposal.limit_bytes:
        click.echo(f"fits: {human_bytes(proposal.bytes_after)}")
    elif proposal.shards > 1:
        click.echo(f"{human_bytes(proposal.bytes_after)} are for {proposal.shards} shards")
    else:
        click.echo(f"does not fit: {human_bytes(proposal.bytes_after)} are left, and --levers leaves out shard")


_WIDTH, _HEIGHT = 640, 400
_LEFT, _TOP, _RIGHT, _BOTTOM = 60, 30, 610, 340
_COLOURS = {"curve": "#4477aa", "steps": "#cc6677"}


def _drawn(document: Mapping[str, Any]) -> str:
    """Draw the curve of hash sizes and the proposal's steps: bytes, by powers of ten, against lookups changed."""
    curve = [(one["stored_bytes"], one["changed_share"], f"{one['rows_per_id']:.0%} rows / ids")
             for one in document["hash_sizes"] if one["changed_share"] is not None]  # fmt: skip
    proposal = document["proposal"] or {"steps": []}
    steps = [(one["bytes_after"], one["all_changed_share"], one["lever"]) for one in proposal["steps"]
             if one["all_changed_share"] is not None and one["bytes_after"] < one["bytes_before"]]  # fmt: skip
    if not curve and not steps:
        raise click.UsageError("--plot: nothing to draw without a --trace or --counts.")
    sizes = [max(size, 1) for size, _, _ in (*curve, *steps)]
    low, high = math.log10(min(sizes)) - 0.1, math.log10(max(sizes)) + 0.1

    def at(size: float, share: float) -> tuple[float, float]:
        across = (math.log10(max(size, 1)) - low) / (high - low)
        return round(_LEFT + across * (_RIGHT - _LEFT), 1), round(_BOTTOM - share * (_BOTTOM - _TOP), 1)

    label = f"{document['model']}: bytes and lookups changed"
    svg = ET.Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img")
    svg.attrib |= {"font-family": "sans-serif", "font-size": "12", "aria-label": label}
    ET.SubElement(svg, "rect", width=str(_WIDTH), height=str(_HEIGHT), fill="white")

    def text(x: float, y: float, words: str, anchor: str = "middle", colour: str = "#333") -> None:
        ET.SubElement(svg, "text", {"x": f"{x}", "y": f"{y}", "text-anchor": anchor, "fill": colour}).text = words

    def line(points: Sequence[tuple[float, float]], colour: str) -> None:
        ET.SubElement(svg, "polyline", points=" ".join(f"{x},{y}" for x, y in points), fill="none", stroke=colour)

    text(_WIDTH / 2, 16, label)
    text(_LEFT, _TOP - 6, "lookups changed", "start")
    for tenth in range(0, 11, 2):
        x, y = at(10**low, tenth / 10)
        line([(x, y), (_RIGHT, y)], "#ddd")
        text(x - 6, y + 4, f"{tenth * 10} %", "end")
    decimals = [mark * 10**power for power in range(math.floor(low), math.ceil(high) + 1) for mark in (1, 2, 5)]
    shown = [size for size in decimals if low <= math.log10(size) <= high]
    for size in shown[:: max(len(shown) // 8, 1)]:
        x, y = at(size, 0.0)
        line([(x, y), (x, y + 5)], "#333")
        text(x, y + 18, human_bytes(size))
    text((_LEFT + _RIGHT) / 2, _HEIGHT - 16, "bytes of all rows")
    for name, drawn in (("curve", curve), ("steps", steps)):
        line([at(size, share) for size, share, _ in drawn], _COLOURS[name])
        for number, (size, share, what) in enumerate(drawn):
            x, y = at(size, share)
            dot = ET.SubElement(svg, "circle", cx=f"{x}", cy=f"{y}", r="3.5", fill=_COLOURS[name])
            ET.SubElement(dot, "title").text = f"{what}: {human_bytes(size)}, {share:.2%} of lookups changed"
            if name == "steps":
                text(x, y - 8 - 12 * (number % 2), what, colour=_COLOURS[name])
    for number, (name, words) in enumerate(
        (("curve", "hashed tables of 100 % to 1 % of the ids"), ("steps", "proposal"))
    ):
        text(_RIGHT, _TOP + 14 + 16 * number, words, "end", _COLOURS[name])
    return ET.tostring(svg, encoding="unicode") + "\n"
