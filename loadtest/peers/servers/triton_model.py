"""The model in Triton's Python backend. Triton forms the batches; each worker is one of these, in its own process."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import triton_python_backend_utils as triton
from torch_model import Scorer

NO_CONTEXT = (np.zeros(0, np.int64), np.zeros((1, 0), np.int32), np.zeros((1, 0), np.float32))


class TritonPythonModel:
    """One instance."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model."""
        self._scorer = Scorer(os.environ["PEER_WEIGHTS"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Score the requests of a batch together."""
        sides = [(_side(request, "context_") or NO_CONTEXT, _side(request, "")) for request in requests]
        scores = [triton.Tensor("scores", np.ascontiguousarray(each[None])) for each in self._scorer.scores(sides)]
        return [triton.InferenceResponse([each]) for each in scores]


def _side(request: Any, prefix: str) -> Any:
    """Return ids, lengths and dense inputs, each the only item of a batch; None if they were not sent."""
    tensors = [triton.get_input_tensor_by_name(request, prefix + name) for name in ("ids", "lengths", "dense")]
    return None if tensors[0] is None else tuple(tensor.as_numpy()[0] for tensor in tensors)
