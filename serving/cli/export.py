"""`shardrank export`: a checkpoint and a description become a snapshot, with what makes its tables smaller.

`shardrank import` does the same with what other systems saved, by the options and functions here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import click

from loader.errors import ExportError
from serving.cli import WithExamples
from serving.cli import options as opts
from serving.cli.output import human_bytes, progress_bars
from serving.cli.settings import Options, export_into

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from loader.checkpoints import Checkpoint
    from loader.description import ModelDescription, TableDescription
    from loader.snapshot.golden import GoldenRequests
    from loader.snapshot.manifest import ModelSpec
    from loader.snapshot.row_classes import RowClasses
    from loader.snapshot.row_source import RowSource
    from loader.snapshot.vocabularies_and_counts import Vocabulary
    from loader.stores.cache import StorePlace
    from serving.exporting import DenseName

    Keys: TypeAlias = npt.NDArray[np.integer[Any]] | list[str]


version_options = opts.together(
    opts.option(
        "--program",
        "For a description of the kind `exported`: the file of torch.export.save. It is "
        "loaded and tried, as a server does: export only what you trust.",
        opts.EXISTING_FILE,
    ),
    opts.count("--version", "The version; default: the next free one."),
    opts.assignments("--table-key TABLE=KEY", "The checkpoint's key of a table that is not found by TorchRec's names."),
    opts.option(
        "--dense-prefix PREFIX", "Of the dense model's keys; it is cut off. Default: every key that is no table."
    ),
    opts.option(
        "--dense-map",
        "Where the dense model's tensors come from: a JSON object with a checkpoint's key for each name, or "
        '{"key": …, "transpose": true}, as Keras\' kernels need.',
        opts.EXISTING_FILE,
    ),
    opts.assignments("--vocabulary TABLE=FILE", "A table's ids: a UTF-8 text file whose line i is the id of row i."),
    opts.assignments(
        "--keys TABLE=FILE",
        "The keys of a table's rows, in their order: an .npy file of integers; of strings a text file, as of "
        "--vocabulary.",
    ),
    opts.assignments("--updated TABLE=FILE", "When a table's keys were updated last: .npy, seconds since 1970."),
    opts.option(
        "--expire-before TIME", "Keys --updated before that are left out: seconds since 1970, or a date (UTC)."
    ),
    opts.option(
        "--counts",
        "How often rows are looked up: what decides which are hot, and so how tables are divided, pruned and placed. "
        "As `shardrank counts` writes it, for any of the tables. Repeatable: counts are added.",
        opts.EXISTING,
        multiple=True,
    ),
    opts.ids_option,
    opts.pruning_options,
    opts.option(
        "--keep",
        "With --prune: rows that stay however rarely they were looked up, in a file as --counts takes it. Repeatable.",
        opts.EXISTING,
        multiple=True,
    ),
    opts.assignments(
        "--blocks TABLE=FILE",
        "The block of each row of a table that training divided: an .npy file of whole numbers [num_embeddings], 0 for "
        "the first.",
    ),
    opts.option("--golden", "Requests with training's scores; see docs/snapshot-format.md.", opts.EXISTING_FILE),
    opts.option("--golden-from", "Requests in the API's JSON, one a line, in place of --golden.", opts.EXISTING_FILE),
    opts.option(
        "--scores",
        "Of --golden-from, what training computed: an .npy file of all candidates' scores, or the API's answers as "
        'JSON, one a line: {"scores": […], "outputs": {…}}.',
        opts.EXISTING_FILE,
    ),
    opts.option("--golden-tolerance X", "How far a server's scores may be from them.", opts.ABOVE_ZERO, 0.05),
    opts.assignments("--metadata KEY=TEXT", "Free text about the training run."),
    opts.option(
        "--plan",
        "A plan file of `shardrank plan --out` for this model, or TorchRec's plan as JSON: columns are sliced as it "
        "says, and the snapshot carries it.",
        opts.EXISTING_FILE,
        name="plan_file",
    ),
)
"""Of a version that a checkpoint and a description become, whatever the checkpoint is."""
_COMPARED_ROWS = 1 << 16
WHERE = "Where the snapshot goes: FOLDER/<model>/<version>/, or a URL as `serve` takes it."


@click.command(cls=WithExamples)
@opts.option(
    "--checkpoint",
    "A .safetensors file or a folder of them, a state_dict file (.pt, .pth, .bin, .ckpt), or a "
    "torch.distributed.checkpoint folder.",
    opts.EXISTING,
    required=True,
)
@opts.option("--model", "The model's description, JSON.", opts.EXISTING_FILE, required=True, name="description")
@opts.store_options(WHERE, required=True)
@version_options
def export(store: StorePlace, checkpoint: Path, description: Path, **options: Any) -> None:
    r"""Write a trained model into a store as the next version.

    Rows are quantised as the description says, in bounded memory; NaN and inf are refused by table and row. An
    export that was interrupted goes on where it stopped when it is run again. Nothing in the checkpoint is executed;
    a --program is. Tables are divided as the description says, and pruned here: docs/levers.md is about it.

    Examples:
      shardrank export --checkpoint model.safetensors --model films.json --store models
      shardrank export --checkpoint model.safetensors --model films.json --store models \
          --counts films-counts.safetensors --prune --keep-share 0.999
      shardrank export --checkpoint epoch-3.pt --model films.json --store models \
          --table-key films=embedding.item.weight --dense-prefix over_arch. \
          --vocabulary users=user-ids.txt
      shardrank export --checkpoint model.safetensors --model films.json --store s3://bucket/models
    """
    from loader.checkpoints import open_checkpoint

    write_version(open_checkpoint(checkpoint), description, store, options)


def write_version(checkpoint: Checkpoint, description: Path, place: StorePlace, options: Options) -> None:
    """Take a checkpoint into a store as the next version, and print what became of it. Raises as its parts do."""
    from loader.checkpoints import keys_of
    from loader.divided_rows import chosen_rows, divide_rows
    from loader.snapshot.publishing import rows_bytes_of
    from loader.snapshot.writer import export_snapshot
    from router.torchrec_plan import read_plan
    from serving.exporting import check_blocks, match_model, read_description

    levers = {name: options[name] for name in ("ids", "prune", "keep_share", "keep")}
    blocks, plan, described = options["blocks"], None, read_description(description)
    unknown = options["table_key"].keys() - _names(described)
    _check_tables("--table-key", [table.name for table in described.tables], unknown)
    keyed = [one.name for one in described.tables if one.keys is not None and one.name not in options["keys"]]
    given: dict[str, Keys] = {
        table: _read_keys(described, table, Path(file)) for table, file in options["keys"].items()
    }
    given |= keys_of(checkpoint, keyed, options["table_key"])
    keys, kept = _unexpired(given, options["updated"], options["expire_before"])
    levers["num_keys"] = {table: len(of_table) for table, of_table in keys.items()}
    pruned = Pruned.of(description, described, options["counts"], **levers, blocks=blocks)
    spec, counts = pruned.spec, pruned.counts
    if options["plan_file"] is not None:
        plan = read_plan(options["plan_file"], spec)
        spec = plan.sliced(spec)
        plan.check_fits(spec)
    classes = {table: _row_classes(spec, table, Path(file)) for table, file in blocks.items()}
    names = {name: options[name] for name in ("dense_prefix", "program")} | {"table_keys": options["table_key"]}
    rows, dense = match_model(checkpoint, spec, dense_names=_read_dense_names(options["dense_map"]), **names)
    for line in checkpoint.notes:
        click.echo(line)
    check_blocks(spec, rows, classes)
    rows |= {one: chosen_rows(one, rows[one], chosen) for one, chosen in kept.items()}
    seen = {table.name for table in spec.logical_tables}
    whole = {table: one for table, one in counts.items() if table in seen}
    made = divide_rows(spec, rows, whole, row_classes=classes, kept=pruned.kept)
    with progress_bars() as bars:

        def write(folder: Path, version: int | None) -> Path:
            return export_snapshot(
                folder,
                spec,
                rows=made.rows,
                dense=dense,
                keys=keys,
                vocabularies={
                    table: _read_vocabulary(spec, table, Path(file)) for table, file in options["vocabulary"].items()
                },
                # Of a table that is divided by quotient_remainder there may be counts of its parts alone.
                access_counts={**{table: counts[table] for table in counts.keys() - seen}, **made.access_counts},
                row_classes=made.row_classes,
                golden=_golden(options["golden"], options["golden_from"], options["scores"]),
                metadata=options["metadata"],
                plan=None if plan is None else plan.to_json().encode(),
                progress=bars,
                version=version,
                golden_tolerance=options["golden_tolerance"],
            )

        written, where = export_into(place, spec.model, options["version"], write, bars)
    for line in (*pruned.told, *_quantised_again(spec, made.rows)):
        click.echo(line)
    in_store, as_float32 = human_bytes(rows_bytes_of(written.spec)), human_bytes(written.float32_bytes)
    click.echo(f"wrote {where}: {human_bytes(written.size_bytes)}; its rows {in_store}, as float32 {as_float32}")


def _names(described: ModelDescription) -> Iterator[str]:
    """Yield names by which rows may be found: of tables, and of parts that training may have made of them."""
    for table in described.tables:
        ends = [f".b{number}" for number in range(len(table.blocks) or 2)] + [".q", ".r"]
        yield from (table.name, *(table.name + end for end in ends))


def _quantised_again(spec: ModelSpec, rows: Mapping[str, RowSource]) -> Iterator[str]:
    """Yield, of each table whose rows were int8 already and are not stored as they were, how far off they are now."""
    import numpy as np

    from loader.snapshot.codecs import RowCodec

    for table in spec.tables:
        source, codecs, worst = rows[table.name], [RowCodec(table.dtype, dim) for dim in table.slice_dims], 0.0
        if source.quantised_as is None or (source.stored_dtype == table.dtype and len(codecs) == 1):
            continue
        for first in range(0, source.num_embeddings, _COMPARED_ROWS):
            for block in source.blocks(first, _COMPARED_ROWS):
                slices = np.split(block, np.cumsum(table.slice_dims)[:-1], axis=1)
                for codec, values in zip(codecs, slices, strict=True):
                    worst = max(worst, float(abs(codec.decode(codec.encode(values)) - values).max()))
        yield f"{table.name}: rows of {source.quantised_as} became {table.dtype}, values differ by up to {worst:.3g}"


def _golden(golden: Path | None, requests: Path | None, scores: Path | None) -> GoldenRequests | None:
    """Return the golden requests that were given, in either form. Raises ExportError."""
    from loader.snapshot.golden import GoldenRequests
    from loader.snapshot.tensor_files import load_numpy

    if (requests is None) != (scores is None) or (golden is not None and requests is not None):
        raise ExportError("--golden-from and --scores go with each other, and without --golden")
    if requests is None or scores is None:
        return None if golden is None else GoldenRequests.from_tensors(load_numpy(golden))
    asked = [_json_line(requests, *line) for line in enumerate(_read_lines(requests), 1)]
    if scores.suffix == ".npy":
        from loader.traces import map_npy

        return GoldenRequests.from_requests(asked, map_npy(scores).reshape(-1))
    answers = [_json_line(scores, *line) for line in enumerate(_read_lines(scores), 1)]
    try:
        found = [score for answer in answers for score in answer["scores"]]
        names = answers[0].get("outputs", {})
        flat = {name: [value for answer in answers for value in answer["outputs"][name]] for name in names}
    except (KeyError, TypeError) as error:
        raise ExportError(
            f"{scores}: an answer has not the lists scores, and outputs as the first: {error!r}"
        ) from error
    return GoldenRequests.from_requests(asked, found, flat)


def _json_line(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{path}, line {number}: no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ExportError(f"{path}, line {number}: expected an object, found {line!r:.40}")
    return found


def _read_dense_names(path: Path | None) -> dict[str, DenseName] | None:
    """Return where the dense model's tensors come from, as a JSON file says. Raises ExportError."""
    from serving.exporting import DenseName

    if path is None:
        return None
    made = {}
    for name, theirs in _json_line(path, 1, path.read_text(encoding="utf-8")).items():
        fields = {"key": theirs} if isinstance(theirs, str) else theirs
        match fields:
            case {"key": str(key), **more} if more in ({}, {"transpose": True}, {"transpose": False}):
                made[name] = DenseName(key, bool(more.get("transpose")))
            case _:
                raise ExportError(
                    f'{path}: {name!r}: expected a key, or {{"key": …, "transpose": true}}, found {theirs!r:.80}'
                )
    return made


