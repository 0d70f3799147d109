"""Train a version: tables and dense part together, in float32 and plain torch, the same for the same seed; export it.

The scores of a trained model in this process are the answer that served scores are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from loader.description import ModelDescription, QuotientRemainderMapping, TableDescription
from loader.divided_rows import Counts, classes_by_counts, divide_rows, kept_rows
from loader.progress import Progress, no_progress
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.row_classes import RowClasses
from loader.snapshot.row_source import ArrayRows
from loader.snapshot.tables import RowDtype, VocabularyMapping, refused_as
from loader.snapshot.writer import export_snapshot
from loader.traces import count_values
from router.table_sizing import fitted
from serving.training import dataset as films
from serving.training.dataset import FilmsDataset, TrainingError, films_vocabularies, labelled_requests
from serving.training.network import RankingNetwork, RequestBatches, TrainedModel, float32_scores, undivided
from shard_node.bags import Float32Array, Int64Array

DEFAULT_EPOCHS = 12
REQUESTS_PER_BATCH = 48
LEARNING_RATE = 0.01
DENSE_WEIGHT_DECAY = 0.3
TABLE_WEIGHT_DECAY = 1.5
CROSS_LEARNING_RATE = 0.03
CROSS_ACCUMULATOR = 0.03
# Share of ids that are trained as unknown ones, in tables with vocabulary and default row.
UNKNOWN_SHARE = 0.01
GOLDEN_REQUESTS = 32
# At least twice the largest difference measured over all kinds of ranking model, on MovieLens 100K and on generated
# data: a dense part in bfloat16 gives 0.012, int8 rows 0.013, int4 rows 0.17, and they add up.
GOLDEN_TOLERANCES: Mapping[RowDtype, float] = {"fp32": 0.03, "fp16": 0.03, "int8": 0.06, "int4": 0.4}


def train(
    dataset: FilmsDataset,
    spec: ModelSpec,
    *,
    row_classes: Mapping[str, RowClasses] | None = None,
    seed: int = 0,
    epochs: int = DEFAULT_EPOCHS,
    progress: Progress = no_progress,
) -> TrainedModel:
    """Train a model of `films_description`, compiled, on the dataset's training part, which is seen `epochs` times.

    The seed is that of the rows and weights at the beginning, the order of batches, and dropout. A model whose tables
    are divided by popularity needs their `row_classes`. Raises RankingModelError if the dense model is not valid.
    """
    vocabularies = films_vocabularies(dataset.interactions, spec)
    labelled = labelled_requests(dataset, spec, dataset.train)
    batches = RequestBatches(spec, vocabularies, labelled.requests)
    labels, draw = torch.from_numpy(labelled.labels), np.random.default_rng(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = RankingNetwork(spec, row_classes=row_classes).train()
        optimizers = _optimizers(network)
        batches_per_epoch = -(-batches.num_requests // REQUESTS_PER_BATCH)
        steps = epochs * batches_per_epoch
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizers[0], LEARNING_RATE, total_steps=steps, pct_start=0.2)
        chosen: list[Int64Array] = []
        for step in range(1, steps + 1):
            chosen = chosen or np.array_split(draw.permutation(batches.num_requests), batches_per_epoch)
            batch = batches.select(chosen.pop(0))
            for feature, (rows, _) in batch.bags.items():
                table = spec.table_of(feature)
                if isinstance(table.id_mapping, VocabularyMapping) and table.unknown_id == "default_row":
                    # Some ids get the default row, so that it learns what to expect of an unknown id.
                    rows[torch.rand(rows.shape) < UNKNOWN_SHARE] = table.default_row
            loss = F.binary_cross_entropy_with_logits(network(batch), labels[batch.candidates])
            network.zero_grad()
            torch.autograd.backward(loss)
            for optimizer in optimizers:
                optimizer.step()
            schedule.step()
            progress("training", step, steps)
    return TrainedModel(spec, network.rows(), network.dense(), vocabularies, row_classes or {})


def _optimizers(network: RankingNetwork) -> list[torch.optim.Optimizer]:
    """Give AdamW for all but the rows of crosses, and Adagrad for those.

    Most crosses come once or twice. AdamW moves a row as far for one sample as for a hundred, and learns them by heart:
    on MovieLens 100K that costs 0.1 of the AUC.
    """
    tables: list[nn.Parameter] = []
    crosses: list[nn.Parameter] = []
    for table in network.spec.tables:
        (crosses if films.CROSSES.keys() >= {*table.feature_names} else tables).append(network.parameter(table.name))
    decays = [
        {"params": list(network.ranking.parameters()), "weight_decay": DENSE_WEIGHT_DECAY},
        {"params": tables, "weight_decay": TABLE_WEIGHT_DECAY},
    ]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(decays, lr=LEARNING_RATE)]
    if crosses:
        optimizers.append(
            torch.optim.Adagrad(crosses, CROSS_LEARNING_RATE, initial_accumulator_value=CROSS_ACCUMULATOR)
        )
    return optimizers


def training_counts(dataset: FilmsDataset, description: ModelDescription) -> dict[str, Int64Array]:
    """Count how often training looks up each row of each table, int64 [num_embeddings], by the training part alone."""
    spec = trained_form(description).compiled()
    vocabularies = films_vocabularies(dataset.interactions, spec)
    counts = RequestBatches(spec, vocabularies, labelled_requests(dataset, spec, dataset.train).requests).counts()
    for table in undivided(spec).tables:
        if table.unknown_id == "default_row":
            counts[table.name][table.default_row] += math.ceil(UNKNOWN_SHARE * int(counts[table.name].sum()))
    return counts


def trained_form(description: ModelDescription) -> ModelDescription:
    """Describe what is trained: tables whose parts are cut out of the trained rows afterwards are whole."""
    tables = []
    for table in description.tables:
        by_dtype = {} if isinstance(table.dtype, str) else {"dtype": table.dtype.cold}
        tables.append(table if _has_trained_parts(table) else table.model_copy(update={"blocks": (), **by_dtype}))
    return description.model_copy(update={"tables": tuple(tables)})


def _has_trained_parts(table: TableDescription) -> bool:
    """Say whether a part has other rows than the table: narrower ones, or those of quotients and remainders."""
    narrower = any((block.dim or table.embedding_dim) < table.width for block in table.blocks)
    return narrower or table.project_to is not None or isinstance(table.id_mapping, QuotientRemainderMapping)


def kept_by(keep_share: float | None, description: ModelDescription, counts: Counts) -> dict[str, int]:
    """Return how many rows are left of each table that is pruned: the hottest, with this share of the lookups.

    1 leaves out what was never looked up, None nothing. Not pruned are tables that are stored in slices or by
    quotient_remainder, and where a single row would go: what its ids get is a row, too.
    """
    kept: dict[str, int] = {}
    for table in description.tables:
        if keep_share and not table.column_dims and not isinstance(table.id_mapping, QuotientRemainderMapping):
            count = kept_rows(table.name, counts[table.name], keep_share)
            if count < counts[table.name].size - 1:
                kept[table.name] = count
    return kept


def train_described(
    dataset: FilmsDataset,
    description: ModelDescription,
    *,
    keep_share: float | None = None,
    seed: int = 0,
    epochs: int = DEFAULT_EPOCHS,
    progress: Progress = no_progress,
) -> TrainedModel:
    """Train what a person described, and divide its tables as they are to be stored.

    Rows are counted in the training part. By popularity tables of narrower parts are divided before training, all
    others, and what is pruned of them, afterwards. Tables whose `num_embeddings` is auto get the size that ids of the
    training part need. Raises TrainingError, FittingError, or ExportError as `divide_rows`.
    """
    if any(table.num_embeddings == "auto" for table in description.tables):
        ids = labelled_requests(dataset, description, dataset.train).requests.values
        description = fitted(description, {name: count_values(name, values) for name, values in ids.items()})
    with refused_as(TrainingError, "", ModelSpec):
        counts = training_counts(dataset, description)
        kept = kept_by(keep_share, description, counts)
        spec = description.compiled(kept)
    # Parts that are not cut out of trained rows are trained; all other tables are trained undivided.
    in_parts = {table.name for table in description.tables if _has_trained_parts(table)}
    trained_spec = trained_form(description).compiled({name: kept[name] for name in in_parts & kept.keys()})
    classes = {
        table.name: classes_by_counts(table, trained_spec.parts(table), counts[table.name])
        for table in trained_spec.divided
        if table.num_classes > 1
    }
    trained = train(dataset, trained_spec, row_classes=classes, seed=seed, epochs=epochs, progress=progress)
    return divided(trained, spec, counts)


def divided(trained: TrainedModel, spec: ModelSpec, counts: Counts) -> TrainedModel:
    """Cut what is to be stored, as `spec` says, out of what was trained. Raises ExportError as `divide`."""
    sources = {name: ArrayRows(rows) for name, rows in trained.tables.items()}
    made = divide_rows(spec, sources, counts, row_classes=trained.row_classes)
    tables = {name: np.concatenate(list(rows.blocks(0, rows.num_embeddings))) for name, rows in made.rows.items()}
    return replace(trained, spec=spec, tables=tables, row_classes=made.row_classes, access_counts=made.access_counts)


@dataclass(frozen=True, slots=True, eq=False)
class TrainedVersion:
    """A version in the store, and the training that it came from."""

    dataset: FilmsDataset
    trained: TrainedModel
    folder: Path


@dataclass(frozen=True, slots=True, eq=False)
class Expectation:
    """Float32 [N] `scores` of the test part by the float32 model, and the AUC of films' smoothed mean labels."""

    labelled: films.LabelledRequests
    scores: Float32Array
    auc_fp32: float
    auc_item_mean: float


