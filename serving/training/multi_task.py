"""A model of one's own: MMoE over two tasks, trained, exported by `torch.export`, served, and compared with itself.

`python -m serving.training.multi_task --store models` does all of it; docs/serving-your-own-model.md walks through it.
A click is a film that was liked (4 stars or more), a buy one that got all 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import click
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from loader.snapshot.golden import GoldenRequests
from loader.snapshot.manifest import ExportedModelSpec, ModelSpec, OutputSpec, PooledInput, RequestOfCandidate
from loader.snapshot.row_source import rows_of
from loader.snapshot.writer import export_snapshot
from serving.embedded import Ranker
from serving.models.exported import check_program, export_program
from serving.models.inputs import InputShapes, RankingInputs
from serving.training.dataset import (
    FilmsDataset,
    FilmsOptions,
    LabelledRequests,
    evaluation_requests,
    films_spec,
    films_vocabularies,
    training_requests,
)
from serving.training.interactions import Interactions
from serving.training.network import RankingNetwork, RequestBatches
from serving.training.trainer import (
    GOLDEN_REQUESTS,
    REQUESTS_PER_BATCH,
    auc,
    read_interactions,
)
from shard_node.bags import Float32Array

TASKS: Final = ("click", "buy")
BUY_RATING: Final = 5
NUM_EXPERTS: Final = 4
GOLDEN_TOLERANCE: Final = 1e-4
LEARNING_RATE: Final = 0.005
WEIGHT_DECAY: Final = 0.5


class Mmoe(nn.Module):
    """Multi-gate mixture of experts (Ma et al., KDD 2018): all tasks share experts, each mixes them by its own gate.

    The context comes once a request, so experts and gates multiply it once a request, whatever they are asked to rank.
    """

    def __init__(self, context_width: int, candidate_width: int, expert_width: int = 32, tower_width: int = 16) -> None:
        super().__init__()
        widths = {"expert": NUM_EXPERTS * expert_width, **dict.fromkeys(TASKS, NUM_EXPERTS)}
        self.of_context = nn.ModuleDict({name: nn.Linear(context_width, width) for name, width in widths.items()})
        self.of_candidates = nn.ModuleDict(
            {name: nn.Linear(candidate_width, width, bias=False) for name, width in widths.items()}
        )
        self.towers = nn.ModuleDict(
            {
                task: nn.Sequential(nn.Linear(expert_width, tower_width), nn.ReLU(), nn.Linear(tower_width, 1))
                for task in TASKS
            }
        )

    def forward(self, context: Tensor, candidates: Tensor, request_of_candidate: Tensor) -> dict[str, Tensor]:
        """Map contexts [R, ...] and candidates [N, ...] to each task's logits [N]; `request_of_candidate` is [N]."""

        def read(name: str) -> Tensor:
            shared: Tensor = self.of_context[name](context)
            own: Tensor = self.of_candidates[name](candidates)
            return own + shared.index_select(0, request_of_candidate)

        experts = torch.unflatten(torch.relu(read("expert")), 1, (NUM_EXPERTS, -1))
        logits = {}
        for task in TASKS:
            gate = torch.softmax(read(task), dim=1)
            logits[task] = self.towers[task]((gate.unsqueeze(2) * experts).sum(1)).squeeze(1)
        return logits


class OfInputs(nn.Module):
    """MMoE over what training assembles, in the columns that the description gives to its arguments."""

    def __init__(self, shapes: InputShapes) -> None:
        super().__init__()
        self.widths = shapes.context.embedding_width, shapes.candidate.embedding_width
        self.mmoe = Mmoe(*self.widths)

    def forward(self, inputs: RankingInputs) -> Tensor:
        """Give logits [tasks, N]."""
        context, candidates = inputs.context[:, : self.widths[0]], inputs.candidates[:, : self.widths[1]]
        logits = self.mmoe(context, candidates, inputs.request_of_candidate)
        return torch.stack([logits[task] for task in TASKS])


def mmoe_spec(interactions: Interactions, model: str = "films_mmoe") -> ModelSpec:
    """Describe it: what its arguments get, and what its outputs mean. A buy counts as much as four clicks."""
    # Rows are stored as float32, so that what is served can be compared with what was trained.
    spec = films_spec(interactions, FilmsOptions(model=model, kind="mlp", dtype="fp32"))
    shapes = InputShapes.of(spec)
    described = ExportedModelSpec(
        inputs={
            "context": PooledInput(features=shapes.context.features, per="request"),
            "candidates": PooledInput(features=shapes.candidate.features),
            "request_of_candidate": RequestOfCandidate(),
        },
        outputs={
            "click": OutputSpec(activation="sigmoid", weight=0.2),
            "buy": OutputSpec(activation="sigmoid", weight=0.8),
        },
    )
    return spec.model_copy(update={"dense_model": described})


@dataclass(frozen=True, slots=True, eq=False)
class TrainedTasks:
    """A trained network, and requests of the test part with their labels, float32 [tasks, N]."""

    spec: ModelSpec
    dataset: FilmsDataset
    network: RankingNetwork
    test: LabelledRequests
    labels: Float32Array


def labels_of(dataset: FilmsDataset, labelled: LabelledRequests) -> Float32Array:
    """Return float32 [tasks, N]: was it clicked, was it bought."""
    bought = dataset.interactions.ratings[labelled.samples] >= BUY_RATING
    return np.stack([labelled.labels, bought.astype(np.float32)])