class Pruned(NamedTuple):
    """A model as it is stored, and what is known of its rows.

    `counts` are lookups of rows, [num_embeddings], by table as features see it (or part, by quotient_remainder); `kept`
    which rows stay of tables that are pruned, bool [num_embeddings]; `told` a line about every table to be pruned.
    """

    spec: ModelSpec
    counts: Mapping[str, npt.NDArray[np.integer[Any]]]
    kept: Mapping[str, npt.NDArray[np.bool_]]
    told: Sequence[str]

    @classmethod
    def of(
        cls,
        path: Path,
        described: ModelDescription,
        counts: Sequence[Path],
        *,
        ids: Sequence[str] = (),
        prune: bool = False,
        keep_share: float | None = None,
        keep: Sequence[Path] = (),
        blocks: Collection[str] = (),
        num_keys: Mapping[str, int] | None = None,
    ) -> Pruned:
        """Compile a description (of the file `path`) with counts.

        `counts` and `keep` are files that `read_access_counts` takes, of lookups, added up, and of rows that stay;
        `ids` traces of raw ids that `read_traces` takes, which size tables and count as well. With `prune`, the rows of
        `keep_share` of the lookups stay, if it is None all that were looked up; `blocks` are tables that training
        divided; `num_keys` is how many keys tables have.

        Raises:
            ExportError: counts are missing or do not fit, nothing would be left of a table, or as `compiled`.
        """
        from loader.access_counts import merged_by_table, read_access_counts
        from loader.divided_rows import choose_rows
        from loader.traces import read_traces
        from router.table_sizing import count_rows, fitted
        from serving.exporting import compiled

        if not prune and (keep or keep_share is not None):
            raise ExportError(f"{'--keep' if keep else '--keep-share'} goes with --prune")
        if prune and not counts and not ids:
            raise ExportError("--prune needs --counts or --ids: rows that nobody asked for can't be told without")
        traced = read_traces(ids, *described.traced_features)
        described = fitted(described, traced) if ids else described
        spec = compiled(f"{path}: ", described, None, num_keys)
        counted, also = read_access_counts(counts, spec), read_access_counts(keep, spec)
        of_ids = count_rows(described.tables, traced)
        for table in described.tables if prune else ():
            # Of a table that traces alone count, every feature needs one.
            missing = sorted(set(table.feature_names) - traced.keys())
            if table.name in of_ids.keys() - counted.keys() and missing:
                name = f"--prune: table {table.name!r}"
                raise ExportError(f"{name}: --ids have none of features {missing}, whose rows would go")
        found = {name: one[:] for name, one in merged_by_table([counted, of_ids]).items()}
        if missing := sorted(set(also) - set(found)):
            raise ExportError(f"--keep: rows of {missing}, of which there are no --counts")
        kept: dict[str, npt.NDArray[np.bool_]] = {}
        told = list[str]()
        for table in described.tables if prune else ():
            chosen, reason = None, _why_whole(table, is_trained_so=table.name in blocks)
            if table.name not in found:
                if traced.keys().isdisjoint(table.feature_names):
                    continue
                reason = "--ids do not tell which rows a vocabulary's ids have"
            if not reason:
                stays = None if (rows := also.get(table.name)) is None else rows[:]
                chosen = choose_rows(table.name, found[table.name], keep_share or 1.0, stays)
                # What unknown ids get was trained, however few of them came.
                chosen[table.default_row] |= table.unknown_id == "default_row"
                if (left_out := int((~chosen).sum())) < 2:
                    reason = f"{left_out} of {chosen.size} rows could go, and one takes their place"
            if reason or chosen is None:
                told.append(f"{table.name}: not pruned, {reason}")
            else:
                kept[table.name] = chosen
                told.append(f"{table.name}: pruned, {int(chosen.sum())} of {chosen.size} rows are kept")
        if kept:
            spec = compiled(f"{path}: ", described, {name: int(one.sum()) for name, one in kept.items()}, num_keys)
        return cls(spec, found, kept, told)