def read_interactions(movielens: Path | None, ratings: int, seed: int) -> films.Interactions:
    """Read MovieLens from a folder, or generate ratings. Raises TrainingError."""
    return films.generate_interactions(ratings, seed=seed) if movielens is None else films.read_movielens(movielens)


def train_version(
    interactions: films.Interactions,
    store: Path,
    *,
    seed: int,
    epochs: int | None = None,
    options: films.FilmsOptions | None = None,
    keep_share: float | None = None,
    progress: Progress = no_progress,
) -> TrainedVersion:
    """Train a model and write it as the next version into a store.

    `seed` is that of the split and the training. Raises TrainingError and ExportError.
    """
    dataset = FilmsDataset.split(interactions, seed=seed)
    trained = train_described(
        dataset,
        films.films_description(interactions, options),
        keep_share=keep_share,
        seed=seed,
        epochs=epochs or DEFAULT_EPOCHS,
        progress=progress,
    )
    metadata = {"source": interactions.source, "seed": str(seed)}
    folder = export_trained(trained, dataset, store, metadata=metadata, progress=progress)
    return TrainedVersion(dataset, trained, folder)


def export_trained(
    trained: TrainedModel,
    dataset: FilmsDataset,
    store: Path,
    *,
    metadata: Mapping[str, str] | None = None,
    progress: Progress = no_progress,
) -> Path:
    """Write the next version of a model into a store; return the snapshot's folder.

    Its golden requests are the first of the test part with the scores of the float32 model. The tolerance is that of
    its coarsest row format.
    """
    requests = labelled_requests(dataset, trained.spec, dataset.test, GOLDEN_REQUESTS).requests
    return export_snapshot(
        store,
        trained.spec,
        rows={name: ArrayRows(rows) for name, rows in trained.tables.items()},
        dense=trained.dense,
        vocabularies=trained.vocabularies,
        access_counts=trained.access_counts,
        row_classes=trained.row_classes,
        golden=replace(requests, scores=float32_scores(trained, requests)),
        golden_tolerance=max(GOLDEN_TOLERANCES[table.dtype] for table in trained.spec.tables),
        metadata=metadata,
        progress=progress,
    )


