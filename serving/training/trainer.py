"""Train a version: tables and dense part together, in float32 and plain torch, the same for the same seed; export it.

The scores of a trained model in this process are the answer that served scores are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pad_sequence

from loader.progress import Progress, no_progress
from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import ModelSpec
from loader.snapshot.per_row import Vocabulary
from loader.snapshot.row_source import rows_of
from loader.snapshot.tables import Bucketing, RowDtype, VocabularyMapping, fingerprint_strings
from loader.snapshot.writer import export_snapshot
from router.feature_schema import FeatureSchema
from router.id_mapping import IdMapper
from serving.models.inputs import InputShapes, RankingInputs, SequenceInput, SideShapes
from serving.models.ranking_models import build_model
from serving.training.dataset import (
    FilmsDataset,
    FilmsOptions,
    LabelledRequests,
    evaluation_requests,
    films_spec,
    films_vocabularies,
    training_requests,
    with_bucketing,
)
from serving.training.interactions import (
    Interactions,
    TrainingError,
    generate_interactions,
    offsets_of,
    positions_in,
    read_movielens,
)
from shard_node.bags import Float32Array, Int64Array, KeyedBags

DEFAULT_EPOCHS = 12
# A request has some 17 samples.
REQUESTS_PER_BATCH = 48
# The highest; it rises to it and falls to zero.
LEARNING_RATE = 0.01
DENSE_WEIGHT_DECAY = 0.3
TABLE_WEIGHT_DECAY = 1.5
# Share of the pooled embeddings' elements, and of the sequences' rows, left out while training.
DROPOUT = 0.1
# Share of ids that are trained as unknown ones, in tables with vocabulary and default row.
UNKNOWN_SHARE = 0.01
# Standard deviation of the rows at the beginning.
INITIAL_SCALE = 0.05
_REQUESTS_PER_SCORING = 256
GOLDEN_REQUESTS = 32
# At least twice the largest difference measured over all kinds of ranking model, on MovieLens 100K and on generated
# data: a dense part in bfloat16 gives 0.012, int8 rows 0.013, int4 rows 0.17, and they add up.
GOLDEN_TOLERANCES: Mapping[RowDtype, float] = {"fp32": 0.03, "fp16": 0.03, "int8": 0.06, "int4": 0.4}


@dataclass(frozen=True, slots=True, eq=False)
class TrainedModel:
    """What training hands over: float32 rows by table, the ranking model's tensors by name, and ids in row order."""

    spec: ModelSpec
    tables: Mapping[str, Float32Array]
    dense: Mapping[str, Tensor]
    vocabularies: Mapping[str, Vocabulary]


@dataclass(frozen=True, slots=True, eq=False)
class RowBatch:
    """R requests with N candidates, as tensors.

    Attributes:
        bags: by feature, rows int64 [nnz] and offsets int64 [R + 1], or [N + 1] for a candidate feature.
        candidates: int64 [N], positions of the candidates among those of all requests.
    """

    bags: Mapping[str, tuple[Tensor, Tensor]]
    candidate_dense: Tensor
    request_of_candidate: Tensor
    candidates: Tensor