def _why_whole(table: TableDescription, *, is_trained_so: bool) -> str:
    """Return why no row of a table can be left out; "" if rows can. `is_trained_so`: its blocks are given."""
    if is_trained_so or len({one.dim or table.embedding_dim for one in table.blocks}) > 1:
        return "training divided it into blocks"
    if table.id_mapping.kind == "quotient_remainder":
        return "by quotient_remainder a row is of many ids"
    if table.keys is not None:
        return "it has keys: delete those that are to go"
    return "it is stored in slices of its columns" if table.column_dims else ""


def _row_classes(spec: ModelSpec, table: str, path: Path) -> RowClasses:
    """Return the classes of a table's rows that a file says. Raises ExportError."""
    from loader.snapshot.row_classes import RowClasses
    from loader.traces import map_npy

    divided = {one.name: one for one in spec.divided if one.num_classes > 1}
    if table not in divided:
        raise ExportError(f"--blocks: table {table!r} has no blocks; those that have some are {sorted(divided)}")
    rows, blocks, found = divided[table].num_embeddings, divided[table].num_classes, map_npy(path)
    if found.dtype.kind not in "iu" or found.shape != (rows,):
        told = f"{found.dtype} {list(found.shape)}"
        raise ExportError(
            f"--blocks: {path}: expected the block of each row of {table!r}, integers [{rows}], got {told}"
        )
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= blocks:
        raise ExportError(f"--blocks: {path}: blocks {low} to {high}; table {table!r} has 0 to {blocks - 1}")
    return RowClasses.of(found, blocks)


