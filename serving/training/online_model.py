"""What is trained online on ratings, and how: settings, tables, dense weights in rows, and the gradients of a step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from loader.description import ModelDescription, TableDescription
from loader.snapshot.manifest import DenseModelSpec, FeatureSpec, ModelSpec
from loader.snapshot.tables import Frozen, RowDtype
from serving.models.inputs import InputShapes, RankingInputs
from serving.models.ranking_models import build_model
from shard_node.bags import Float32Array, Int64Array
from shard_node.training.clocks import ConsistencyText
from shard_node.training.row_optimizers import OptimizerKind, RowOptimizer

USERS: Final = "users"
FILMS: Final = "films"
FEATURES: Final = {USERS: "user_id", FILMS: "film_id"}
"""By table."""
FIELDS: Final = {USERS: "user", FILMS: "film"}
"""Of a rating, by table."""
DENSE: Final = "dense"
"""The table of servers that have the dense weights, too."""
VERSION: Final = 1
"""Of the model, that servers begin with."""
DENSE_DIM: Final = 64
DENSE_SCALE: Final = np.float32(1 / 32)
"""Weights are so much of what is in their rows: steps of one learning rate are that much smaller for them."""


def ratings_spec(model: str, dim: int, capacity: int, dtype: RowDtype, dense_rows: int = 0) -> ModelSpec:
    """Describe a model of two tables with keys, and with `dense_rows` another one for the rows of dense weights."""
    shared: dict[str, Any] = {"keys": "int64", "capacity": capacity, "embedding_dim": dim, "dtype": dtype}
    tables = [TableDescription(name=name, feature_names=(of,), **shared) for name, of in FEATURES.items()]
    features = [FeatureSpec(name="user_id", side="context"), FeatureSpec(name="film_id", side="candidate")]
    if dense_rows:
        shared = {"num_embeddings": dense_rows, "embedding_dim": DENSE_DIM, "dtype": dtype}
        tables.append(TableDescription(name=DENSE, feature_names=("weights",), **shared))
        features.append(FeatureSpec(name="weights", side="candidate"))
    dense = DenseModelSpec(kind="dcn_v2", config={"num_cross_layers": 2, "deep": [32]})
    return ModelDescription(model=model, tables=tuple(tables), features=tuple(features), dense_model=dense).compiled()


class StepResult(NamedTuple):
    """What a step of one worker comes to: scores, float32 [n], before it is learned, the sum of losses, and gradients.

    `gradients` are by table, float32 [rows of the table that were given, dim].
    """

    scores: Float32Array
    loss: float
    gradients: Mapping[str, Float32Array]


class DenseWeights:
    """A ranking model whose weights are trained as rows of 64 numbers, by the optimizer of all other rows.

    Attributes:
        rows: float32 [R, 64], the weights divided by `DENSE_SCALE`; zeros behind the last one.
        gradients: float32 [R, 64], of the last step.
        state: of the optimizer, beside each row.
        step: the last one that is in the rows.
    """

    def __init__(self, spec: ModelSpec, seed: int, optimizer: RowOptimizer) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._model = build_model(spec)
        self._shapes, self._optimizer, self.step = InputShapes.of(spec), optimizer, 0
        parameters = list(self._model.parameters())
        shape = -(-sum(parameter.numel() for parameter in parameters) // DENSE_DIM), DENSE_DIM
        self._weights, self.gradients = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        flat, of_flat = (torch.from_numpy(array.reshape(-1)) for array in (self._weights, self.gradients))
        start = 0
        for parameter in parameters:
            end = start + parameter.numel()
            flat[start:end] = parameter.detach().reshape(-1)
            parameter.data, parameter.grad = flat[start:end].view_as(parameter), of_flat[start:end].view_as(parameter)
            start = end
        self.rows = self._weights / DENSE_SCALE
        self.state = np.zeros((shape[0], optimizer.state_width(DENSE_DIM)), np.float32)

    def saved(self) -> dict[str, npt.NDArray[Any]]:
        """Return what `restore` reads."""
        return {"rows": self.rows, "state": self.state, "step": np.array([self.step])}

    def restore(self, saved: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over what `saved` returned."""
        self.rows[:], self.state[:], self.step = saved["rows"], saved["state"], int(saved["step"][0])

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of the weights, by the names that versions have."""
        np.multiply(self.rows, DENSE_SCALE, out=self._weights)
        return {name: tensor.detach().clone() for name, tensor in self._model.state_dict().items()}

    def apply(self, gradients: Float32Array, step: int) -> None:
        """Update the rows by a step's gradients, float32 [R, 64]."""
        self._optimizer.update(self.rows, self.state, gradients)
        self.step = step

    def logits(self, users: Tensor, films: Tensor) -> Tensor:
        """Return logits, [n], of users and films, float32 [n, dim] each."""
        np.multiply(self.rows, DENSE_SCALE, out=self._weights)
        each = torch.arange(users.shape[0])
        inputs = RankingInputs.of(self._shapes, {FEATURES[USERS]: users, FEATURES[FILMS]: films}, each)
        return self._model.forward(inputs)

    def learn(
        self, rows: Mapping[str, Float32Array], index: Mapping[str, Int64Array], labels: Float32Array, share: float
    ) -> StepResult:
        """Compute the gradients of `share` times the sum of losses (log loss) over n ratings; the weights stay.

        `rows` are of tables, float32 [rows, dim], `index` which of them each rating has, int64 [n]; labels float32 [n].
        """
        leaves = {name: torch.from_numpy(of_table).requires_grad_() for name, of_table in rows.items()}
        vectors = {name: F.embedding(torch.from_numpy(index[name]), leaf) for name, leaf in leaves.items()}
        self.gradients.fill(0)
        logits = self.logits(vectors[USERS], vectors[FILMS])
        loss = F.binary_cross_entropy_with_logits(logits, torch.from_numpy(labels), reduction="sum")
        (share * loss).backward()  # type: ignore[no-untyped-call]
        self.gradients *= DENSE_SCALE
        gradients = {name: leaf.grad.numpy() for name, leaf in leaves.items() if leaf.grad is not None}
        return StepResult(torch.sigmoid(logits.detach()).numpy(), float(loss.detach()), gradients)