def train_tasks(interactions: Interactions, *, seed: int, epochs: int) -> TrainedTasks:
    """Train both tasks together. Raises as `FilmsDataset.split`."""
    dataset, spec = FilmsDataset.split(interactions, seed=seed), mmoe_spec(interactions)
    labelled = training_requests(dataset, spec)
    batches = RequestBatches(spec, films_vocabularies(interactions, spec), labelled.requests)
    labels, draw = torch.from_numpy(labels_of(dataset, labelled)), np.random.default_rng(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = RankingNetwork(spec, OfInputs(InputShapes.of(spec))).train()
        optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        per_epoch = -(-batches.num_requests // REQUESTS_PER_BATCH)
        for _ in range(epochs):
            for chosen in np.array_split(draw.permutation(batches.num_requests), per_epoch):
                batch = batches.take(chosen)
                loss = F.binary_cross_entropy_with_logits(network(batch), labels[:, batch.candidates])
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
    test = evaluation_requests(dataset, spec)
    return TrainedTasks(spec, dataset, network.eval(), test, labels_of(dataset, test))


def eager_outputs(trained: TrainedTasks, requests: GoldenRequests) -> Float32Array:
    """Compute both tasks' probabilities in plain torch: float32 [tasks, N]."""
    vocabularies = films_vocabularies(trained.dataset.interactions, trained.spec)
    batches = RequestBatches(trained.spec, vocabularies, requests)
    with torch.inference_mode():
        found: Float32Array = torch.sigmoid(trained.network(batches.take(np.arange(batches.num_requests)))).numpy()
    return found


def with_outputs(trained: TrainedTasks, requests: GoldenRequests) -> GoldenRequests:
    """Give requests the outputs, and the weighted score, that training computes."""
    assert isinstance(trained.spec.dense_model, ExportedModelSpec)
    outputs = dict(zip(TASKS, eager_outputs(trained, requests), strict=True))
    weights = {name: told.weight for name, told in trained.spec.dense_model.outputs.items()}
    scores = sum(np.float32(weights[name]) * outputs[name] for name in TASKS)
    return replace(requests, scores=np.asarray(scores, np.float32), outputs=outputs)


def export_tasks(trained: TrainedTasks, store: Path) -> Path:
    """Export the network as a program, try it as a server would, and write the next version. Returns its folder."""
    ranking, spec = trained.network.ranking, trained.spec
    assert isinstance(ranking, OfInputs)
    program = export_program(spec, ranking.mmoe)
    check_program(spec, program)
    golden = evaluation_requests(trained.dataset, spec, GOLDEN_REQUESTS).requests
    return export_snapshot(
        store,
        spec,
        rows={name: rows_of(rows.detach().numpy()) for name, rows in trained.network.tables.items()},
        dense=program,
        vocabularies=films_vocabularies(trained.dataset.interactions, spec),
        golden=with_outputs(trained, golden),
        golden_tolerance=GOLDEN_TOLERANCE,
    )


def served_outputs(folder: Path, requests: GoldenRequests) -> tuple[Float32Array, list[Mapping[str, object]]]:
    """Rank requests by the version as it is served: outputs float32 [tasks, N], and the answers."""
    answers: list[Mapping[str, object]] = []
    # Its own program, written a moment ago: nobody else's code.
    with Ranker.open(folder, trust_exported=True) as ranker:
        for number in range(requests.num_requests):
            one = requests.request(number)
            sparse = {name: np.split(ids, np.cumsum(one.lengths[name])[:-1]) for name, ids in one.values.items()}
            context = {name: sparse[name][0].tolist() for name in ("user_id", "history")}
            candidates = {name: [bag.tolist() for bag in sparse[name]] for name in ("film_id", "genre")}
            answers.append(ranker.rank({"context": {"sparse": context}, "candidates": {"sparse": candidates}}))
    outputs = [[answer["outputs"][task] for answer in answers] for task in TASKS]  # type: ignore[index]
    return np.array([np.concatenate(one) for one in outputs], np.float32), answers


@click.command()
@click.option("--store", help="Where the version is written.", type=click.Path(path_type=Path), required=True)
@click.option(
    "--movielens", help="Folder with MovieLens 100K; else ratings are made up.", type=click.Path(path_type=Path)
)
@click.option("--ratings", help="How many are made up.", type=click.IntRange(1000, 10_000_000), default=40_000)
@click.option("--epochs", help="Passes over the data.", type=click.IntRange(1, 1000), default=12)
@click.option("--seed", help="Of the split and the training.", type=click.IntRange(0, 2**32 - 1), default=0)
def main(store: Path, movielens: Path | None, ratings: int, epochs: int, seed: int) -> None:
    """Train MMoE over two tasks, export it, serve it in this process, and compare."""
    trained = train_tasks(read_interactions(movielens, ratings, seed), seed=seed, epochs=epochs)
    folder = export_tasks(trained, store)
    served, _ = served_outputs(folder, trained.test.requests)
    eager = eager_outputs(trained, trained.test.requests)
    for task, labels, found in zip(TASKS, trained.labels, served, strict=True):
        click.echo(f"{task}: AUC {auc(labels, found):.4f} as served")
    click.echo(f"served and eager differ by up to {np.abs(served - eager).max():.2g}")
    click.echo(f"wrote {folder}; serve it:")
    click.echo(f"  shardrank serve --snapshot {folder} --trust-exported")


if __name__ == "__main__":
    main()