class RequestBatches:
    """Requests whose ids are mapped to rows once, to be taken in any order.

    Raises:
        TrainingError: for an id without a row, in a table that rejects it.
    """

    def __init__(self, spec: ModelSpec, vocabularies: Mapping[str, Vocabulary], requests: GoldenRequests) -> None:
        schema = FeatureSchema.of(spec)
        known = {
            name: fingerprint_strings([str(word) for word in ids]) if name == "occupations" else np.asarray(ids)
            for name, ids in vocabularies.items()
        }
        names = [feature.name for feature in schema.features]
        bags = KeyedBags.from_lengths(
            np.arange(len(names), dtype=np.int32),
            np.array([requests.lengths[name].size for name in names], np.int64),
            np.concatenate([requests.lengths[name] for name in names]),
            np.concatenate([requests.values[name] for name in names]),
        )
        mapped = IdMapper(schema, known).map(bags)
        if rejected := mapped.rejected:
            name = names[rejected.feature[0]]
            table, size = spec.table_of(name).name, spec.table_of(name).num_embeddings
            raise TrainingError(f"feature {name!r}: id {rejected.id[0]} has no row in table {table!r} of {size} rows")
        bag_starts, self._rows = mapped.bags.bag_starts(), mapped.bags.values
        # A feature's offsets lead into the rows of all features.
        self._bag_offsets = {
            name: mapped.bags.offsets[bag_starts[number] : bag_starts[number + 1] + 1]
            for number, name in enumerate(names)
        }
        self._sides = {feature.name: feature.side for feature in spec.features}
        self._candidate_dense = requests.candidate_dense
        self._offsets = offsets_of(requests.num_candidates)
        self.num_requests = requests.num_requests

    def take(self, chosen: Int64Array) -> RowBatch:
        """Return the chosen requests, int64 [C], as a batch."""
        counts, candidates = positions_in(self._offsets, chosen)
        bags = {}
        for name, side in self._sides.items():
            lengths, positions = positions_in(self._bag_offsets[name], chosen if side == "context" else candidates)
            bags[name] = torch.from_numpy(self._rows[positions]), torch.from_numpy(offsets_of(lengths))
        return RowBatch(
            bags=bags,
            candidate_dense=torch.from_numpy(self._candidate_dense[candidates]),
            request_of_candidate=torch.from_numpy(np.repeat(np.arange(chosen.size), counts)),
            candidates=torch.from_numpy(candidates),
        )