def _check_tables(flag: str, known: Collection[str], tables: Iterable[str]) -> None:
    """Raise ExportError for a flag that names a table which the description does not have."""
    for table in tables:
        if table not in known:
            raise ExportError(f"{flag}: no table {table!r}; the description's tables are {list(known)}")


def _read_keys(described: ModelDescription, table: str, path: Path) -> Keys:
    """Return the keys in a file. Raises ExportError."""
    from loader.traces import map_npy

    tables = {one.name: one for one in described.tables if one.keys is not None}
    _check_tables("--keys", tables, [table])
    return _read_lines(path) if tables[table].keys == "string" else map_npy(path)


def _unexpired(
    keys: dict[str, Keys], updated: Mapping[str, str], expire_before: str | None
) -> tuple[dict[str, Keys], dict[str, npt.NDArray[np.bool_]]]:
    """Return the keys that tables have, and which they are of those in their files, bool [n]. Raises ExportError."""
    from loader.traces import map_npy

    if bool(updated) != (expire_before is not None):
        raise ExportError("--updated and --expire-before go with each other")
    _check_tables("--updated (of those with --keys)", keys, updated)
    before, kept = _seconds_of(expire_before or "0"), dict[str, "npt.NDArray[np.bool_]"]()
    for table, file in updated.items():
        times = map_npy(Path(file))
        if times.dtype.kind not in "iu" or times.shape != (len(keys[table]),):
            told = f"expected integers [{len(keys[table])}], one for each key, got {times.dtype} {list(times.shape)}"
            raise ExportError(f"--updated: {file}: {told}")
        chosen, of = times >= before, keys[table]
        click.echo(f"table {table}: {len(of) - chosen.sum()} of {len(of)} keys are left out")
        if not chosen.any():
            raise ExportError(f"--expire-before {expire_before}: no key of table {table!r} is left")
        keys[table] = list(compress(of, chosen.tolist())) if isinstance(of, list) else of[chosen]
        kept[table] = chosen
    return keys, kept


