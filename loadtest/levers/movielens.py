"""MovieLens 100K with hashed crosses of its features: AUC and bytes of each lever alone, and in the proposed order.

Each seed is a split and a training. What needs no training (pruning, number formats) is done to rows that were trained
once; AUC is that of rows as they are stored: encoded, and decoded again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from loader.description import ModelDescription
from loader.snapshot.codecs import RowCodec
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.tables import Frozen
from loadtest.rounds import t_975
from serving.training.dataset import CROSSES, FilmsDataset, FilmsOptions, evaluation_requests, films_description
from serving.training.interactions import Interactions
from serving.training.network import TrainedModel, float32_scores
from serving.training.trainer import Pruning, auc, divided, kept_by, train_parts, trained_form, training_counts

EPOCHS: Final = 4
DIM: Final = 16
FITTED: Final = 0.1
"""The share of rows that the proposed order leaves a hashed cross: chosen on seeds that are not reported."""
SHARES: Final = (0.5, 0.25, 0.1, 0.05, 0.01)
MARGIN: Final = 0.002
"""How much AUC a smaller model may lose, and still count as equal."""


@dataclass(frozen=True)
class Lever:
    """One row of the table: what is done to the model's tables.

    Attributes:
        group: of the levers that are alike: a row of the picture's legend.
        words: of tables, by name, instead of those that they have.
    """

    group: str
    name: str
    words: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    pruning: Pruning | None = None
    crosses: bool = True


class LeverResult(Frozen):
    """AUC on the held out ratings, by seed, and bytes: of rows, row classes and projections; of the first seed."""

    group: str
    name: str
    bytes: int
    auc: tuple[float, ...]
    difference: float
    interval: float

    @property
    def is_within(self) -> bool:
        """Say whether the interval's lower end is within the margin."""
        return self.difference - self.interval >= -MARGIN


class LeversReport(Frozen):
    """All rows, the baseline first; differences are paired by seed, with half of the 95% t-interval beside."""

    source: str
    seeds: tuple[int, ...]
    epochs: int
    embedding_dim: int
    rows: dict[str, int]
    levers: tuple[LeverResult, ...]