class RankingNetwork(nn.Module):
    """Looks rows up in plain torch, pools them, and runs the ranking model that serves, or one that is given."""

    def __init__(self, spec: ModelSpec, ranking: nn.Module | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.shapes = InputShapes.of(spec)
        self.ranking = build_model(spec) if ranking is None else ranking
        self.tables = nn.ParameterDict(
            {
                table.name: nn.Parameter(torch.randn(table.num_embeddings, table.embedding_dim) * INITIAL_SCALE)
                for table in spec.tables
            }
        )

    @classmethod
    def of(cls, trained: TrainedModel) -> Self:
        """Make a network with a trained model's numbers, to score with."""
        network = cls(trained.spec)
        network.tables.load_state_dict({name: torch.from_numpy(rows) for name, rows in trained.tables.items()})
        network.ranking.load_state_dict(dict(trained.dense))
        return network.eval()

    def forward(self, batch: RowBatch) -> Tensor:
        """Return logits [N]."""
        logits: Tensor = self.ranking(self.inputs(batch))
        return logits

    def inputs(self, batch: RowBatch) -> RankingInputs:
        """Make the ranking model's inputs."""
        sequences = {name: self._sequence(name, *batch.bags[name]) for name in self.shapes.sequence_dims}
        # Context features have a bag a request; without any of them nobody reads more rows than this.
        shared = [batch.bags[name][1].numel() - 1 for name in (*self.shapes.context.features, *sequences)]
        num_requests = max(shared, default=int(batch.request_of_candidate.max()) + 1)
        context = self._matrix(self.shapes.context, batch, torch.empty(num_requests, 0))
        candidates = self._matrix(self.shapes.candidate, batch, batch.candidate_dense)
        return RankingInputs(context, candidates, sequences, batch.request_of_candidate)

    def _matrix(self, side: SideShapes, batch: RowBatch, dense: Tensor) -> Tensor:
        pooled = []
        for name in side.features:
            rows, offsets = batch.bags[name]
            mode = self.spec.pooling_of(name)
            pooled.append(F.embedding_bag(rows, self._table(name), offsets, mode=mode, include_last_offset=True))
        embeddings = F.dropout(torch.cat([*pooled, dense[:, :0]], dim=1), DROPOUT, self.training)
        return F.pad(torch.cat([embeddings, dense], dim=1), (0, side.padded_width - side.width))

    def _table(self, feature: str) -> Tensor:
        rows: Tensor = self.tables[self.spec.table_of(feature).name]
        return rows

    def _sequence(self, feature: str, rows: Tensor, offsets: Tensor) -> SequenceInput:
        lengths = offsets.diff()
        sequences = list(torch.split(self._table(feature)[rows], lengths.tolist()))
        padded = pad_sequence(sequences, batch_first=True)
        mask = torch.arange(padded.shape[1]) < lengths.unsqueeze(1)
        if self.training:
            mask &= torch.rand(mask.shape) >= DROPOUT
        return SequenceInput(padded, mask)


def train(
    dataset: FilmsDataset,
    spec: ModelSpec,
    *,
    seed: int = 0,
    epochs: int = DEFAULT_EPOCHS,
    progress: Progress = no_progress,
) -> TrainedModel:
    """Train a model that `films_spec` describes on the dataset's training part, which is seen `epochs` times.

    The seed is that of the rows and weights at the beginning, the order of batches, and dropout.

    Raises:
        RankingModelError: if the description's dense model is not valid.
    """
    vocabularies = films_vocabularies(dataset.interactions, spec)
    labelled = training_requests(dataset, spec)
    batches = RequestBatches(spec, vocabularies, labelled.requests)
    labels, draw = torch.from_numpy(labelled.labels), np.random.default_rng(seed)
    # The caller's random state is left as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = RankingNetwork(spec).train()
        optimizer = torch.optim.AdamW(
            [
                {"params": list(network.ranking.parameters()), "weight_decay": DENSE_WEIGHT_DECAY},
                {"params": list(network.tables.parameters()), "weight_decay": TABLE_WEIGHT_DECAY},
            ],
            lr=LEARNING_RATE,
        )
        batches_per_epoch = -(-batches.num_requests // REQUESTS_PER_BATCH)
        steps, done = epochs * batches_per_epoch, 0
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.2)
        for _ in range(epochs):
            for chosen in np.array_split(draw.permutation(batches.num_requests), batches_per_epoch):
                batch = batches.take(chosen)
                _make_some_unknown(spec, batch)
                loss = F.binary_cross_entropy_with_logits(network(batch), labels[batch.candidates])
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                schedule.step()
                done += 1
                progress("training", done, steps)
    return TrainedModel(
        spec=spec,
        tables={name: rows.detach().numpy() for name, rows in network.tables.items()},
        dense={name: tensor.detach().clone() for name, tensor in network.ranking.state_dict().items()},
        vocabularies=vocabularies,
    )


def _make_some_unknown(spec: ModelSpec, batch: RowBatch) -> None:
    """Give some ids the default row, so that it learns what to expect of an id that nobody has seen."""
    for feature, (rows, _) in batch.bags.items():
        table = spec.table_of(feature)
        if isinstance(table.id_mapping, VocabularyMapping) and table.unknown_id == "default_row":
            rows[torch.rand(rows.shape) < UNKNOWN_SHARE] = table.default_row


def float32_scores(trained: TrainedModel, requests: GoldenRequests) -> Float32Array:
    """Score requests without engine or quantisation: float32 [N], within (0, 1).

    Raises:
        TrainingError: for an id without a row, in a table that rejects it.
    """
    network = RankingNetwork.of(trained)
    batches = RequestBatches(trained.spec, trained.vocabularies, requests)
    with torch.inference_mode():
        parts = torch.split(torch.arange(batches.num_requests), _REQUESTS_PER_SCORING)
        return torch.cat([torch.sigmoid(network(batches.take(part.numpy()))) for part in parts]).numpy()


@dataclass(frozen=True, slots=True, eq=False)
class TrainedVersion:
    """A version in the store, and the training that it came from."""

    dataset: FilmsDataset
    trained: TrainedModel
    folder: Path


@dataclass(frozen=True, slots=True, eq=False)
class Expectation:
    """What served answers to the test part's requests are compared with.

    Attributes:
        scores: float32 [N], of the float32 model in this process; `auc_fp32` is theirs.
        auc_item_mean: of the baseline that scores a film by its mean training label.
    """

    labelled: LabelledRequests
    scores: Float32Array
    auc_fp32: float
    auc_item_mean: float


def read_interactions(movielens: Path | None, ratings: int, seed: int) -> Interactions:
    """Read MovieLens from a folder, or generate ratings. Raises DatasetError."""
    return generate_interactions(ratings, seed=seed) if movielens is None else read_movielens(movielens)


def train_version(
    interactions: Interactions,
    store: Path,
    *,
    seed: int,
    epochs: int | None = None,
    options: FilmsOptions | None = None,
    bucketing: Bucketing = "mixed",
    on_stage: Callable[[str], None] = lambda stage: None,
    progress: Progress = no_progress,
) -> TrainedVersion:
    """Train a model and write it as the next version into a store.

    The seed is that of the split and the training; `bucketing` is how rows lie in their files; `on_stage` is told the
    end of the stages `train` and `export`.

    Raises:
        TrainingError, ExportError: as `FilmsDataset.split`, `train` and `export_snapshot`.
    """
    dataset = FilmsDataset.split(interactions, seed=seed)
    spec = with_bucketing(films_spec(interactions, options), bucketing)
    trained = train(dataset, spec, seed=seed, epochs=epochs or DEFAULT_EPOCHS, progress=progress)
    on_stage("train")
    metadata = {"source": interactions.source, "seed": str(seed)}
    folder = export_trained(trained, dataset, store, metadata=metadata, progress=progress)
    on_stage("export")
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

    Its golden requests are the first of the test part with the scores of the float32 model, and the scores that a
    server gives may differ by as much as its coarsest row format needs.
    """
    requests = evaluation_requests(dataset, trained.spec, GOLDEN_REQUESTS).requests
    return export_snapshot(
        store,
        trained.spec,
        rows={name: rows_of(rows) for name, rows in trained.tables.items()},
        dense=trained.dense,
        vocabularies=trained.vocabularies,
        golden=replace(requests, scores=float32_scores(trained, requests)),
        golden_tolerance=max(GOLDEN_TOLERANCES[table.dtype] for table in trained.spec.tables),
        metadata=metadata,
        progress=progress,
    )


def expectation(version: TrainedVersion) -> Expectation:
    """Rank the test part with the float32 model in this process, and with the baseline."""
    labelled = evaluation_requests(version.dataset, version.trained.spec)
    scores = float32_scores(version.trained, labelled.requests)
    baseline = film_mean_scores(version.dataset, labelled.samples)
    return Expectation(labelled, scores, auc(labelled.labels, scores), auc(labelled.labels, baseline))


def film_mean_scores(dataset: FilmsDataset, samples: Int64Array) -> Float32Array:
    """Score samples, int64 [n], by the mean training label of their film; a film without one gets the overall mean."""
    films, labels = dataset.interactions.film_index, dataset.labels[dataset.train]
    num_films = dataset.interactions.films.ids.size
    counts = np.bincount(films[dataset.train], minlength=num_films)
    sums = np.bincount(films[dataset.train], labels, num_films)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), labels.mean())
    return means[films[samples]].astype(np.float32)


def auc(labels: npt.NDArray[Any], scores: npt.NDArray[np.floating]) -> float:
    """Return the share of pairs of a label above 0.5 and another in which the first scores higher; a tie counts half.

    Raises:
        TrainingError: if a score is not finite, or one of the two classes is not there.
    """
    if not np.isfinite(scores).all():
        raise TrainingError("auc: scores hold NaN or inf")
    positive, negative = scores[labels > 0.5], np.sort(scores[labels <= 0.5])
    if not positive.size or not negative.size:
        raise TrainingError(f"auc: {positive.size} positive and {negative.size} negative labels; both are needed")
    # Twice the negatives below each positive, ties counting once.
    below = np.searchsorted(negative, positive, "left") + np.searchsorted(negative, positive, "right")
    return float(below.sum()) / (2 * positive.size * negative.size)