class OnlineConfig(Frozen):
    """What is trained, and how. All of it belongs to the folder, but for `worker_timeout_s` and the last three.

    Attributes:
        batch: ratings that a worker reads for a step.
        dense: where dense weights are: `allreduce`, a copy in each worker; `server`, rows of the shard nodes. By
            default the first for `bsp`, which alone waits for all, else the second.
        capacity: keys that each of the two tables can have.
        delays_s: added to each step of the workers, by number.
        over_tcp: servers listen on ports of 127.0.0.1 in place of sockets in a folder.
    """

    folder: Path
    model: str = "ratings"
    workers: int = Field(default=2, ge=1, le=64)
    servers: int = Field(default=2, ge=1, le=64)
    consistency: ConsistencyText = "bsp"
    dense: Literal["allreduce", "server"] | None = None
    optimizer: OptimizerKind = "adagrad"
    lr: float = Field(default=0.2, gt=0)
    init_scale: float = Field(default=0.02, ge=0)
    dim: int = Field(default=16, ge=1, le=512)
    batch: int = Field(default=32, ge=1, le=65_536)
    capacity: int = Field(default=1 << 20, ge=1)
    seed: int = 0
    worker_timeout_s: float = Field(default=30.0, gt=0)
    write_dense_s: float = Field(default=10.0, gt=0)
    delays_s: tuple[float, ...] = ()
    over_tcp: bool = False

    @model_validator(mode="after")
    def _check_dense(self) -> Self:
        if self.dense == "allreduce" and self.consistency != "bsp":
            raise ValueError(f"--dense allreduce waits for all workers in each step: not with {self.consistency}")
        return self

    @property
    def dense_by(self) -> Literal["allreduce", "server"]:
        """Where dense weights are."""
        return self.dense or ("allreduce" if self.consistency == "bsp" else "server")

    @property
    def spec(self) -> ModelSpec:
        """What the model is made of, in float32."""
        return ratings_spec(self.model, self.dim, self.capacity, "fp32")

    @property
    def trained_spec(self) -> ModelSpec:
        """What servers train: with the dense weights, where these have them."""
        if self.dense_by == "allreduce":
            return self.spec
        rows = DenseWeights(self.spec, self.seed, self.row_optimizer).rows.shape[0]
        return ratings_spec(self.model, self.dim, self.capacity, "fp32", rows)

    @property
    def row_optimizer(self) -> RowOptimizer:
        """The optimizer of all rows."""
        return RowOptimizer(kind=self.optimizer, lr=self.lr)
