"""From `--model` of `shardrank plan` to a model and how it is looked up: a published one, a description, a snapshot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from serving.cli.descriptions import read_description

if TYPE_CHECKING:
    from loader.manifest import ModelSpec, RowDtype
    from serving.cli.plan.lookup_profile import LookupProfile

MANIFEST_NAME = "manifest.json"


def planned_model(named: str, dtype: RowDtype | None) -> tuple[ModelSpec, LookupProfile]:
    """The model, and its lookups as far as they are known.

    Args:
        named: `NAME` or `NAME:SCALE` of the catalog; a snapshot's folder or manifest; or a model description.
        dtype: in place of the one that the tables are stored in.

    Raises:
        click.UsageError: nothing of that name, a scale that is none, or a dtype that a table can't have.
        ExportError: a description that can't be read.
        SnapshotError: a snapshot that can't be read.
    """
    from serving.cli.plan.lookup_profile import LookupProfile
    from serving.cli.plan.model_catalog import CATALOG, catalog_model

    name, _, scale = named.partition(":")
    if name in CATALOG:
        found = catalog_model(name, dtype or "int8", _scale(named, scale))
        return found.spec, LookupProfile(hotness=found.hotness, zipf=found.zipf)
    path = Path(named)
    if not path.exists():
        raise click.UsageError(f"--model {named}: no such file, and the catalog has only {', '.join(CATALOG)}.")
    if path.is_dir() or path.name == MANIFEST_NAME:
        spec, profile = _of_snapshot(path if path.is_dir() else path.parent)
    else:
        spec, profile = read_description(path), LookupProfile()
    return (spec if dtype is None else _stored_as(spec, dtype)), profile


def _scale(named: str, text: str) -> float:
    try:
        scale = float(text or 1)
    except ValueError:
        scale = 0.0
    if not 0 < scale <= 1:
        raise click.UsageError(f"--model {named}: the scale of its rows must be above 0 and at most 1.")
    return scale


def _of_snapshot(folder: Path) -> tuple[ModelSpec, LookupProfile]:
    from loader.reader import Snapshot
    from serving.cli.plan.lookup_profile import LookupProfile

    snapshot = Snapshot.open(folder, verify=False)
    golden = snapshot.golden()
    profile = LookupProfile() if golden is None else LookupProfile.of_requests(golden)
    counts = {table.name: snapshot.access_counts(table.name) for table in snapshot.spec.tables}
    return snapshot.spec, replace(profile, counts={name: one for name, one in counts.items() if one is not None})


def _stored_as(spec: ModelSpec, dtype: RowDtype) -> ModelSpec:
    odd = [table.name for table in spec.tables if dtype == "int4" and table.embedding_dim % 2]
    if odd:
        raise click.UsageError(f"--dtype int4 needs an even embedding_dim, which these tables do not have: {odd}.")
    tables = tuple(table.model_copy(update={"dtype": dtype}) for table in spec.tables)
    return spec.model_copy(update={"tables": tables})