def expectation(version: TrainedVersion) -> Expectation:
    """Rank the test part with the float32 model in this process, and with the baseline."""
    labelled = labelled_requests(version.dataset, version.trained.spec, version.dataset.test)
    scores = float32_scores(version.trained, labelled.requests)
    dataset, samples = version.dataset, labelled.samples
    statistics = dataset.film_statistics(dataset.interactions.film_index[samples], dataset.fold[samples])
    return Expectation(labelled, scores, auc(labelled.labels, scores), auc(labelled.labels, statistics[:, 1]))


def auc(labels: npt.NDArray[Any], scores: npt.NDArray[np.floating]) -> float:
    """Return the area under the ROC curve of labels above 0.5; ties count half. Raises TrainingError without it."""
    if not np.isfinite(scores).all():
        raise TrainingError("auc: scores hold NaN or inf")
    positive, negative = scores[labels > 0.5], np.sort(scores[labels <= 0.5])
    if not positive.size or not negative.size:
        raise TrainingError(f"auc: {positive.size} positive and {negative.size} negative labels; both are needed")
    # Twice the negatives below each positive, ties counting once.
    below = np.searchsorted(negative, positive, "left") + np.searchsorted(negative, positive, "right")
    return float(below.sum()) / (2 * positive.size * negative.size)
