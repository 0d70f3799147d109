"""The demo's stages before anything serves: data, training, export, and what the float32 model answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from loader.golden import GoldenRequests
from loader.manifest import Bucketing, ModelSpec
from loader.progress import Progress, no_progress
from loader.reader import Snapshot
from serving.demo.config import DemoConfig
from serving.training.dataset import FilmsDataset
from serving.training.description import FilmsOptions, films_spec
from serving.training.export import export_trained, golden_requests
from serving.training.float32_ranker import Float32Ranker
from serving.training.interactions import Interactions
from serving.training.metrics import auc, item_mean_scores
from serving.training.movielens import read_movielens
from serving.training.requests import LabelledRequests, evaluation_requests
from serving.training.synthetic import SyntheticOptions, generate_interactions
from serving.training.trainer import TrainedModel, TrainingOptions, train
from shard_node.bags import Float32Array


@dataclass(slots=True)
class Stopwatch:
    """Seconds of each stage, by name."""

    clock: Callable[[], float] = time.monotonic
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a block."""
        start = self.clock()
        try:
            yield
        finally:
            self.seconds[name] = round(self.clock() - start, 3)


@dataclass(frozen=True, slots=True, eq=False)
class TrainedVersion:
    """A version in the store, and the training that it came from."""

    dataset: FilmsDataset
    trained: TrainedModel
    folder: Path


@dataclass(frozen=True, slots=True, eq=False)
class Expectation:
    """What the served answers are compared with.

    Attributes:
        labelled: the requests of the test part, with their labels.
        scores: float32 [N], of the float32 model in this process.
        auc_fp32: of these scores.
        auc_item_mean: of the baseline that scores a film by its mean training label.
    """

    labelled: LabelledRequests
    scores: Float32Array
    auc_fp32: float
    auc_item_mean: float

    @property
    def requests(self) -> GoldenRequests:
        """The requests alone."""
        return self.labelled.requests


def read_interactions(movielens: Path | None, ratings: int, seed: int) -> Interactions:
    """MovieLens from a folder, or generated interactions. Raises DatasetError."""
    if movielens is not None:
        return read_movielens(movielens)
    return generate_interactions(SyntheticOptions(num_ratings=ratings, seed=seed))


def train_version(
    interactions: Interactions,
    store: Path,
    *,
    seed: int,
    epochs: int | None = None,
    options: FilmsOptions | None = None,
    bucketing: Bucketing = "hash",
    stopwatch: Stopwatch | None = None,
    progress: Progress = no_progress,
) -> TrainedVersion:
    """Trains the demo's model and writes it as the next version into a store.

    Args:
        interactions: the data.
        store: the store's folder.
        seed: of the split and the training.
        epochs: passes over the training part; None for the trainer's default.
        options: what the model is made of.
        bucketing: how rows lie in their files; sharding `range` needs `range`.
        stopwatch: told how long each stage took.
        progress: told how far training and export are.

    Raises:
        TrainingError, ExportError: as `FilmsDataset.split`, `train` and `export_trained`.
    """
    stopwatch = stopwatch or Stopwatch()
    with stopwatch.stage("train"):
        dataset = FilmsDataset.split(interactions, seed=seed)
        spec = with_bucketing(films_spec(interactions, options), bucketing)
        training = TrainingOptions(seed=seed) if epochs is None else TrainingOptions(seed=seed, epochs=epochs)
        trained = train(dataset, spec, training, progress)
    with stopwatch.stage("export"):
        folder = export_trained(
            trained,
            store,
            golden=golden_requests(trained, dataset),
            metadata={"source": interactions.source, "seed": str(seed)},
            progress=progress,
        )
    return TrainedVersion(dataset, trained, folder)


def with_bucketing(spec: ModelSpec, bucketing: Bucketing) -> ModelSpec:
    """The same model with its rows stored in another order."""
    tables = tuple(table.model_copy(update={"bucketing": bucketing}) for table in spec.tables)
    return spec.model_copy(update={"tables": tables})


def expectation(version: TrainedVersion) -> Expectation:
    """Ranks the test part with the float32 model in this process, and with the baseline."""
    dataset = version.dataset
    data = dataset.interactions
    labelled = evaluation_requests(dataset, version.trained.spec)
    scores = Float32Ranker(version.trained).score(labelled.requests)
    baseline = item_mean_scores(
        data.film_index[dataset.train],
        dataset.labels[dataset.train],
        data.film_index[labelled.samples],
        data.films.ids.size,
    )
    return Expectation(labelled, scores, auc(labelled.labels, scores), auc(labelled.labels, baseline))


def bucketing_for(config: DemoConfig) -> Bucketing:
    """The row order that the demo's sharding needs."""
    return "range" if config.sharding == "range" else "hash"


def snapshot_sizes(folder: Path) -> tuple[int, int]:
    """(bytes of the snapshot, bytes of its rows as float32)."""
    snapshot = Snapshot.open(folder, verify=False)
    return snapshot.size_bytes, snapshot.float32_bytes