def _seconds_of(text: str) -> float:
    if text.isdecimal() and len(text) != len("20261231"):
        return float(text)
    try:
        at = datetime.fromisoformat(text)
        return at.replace(tzinfo=at.tzinfo or UTC).timestamp()
    except ValueError as error:
        raise ExportError(f"--expire-before {text!r} is neither seconds since 1970 nor a date: {error}") from error


def _read_lines(path: Path) -> list[str]:
    try:
        # Not splitlines: a string id may hold a character that it takes for a line end.
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ExportError(f"{path}: not UTF-8: {error}") from error


def _read_vocabulary(spec: ModelSpec, table: str, path: Path) -> Vocabulary:
    """Return the ids in a text file, one a line. Raises ExportError."""
    import numpy as np

    from loader.snapshot.vocabularies_and_counts import id_type_is_string

    tables = {one.name: one for one in spec.logical_tables}
    _check_tables("--vocabulary", tables, [table])
    lines = _read_lines(path)
    if id_type_is_string(tables[table]):
        return lines
    for number, line in enumerate(lines, start=1):
        if not (line.isascii() and line.isdecimal() and int(line) < 2**63):
            raise ExportError(f"{path}, line {number}: {line!r:.40} is not a whole number below 2^63")
    return np.array([int(line) for line in lines], dtype=np.int64)