def _merged(*all_words: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for words in all_words:
        for name, own in words.items():
            found[name] = found.get(name, {}) | own
    return found


def levers(rows: Mapping[str, int], films: int) -> tuple[Lever, ...]:
    """List what is compared, given the rows of each table of the whole model, and the number of film ids."""
    every = dict.fromkeys(rows)

    def of_all(**words: Any) -> dict[str, dict[str, Any]]:
        return {name: dict(words) for name in every}

    def hashed(share: float) -> dict[str, dict[str, Any]]:
        return {name: {"num_embeddings": max(1, round(share * rows[name]))} for name in CROSSES}

    def united(names: Sequence[str], share: float, salt: str = "per_feature") -> dict[str, dict[str, Any]]:
        size = round(share * sum(rows[name] for name in names))
        mapping = {"kind": "hash", "salt": salt}
        return {"crosses": {"feature_names": tuple(names), "num_embeddings": size, "id_mapping": mapping}}

    def composed(combine: str) -> dict[str, dict[str, Any]]:
        # The remainder is the film's number, the quotient that of what it is crossed with.
        mapping = {"kind": "quotient_remainder", "buckets": films, "combine": combine}
        sizes = {"zip_film": 1001 * films, "occupation_film": rows["occupations"] * films}
        return {name: {"num_embeddings": size, "id_mapping": mapping} for name, size in sizes.items()}

    blocks = [{"share": 0.1}, {"share": 0.3, "dim": 8}, {"dim": 4}]
    whole = {name: {"blocks": blocks} for name in rows if rows[name] > 100}
    rare = ("user_genre", "age_genre")
    fitted = hashed(FITTED)
    unified = _merged(fitted, united(tuple(CROSSES), FITTED))
    compose = _merged(fitted, united(rare, FITTED), composed("add"))
    mixed = _merged(compose, {name: {"blocks": blocks} for name in ("users", "films", "crosses")})
    halves = [{"share": 0.1, "dtype": "int8"}, {"share": 0.3, "dim": 8, "dtype": "int4"}, {"dim": 4, "dtype": "int4"}]
    small = _merged(mixed, {name: {"blocks": halves} for name in ("users", "films", "crosses")})
    small = _merged({name: {"dtype": "int4"} for name in every}, {"crosses": {"dtype": "int4"}}, small)
    cut = Pruning(keep_share=0.999)

    def hot(kind: str, cold: str) -> dict[str, dict[str, Any]]:
        return of_all(dtype={"hot": kind, "cold": cold, "hot_share": 0.1})

    order = partial(Lever, "in order")
    return (
        Lever("baseline", "fp32, full tables"),
        Lever("no crosses", "without crosses", crosses=False),
        Lever("no crosses", "without crosses, int4", of_all(dtype="int4"), crosses=False),
        *(Lever("hash sizes", f"crosses hashed to {share:.0%} of their ids", hashed(share)) for share in SHARES),
        Lever("prune", "rows never asked for, zeros", pruning=Pruning(pruned_row="zeros")),
        *(Lever("prune", f"keep {x:.0%} of lookups", pruning=Pruning(keep_share=x)) for x in (1, 0.99, 0.9, 0.8)),
        Lever("unify", "one table for crosses, 25%, a salt each", united(tuple(CROSSES), 0.25)),
        Lever("unify", "one table for crosses, 25%, no salt", united(tuple(CROSSES), 0.25, "none")),
        Lever("compose", "films' crosses as quotient + remainder", composed("add")),
        Lever("compose", "films' crosses as quotient * remainder", composed("multiply")),
        Lever("mixed dims", "16, 8, 4 columns by popularity", whole),
        Lever("mixed dims", "8 columns, projected", of_all(embedding_dim=8, project_to=DIM)),
        Lever("mixed dims", "4 columns, projected", of_all(embedding_dim=4, project_to=DIM)),
        *(Lever("precision", kind, of_all(dtype=kind)) for kind in ("fp16", "int8", "int4")),
        Lever("precision", "hot 10% fp16, cold int4", hot("fp16", "int4")),
        Lever("precision", "hot 10% int8, cold int4", hot("int8", "int4")),
        order("1 fit hash sizes (10%)", fitted),
        order("2 prune (keep 99.9%)", fitted, cut),
        order("3 unify crosses, salted", unified, cut),
        order("4 compose films' crosses", compose, cut),
        order("5 mixed dims", mixed, cut),
        order("6 int8 hot, int4 cold", small, cut),
    )


def describe(interactions: Interactions, lever: Lever) -> ModelDescription:
    """Describe the model with a lever; float32 rows, except where the lever has another format."""
    options = FilmsOptions(
        kind="dcn_v2", dtype="fp32", embedding_dim=DIM, profile=True, crosses=lever.crosses, tables=_known(lever)
    )
    return films_description(interactions, options)


def _known(lever: Lever) -> dict[str, dict[str, Any]]:
    """Leave out tables that the model has not, as a lever for every table names them."""
    united = lever.words.get("crosses", {}).get("feature_names", ())
    gone = set(united) if lever.crosses else CROSSES.keys()
    words = {name: own for name, own in lever.words.items() if name not in gone}
    return {name: own for name, own in words.items() if name != "crosses" or "feature_names" in own}


def stored_bytes(model: TrainedModel) -> int:
    """Count bytes of a model's rows, of what says where rows of divided tables lie, and of projections in float32."""
    rows = sum(RowCodec(one.dtype, one.embedding_dim).row_bytes * one.num_embeddings for one in model.spec.tables)
    classes = sum(bitmap.size_bytes for one in model.row_classes.values() for bitmap in one.bitmaps)
    return rows + classes + sum(4 * columns * width for columns, width in model.spec.projections().values())


def as_stored(model: TrainedModel) -> TrainedModel:
    """Encode and decode a model's rows."""
    tables = {}
    for table in model.spec.tables:
        codec = RowCodec(table.dtype, table.embedding_dim)
        tables[table.name] = codec.decode(codec.encode(model.tables[table.name]))
    return replace(model, tables=tables)


def _in_float32(description: ModelDescription) -> ModelDescription:
    """Describe what is trained, whatever it is stored as: models that are equal in this need one training."""
    tables = []
    for table in trained_form(description).tables:
        blocks = tuple(block.model_copy(update={"dtype": None}) for block in table.blocks)
        tables.append(table.model_copy(update={"dtype": "fp32", "blocks": blocks}))
    return description.model_copy(update={"tables": tuple(tables)})


def measure_seed(interactions: Interactions, epochs: int, seed: int) -> list[tuple[float, int]]:
    """Train and score every lever with one seed: AUC and bytes of each."""
    torch.set_num_threads(1)
    dataset = FilmsDataset.split(interactions, seed=seed)
    trained: dict[str, TrainedModel] = {}
    found = []
    for lever in levers_of(interactions):
        description = describe(interactions, lever)
        counts = training_counts(dataset, description)
        kept = kept_by(lever.pruning, description, counts)
        plain = _in_float32(description)
        parts = {table.name: kept[table.name] for table in plain.compiled().divided if table.name in kept}
        key = json.dumps([plain.model_dump(mode="json"), parts])
        if key not in trained:
            trained[key] = train_parts(dataset, plain, counts, parts, seed=seed, epochs=epochs)
        model = divided(trained[key], description.compiled(kept), counts, (lever.pruning or Pruning()).pruned_row)
        labelled = evaluation_requests(dataset, model.spec)
        found.append((auc(labelled.labels, float32_scores(as_stored(model), labelled.requests)), stored_bytes(model)))
    return found


def levers_of(interactions: Interactions) -> tuple[Lever, ...]:
    """List what is compared on these data."""
    rows = {one.name: one.num_embeddings for one in _spec(interactions, Lever("", "")).tables}
    return levers(rows, int(interactions.films.ids[-1]) + 1)


def _spec(interactions: Interactions, lever: Lever) -> ModelSpec:
    return describe(interactions, lever).compiled()


def compare(
    interactions: Interactions,
    seeds: Sequence[int],
    *,
    epochs: int = EPOCHS,
    workers: int = 1,
    told: Callable[[int], None] = lambda seed: None,
) -> LeversReport:
    """Measure all levers with two seeds or more, in `workers` processes; `told` hears of each seed that is done."""
    every, rows = levers_of(interactions), _spec(interactions, Lever("", "")).tables
    values = []
    with ProcessPoolExecutor(workers) as pool:
        for seed, one in zip(seeds, pool.map(partial(measure_seed, interactions, epochs), seeds), strict=True):
            values.append(one)
            told(seed)
    found = []
    for number, lever in enumerate(every):
        areas = np.array([one[number][0] for one in values])
        differences = areas - np.array([one[0][0] for one in values])
        interval = t_975(len(seeds) - 1) * float(differences.std(ddof=1)) / math.sqrt(len(seeds))
        found.append(
            LeverResult(
                group=lever.group,
                name=lever.name,
                bytes=values[0][number][1],
                auc=tuple(areas.tolist()),
                difference=float(differences.mean()),
                interval=interval,
            )
        )
    return LeversReport(
        source=interactions.source,
        seeds=tuple(seeds),
        epochs=epochs,
        embedding_dim=DIM,
        rows={one.name: one.num_embeddings for one in rows},
        levers=tuple(found),
    )
